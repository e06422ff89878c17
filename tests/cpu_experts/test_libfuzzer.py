"""The C ABI under libFuzzer: calls that reach new code are kept and changed again (csrc/tests/fuzz_abi.cpp).

test_fuzz.py calls the same functions at random, from Python, wherever there is no clang."""

import shutil
import subprocess
from pathlib import Path

import pytest

from cpu_experts.build import build, find_cmake

RUNS = 1000


@pytest.fixture
def fuzzer(tmp_path):
    """The program, or a skip where there is no clang or its libFuzzer is not installed."""
    clang = shutil.which("clang++")
    if clang is None or find_cmake() is None:
        pytest.skip("no clang++ or no cmake to build the fuzzer with")
    source, program = tmp_path / "empty.cpp", tmp_path / "empty"
    source.write_text('extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }\n')
    command = [clang, "-fsanitize=fuzzer,address,undefined", str(source), "-o", str(program)]
    built = subprocess.run(command, capture_output=True)
    if built.returncode or subprocess.run([str(program), "-runs=1"], capture_output=True).returncode:
        pytest.skip(f"{clang} has no libFuzzer that works here")
    options = (
        f"-DCMAKE_CXX_COMPILER={clang}",
        "-DCPU_EXPERTS_FUZZ=ON",
        "-DCPU_EXPERTS_EMULATE_TILES=ON",
        "-DCMAKE_BUILD_TYPE=None",
        "-DCMAKE_CXX_FLAGS=-O0",  # at -O1 clang takes a minute longer, and as many calls are made in a second
    )
    return build(tmp_path / "build", *options, target="fuzz_abi").parent / "fuzz_abi"


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.deep
def test_calls_of_any_bytes_neither_crash_nor_hang_nor_write_outside(fuzzer: Path, tmp_path: Path):
    """Scratch of any size that is accepted may be asked for, so there is no limit of memory: of most of it nothing is touched."""
    limits = [f"-runs={RUNS}", "-seed=1", "-timeout=600", "-rss_limit_mb=0", "-max_len=2048", "-len_control=0"]
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    command = [str(fuzzer), *limits, f"-artifact_prefix={tmp_path}/", str(corpus)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=1200)
    assert done.returncode == 0, done.stderr[-8000:]
    assert len([*corpus.iterdir()]) > 20  # it does find its way into the library
