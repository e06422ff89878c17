"""The specification of `mla_decode`, in float32; used by tests only."""

import jax
import jax.numpy as jnp

from pallas_kernels.fp8 import Fp8, dequantize


def mla_decode(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, *, scale, dtype=jnp.float32):
    """All rows, query tokens and heads at once."""
    B, T = q_c.shape[:2]
    c_kv = dequantize(c_kv) if isinstance(c_kv, Fp8) else c_kv
    q_c, q_pe, c_kv, k_pe = (x.astype(dtype) for x in (q_c, q_pe, c_kv, k_pe))
    c = c_kv[page_table].reshape(B, -1, c_kv.shape[-1])
    pe = k_pe[page_table].reshape(B, -1, k_pe.shape[-1])
    place = jnp.arange(c.shape[1])
    held = place[None] < seq_lens[:, None]
    c, pe = (jnp.where(held[..., None], x, 0) for x in (c, pe))
    seen = place[None, None] < (seq_lens[:, None] - T + 1 + jnp.arange(T))[..., None]
    exact = {"precision": "highest", "preferred_element_type": dtype}
    scores = jnp.einsum("btnr,bsr->btns", q_c, c, **exact) + jnp.einsum("btne,bse->btns", q_pe, pe, **exact)
    scores = jnp.where(seen[:, :, None], scores * scale, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(lse), lse, 0)[..., None])
    return jnp.einsum("btns,bsr->btnr", weights, c, **exact), lse
