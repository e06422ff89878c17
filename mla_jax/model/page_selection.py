"""Retrieval in a layer: summarises the pages that a step writes, and shortens a row's page table to the pages a policy chooses.

A page's summary is in the pool with its tokens, so it goes where the page goes. It is made anew from the page's tokens whenever
tokens are appended: earlier contents never matter."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base.batch import Batch, Tables
from mla_jax.base.options import MOST_DRAFTS
from mla_jax.cache import paged, retrieve
from mla_jax.cache.paged import ASKED, NOWHERE, SUMMARY, Layer, StepRows, View
from mla_jax.cache.retrieve import Retrieval
from mla_jax.model.block_attention import StepCache
from mla_jax.model.fp8_up import Up, plain_up, to_latent


class Written(NamedTuple):
    """The pages that a step writes, with empty ones behind."""

    page: Int[Array, " G"]  # counted from the layer's first
    filled: Int[Array, " G"]  # tokens that it holds then; 0: there is no such page
    before: Int[Array, " G"]  # tokens that it held before
    token: Int[Array, "G Z"]  # which of the step's tokens is in each slot, if that is new


def written(rows: StepRows, size: int) -> Written:
    """As many as `T` tokens of `R` rows can write: `T // size + 2 R`."""
    count, tokens = rows.seq_lens.size, rows.slots.size
    before = rows.seq_lens - rows.counts
    first = before // size
    pages = jnp.where(rows.counts > 0, -(-rows.seq_lens // size) - first, 0)
    # At least two: a single page is written as a slice, for which a CPU copies the pool
    most = max(2, min(tokens, tokens // size + 2 * count))
    stop, place = jnp.cumsum(pages), jnp.arange(most)
    row = jnp.minimum(jnp.searchsorted(stop, place, side="right", method="compare_all"), count - 1)
    number = (first - (stop - pages))[row] + place  # of the page in its row
    start = number * size
    filled = jnp.where(place < stop[-1], jnp.clip(rows.seq_lens[row] - start, 0, size), 0)
    page = rows.page_table[row, jnp.minimum(number, rows.page_table.shape[1] - 1)]
    token = (_first_tokens(rows) - before)[row] + start
    return Written(page, filled, jnp.clip(before[row] - start, 0, size), token[:, None] + jnp.arange(size))


def _first_tokens(rows: StepRows) -> Int[Array, " R"]:
    """Which of the step's tokens is the first of each row."""
    row = jnp.arange(rows.seq_lens.size)
    return row * rows.slots.shape[1] if rows.row is None else (rows.row < row[:, None]).sum(1)


class PageSelection(NamedTuple):
    """The retrieval plan of one step, shared by its layers."""

    retrieval: Retrieval
    batch: Batch
    written: Written
    pages: int | None  # that a row attends to; None: all
    prepare: Callable[[Batch], Any]  # makes what a form needs for a batch
    turned: Callable[[Array], Array]  # rotary queries, as they meet the cached keys of pages

    def noted(self, layer: Layer, q: tuple[Array, Array], up: Up, reads: Callable) -> Layer:
        """With what the policy notes of the written pages. `reads` is the form's."""
        page, filled, before, token = self.written
        cached = reads(paged.read(layer, View(page[:, None], filled[:, None], filled), 0, 1))
        keys = jnp.concatenate([cached["c_kv"], cached["k_pe"]], axis=-1)
        held = jnp.arange(layer.size) < filled[:, None]
        at = jnp.where(filled > 0, page + layer.first, NOWHERE)
        policy, notes, asked = self.retrieval.policy, {}, None
        if policy.asks:
            old = jnp.arange(layer.size) < before[:, None]
            queries = _added_up(q, up).reshape(-1, keys.shape[-1]).at[token].get(mode="clip")
            known = jnp.where(old, layer.pool[ASKED].at[at].get(mode="clip"), 0)
            asked = known + policy.asked(queries, keys, held & ~old)
            notes[ASKED] = asked
        layer = paged.note(layer, at, notes | {SUMMARY: policy.summary(keys, held, asked)})
        # Else XLA may sum up pages of several layers at once, for which it keeps a copy of the pool as it was before each
        return dataclasses.replace(layer, pool=jax.lax.optimization_barrier(layer.pool))

    def attended(
        self,
        attends: Callable,
        q: tuple[Array, Array],
        held: StepCache,
        up: Up,
        scale: float,
    ) -> Float[Array, "B T N V"]:
        """A form's attention, of each token to the pages that its own queries choose."""
        if self.pages is None:
            return attends(q, held, up, scale)
        with jax.named_scope("retrieve"):
            assert held.layer is not None
            asking = absorbed_queries((q[0], self.turned(q[1])), up)
            step = self.prepare(self._chosen(held.layer, asking, self.pages, scale))
        rows, tokens = q[0].shape[:2]
        q, new = jax.tree.map(lambda x: x.reshape(rows * tokens, 1, *x.shape[2:]), (q, held.new))
        out = attends(q, held._replace(new=new, step=step), up, scale)
        return out.reshape(rows, tokens, *out.shape[2:])

    def _chosen(self, layer: Layer, q: Float[Array, "B T N L"], count: int, scale: float) -> Batch:
        """Each token as a row of its own, with its chosen pages: as if it had dropped the tokens of all others."""
        batch, size, tokens = self.batch, layer.size, q.shape[1]
        assert batch.page_table is not None
        assert not isinstance(batch.page_table, Tables), "rows that drop tokens choose no pages"
        assert batch.seq_lens is not None
        assert batch.index is not None
        width = batch.page_table.shape[1]
        seq_lens = jnp.minimum(
            batch.index + 1, batch.seq_lens[:, None]
        )  # a draft does not see those behind it
        pages = jnp.minimum(-(-seq_lens // size), width)
        scores = self._scores(layer, q, batch.page_table, pages, scale)
        place, left_out = retrieve.chosen(
            scores.reshape(-1, width), pages.reshape(-1), count, self.retrieval.recent
        )
        table = jnp.take_along_axis(jnp.repeat(batch.page_table, tokens, axis=0), place, axis=1)
        gone = left_out * size
        positions, mask, index = (x.reshape(-1, 1) for x in (batch.positions, batch.mask, batch.index))
        return Batch(positions, mask, seq_lens.reshape(-1) - gone, table, index - gone[:, None])

    def _scores(
        self,
        layer: Layer,
        q: Float[Array, "B T N L"],
        page_table: Int[Array, "B P"],
        pages: Int[Array, "B T"],
        scale: float,
    ) -> Float[Array, "B T P"]:
        """The policy's scores of each token's first `pages`. The summaries are copied, so a block of rows is scored at a time."""
        policy, (rows, width) = self.retrieval.policy, page_table.shape

        def of_row(row: tuple[Array, Array, Array]) -> Float[Array, "T P"]:
            q, table, pages = row
            summary, held = paged.summaries(layer, table[None]), jnp.arange(width) < pages[:, None]
            return jax.vmap(policy.scores, (1, None, 1, None), 1)(q[None], summary, held[None], scale)[0]

        block, given = (
            retrieve.rows_at_once(width * policy.vectors * q.shape[-1] * q.dtype.itemsize),
            (q, page_table, pages),
        )
        return jax.vmap(of_row)(given) if rows <= block else jax.lax.map(of_row, given, batch_size=block)


def of_step(
    retrieval: Retrieval,
    batch: Batch,
    size: int,
    prepare: Callable[[Batch], Any],
    turned: Callable[[Array], Array] = lambda q_pe: q_pe,
) -> PageSelection:
    """A token that is decoded chooses pages, and so do drafts behind it, where a row may have more than are read; a prompt's
    tokens attend to everything."""
    pages = retrieval.pages(size)
    decodes = batch.row is None and batch.mask.shape[1] <= 1 + MOST_DRAFTS and batch.width > pages
    pages = pages if decodes else None
    return PageSelection(retrieval, batch, written(paged.rows_of(batch, size), size), pages, prepare, turned)


def absorbed_queries(q: tuple[Array, Array], up: Up) -> Float[Array, "B T N L"]:
    """Queries whose product with [c_kv, k_pe] is a head's logit."""
    return jnp.concatenate([to_latent(q[0], up[0]), q[1]], axis=-1)


def _added_up(q: tuple[Array, Array], up: Up) -> Float[Array, "B T L"]:
    """The sum of these over heads, which is computed without them."""
    uk, _ = plain_up(up, q[0].dtype)
    return jnp.concatenate([jnp.einsum("btnp,npr->btr", q[0], uk), q[1].sum(2)], axis=-1)
