"""The lightning indexer of DeepSeek Sparse Attention (DeepSeek-V3.2): each query chooses the tokens that it attends to.

An indexer has a few narrow heads of its own, which share one key a token. A token's score is the sum over heads of
w relu(q . k), and the tokens with the highest scores are chosen, for all heads of the attention alike. No gradient flows through
the choice. A layer without an indexer takes the choice of the nearest one below that has one.

Letters: B lines, T new tokens, S cached tokens, K chosen ones, J heads of the indexer, I numbers of such a head."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from mla_jax.base import radix, roofline
from mla_jax.base.batch import Batch
from mla_jax.base.config import Config
from mla_jax.cache import paged
from mla_jax.cache.evict import LEAST
from mla_jax.cache.paged import INDEX_K, Layer, Pool, StepRows, View
from mla_jax.model import rope
from mla_jax.model.block_attention import ChosenTokens, StepCache
from mla_jax.model.kernels import linear
from mla_jax.model.ops import norm_weight, parameter

NORM_EPS = 1e-6  # of k_norm, in every family
UNSEEN = jnp.uint32(0xFFFFFFFF)  # bits of no score at all, behind those of every score


class IndexQueries(NamedTuple):
    """Of new tokens: queries of the indexer's heads, and the heads' weights."""

    q: Float[Array, "B T J I"]
    weights: Float[Array, "B T J"]


class Indexer(nnx.Module):
    """The weights of one layer's indexer."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.wq_b = parameter(config, rngs, "index_heads*index", "q_rank")
        self.wk = parameter(config, rngs, "index", "model")
        self.k_norm = norm_weight(config, rngs, "index")
        self.k_norm_bias = parameter(config, rngs, "index", scale=0.0)
        self.weights_proj = parameter(config, rngs, "index_heads", "model", exact=True, packs=False)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        c_q: Float[Array, "B T Q"],
        turns: rope.Turns,
        layer: Layer | None,
        step: Any,
        choosing: Any,
    ) -> tuple[Layer | None, "Picks"]:
        """The layer with the keys of the new tokens, and what these choose; None where they attend to everything.

        `x` is the layer's input, `c_q` the normed latent of the attention's queries, `turns` are the angles of the tokens."""
        keys = jax.lax.stop_gradient(self.keys(x, turns))
        if layer is not None:
            cached = paged.append(layer.of_index, {INDEX_K: keys}, step.rows)
            layer = dataclasses.replace(layer, pool=cached.pool)
        if choosing is None:
            return layer, None
        with jax.named_scope("choose_tokens"):
            queries = jax.lax.stop_gradient(self.queries(x, c_q, turns))
            return layer, choosing.chosen(queries, keys, layer)

    def keys(self, x: Float[Array, "B T D"], turns: rope.Turns) -> Float[Array, "B T I"]:
        """The keys that are cached of tokens."""
        k = linear(x, self.wk[...])
        return self._turned(layer_norm(k, self.k_norm[...], self.k_norm_bias[...]), turns)

    def queries(
        self, x: Float[Array, "B T D"], c_q: Float[Array, "B T Q"], turns: rope.Turns
    ) -> IndexQueries:
        """Both scales are in the weights, which are float32."""
        heads, width = self.weights_proj.shape[0], self.k_norm.shape[0]
        q = linear(c_q, self.wq_b[...]).reshape(*c_q.shape[:2], heads, width)
        weights = jnp.einsum(
            "btd,jd->btj", x.astype(jnp.float32), self.weights_proj[...], precision=jax.lax.Precision.HIGHEST
        )
        return IndexQueries(self._turned(q, turns), weights * (heads * width) ** -0.5)

    def _turned(self, x: Float[Array, "B T *J I"], turns: rope.Turns) -> Float[Array, "B T *J I"]:
        """Rotates the first numbers of each head, by the angles of the attention."""
        c = self.config
        first, rest = jnp.split(x, [c.qk_rope_head_dim], axis=-1)
        return jnp.concatenate([rope.rotate(first, turns, bool(c.indexer_rope_interleave)), rest], axis=-1)


def layer_norm(
    x: Float[Array, "*B I"], weight: Float[Array, " I"], bias: Float[Array, " I"]
) -> Float[Array, "*B I"]:
    """In float32."""
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + NORM_EPS)
    return (y * weight + bias).astype(x.dtype)


def index_scores(queries: IndexQueries, keys: Float[Array, "B S I"]) -> Float[Array, "B T S"]:
    """In float32, for near-ties would choose differently in less."""
    products = jnp.einsum("btji,bsi->btjs", queries.q, keys, preferred_element_type=jnp.float32)
    # Not as a matrix product, which a GPU rounds
    return (jax.nn.relu(products) * queries.weights[..., None]).sum(2)


def _bits(scores: Float[Array, "B T S"], visible: Bool[Array, "B T S"]) -> UInt32[Array, "B T S"]:
    """Smaller for higher scores; UNSEEN for tokens that a query does not see."""
    comparable = jnp.where(jnp.isfinite(scores), scores, LEAST)
    return jnp.where(visible, radix.descending(comparable), UNSEEN)


def _first(bits: UInt32[Array, "B T S"], count: int) -> Bool[Array, "B T S"]:
    """Up to `count` tokens with the highest scores, of those that are visible; of equal scores the first."""
    rows = bits.reshape(-1, bits.shape[-1])
    there = (rows != UNSEEN).sum(1, dtype=jnp.int32)
    return (radix.first(rows, jnp.minimum(there, count)) & (rows != UNSEEN)).reshape(bits.shape)


class ChosenSlots(NamedTuple):
    """The tokens that each new one attends to: the first `counts` of its slots, in the order of its row."""

    slots: Int[Array, "B T K"]  # counted from a layer's first page
    counts: Int[Array, "B T"]


Attends = Callable[..., Array]  # as of a Form
Picks = Any  # of a layer: what `chosen` returns, which later layers may take


class TokenChoice(NamedTuple):
    """How the new tokens of a step choose among cached ones, the same in all layers."""

    pages: View
    size: int  # of a page
    block: int  # pages of a line that are scored at a time
    queries: int  # new tokens of a line that choose at a time
    attending: int  # new tokens of a line that attend at a time
    count: int  # of chosen tokens
    start: Int[Array, "B T"]  # slot of the line where a token's row begins
    stop: Int[Array, "B T"]  # slot behind the last one that it sees

    def chosen(self, queries: IndexQueries, keys: Float[Array, "B T I"], layer: Layer) -> ChosenSlots:
        """The choice of a layer, where the keys of the new tokens are cached already."""
        indexed = layer.of_index
        slots = self.block * self.size

        def candidates(i: Array) -> tuple[Array, Array, Array]:
            """Keys of a block, the slots of its tokens in the layer, and in the line."""
            cached = paged.read(indexed, self.pages, i * self.block, self.block, (INDEX_K,))[INDEX_K]
            table = jax.lax.dynamic_slice_in_dim(self.pages.table, i * self.block, self.block, axis=1)
            of_layer = (table[..., None] * self.size + jnp.arange(self.size)).reshape(-1, slots)
            return cached, of_layer, i * slots + jnp.arange(slots)

        def of_queries(q: Array, weights: Array, start: Array, stop: Array) -> tuple[Array, Array]:
            def add(i: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
                cached, of_layer, place = candidates(i)
                visible = (place >= start[..., None]) & (place < stop[..., None])
                bits = _bits(index_scores(IndexQueries(q, weights), cached), visible)
                here = jnp.broadcast_to(of_layer[:, None], bits.shape)
                return _kept(
                    jnp.concatenate([found[0], bits], axis=-1),
                    jnp.concatenate([found[1], here], axis=-1),
                    self.count,
                )

            shape = (*start.shape, self.count)
            nothing = jnp.full(shape, UNSEEN), jnp.zeros(shape, jnp.int32)
            bits, best = jax.lax.fori_loop(0, -(-self.pages.used // self.block), add, nothing)
            return best, (bits != UNSEEN).sum(-1, dtype=jnp.int32)

        return ChosenSlots(*by_tokens(of_queries, self.queries, *queries, self.start, self.stop))

    def attended(
        self,
        chosen: ChosenSlots,
        attends: Attends,
        q: tuple[Array, Array],
        held: StepCache,
        up: Any,
        scale: float,
    ) -> Float[Array, "B T N V"]:
        """A form's attention to the chosen tokens: each new token is a row of its own."""
        layer = held.layer
        assert layer is not None, "tokens are chosen among those that are cached"

        def of_tokens(q_nope: Array, q_pe: Array, slots: Array, counts: Array) -> Array:
            q, (slots, counts) = ((q_nope, q_pe), (slots, counts))
            rows = counts.size
            alone = tuple(x.reshape(rows, 1, *x.shape[2:]) for x in q)
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


def _kept(bits: UInt32[Array, "B T S"], slots: Int[Array, "B T S"], count: int) -> tuple[Array, Array]:
    """The best `count` of candidates that are in the order of their row, in that order; UNSEEN comes behind them."""
    taken = _first(bits, count)
    place = jnp.where(taken, jnp.cumsum(taken, axis=-1, dtype=jnp.int32) - 1, count)
    line, token = jnp.ogrid[: bits.shape[0], : bits.shape[1]]
    at = line[..., None], token[..., None], place
    shape = (*bits.shape[:2], count)
    return (
        jnp.full(shape, UNSEEN).at[at].set(bits, mode="drop"),
        jnp.zeros(shape, jnp.int32).at[at].set(slots, mode="drop"),
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
        self, chosen: Array, attends: Attends, q: tuple[Array, Array], held: StepCache, up: Any, scale: float
    ) -> Float[Array, "B T N V"]:
        """As TokenChoice has it."""
        return attends(q, held._replace(step=chosen), up, scale)
