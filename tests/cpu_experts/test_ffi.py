"""The experts inside JAX programs: of the CPU backend, and as those of CUDA's call them.

The latter without a GPU: fake_cuda.cpp runs the kernels' text, and the handlers for CUDA are called by the CPU backend."""

import ctypes
import fcntl
import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.interpreters import mlir
from moe_layers import distance, fitting, parts_of, random_batch, random_layer
from test_sanitizers import preloaded

from cpu_experts import Closed, Experts, Unsupported, ffi, library, reference

pytestmark = pytest.mark.deep

HERE = Path(__file__).parent
ROOT = str(HERE.parents[1])
CSRC = HERE.parents[1] / "cpu_experts/csrc"
LAYER, BATCH = random_layer(6, 64, 48), random_batch(12, 64, 6, 2)
FAILED = (ValueError, jax.errors.JaxRuntimeError)  # from a call that is waited for, and from one that is not


def compiled(target: Path, *arguments: str) -> Path:
    """By the C++ compiler; once for all workers of a test run."""
    flags = ["-std=c++17", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CSRC}"]
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            command = [os.environ.get("CXX") or "c++", *flags, *arguments, "-ldl", "-o", str(target)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="session")
def fake_driver(ffi_library):
    headers = f"-isystem{library.ffi_headers()}"
    options = ("-shared", "-fPIC", "-fvisibility=hidden", "-DFAKE_CUDA_FFI", headers)
    return compiled(ffi_library.parent.parent / "libfake_cuda.so", *options, str(HERE / "fake_cuda.cpp"))


@pytest.fixture(autouse=True, scope="session")
def chosen(ffi_library, fake_driver):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CPU_EXPERTS_FFI_LIBRARY", str(ffi_library))
        patch.setenv("CPU_EXPERTS_LIBCUDA", str(fake_driver))
        yield


@pytest.fixture(scope="session")
def fake(chosen, fake_driver):
    """The driver, with CUDA's handlers registered for the CPU backend."""
    driver, handlers = ctypes.CDLL(str(fake_driver)), ffi._library()
    assert ffi.why_not("cuda") is None
    names = "submit", "collect", "fetch_on_gpu"
    driver.fake_handlers(*(getattr(handlers, f"cpu_experts_ffi_{name}") for name in names))
    driver.fake_held.restype = driver.fake_registered.restype = ctypes.c_size_t
    ffi._register("cpu_experts_submit", driver.fake_submit, "cpu")
    ffi._register("cpu_experts_collect", driver.fake_collect, "cpu")
    ffi._register("fake_fetch", driver.fake_fetch, "cpu")  # cpu_experts_fetch is the CPU backend's own
    return driver


def lower(submit, collect, fetch: str) -> None:
    """Replaces the CPU backend's lowering of the two halves and of fetching."""
    jax.clear_caches()
    ffi._compiled.cache_clear()
    mlir.register_lowering(ffi.submit_p, submit, platform="cpu")
    mlir.register_lowering(ffi.collect_p, collect, platform="cpu")
    by = jax.ffi.ffi_lowering(fetch, has_side_effect=True)
    mlir.register_lowering(ffi.fetch_p, lambda *a, layer, **_: by(*a, layer=np.uint64(layer)), platform="cpu")


@pytest.fixture
def gpu(fake):
    """The CPU backend as a GPU; what fails must have been heard of by the end."""
    lower(ffi._submit_on_a_gpu, ffi._collect_on_a_gpu, "fake_fetch")
    yield fake
    by_cpu = (mlir.lower_fun(f, multiple_results=m) for f, m in ((ffi._no_number, True), (ffi._forward_now, False)))
    lower(*by_cpu, "cpu_experts_fetch")
    ffi.check()


@pytest.fixture(params=["cpu", "gpu"])
def platform(request):
    """Either of them."""
    if request.param == "gpu":
        request.getfixturevalue("gpu")
    return request.param


@pytest.fixture
def layer(built):
    with Experts(*LAYER, threads=2) as layer:
        yield layer


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4_g32", "fp8_block", "q4_k"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_program_computes_what_the_specification_says(built, platform, precision, dtype):
    model, width = fitting(precision, 64, 48)
    parts, batch = parts_of(random_layer(6, model, width), precision), random_batch(12, model, 6, 2)
    batch = batch._replace(x=batch.x.astype(dtype))
    with Experts(*parts, precision) as layer:
        out = jax.jit(partial(ffi.forward, layer))(*batch)
        assert out.dtype == dtype
        assert (np.asarray(out) == layer.forward(*batch, np.empty(batch.x.shape, dtype))).all()
        exact = jax.jit(partial(ffi.forward, layer, dtype=jnp.float32))(*batch)
        assert (np.asarray(exact) == layer.forward(*batch)).all()
        batch = batch._replace(x=batch.x.astype(np.float32))
        assert distance(np.asarray(exact), batch, parts, precision) <= reference.BOUNDS[precision]


def test_without_jit_and_for_rows_without_experts(layer, platform):
    out = ffi.forward(layer, *BATCH)
    assert (np.asarray(out) == layer.forward(*BATCH)).all()
    nobody = np.full_like(BATCH.ids, 6)
    assert not np.asarray(ffi.forward(layer, BATCH.x, nobody, BATCH.weights)).any()
    assert ffi.forward(layer, BATCH.x[:0], BATCH.ids[:0], BATCH.weights[:0]).shape == (0, 64)


def halves(layers: list[Experts], x, ids, weights):
    """Two layers under way at once, the second with an operand computed after the first."""
    tickets = [ffi.submit(layer, x, ids, weights) for layer in layers]
    meanwhile = jnp.tanh(tickets[0].x)
    return [ffi.collect(ticket, after=meanwhile) for ticket in tickets], meanwhile


def test_submitted_and_collected(built, platform):
    with Experts(*LAYER) as one, Experts(*random_layer(6, 64, 48, seed=3)) as other:
        outs, meanwhile = jax.jit(partial(halves, [one, other]))(*BATCH)
        for layer, out in zip((one, other), outs, strict=True):
            assert (np.asarray(out) == layer.forward(*BATCH)).all()
        np.testing.assert_allclose(meanwhile, np.tanh(BATCH.x), rtol=1e-5)


def steps(layers: list[Experts], x, n: int):
    """The result of the loops below, through numpy."""
    for i in range(n):
        for layer in layers:
            x = layer.forward(np.tanh(np.asarray(x)), (BATCH.ids + i) % 7, BATCH.weights)
    return x


def step(layers: list[Experts], i, x):
    for layer in layers:
        x = ffi.forward(layer, jnp.tanh(x), (BATCH.ids + i) % 7, BATCH.weights)
    return x


LOOPS = {
    "while": lambda body, x, n: jax.lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, body(*s)), (0, x))[1],
    "fori": lambda body, x, n: jax.lax.fori_loop(0, n, body, x),
    "scan": lambda body, x, n: jax.lax.scan(lambda x, i: (body(i, x), None), x, jnp.arange(n))[0],
    "unrolled": lambda body, x, n: [x := body(i, x) for i in range(n)][-1],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_several_layers_in_a_loop(built, platform, loop):
    with Experts(*LAYER, threads=2) as one, Experts(*random_layer(6, 64, 48, seed=5), "int8", threads=1) as other:
        run = jax.jit(lambda x: LOOPS[loop](partial(step, [one, other]), x, 4))
        expected = steps([one, other], BATCH.x, 4)
        np.testing.assert_allclose(run(BATCH.x), expected, rtol=1e-2, atol=1e-2)  # XLA's tanh is not numpy's


def test_threads_that_call_at_once_agree_with_one(built, platform):
    """Within one turn of each other: whose thread sleeps for 16 calls of the others has lost its own, and is told."""
    layers = [Experts(*LAYER, precision, threads=2) for precision in ("bf16", "int8")]
    expected = [layer.forward(*BATCH) for layer in layers]
    programs = [jax.jit(partial(ffi.forward, layer)) for layer in layers]
    wrong, turn = [], threading.Barrier(4, timeout=100)

    def work(i: int) -> None:
        for _ in range(50):
            turn.wait()
            if not (np.asarray(programs[i % 2](*BATCH)) == expected[i % 2]).all():
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for layer in layers:
        layer.close()


def test_a_layer_that_threads_meet_at_once_has_one_number(built):
    """Of two, closing the layer would forget one only, and a program that has the other would read freed weights."""
    for _ in range(100):
        start, found = threading.Barrier(2), []

        def meet(layer: Experts, start: threading.Barrier, found: list[int]) -> None:
            start.wait()
            found.append(ffi._number(layer))

        with Experts(*LAYER, threads=1) as layer:
            threads = [threading.Thread(target=meet, args=(layer, start, found)) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert found[0] == found[1]


def test_a_closed_layer_gets_no_number(built):
    layer = Experts(*LAYER)
    layer.close()
    with pytest.raises(Closed):
        ffi._number(layer)


def test_tiny_numbers_give_the_same_bits_in_programs_too(built):
    """XLA's own threads take such as are too small for a normal float32 for zeros, the workers' do not."""
    batch = random_batch(512, 64, 6, 2)
    batch = batch._replace(x=batch.x * np.float32(1e-18))
    with Experts(*LAYER, threads=2) as layer:
        expected, run = layer.forward(*batch), jax.jit(partial(ffi.forward, layer))
        assert 0 < np.abs(expected).max() < 1e-34
        for _ in range(20):
            assert (np.asarray(run(*batch)) == expected).all()


BAD = {
    "x of float16": (TypeError, "x: float16, must be float32 or bfloat16", {"x": BATCH.x.astype(np.float16)}),
    "x too narrow": (ValueError, r"x: shape \(12, 63\), must be \(12, 64\)", {"x": BATCH.x[:, :63]}),
    "x of three axes": (ValueError, r"x: shape \(1, 12, 64\)", {"x": BATCH.x[None]}),
    "ids of uint8": (TypeError, "topk_ids: uint8, must be int32", {"topk_ids": BATCH.ids.astype(np.uint8)}),
    "ids of other tokens": (ValueError, "topk_ids: shape", {"topk_ids": BATCH.ids[:2]}),
    "weights of bfloat16": (TypeError, "topk_weights: bfloat16", {"topk_weights": BATCH.weights.astype(ml_dtypes.bfloat16)}),
    "more weights than ids": (ValueError, "topk_weights: shape", {"topk_weights": np.ones((12, 3), np.float32)}),
    "no experts chosen": (ValueError, "chosen", {"topk_ids": BATCH.ids[:, :0], "topk_weights": BATCH.weights[:, :0]}),
    "an answer of float16": (TypeError, "dtype: float16", {"dtype": np.float16}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arrays_are_refused_while_tracing(layer, name):
    error, words, changed = BAD[name]
    given = {"x": BATCH.x, "topk_ids": BATCH.ids, "topk_weights": BATCH.weights} | changed
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda: ffi.forward(layer, **given))


def test_an_id_that_is_no_expert_is_an_error_when_the_program_runs(layer):
    ids = BATCH.ids.copy()
    ids[3, 1] = 7
    run = jax.jit(partial(ffi.forward, layer))
    with pytest.raises(FAILED, match=r"topk_ids\[3, 1\]: 7, must be 0 to 6"):
        jax.block_until_ready(run(BATCH.x, ids, BATCH.weights))
    assert (np.asarray(run(*BATCH)) == layer.forward(*BATCH)).all()


def test_vmap_and_grad_say_that_there_are_none(layer):
    with pytest.raises(NotImplementedError, match="no vmap of experts"):
        jax.vmap(lambda x: ffi.forward(layer, x, BATCH.ids, BATCH.weights))(BATCH.x[None])
    with pytest.raises(NotImplementedError, match="cpu_experts"):
        jax.grad(lambda x: ffi.forward(layer, x, BATCH.ids, BATCH.weights).sum())(BATCH.x)


def test_a_closed_layer_is_an_error_in_old_programs_and_new(built, platform):
    layer = Experts(*LAYER)
    run = jax.jit(partial(ffi.forward, layer))
    run(*BATCH).block_until_ready()
    layer.close()
    with pytest.raises(FAILED, match="the layer is closed"):
        jax.block_until_ready(run(*BATCH))
    with pytest.raises(Closed):
        ffi.forward(layer, *BATCH)


def test_a_dropped_layer_is_an_error_too(built, platform):
    layer = Experts(*LAYER)
    static = {"layer": ffi._number(layer), "dtype": np.dtype(np.float32), "patience": 60.0}
    run = jax.jit(lambda *batch: ffi.collect_p.bind(ffi.submit_p.bind(*batch, **static)[0], *batch, **static))
    run(*BATCH).block_until_ready()
    del layer
    with pytest.raises(FAILED, match="the layer is closed"):
        jax.block_until_ready(run(*BATCH))


def test_a_program_takes_no_detour_through_python(layer):
    """Effects that JAX knows of cost ten times the dispatch."""
    jaxpr = jax.make_jaxpr(partial(ffi.forward, layer))(*BATCH)
    assert not jaxpr.effects


def test_platforms(fake):
    assert ffi.why_not() is None
    assert ffi.why_not("cpu") is None
    assert ffi.why_not("cuda") is None
    assert "not of tpu" in ffi.why_not("tpu")


FORKED = """
import os, signal, sys
import jax, numpy as np
from cpu_experts import Experts, ffi
rng = np.random.default_rng(0)
layer = Experts(*(rng.standard_normal(s, np.float32) for s in ((4, 16, 32), (4, 16, 32), (4, 32, 16))), threads=3)
batch = np.ones((5, 32), np.float32), np.zeros((5, 2), np.int32), np.ones((5, 2), np.float32)
expected = np.asarray(jax.jit(lambda *b: ffi.forward(layer, *b))(*batch))
child = os.fork()
if child == 0:
    signal.alarm(30)
    os._exit(0 if (layer.forward(*batch) == expected).all() else 1)
print(os.waitpid(child, 0)[1], (layer.forward(*batch) == expected).all())
"""

ALONE = """
from types import SimpleNamespace
import numpy as np
import cpu_experts
from cpu_experts import ffi
print(ffi.why_not("cpu"))
class Layer:
    experts, model, _handle = 4, 32, 1
    _library = SimpleNamespace(cpu_experts_forward=0, cpu_experts_last_error=0)
try:
    ffi.forward(Layer(), np.ones((1, 32), np.float32), np.ones((1, 1), np.int32), np.ones((1, 1), np.float32))
except cpu_experts.Unsupported as error:
    print(error)
"""


def python(script: str, **environment: str) -> str:
    environment = os.environ | {"PYTHONPATH": ROOT} | environment
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_forked_child_still_has_numpys_face(builds):
    assert python(FORKED, CPU_EXPERTS_LIBRARY=str(builds() / library.NAME)) == "0 True\n"


def test_without_the_library_the_error_says_how_to_build_it(tmp_path):
    first, second = python(ALONE, PATH="", CPU_EXPERTS_FFI_LIBRARY=str(tmp_path / "none.so")).splitlines()
    assert first == second
    assert re.search(r"for XLA programs is not built \(looked at .*none\.so\): run `python -m cpu_experts\.build`", first)


def test_a_library_for_other_headers_is_refused(ffi_library, tmp_path, monkeypatch):
    headers = tmp_path / "xla/ffi/api"
    headers.mkdir(parents=True)
    (headers / "c_api.h").write_text("#define XLA_FFI_API_MAJOR 3\n#define XLA_FFI_API_MINOR 14\n")
    assert library.ffi_name(tmp_path) == "libcpu_experts_ffi3-3014.so"
    with pytest.raises(Unsupported, match=r"XLA FFI \d+, expected 3014: run `python -m cpu_experts\.build`"):
        library.opened_ffi(ffi_library, tmp_path)
    monkeypatch.setattr(library, "FFI_ABI", 99)
    with pytest.raises(Unsupported, match="ABI 3, expected 99"):
        library.opened_ffi(ffi_library, library.ffi_headers())


def headers_of(folder: Path, minor: int, major: int = 0) -> Path:
    """A folder of headers that speak a version of XLA's FFI."""
    file = folder / f"{major}.{minor}/xla/ffi/api/c_api.h"
    file.parent.mkdir(parents=True)
    file.write_text(f"#define XLA_FFI_API_MAJOR {major}\n#define XLA_FFI_API_MINOR {minor}\n")
    return file.parents[3]


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """An empty cache, where the library is looked for."""
    monkeypatch.delenv("CPU_EXPERTS_FFI_LIBRARY")
    monkeypatch.setattr(library, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(library, "__file__", "/nowhere/library.py")
    return tmp_path


def test_a_library_built_for_an_older_version_of_xlas_ffi_serves(ffi_library, kept, monkeypatch):
    api = library.ffi_api(library.ffi_headers())
    older, same, newer = (headers_of(kept, minor) for minor in (api - 1, api, api + 1))
    for headers in (same, newer):
        assert library.opened_ffi(ffi_library, headers).cpu_experts_ffi_api() == api
    for headers in (older, headers_of(kept, api, major=1)):
        with pytest.raises(Unsupported, match=f"XLA FFI {api}, expected"):
            library.opened_ffi(ffi_library, headers)
    opened = []
    monkeypatch.setattr(library, "opened_ffi", lambda path, headers: opened.append(path.name))
    monkeypatch.setattr(library, "ffi_headers", lambda: same)
    for minor in (api + 1, api - 2, api - 1, api):
        (kept / library._ffi_name(minor)).touch()
        if minor > api:
            words = rf"built for another jaxlib \(.*-{minor}\.so\), not for XLA FFI {api}: run `python -m cpu_experts\.build`"
            with pytest.raises(Unsupported, match=words):
                library.load_ffi()
        else:
            library.load_ffi()
    assert opened == [library._ffi_name(minor) for minor in (api - 2, api - 1, api)]


def test_a_program_calls_a_library_built_for_an_older_version(builds, tmp_path):
    """As after an upgrade of jax: jaxlib's own headers, made to say that they are one version older."""
    include = shutil.copytree(library.ffi_headers(), tmp_path / "include")
    text = (include / "xla/ffi/api/c_api.h").read_text()
    minor = library.ffi_api(include) % 1000
    (include / "xla/ffi/api/c_api.h").write_text(text.replace(f"API_MINOR {minor}", f"API_MINOR {minor - 1}"))
    sources = (str(each) for each in CSRC.glob("ffi*.cpp"))
    old = compiled(tmp_path / "old.so", "-shared", "-fPIC", "-fvisibility=hidden", f"-isystem{include}", *sources)
    assert library.opened_ffi(old, library.ffi_headers()).cpu_experts_ffi_api() == minor - 1
    places = {"CPU_EXPERTS_FFI_LIBRARY": str(old), "CPU_EXPERTS_LIBRARY": str(builds() / library.NAME)}
    assert python(OLDER, **places) == "True\n"


def test_what_xla_refuses_to_register_is_unsupported(monkeypatch):
    def refuse(*_, **__):
        raise jax.errors.JaxRuntimeError("INVALID_ARGUMENT: Minimum supported API version is (0.9)")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    monkeypatch.setattr(ffi, "_PLATFORMS", {"cpu": ffi._library.__wrapped__})
    assert re.search(r"Minimum supported .* run `python -m cpu_experts\.build`", ffi.why_not() or "")


OLDER = """
import jax, numpy as np
from cpu_experts import Experts, ffi
layer = Experts(*(np.ones(s, np.float32) for s in ((4, 16, 32), (4, 16, 32), (4, 32, 16))))
batch = np.ones((5, 32), np.float32), np.zeros((5, 2), np.int32), np.ones((5, 2), np.float32)
print((np.asarray(jax.jit(lambda *b: ffi.forward(layer, *b))(*batch)) == layer.forward(*batch)).all())
"""


def test_without_jaxlib_it_says_so(monkeypatch):
    monkeypatch.setattr(library, "ffi_headers", lambda: None)
    with pytest.raises(Unsupported, match="install jax"):
        library.load_ffi()


NO_DRIVER = """
import jax, numpy as np
from cpu_experts import Experts, Unsupported, ffi
layer = Experts(*(np.ones(s, np.float32) for s in ((4, 16, 32), (4, 16, 32), (4, 32, 16))))
batch = np.ones((5, 32), np.float32), np.zeros((5, 2), np.int32), np.ones((5, 2), np.float32)
run = jax.jit(lambda *b: ffi.forward(layer, *b))
print(np.isfinite(run(*batch)).all(), ffi.why_not("cuda"))
try:
    run.trace(*batch).lower(lowering_platforms=("cuda",))
except Unsupported as error:
    print(error)
"""


def test_without_cudas_driver_the_cpu_backend_works_and_a_gpus_program_says_why_it_cannot(builds):
    said = python(NO_DRIVER, CPU_EXPERTS_LIBRARY=str(builds() / library.NAME), CPU_EXPERTS_LIBCUDA="libnone.so.1")
    first, second = said.splitlines()
    assert first.startswith("True CUDA's driver cannot be loaded: libnone.so.1")
    assert second == first.removeprefix("True ")
    said = python(NO_DRIVER, CPU_EXPERTS_LIBRARY=str(builds() / library.NAME), CPU_EXPERTS_LIBCUDA="libm.so.6")
    assert said.startswith("True libm.so.6 has no cu")


def test_programs_of_cuda_have_both_halves_as_calls_with_effects(layer, fake):
    text = jax.jit(partial(ffi.forward, layer)).trace(*BATCH).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "custom_call" in line]
    assert ["@cpu_experts_submit" in calls[0], "@cpu_experts_collect" in calls[1], len(calls)] == [True, True, 2]
    assert all("has_side_effect = true" in call for call in calls)


def test_programs_of_cuda_order_calls_by_their_data(layer, fake):
    """For XLA may run calls without common data concurrently."""

    def run(x, ids, weights):
        now = ffi.submit(layer, x, ids, weights)
        later = ffi.submit(layer, now.x, ids[:, :1], weights[:, :1])
        beside = jnp.cos(later.x)
        return ffi.collect(now, after=(beside, {"b": weights})), ffi.collect(later)

    text = jax.jit(run).trace(*BATCH).lower(lowering_platforms=("cuda",)).as_text()
    calls = re.findall(r"%(\S+?)(?::2)? = stablehlo.custom_call @cpu_experts_(\w+)\((.*?)\)(.*)", text)
    (now, _, given, how), (later, _, passed, _), (_, _, answer, _), (_, _, rest, _) = calls
    assert [call[1] for call in calls] == ["submit", "submit", "collect", "collect"]
    assert (given.split(", ")[0], passed.split(", ")[0]) == ("%arg0", f"%{now}#1")
    assert "output_tuple_indices = [1], operand_index = 0" in how
    (beside,) = re.findall(rf"%(\S+) = stablehlo.cosine %{later}#1", text)
    assert answer.split(", ") == [f"%{now}#0", f"%{beside}", "%arg2"]
    assert rest == f"%{later}#0"


def test_compiled_for_an_h200_the_shared_experts_run_between_the_halves_and_all_is_one_graph(builds, fake_driver, tmp_path):
    pytest.importorskip("jax_plugins.xla_cuda13", reason="jax-cuda13-plugin of JAX's own version compiles without a GPU")
    flags = {"XLA_FLAGS": f"--xla_dump_to={tmp_path}", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    flags |= {"JAX_ENABLE_COMPILATION_CACHE": "false", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    script = (HERE / "compile_ffi.py").read_text()
    order = python(script, CPU_EXPERTS_LIBRARY=str(builds() / library.NAME), **flags).split()
    submit, collect = "cpu_experts_submit", "cpu_experts_collect"
    layer = [name for name, _ in itertools.groupby(order, lambda name: name if name == "meanwhile" else name + " ")]
    assert [name.strip() for name in layer] == [submit, "meanwhile", collect] * 2
    assert [order.count(name) for name in (submit, collect)] == [4, 4]
    (thunks,) = tmp_path.glob("*thunk_sequence_after_thunk_passes.txt")
    first, *rest = thunks.read_text().splitlines()
    assert "kCommandBuffer" in first
    # What has no edge may run side by side: all but a layer's first call wait for what stands just before them.
    calls = [re.match(r" +(\d+): kCustomCall +\[prev=(\d+) ", line) for line in rest if "kCustomCall" in line]
    waits = [int(call[1]) - int(call[2]) == 1 for call in calls]
    assert [waits[i : i + 4][1:] for i in (0, 4)] == [[True] * 3] * 2
    assert len(calls) == 8


def test_what_fails_beside_a_gpu_is_an_error_soon(layer, gpu):
    """At the latest when it is asked for; then all is well again."""
    ids = BATCH.ids.copy()
    ids[3, 1] = 7
    run = jax.jit(partial(ffi.forward, layer))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"topk_ids\[3, 1\]: 7, must be 0 to 6"):  # noqa: PT012
        assert np.isnan(run(BATCH.x, ids, BATCH.weights)).all()
        ffi.check()
    assert (np.asarray(run(*BATCH)) == layer.forward(*BATCH)).all()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_gpu_that_waits_in_vain_gets_nan(built, gpu, dtype, monkeypatch):
    """Behind a forward of a second, one turn, on the same threads; of several blocks the last ones may be in time."""
    monkeypatch.setattr(built, "_CALL_WORK", {})
    batch = random_batch(700, 64, 6, 2)
    with Experts(*LAYER, threads=1) as layer, Experts(*random_layer(2, 512, 512), threads=1, isa="portable") as slow:
        run = jax.jit(partial(ffi.forward, layer, dtype=dtype, patience=0.001)).lower(*batch).compile()
        before = threading.Thread(target=slow.forward, args=random_batch(4000, 512, 2, 2))
        before.start()
        clock = time.pthread_getcpuclockid(before.ident)
        while time.clock_gettime(clock) < 0.05:  # until it computes
            time.sleep(0.001)
        out = np.asarray(run(*batch))
        late = np.isnan(out.astype(np.float32))
        assert late[:100].any()
        assert (out == layer.forward(*batch, np.empty_like(out)))[~late].all()
        before.join()
        with pytest.raises(RuntimeError, match="waited in vain"):
            ffi.check()


def test_no_memory_for_a_gpu_is_an_error(layer, gpu):
    gpu.fake_refuse(b"cuMemHostAlloc")
    run = jax.jit(partial(ffi.forward, layer))
    batch = [array[:11] for array in BATCH]
    with pytest.raises(FAILED, match="cuMemHostAlloc: out of memory"):
        run(*batch).block_until_ready()
    gpu.fake_refuse(b"")
    assert (np.asarray(run(*batch)) == layer.forward(*batch)).all()


def test_the_memory_goes_with_the_layer(built, gpu):
    batch = [array[:9] for array in BATCH]
    held, layer = gpu.fake_held(), Experts(*LAYER)
    ffi.forward(layer, *batch).block_until_ready()
    assert gpu.fake_held() > held
    layer.close()
    del layer
    assert gpu.fake_held() == held


def test_expert_deferral_collects_a_layer_later(layer, gpu):
    """More calls under way than one, over the steps of a loop."""

    def step(i, state):
        x, y = state
        tickets = [ffi.submit(layer, x * (k + 1), BATCH.ids, BATCH.weights) for k in range(3)]
        return x + 1, y + sum(ffi.collect(ticket) for ticket in reversed(tickets))

    _, y = jax.jit(lambda x: jax.lax.fori_loop(0, 5, step, (x, jnp.zeros_like(x))))(BATCH.x)
    expected = sum(layer.forward((BATCH.x + i) * (k + 1), BATCH.ids, BATCH.weights) for i in range(5) for k in range(3))
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-2)


def test_rows_that_are_not_passed_on_in_place_are_copied(layer, gpu, monkeypatch):
    """As it is with a part of an array that XLA gives without taking it out."""
    rule = jax.ffi.ffi_lowering
    monkeypatch.setattr(jax.ffi, "ffi_lowering", lambda *name, has_side_effect, **_: rule(*name, has_side_effect=has_side_effect))
    jax.clear_caches()

    def run(x, *chosen):
        ticket = ffi.submit(layer, x[1:], *chosen)
        return ticket.x, ffi.collect(ticket)

    x = np.concatenate([np.full_like(BATCH.x[:1], np.nan), BATCH.x])
    passed, out = jax.jit(run)(x, *BATCH[1:])
    assert (np.asarray(passed) == BATCH.x).all()
    assert (np.asarray(out) == layer.forward(*BATCH)).all()


def whole(layer: Experts) -> tuple[np.ndarray, np.ndarray]:
    """All experts' weights, as fetched."""
    return tuple(map(np.asarray, ffi.fetch(layer, 0, layer.experts)))


def test_packed_experts_are_fetched_as_they_lie(layer, platform):
    for first, count in ((0, 6), (2, 3), (5, 1)):
        found = jax.jit(lambda first, count=count: ffi.fetch(layer, first, count))(first)
        for part, section in zip(found, layer._packed, strict=True):
            np.testing.assert_array_equal(part, section[first : first + count])
    groups = jax.lax.map(lambda first: ffi.fetch(layer, first, 2), jnp.arange(0, 6, 2))
    for part, section in zip(groups, layer._packed, strict=True):
        np.testing.assert_array_equal(part.reshape(section.shape), section)


def test_experts_that_are_not_there_are_not_fetched(layer, platform):
    for first, count, error, words in (
        (0, 7, ValueError, "count: 7, must be 1 to 6"),
        (0, 0, ValueError, "count: 0"),
        (1.0, 2, TypeError, r"first: float32\[\], must be an integer"),
        (np.arange(2), 2, TypeError, r"first: int32\[2\]"),
        (5, 2, FAILED, "2 experts from 5, must be some of 6"),
        (-1, 2, FAILED, "2 experts from -1"),
    ):
        with pytest.raises(error, match=words):
            jax.block_until_ready(ffi.fetch(layer, first, count))


def test_a_closed_layer_is_not_fetched_in_old_programs_and_new(built, platform):
    layer = Experts(*LAYER)
    run = jax.jit(lambda: ffi.fetch(layer, 0, 6))
    jax.block_until_ready(run())
    layer.close()
    with pytest.raises(FAILED, match="the layer is closed"):
        jax.block_until_ready(run())
    with pytest.raises(Closed):
        ffi.fetch(layer, 0, 6)


@pytest.mark.parametrize("dropped", [False, True])
def test_memory_is_pinned_for_a_gpu_until_the_layer_is_closed(built, gpu, tmp_path, dropped):
    with Experts(*LAYER) as layer:
        layer.save(tmp_path / "layer")
        whole(layer), whole(layer)
        assert gpu.fake_registered(1) == layer.nbytes
        assert gpu.fake_registered(8) == 0
    assert gpu.fake_registered(0) == 0
    mapped = Experts.open(tmp_path / "layer")
    size, _ = mapped.nbytes, whole(mapped)
    assert gpu.fake_registered(8) == size  # a mapped file's memory is read-only
    if not dropped:
        mapped.close()
    del mapped
    assert gpu.fake_registered(0) == 0


def test_what_cannot_be_pinned_is_fetched_all_the_same(layer, gpu):
    gpu.fake_refuse(b"cuMemHostRegister")
    found = whole(layer)
    gpu.fake_refuse(b"")
    assert gpu.fake_registered(0) == 0
    for part, section in zip(found, layer._packed, strict=True):
        np.testing.assert_array_equal(part, section)


def test_fetching_is_a_call_with_effects_for_cuda_too(layer, fake):
    text = jax.jit(lambda: ffi.fetch(layer, 0, 6)).trace().lower(lowering_platforms=("cuda",)).as_text()
    (call,) = (line for line in text.splitlines() if "custom_call" in line)
    assert "@cpu_experts_fetch" in call
    assert "has_side_effect = true" in call


AS_A_GPU = """
import ctypes, os
import jax, numpy as np
from jax.interpreters import mlir
from cpu_experts import Experts, Unsupported, ffi
assert ffi.why_not("cuda") is None
fake, library = ctypes.CDLL(os.environ["CPU_EXPERTS_LIBCUDA"]), ffi._library()
fake.fake_handlers(library.cpu_experts_ffi_submit, library.cpu_experts_ffi_collect, library.cpu_experts_ffi_fetch_on_gpu)
ffi._register("cpu_experts_submit", fake.fake_submit, "cpu")
ffi._register("cpu_experts_collect", fake.fake_collect, "cpu")
mlir.register_lowering(ffi.submit_p, ffi._submit_on_a_gpu, platform="cpu")
mlir.register_lowering(ffi.collect_p, ffi._collect_on_a_gpu, platform="cpu")
layer = Experts(*(np.ones(s, np.float32) for s in ((4, 64, 64), (4, 64, 64), (4, 64, 64))))
batch = np.ones((64, 64), np.float32), np.zeros((64, 2), np.int32), np.ones((64, 2), np.float32)
"""

EXITS = f"""
import atexit

def late():
    try:
        run(*batch).block_until_ready()
    except Exception as error:
        print(error)

atexit.register(late)
{AS_A_GPU}
run = jax.jit(lambda *b: ffi.forward(layer, *b))
run(*batch).block_until_ready()
"""

SEVERAL = f"""{AS_A_GPU}
from functools import partial
from jax.sharding import NamedSharding, PartitionSpec
mesh, rows = jax.make_mesh((2,), ("d",)), PartitionSpec("d")
given = [jax.device_put(array, NamedSharding(mesh, rows)) for array in batch]
run = partial(ffi.forward, layer)
try:
    jax.jit(run)(*given)
except Unsupported as error:
    print(error)
shared = jax.shard_map(run, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows, check_vma=False)
print((np.asarray(jax.jit(shared)(*given)) == layer.forward(*batch)).all())
"""


def test_programs_for_several_gpus_call_it_inside_shard_map(builds, fake_driver):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "CPU_EXPERTS_LIBRARY": str(builds() / library.NAME)}
    refused, same = python(SEVERAL, **flags).splitlines()
    assert refused == "experts in a program for several GPUs: call them inside jax.shard_map"
    assert same == "True"


def test_at_exit_the_thread_ends_and_later_calls_are_errors(builds, fake_driver):
    assert "is stopped: the process ends" in python(EXITS, CPU_EXPERTS_LIBRARY=str(builds() / library.NAME))


PARTS = ("layers", "driver", "fetch", "ring", "service")
PROTOCOL = [str(HERE / "ffi_protocol.cpp"), *(str(CSRC / f"ffi_{part}.cpp") for part in PARTS)]
SANITIZERS = {  # at -O2, all that is checked takes the compiler two and a half times as long
    "none": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g1"],
    "thread": ["-fsanitize=thread", "-O1", "-g1"],
}


LONG = (pytest.mark.slow, pytest.mark.once)


@pytest.mark.parametrize("sanitizer", ["none", *(pytest.param(s, marks=LONG) for s in ("address", "thread"))])
def test_the_protocol_between_gpu_and_host(tmp_path, sanitizer):
    """Its own program, for sanitizers: calls under way at once, failures, time-outs, graphs, forks, the process's end."""
    flags = SANITIZERS[sanitizer]
    if flags:
        preloaded(f"lib{sanitizer[0]}san.so", flags[0], tmp_path)
    program = compiled(tmp_path / "ffi_protocol", *flags, *PROTOCOL)
    driver = compiled(tmp_path / "libfake_cuda.so", *flags, "-shared", "-fPIC", str(HERE / "fake_cuda.cpp"))
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "exitcode=66"}
    done = subprocess.run([str(program), str(driver)], env=environment, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    assert done.stdout.count("ok: ") == 17
    assert "Sanitizer" not in done.stderr


def ptxas() -> str | None:
    """The assembler of a CUDA toolkit, or of a package that brings one."""
    places = (Path(p) for p in sys.path if p.endswith("-packages"))
    found = (
        file for place in places for pattern in ("nvidia/*/bin/ptxas", "triton/**/bin/ptxas") for file in place.glob(pattern)
    )
    return shutil.which("ptxas") or next((str(file) for file in found), None)


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_kernels_text_is_what_the_assembler_takes(tmp_path, architecture):
    if (assembler := ptxas()) is None:
        pytest.skip("no ptxas: it comes with CUDA, or with pip's nvidia-cuda-nvcc")
    text = (CSRC / "ffi_kernels.h").read_text()
    (tmp_path / "kernels.ptx").write_text(re.search(r'R"ptx\((.*)\)ptx"', text, re.DOTALL)[1])
    command = [assembler, f"-arch={architecture}", "-v", "kernels.ptx", "-o", "kernels.cubin"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    if "not defined for option" in done.stderr:
        pytest.skip(f"this ptxas knows no {architecture}")
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"(\d+) bytes spill", done.stderr)) == {"0"}


def test_only_the_functions_of_the_header_and_handlers_are_exported(ffi_library):
    done = subprocess.run(["nm", "-D", "--defined-only", str(ffi_library)], capture_output=True, text=True, check=True)
    names = {line.split()[-1] for line in done.stdout.splitlines()}
    assert {n for n in names if not n.startswith("_Z")} == set(library.FFI_SIGNATURES) | {
        f"cpu_experts_ffi_{handler}" for handler in ("forward", "submit", "collect", "fetch", "fetch_on_gpu")
    }
    assert not [n for n in names if "cpu_experts" in n and n.startswith("_Z")]
