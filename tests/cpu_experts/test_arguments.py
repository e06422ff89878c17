"""Bad arguments give an exception before anything is written or any thread is asked to work."""

import copy
import ctypes
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from moe_layers import parts_of, random_batch, random_layer

from cpu_experts import Experts, Unsupported
from cpu_experts.library import ISAS, Closed, ForwardCall, Weights, check


@pytest.fixture
def layer(built):
    with Experts(*random_layer(4, 32, 16)) as layer:
        yield layer


GOOD = random_batch(3, 32, 4, 2)


def with_id(value: int) -> np.ndarray:
    ids = GOOD.ids.copy()
    ids[2, 1] = value
    return ids


def with_weight(value: float) -> np.ndarray:
    weights = GOOD.weights.copy()
    weights[1, 0] = value
    return weights


BAD = {
    "x of float64": (TypeError, "x", {"x": GOOD.x.astype(np.float64)}),
    "x of the other byte order": (TypeError, "x", {"x": GOOD.x.astype(">f4")}),
    "x a list": (TypeError, "x", {"x": GOOD.x.tolist()}),
    "x too narrow": (ValueError, "x", {"x": GOOD.x[:, :31].copy()}),
    "x of one axis": (ValueError, "x", {"x": GOOD.x[0].copy()}),
    "x not contiguous": (ValueError, "contiguous", {"x": np.asfortranarray(GOOD.x)}),
    "ids of int64": (TypeError, "topk_ids", {"topk_ids": GOOD.ids.astype(np.int64)}),
    "ids of other tokens": (ValueError, "topk_ids", {"topk_ids": GOOD.ids[:2].copy()}),
    "more tokens than 32 bits count": (ValueError, "tokens: 4294967297", {"x": np.empty((2**32 + 1, 0), np.float32)}),
    "no experts chosen": (ValueError, "chosen", {"topk_ids": GOOD.ids[:, :0].copy(), "topk_weights": GOOD.weights[:, :0].copy()}),
    "an id too large": (ValueError, r"topk_ids\[2, 1\]: 5", {"topk_ids": with_id(5)}),
    "a negative id": (ValueError, r"topk_ids\[2, 1\]: -1", {"topk_ids": with_id(-1)}),
    "a weight NaN": (ValueError, r"topk_weights\[1, 0\]", {"topk_weights": with_weight(np.nan)}),
    "a weight infinite": (ValueError, r"topk_weights\[1, 0\]", {"topk_weights": with_weight(np.inf)}),
    "weights of float64": (TypeError, "topk_weights", {"topk_weights": GOOD.weights.astype(np.float64)}),
    "out too small": (ValueError, "out", {"out": np.zeros((2, 32), np.float32)}),
    "out of float16": (TypeError, "out", {"out": np.zeros((3, 32), np.float16)}),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_is_refused(layer, name):
    error, words, changed = BAD[name]
    given = {"x": GOOD.x, "topk_ids": GOOD.ids, "topk_weights": GOOD.weights} | changed
    with pytest.raises(error, match=words):
        layer.forward(**given)


def test_nothing_is_written_for_a_bad_batch(layer):
    out = np.full((3, 32), 7, np.float32)
    with pytest.raises(ValueError, match="topk_ids"):
        layer.forward(GOOD.x, with_id(9), GOOD.weights, out)
    assert (out == 7).all()
    out.flags.writeable = False
    with pytest.raises(ValueError, match="writable"):
        layer.forward(*GOOD, out)


def test_out_may_be_x_itself_and_nothing_else_that_is_read(built):
    memory = np.zeros((21, 32), np.float32)
    many = random_batch(20, 32, 4, 2)
    weights = np.ones((20, 32), np.float32)
    with Experts(*random_layer(4, 32, 16), max_rows=6) as layer:
        expected = layer.forward(*many)
        for x, out in ((memory[:-1], memory[1:]), (memory[1:], memory[:-1])):
            with pytest.raises(ValueError, match="out: overlaps x, must be apart or x itself"):
                layer.forward(x, many.ids, many.weights, out)
        with pytest.raises(ValueError, match="out: overlaps topk_weights"):
            Experts(*random_layer(4, 32, 16)).forward(many.x, np.zeros((20, 32), np.int32), weights, weights)
        x = many.x.copy()
        assert (layer.forward(x, many.ids, many.weights, x) == expected).all()


@pytest.mark.parametrize(("name", "value"), [("threads", 2**32 + 1), ("threads", -1), ("max_rows", 2**32 + 5), ("max_rows", 0)])
def test_numbers_are_not_cut_to_32_bits(built, name, value):
    with pytest.raises(ValueError, match=f"{name}: {value}, must be "):
        Experts(*random_layer(4, 32, 16), **{name: value})
    with pytest.raises(TypeError, match=f"{name}: 2.0, must be an integer"):
        Experts(*random_layer(4, 32, 16), **{name: 2.0})
    with Experts(*random_layer(4, 32, 16), **{name: np.int64(2)}) as layer:
        assert np.isfinite(layer.forward(*GOOD)).all()


def test_weights_that_are_no_arrays_are_refused(built):
    gate, up, down = random_layer(4, 32, 16)
    for found in (gate.tolist(), None, iter(gate), [gate, 3]):
        with pytest.raises(TypeError, match=f"gate: {type(found).__name__}, must be a numpy array or"):
            Experts(found, up, down)
    with pytest.raises(ValueError, match="gate, up and down must be"):
        Experts([np.array(3.0)], [np.array(3.0)], [np.array(3.0)], "q8_0")
    wide = np.broadcast_to(np.float32(0), (1, 1, 2**16 + 1))
    with pytest.raises(ValueError, match="model: 65537, must be 1 to 65536"):
        Experts(*parts_of([wide, wide, wide.swapaxes(1, 2)], "bf16"))


@pytest.mark.parametrize("isa", ["portable", "avx2", "avx512", "amx"])
def test_a_slow_processor_is_a_note_and_no_warning(built, native, monkeypatch, recwarn, isa):
    monkeypatch.setattr(native, "cpu_experts_best_isa", lambda: ISAS.index(isa))
    Experts(*random_layer(1, 32, 16)).close()
    assert not recwarn.list
    slow = f"experts on this CPU are computed by {isa}: slower than by AVX-512 or AMX"
    assert built.note() == (slow if isa in ("portable", "avx2") else None)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_layer_is_not_copied(layer, copied):
    with pytest.raises(TypeError, match="Experts cannot be copied or pickled"):
        copied(layer)
    assert layer.forward(*GOOD).shape == (3, 32)


LITTLE_MEMORY = """
import re, resource, sys
import numpy as np
from cpu_experts import Experts, layout
layer, options = [np.ones((1, 4096, 4096), np.uint16)] * 3, {"threads": 1}
with Experts(*([part] for part in layer), max_rows=1, **options) as opened:
    opened.save(sys.argv[1])
held = int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10
def fails(spare, act):
    resource.setrlimit(resource.RLIMIT_AS, (held + (spare << 20), resource.RLIM_INFINITY))
    try:
        act()
    except MemoryError as error:
        print(error)
fails(200, lambda: Experts(*([part] for part in layer), max_rows=1 << 20, **options))
fails(20, lambda: Experts(*([part] for part in layer), **options))
fails(20, lambda: Experts.open(sys.argv[1]))
"""


def test_memory_that_cannot_be_had_is_named(native, tmp_path):
    environment = os.environ | {"CPU_EXPERTS_LIBRARY": native._name, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", LITTLE_MEMORY, str(tmp_path / "layer")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    scratch, pages, mapped = done.stdout.splitlines()
    assert scratch == "out of memory: scratch for max_rows 1,048,576 and 100,663,296 bytes of weights"
    assert pages == "67,108,864 bytes of packed weights: Cannot allocate memory"
    assert mapped.endswith("layer: 102,760,448 bytes to map: Cannot allocate memory")


def test_bad_weights_are_refused(built):
    gate, up, down = random_layer(4, 32, 16)
    with pytest.raises(ValueError, match="precision 'int5'"):
        Experts(gate, up, down, "int5")
    with pytest.raises(ValueError, match="isa 'neon'"):
        Experts(gate, up, down, isa="neon")
    with pytest.raises(ValueError, match="up"):
        Experts(gate, up[:, :8], down)
    with pytest.raises(ValueError, match="parts"):
        Experts(gate, up, down.swapaxes(1, 2))
    with pytest.raises(ValueError, match="three axes"):
        Experts(gate[0], up[0], down[0])
    with pytest.raises(TypeError, match="floats"):
        Experts(gate.astype(np.int32), up, down)
    with pytest.raises(ValueError, match="gate"):
        Experts(*parts_of([gate, up, down], "int8"), "fp8_block")
    with pytest.raises(ValueError, match="precision 'int6'"):
        Experts(gate, up, down, down_precision="int6")
    with pytest.raises(ValueError, match="q4_k: 32 inputs, must be a multiple of 256"):
        Experts(gate, up, down, "q4_k")
    with pytest.raises(ValueError, match="q6_k: 16 inputs, must be a multiple of 256"):
        Experts(*parts_of([gate, up, down], "int8"), "int8", down_precision="q6_k")
    with pytest.raises(ValueError, match="threads"):
        Experts(gate, up, down, threads=-1)
    with pytest.raises(ValueError, match="max_rows"):
        Experts(gate, up, down, max_rows=0)
    gate[1, 2, 3] = np.nan
    with pytest.raises(ValueError, match="finite"):
        Experts(gate, up, down, "int8")


def raw(layer: Experts) -> ForwardCall:
    out = np.zeros((3, 32), np.float32)
    batch = ForwardCall(ctypes.sizeof(ForwardCall), 3, 2, 0, 0, *(a.ctypes.data for a in (GOOD.x, GOOD.ids, GOOD.weights, out)))
    batch.kept = out
    return batch


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("x", None, "x: null"),
        ("out", None, "out: null"),
        ("topk_ids", None, "topk_ids: null"),
        ("topk_weights", None, "topk_weights: null"),
        ("x", "moved", "x: not aligned"),
        ("topk_ids", "moved", "topk_ids: not aligned"),
        ("struct_bytes", 48, "batch: struct_bytes 48, must be 56"),
        ("tokens", -1, "tokens: -1"),
        ("chosen", 0, "chosen: 0"),
        ("chosen", 65, "chosen: 65"),
        ("x_dtype", 2, "dtype: unknown"),
        ("out_dtype", -1, "dtype: unknown"),
    ],
)
def test_the_library_checks_a_batch_itself(layer, native, field, value, words):
    batch = raw(layer)
    setattr(batch, field, getattr(batch, field) + 1 if value == "moved" else value)
    with pytest.raises(ValueError, match=words):
        check(native, native.cpu_experts_forward(layer._handle, batch))
    assert not batch.kept.any()
    assert native.cpu_experts_forward(layer._handle, None) == 1


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("struct_bytes", 0, "weights: struct_bytes 0, must be"),
        ("gate_up_precision", 9, "gate_up: unknown precision 9"),
        ("down_precision", -1, "down: unknown precision -1"),
        ("gate_up_precision", 6, "gate_up: 32 inputs, must be a multiple of 256"),
        ("down_precision", 7, "down: 16 inputs, must be a multiple of 256"),
        ("isa", 7, "isa"),
        ("experts", 0, "experts"),
        ("model", -4, "model"),
        ("width", 2**31 - 1, "width"),
        ("gate_up", None, "gate_up: null"),
        ("down", None, "down: null"),
        ("down", 64 + 8, "not aligned to 64"),
        ("gate_up_bytes", 64, "packed weights"),
        ("threads", 5000, "threads"),
        ("max_rows", 2**30, "max_rows"),
    ],
)
def test_the_library_checks_weights_itself(layer, native, field, value, words):
    gate_up, down = layer._packed
    shape = (4, 32, 16)
    pointers = (gate_up.ctypes.data, down.ctypes.data, gate_up.nbytes, down.nbytes)
    weights = Weights(ctypes.sizeof(Weights), 0, 0, *shape, *pointers, 1, 0, 64)
    setattr(weights, field, value)
    handle = ctypes.c_uint64(77)
    with pytest.raises(ValueError, match=words):
        check(native, native.cpu_experts_open(weights, handle))
    assert handle.value == 77


def test_statuses_of_unknown_handles_and_null(native):
    with pytest.raises(Closed):
        check(native, native.cpu_experts_close(12345))
    assert native.cpu_experts_open(None, ctypes.c_uint64()) == 1
    assert native.cpu_experts_open(Weights(), None) == 1


def test_an_instruction_set_the_processor_lacks_is_unsupported(built, native):
    if native.cpu_experts_best_isa() == 4:
        pytest.skip("this processor has all of them")
    with pytest.raises(Unsupported, match="instruction set"):
        Experts(*random_layer(2, 32, 16), isa="amx")
