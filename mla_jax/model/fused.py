"""Move-elided attention as one kernel: scores never leave the chip, and each latent is read once. Same weights, same cache.

Unlike the forms of mla.py, which compare positions, it counts: what a row holds fills its first slots in the order of
arrival, as in a latent cache."""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base.batch import Batch
from mla_jax.cache import latent
from mla_jax.model import ops
from mla_jax.model.mla import Form, Mask, Queries, Up, latents


class Tiles(NamedTuple):
    """What the kernel has to know of a step, the same for all its layers."""

    seq_lens: Int[Array, " B"]  # tokens held, the new ones included
    order: Int[Array, "B T"] | None  # of the queries, padding first, then as they came; None: one a row
    schedule: Any


def form(batch: Batch, layer: latent.Layer, heads: int) -> Form:
    """The form for one step, on a cache of which `layer` is any layer before that step."""
    rows, new = batch.positions.shape
    count = batch.mask.sum(1, dtype=jnp.int32)
    held = jnp.minimum(layer["length"][:rows] + count, layer["positions"].shape[1])
    seq_lens = jnp.where(count > 0, held, 0)
    order = jnp.argsort(batch.mask, axis=1, stable=True) if new > 1 else None
    return Form(latents, partial(attend, tiles=Tiles(seq_lens, order, ops.schedule(seq_lens, heads, new))))


def attend(q: Queries, held: dict[str, Array], up: Up, mask: Mask, scale: float, *, tiles: Tiles) -> Float[Array, "B T N V"]:
    """`mask` says the same as `tiles`, and is not looked at."""
    q_c, q_pe = jnp.einsum("btnp,npr->btnr", q[0], up[0]), q[1]
    if tiles.order is not None:
        q_c, q_pe = (jnp.take_along_axis(x, tiles.order[..., None, None], axis=1) for x in (q_c, q_pe))
    o_c = ops.mla_decode(q_c, q_pe, held["c_kv"], held["k_pe"], tiles.seq_lens, scale, schedule=tiles.schedule)
    if tiles.order is not None:
        o_c = jnp.take_along_axis(o_c, jnp.argsort(tiles.order, axis=1)[..., None, None], axis=1)
    return jnp.einsum("btnr,nvr->btnv", o_c, up[1])
