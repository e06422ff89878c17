"""The fallback: the same sums in plain JAX, a chunk of pages at a time, on any device."""

import jax
import jax.numpy as jnp

CHUNK = 1024  # held tokens gathered at a time


def mla_decode(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, *, scale):
    """Never gathers more than a chunk, and stops after the longest row."""
    B, T, N, R = q_c.shape
    page = c_kv.shape[1]
    step = max(min(CHUNK // page, page_table.shape[1]), 1)
    table = jnp.pad(page_table, ((0, 0), (0, -page_table.shape[1] % step)))
    limit = (seq_lens[:, None] - T + 1 + jnp.arange(T))[..., None]
    sums = {"preferred_element_type": jnp.float32}

    def chunk(carry):
        i, top, total, out = carry
        pages = jax.lax.dynamic_slice_in_dim(table, i * step, step, axis=1)
        pages = jnp.clip(pages, 0, c_kv.shape[0] - 1)
        place = i * step * page + jnp.arange(step * page)
        held = (place[None] < seq_lens[:, None])[..., None]  # values, not scores alone: a weight of zero times NaN is NaN
        c = jnp.where(held, c_kv[pages].reshape(B, -1, R), 0)
        pe = jnp.where(held, k_pe[pages].reshape(B, c.shape[1], -1), 0)
        scores = jnp.einsum("btnr,bsr->btns", q_c, c, **sums) + jnp.einsum("btne,bse->btns", q_pe, pe, **sums)
        scores = jnp.where((place < limit)[:, :, None], scores * scale, -jnp.inf)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        safe = jnp.where(jnp.isfinite(higher), higher, 0)
        weights = jnp.exp(scores - safe[..., None])
        keep = jnp.exp(top - safe)
        total = total * keep + jnp.sum(weights, axis=-1)
        out = out * keep[..., None] + jnp.einsum("btns,bsr->btnr", weights.astype(c.dtype), c, **sums)
        return i + 1, higher, total, out

    steps = -(-jnp.max(seq_lens, initial=0) // (step * page))
    start = (0, jnp.full((B, T, N), -jnp.inf), jnp.zeros((B, T, N)), jnp.zeros((B, T, N, R)))
    _, top, total, out = jax.lax.while_loop(lambda carry: carry[0] < steps, chunk, start)
    some = total > 0
    out = out / jnp.where(some, total, 1)[..., None]
    lse = jnp.where(some, top + jnp.log(jnp.where(some, total, 1)), -jnp.inf)
    return out.astype(q_c.dtype), lse
