"""Which tokens a step's new tokens choose by an indexer's scores, and attention to these alone.

A plan is made once a step and shared by its layers. What is cached is scored block by block, and the best tokens so far are
kept, in the order of their row: scores of all cached tokens are never in memory together.

Letters: B lines, T new tokens, S candidates, K chosen tokens, I numbers of an indexer's key."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from mla_jax.base import radix, roofline
from mla_jax.base.batch import Batch
from mla_jax.base.config import Config
from mla_jax.cache import paged
from mla_jax.cache.evict import LEAST
from mla_jax.cache.paged import OF_INDEX, Layer, Pool, StepRows, View
from mla_jax.model import fp8_index
from mla_jax.model.block_attention import ChosenTokens, StepCache
from mla_jax.model.indexer import IndexQueries, index_scores
from mla_jax.model.mla import Queries

UNSEEN = np.uint32(0xFFFFFFFF)  # bits of no score at all, behind those of every score
Attends = Callable[..., Array]  # as of a Form


class ChosenSlots(NamedTuple):
    """The tokens that each new one attends to: the first `counts` of its slots, in the order of its row."""

    slots: Int[Array, "B T K"]  # counted from a layer's first page
    counts: Int[Array, "B T"]


class Best(NamedTuple):
    """The best tokens so far of each new one, in the order of their row; UNSEEN comes behind them."""

    bits: UInt32[Array, "B T K"]  # of scores
    slots: Int[Array, "B T K"]

    @staticmethod
    def nothing(shape: tuple[int, ...]) -> "Best":
        return Best(jnp.full(shape, UNSEEN), jnp.zeros(shape, jnp.int32))


class Candidates(NamedTuple):
    """A block of cached tokens of each line, in the order of its rows."""

    keys: Float[Array, "B S I"]
    slots: Int[Array, "B S"]  # counted from a layer's first page
    place: Int[Array, " S"]  # slot of the line

    def joined(
        self, best: Best, queries: IndexQueries, start: Int[Array, "B T"], stop: Int[Array, "B T"], count: int
    ) -> Best:
        """The best `count` of these and of those before; each query sees its slots of the line from `start` to `stop`."""
        visible = (self.place >= start[..., None]) & (self.place < stop[..., None])
        bits = _bits(index_scores(queries, self.keys), visible)
        slots = jnp.broadcast_to(self.slots[:, None], bits.shape)
        all_bits = jnp.concatenate([best.bits, bits], axis=-1)
        return _kept(all_bits, jnp.concatenate([best.slots, slots], axis=-1), count)


class TokenChoice(NamedTuple):
    """How the new tokens of a step choose among cached ones, the same in all layers."""

    pages: View
    size: int  # of a page
    block: int  # pages of a line that are scored at a time
    queries: int  # new tokens of a line that choose at a time
    attending: int | None  # new tokens of a line that attend at a time; None: all, by a kernel
    count: int  # of chosen tokens
    start: Int[Array, "B T"]  # slot of the line where a token's row begins
    stop: Int[Array, "B T"]  # slot behind the last one that it sees

    def chosen(self, queries: IndexQueries, keys: Float[Array, "B T I"], layer: Layer) -> ChosenSlots:
        """The choice of a layer, where the keys of the new tokens are cached already."""
        blocks = -(-self.pages.used // self.block)

        def of_queries(q: Array, weights: Array, start: Array, stop: Array) -> tuple[Array, Array]:
            def add(i: Array, best: Best) -> Best:
                block = self._candidates(layer.of_index, i, q.dtype)
                return block.joined(best, IndexQueries(q, weights), start, stop, self.count)

            best = jax.lax.fori_loop(0, blocks, add, Best.nothing((*start.shape, self.count)))
            return best.slots, (best.bits != UNSEEN).sum(-1, dtype=jnp.int32)

        return ChosenSlots(*by_tokens(of_queries, self.queries, *queries, self.start, self.stop))

    def _candidates(self, indexed: Layer, i: Array, dtype: jnp.dtype) -> "Candidates":
        """Those of block `i` of each line; `indexed` has the indexer's keys."""
        first, count = i * self.block, self.block * self.size
        cached = paged.read(indexed, self.pages, first, self.block, OF_INDEX)
        keys = fp8_index.key_format_of(cached).reads(cached, dtype)
        table = jax.lax.dynamic_slice_in_dim(self.pages.table, first, self.block, axis=1)
        slots = table[..., None] * self.size + jnp.arange(self.size)
        return Candidates(keys, slots.reshape(-1, count), i * count + jnp.arange(count))

    def attended(
        self,
        chosen: ChosenSlots,
        attends: Attends,
        q: Queries,
        held: StepCache,
        up: Any,
        scale: float,
    ) -> Float[Array, "B T N V"]:
        """A form's attention to the chosen tokens: for XLA each new token is a row of its own."""
        layer = held.layer
        assert layer is not None, "tokens are chosen among those that are cached"
        if self.attending is None:
            return attends(q, ChosenTokens(layer, *chosen, held.reads), up, scale)

        def of_tokens(q_nope: Array, q_pe: Array, slots: Array, counts: Array) -> Array:
            rows = counts.size
            alone = tuple(x.reshape(rows, 1, *x.shape[2:]) for x in (q_nope, q_pe))
            tokens = ChosenTokens(layer, slots.reshape(rows, -1), counts.reshape(rows), held.reads)
            out = attends(alone, tokens, up, scale)
            return out.reshape(*counts.shape, *out.shape[2:])

        return by_tokens(of_tokens, self.attending, *q, *chosen)


def choice_of_step(batch: Batch, pool: Pool, config: Config, sizes: roofline.ChoiceSizes) -> TokenChoice:
    """The plan of a step whose tokens choose among what is cached."""
    assert config.index_topk is not None
    size = paged.page_size(pool)
    rows: StepRows = paged.rows_of(batch, size)
    pages = paged.view_of(rows, rows.seq_lens, size)
    block = min(max(sizes.slots // size, 1), pages.table.shape[-1])
    start = rows.of_tokens(pages.start * size)
    stop = jnp.where(rows.real, start + rows.index + 1, start)
    at_once = sizes.choosing, sizes.attending
    return TokenChoice(pages.in_blocks(block), size, block, *at_once, config.index_topk, start, stop)


def nothing(plan: TokenChoice) -> ChosenSlots:
    """A choice of no tokens."""
    shape = plan.start.shape
    return ChosenSlots(jnp.zeros((*shape, plan.count), jnp.int32), jnp.zeros(shape, jnp.int32))


class MaskChoice(NamedTuple):
    """How tokens choose among each other, where nothing is cached: the choice is a mask."""

    count: int
    mask: Bool[Array, "B T 1 S"]  # what they may attend to

    def chosen(
        self, queries: IndexQueries, keys: Float[Array, "B T I"], layer: None
    ) -> Bool[Array, "B T 1 S"]:
        """As TokenChoice has it."""
        bits = _bits(index_scores(queries, keys), self.mask[:, :, 0])
        return _first(bits, self.count)[:, :, None]

    def attended(
        self, chosen: Array, attends: Attends, q: Queries, held: StepCache, up: Any, scale: float
    ) -> Float[Array, "B T N V"]:
        """As TokenChoice has it."""
        return attends(q, held._replace(step=chosen), up, scale)


def _bits(scores: Float[Array, "B T S"], visible: Bool[Array, "B T S"]) -> UInt32[Array, "B T S"]:
    """Smaller for higher scores; UNSEEN for tokens that a query does not see."""
    comparable = jnp.where(jnp.isfinite(scores), scores, LEAST)
    return jnp.where(visible, radix.descending(comparable), UNSEEN)


def _first(bits: UInt32[Array, "B T S"], count: int) -> Bool[Array, "B T S"]:
    """Up to `count` tokens with the highest scores, of those that are visible; of equal scores the first."""
    rows = bits.reshape(-1, bits.shape[-1])
    there = (rows != UNSEEN).sum(1, dtype=jnp.int32)
    return (radix.first(rows, jnp.minimum(there, count)) & (rows != UNSEEN)).reshape(bits.shape)


def _kept(bits: UInt32[Array, "B T S"], slots: Int[Array, "B T S"], count: int) -> Best:
    """The best `count` of candidates that are in the order of their row."""
    taken = _first(bits, count)
    place = jnp.where(taken, jnp.cumsum(taken, axis=-1, dtype=jnp.int32) - 1, count)
    line, token = jnp.ogrid[: bits.shape[0], : bits.shape[1]]
    at = line[..., None], token[..., None], place
    nothing = Best.nothing((*bits.shape[:2], count))
    return Best(
        nothing.bits.at[at].set(bits, mode="drop"),
        nothing.slots.at[at].set(slots, mode="drop"),
    )


def by_tokens(function: Callable[..., Any], at_once: int, *arrays: Array) -> Any:
    """`function` of arrays `[B T ..]`, for `at_once` of the T tokens at a time."""
    tokens = arrays[0].shape[1]
    if tokens <= at_once:
        return function(*arrays)
    groups = -(-tokens // at_once)

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, groups * at_once - tokens), *[(0, 0)] * (x.ndim - 2)))
        return jnp.moveaxis(padded.reshape(x.shape[0], groups, at_once, *x.shape[2:]), 1, 0)

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])[:, :tokens]

    return jax.tree.map(joined, jax.lax.map(lambda part: function(*part), tuple(map(split, arrays))))
