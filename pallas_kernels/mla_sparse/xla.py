"""The fallback for any device: each query is a row of `mla_decode` of its own, with pages of one token."""

import jax
import jax.numpy as jnp

from pallas_kernels.mla_decode import xla

QUERIES = 32  # at a time: `mla_decode` gathers up to 1,024 tokens of each


def mla_sparse(q_c, q_pe, c_kv, k_pe, slots, counts, *, scale):
    """As `mla_sparse` of the package."""
    B, T, N, R = q_c.shape
    latents, rotary = jax.tree.map(_by_slot, (c_kv, k_pe))

    def some(queries):
        q_c, q_pe, slots, counts = queries
        return xla.mla_decode(q_c[:, None], q_pe[:, None], latents, rotary, slots, counts, scale=scale)

    queries = [x.reshape(B * T, *x.shape[2:]) for x in (q_c, q_pe, slots, counts)]
    if B * T <= QUERIES:
        out, lse = some(queries)
    else:
        out, lse = jax.lax.map(some, [_blocks(x) for x in queries])
    out, lse = out.reshape(-1, N, R)[: B * T], lse.reshape(-1, N)[: B * T]
    return out.reshape(q_c.shape), lse.reshape(B, T, N)


def _by_slot(pool):
    """`[G Z ..]` -> pages of one token."""
    return pool.reshape(-1, 1, pool.shape[-1])


def _blocks(x):
    """`[n ..]` -> `[blocks QUERIES ..]`; queries of padding attend to nothing."""
    padded = jnp.pad(x, [(0, -len(x) % QUERIES)] + [(0, 0)] * (x.ndim - 1))
    return padded.reshape(-1, QUERIES, *x.shape[1:])
