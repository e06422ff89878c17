"""The fallback and the interpreted kernels, compared with the specification; the GPU kernel compiled without a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import choice, fp8, testing
from pallas_kernels.mla_decode import CHECKS, Unsupported, mla_decode, reference, schedule, tpu, xla
from pallas_kernels.mla_decode.schedule import SPLIT, START, TILE

pytestmark = pytest.mark.deep

each_case = pytest.mark.parametrize("case", testing.MLA_DECODE, ids=lambda case: case.name)
recent = choice.too_old() is None


def double(case, inputs):
    """The specification in float64, by numpy: what the reference itself is judged by."""
    x = {k: fp8.dequantize(v) if isinstance(v, fp8.Fp8) else v for k, v in inputs.items()}
    x = {k: np.asarray(v.astype(jnp.float32) if v.dtype == jnp.bfloat16 else v, None) for k, v in x.items()}
    B, T, N, R = x["q_c"].shape
    out, lse = np.zeros((B, T, N, R)), np.full((B, T, N), -np.inf)
    for b, n in enumerate(case.seq_lens):
        rows = [(page, slot) for page in x["page_table"][b] for slot in range(case.page)][:n]
        c = np.array([x["c_kv"][r] for r in rows], np.float64).reshape(len(rows), R)
        pe = np.array([x["k_pe"][r] for r in rows], np.float64).reshape(len(rows), x["k_pe"].shape[-1])
        for t in range(T):
            seen = n - T + t + 1
            if seen > 0:
                s = (x["q_c"][b, t] @ c[:seen].T + x["q_pe"][b, t] @ pe[:seen].T) * case.scale
                top = s.max(axis=-1, keepdims=True)
                w = np.exp(s - top)
                out[b, t] = w @ c[:seen] / w.sum(axis=-1, keepdims=True)
                lse[b, t] = top[:, 0] + np.log(w.sum(axis=-1))
    return out, lse


@functools.cache
def wanted(case):
    return jax.jit(functools.partial(reference.mla_decode, scale=case.scale))(**testing.mla_decode_inputs(case))


@functools.cache
def fallback(case):
    return mla_decode(**testing.mla_decode_inputs(case), scale=case.scale, impl="xla")


def interpreted(case, inputs, rows, chunk):
    """The TPU kernel on memory that is NaN until written, with copies as late as possible; reports races."""
    sizes = {"rows": rows, "chunk": chunk}
    return tpu.mla_decode(**inputs, scale=case.scale, sizes=sizes, interpret=pltpu.InterpretParams(detect_races=True))


@each_case
def test_the_reference_is_the_sum_it_says(case):
    sums, lse = double(case, testing.mla_decode_inputs(case))
    assert testing.error(wanted(case)[0], sums) < 1e-5
    assert testing.lse_error(wanted(case)[1], lse) < 1e-5


@each_case
def test_the_fallback_computes_the_reference_whatever_lies_past_the_end(case):
    out, lse = fallback(case)
    assert out.dtype == jnp.bfloat16
    assert testing.error(out, wanted(case)[0]) < 3e-3
    assert testing.lse_error(lse, wanted(case)[1]) < 1e-5


@pytest.mark.once
@pytest.mark.parametrize("case", [case for case in testing.MLA_DECODE if not case.packed], ids=lambda case: case.name)
def test_the_tpu_kernel_interpreted_is_within_twice_the_fallbacks_error_and_has_no_race(case, capfd):
    out, lse = interpreted(case, testing.mla_decode_inputs(case), 64, 128)
    assert testing.error(out, wanted(case)[0]) <= 2 * testing.error(fallback(case)[0], wanted(case)[0])
    assert testing.lse_error(lse, wanted(case)[1]) < 1e-5
    assert "RACE DETECTED" not in capfd.readouterr().out


@settings(max_examples=8)
@given(
    lens=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    heads=st.integers(1, 5),
    tokens=st.integers(1, 4),
    page=st.sampled_from([16, 32, 64]),
    seed=st.integers(0, 9),
)
def test_the_fallback_holds_for_any_lengths(lens, heads, tokens, page, seed):
    case = testing.MlaDecodeCase("any", tuple(lens), heads, tokens, rank=64, rope=32, page=page)
    inputs = testing.mla_decode_inputs(case, seed, jnp.float32)
    sums, lse = double(case, inputs)
    out, got = xla.mla_decode(**inputs, scale=case.scale)
    assert testing.error(out, sums) < 1e-5
    assert testing.lse_error(got, lse) < 1e-5


@settings(max_examples=4)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    heads=st.integers(1, 40),
    tokens=st.integers(1, 8),
    page=st.sampled_from([16, 32, 64]),
    rows=st.sampled_from([32, 64, 512]),
    seed=st.integers(0, 9),
)
def test_the_tpu_kernel_holds_for_any_lengths(lens, heads, tokens, page, rows, seed):
    case = testing.MlaDecodeCase("any", tuple(lens), heads, tokens, rank=128, rope=32, page=page)
    inputs = testing.mla_decode_inputs(case, seed, jnp.float32)
    sums, lse = double(case, inputs)
    out, got = interpreted(case, inputs, rows, 64)
    assert testing.error(out, sums) < 1e-5
    assert testing.lse_error(got, lse) < 1e-5


@pytest.mark.once
@settings(max_examples=8)
@given(
    lens=st.lists(st.integers(0, 90), min_size=1, max_size=4),
    heads=st.integers(1, 5),
    tokens=st.integers(1, 4),
    page=st.sampled_from([16, 32, 64]),
    exact=st.booleans(),
    seed=st.integers(0, 9),
)
def test_the_fallback_takes_a_latent_in_e4m3_of_any_scales(lens, heads, tokens, page, exact, seed):
    case = testing.MlaDecodeCase("any", tuple(lens), heads, tokens, rank=256, rope=32, page=page, packed=True)
    inputs = testing.mla_decode_inputs(case, seed)
    if not exact:
        codes, scale = inputs["c_kv"]
        inputs["c_kv"] = fp8.Fp8(codes, scale * 1.3)
    sums, lse = double(case, inputs)
    out, got = xla.mla_decode(**inputs, scale=case.scale)
    assert testing.error(out, sums) < (3e-3 if exact else 5e-2)
    assert testing.lse_error(got, lse) < (1e-5 if exact else 2e-1)


def test_scales_of_a_cache_are_the_least_powers_of_two_that_hold_it():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((40, 256)) * np.exp2(np.arange(-20, 20))[:, None], jnp.float32)
    x = x.at[3].set(0)
    least, packed = fp8.quantize(x), fp8.quantize_cache(x)
    assert (packed.scale[3] == 0).all()
    some = np.asarray(packed.scale) > 0
    assert some.sum() == 2 * 39
    assert (np.frexp(np.asarray(packed.scale))[0][some] == 0.5).all()
    ratio = np.asarray(packed.scale)[some] / np.asarray(least.scale)[some]
    assert ((ratio >= 1) & (ratio < 2)).all()
    values = fp8.dequantize(packed)
    assert (values == values.astype(jnp.bfloat16)).all()
    assert testing.error(values[:20], x[:20]) < 0.04


def test_an_empty_row_gives_zeros_and_an_lse_of_minus_infinity():
    case = testing.MlaDecodeCase("", (0, 5), 3, rank=64, rope=32)
    out, lse = mla_decode(**testing.mla_decode_inputs(case), scale=1.0, impl="xla")
    assert (out[0] == 0).all()
    assert np.isneginf(lse[0]).all()
    assert np.isfinite(lse[1]).all()


@pytest.mark.parametrize(("rows", "tokens", "pages"), [(2, 1, 0), (2, 0, 3), (0, 1, 3)])
@pytest.mark.parametrize("impl", ["xla", "mosaic_tpu", "mosaic_gpu"])
def test_an_empty_table_gives_zeros_and_an_lse_of_minus_infinity_and_no_query_nothing(monkeypatch, impl, rows, tokens, pages):
    monkeypatch.setattr(choice, "choose", lambda *_: impl)
    shapes = {"q_c": (rows, tokens, 3, 128), "q_pe": (rows, tokens, 3, 64), "c_kv": (4, 64, 128), "k_pe": (4, 64, 64)}
    inputs = {name: jnp.ones(shape, jnp.bfloat16) for name, shape in shapes.items()}
    table, lens = jnp.zeros((rows, pages), jnp.int32), jnp.zeros((rows,), jnp.int32)
    out, lse = mla_decode(**inputs, page_table=table, seq_lens=lens, scale=1.0)
    assert out.shape == shapes["q_c"]
    assert out.dtype == jnp.bfloat16
    assert lse.shape == shapes["q_c"][:-1]
    assert lse.dtype == jnp.float32
    assert (out == 0).all()
    assert np.isneginf(lse).all()


@pytest.mark.parametrize("packed", [False, True])
def test_the_fallback_converts_no_more_of_a_pool_than_it_gathers(packed):
    call = functools.partial(xla.mla_decode, scale=0.1)
    shapes = {"q_c": (2, 1, 4, 512), "q_pe": (2, 1, 4, 64), "c_kv": (512, 64, 512), "k_pe": (512, 64, 64)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    if packed:
        parts = ((512, 64, 512), jnp.float8_e4m3fn), ((512, 64, 4), jnp.float32)
        arrays["c_kv"] = fp8.Fp8(*(jax.ShapeDtypeStruct(*part) for part in parts))
    table, lens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 128), (2,)))
    compiled = jax.jit(call).lower(**arrays, page_table=table, seq_lens=lens).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 12 << 20  # the pool in bfloat16 has 32 MiB


def test_garbage_in_the_page_table_past_the_end_is_harmless():
    case = testing.MlaDecodeCase("", (5, 200), 3, rank=128, rope=32)
    inputs = testing.mla_decode_inputs(case)
    garbage = inputs | {"page_table": inputs["page_table"].at[0, 1:].set(-(2**30))}
    np.testing.assert_array_equal(xla.mla_decode(**garbage, scale=case.scale)[0], fallback(case)[0])
    np.testing.assert_array_equal(interpreted(case, garbage, 64, 128)[0], interpreted(case, inputs, 64, 128)[0])


planned = jax.jit(schedule, static_argnames=("heads", "units"))  # compiled once for each number of rows


@pytest.mark.once
@settings(max_examples=100)
@given(
    lens=st.sampled_from([1, 2, 5, 16, 40]).flatmap(lambda n: st.lists(st.integers(0, 5000), min_size=n, max_size=n)),
    rows=st.sampled_from([16, 64, 128, 192, 256]),
    units=st.sampled_from([2, 8, 114, 132]),
)
def test_the_schedule_reads_every_tile_once_in_fair_shares(lens, rows, units):
    plan = planned(jnp.array(lens, jnp.int32), heads=rows, units=units)
    shares, pieces = np.asarray(plan.shares), np.asarray(plan.pieces)
    blocks = -(-rows // 64)
    per_row = blocks // 2 if blocks % 2 == 0 else blocks
    tiles = np.repeat([max(-(-n // TILE), 1) for n in lens], per_row)
    read = [np.zeros(n, int) for n in tiles]
    slots = [[] for _ in tiles]
    for unit, (first, start, last, stop) in enumerate(shares):
        for i in range(first, last + 1):
            a, b = start if i == first else 0, stop if i == last else tiles[i]
            assert a < b
            read[i][a:b] += 1
            slots[i].append(2 * unit + (i != first))
        rows_of = range(first, last + 1)
        mine = sum((stop if i == last else tiles[i]) - (start if i == first else 0) for i in rows_of)
        assert mine <= -(-sum(tiles + START) // len(shares)) + SPLIT
    assert all((x == 1).all() for x in read)
    listed = {int(row): (int(slot), int(count)) for row, slot, count in pieces if count > 1}
    for i, held in enumerate(slots):
        if len(held) > 1:
            slot, count = listed.pop(i)
            assert held == [slot] + [2 * (slot // 2 + k) for k in range(1, count)]
    assert not listed


def test_a_named_implementation_that_cannot_raises_with_the_reason():
    case = testing.MlaDecodeCase("", (5,), 4, rank=192)
    inputs = testing.mla_decode_inputs(case)
    with pytest.raises(Unsupported, match="no impl"):
        mla_decode(**inputs, scale=1.0, impl="cuda")
    arrays = [x for name, x in inputs.items() if name != "seq_lens"]
    for impl, reason in {"mosaic_gpu": "192" if recent else "0.11.2", "mosaic_tpu": "192"}.items():
        assert reason in CHECKS[impl](*arrays)
        with pytest.raises(Unsupported, match=reason):
            mla_decode(**inputs, scale=1.0, impl=impl)
    assert mla_decode(**inputs, scale=1.0)[0].shape == (1, 1, 4, 192)


def test_the_kernels_say_where_they_take_no_latent_in_e4m3():
    case = testing.MlaDecodeCase("", (5,), 33, packed=True)
    arrays = [x for name, x in testing.mla_decode_inputs(case).items() if name != "seq_lens"]
    assert "E4M3" in CHECKS["mosaic_tpu"](*arrays)
    assert ("not 33" if recent else "0.11.2") in CHECKS["mosaic_gpu"](*arrays)
    arrays[0], arrays[1] = (x[:, :, 1:] for x in arrays[:2])
    assert CHECKS["mosaic_gpu"](*arrays) is None or not recent


@pytest.mark.skipif(not recent, reason="the GPU kernel needs JAX 0.11.2")
@pytest.mark.parametrize("heads", [16, 64])
@pytest.mark.parametrize("name", ["page_table", "seq_lens"])
def test_the_gpu_kernel_takes_page_tables_and_lengths_of_any_integers(name, heads):
    from pallas_kernels.mla_decode import gpu

    case = testing.MlaDecodeCase("", (257, 64), heads)
    inputs = testing.mla_decode_inputs(case)
    plan = schedule(inputs["seq_lens"], heads=heads, units=4)
    inputs[name] = inputs[name].astype(jnp.int16)
    out, lse = jax.eval_shape(functools.partial(gpu.mla_decode, scale=case.scale), **inputs, schedule=plan)
    assert out.shape == inputs["q_c"].shape
    assert lse.dtype == jnp.float32


@pytest.mark.skipif(not recent, reason="the GPU kernel needs JAX 0.11.2")
@each_case
def test_the_gpu_kernel_interpreted_is_within_twice_the_fallbacks_error(interpreted, case):
    row = interpreted("mla_decode")[1][case.name]
    assert row["error"] <= 2 * row["fallback"]
    assert row["lse"] < 2e-3


@pytest.mark.skipif(not recent, reason="the GPU kernel needs JAX 0.11.2")
def test_the_gpu_kernel_interpreted_has_no_race(interpreted):
    assert "RACE DETECTED" not in interpreted("mla_decode")[0]
