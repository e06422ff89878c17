"""`python -m cpu_experts.build [folder]`: compiles the libraries by cmake and a C++ compiler, by default into the user's cache.

That for XLA programs is built where jaxlib is installed, on its headers: it serves that version of jaxlib and later ones."""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from cpu_experts import intact
from cpu_experts.library import FFI_NAME, NAME, Unsupported, cache_folder, ffi_headers, ffi_name

SOURCE = Path(__file__).parent / "csrc"


def find_cmake() -> str | None:
    """That of the system, or the one that pip put beside this Python."""
    return shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))


def _forget_another_checkout(folder: Path) -> None:
    """As `cmake --fresh`, which older ones lack: a cache made of other sources would be refused."""
    cache = folder / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={SOURCE}\n" not in cache.read_text(errors="replace"):
        cache.unlink()
        shutil.rmtree(folder / "CMakeFiles", ignore_errors=True)


def build(folder: Path, *options: str, target: str = "all") -> Path:
    """The library, built in `folder` with further cmake options; raises Unsupported with the end of what cmake said."""
    if (cmake := find_cmake()) is None:
        raise Unsupported("cmake is needed to build cpu_experts: install it (`pip install cmake`) and a C++17 compiler")
    _forget_another_checkout(folder)
    configure = [cmake, "-S", str(SOURCE), "-B", str(folder), *options]
    for command in (configure, [cmake, "--build", str(folder), "--parallel", "--target", target]):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise Unsupported(f"building cpu_experts failed: {' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")
    return folder / NAME


def install(built: Path, place: Path) -> None:
    """Copies a library to its place, with a seal by which `intact` finds damage; in one step, as other processes may load it."""
    partial = place.with_name(place.name + ".partial")
    partial.write_bytes(intact.sealed(built.read_bytes()))
    partial.replace(place)
    print(place)


def main(arguments: list[str]) -> int:
    """Exit codes: 0 done, 1 not built, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m cpu_experts.build", description="Build the libraries of experts on the CPU.")
    parser.add_argument("folder", nargs="?", type=Path, default=cache_folder(), help="Folder to put them in (%(default)s).")
    target, headers = parser.parse_args(arguments).folder, ffi_headers()
    if target is None:
        print("error: this user has no home for a cache: name a folder, or set XDG_CACHE_HOME", file=sys.stderr)
        return 1
    try:
        install(build(target / "build", f"-DCPU_EXPERTS_FFI_HEADERS={headers or ''}", target="cpu_experts"), target / NAME)
        if headers is not None:
            build(target / "build", target="cpu_experts_ffi")
            install(target / "build" / FFI_NAME, target / ffi_name(headers))
    except (Unsupported, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
