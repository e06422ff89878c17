"""The specification against a sum in float64; the fallback and the kernel, interpreted, against the specification."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import choice, testing
from pallas_kernels.mla_prefill import CHECKS, Unsupported, merge, mla_prefill, reference, tpu, xla
from pallas_kernels.mla_prefill.schedule import START, schedule

pytestmark = pytest.mark.deep

KINDS = [
    testing.ragged,
    functools.partial(testing.ragged, causal=False),
    lambda q_lens, _: testing.packed(q_lens),
    functools.partial(testing.packed_prefixes, page=16),
    lambda q_lens, kv_lens: testing.scattered(max(q_lens), max(kv_lens), len(q_lens)),
]


def any_ranges(most):
    """Ranges of all kinds, of one to three prompts of up to `most` queries and `most` keys."""
    prompts = st.lists(st.tuples(*[st.integers(0, most)] * 2), min_size=1, max_size=3)
    return st.builds(lambda make, lens: make(*zip(*lens, strict=True)), st.sampled_from(KINDS), prompts)


each_case = pytest.mark.parametrize("case", testing.MLA_PREFILL, ids=lambda case: case.name)


def double(case, inputs):
    """The specification in float64, by numpy, one query at a time: what the reference itself is judged by."""
    q, k, v = (np.asarray(inputs[name].astype(jnp.float32), np.float64) for name in "qkv")
    out, lse = np.zeros((*q.shape[:3], case.value)), np.full(q.shape[:3], -np.inf)
    for b, row in enumerate(case.ranges):
        for t, (first, stop) in enumerate(row):
            if first < stop:
                s = np.einsum("nh,snh->ns", q[b, t], k[b, first:stop]) * case.scale
                top = s.max(axis=-1)
                w = np.exp(s - top[:, None])
                out[b, t] = np.einsum("ns,snv->nv", w, v[b, first:stop]) / w.sum(axis=-1)[:, None]
                lse[b, t] = top + np.log(w.sum(axis=-1))
    return out, lse


@functools.cache
def wanted(case):
    call = functools.partial(reference.mla_prefill, scale=case.scale)
    return jax.jit(call)(**testing.mla_prefill_inputs(case))


@functools.cache
def fallback(case):
    return mla_prefill(**testing.mla_prefill_inputs(case), scale=case.scale, impl="xla")


def interpreted(case, inputs, block, chunk):
    """The TPU kernel on memory that is NaN until written, with copies as late as possible; reports races."""
    sizes = {"block": block, "chunk": chunk}
    return tpu.mla_prefill(**inputs, scale=case.scale, sizes=sizes, interpret=pltpu.InterpretParams(detect_races=True))


@given(
    tiles=st.lists(st.integers(1, 70), min_size=1, max_size=20).map(tuple),
    lines=st.integers(1, 40),
    near=st.integers(1, 9),
    units=st.integers(1, 66),
)
def test_units_take_every_piece_once_and_none_much_more_than_the_others(tiles, lines, near, units):
    table = schedule(tiles, lines=lines, near=near, units=units)
    taken = [row[1 : 1 + row[0]] for row in table]
    assert sorted(np.concatenate(taken)) == list(range(lines * len(tiles)))
    costs = np.asarray(tiles) + START
    loads = [int(costs[pieces % len(tiles)].sum()) for pieces in taken]
    assert max(loads) <= sum(loads) / units + costs.max()


@pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")
@given(ranges=any_ranges(400), size=st.sampled_from([1, 2]), chunk=st.sampled_from([64, 128]))
def test_a_warpgroup_computes_all_tiles_that_it_needs_and_masks_those_that_some_query_needs_in_part(ranges, size, chunk):
    from pallas_kernels.mla_prefill import gpu

    inputs = testing.mla_prefill_inputs(testing.MlaPrefillCase("", ranges, heads=1, width=1, value=1))
    bounds = (np.asarray(inputs[name]) for name in ("first", "stop"))
    first, stop = (np.pad(x, ((0, 0), (0, -x.shape[1] % (size * 128)))) for x in bounds)
    stop = np.where(first < stop, stop, 0)
    first = np.minimum(first, stop)
    walk = gpu.Walk(*np.moveaxis(np.asarray(gpu._walks(jnp.array(first), jnp.array(stop), size, chunk)), -1, 0))
    first, stop = (x.reshape(len(ranges), -1, 64) for x in (first, stop))
    some = first < stop
    assert (walk.begin < walk.end).all()
    for low, high in itertools.pairwise((0 * walk.begin, walk.begin, walk.clear, walk.mixed, walk.end, walk.tiles)):
        assert (low <= high).all()
    for shared, blocks in ((walk.start, 2 * size), (walk.tiles, 2 * size), (walk.end, 2), (walk.held, stop.shape[1])):
        assert (np.ptp(shared.reshape(len(ranges), -1, blocks), axis=-1) == 0).all()

    def key(tile):
        return np.where(some, ((walk.start + tile) * chunk)[..., None], 0)

    def holds(condition, where):
        assert condition[some & where[..., None]].all()

    anywhere, unmasked = walk.tiles > 0, walk.clear < walk.mixed
    holds((key(walk.begin) <= first) & (stop <= key(walk.end)), anywhere)
    holds((first <= key(walk.clear)) & (key(walk.mixed) <= stop), unmasked)
    holds(first <= key(walk.mixed), walk.mixed < walk.end)  # where only `stop` is compared
    assert (walk.held[:, 0] == stop.max(axis=(1, 2))).all()


def test_a_long_prompt_is_shared_out_within_a_hundredth():
    tiles = tuple(range(2, 34, 2))  # 4,096 tokens
    table = schedule(tiles, lines=128, near=4, units=66)
    loads = [sum(tiles[piece % 16] + START for piece in row[1 : 1 + row[0]]) for row in table]
    assert max(loads) <= 1.01 * np.mean(loads)


@each_case
def test_the_reference_is_the_sum_it_says(case):
    sums, lse = double(case, testing.mla_prefill_inputs(case))
    assert testing.error(wanted(case)[0], sums) < 1e-5
    assert testing.lse_error(wanted(case)[1], lse) < 1e-5


def test_prompts_packed_in_a_row_are_each_what_torch_says():
    torch = pytest.importorskip("torch", reason="torch comes with the parity tests")
    case = testing.MlaPrefillCase("", testing.packed(testing.LENS))
    inputs = testing.mla_prefill_inputs(case, dtype=jnp.float32)
    q, k, v = (torch.tensor(np.asarray(inputs[name])).transpose(1, 2) for name in "qkv")
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True, scale=case.scale)
    lines = np.split(np.arange(sum(testing.LENS)), np.cumsum(testing.LENS)[:-1])
    alone = torch.cat([attend(*(x[:, :, line] for x in (q, k, v))) for line in lines], dim=2).transpose(1, 2).numpy()
    calls = reference.mla_prefill, functools.partial(mla_prefill, impl="xla")
    for out in (call(**inputs, scale=case.scale)[0] for call in calls):
        assert testing.error(out[:, : alone.shape[1]], alone) < 1e-5
        assert (out[:, alone.shape[1] :] == 0).all()


@pytest.mark.parametrize("outside", [-7, 0])
def test_ranges_beyond_the_keys_are_clipped_and_empty_ones_may_be_written_in_any_way(outside):
    case = testing.MlaPrefillCase("", testing.packed((9, 20)), spare=0)
    inputs = testing.mla_prefill_inputs(case, dtype=jnp.float32)
    inputs["first"] = jnp.full_like(inputs["first"], outside).at[0, :3].set(jnp.array([40, 12, 29]))
    inputs["stop"] = jnp.full_like(inputs["stop"], 90).at[0, :3].set(jnp.array([50, 5, 29]))
    whole = testing.MlaPrefillCase("", (((0, 0),) * 3 + ((0, 29),) * 26,), spare=0)
    sums, lse = double(whole, inputs)
    answers = [plain.mla_prefill(**inputs, scale=case.scale) for plain in (reference, xla)]
    for out, got in [*answers, interpreted(case, inputs, 128, 128)]:
        assert testing.error(out, sums) < 1e-5
        assert testing.lse_error(got, lse) < 1e-5


@each_case
def test_the_fallback_computes_the_reference_whatever_lies_past_the_end(case):
    out, lse = fallback(case)
    assert out.dtype == jnp.bfloat16
    assert lse.dtype == jnp.float32
    assert testing.error(out, wanted(case)[0]) < 3e-3
    assert testing.lse_error(lse, wanted(case)[1]) < 1e-5


@pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")
@pytest.mark.parametrize("case", [case for case in testing.MLA_PREFILL if case.width >= 192], ids=lambda case: case.name)
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted, case):
    row = interpreted("mla_prefill")[1][case.name]
    assert row["error"] <= 2 * row["fallback"]
    assert row["lse"] < 1e-5


@pytest.mark.once
@each_case
def test_the_interpreted_kernel_is_within_twice_the_fallbacks_error_and_has_no_race(case, capfd):
    out, lse = interpreted(case, testing.mla_prefill_inputs(case), 256, 256)
    assert testing.error(out, wanted(case)[0]) <= 2 * testing.error(fallback(case)[0], wanted(case)[0])
    assert testing.lse_error(lse, wanted(case)[1]) < 1e-5
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("name", ["ragged, one row empty", "queries without a key, nothing causal"])
def test_padding_that_looks_like_numbers_is_as_harmless_as_nan(name):
    case = next(case for case in testing.MLA_PREFILL if case.name == name)
    inputs = {k: jnp.nan_to_num(v, nan=3.0) for k, v in testing.mla_prefill_inputs(case).items()}
    ours = mla_prefill(**inputs, scale=case.scale, impl="xla"), interpreted(case, inputs, 256, 256)
    for out, lse in ours:
        assert testing.error(out, wanted(case)[0]) < 3e-3
        assert testing.lse_error(lse, wanted(case)[1]) < 1e-5


@settings(max_examples=8)
@given(
    ranges=any_ranges(60),
    heads=st.integers(1, 3),
    sizes=st.sampled_from([(16, 16), (7, 33)]),
    seed=st.integers(0, 9),
)
def test_the_fallback_holds_for_any_ranges_blocks_and_chunks(ranges, heads, sizes, seed):
    case = testing.MlaPrefillCase("any", ranges, heads, width=24, value=16)
    inputs = testing.mla_prefill_inputs(case, seed, jnp.float32)
    sums, lse = double(case, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "BLOCK", sizes[0])
        patch.setattr(xla, "CHUNK", sizes[1])
        out, got = xla.mla_prefill(**inputs, scale=case.scale)
    assert testing.error(out, sums) < 1e-5
    assert testing.lse_error(got, lse) < 1e-5


@settings(max_examples=4)
@given(
    ranges=any_ranges(200),
    heads=st.integers(1, 3),
    sizes=st.sampled_from([(128, 128), (256, 128), (128, 512)]),
    seed=st.integers(0, 9),
)
def test_the_interpreted_kernel_holds_for_any_ranges_blocks_and_chunks(ranges, heads, sizes, seed):
    case = testing.MlaPrefillCase("any", ranges, heads, width=64, value=32)
    inputs = testing.mla_prefill_inputs(case, seed, jnp.float32)
    sums, lse = double(case, inputs)
    out, got = interpreted(case, inputs, *sizes)
    assert testing.error(out, sums) < 1e-5
    assert testing.lse_error(got, lse) < 1e-5


def test_the_fallback_never_holds_all_scores_at_a_real_size():
    q, v = (jax.ShapeDtypeStruct((1, 4096, 128, width), jnp.bfloat16) for width in (192, 128))
    bound = jax.ShapeDtypeStruct((1, 4096), jnp.int32)
    compiled = jax.jit(functools.partial(xla.mla_prefill, scale=0.1)).lower(q, q, v, bound, bound).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 128 * 4096 * 4096 * 4 / 4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_long_prefix_in_pieces_merges_to_the_whole(dtype):
    q_lens, kv_lens = (20, 9, 3), (150, 9, 40)
    case = testing.MlaPrefillCase("", testing.ragged(q_lens, kv_lens), heads=3)
    inputs = testing.mla_prefill_inputs(case, dtype=dtype)
    sums, wanted_lse = double(case, inputs)
    q, k, v, first, stop = inputs.values()
    prefix = (jnp.array(kv_lens) - jnp.array(q_lens))[:, None]
    rows = jax.vmap(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, q.shape[1]))
    own_k, own_v = (rows(jnp.pad(x, ((0, 0), (0, q.shape[1]), (0, 0), (0, 0))), prefix[:, 0]) for x in (k, v))
    out, lse = mla_prefill(q, own_k, own_v, first, jnp.maximum(stop - prefix, 0), scale=case.scale)
    out = out.astype(jnp.float32)
    for at in range(0, 130, 50):
        piece = jnp.where(stop > 0, jnp.clip(prefix - at, 0, 50), 0)
        part = mla_prefill(q, k[:, at : at + 50], v[:, at : at + 50], first, piece, scale=case.scale)
        out, lse = merge(out, lse, *part)
    assert out.dtype == jnp.float32
    assert testing.error(out, sums) < (3e-3 if dtype == jnp.bfloat16 else 1e-5)
    assert testing.lse_error(lse, wanted_lse) < 1e-5


@pytest.mark.parametrize(("T", "S"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("impl", ["xla", "mosaic_tpu", "mosaic_gpu"])
def test_no_queries_or_no_keys_give_zeros_and_an_lse_of_minus_infinity(monkeypatch, impl, T, S):
    monkeypatch.setattr(choice, "choose", lambda *_: impl)
    q, k, v = (jnp.ones((2, n, 3, width), jnp.bfloat16) for n, width in ((T, 192), (S, 192), (S, 128)))
    none = jnp.zeros((2, T), jnp.int32)
    out, lse = mla_prefill(q, k, v, none, none + 3, scale=1.0)
    assert out.shape == (2, T, 3, 128)
    assert out.dtype == jnp.bfloat16
    assert lse.shape == (2, T, 3)
    assert lse.dtype == jnp.float32
    assert (out == 0).all()
    assert np.isneginf(lse).all()


def test_merging_with_nothing_changes_nothing_and_nothing_with_nothing_is_nothing():
    out, lse = jnp.array([[1.0, -2.0]], jnp.bfloat16), jnp.array([0.5])
    zero, none = jnp.zeros_like(out), jnp.array([-jnp.inf])
    for a, b in [((out, lse), (zero, none)), ((zero, none), (out, lse))]:
        merged, merged_lse = merge(*a, *b)
        assert merged.dtype == jnp.bfloat16
        np.testing.assert_array_equal(merged, out)
        np.testing.assert_array_equal(merged_lse, lse)
    merged, merged_lse = merge(zero, none, zero, none)
    assert (merged == 0).all()
    assert np.isneginf(merged_lse).all()


def test_a_named_implementation_that_cannot_raises_with_the_reason():
    case = testing.MlaPrefillCase("", testing.packed((5,)), heads=4, width=48, value=16)
    inputs = testing.mla_prefill_inputs(case)
    with pytest.raises(Unsupported, match="no impl"):
        mla_prefill(**inputs, scale=1.0, impl="cuda")
    assert "48" in CHECKS["mosaic_tpu"](inputs["q"], inputs["k"], inputs["v"])
    with pytest.raises(Unsupported, match="48"):
        mla_prefill(**inputs, scale=1.0, impl="mosaic_tpu")
    exact = testing.mla_prefill_inputs(case._replace(width=192, value=128), dtype=jnp.float32)
    with pytest.raises(Unsupported, match="float32"):
        mla_prefill(**exact, scale=1.0, impl="mosaic_tpu")
    assert mla_prefill(**inputs, scale=1.0)[0].shape == (1, 10, 4, 16)


@pytest.mark.skipif(choice.too_old() is not None, reason="the GPU kernel needs JAX 0.11.2")
def test_the_gpu_kernel_interpreted_has_no_race(interpreted):
    assert "RACE DETECTED" not in interpreted("mla_prefill")[0]
