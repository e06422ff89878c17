"""Finding, building and refusing the library; the kernels' own tests."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from test_sanitizers import ASAN

import cpu_experts
from cpu_experts import Unsupported, library
from cpu_experts.build import build, main

pytestmark = pytest.mark.deep

ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    monkeypatch.setenv("CPU_EXPERTS_LIBRARY", str(tmp_path / "none.so"))
    library.load.cache_clear()
    yield tmp_path
    library.load.cache_clear()


def test_a_missing_library_says_where_it_looked_and_how_to_build_it(nowhere):
    cpu_experts._warn.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"none\.so.*python -m cpu_experts\.build"):
        assert not cpu_experts.available()
    with warnings.catch_warnings(action="error"):
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


@pytest.fixture
def homeless(monkeypatch):
    """As a user with a number that the system does not know."""
    for name in ("CPU_EXPERTS_LIBRARY", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])


def test_a_user_without_a_home_has_no_library_there(homeless, monkeypatch, capsys):
    monkeypatch.setattr(library, "__file__", "/nowhere/library.py")
    monkeypatch.setattr(cpu_experts, "load", library.load.__wrapped__)
    cpu_experts._warn.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"looked at /nowhere/libcpu_experts\.so\)"):
        assert not cpu_experts.available()
    assert main([]) == 1
    assert "error: this user has no home" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert library.places()[1] == Path("/cache/cpu_experts/abi2/libcpu_experts.so")


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


ALONE = """
import numpy as np
import cpu_experts
print(cpu_experts.available(), cpu_experts.available())
try:
    cpu_experts.Experts(*(np.zeros((1, 1, 1), np.float32),) * 3)
except cpu_experts.Unsupported as error:
    print("Unsupported:", error)
from cpu_experts.build import main
print(main([]))
"""


def test_without_a_compiler_the_package_imports_and_says_why_it_is_not_available(tmp_path):
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    available, unsupported, status = done.stdout.splitlines()
    assert (available, status) == ("False False", "1")
    assert unsupported.startswith("Unsupported: the library of cpu_experts is not built (looked at")
    assert done.stderr.count("RuntimeWarning: the library of cpu_experts is not built") == 1
    assert "error: " in done.stderr  # no cmake; or beside this Python one that finds no compiler


def test_on_another_architecture_the_portable_kernels_are_built(builds):
    """As cmake sees one, compiled for this processor: no file of its instruction sets is taken."""
    folder = builds("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=riscv64")
    assert library.ISAS[library.opened(folder / library.NAME).cpu_experts_best_isa()] == "portable"
    done = subprocess.run([str(folder / "test_kernels")], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


REFUSED = """
import numpy as np
import cpu_experts
print(cpu_experts.isa())
weights = np.ones((1, 32, 32), np.float32)
batch = np.ones((20, 32), np.float32), np.zeros((20, 1), np.int32), np.ones((20, 1), np.float32)
print(cpu_experts.Experts(weights, weights, weights).forward(*batch).std())
try:
    cpu_experts.Experts(weights, weights, weights, isa="amx")
except cpu_experts.Unsupported as error:
    print("Unsupported:", error)
"""


@pytest.mark.parametrize("options", [(), ("-DCPU_EXPERTS_EMULATE_TILES=ON",)])
def test_a_system_that_refuses_tiles_is_one_without_them(builds, options):
    folder = builds(*options)
    environment = os.environ | {"PYTHONPATH": ROOT, "CPU_EXPERTS_LIBRARY": str(folder / library.NAME)}
    environment["LD_PRELOAD"] = str(folder / "librefuse_tiles.so")
    done = subprocess.run([sys.executable, "-c", REFUSED], env=environment, capture_output=True, text=True, check=True)
    isa, deviation, unsupported = done.stdout.splitlines()
    assert isa in ("avx512", "avx2", "portable")
    assert float(deviation) == 0
    assert unsupported.startswith("Unsupported: this processor lacks the instruction set")


def test_the_command_that_builds_helps_and_refuses_what_it_does_not_know(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for arguments, status, said in (
        (["--help"], 0, "usage: python -m cpu_experts.build [-h] [folder]"),
        (["--foldr", "x"], 2, "unrecognized arguments: --foldr"),
        (["x", "y"], 2, "unrecognized arguments: y"),
    ):
        with pytest.raises(SystemExit, match=str(status)):
            main(arguments)
        assert said in "".join(capsys.readouterr())
    assert not list(tmp_path.iterdir())


def test_a_failed_build_shows_what_cmake_said(builds, tmp_path):
    with pytest.raises(Unsupported, match="no such compiler"):
        build(tmp_path, "-DCMAKE_CXX_COMPILER=/no such compiler")


def test_what_another_checkout_left_in_the_folder_is_built_anew(builds, tmp_path):
    (tmp_path / "CMakeCache.txt").write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere\n")
    with pytest.raises(Unsupported, match="building cpu_experts failed"):
        build(tmp_path, target="none")
    assert "/elsewhere" not in (tmp_path / "CMakeCache.txt").read_text()


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


@pytest.mark.parametrize("options", [(), ("-DCPU_EXPERTS_EMULATE_TILES=ON",), ASAN])
def test_kernels_stay_within_their_buffers(builds, options):
    """Against guard pages on either side, for every number of rows; with sanitizers for buffers without one."""
    done = subprocess.run([str(builds(*options) / "test_kernels")], capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr
