"""`python -m cpu_experts.build [folder]`: compiles the libraries with cmake and a C++ compiler, by default into the user's cache.

The library for XLA programs is built with the headers of the installed jaxlib, if there is one. It works with that version of
jaxlib and later ones."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from cpu_experts import intact
from cpu_experts.library import FFI_NAME, NAME, Unsupported, cache_folder, ffi_headers, ffi_name

SOURCE = Path(__file__).parent / "csrc"


def find_cmake() -> str | None:
    """The system's cmake, or the one that pip installed next to this Python."""
    return shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))


def _forget_another_checkout(folder: Path) -> None:
    """cmake refuses a cache of other sources; `--fresh` removes it, but older versions lack that option."""
    cache = folder / "CMakeCache.txt"
    ours = f"CMAKE_HOME_DIRECTORY:INTERNAL={SOURCE}\n"
    if cache.exists() and ours not in cache.read_text(errors="replace"):
        cache.unlink()
        shutil.rmtree(folder / "CMakeFiles", ignore_errors=True)


def build(folder: Path, *options: str, target: str = "all") -> Path:
    """Builds the library in `folder`, with cmake's further options. Raises Unsupported with the end of cmake's output."""
    if (cmake := find_cmake()) is None:
        raise Unsupported(
            "cmake is needed to build cpu_experts: install it (`pip install cmake`) and a C++17 compiler"
        )
    _forget_another_checkout(folder)
    configure = [cmake, "-S", str(SOURCE), "-B", str(folder), *options]
    for command in (configure, [cmake, "--build", str(folder), "--parallel", "--target", target]):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise Unsupported(
                f"building cpu_experts failed: {' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}"
            )
    return folder / NAME


def install(built: Path, place: Path) -> None:
    """Copies a library to its place and adds the seal that intact.py checks. One rename, as other processes may load the file."""
    partial = place.with_name(place.name + ".partial")
    partial.write_bytes(intact.sealed(built.read_bytes()))
    partial.replace(place)
    print(place)


def main(arguments: list[str]) -> int:
    """Exit codes: 0 done, 1 not built, 2 wrong usage."""
    description = "Build the libraries that compute experts on the CPU."
    parser = argparse.ArgumentParser(prog="python -m cpu_experts.build", description=description)
    parser.add_argument(
        "folder", nargs="?", type=Path, default=cache_folder(), help="output folder (%(default)s)"
    )
    target, headers = parser.parse_args(arguments).folder, ffi_headers()
    if target is None:
        print(
            "error: this user has no home folder for a cache: give a folder, or set XDG_CACHE_HOME",
            file=sys.stderr,
        )
        return 1
    try:
        install(
            build(target / "build", f"-DCPU_EXPERTS_FFI_HEADERS={headers or ''}", target="cpu_experts"),
            target / NAME,
        )
        if headers is not None:
            build(target / "build", target="cpu_experts_ffi")
            install(target / "build" / FFI_NAME, target / ffi_name(headers))
    except (Unsupported, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
