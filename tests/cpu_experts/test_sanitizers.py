"""The tests that need numpy alone, on a library built with sanitizers: forwards, arguments, handles, fuzzed calls and nodes.

Python itself is not built with them, so their runtime is loaded before it. Tiles are emulated: AddressSanitizer does not see what
the instructions read and write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cpu_experts import library

pytestmark = [pytest.mark.slow, pytest.mark.deep]
HERE = Path(__file__).parent
# -O1: at -O3 the compiler takes twelve times as long over all that is checked. None is a build type without flags of its own.
BUILD = ("-DCPU_EXPERTS_EMULATE_TILES=ON", "-DCMAKE_BUILD_TYPE=None")
ASAN = (*BUILD, "-DCMAKE_CXX_FLAGS=-O1 -fsanitize=address,undefined -fno-sanitize-recover=all")
TSAN = (*BUILD, "-DCMAKE_CXX_FLAGS=-O1 -fsanitize=thread")
# Less what takes long with emulated tiles, and what starts a Python that loads another build.
LONG = ("repeated", "skewed", "cut_the_panels", "every_size", "4096", "1000", "150", "exits", "one_core", "several_nodes")
LONG += ("waits", "cannot_be_had")
BOUNDS = " and ".join(f"not {name}" for name in LONG)
# ThreadSanitizer itself cannot start threads in a child.
RACES = {
    "test_fuzz.py": "fuzz",
    "test_handles.py": "not exits and not one_core and not forked and not waits",
    "test_forward.py": "repeated and avx and not _k",
    "test_numa.py": "three",
}


def preloaded(name: str, flag: str, folder: Path) -> str:
    """A sanitizer's shared runtime, or a skip where the compiler has none or its programs do not run here.

    With the C++ library, for the runtime looks for what throws exceptions as it starts: other extension modules throw some."""
    compiler = os.environ.get("CXX") or "c++"
    named = ([compiler, f"-print-file-name={each}"] for each in (name, "libstdc++.so.6"))
    found = [subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in named]
    source, program = folder / "empty.cpp", folder / "empty"
    source.write_text("int main() {}\n")
    built = subprocess.run([compiler, flag, str(source), "-o", str(program)], capture_output=True)
    if not Path(found[0]).is_file() or built.returncode or subprocess.run([str(program)], capture_output=True).returncode:
        pytest.skip(f"{compiler} has no {flag} that works here")
    return " ".join(found)


def run(folder: Path, preload: str, file: str, chosen: str, temporary: Path, **options: str) -> None:
    """The chosen tests of a file; what the runtime reports ends the process, or is an exit status of its own."""
    environment = os.environ | {"CPU_EXPERTS_TESTED": str(folder / library.NAME), "LD_PRELOAD": preload, "DEEP": "1"} | options
    flags = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={temporary}", "-k", chosen]
    command = [sys.executable, *flags, str(HERE / file)]
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "Sanitizer" not in done.stderr


@pytest.mark.parametrize("file", ["test_arguments.py", "test_blocks.py", *RACES])
def test_addresses_and_undefined_behaviour(builds, tmp_path, file):
    preload = preloaded("libasan.so", "-fsanitize=address", tmp_path)
    run(builds(*ASAN), preload, file, BOUNDS, tmp_path / "run", ASAN_OPTIONS="detect_leaks=0")


@pytest.mark.parametrize("file", RACES)
def test_threads_do_not_race(builds, tmp_path, file):
    preload = preloaded("libtsan.so", "-fsanitize=thread", tmp_path)
    run(builds(*TSAN), preload, file, RACES[file], tmp_path / "run", TSAN_OPTIONS="exitcode=66")
