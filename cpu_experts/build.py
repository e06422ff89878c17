"""`python -m cpu_experts.build [folder]`: compiles the library by cmake and a C++ compiler, by default into the user's cache."""

import shutil
import subprocess
import sys
from pathlib import Path

from cpu_experts.library import NAME, Unsupported, cache_folder

SOURCE = Path(__file__).parent / "csrc"


def find_cmake() -> str | None:
    """That of the system, or the one that pip put beside this Python."""
    return shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))


def build(folder: Path, *options: str) -> Path:
    """The library, built in `folder` with further cmake options; raises Unsupported with the end of what cmake said."""
    if (cmake := find_cmake()) is None:
        raise Unsupported("cmake is needed to build cpu_experts: install it (`pip install cmake`) and a C++17 compiler")
    for command in ([cmake, "-S", str(SOURCE), "-B", str(folder), *options], [cmake, "--build", str(folder), "--parallel"]):
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
        if done.returncode:
            raise Unsupported(f"building cpu_experts failed: {' '.join(command)}\n{(done.stdout + done.stderr)[-4000:]}")
    return folder / NAME


def main(arguments: list[str]) -> int:
    target = Path(arguments[0]) if arguments else cache_folder()
    try:
        built = build(target / "build")
        partial = target / f"{NAME}.partial"
        shutil.copyfile(built, partial)
        partial.replace(target / NAME)  # in one step: another process may be loading it
    except (Unsupported, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(target / NAME)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
