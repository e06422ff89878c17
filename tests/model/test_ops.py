"""Linear layers: which products a kernel takes, and that they are the same products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.base.qtensor import QTensor
from mla_jax.cache import paged
from mla_jax.model import ops
from pallas_kernels import fp8, quantized_matmul


@pytest.fixture
def large():
    """A weight in FP8 blocks, and the numbers it stands for."""
    w = fp8.quantize_weight(jax.random.normal(jax.random.key(0), (4096, 2048)) * 2048**-0.5)
    return QTensor("fp8_block", tuple(w), w.codes.shape), fp8.dequantize(w, fp8.GROUP)


@pytest.fixture
def calls(monkeypatch):
    """Shapes of the rows that the kernel is given, on a machine that seems to have one."""
    found = []

    def kernel(x, w, out_dtype):
        found.append(x.shape)
        return quantized_matmul.xla.quantized_matmul(x, w, out_dtype=out_dtype)

    monkeypatch.setattr(ops, "implementation", lambda op, *arrays: "mosaic_gpu")
    monkeypatch.setattr(quantized_matmul, "quantized_matmul", kernel)
    return found


@pytest.mark.parametrize("shape", [(2, 1), (8, 8), (3,)])
def test_some_rows_of_a_large_weight_in_fp8_go_to_the_kernel(large, calls, shape):
    w, numbers = large
    x = jax.random.normal(jax.random.key(1), (*shape, 2048), jnp.bfloat16)
    y = ops.linear(x, w)
    assert calls == [(int(np.prod(shape)), 2048)]
    assert y.shape == (*shape, 4096)
    wanted = jnp.einsum("...i,oi->...o", x.astype(jnp.float32), numbers, precision="highest")
    assert np.abs(np.asarray(y, np.float32) - wanted).max() < 0.02 * np.abs(wanted).max()


def test_one_row_and_many_small_weights_and_other_formats_do_not(large, calls):
    w, _ = large
    small = fp8.quantize_weight(jnp.ones((256, 2048)))
    for rows, weight, out in (
        (1, w, None),
        (65, w, None),
        (8, w, "float32"),
        (8, QTensor("fp8_block", tuple(small), small.codes.shape), None),
        (8, jnp.ones((4096, 2048), jnp.bfloat16), None),
    ):
        ops.linear(jnp.ones((rows, 2048), jnp.bfloat16), weight, out)
    assert not calls


@pytest.mark.parametrize("tokens", [(0,), (5, 130, 299, 40), ((299, 4000), (127, 128))])
def test_rows_of_a_matrix_in_fp8_have_the_scales_of_their_blocks(tokens):
    rows = jax.random.normal(jax.random.key(2), (300, 256)) * jnp.exp2(jnp.arange(300) // 128)[:, None] ** 3
    w = fp8.quantize_weight(rows)
    found = ops.entries(QTensor("fp8_block", tuple(w), w.codes.shape), jnp.asarray(tokens))
    np.testing.assert_array_equal(found, fp8.dequantize(w, fp8.GROUP)[np.minimum(tokens, 299)])


@pytest.mark.parametrize(("wide", "given"), [("xla", fp8.Fp8), ("mosaic_tpu", jax.Array)])
def test_latents_in_e4m3_become_numbers_only_for_a_kernel_that_takes_these_alone(monkeypatch, wide, given):
    from pallas_kernels import mla_decode

    def kernel(q_c, q_pe, c_kv, *_, **__):
        assert isinstance(c_kv, given)
        return q_c, None

    monkeypatch.setattr(ops, "implementation", lambda op, *arrays: "xla" if isinstance(arrays[2], fp8.Fp8) else wide)
    monkeypatch.setattr(mla_decode, "mla_decode", kernel)
    latent, q_c, pe = fp8.quantize_cache(jnp.ones((2, 64, 128))), jnp.ones((2, 1, 4, 128)), jnp.ones((2, 64, 32))
    out = ops.mla_decode(q_c, jnp.ones((2, 1, 4, 32)), latent, pe, paged.in_order(2, 64), jnp.array([3, 64]), 1.0)
    assert out is q_c


def test_here_without_a_kernel_nothing_changes(large):
    w, numbers = large
    x = jax.random.normal(jax.random.key(1), (8, 2048))
    np.testing.assert_allclose(ops.linear(x, w), x @ numbers.T, atol=1e-4)
