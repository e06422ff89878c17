"""Finding, building and refusing the library; the kernels' own tests."""

import subprocess
import sys

import numpy as np
import pytest

import cpu_experts
from cpu_experts import Unsupported, library
from cpu_experts.build import build


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    monkeypatch.setenv("CPU_EXPERTS_LIBRARY", str(tmp_path / "none.so"))
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def test_a_missing_library_says_where_it_looked_and_how_to_build_it(nowhere):
    assert not cpu_experts.available()
    with pytest.raises(Unsupported, match=r"none\.so.*python -m cpu_experts\.build"):
        cpu_experts.isa()
    with pytest.raises(Unsupported):
        cpu_experts.Experts(*(np.zeros((1, 1, 1), np.float32),) * 3)


def test_what_is_no_library_or_another_one_is_refused(nowhere):
    (nowhere / "none.so").write_bytes(b"\x7fELF" + bytes(100))
    with pytest.raises(Unsupported, match="cannot be loaded"):
        library.load()
    import ctypes.util

    with pytest.raises(Unsupported, match=r"cannot be loaded.*cpu_experts\.build"):
        library.opened(ctypes.util.find_library("c"))


def test_another_abi_is_refused(builds, monkeypatch):
    monkeypatch.setattr(library, "ABI", 99)
    with pytest.raises(Unsupported, match="ABI 2, expected 99"):
        library.opened(builds() / library.NAME)


def test_an_available_library_names_its_instruction_set(builds, monkeypatch):
    monkeypatch.setenv("CPU_EXPERTS_LIBRARY", str(builds() / library.NAME))
    library.load.cache_clear()
    assert cpu_experts.available()
    assert cpu_experts.isa() in library.ISAS[1:]
    library.load.cache_clear()


def test_a_failed_build_shows_what_cmake_said(builds, tmp_path):
    with pytest.raises(Unsupported, match="no such compiler"):
        build(tmp_path, "-DCMAKE_CXX_COMPILER=/no such compiler")


def test_only_the_functions_of_the_header_are_exported(builds):
    done = subprocess.run(
        ["nm", "-D", "--defined-only", str(builds() / library.NAME)], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert {n for n in names if not n.startswith("_Z")} == set(library.SIGNATURES)
    assert not [n for n in names if "cpu_experts" in n and n.startswith("_Z")]


def test_importing_the_package_imports_nothing_but_numpy():
    script = "import sys, cpu_experts; print([m for m in ('jax', 'ml_dtypes', 'torch', 'mla_jax') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SANITIZED = "-DCMAKE_CXX_FLAGS=-fsanitize=address,undefined -fno-sanitize-recover=all"


@pytest.mark.parametrize("options", [(), ("-DCPU_EXPERTS_EMULATE_TILES=ON",), ("-DCPU_EXPERTS_EMULATE_TILES=ON", SANITIZED)])
def test_kernels_stay_within_their_buffers(builds, options):
    """Against pages that may not be touched, on either side, for every number of rows; with sanitizers for what has no page."""
    done = subprocess.run([str(builds(*options) / "test_kernels")], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
