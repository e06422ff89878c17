"""Attention by kernels that keep the scores on the chip, over the same weights and the same cache as the forms of mla.py.

`kernel_latents` is move-elided attention as one kernel: a few new tokens attend to latents, each read once. `kernel_heads` is
compressed attention with a kernel as its second half: many new tokens attend to heads rebuilt from the latents.

Kernels see a length per row, not positions: a row's tokens fill its first slots in the order of arrival, as in a latent cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base.batch import Batch
from mla_jax.base.config import LATENT_NORM_EPS, Config
from mla_jax.cache import latent
from mla_jax.model import fp8_latent, ops, rope
from mla_jax.model.mla import Form, Queries, Up, heads, latents


class Rows(NamedTuple):
    """What a kernel needs to know about a step's rows."""

    seq_lens: Int[Array, " B"]  # cached tokens, the new ones included
    count: Int[Array, " B"]  # new tokens among them
    rank: Int[Array, "B T"]  # of a token among its row's new ones, -1 for padding
    fits: Array  # bool [B T]: the new tokens that the cache has room for; it drops the others


class Heads(NamedTuple):
    """What the layers of one step of `kernel_heads` share."""

    rows: Rows
    order: Int[Array, "B T"]  # of the queries, padding last


class Latents(NamedTuple):
    """What the layers of one step of `kernel_latents` share."""

    rows: Rows
    order: Int[Array, "B T"] | None  # of the queries, padding first; None: one token per row
    page_table: Int[Array, "B pages"]
    schedule: Any
    tokens: tuple[Array, ...]  # rank, positions, cosines and sines, for `rope_append`


def rows_of(batch: Batch, layer: latent.Layer) -> Rows:
    """`layer` is any layer of the cache as it was before the step."""
    slots, before = layer["positions"].shape[1], layer["length"][: batch.mask.shape[0]]
    rank = jnp.where(batch.mask, jnp.cumsum(batch.mask, axis=1, dtype=jnp.int32) - 1, -1)
    fits = batch.mask & (before[:, None] + rank < slots)
    cached = jnp.minimum(before + batch.mask.sum(1, dtype=jnp.int32), slots)
    seq_lens = jnp.where(batch.mask.any(1), cached, 0)
    return Rows(seq_lens, fits.sum(1, dtype=jnp.int32), rank, fits)


def prepare_heads(batch: Batch, layer: latent.Layer, config: Config) -> Heads:
    rows = rows_of(batch, layer)
    return Heads(rows, jnp.argsort(~rows.fits, axis=1, stable=True))


def prepare_latents(batch: Batch, layer: latent.Layer, config: Config) -> Latents:
    (count, new), slots = batch.positions.shape, layer["positions"].shape[1]
    rows = rows_of(batch, layer)
    order = jnp.argsort(rows.fits, axis=1, stable=True) if new > 1 else None
    table = ops.in_order(count, min(batch.span or slots, slots))
    table = jax.lax.optimization_barrier(table)  # without it XLA writes the table anew for each layer
    schedule = ops.schedule(rows.seq_lens, config.num_attention_heads, new)
    tokens = (rows.rank, batch.positions, *rope.turns(batch.positions, config))
    return Latents(rows, order, table, schedule, tokens)


def append(
    q: Float[Array, "B T N H"],
    kv: Float[Array, "B T L"],
    weight: Float[Array, " R"],
    layer: latent.Layer,
    step: Latents,
    config: Config,
) -> tuple[Queries, latent.Layer]:
    """Rotates queries and keys, normalises the latent with `weight`, and writes the new tokens into `layer`, in one kernel."""
    q_pe, layer = ops.rope_append(q, kv, weight, layer, step.tokens, eps=LATENT_NORM_EPS, interleave=config.rope_interleave)
    return (q[..., : config.qk_nope_head_dim], q_pe), layer


def ordered(x: Float[Array, "B T N H"], order: Int[Array, "B T"] | None) -> Float[Array, "B T N H"]:
    """Queries as a kernel takes them: padding at one end."""
    return x if order is None else jnp.take_along_axis(x, order[..., None, None], axis=1)


def restored(out: Float[Array, "B T N V"], order: Int[Array, "B T"] | None) -> Float[Array, "B T N V"]:
    """Outputs in the order in which the queries came."""
    return out if order is None else ordered(out, jnp.argsort(order, axis=1))


def kernel_latents(q: Queries, cached: dict[str, Array], up: Up, step: Latents, scale: float) -> Float[Array, "B T N V"]:
    q_c = ordered(jnp.einsum("btnp,npr->btnr", q[0], up[0]), step.order)
    q_pe = ordered(q[1], step.order)
    c_kv = fp8_latent.operand(cached)
    seq_lens = step.rows.seq_lens
    o_c = ops.mla_decode(q_c, q_pe, c_kv, cached["k_pe"], step.page_table, seq_lens, scale, schedule=step.schedule)
    return restored(jnp.einsum("btnr,nvr->btnv", o_c, up[1]), step.order)


def kernel_heads(q: Queries, cached: dict[str, Array], up: Up, step: Heads, scale: float) -> Float[Array, "B T N V"]:
    rebuilt = heads(**fp8_latent.unpacked(cached), up=up)
    queries = ordered(jnp.concatenate(q, -1), step.order)
    out = ops.mla_prefill(queries, rebuilt["k"], rebuilt["v"], step.rows.count, step.rows.seq_lens, scale)
    return restored(out, step.order)


KERNELS = {
    "kernel_latents": Form(latents, kernel_latents, prepare_latents, append),
    "kernel_heads": Form(latents, kernel_heads, prepare_heads),
}
