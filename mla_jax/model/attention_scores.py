"""Attention scores and queries of a layer, for eviction and retrieval. `queries` are the layer's queries of new tokens; `scores`
are an eviction policy's scores of cached tokens, from the attention of the newest queries, block by block.

Over latents the queries are absorbed, so no head is rebuilt. The weights of all blocks are never in memory together: a first
round over the blocks sums the exponentials, a second one scores."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base.axes import CONTEXT
from mla_jax.cache import paged
from mla_jax.cache.evict import EvictionPolicy, Seen
from mla_jax.cache.paged import Layer
from mla_jax.mesh import across
from mla_jax.model.block_attention import Blocks, Cached, StepCache
from mla_jax.model.fp8_up import plain_up, to_latent
from mla_jax.model.page_selection import absorbed_queries

# of (queries as forms take them, held, up, projection behind attention, scale)
Watch = Callable[[tuple[Array, Array], StepCache, Any, Array, float], Any]
Number = Array | int  # of a block


def queries(
    q: tuple[Array, Array], held: StepCache, up: Any, out: Array, scale: float
) -> Float[Array, "B T N L"]:
    """Those whose product with a cached latent is a head's logit, before it is scaled."""
    return absorbed_queries(q, up)


def scores(
    policy: EvictionPolicy, q: Any, held: StepCache, up: Any, out: Float[Array, "D O"], scale: float
) -> Float[Array, "B M S"]:
    """The score that `policy` gives every slot of a layer: for each head where heads are cached, or where it tells them apart.

    `q` are the queries of tokens that are cached, as forms take them; `out` is the projection behind attention, of O = N V."""
    worth = functools.partial(_worth, up=up, out=out) if policy.needs_worth else None
    return scores_for(policy, met_queries(q, held, up, out, scale), held, scale, worth)


def met_queries(
    q: Any, held: StepCache, up: Any, out: Array, scale: float
) -> tuple[Float[Array, "B T N _"], ...]:
    """The queries as they meet the cached keys: a layer's weights are needed no more then, but for the worth of tokens."""
    over_heads = "k" in _layer(held).pool
    return (jnp.concatenate(q, -1),) if over_heads else (to_latent(q[0], up[0]), q[1])


def scores_for(
    policy: EvictionPolicy,
    queries: tuple[Float[Array, "B T N _"], ...],
    held: StepCache,
    scale: float,
    worth: Callable[[Cached], Array] | None = None,
) -> Float[Array, "B M S"]:
    """The same for these queries; `worth` is that of a block's tokens, for policies that want it."""
    watched = Watched.of(queries, held, scale)
    total = watched.total()
    anchor = watched.anchor() if policy.needs_anchor else None

    def scored(i: Number) -> Float[Array, "B M S"]:
        cached = watched.cached(i)
        weights = jnp.exp(watched.scores(cached, i) - total)
        of_block = None if worth is None else worth(cached)
        return policy.of_block(Seen(weights, _keys(cached), anchor, of_block, watched.slot(i), watched.lens))

    found = paged.gathered_slots(watched.side_by_side(scored), watched.layer.size)
    return policy.finished(found, watched.lens)


def _layer(held: StepCache) -> Layer:
    assert held.layer is not None, "a policy scores what is cached"
    return held.layer


class Watched(NamedTuple):
    """One layer's cached tokens, in blocks, and the queries that look at them."""

    layer: Layer
    blocks: Blocks
    reads: Callable[[Cached], Cached]
    queries: tuple[Float[Array, "B T N H"], ...]  # as they meet the keys
    scale: float

    @classmethod
    def of(cls, queries: tuple[Array, ...], held: StepCache, scale: float) -> "Watched":
        return cls(_layer(held), held.step, held.reads, queries, scale)

    @property
    def slots(self) -> int:
        """Of a block."""
        return self.blocks.count * self.layer.size

    @property
    def used(self) -> Int[Array, ""]:
        """Blocks that hold anything."""
        return -(-self.blocks.pages.used // self.blocks.count)

    @property
    def lens(self) -> Int[Array, "B #N"]:
        """Tokens of each row, or of each of its heads."""
        return jnp.atleast_2d(self.blocks.rows.seq_lens).T

    def slot(self, i: Number) -> Int[Array, " S"]:
        """The numbers of a block's slots, counted over all devices that share the row."""
        return paged.order_of(jnp.arange(self.slots, dtype=jnp.int32) + i * self.slots, self.layer.size)

    def cached(self, i: Number) -> Cached:
        """The contents of a block: zeros where nothing is held."""
        count = self.blocks.count
        return self.reads(paged.read(self.layer, self.blocks.pages, i * count, count))

    def scores(self, cached: Cached, i: Number) -> Float[Array, "B T N S"]:
        """Of a block's keys, -inf where a query does not see."""
        keys = (cached["k"],) if "k" in cached else (cached["c_kv"], cached["k_pe"])
        products = sum(map(_product, self.queries, keys))
        return jnp.where(self.blocks.visible(i * self.slots, self.slots), self.scale * products, -jnp.inf)

    def total(self) -> Float[Array, "B T N 1"]:
        """The logarithm of the sum of all exponentials; 0 where a query sees nothing."""

        def added(i: Array, total: Array) -> Array:
            return jnp.logaddexp(total, jax.nn.logsumexp(self.scores(self.cached(i), i), axis=-1))

        start = jnp.full(self.queries[0].shape[:3], -jnp.inf)
        total = across.log_total(jax.lax.fori_loop(0, self.used, added, start), CONTEXT)
        return jnp.where(jnp.isfinite(total), total, 0.0)[..., None]

    def anchor(self) -> Float[Array, "B K D"]:
        """The mean direction of a row's keys."""

        def directions(i: Number) -> Array:
            keys = _keys(self.cached(i))
            return (keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)).sum(1)

        start = jnp.zeros(jax.eval_shape(directions, 0).shape)
        total = jax.lax.fori_loop(0, self.used, lambda i, total: total + directions(i), start)
        return across.total(total, CONTEXT) / jnp.maximum(self.lens, 1)[..., None]

    def side_by_side(self, scored: Callable[[Number], Array]) -> Float[Array, "B M S"]:
        """The scores of all blocks, in order; zeros for empty blocks."""
        one = jax.eval_shape(scored, 0)
        count = self.blocks.pages.table.shape[-1] // self.blocks.count

        def put(i: Array, found: Array) -> Array:
            return jax.lax.dynamic_update_slice(found, scored(i), (0, 0, i * self.slots))

        return jax.lax.fori_loop(
            0, self.used, put, jnp.zeros((*one.shape[:2], count * self.slots), one.dtype)
        )


def _product(q: Array, keys: Array) -> Float[Array, "B T N S"]:
    """Of queries with keys of each head, or with those that all heads share."""
    mix = "btnh,bsnh->btns" if keys.ndim == 4 else "btnh,bsh->btns"
    return jnp.einsum(mix, q, keys, preferred_element_type=jnp.float32)


def _keys(cached: Cached) -> Float[Array, "B S K D"]:
    keys = cached["k"] if "k" in cached else jnp.concatenate([cached["c_kv"], cached["k_pe"]], -1)[:, :, None]
    return keys.astype(jnp.float32)


def _worth(cached: Cached, up: Any, out: Array) -> Float[Array, "B S N"]:
    """The L1 norm of a head's value in the layer's output: over latents both projections are one product."""
    _, uv = plain_up(up, out.dtype)
    heads = uv.shape[0]
    by_head = jnp.moveaxis(out.reshape(out.shape[0], heads, -1), 1, 0)

    def of_head(head: tuple[Array, Array, Array]) -> Array:
        values, uv, out = head
        product = out if "v" in cached else out @ uv
        return jnp.abs(jnp.einsum("bsr,dr->bsd", values, product, preferred_element_type=jnp.float32)).sum(-1)

    if "v" in cached:
        values = jnp.moveaxis(cached["v"], 2, 0)
    else:
        values = jnp.broadcast_to(cached["c_kv"], (heads, *cached["c_kv"].shape))
    return jnp.moveaxis(jax.lax.map(of_head, (values, uv, by_head)), 0, -1)
