"""Rows of packed matrices, and what kernels are given of packed latents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.base.qtensor import QTensor
from mla_jax.cache import paged
from mla_jax.model import kernels, ops
from pallas_kernels import fp8


@pytest.mark.deep
@pytest.mark.parametrize("tokens", [(0,), (5, 130, 299, 40), ((299, 4000), (127, 128))])
def test_rows_of_a_matrix_in_fp8_have_the_scales_of_their_blocks(tokens):
    rows = jax.random.normal(jax.random.key(2), (300, 256)) * jnp.exp2(jnp.arange(300) // 128)[:, None] ** 3
    w = fp8.quantize_weight(rows)
    found = ops.take(QTensor("fp8_block", tuple(w), w.codes.shape), jnp.asarray(tokens))
    np.testing.assert_array_equal(found, fp8.dequantize(w, fp8.GROUP)[np.minimum(tokens, 299)])


@pytest.mark.parametrize(("wide", "given"), [("xla", fp8.Fp8), ("mosaic_tpu", jax.Array)])
def test_latents_in_e4m3_become_numbers_only_for_a_kernel_that_takes_these_alone(monkeypatch, wide, given):
    from pallas_kernels import mla_decode

    def kernel(q_c, q_pe, c_kv, *_, **__):
        assert isinstance(c_kv, given)
        return q_c, q_c[..., 0]

    monkeypatch.setattr(kernels, "implementation", lambda op, *arrays: "xla" if isinstance(arrays[2], fp8.Fp8) else wide)
    monkeypatch.setattr(mla_decode, "mla_decode", kernel)
    latent, q_c, pe = fp8.quantize_cache(jnp.ones((2, 64, 128))), jnp.ones((2, 1, 4, 128)), jnp.ones((2, 64, 32))
    out = kernels.mla_decode(q_c, jnp.ones((2, 1, 4, 32)), latent, pe, paged.in_order(2, 64), jnp.array([3, 64]), 1.0)[0]
    np.testing.assert_array_equal(out, q_c)


def test_a_kernel_that_takes_few_queries_over_e4m3_is_called_for_some_heads_at_a_time(monkeypatch):
    from pallas_kernels import mla_decode

    sizes, reference = [], jax.random.normal(jax.random.key(0), (2, 3, 8, 128))

    def takes(op, q_c, q_pe, c_kv, *_):
        return "xla" if isinstance(c_kv, fp8.Fp8) and q_c.shape[1] * q_c.shape[2] > 8 else "mosaic_gpu"

    def kernel(q_c, q_pe, c_kv, *_, schedule=None, **__):
        assert isinstance(c_kv, fp8.Fp8)
        assert schedule == "of two heads"
        sizes.append(q_c.shape[2])
        return q_c + q_pe.sum(), q_c[..., 0]

    monkeypatch.setattr(kernels, "implementation", takes)
    monkeypatch.setattr(mla_decode, "mla_decode", kernel)
    latent, pe = fp8.quantize_cache(jnp.ones((2, 64, 128))), jnp.zeros((2, 64, 32))
    q_pe, lens, table = jnp.zeros((2, 3, 8, 32)), jnp.array([3, 64]), paged.in_order(2, 64)
    parts = kernels.parts_of_heads((2, 3, 8), latent, pe, table)
    out = kernels.mla_decode(reference, q_pe, latent, pe, table, lens, 1.0, parts=parts, schedule="of two heads")[0]
    assert sizes == [2, 2, 2, 2]
    assert kernels.parts_of_heads((2, 1, 8), latent, pe, table) == 1
    assert kernels.parts_of_heads((2, 3, 8), jnp.ones((2, 64, 128)), pe, table) == 1
    assert kernels.parts_of_heads((2, 9, 8), latent, pe, table) == 1  # it takes not even one head
    np.testing.assert_array_equal(out, reference)
