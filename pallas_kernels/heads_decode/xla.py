"""The fallback for any device: the same sums in plain JAX, a chunk of pages at a time."""

import jax
import jax.numpy as jnp

from pallas_kernels import softmax

CHUNK = 512  # cached tokens of a head gathered at a time


def heads_decode(q, k, v, page_table, seq_lens, *, scale):
    """As `heads_decode` of the package. Stops after the longest head."""
    (B, N, _), (G, Z), V = q.shape, k.shape[:2], v.shape[-1]
    own = page_table.shape[0] > 1
    step = max(min(CHUNK // Z, page_table.shape[-1]), 1)
    table = jnp.pad(page_table, ((0, 0), (0, 0), (0, -page_table.shape[-1] % step)))
    sums = {"preferred_element_type": jnp.float32}

    def gathered(array, entries):
        """`[N B S ..]` of the parts in `entries [N or 1, B, step]`."""
        page, head = jnp.divmod(entries, N) if own else (entries, jnp.arange(N)[:, None, None])
        page, head = jnp.broadcast_arrays(jnp.clip(page, 0, G - 1), head)
        return array[page[..., None], jnp.arange(Z), head[..., None]].reshape(N, B, step * Z, -1)

    def chunk(carry):
        i, state = carry
        entries = jax.lax.dynamic_slice_in_dim(table, i * step, step, axis=2)
        place = i * step * Z + jnp.arange(step * Z)
        # Mask values as well as scores: a weight of zero times NaN is NaN
        held = place < seq_lens[..., None]
        keys, values = (jnp.where(held[..., None], gathered(array, entries), 0) for array in (k, v))
        scores = jnp.where(held, jnp.einsum("bnh,nbsh->nbs", q, keys, **sums) * scale, -jnp.inf)
        return i + 1, softmax.add(
            state, scores, lambda w: jnp.einsum("nbs,nbsv->nbv", w.astype(v.dtype), values, **sums)
        )

    steps = -(-jnp.max(seq_lens, initial=0) // (step * Z))
    _, state = jax.lax.while_loop(lambda carry: carry[0] < steps, chunk, (0, softmax.start((N, B), V)))
    out, lse = softmax.finish(state)
    return out.swapaxes(0, 1).astype(q.dtype), lse.T
