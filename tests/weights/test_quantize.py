"""Quantising, by its errors against each format's precision, and by FP8 checkpoints as released."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.base.errors import BadFile, Unsupported
from mla_jax.base.qtensor import dequantize, nbytes
from mla_jax.weights.quantize import QUANTIZERS, fp8_blocks, int4_groups, int8_rows, quantize

SHAPES = [(128, 128), (1, 1), (300, 257), (576, 96), (3, 130, 33), (2, 2, 5, 7)]


def random_weights(shape: tuple[int, ...], seed: int = 0, size: float = 0.02) -> np.ndarray:
    """Normal, with rows of very different sizes and a few outliers."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal(shape) * size * 10 ** rng.uniform(-2, 2, (*shape[:-1], 1))
    return np.where(rng.random(shape) < 0.001, 20 * w, w).astype(np.float32)


def spread(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    rows, columns = np.arange(shape[-2]) // block[0], np.arange(shape[-1]) // block[1]
    return scale.astype(np.float32)[..., rows[:, None], columns]


def grouped(w: np.ndarray, group: int) -> np.ndarray:
    """`[.. groups group]`, filled up with zeros."""
    wide = np.zeros((*w.shape[:-1], -(-w.shape[-1] // group) * group), np.float32)
    wide[..., : w.shape[-1]] = w
    return wide.reshape(*w.shape[:-1], -1, group)


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (1, 128)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_fp8_block_reaches_448_and_errs_by_half_a_step_at_most(shape, block):
    w = random_weights(shape)
    codes, scale = fp8_blocks(w, block)
    assert (codes.dtype, scale.dtype) == (ml_dtypes.float8_e4m3fn, np.float32)
    assert scale.shape == (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    wide, values = spread(scale, shape, block), codes.astype(np.float32)
    assert np.isfinite(values).all()
    step = np.exp2(np.floor(np.log2(np.maximum(np.abs(w / wide), 2**-6))) - 3)  # of a mantissa of three bits
    assert (np.abs(values * wide - w) <= 0.5001 * step * wide).all()
    for *at, i, j in np.ndindex(*scale.shape):
        rows, columns = (slice(k * n, (k + 1) * n) for k, n in zip((i, j), block, strict=True))
        assert np.abs(values[(*at, rows, columns)]).max() == 448


def test_fp8_codes_are_the_nearest_ones_and_ties_go_to_even():
    w = np.zeros((1, 128), np.float32)
    w[0, :6] = [448, 17, 19, 1.0625, -1.1875, 2**-10]  # the scale is 1
    codes, scale = fp8_blocks(w)
    assert scale == 1
    np.testing.assert_array_equal(codes[0, :6].astype(np.float32), [448, 16, 20, 1, -1.25, 0])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ue8m0_scales_are_the_least_powers_of_two_that_hold_the_block(shape):
    w = random_weights(shape)
    exact, (codes, scale) = fp8_blocks(w)[1], fp8_blocks(w, ue8m0=True)
    np.testing.assert_array_equal(np.frexp(scale)[0], 0.5)
    assert ((scale >= exact) & (scale < 2 * exact)).all()
    np.testing.assert_array_equal(scale.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32), scale)
    assert np.isfinite(codes.astype(np.float32)).all()


def test_a_power_of_two_stays_itself_as_a_ue8m0_scale():
    w = np.full((128, 128), 448 * 2.0**-9, np.float32)
    assert fp8_blocks(w, ue8m0=True)[1] == 2.0**-9


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_weights_of_any_float_dtype_are_quantised_alike(dtype):
    w = np.clip(random_weights((130, 140)), -100, 100).astype(dtype)
    for found, expected in zip(fp8_blocks(w), fp8_blocks(w.astype(np.float32)), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("format", QUANTIZERS)
def test_zeros_stay_zeros_and_their_scales_are_one(format):
    q = quantize(np.zeros((130, 140), np.float32), format)
    np.testing.assert_array_equal(np.asarray(q.parts[1], np.float32), 1)
    np.testing.assert_array_equal(dequantize(q), 0)


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 1e36])
@pytest.mark.parametrize("format", QUANTIZERS)
def test_the_smallest_and_largest_weights_give_no_nan_and_no_denormal_scale(format, size):
    w = np.linspace(-size, size, 64 * 256, dtype=np.float32).reshape(64, 256)
    q = quantize(w, format)
    scale = np.abs(np.asarray(q.parts[1], np.float32))
    assert (scale >= np.finfo(np.float32).tiny).all()
    assert (np.abs(np.asarray(dequantize(q)) - w) <= max(0.13 * size, 1e-36)).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int8_errs_by_half_a_step_of_its_row_at_most(shape):
    w = random_weights(shape)
    codes, scale = int8_rows(w)
    assert (codes.dtype, scale.dtype, scale.shape) == (np.int8, np.float32, shape[:-1])
    np.testing.assert_array_equal(np.abs(codes.astype(int)).max(axis=-1), 127)
    assert (np.abs(codes * scale[..., None] - w) <= 0.5001 * scale[..., None]).all()


@pytest.mark.deep
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_int4_errs_no_more_than_codes_from_minus_7_to_7_would(shape, group):
    w = random_weights(shape)
    found = np.asarray(dequantize(quantize(w, f"int4_g{group}")))
    groups = grouped(w, group)
    scale = (np.abs(groups).max(axis=-1, keepdims=True) / 7).astype(ml_dtypes.bfloat16).astype(np.float32)
    plain = np.square(np.rint(groups / scale) * scale - groups).sum(axis=-1)
    error = np.square(grouped(found - w, group)).sum(axis=-1)
    assert (error <= plain * 1.0001 + 1e-8 * np.square(scale[..., 0])).all()
    assert (np.abs(grouped(found - w, group)) <= 0.9 * scale).all()  # a step of the wider scale, where a value is cut to 7


def test_int4_codes_use_the_minus_8_where_that_errs_less():
    w = np.arange(-8, 8, dtype=np.float32).repeat(2)[None]
    packed, scale = int4_groups(w)
    assert (packed.shape, packed.dtype, scale.dtype) == ((1, 1, 16), np.uint8, ml_dtypes.bfloat16)
    assert scale.astype(np.float32) == 1
    np.testing.assert_array_equal(dequantize(quantize(w, "int4_g32")), w)


@pytest.mark.parametrize(("format", "most"), [("fp8_block", 0.03), ("int8", 0.012), ("int4_g32", 0.1), ("int4_g128", 0.13)])
def test_the_relative_error_on_normal_weights_is_as_small_as_the_bits_allow(format, most):
    w = np.random.default_rng(5).standard_normal((256, 1024)).astype(np.float32)
    error = np.asarray(dequantize(quantize(w, format))) - w
    assert np.sqrt(np.mean(np.square(error))) < most


@pytest.mark.once
@pytest.mark.deep
@settings(max_examples=40)
@given(
    st.sampled_from(sorted(QUANTIZERS)),
    st.lists(st.integers(1, 2), max_size=2),
    st.integers(1, 140),
    st.integers(1, 140),
    st.integers(0, 9),
)
def test_every_shape_comes_back_and_takes_the_bytes_that_were_counted(format, lead, rows, columns, seed):
    w = random_weights((*lead, rows, columns), seed)
    q = quantize(w, format)
    found = np.asarray(dequantize(q))
    assert found.shape == q.shape == w.shape
    assert q.nbytes == nbytes(format, w.shape)
    assert np.abs(found - w).max() <= 0.13 * np.abs(w).max()


@pytest.mark.parametrize("format", QUANTIZERS)
def test_quantising_again_what_was_dequantised_changes_little_or_nothing(format):
    once = np.asarray(dequantize(quantize(random_weights((130, 260)), format)))
    twice = np.asarray(dequantize(quantize(once, format)))
    np.testing.assert_allclose(twice, once, atol=1e-6 * np.abs(once).max(), rtol=0.15 if "int4" in format else 1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", QUANTIZERS)
def test_weights_that_are_not_finite_are_refused(format, value):
    w = random_weights((130, 140))
    w[129, 139] = value
    with pytest.raises(BadFile, match="not finite"):
        quantize(w, format)


def test_formats_that_are_only_read_are_refused():
    with pytest.raises(Unsupported, match=r"quantising to Q5_K is not supported\n  known: fp8_block, int8, int4_g32, int4_g128"):
        quantize(np.ones((4, 256), np.float32), "Q5_K")


def test_q4_k_errs_by_half_a_step_of_its_group_and_half_a_step_of_the_scale():
    w = random_weights((8, 512))
    error = np.abs(np.asarray(dequantize(quantize(w, "Q4_K"))) - w).reshape(8, -1, 32).max(axis=-1)
    groups = w.reshape(8, -1, 32)
    reach = np.maximum(groups.max(-1), 0) - np.minimum(groups.min(-1), 0)
    largest = reach.reshape(8, 2, 8).max(-1).repeat(8, -1)
    assert (error <= reach / 30 + largest / 15).all()
    with pytest.raises(BadFile, match="cannot be quantised"):
        quantize(np.ones((4, 100), np.float32), "Q4_K")
