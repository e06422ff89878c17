"""The fallback for any device: the same sums in plain JAX, a block of queries and a chunk of keys at a time."""

import jax
import jax.numpy as jnp

from pallas_kernels import softmax

BLOCK = 512  # queries at a time
CHUNK = 512  # keys at a time


def mla_prefill(q, k, v, q_lens, kv_lens, *, scale, causal):
    """As `mla_prefill` of the package. Holds the scores of one block and one chunk at a time."""
    B, T, N, H = q.shape
    block = min(BLOCK, T)
    blocks = -(-T // block)
    queries = jnp.pad(q, ((0, 0), (0, -T % block), (0, 0), (0, 0))).reshape(B, blocks, block, N, H).swapaxes(0, 1)
    token = jnp.arange(blocks * block).reshape(blocks, 1, block)
    limit = (kv_lens - q_lens)[:, None] + token + 1 if causal else kv_lens[:, None]
    limit = jnp.where(token < q_lens[:, None], limit, 0)  # the keys that each query attends to
    out, lse = jax.lax.map(lambda x: _block(x[0], x[1], k, v, kv_lens, scale), (queries, limit))
    out, lse = (x.swapaxes(0, 1).reshape(B, blocks * block, *x.shape[3:])[:, :T] for x in (out, lse))
    return out, lse


def _block(q, limit, k, v, kv_lens, scale):
    """q `[B t N H]`, limit `[B t]` -> `[B t N V]` in q's dtype, LSE `[B t N]`; stops after the last key attended to."""
    (B, t, N, _), S = q.shape, k.shape[1]
    step = min(CHUNK, S)
    sums = {"preferred_element_type": jnp.float32}

    def chunk(carry):
        i, state = carry
        first = jnp.minimum(i * step, S - step)  # the last chunk overlaps the one before rather than the end
        place = first + jnp.arange(step)
        keys, values = (jax.lax.dynamic_slice_in_dim(x, first, step, axis=1) for x in (k, v))
        held = (place < kv_lens[:, None])[..., None, None]  # mask values as well as scores: a weight of zero times NaN is NaN
        values = jnp.where(held, values, 0)
        seen = (place >= i * step) & (place < limit[..., None])
        scores = jnp.einsum("btnh,bsnh->bnts", q, keys, **sums)
        scores = jnp.where(seen[:, None], scores * scale, -jnp.inf)
        return i + 1, softmax.add(state, scores, lambda w: jnp.einsum("bnts,bsnv->bntv", w.astype(v.dtype), values, **sums))

    steps = -(-jnp.max(limit, initial=0) // step)
    _, state = jax.lax.while_loop(lambda carry: carry[0] < steps, chunk, (0, softmax.start((B, N, t), v.shape[-1])))
    out, lse = softmax.finish(state)
    return out.astype(q.dtype).swapaxes(1, 2), lse.swapaxes(1, 2)
