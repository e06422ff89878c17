"""The fallback for any device: the same sums in plain JAX, a chunk of pages at a time."""

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.fp8 import Fp8, codes, dequantize

CHUNK = 1024  # cached tokens gathered at a time


def _gather(cache, pages, dtype):
    return (
        dequantize(Fp8(*(_rows(x, pages) for x in cache))).astype(dtype)
        if isinstance(cache, Fp8)
        else _rows(cache, pages)
    )


def _rows(x, at):
    """`x[at]`, gathered as integers: on a CPU XLA has no gather of narrow floats and would convert all of `x` before the loop.

    The barrier keeps XLA from moving the bitcast there."""
    if x.dtype.itemsize > 2:
        return x[at]
    x, at = jax.lax.optimization_barrier((x, at))
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")[at]
    return jax.lax.bitcast_convert_type(bits, x.dtype)


def mla_decode(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, *, scale):
    """As `mla_decode` of the package. Gathers at most a chunk at a time, and stops after the longest row."""
    B, T, N, R = q_c.shape
    count, page = codes(c_kv).shape[:2]
    step = max(min(CHUNK // page, page_table.shape[1]), 1)
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % step)))
    limit = (seq_lens[:, None] - T + 1 + jnp.arange(T))[..., None]
    sums = {"preferred_element_type": jnp.float32}

    def chunk(carry):
        i, state = carry
        pages = jax.lax.dynamic_slice_in_dim(table, i * step, step, axis=1)
        pages = jnp.clip(pages, 0, count - 1)
        place = i * step * page + jnp.arange(step * page)
        # Mask values as well as scores: a weight of zero times NaN is NaN
        held = (place[None] < seq_lens[:, None])[..., None]
        c = jnp.where(held, _gather(c_kv, pages, k_pe.dtype).reshape(B, -1, R), 0)
        pe = jnp.where(held, _rows(k_pe, pages).reshape(B, c.shape[1], -1), 0)
        scores = jnp.einsum("btnr,bsr->btns", q_c, c, **sums) + jnp.einsum("btne,bse->btns", q_pe, pe, **sums)
        scores = jnp.where((place < limit)[:, :, None], scores * scale, -jnp.inf)
        return i + 1, softmax.add(
            state, scores, lambda w: jnp.einsum("btns,bsr->btnr", w.astype(c.dtype), c, **sums)
        )

    steps = -(-jnp.max(seq_lens, initial=0) // (step * page))
    _, state = jax.lax.while_loop(lambda carry: carry[0] < steps, chunk, (0, softmax.start((B, T, N), R)))
    out, lse = softmax.finish(state)
    return out.astype(q_c.dtype), lse
