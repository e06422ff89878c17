"""Shapes are checked: annotated functions of the package run under jaxtyping and beartype. No test may reach the network."""

import fcntl
import functools
import os
import re
import shutil
import signal
import socket
from importlib.metadata import version
from pathlib import Path

import compiling

compiling.settle()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job, and so in all that the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)  # for meshes; what has no mesh runs on the first

install_import_hook("mla_jax", "checker.checked")

import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

import cpu_experts  # noqa: E402
from cpu_experts import library  # noqa: E402
from cpu_experts.build import build, find_cmake  # noqa: E402

# By the clock an example takes as long as other processes let it; what is costly has limits of its own, of processor time.
settings.register_profile("busy", deadline=None)
settings.load_profile("busy")

ROOT = Path(__file__).parent
# The second Python of CI runs what versions of Python and JAX can break; the first runs everything.
EVERY_PYTHON = re.compile(
    r"(golden/.*(auto|mtp)|decode/|engine/(core/)?test_(engine|llm|pages|scheduler|stream|text)\.py|engine/policy/test_evicting\.py::test_pages)"
    r"|(model/test_(mla|dispatch|kernel_attention)|weights/test_load|cpu_experts/test_ffi)\.py"
    r"|cache/test_paged\.py::test_.*_copies_no_pool|pallas_kernels/(test_(gpu|tpu)\.py|.*interpreted)"
    r"|test_generate\.py::test_(stdout_carries|json_is_one|ctrl_c|help)|hosts/test_channel\.py"
)
TOGETHER = re.compile(  # what waits for one model, trained or compiled, or for one run of a script
    r".*/(test_demo|test_generate|tools/test_(corpus|tasks|train_demo|training))\.py|.*\.py(?=::test_the_gpu_kernel_interpreted_)"
)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # once, in the process that starts the others
        compiling.forget_old()


def pytest_collection_modifyitems(items):
    for item in items:
        if not EVERY_PYTHON.match(item.nodeid.removeprefix(f"{ROOT.name}/")):
            item.add_marker(pytest.mark.once)
        if item.get_closest_marker("deep") and not os.environ.get("DEEP"):
            item.add_marker(pytest.mark.skip(reason="deep: `make deep` runs it, or DEEP=1"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests that share a costly fixture stay in one process. By names: pytest 9.2 silently ignores xdist_group's marks
    (pytest-xdist's issue 1386)."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFixture(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return found[0] if (found := TOGETHER.match(nodeid)) else nodeid

    return ByFixture(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise OSError("tests must not reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


def built(name: str, *options: str, target: str = "all") -> Path:
    """The folder of a build, which is stored: again it does nothing, or what sources that have changed need."""
    folder = compiling.STORED / "cpp" / name.replace("/", "_")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build(folder, *options, target=target)
    return folder


@pytest.fixture(scope="session")
def builds():
    """`builds(*options)` is the folder of a build with cmake's further options, tests of the kernels included."""
    if not find_cmake() or not (shutil.which("c++") or os.environ.get("CXX")):
        pytest.skip("no cmake or no C++ compiler to build cpu_experts with")
    return functools.cache(lambda *options: built("cpu_experts" + "".join(options), "-DCPU_EXPERTS_TESTS=ON", *options))


@pytest.fixture(scope="session")
def ffi_library(builds):
    """Built on the headers of this jaxlib."""
    headers, jaxlib = library.ffi_headers(), version("jaxlib")
    options = f"-DCPU_EXPERTS_FFI_HEADERS={headers}"
    return built(f"cpu_experts_ffi_{jaxlib}", options, target="cpu_experts_ffi") / library.FFI_NAME


@pytest.fixture
def host_library(builds, ffi_library, monkeypatch):
    """Experts on the CPU can be had, by libraries that this test run built."""
    opened = library.opened(builds() / library.NAME)
    for module in (cpu_experts, library):
        monkeypatch.setattr(module, "load", lambda: opened)
    monkeypatch.setenv("CPU_EXPERTS_FFI_LIBRARY", str(ffi_library))
