"""The TPU kernels: interpreted on the CPU against the specification, and compiled for TPUs that are not there."""

import json

import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import testing
from pallas_kernels.mla_decode import mla_decode
from pallas_kernels.mla_decode import reference as decode_reference
from pallas_kernels.mla_decode import tpu as decode
from pallas_kernels.mla_prefill import mla_prefill
from pallas_kernels.mla_prefill import reference as prefill_reference
from pallas_kernels.mla_prefill import tpu as prefill

DECODE_SIZES, PREFILL_SIZES = {"rows": 64, "chunk": 128}, {"block": 256, "chunk": 256}  # small: several of each


def interpreted():
    """Memory that nobody wrote is NaN, copies happen as late as they may, races are told."""
    return pltpu.InterpretParams(detect_races=True)


def compare(ours, wanted, fallback, capfd):
    assert testing.error(ours[0], wanted[0]) <= 2 * testing.error(fallback[0], wanted[0])
    assert testing.lse_error(ours[1], wanted[1]) < 1e-5
    assert "RACE DETECTED" not in capfd.readouterr().out


@pytest.mark.parametrize("case", testing.MLA_DECODE, ids=lambda case: case.name)
def test_decode_is_within_twice_the_fallbacks_error_and_has_no_race(case, capfd):
    inputs = testing.mla_decode_inputs(case)
    ours = decode.mla_decode(**inputs, scale=case.scale, sizes=DECODE_SIZES, interpret=interpreted())
    wanted = decode_reference.mla_decode(**inputs, scale=case.scale)
    compare(ours, wanted, mla_decode(**inputs, scale=case.scale, impl="xla"), capfd)


@pytest.mark.parametrize("case", testing.MLA_PREFILL, ids=lambda case: case.name)
def test_prefill_is_within_twice_the_fallbacks_error_and_has_no_race(case, capfd):
    inputs, how = testing.mla_prefill_inputs(case), {"scale": case.scale, "causal": case.causal}
    ours = prefill.mla_prefill(**inputs, **how, sizes=PREFILL_SIZES, interpret=interpreted())
    wanted = prefill_reference.mla_prefill(**inputs, **how)
    compare(ours, wanted, mla_prefill(**inputs, **how, impl="xla"), capfd)


@settings(max_examples=4, deadline=None)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    heads=st.integers(1, 40),
    tokens=st.integers(1, 8),
    page=st.sampled_from([16, 32, 64]),
    rows=st.sampled_from([32, 64, 512]),
    seed=st.integers(0, 9),
)
def test_decode_holds_for_any_lengths(lens, heads, tokens, page, rows, seed):
    case = testing.MlaDecodeCase("any", tuple(lens), heads, tokens, rank=128, rope=32, page=page)
    inputs = testing.mla_decode_inputs(case, seed, jnp.float32)
    wanted, lse = decode_reference.mla_decode(**inputs, scale=case.scale)
    sizes = {"rows": rows, "chunk": 64}
    out, got = decode.mla_decode(**inputs, scale=case.scale, sizes=sizes, interpret=interpreted())
    assert testing.error(out, wanted) < 1e-5
    assert testing.lse_error(got, lse) < 1e-5


@settings(max_examples=4, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), min_size=1, max_size=2),
    heads=st.integers(1, 3),
    causal=st.booleans(),
    sizes=st.sampled_from([(128, 128), (256, 128), (128, 512)]),
    seed=st.integers(0, 9),
)
def test_prefill_holds_for_any_lengths(rows, heads, causal, sizes, seed):
    case = testing.MlaPrefillCase("any", *zip(*rows, strict=True), heads, width=64, value=32, causal=causal)
    inputs, how = testing.mla_prefill_inputs(case, seed, jnp.float32), {"scale": case.scale, "causal": causal}
    wanted, lse = prefill_reference.mla_prefill(**inputs, **how)
    sizes = dict(zip(("block", "chunk"), sizes, strict=True))
    out, got = prefill.mla_prefill(**inputs, **how, sizes=sizes, interpret=interpreted())
    assert testing.error(out, wanted) < 1e-5
    assert testing.lse_error(got, lse) < 1e-5


def test_garbage_in_the_page_table_past_the_end_is_harmless():
    case = testing.MlaDecodeCase("", (5, 70), 3, rank=128, rope=32)
    inputs = testing.mla_decode_inputs(case)
    wanted = decode_reference.mla_decode(**inputs, scale=case.scale)
    inputs["page_table"] = inputs["page_table"].at[0, 1:].set(-(2**30))
    out, lse = decode.mla_decode(**inputs, scale=case.scale, sizes=DECODE_SIZES, interpret=interpreted())
    assert testing.error(out, wanted[0]) < 3e-3
    assert testing.lse_error(lse, wanted[1]) < 1e-5


@pytest.mark.slow
def test_the_kernels_compile_for_v5e_and_v6e_at_real_sizes_within_the_memory_they_have(run):
    pytest.importorskip("libtpu", reason="libtpu, of the version that jax[tpu] names, compiles without a TPU")
    rows = run("compile_tpu.py", TPU_SKIP_MDS_QUERY="1")  # asks no network what machine it is on
    rows = [json.loads(row) for row in rows.splitlines()]
    assert {row["device"] for row in rows} == {"TPU v5 lite", "TPU v6 lite"}
    for row in rows:
        assert row["vmem"] < 12 << 20, row
        assert not row["copied"], row
