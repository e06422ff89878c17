"""The library is built once a test run from its sources; without AMX, a second build with a model of its tiles stands in."""

import os
import sys
from pathlib import Path

import pytest

import cpu_experts
from cpu_experts import library

CPU = Path("/proc/cpuinfo")
sys.path.append(str(Path(__file__).parent))  # moe_layers: as `cpu_experts.moe_layers` it would be looked for in the package


def pytest_configure(config):
    config.addinivalue_line("markers", "amx: needs a processor with AMX")


def opened(request, *options: str):
    """Of a build; or the library that CPU_EXPERTS_TESTED names, with sanitizers and the model of tiles (test_sanitizers.py)."""
    named = os.environ.get("CPU_EXPERTS_TESTED")
    return library.opened(Path(named) if named else request.getfixturevalue("builds")(*options) / library.NAME)


@pytest.fixture(scope="session")
def native(request):
    return opened(request)


@pytest.fixture(scope="session")
def emulated(request):
    return opened(request, "-DCPU_EXPERTS_EMULATE_TILES=ON")


@pytest.fixture
def built(native, monkeypatch):
    """The package, with the library of this test run."""
    monkeypatch.setattr(cpu_experts, "load", lambda: native)
    return cpu_experts


@pytest.fixture(params=library.ISAS[1:])
def isa(request, monkeypatch):
    """Every instruction set: what the processor lacks is skipped, but for AMX, which is emulated."""
    wanted = request.param
    chosen = request.getfixturevalue("native")
    if wanted == "avx512" and "avx512_bf16" not in CPU.read_text().split():  # a build that emulates AMX says that AMX is best
        pytest.skip(f"this processor has no {wanted}")
    if library.ISAS.index(wanted) > chosen.cpu_experts_best_isa():
        if wanted != "amx":
            pytest.skip(f"this processor has no {wanted}")
        chosen = request.getfixturevalue("emulated")
    monkeypatch.setattr(cpu_experts, "load", lambda: chosen)
    return wanted


@pytest.fixture(params=["best", "amx"])
def best(request, monkeypatch):
    """The best instruction set of this processor; and AMX, emulated, where that is another."""
    chosen = request.getfixturevalue("native")
    if request.param == "amx":
        if chosen.cpu_experts_best_isa() == library.ISAS.index("amx"):
            pytest.skip("it is the best")
        chosen = request.getfixturevalue("emulated")
    monkeypatch.setattr(cpu_experts, "load", lambda: chosen)
    return request.param


ONCE = ("test_blocks", "test_forward", "test_layout", "test_libfuzzer", "test_numa", "test_packed", "test_sanitizers")
OF_CPP = (
    "test_a_quota_bounds_the_cores",
    "test_kernels_stay_within_their_buffers",
    "test_on_another_architecture_the_portable_kernels_are_built",
    "test_the_protocol_between_gpu_and_host",
)


def pytest_collection_modifyitems(items):
    """Of C++ or numpy alone; what binds them to Python and JAX is for every version."""
    for item in items:
        if item.path.stem in ONCE or item.originalname in OF_CPP:
            item.add_marker(pytest.mark.once)
