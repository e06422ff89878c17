"""Attention by kernels that keep the scores on the chip, over the same weights and the same pool as the forms of mla.py.

`kernel_latents` is move-elided attention as one kernel: a few new tokens attend to latents, each read once. `kernel_heads` is
compressed attention with a kernel as its second half: many new tokens attend to each other, then to heads that are rebuilt from
the cached latents before them, block by block. `kernel_chosen` is move-elided attention of each new token to tokens that it has
chosen, as one kernel. `kernel_naive` is naive attention of one new token a row, as one kernel; where heads have dropped tokens of
their own, each reads its own pages."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base.axes import CONTEXT
from mla_jax.base.batch import Batch, Known
from mla_jax.base.config import LATENT_NORM_EPS, Config
from mla_jax.cache import paged
from mla_jax.cache.paged import Layer, Pool, StepRows, View
from mla_jax.mesh import across
from mla_jax.model import fp8_latent, kernels, rope
from mla_jax.model.block_attention import ChosenTokens, StepCache, finite
from mla_jax.model.fp8_up import Up, from_latent, plain_up, to_latent
from mla_jax.model.mla import Form, Queries, heads, latents


class Order(NamedTuple):
    """A kernel takes padding first."""

    there: Int[Array, "B T"]  # for each place of the kernel's, which query comes there
    back: Int[Array, "B T"]  # for each query, where it is


class Latents(NamedTuple):
    """The plan of one step of `kernel_latents`."""

    rows: StepRows
    held: Int[Array, " B"]  # tokens of each row that are on this device
    order: Order | None  # of the queries; None: one token per row
    parts: Known  # into which heads are cut, each for a call of its own
    schedule: Any
    turns: rope.Turns


def prepare_latents(batch: Batch, pool: Pool, config: Config, block: int) -> Latents:
    rows = paged.rows_of(batch, paged.page_size(pool))
    new, heads = batch.mask.shape[1], config.num_attention_heads
    order = padding_first(~rows.real) if new > 1 else None
    numbers = paged.numbers(pool)
    parts = kernels.parts_of_heads(
        (batch.mask.shape[0], new, heads),
        fp8_latent.latent_operand(numbers),
        numbers["k_pe"],
        rows.page_table,
    )
    held = paged.held_here(rows.seq_lens, paged.page_size(pool))
    schedule = kernels.schedule(held, heads // parts, new)
    return Latents(rows, held, order, Known(parts), schedule, rope.turns(batch.positions, config))


def padding_first(padding: Bool[Array, "B T"]) -> Order:
    """Without a sort, for a few tokens: each one's place is the number of those that come before it."""
    pads, others = (jnp.cumsum(which, axis=1, dtype=jnp.int32) for which in (padding, ~padding))
    back = jnp.where(padding, pads, pads[:, -1:] + others) - 1
    places = jnp.arange(back.shape[1], dtype=jnp.int32)
    return Order(jnp.argmax(back[:, None, :] == places[:, None], axis=2).astype(jnp.int32), back)


def rotate_and_append(
    q: Float[Array, "B T N H"],
    kv: Float[Array, "B T L"],
    weight: Float[Array, " R"],
    layer: Layer,
    step: Latents,
    config: Config,
) -> tuple[Queries, Layer]:
    """Rotates queries and keys, normalises the latent with `weight`, and writes the new tokens to the pool, in one kernel."""
    tokens = (paged.slots_in(layer, step.rows), step.turns.cos, step.turns.sin)
    pool = paged.numbers(layer.pool)
    q_pe, pool = kernels.rope_append(
        q, kv, weight, pool, tokens, eps=LATENT_NORM_EPS, interleave=config.rope_interleave
    )
    q_nope, pool = q[..., : config.qk_nope_head_dim], paged.stored(pool, layer.pool)
    return (q_nope, q_pe), dataclasses.replace(layer, pool=pool)


def ordered(x: Float[Array, "B T N H"], order: Int[Array, "B T"]) -> Float[Array, "B T N H"]:
    return jnp.take_along_axis(x, order[..., None, None], axis=1)


def kernel_latents(q: Queries, held: StepCache, up: Up, scale: float) -> Float[Array, "B T N V"]:
    layer, step = _cached(held), held.step
    q_c = to_latent(q[0], up[0])
    q_pe = q[1]
    if step.order is not None:
        q_c, q_pe = ordered(q_c, step.order.there), ordered(q_pe, step.order.there)
    pool, table = paged.numbers(layer.pool), step.rows.page_table + layer.first
    c_kv = fp8_latent.latent_operand(pool)
    latents = c_kv, pool["k_pe"], table, step.held
    o_c, lse = kernels.mla_decode(q_c, q_pe, *latents, scale, parts=step.parts, schedule=step.schedule)
    o_c = kernels.merge_across(o_c, lse, CONTEXT)
    out = from_latent(o_c, up[1], o_c.dtype)
    return out if step.order is None else ordered(out, step.order.back)


# The first key that a query attends to, and the one after the last
Range = tuple[Int[Array, "B T"], Int[Array, "B T"]]


class Heads(NamedTuple):
    """The plan of one step of `kernel_heads`."""

    rows: StepRows
    own: Range  # among the new tokens of its line
    before: View  # with what rows had cached before
    cached: Range  # among the slots of these
    count: Known  # of pages whose heads are rebuilt at a time


def prepare_heads(batch: Batch, pool: Pool, config: Config, block: int) -> Heads:
    size = paged.page_size(pool)
    rows = paged.rows_of(batch, size)
    before = rows.seq_lens - rows.counts
    pages = paged.view_of(rows, before, size)
    count = min(max(block // size, 1), pages.table.shape[1])
    token = jnp.broadcast_to(jnp.arange(rows.slots.shape[1], dtype=jnp.int32), rows.slots.shape)
    first = token - (rows.index - rows.of_tokens(before))  # of the row's new tokens
    start = rows.of_tokens(pages.start * size)

    def valid(*bounds: Array) -> Range:
        """Nothing for padding."""
        first, stop = (jnp.where(rows.real, bound, 0) for bound in bounds)
        return first, stop

    cached = valid(start, start + rows.of_tokens(paged.held_here(before, size)))
    # Every device has the keys of the new tokens; one attends to them
    own = valid(first, jnp.where(across.index(CONTEXT) == 0, token + 1, first))
    return Heads(rows, own, pages.in_blocks(count), cached, Known(count))


def kernel_heads(q: Queries, held: StepCache, up: Up, scale: float) -> Float[Array, "B T N V"]:
    layer, queries = _cached(held), jnp.concatenate(q, -1)
    up = plain_up(up, queries.dtype)  # once, not for each block
    step: Heads = held.step
    slots = step.count * layer.size

    def over(cached: dict[str, Array], keys: Range) -> tuple[Array, Array]:
        known = held.reads(cached)
        k = heads(**known, up=up)["k"]
        v = heads(finite(known["c_kv"]), known["k_pe"], up)["v"]
        return kernels.mla_prefill(queries, k, v, *keys, scale)

    def add(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        block = paged.read(layer, step.before, i * step.count, step.count)
        first, stop = (jnp.clip(bound - i * slots, 0, slots) for bound in step.cached)
        return kernels.merge(*found, *over(block, (first, stop)))

    out, lse = over(held.new, step.own)
    found = (out.astype(jnp.float32), lse)
    mine, lse = jax.lax.fori_loop(0, -(-step.before.used // step.count), add, found)
    return kernels.merge_across(mine, lse, CONTEXT).astype(out.dtype)


class CachedHeads(NamedTuple):
    """The plan of one step of `kernel_naive`."""

    table: Int[Array, "#N B P"]
    held: Int[Array, "#N B"]  # tokens that are on this device
    rows: StepRows


def prepare_cached_heads(batch: Batch, pool: Pool, config: Config, block: int) -> CachedHeads:
    rows = paged.rows_of(batch, paged.page_size(pool))
    held = paged.held_here(rows.seq_lens, paged.page_size(pool))
    if rows.lanes == 1:
        return CachedHeads(rows.page_table[None], held[None], rows)
    return CachedHeads(rows.page_table, held, rows)


def kernel_naive(q: Queries, held: StepCache, up: Up, scale: float) -> Float[Array, "B 1 N V"]:
    layer, step = _cached(held), held.step
    queries, cached = jnp.concatenate(q, -1)[:, 0], paged.numbers(layer.pool)
    table = step.table + layer.first * step.rows.lanes
    out, lse = kernels.heads_decode(queries, cached["k"], cached["v"], table, step.held, scale)
    return kernels.merge_across(out[:, None], lse[:, None], CONTEXT)


def _cached(held: StepCache) -> Layer:
    assert held.layer is not None, "kernels attend to what is cached"
    return held.layer


def kernel_chosen(q: Queries, held: ChosenTokens, up: Up, scale: float) -> Float[Array, "B T N V"]:
    layer, pool = held.layer, paged.numbers(held.layer.pool)
    q_c = to_latent(q[0], up[0])
    latents = fp8_latent.latent_operand(pool), pool["k_pe"]
    slots = held.slots + layer.first * layer.size
    o_c = kernels.mla_sparse(q_c, q[1], *latents, slots, held.counts, scale)
    return from_latent(o_c, up[1], o_c.dtype)


KERNELS = {
    "kernel_latents": Form(latents, kernel_latents, prepare_latents, rotate_and_append),
    "kernel_heads": Form(latents, kernel_heads, prepare_heads),
    "kernel_naive": Form(heads, kernel_naive, prepare_cached_heads),
    "kernel_chosen": Form(latents, kernel_chosen),
}
