"""Attention by kernels, scores never leaving the chip, over the same weights and the same cache as the forms of mla.py.

A few new tokens attend to latents, each read once: move-elided attention as one kernel. Many attend to heads rebuilt from the
latents: compressed attention, its second half a kernel. Unlike the forms, which compare positions, kernels count: what a row
holds fills its first slots in the order of arrival, as in a latent cache."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base.batch import Batch
from mla_jax.base.config import LATENT_NORM_EPS, Config
from mla_jax.base.roofline import FEW
from mla_jax.cache import latent
from mla_jax.model import ops, packed_latents, rope
from mla_jax.model.mla import Form, Mask, Queries, Up, heads, latents


class Rows(NamedTuple):
    """What a kernel has to know of a step's rows, the same for all its layers."""

    seq_lens: Int[Array, " B"]  # tokens held, the new ones included
    count: Int[Array, " B"]  # the new ones among them
    order: Int[Array, "B T"] | None  # of the queries, padding at one end, else as they came; None: one a row


def form(batch: Batch, layer: latent.Layer, config: Config) -> Form:
    """The form for one step, on a cache of which `layer` is any layer before that step."""
    (rows, new), slots = batch.positions.shape, layer["positions"].shape[1]
    packed = packed_latents.NAMES[1] in layer
    remembers = packed_latents.remembers if packed else latents
    rank = jnp.where(batch.mask, jnp.cumsum(batch.mask, axis=1, dtype=jnp.int32) - 1, -1)
    before = layer["length"][:rows]
    fits = batch.mask & (before[:, None] + rank < slots)  # the cache drops the rest
    count = fits.sum(1, dtype=jnp.int32)
    held = jnp.minimum(before + batch.mask.sum(1, dtype=jnp.int32), slots)
    seq_lens = jnp.where(batch.mask.any(1), held, 0)
    if new > FEW:
        order = jnp.argsort(~fits, axis=1, stable=True)
        return Form(remembers, partial(attend_to_heads, rows=Rows(seq_lens, count, order)))
    order = jnp.argsort(fits, axis=1, stable=True) if new > 1 else None
    # behind a barrier, or XLA writes the table anew for each layer
    table = jax.lax.optimization_barrier(ops.in_order(rows, min(batch.span or slots, slots)))
    plan = {"page_table": table, "schedule": ops.schedule(seq_lens, config.num_attention_heads, new)}
    tokens = rank, batch.positions, *rope.turns(batch.positions, config)
    appends = None if packed else partial(append, tokens=tokens, config=config)
    return Form(remembers, partial(attend_to_latents, rows=Rows(seq_lens, count, order), **plan), appends)


def append(
    q: Float[Array, "B T N H"],
    kv: Float[Array, "B T L"],
    weight: Float[Array, " R"],
    layer: latent.Layer,
    *,
    tokens: tuple[Array, ...],
    config: Config,
) -> tuple[Queries, latent.Layer]:
    """Turns queries and keys, normalises the latent with `weight`, and writes what there is to remember into `layer`."""
    how = {"eps": LATENT_NORM_EPS, "interleave": config.rope_interleave}
    q_pe, layer = ops.rope_append(q, kv, weight, layer, tokens, **how)
    return (q[..., : config.qk_nope_head_dim], q_pe), layer


def implementation(config: Config, dtype: jnp.dtype, rows: int, new: int, slots: int, packed: bool = False) -> str:
    """Who computes a step of these shapes, on latents in E4M3 if `packed`: "mosaic_gpu", "mosaic_tpu" or "xla"."""
    count = config.num_attention_heads
    plain, rope, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    of = partial(jax.ShapeDtypeStruct, dtype=dtype)
    if new > FEW:
        return ops.implementation(
            "mla_prefill", *(of((rows, n, count, plain + rope)) for n in (new, slots)), of((rows, slots, count, value))
        )
    queries = [of((rows, new, count, width)) for width in (config.kv_lora_rank, rope)]
    page, pages = ops.page_of(slots), rows * slots // ops.page_of(slots)
    c_kv, k_pe = (of((pages, page, width)) for width in (config.kv_lora_rank, rope))
    table = jax.ShapeDtypeStruct((rows, pages // rows), jnp.int32)
    ways = [c_kv, *([packed_latents.operand(jax.eval_shape(packed_latents.remembers, c_kv, k_pe))] if packed else [])]
    names = [ops.implementation("mla_decode", *queries, way, k_pe, table) for way in ways]
    return next((name for name in reversed(names) if name != "xla"), "xla")


def ordered(x: Float[Array, "B T N H"], rows: Rows) -> Float[Array, "B T N H"]:
    """Queries as a kernel wants them."""
    return x if rows.order is None else jnp.take_along_axis(x, rows.order[..., None, None], axis=1)


def restored(out: Float[Array, "B T N V"], rows: Rows) -> Float[Array, "B T N V"]:
    """The order in which the queries came."""
    return out if rows.order is None else jnp.take_along_axis(out, jnp.argsort(rows.order, axis=1)[..., None, None], axis=1)


def attend_to_latents(
    q: Queries, held: dict[str, Array], up: Up, mask: Mask, scale: float, *, rows: Rows, page_table: Array, schedule: Any
) -> Float[Array, "B T N V"]:
    """`mask` says the same as `rows`, and is not looked at."""
    q_c, q_pe = (ordered(x, rows) for x in (jnp.einsum("btnp,npr->btnr", q[0], up[0]), q[1]))
    cache = packed_latents.operand(held), held["k_pe"], page_table, rows.seq_lens
    o_c = ops.mla_decode(q_c, q_pe, *cache, scale, schedule=schedule)
    return restored(jnp.einsum("btnr,nvr->btnv", o_c, up[1]), rows)


def attend_to_heads(
    q: Queries, held: dict[str, Array], up: Up, mask: Mask, scale: float, *, rows: Rows
) -> Float[Array, "B T N V"]:
    """`mask` says the same as `rows`, and is not looked at."""
    rebuilt = heads(**packed_latents.unpacked(held), up=up)
    queries = ordered(jnp.concatenate(q, -1), rows)
    return restored(ops.mla_prefill(queries, rebuilt["k"], rebuilt["v"], rows.count, rows.seq_lens, scale), rows)
