"""The specification against a sum in float64; the fallback and the kernel, interpreted, against the specification."""

import functools

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

each_case = pytest.mark.parametrize("case", testing.MLA_PREFILL, ids=lambda case: case.name)


def double(case, inputs):
    """The specification in float64, by numpy, one query at a time: what the reference itself is judged by."""
    q, k, v = (np.asarray(inputs[name].astype(jnp.float32), np.float64) for name in "qkv")
    out, lse = np.zeros((*q.shape[:3], case.value)), np.full(q.shape[:3], -np.inf)
    for b, (asked, held) in enumerate(zip(case.q_lens, case.kv_lens, strict=True)):
        for t in range(asked):
            seen = held - asked + t + 1 if case.causal else held
            if seen > 0:
                s = np.einsum("nh,snh->ns", q[b, t], k[b, :seen]) * case.scale
                top = s.max(axis=-1)
                w = np.exp(s - top[:, None])
                out[b, t] = np.einsum("ns,snv->nv", w, v[b, :seen]) / w.sum(axis=-1)[:, None]
                lse[b, t] = top + np.log(w.sum(axis=-1))
    return out, lse


@functools.cache
def wanted(case):
    call = functools.partial(reference.mla_prefill, scale=case.scale, causal=case.causal)
    return jax.jit(call)(**testing.mla_prefill_inputs(case))


@functools.cache
def fallback(case):
    return mla_prefill(**testing.mla_prefill_inputs(case), scale=case.scale, causal=case.causal, impl="xla")


def interpreted(case, inputs, block, chunk):
    """The TPU kernel on memory that is NaN until written, with copies as late as possible; reports races."""
    how = {"scale": case.scale, "causal": case.causal, "sizes": {"block": block, "chunk": chunk}}
    return tpu.mla_prefill(**inputs, **how, interpret=pltpu.InterpretParams(detect_races=True))


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
    ours = mla_prefill(**inputs, scale=case.scale, causal=case.causal, impl="xla"), interpreted(case, inputs, 256, 256)
    for out, lse in ours:
        assert testing.error(out, wanted(case)[0]) < 3e-3
        assert testing.lse_error(lse, wanted(case)[1]) < 1e-5


@settings(max_examples=8)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=3),
    heads=st.integers(1, 3),
    causal=st.booleans(),
    sizes=st.sampled_from([(16, 16), (7, 33)]),
    seed=st.integers(0, 9),
)
def test_the_fallback_holds_for_any_lengths_blocks_and_chunks(rows, heads, causal, sizes, seed):
    case = testing.MlaPrefillCase("any", *zip(*rows, strict=True), heads, width=24, value=16, causal=causal)
    inputs = testing.mla_prefill_inputs(case, seed, jnp.float32)
    sums, lse = double(case, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "BLOCK", sizes[0])
        patch.setattr(xla, "CHUNK", sizes[1])
        out, got = xla.mla_prefill(**inputs, scale=case.scale, causal=causal)
    assert testing.error(out, sums) < 1e-5
    assert testing.lse_error(got, lse) < 1e-5


@settings(max_examples=4)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=2),
    heads=st.integers(1, 3),
    causal=st.booleans(),
    sizes=st.sampled_from([(128, 128), (256, 128), (128, 512)]),
    seed=st.integers(0, 9),
)
def test_the_interpreted_kernel_holds_for_any_lengths_blocks_and_chunks(rows, heads, causal, sizes, seed):
    case = testing.MlaPrefillCase("any", *zip(*rows, strict=True), heads, width=64, value=32, causal=causal)
    inputs = testing.mla_prefill_inputs(case, seed, jnp.float32)
    sums, lse = double(case, inputs)
    out, got = interpreted(case, inputs, *sizes)
    assert testing.error(out, sums) < 1e-5
    assert testing.lse_error(got, lse) < 1e-5


def test_the_fallback_never_holds_all_scores_at_a_real_size():
    def call(q, k, v, lens):
        return xla.mla_prefill(q, k, v, lens, lens, scale=0.1, causal=True)

    q, v = (jax.ShapeDtypeStruct((1, 4096, 128, width), jnp.bfloat16) for width in (192, 128))
    compiled = jax.jit(call).lower(q, q, v, jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 128 * 4096 * 4096 * 4 / 4


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_long_prefix_in_pieces_merges_to_the_whole(dtype):
    case = testing.MlaPrefillCase("", (20, 9, 3), (150, 9, 40), heads=3)
    inputs = testing.mla_prefill_inputs(case, dtype=dtype)
    sums, wanted_lse = double(case, inputs)
    q, k, v, q_lens, kv_lens = inputs.values()
    prefix = kv_lens - q_lens
    rows = jax.vmap(lambda x, start: jax.lax.dynamic_slice_in_dim(x, start, q.shape[1]))
    own_k, own_v = (rows(jnp.pad(x, ((0, 0), (0, q.shape[1]), (0, 0), (0, 0))), prefix) for x in (k, v))
    out, lse = mla_prefill(q, own_k, own_v, q_lens, q_lens, scale=case.scale)
    out = out.astype(jnp.float32)
    for at in range(0, 130, 50):
        piece = jnp.clip(prefix - at, 0, 50)
        part = mla_prefill(q, k[:, at : at + 50], v[:, at : at + 50], q_lens, piece, scale=case.scale, causal=False)
        out, lse = merge(out, lse, *part)
    assert out.dtype == jnp.float32
    assert testing.error(out, sums) < (3e-3 if dtype == jnp.bfloat16 else 1e-5)
    assert testing.lse_error(lse, wanted_lse) < 1e-5


@pytest.mark.parametrize(("T", "S"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("impl", ["xla", "mosaic_tpu", "mosaic_gpu"])
def test_no_queries_or_no_keys_give_zeros_and_an_lse_of_minus_infinity(monkeypatch, impl, T, S):
    monkeypatch.setattr(choice, "choose", lambda *_: impl)
    q, k, v = (jnp.ones((2, n, 3, width), jnp.bfloat16) for n, width in ((T, 192), (S, 192), (S, 128)))
    none = jnp.zeros(2, jnp.int32)
    out, lse = mla_prefill(q, k, v, none, none, scale=1.0, causal=False)
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
    case = testing.MlaPrefillCase("", (5,), (5,), heads=4, width=48, value=16)
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
