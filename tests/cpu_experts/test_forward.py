"""A layer's forward against the specification, in every precision and on every instruction set."""

import ctypes
import itertools

import ml_dtypes
import numpy as np
import pytest
from moe_layers import (
    SANITIZED,
    Batch,
    at_a_page_end,
    distance,
    fitting,
    guarded,
    parts_of,
    random_batch,
    random_layer,
    random_parts,
)

import cpu_experts
from cpu_experts import Experts, layout, library
from cpu_experts.reference import BOUNDS, FEW

pytestmark = pytest.mark.deep

PRECISIONS = list(layout.FORMATS)
SIZES = [(3, 64, 48, 1, 2), (5, 100, 77, 9, 3), (4, 33, 1, 70, 2), (1, 9, 17, 40, 1), (7, 160, 257, 150, 4)]
ROWS = [1, 3, 4, 5, 8, 12, 13, 16, 17, 31, 32, 33, 129]
# Of formats that become others first, longer inputs take sanitizers minutes; shorter ones have several slices, too.
LONG_INPUTS = [(1100, 33), (33, 1100)] if SANITIZED else [(1100, 33), (33, 1100), (2100, 33), (33, 2100)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_size_is_within_its_bound(isa, precision):
    for experts, model, width, tokens, chosen in SIZES:
        model, width = fitting(precision, model, width)
        parts = random_parts(precision, experts, model, width)
        batch = random_batch(tokens, model, experts, chosen)
        with Experts(*parts, precision, threads=2, isa=isa) as layer:
            assert distance(layer.forward(*batch), batch, parts, precision) < BOUNDS[precision], (model, width)


@pytest.mark.parametrize(
    ("precision", "down", "model", "width"),
    [
        ("q4_k", "q6_k", 256, 512),
        ("q4_k", "q8_0", 512, 77),
        ("int8", "bf16", 70, 40),
        ("bf16", "int8", 70, 41),
        ("int8", "fp8_block", 130, 33),
    ],
)
def test_down_may_have_a_precision_of_its_own(isa, precision, down, model, width):
    gate, up, last = random_layer(3, model, width)
    parts = parts_of([gate, up], precision) + parts_of([last], down)
    for tokens in (2, 90):
        batch = random_batch(tokens, model, 3, 2)
        with Experts(*parts, precision, down_precision=down, threads=2, isa=isa) as layer:
            error = distance(layer.forward(*batch), batch, parts, precision, down)
            assert error < max(BOUNDS[precision], BOUNDS[down])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_number_of_rows_of_one_expert_is_within_its_bound(isa, precision):
    model, width = fitting(precision, 70, 40)
    parts = random_parts(precision, 2, model, width)
    with Experts(*parts, precision, threads=2, isa=isa) as layer:
        for rows in ROWS:
            batch = random_batch(rows, model, 2, 1)._replace(ids=np.ones((rows, 1), np.int32))
            bounds = BOUNDS | FEW if rows <= 8 else BOUNDS  # codes stay what they are for few rows
            assert distance(layer.forward(*batch), batch, parts, precision) < bounds[precision], rows


def test_int8_rounds_as_the_specification_does(isa):
    parts = parts_of(random_layer(1, 225, 130, seed=78), "int8")
    with Experts(*parts, "int8", threads=1, isa=isa) as layer:
        for seed in range(20):
            batch = random_batch(1, 225, 1, 1, seed)._replace(ids=np.zeros((1, 1), np.int32))
            assert distance(layer.forward(*batch), batch, parts, "int8") < 1e-6  # a code that is off by one costs 1e-2


@pytest.mark.parametrize("precision", PRECISIONS)
def test_inputs_of_several_slices_are_within_their_bound(isa, precision):
    for model, width in (fitting(precision, *sizes) for sizes in LONG_INPUTS):
        parts = random_parts(precision, 1, model, width)
        with Experts(*parts, precision, threads=2, isa=isa) as layer:
            for rows in (20, 45, 200):  # of many blocks slices are shorter
                batch = random_batch(rows, model, 1, 1)._replace(ids=np.zeros((rows, 1), np.int32))
                assert distance(layer.forward(*batch), batch, parts, precision) < BOUNDS[precision], (model, width, rows)


@pytest.mark.parametrize("precision", ["int4_g32", "q4_k"])
@pytest.mark.parametrize(("model", "width"), [(2100, 40), (300, 90)])
def test_a_few_numbers_of_a_row_that_are_far_larger_leave_the_others_theirs(isa, precision, model, width):
    model, width = fitting(precision, model, width)
    parts = random_parts(precision, 1, model, width)
    with Experts(*parts, precision, threads=2, isa=isa) as layer:
        for size in (30, 1000, 1e6):
            batch = random_batch(45, model, 1, 1)
            batch.x[:, [5, model - 1]] *= size
            batch.x[7] = batch.x[8] = 0
            batch.x[8, 3] = size  # and one alone
            assert distance(layer.forward(*batch), batch, parts, precision) < BOUNDS[precision], size


@pytest.mark.parametrize("precision", ["int4_g32", "q4_k"])
def test_far_larger_numbers_cost_few_rows_nothing(isa, precision):
    model, width = fitting(precision, 2100, 90)
    gate, up, down = random_layer(1, model, width)
    gate[..., [5, model - 1]] = up[..., [5, model - 1]] = 0  # or the output would be theirs alone
    parts = parts_of((gate, up, down), precision)
    with Experts(*parts, precision, threads=2, isa=isa) as layer:
        for rows, size in itertools.product((1, 8), (30, 1000, 1e6)):
            batch = random_batch(rows, model, 1, 1)
            batch.x[:, [5, model - 1]] *= size
            assert distance(layer.forward(*batch), batch, parts, precision) < FEW[precision], (rows, size)


@pytest.mark.parametrize("rows", [4, 40])
def test_scales_of_int4_may_be_zero_negative_or_very_small(isa, rows):
    parts = parts_of(random_layer(1, 300, 90), "int4_g32")
    rng = np.random.default_rng(0)
    for _, scale in parts:
        scale[rng.random(scale.shape) < 0.2] = 0
        scale[rng.random(scale.shape) < 0.2] |= 0x8000
        scale[:, 3] = 0x0080  # 1.2e-38 in all groups
    batch = random_batch(rows, 300, 1, 1)
    with Experts(*parts, "int4_g32", threads=2, isa=isa) as layer:
        out = layer.forward(*batch)
    assert np.isfinite(out).all()
    assert distance(out, batch, parts, "int4_g32") < BOUNDS["int4_g32"]


@pytest.mark.parametrize("rows", [4, 40])
def test_a_scale_of_int4_that_is_no_number_is_not_hidden(isa, rows):
    parts = parts_of(random_layer(1, 300, 90), "int4_g32")
    parts[2][1][0, 5, 1] = 0x7FC0  # of down's output 5
    batch = random_batch(rows, 300, 1, 1)
    with Experts(*parts, "int4_g32", threads=2, isa=isa) as layer:
        assert np.isnan(layer.forward(*batch)).any(axis=0).nonzero()[0].tolist() == [5]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_rows_of_an_expert_that_several_subtasks_share_give_repeated_bits(best, precision):
    """So many that one subtask does not take them all, and some of another expert; on any number of threads."""
    model, width = fitting(precision, 600, 70)
    parts = random_parts(precision, 2, model, width)
    batches = [random_batch(rows + 5, model, 2, 1) for rows in (384, 385, 1000)]
    batches = [batch._replace(ids=(np.arange(len(batch.x)) >= len(batch.x) - 5).astype(np.int32)[:, None]) for batch in batches]
    outs = []
    for threads in (1, 2, 5):
        with Experts(*parts, precision, threads=threads, isa=best) as layer:
            outs.append([layer.forward(*batch) for batch in batches])
    for batch, *found in zip(batches, *outs, strict=True):
        assert distance(found[0], batch, parts, precision) < BOUNDS[precision]
        assert all((out == found[0]).all() for out in found)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nothing_is_read_or_written_behind_the_arguments(isa, monkeypatch, precision):
    """All of them, and the packed weights, end at pages that may not be touched."""
    monkeypatch.setattr(layout, "_pages", guarded)
    model, width = fitting(precision, 83, 45)
    with Experts(*random_layer(3, model, width), precision, threads=2, isa=isa) as layer:
        for tokens, dtype in itertools.product((1, 7, 37), (np.float32, ml_dtypes.bfloat16)):
            x, ids, weights = random_batch(tokens, model, 3, 2)
            x, out = x.astype(dtype), np.empty((tokens, model), dtype)
            ended = [at_a_page_end(a) for a in (x, ids, weights, out)]
            assert (layer.forward(*ended) == layer.forward(x, ids, weights, out)).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_one_to_4096_tokens(best, precision):
    model, width = fitting(precision, 96, 64)
    parts = random_parts(precision, 8, model, width)
    with Experts(*parts, precision, threads=2, isa=best) as layer:
        for tokens in (1, 2, 16, 100, 1000, 4096):
            batch = random_batch(tokens, model, 8, 3)
            assert distance(layer.forward(*batch), batch, parts, precision) < BOUNDS[precision], tokens


def test_the_largest_floats_are_numbers_in_int8_too(isa):
    gate = np.full((1, 32, 64), 1e-38, np.float32)
    parts = parts_of([gate, gate, np.ones((1, 64, 32), np.float32)], "int8")
    x = np.zeros((1, 64), np.float32)
    x[0, 0] = np.finfo(np.float32).max
    batch = Batch(x, np.zeros((1, 1), np.int32), np.ones((1, 1), np.float32))
    with Experts(*parts, "int8", isa=isa) as layer:
        assert distance(layer.forward(*batch), batch, parts, "int8") < BOUNDS["int8"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_skewed_routing(best, precision):
    """Nearly all rows to one expert, some experts empty, one token with none at all, one that chose an expert twice."""
    (size,) = fitting(precision, 64)
    parts = random_parts(precision, 16, size, size)
    batch = random_batch(300, size, 16, 2)
    ids = np.where(np.arange(600).reshape(300, 2) % 50 == 0, batch.ids % 4 + 10, 3).astype(np.int32)
    ids[0] = 16
    batch = batch._replace(ids=ids)
    with Experts(*parts, precision, threads=3, isa=best) as layer:
        assert distance(layer.forward(*batch), batch, parts, precision) < BOUNDS[precision]


@pytest.mark.parametrize("precision", ["bf16", "int4_g32"])
def test_threads_that_cut_the_panels_otherwise_give_the_same_bits(built, precision):
    """Of an expert with so many rows of so many hidden values that K is cut; the last block has one row, there are outliers."""
    gate, up, down = random_layer(1, 2048, 6144)
    gate[:, 3500] *= 50
    parts = parts_of((gate, up, down), precision)
    batch = random_batch(321, 2048, 1, 1)._replace(ids=np.zeros((321, 1), np.int32))
    outs = []
    for threads in (1, 2, 16):
        with Experts(*parts, precision, threads=threads) as layer:
            outs.append(layer.forward(*batch))
    assert all((out == outs[0]).all() for out in outs)


@pytest.mark.parametrize("pair", [("int4_g32", "int8"), ("int8", "int4_g32"), ("q4_k", "bf16"), ("fp8_block", "int4_g128")])
def test_two_formats_in_a_layer(best, pair):
    """Whose rows have layouts of their own."""
    layer, batch = random_layer(3, 256, 256), random_batch(150, 256, 3, 2)
    parts = [layout.quantize(w, p) for w, p in zip(layer, (pair[0], pair[0], pair[1]), strict=True)]
    with Experts(*parts, pair[0], down_precision=pair[1], threads=2, isa=best) as experts:
        out = experts.forward(*batch)
    assert distance(out, batch, parts, *pair) < max(BOUNDS[p] for p in pair)


def test_no_tokens_and_no_experts_chosen(built):
    parts = parts_of(random_layer(4, 32, 32), "bf16")
    with Experts(*parts) as layer:
        assert layer.forward(*random_batch(0, 32, 4, 2)).shape == (0, 32)
        none = random_batch(5, 32, 4, 2)._replace(ids=np.full((5, 2), 4, np.int32))
        assert not layer.forward(*none).any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_repeated_runs_give_the_same_bits_on_any_number_of_threads(isa, precision):
    model, width = fitting(precision, 128, 96)
    parts = random_parts(precision, 6, model, width)
    batch = random_batch(100, model, 6, 3)  # more than a block of rows an expert: threads take them in turn
    with Experts(*parts, precision, threads=1, isa=isa) as layer:
        first = layer.forward(*batch)
    for threads in (1, 2, 5):
        with Experts(*parts, precision, threads=threads, isa=isa) as layer:
            for _ in range(20):
                assert (layer.forward(*batch) == first).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tokens_in_several_turns_are_the_same(best, precision):
    """Scratch for 7 rows, so 3 tokens at once: the few-row kernels see less, so bits may differ, bounds may not."""
    model, width = fitting(precision, 64, 32)
    parts = random_parts(precision, 4, model, width)
    batch = random_batch(50, model, 4, 2)
    with Experts(*parts, precision, max_rows=7, isa=best) as layer:
        assert distance(layer.forward(*batch), batch, parts, precision) < BOUNDS[precision]


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_bfloat16_in_and_out(isa, precision):
    parts = random_parts(precision, 4, 72, 40)
    batch = random_batch(20, 72, 4, 2)
    x = batch.x.astype(ml_dtypes.bfloat16)
    batch = batch._replace(x=x.astype(np.float32))
    out = np.empty(x.shape, ml_dtypes.bfloat16)
    with Experts(*parts, precision, isa=isa) as layer:
        exact = layer.forward(*batch)
        assert layer.forward(x, batch.ids, batch.weights, out) is out
        assert (layer.forward(x, batch.ids, batch.weights) == exact).all()
    assert (out == exact.astype(ml_dtypes.bfloat16)).all()
    assert distance(out, batch, parts, precision) < BOUNDS[precision] + 2**-8


@pytest.mark.parametrize(
    ("isa", "threads", "sizes", "tokens"),
    [
        ("portable", 2, (7168, 2048), 36 // 8),  # DeepSeek-V3's
        ("portable", 2, (2**16, 2**16), 1),
        ("portable", 1, (64, 32), 1024),
        ("avx2", 2, (7168, 2048), 877 // 8),
        ("avx2", 32, (7168, 2048), 1024),
        ("avx512", 2, (7168, 2048), 1024),
        ("amx", 1, (2**16, 2**16), 1024),
    ],
)
def test_a_turn_is_bounded_by_its_work(isa, threads, sizes, tokens):
    """So that Ctrl-C is heard in about a second."""
    layer = Experts.__new__(Experts)
    layer._isa, layer._cores, layer._max_rows, (layer.model, layer.width) = isa, threads, 8192, sizes
    assert layer._tokens_per_call(8) == tokens


@pytest.mark.parametrize("isa", ["portable", "avx2"], indirect=True)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_where_work_bounds_turns_their_bits_are_those_of_one(isa, precision, monkeypatch):
    model, width = fitting(precision, 64, 32)
    parts, batch = random_parts(precision, 4, model, width), random_batch(50, model, 4, 2)
    with Experts(*parts, precision, isa=isa, threads=2) as layer:
        whole = layer.forward(*batch)
        monkeypatch.setattr(cpu_experts, "_CALL_WORK", {isa: 3 * model * width})
        assert layer._tokens_per_call(2) == 3
        assert (layer.forward(*batch) == whole).all()


def test_turns_of_the_library_are_those_of_python(built, native):
    """Python calls it turn by turn; whoever calls it for all tokens at once gets the same bits."""
    batch = random_batch(50, 64, 4, 2)
    out = np.empty_like(batch.x)
    with Experts(*random_layer(4, 64, 32), "int4_g32", max_rows=7) as layer:
        pointers = (a.ctypes.data for a in (*batch, out))
        whole = library.ForwardCall(ctypes.sizeof(library.ForwardCall), 50, 2, 0, 0, *pointers)
        library.check(native, native.cpu_experts_forward(layer._handle, whole))
        assert (layer.forward(*batch) == out).all()


def test_floats_are_quantised_as_layout_does(built):
    for precision in PRECISIONS:
        model, width = fitting(precision, 64, 32)
        layer, batch = random_layer(3, model, width), random_batch(8, model, 3, 2)
        with Experts(*layer, precision) as from_floats, Experts(*parts_of(layer, precision), precision) as from_parts:
            assert (from_floats.forward(*batch) == from_parts.forward(*batch)).all()


def test_extreme_rows_stay_in_their_row(isa):
    """Zeros, tiny, huge, infinite and NaN rows: each gives its own result, and none of them touches another token's."""
    parts = parts_of(random_layer(2, 64, 32), "bf16")
    batch = random_batch(6, 64, 2, 1)._replace(ids=np.zeros((6, 1), np.int32))
    x = batch.x.copy()
    x[1], x[2], x[3], x[4, 5], x[5, 0] = 0, x[2] * 1e-30, x[3] * 1e4, np.inf, np.nan
    for precision in ("bf16", "int8"):
        parts = random_parts(precision, 2, 64, 32)
        with Experts(*parts, precision, isa=isa) as layer:
            plain, out = layer.forward(*batch), layer.forward(x, batch.ids, batch.weights)
        assert (out[0] == plain[0]).all()
        assert not out[1].any()
        assert np.isfinite(out[:4]).all()
        assert not np.isfinite(out[4:]).any()
        usual = Batch(x[:4], batch.ids[:4], batch.weights[:4])
        assert distance(out[[0, 3]], Batch(*(a[[0, 3]] for a in usual)), parts, precision) < BOUNDS[precision]


@pytest.mark.parametrize("precision", ["int4_g32", "q4_k", "fp8_block", "q8_0"])
def test_rows_that_are_no_numbers_stay_alone(isa, precision):
    """However few or many rows an expert has: for each there are other kernels."""
    with Experts(*random_parts(precision, 1, 256, 256), precision, isa=isa) as layer:
        for rows in (3, 12, 40, 100):
            batch = random_batch(rows, 256, 1, 1)._replace(ids=np.zeros((rows, 1), np.int32))
            x = batch.x.copy()
            x[1, 200], x[2, 0] = np.nan, -np.inf
            plain, out = layer.forward(*batch), layer.forward(x, batch.ids, batch.weights)
            others = [0, *range(3, rows)]
            assert (out[others] == plain[others]).all(), rows
            assert not np.isfinite(out[1:3]).any(), rows


@pytest.mark.parametrize("precision", ["int4_g32", "q4_k"])
def test_outliers_in_some_blocks(isa, precision):
    """Of 150 rows of one expert, in the second block and in the last; others keep their bits."""
    parts = random_parts(precision, 1, 512, 256)
    batch = random_batch(150, 512, 1, 1)._replace(ids=np.zeros((150, 1), np.int32))
    x = batch.x.copy()
    x[40, 17], x[40, 300], x[149, 511] = 500, -700, 900
    with Experts(*parts, precision, threads=2, isa=isa) as layer:
        plain, out = layer.forward(*batch), layer.forward(x, batch.ids, batch.weights)
    far = np.isin(np.arange(150), (40, 149))
    assert (out[~far] == plain[~far]).all()
    taken = Batch(x[far], batch.ids[far], batch.weights[far])
    assert distance(out[far], taken, parts, precision) < BOUNDS[precision]


@pytest.mark.parametrize("tokens", [1, 40])
def test_every_q8_0_code_is_exact(isa, tokens):
    """-128 too, which no quantiser makes but a file may hold. One hidden value reaches an output for each code."""
    codes = np.arange(-128, 128)
    down = np.zeros((1, 256, 32), np.int8)
    down[0, :, 0] = codes
    gate = np.zeros((1, 32, 256), np.int8)
    gate[0, 0, 0] = 1
    parts = [(m, np.ones((*m.shape[:2], m.shape[2] // 32), np.float16)) for m in (gate, gate, down)]
    x = np.full((tokens, 256), 3, np.float32)
    with Experts(*parts, "q8_0", isa=isa) as layer:
        out = layer.forward(x, np.zeros((tokens, 1), np.int32), np.ones((tokens, 1), np.float32))
    assert (out == codes * out[:, [129]]).all()
    assert (out[:, 129] > 8).all()


@pytest.mark.amx
@pytest.mark.parametrize("precision", PRECISIONS)
def test_tiles_and_their_model_agree(native, emulated, monkeypatch, precision):
    """The instructions flush denormals and round sums in their own order: bounds, not bits, but for int8."""
    if native.cpu_experts_best_isa() < 4:
        pytest.skip("this processor has no AMX, or the system refuses it")
    model, width = fitting(precision, 160, 96)
    parts = random_parts(precision, 4, model, width)
    batch = random_batch(100, model, 4, 2)
    outs = []
    for tiles in (native, emulated):
        monkeypatch.setattr("cpu_experts.load", lambda tiles=tiles: tiles)
        with Experts(*parts, precision, isa="amx") as layer:
            outs.append(layer.forward(*batch))
    assert np.linalg.norm(outs[0] - outs[1]) <= BOUNDS[precision] * np.linalg.norm(outs[1])
    if precision == "int8":
        assert np.abs(outs[0] - outs[1]).max() < 1e-5 * np.abs(outs[1]).max()
