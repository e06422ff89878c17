"""What is asked of a layer's attention by those who choose what a row keeps or reads. `queries` are what it looks for, `scores`
what an eviction policy makes of the weights with which the newest queries see what is cached, block by block.

Over latents the queries are absorbed, so no head is rebuilt. All weights together are never there: a first round over the blocks
sums the exponentials, a second one scores."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from mla_jax.cache import paged
from mla_jax.cache.evict import Policy, Seen
from mla_jax.model.held import Cached, Held
from mla_jax.model.retrieval import absorbed

# of (queries as forms take them, held, up, projection behind attention, scale)
Watch = Callable[[tuple[Array, Array], Held, Any, Array, float], Array]
Block = tuple[Cached, Float[Array, "B T N S"]]  # what is cached, and the scaled scores, -inf where a query does not see


def queries(q: tuple[Array, Array], held: Held, up: Any, out: Array, scale: float) -> Float[Array, "B T N L"]:
    """Those whose product with a cached latent is a head's logit, before it is scaled."""
    return absorbed(q, up)


def scores(policy: Policy, q: Any, held: Held, up: Any, out: Float[Array, "D O"], scale: float) -> Float[Array, "B M S"]:
    """What `policy` gives every slot of a layer: for each head where heads are cached, or where it tells them apart.

    `q` are the queries of tokens that are cached, as forms take them; `out` is the projection behind attention, of O = N V."""
    layer, step = held.layer, held.step
    assert layer is not None, "a policy scores what is cached"
    slots, blocks = step.count * layer.size, step.pages.table.shape[1] // step.count
    used, lens = -(-step.pages.used // step.count), step.rows.seq_lens
    over_heads = "k" in layer.pool
    queries = (jnp.concatenate(q, -1),) if over_heads else (jnp.einsum("btnp,npr->btnr", q[0], up[0]), q[1])

    def block(i: Array | int) -> Block:
        cached = held.reads(paged.read(layer, step.pages, i * step.count, step.count))
        keys = (cached["k"],) if over_heads else (cached["c_kv"], cached["k_pe"])
        seen = step.visible(i * slots, slots)
        return cached, jnp.where(seen, scale * sum(map(_product, queries, keys)), -jnp.inf)

    def summed(i: Array, total: Array) -> Array:
        return jnp.logaddexp(total, jax.nn.logsumexp(block(i)[1], axis=-1))

    total = jax.lax.fori_loop(0, used, summed, jnp.full(queries[0].shape[:3], -jnp.inf))
    total = jnp.where(jnp.isfinite(total), total, 0.0)[..., None]
    anchor = _anchor(block, used, lens) if policy.needs_anchor else None

    def scored(i: Array | int) -> Array:
        cached, found = block(i)
        worth = _worth(cached, up, out) if policy.needs_worth else None
        slot = jnp.arange(slots, dtype=jnp.int32) + i * slots
        return policy.of_block(Seen(jnp.exp(found - total), _keys(cached), anchor, worth, slot, lens))

    like = jax.eval_shape(scored, 0)
    start = jnp.zeros((*like.shape[:2], blocks * slots), like.dtype)

    def put(i: Array, all_scores: Array) -> Array:
        return jax.lax.dynamic_update_slice(all_scores, scored(i), (0, 0, i * slots))

    return policy.finished(jax.lax.fori_loop(0, used, put, start), lens)


def _product(q: Array, keys: Array) -> Float[Array, "B T N S"]:
    """Of queries with keys of each head, or with those that all heads share."""
    mix = "btnh,bsnh->btns" if keys.ndim == 4 else "btnh,bsh->btns"
    return jnp.einsum(mix, q, keys, preferred_element_type=jnp.float32)


def _keys(cached: Cached) -> Float[Array, "B S K D"]:
    keys = cached["k"] if "k" in cached else jnp.concatenate([cached["c_kv"], cached["k_pe"]], -1)[:, :, None]
    return keys.astype(jnp.float32)


def _anchor(block: Any, used: Array, lens: Array) -> Float[Array, "B K D"]:
    """The mean direction of a row's keys."""

    def directions(i: Array | int) -> Array:
        keys = _keys(block(i)[0])  # zeros where nothing is held
        return (keys / jnp.maximum(jnp.linalg.norm(keys, axis=-1, keepdims=True), 1e-12)).sum(1)

    start = jnp.zeros(jax.eval_shape(directions, 0).shape)
    total = jax.lax.fori_loop(0, used, lambda i, total: total + directions(i), start)
    return total / jnp.maximum(lens, 1)[:, None, None]


def _worth(cached: Cached, up: Any, out: Array) -> Float[Array, "B S N"]:
    """The L1 norm of what a head's value adds to the layer's output: over latents both projections are one product."""
    heads = up[1].shape[0]
    by_head = jnp.moveaxis(out.reshape(out.shape[0], heads, -1), 1, 0)

    def of_head(head: tuple[Array, Array, Array]) -> Array:
        values, uv, out = head
        product = out if "v" in cached else out @ uv
        return jnp.abs(jnp.einsum("bsr,dr->bsd", values, product, preferred_element_type=jnp.float32)).sum(-1)

    if "v" in cached:
        values = jnp.moveaxis(cached["v"], 2, 0)
    else:
        values = jnp.broadcast_to(cached["c_kv"], (heads, *cached["c_kv"].shape))
    return jnp.moveaxis(jax.lax.map(of_head, (values, up[1], by_head)), 0, -1)
