"""Pages that come and go as two programs: `rank` says which of a row's pages its next tokens are to find on the device, `hold`
how many tokens its page table has then.

The full pages of such rows are in the host's memory. What they are summed up by stays on the device, by their slots there: a page
is judged without its contents."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from mla_jax.cache import paged, retrieve
from mla_jax.cache.paged import SUMMARY, Pool
from mla_jax.decode.rows import Rows, newest, returned, taken
from mla_jax.model import attention_scores, rope
from mla_jax.model.transformer import Transformer


def rank(
    model: Transformer,
    pool: Pool,
    rows: Rows,
    at: Int[Array, " B"],
    page_table: Int[Array, "B P"],
    new: Int[Array, "B P"],
    slots: Int[Array, "B W"],
) -> tuple[Pool, Rows, Int[Array, "B K"]]:
    """The places, ascending, of the pages that the rows `at` are to have on the device; what comes after a row's last page may
    be any. Rows must have as many tokens as their table holds.

    `slots` are where the rows' full pages are on the host, `new` those of pages in the table that were not summed up there yet,
    NOWHERE for the others. The newest token passes the layers once more, for its queries; nothing is cached anew."""
    retrieval = model.dispatch.retrieval
    assert retrieval is not None
    assert rows.summaries is not None
    rows = dataclasses.replace(rows, summaries=_with_new(model, pool, rows.summaries, page_table, new))
    tokens, batch = newest(rows, at, page_table, 1)
    _, same, aux = model(tokens, batch, pool, watch=attention_scores.queries)
    assert same is not None
    size, position = paged.page_size(pool), taken(rows, at)[1].position
    full = jnp.arange(slots.shape[1]) < (position // size)[:, None]
    votes = _votes(model, rows, slots, full, aux["watched"])
    count = min(retrieval.resident_pages(size), slots.shape[1])
    chosen = retrieve.chosen(votes, -(-position // size), count, retrieval.recent)
    return same, rows, chosen.place


def _votes(
    model: Transformer, rows: Rows, slots: Int[Array, "B W"], full: Bool[Array, "B W"], queries: list[Array]
) -> Array:
    """`[B W]`: what the `full` pages in these slots are worth to the queries `[B 1 N L]` of all layers."""
    retrieval, scale = model.dispatch.retrieval, rope.softmax_scale(model.config)
    assert retrieval is not None
    assert rows.summaries is not None
    scores = []
    for layer, q in enumerate(queries):
        of_pages = paged.numbers({SUMMARY: rows.summaries.at[slots, layer].get(mode="clip")})[SUMMARY]
        scores.append(retrieval.policy.scores(q[:, 0], of_pages, full, scale))
    return retrieve.votes(jnp.stack(scores), full)


def _with_new(
    model: Transformer, pool: Pool, summaries: Array, page_table: Int[Array, "B P"], new: Int[Array, "B P"]
) -> Array:
    """What pages on the host are summed up by, with those that come now."""
    layers = jnp.arange(len(model.layers))
    first = layers * (pool[SUMMARY].shape[0] // model.cached_layers)
    found = pool[SUMMARY].at[page_table[..., None] + first].get(mode="clip")
    return summaries.at[new].set(found, mode="drop")


def hold(model: Transformer, rows: Rows, at: Int[Array, " B"], held: Int[Array, " B"]) -> Rows:
    """The rows `at` have page tables with `held` tokens; their positions stay."""
    _, is_open, last = taken(rows, at)
    return returned(rows, at, dataclasses.replace(is_open, held=held), last)
