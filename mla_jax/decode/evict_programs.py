"""Eviction as two programs: `observe` says which of the cached tokens stay in which layer, or in which head where heads are
cached; `move` brings them to new pages.

A policy looks at the newest tokens once more: they pass the layers again, and nothing is cached anew. So a
prompt can be read by any kernel before, and decoding needs no scores. Between both programs the host finds pages for what stays:
old pages may be others' too, and are only read."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mla_jax.base.axes import CONTEXT, DATA, TENSOR
from mla_jax.base.batch import Batch, Tables
from mla_jax.cache import evict, paged
from mla_jax.cache.evict import BUDGET_RULES, Budget, EvictionPolicy
from mla_jax.cache.paged import NOWHERE, Pool
from mla_jax.decode.rows import Rows, newest
from mla_jax.mesh import across
from mla_jax.model import attention_scores
from mla_jax.model.attention_scores import Watch
from mla_jax.model.block_attention import StepCache
from mla_jax.model.rope import softmax_scale
from mla_jax.model.transformer import Transformer

MOVED = 16  # pages that are moved at a time
QUERIES = 256 << 20  # bytes of queries that are kept from all layers at most, to be scored behind the pass


@dataclass(frozen=True)
class Selection:
    """The settings of eviction: policy, budget, and the tokens that stay whatever their scores."""

    policy: EvictionPolicy
    budget: Budget = BUDGET_RULES["uniform"]  # how layers or heads share
    sinks: int = 4  # first tokens that stay whatever their scores
    recent: int = 64  # and newest ones; a window's tokens have no scores of their own

    @property
    def window(self) -> int:
        """Tokens that pass the layers again."""
        return max(self.policy.window, 1)


class Kept(NamedTuple):
    """Which tokens stay, by layer and head; H is 1 for latents."""

    source: Any  # Int[Array, "L H B S"]: the slots that they had, in order
    count: Any  # Int[Array, "L H B"]
    told: Any  # Int[Array, "shards L H B"]: the counts of all data shards, for the host


def functions(evicts: Selection | None) -> dict[str, tuple[Callable, int]]:
    """The programs by name: their functions, and how many of the arguments are donated."""
    return {"observe": (functools.partial(observe, evicts=evicts), 2), "move": (move, 2)}


def observe(
    model: Transformer,
    pool: Pool,
    rows: Rows,
    at: Int[Array, " B"],
    page_table: Tables,
    count: Int[Array, " B"],
    ignored: Int[Array, " B"],
    *,
    evicts: Selection | None,
) -> tuple[Pool, Rows, Kept]:
    """The tokens to keep of the rows `at`: `count` a layer and head on average, none of the `ignored` newest. An index past the
    table is none; pool and rows are unchanged."""
    assert evicts is not None
    policy = evicts.policy
    # Where tokens are there to ask for the others, no other queries count
    looking = jnp.where(ignored > 0, ignored, evicts.window)
    tokens, batch = newest(rows, at, page_table, evicts.window, looking)
    same, scores = _scores(model, pool, policy, tokens, batch)
    slots = page_table.pages.shape[-1] * _page_size(pool)
    held = jnp.maximum(batch.seq_lens - page_table.dropped, 0).swapaxes(1, 2)
    stays = evict.kept(
        scores[..., :slots],
        held - ignored[:, None],
        count,
        evicts.budget,
        sinks=evicts.sinks,
        window=evicts.recent,
        first=policy.first,
    )
    source, kept = evict.new_slots(stays.swapaxes(1, 2))
    # Nothing is moved for an index that is no row: its page table is not its own
    kept = jnp.where(at < rows.seen.shape[0], kept, 0)
    return same, rows, Kept(source.astype(jnp.int32), kept, across.gathered(kept[None], DATA))


def _scores(
    model: Transformer, pool: Pool, policy: EvictionPolicy, tokens: Int[Array, "B T"], batch: Batch
) -> tuple[Pool, Float[Array, "L B M S"]]:
    """The scores of all layers, from one more pass of these tokens; the pool is unchanged."""
    behind = not policy.needs_worth and _bytes_of_queries(model, tokens.size) <= QUERIES
    watch = attention_scores.met_queries if behind else functools.partial(attention_scores.scores, policy)
    _, same, aux = model(tokens, batch, pool, watch=watch)
    assert same is not None
    if behind:
        return same, _scores_behind(model, same, policy, batch, watch, aux["watched"])
    return same, jnp.stack([_by_lane(model, policy, scores) for scores in aux["watched"]])


def _scores_behind(
    model: Transformer, pool: Pool, policy: EvictionPolicy, batch: Batch, watch: Watch, queries: list[Any]
) -> Float[Array, "L B M S"]:
    """The same behind the pass, in a loop over layers.

    Written out for each, a GPU's compiler makes one kernel of the scores of all, and takes longer for it than for all else."""
    plan, scale = model.dispatch.watching(model, batch, pool, watch), softmax_scale(model.config)

    def of_layer(given: tuple[Array, tuple[Array, ...]]) -> Float[Array, "B M S"]:
        number, queries = given
        mine = plan.of_layer(number)
        held = StepCache({}, model.layer_of(pool, number), mine.shared, mine.form.reads)
        return _by_lane(model, policy, attention_scores.scores_for(policy, queries, held, scale))

    layers = jnp.arange(len(queries), dtype=jnp.int32)
    return jax.lax.map(of_layer, (layers, jax.tree.map(lambda *each: jnp.stack(each), *queries)))


def _bytes_of_queries(model: Transformer, tokens: int) -> int:
    """Of all layers, absorbed."""
    config, heads = model.config, model.layers[0].attn.uk.shape[0]
    each = heads * (config.kv_lora_rank + config.qk_rope_head_dim) * model.dtype.itemsize
    return len(model.layers) * tokens * each


def _by_lane(model: Transformer, policy: EvictionPolicy, scores: Float[Array, "B M S"]) -> Array:
    """Those of each head where heads are cached, else one for all heads."""
    return scores if model.lanes > 1 else _shared(scores, policy.stages)


def _shared(scores: Float[Array, "B M S"], stages: int) -> Float[Array, "B {stages} S"]:
    """The mean over heads, those on other devices included."""
    return across.total(evict.shared(scores, stages), TENSOR) / across.size(TENSOR)


def move(model: Transformer, pool: Pool, kept: Kept, old: Tables, new: Tables) -> tuple[Pool, Kept]:
    """The pool with what stays in its `new` pages, in the same order; both tables are as wide, and no part is in both."""
    layers, width = old.pages.shape[0], old.pages.shape[-1]
    slots = min(MOVED, width) * _page_size(pool)  # at a time
    used = -(-kept.count.max() // slots)  # steps of a layer

    def moved(step: Array, pool: Pool) -> Pool:
        number = step // used
        layer = model.layer_of(pool, number)
        assert layer is not None
        to = step % used * slots + jnp.arange(slots)
        source, target = _moves(pool, kept, old, new, number, to, layer.first)
        return {name: _written(array, source, target) for name, array in pool.items()}

    return jax.lax.fori_loop(0, layers * used, moved, pool), kept


class Places(NamedTuple):
    """Indices of the pool's arrays, and which of them are on this device."""

    index: tuple[Int[Array, "*B"], ...]
    is_here: Bool[Array, "*B"]


def _moves(
    pool: Pool, kept: Kept, old: Tables, new: Tables, number: Array, to: Int[Array, " S"], first: Array
) -> tuple[Places, Places]:
    """Where the slots `to` of layer `number` come from and go to; the layer's parts of pages begin with `first`."""
    lanes, width, size = old.pages.shape[1], old.pages.shape[-1], _page_size(pool)
    slot = kept.source[number][..., jnp.minimum(to, width * size - 1)]
    before = jnp.take_along_axis(old.pages[number], slot // size, axis=-1) + first * lanes
    after = new.pages[number][..., jnp.minimum(to // size, width - 1)] + first * lanes
    after = jnp.where(to < kept.count[number][..., None], after, NOWHERE)
    was_here, source = _here(slot % size, pool)
    is_here, target = _here(jnp.broadcast_to(to % size, after.shape), pool)
    written = paged.places(jnp.where(is_here, after, NOWHERE), target, lanes)
    return Places(paged.places(before, source, lanes), was_here), Places(written, is_here)


def _written(array: Array, source: Places, target: Places) -> Array:
    """The array with the contents of `source` in `target`; devices that share pages each bring their own."""
    tokens = array[source.index]
    if across.size(CONTEXT) > 1:
        is_here = source.is_here
        mine = is_here.reshape(*is_here.shape, *(1,) * (tokens.ndim - is_here.ndim))
        tokens = across.total(jnp.where(mine, tokens, 0), CONTEXT)
    return array.at[target.index].set(tokens, mode="drop")


def _page_size(pool: Pool) -> int:
    """Tokens of a page, those on other devices included."""
    return paged.page_size(pool) * across.size(CONTEXT)


def _here(place: Int[Array, "*B"], pool: Pool) -> tuple[Bool[Array, "*B"], Int[Array, "*B"]]:
    """Whether a place in a page is on this device, and the place in this device's part."""
    size = paged.page_size(pool)
    return place // size == across.index(CONTEXT), place % size
