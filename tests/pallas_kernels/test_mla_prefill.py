"""Attention over expanded heads: the specification against a sum in float64, the fallback against the specification."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import testing
from pallas_kernels.mla_prefill import CHECKS, Unsupported, merge, mla_prefill, reference, xla

NAMES = [case.name for case in testing.MLA_PREFILL]


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


def exact(inputs):
    return {k: v.astype(jnp.float32) if v.dtype == jnp.bfloat16 else v for k, v in inputs.items()}


@pytest.mark.parametrize("case", testing.MLA_PREFILL, ids=NAMES)
def test_the_reference_is_the_sum_it_says(case):
    inputs = testing.mla_prefill_inputs(case)
    out, lse = reference.mla_prefill(**inputs, scale=case.scale, causal=case.causal)
    wanted, wanted_lse = double(case, inputs)
    assert testing.error(out, wanted) < 1e-5
    assert testing.lse_error(lse, wanted_lse) < 1e-5


@pytest.mark.parametrize("case", testing.MLA_PREFILL, ids=NAMES)
def test_the_fallback_computes_the_reference_whatever_lies_past_the_end(case):
    inputs = testing.mla_prefill_inputs(case)
    how = {"scale": case.scale, "causal": case.causal, "impl": "xla"}
    wanted, lse = reference.mla_prefill(**inputs, scale=case.scale, causal=case.causal)
    out, got = mla_prefill(**inputs, **how)
    assert out.dtype == jnp.bfloat16
    assert got.dtype == jnp.float32
    assert testing.error(out, wanted) < 3e-3
    assert testing.lse_error(got, lse) < 1e-5
    assert testing.error(mla_prefill(**exact(inputs), **how)[0], wanted) < 1e-5


@settings(max_examples=8, deadline=None)
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
    wanted, lse = double(case, inputs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "BLOCK", sizes[0])
        patch.setattr(xla, "CHUNK", sizes[1])
        out, got = xla.mla_prefill(**inputs, scale=case.scale, causal=causal)
    assert testing.error(out, wanted) < 1e-5
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
    wanted, wanted_lse = double(case, inputs)
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
    assert testing.error(out, wanted) < (3e-3 if dtype == jnp.bfloat16 else 1e-5)
    assert testing.lse_error(lse, wanted_lse) < 1e-5


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
    with pytest.raises(Unsupported, match="float32"):
        mla_prefill(**exact(testing.mla_prefill_inputs(case._replace(width=192, value=128))), scale=1.0, impl="mosaic_tpu")
    assert mla_prefill(**inputs, scale=1.0)[0].shape == (1, 10, 4, 16)
