"""The fallback for any device: the same sums in plain JAX, a block of queries and a chunk of keys at a time."""

import jax
import jax.numpy as jnp

from pallas_kernels import softmax
from pallas_kernels.mla_prefill import ranges

BLOCK = 512  # queries at a time
CHUNK = 512  # keys at a time


def mla_prefill(q, k, v, first, stop, *, scale):
    """As `mla_prefill` of the package. Holds the scores of one block and one chunk at a time."""
    T = q.shape[1]
    block = min(BLOCK, T)
    first, stop = ranges.clipped(first, stop, k.shape[1])
    held = stop.max(axis=1)

    def in_blocks(x):
        x = jnp.pad(x, ((0, 0), (0, -T % block), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(len(x), -1, block, *x.shape[2:]).swapaxes(0, 1)

    def whole(x):
        return x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :T]

    out, lse = jax.lax.map(lambda x: _block(*x, k, v, held, scale), tuple(map(in_blocks, (q, first, stop))))
    return whole(out), whole(lse)


def _block(q, first, stop, k, v, held, scale):
    """q `[B t N H]`, ranges `[B t]`, stop of each row `[B]` -> `[B t N V]` in q's dtype, LSE `[B t N]`.

    Computes the chunks from the first to the last that any query attends to."""
    (B, t, N, _), S = q.shape, k.shape[1]
    step = min(CHUNK, S)
    sums = {"preferred_element_type": jnp.float32}

    def chunk(carry):
        i, state = carry
        base = jnp.minimum(i * step, S - step)  # the last chunk overlaps the one before rather than the end
        place = base + jnp.arange(step)
        keys, values = (jax.lax.dynamic_slice_in_dim(x, base, step, axis=1) for x in (k, v))
        finite = (place < held[:, None])[..., None, None]  # a weight of zero times NaN is NaN
        values = jnp.where(finite, values, 0)
        seen = (place >= i * step) & (place >= first[..., None]) & (place < stop[..., None])
        scores = jnp.einsum("btnh,bsnh->bnts", q, keys, **sums)
        scores = jnp.where(seen[:, None], scores * scale, -jnp.inf)
        return i + 1, softmax.add(
            state, scores, lambda w: jnp.einsum("bnts,bsnv->bntv", w.astype(v.dtype), values, **sums)
        )

    start = jnp.min(first, where=first < stop, initial=S) // step
    steps = -(-jnp.max(stop) // step)
    _, state = jax.lax.while_loop(
        lambda carry: carry[0] < steps, chunk, (start, softmax.start((B, N, t), v.shape[-1]))
    )
    out, lse = softmax.finish(state)
    return out.astype(q.dtype).swapaxes(1, 2), lse.swapaxes(1, 2)
