"""Quantising to E4M3 against numpy with ml_dtypes, and against PyTorch where it is there."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import fp8
from pallas_kernels.fp8 import GROUP, LARGEST

pytestmark = pytest.mark.deep


def blocks(w):
    """Every block of 128 by 128 and its place."""
    for i in range(0, w.shape[0], GROUP):
        for j in range(0, w.shape[1], GROUP):
            yield (i // GROUP, j // GROUP), (slice(i, i + GROUP), slice(j, j + GROUP))


@settings(max_examples=6)
@given(rows=st.integers(1, 5), groups=st.integers(1, 3), power=st.integers(-30, 30), seed=st.integers(0, 99))
def test_rows_are_quantised_as_numpy_does(rows, groups, power, seed):
    x = (np.random.default_rng(seed).standard_normal((rows, groups, GROUP)) * 10.0**power).astype(np.float32)
    got = fp8.quantize(jnp.asarray(x.reshape(rows, -1)))
    scale = np.abs(x).max(axis=-1) / np.float32(LARGEST)
    np.testing.assert_allclose(got.scale, scale, rtol=1e-6)
    codes = np.clip(x / np.asarray(got.scale)[..., None], -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn)
    off = np.asarray(got.codes, np.float32) != codes.reshape(rows, -1).astype(np.float32)
    assert off.mean() < 0.01  # a division may round otherwise at a tie
    back = np.asarray(fp8.dequantize(got)).reshape(x.shape)
    assert (np.abs(back - x) <= np.maximum(np.abs(x) / 16, scale[..., None] * 2.0**-10) * 1.001).all()


@settings(max_examples=6)
@given(
    features=st.integers(1, 300), depth=st.integers(1, 300), stack=st.sampled_from([(), (2,), (2, 1)]), seed=st.integers(0, 99)
)
def test_weights_have_a_scale_for_each_block_the_last_of_which_may_be_short(features, depth, stack, seed):
    w = np.random.default_rng(seed).standard_normal((*stack, features, depth)).astype(np.float32)
    got = fp8.quantize_weight(jnp.asarray(w))
    assert got.codes.shape == w.shape
    assert got.scale.shape == (*stack, -(-features // GROUP), -(-depth // GROUP))
    back = np.asarray(fp8.dequantize(got, GROUP))
    for at in np.ndindex(*stack):
        for place, part in blocks(w[at]):
            scale = np.abs(w[at][part]).max() / LARGEST
            np.testing.assert_allclose(got.scale[at][place], scale, rtol=1e-6)
            allowed = np.maximum(np.abs(w[at][part]) / 16, scale * 2.0**-10) * 1.001
            assert (np.abs(back[at][part] - w[at][part]) <= allowed).all()


def test_zeros_stay_zeros():
    for got in (fp8.quantize(jnp.zeros((2, GROUP))), fp8.quantize_weight(jnp.zeros((130, 5)))):
        assert (np.asarray(got.codes, np.float32) == 0).all()
        assert (np.asarray(got.scale) == 0).all()


def test_the_largest_number_is_kept_not_made_nan():
    x = jnp.full((1, GROUP), 3e38, jnp.float32).at[0, 0].set(-3e38)
    assert np.isfinite(np.asarray(fp8.dequantize(fp8.quantize(x)))).all()


def test_codes_are_those_of_torch():
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).standard_normal((7, 3 * GROUP)).astype(np.float32)
    got = fp8.quantize(jnp.asarray(x))
    scaled = x.reshape(7, 3, GROUP) / np.asarray(got.scale)[..., None]
    codes = torch.from_numpy(scaled.reshape(7, -1)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(got.codes).view(np.uint8), codes.view(torch.uint8).numpy())
