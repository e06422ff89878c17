"""Pages that come and go as two programs: `rank` says which of a row's pages its next tokens are to find on the device, `hold`
how many tokens its page table has then.

The full pages of such rows are in the host's memory. What they are summed up by stays on the device, by their slots there: a page
is judged without its contents."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from mla_jax.base.batch import Batch
from mla_jax.cache import paged, retrieve
from mla_jax.cache.paged import SUMMARY, Pool
from mla_jax.decode.rows import Rows, returned, taken
from mla_jax.model import rope, watch
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
    assert rows.text is not None
    assert rows.summaries is not None
    size = paged.page_size(pool)
    _, is_open, _ = taken(rows, at)
    summaries = _with_new(model, pool, rows.summaries, page_table, new)
    newest = is_open.position - 1
    tokens = rows.text.at[at, newest].get(mode="clip")[:, None]
    batch = Batch.behind(is_open.held - 1, newest, jnp.ones_like(newest), 1, page_table)
    _, same, aux = model(tokens, batch, pool, watch=watch.queries)
    assert same is not None
    full = jnp.arange(slots.shape[1]) < (is_open.position // size)[:, None]
    scale = rope.softmax_scale(model.config)
    scores = []
    for layer, queries in enumerate(aux["watched"]):
        of_pages = paged.numbers({SUMMARY: summaries.at[slots, layer].get(mode="clip")})[SUMMARY]
        scores.append(retrieval.policy.scores(queries[:, 0], of_pages, full, scale))
    votes = retrieve.votes(jnp.stack(scores), full)
    pages = -(-is_open.position // size)
    chosen = retrieve.chosen(votes, pages, min(retrieval.resident_pages(size), slots.shape[1]), retrieval.recent)
    return same, dataclasses.replace(rows, summaries=summaries), chosen.place


def _with_new(model: Transformer, pool: Pool, summaries: Array, page_table: Int[Array, "B P"], new: Int[Array, "B P"]) -> Array:
    """What pages on the host are summed up by, with those that come now."""
    layers = jnp.arange(len(model.layers))
    first = layers * (pool[SUMMARY].shape[0] // model.cached_layers)
    found = pool[SUMMARY].at[page_table[..., None] + first].get(mode="clip")
    return summaries.at[new].set(found, mode="drop")


def hold(model: Transformer, rows: Rows, at: Int[Array, " B"], held: Int[Array, " B"]) -> Rows:
    """The rows `at` have page tables with `held` tokens; their positions stay."""
    _, is_open, last = taken(rows, at)
    return returned(rows, at, dataclasses.replace(is_open, held=held), last)
