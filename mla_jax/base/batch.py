"""The inputs of one step: a pytree made once and shared by all layers."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.tree_util.register_static
class Known(int):
    """A number of a step's plan that is known while it is traced: `vmap` and `tree.map` leave it alone."""


class Tables(NamedTuple):
    """Page tables of rows of which each layer, or each of its H heads, has dropped tokens of its own.

    Where heads are cached, a page has H lanes, and part g H + h is lane h of page g. Elsewhere H is 1, and a part is a page. On
    the host these are arrays of numpy."""

    # Int[Array, "L H R P"]: parts, counted from the layer's first; they may be another layer's, or another head's
    pages: Any
    dropped: Any  # Int[Array, "L H R"]: tokens of the row that are not there any more


Table = Int[Array, "R P"] | Tables


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """New tokens of R rows, in B lines. Masked tokens are padding: they are neither cached nor attended to.

    With a cache, padding comes after a line's tokens. `index` is the place of each token in its row: token s of row r is in page
    `page_table[r, s // Z]` of every layer. `seq_lens` are the tokens each row has cached once the new ones are appended. Table
    entries past the end may be anything. Where layers have dropped tokens, `by_layer` gives the numbers of each. If its heads
    have tokens of their own, table, lengths and indices have H in front.

    Without `row`, line b holds tokens of row b. With it, there is one line, and it holds tokens of all rows, one row's after the
    other's: `row` says whose each is."""

    positions: Int[Array, "B T"]  # for RoPE alone: the cache is causal in the order of arrival
    mask: Bool[Array, "B T"]
    seq_lens: Int[Array, "*H R"] | None = None
    page_table: Int[Array, "*H R P"] | Tables | None = None
    index: Int[Array, "*H B T"] | None = None
    row: Int[Array, "1 T"] | None = None

    @staticmethod
    def dense(rows: int, tokens: int) -> "Batch":
        """Whole sequences from position 0, nothing padded and nothing cached."""
        positions = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (rows, tokens))
        return Batch(positions, jnp.ones((rows, tokens), bool))

    @property
    def tables(self) -> Tables | None:
        """Where each layer has dropped tokens of its own."""
        return self.page_table if isinstance(self.page_table, Tables) else None

    def of_layer(self, tables: Tables) -> "Batch":
        """The same for one layer, with its own `tables`, `[H R P]` and `[H R]`."""
        assert self.seq_lens is not None
        assert self.index is not None
        pages, dropped = tables
        if len(pages) == 1:
            pages, dropped = pages[0], dropped[0]
        of_tokens = dropped[..., None] if self.row is None else dropped[..., self.row]
        return dataclasses.replace(
            self, page_table=pages, seq_lens=self.seq_lens - dropped, index=self.index - of_tokens
        )

    def of_head(
        self, page_table: Int[Array, "R P"], seq_lens: Int[Array, " R"], index: Int[Array, "B T"]
    ) -> "Batch":
        """The same for one head of a layer."""
        return dataclasses.replace(self, page_table=page_table, seq_lens=seq_lens, index=index)

    @property
    def width(self) -> int:
        """Pages of the longest row."""
        assert self.page_table is not None, "a step with a cache needs a page table"
        pages = self.page_table.pages if isinstance(self.page_table, Tables) else self.page_table
        return pages.shape[-1]

    @staticmethod
    def after(held: Int[Array, " B"], mask: Bool[Array, "B T"], page_table: Int[Array, "B P"]) -> "Batch":
        """New tokens behind the `held` ones of each row, none of which was evicted."""
        count = jnp.cumsum(mask, axis=1, dtype=jnp.int32)
        index = held[:, None] + count - 1
        return Batch(index, mask, held + count[:, -1], page_table, index)

    @staticmethod
    def behind(
        held: Int[Array, " B"],
        position: Int[Array, " B"],
        counts: Int[Array, " B"],
        new: int,
        page_table: Table,
    ) -> "Batch":
        """`new` tokens a row, of which `counts` are not padding, behind its `held` ones; the first has its `position`."""
        token = jnp.arange(new, dtype=jnp.int32)
        positions = position[:, None] + token
        index = held[:, None] + token
        return Batch(positions, token < counts[:, None], held + counts, page_table, index)

    @staticmethod
    def in_line(
        held: Int[Array, " R"],
        position: Int[Array, " R"],
        counts: Int[Array, " R"],
        new: int,
        page_table: Table,
    ) -> "Batch":
        """One line of `new` tokens, of which row r has `counts[r]` behind its `held` ones; the first has its `position`."""
        stop = jnp.cumsum(counts)
        token = jnp.arange(new, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(stop, token, side="right", method="compare_all"), counts.size - 1)
        positions, index = ((first - (stop - counts))[row] + token for first in (position, held))
        return Batch(
            positions[None], (token < stop[-1])[None], held + counts, page_table, index[None], row[None]
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MixedBatch:
    """A line of prompts' tokens, and behind it those of rows that decode: `[1 T]` in all. Attention alone tells them apart."""

    line: Batch  # with `row`
    decode: Batch  # without

    @property
    def positions(self) -> Int[Array, "1 T"]:
        return _one_line(self.line.positions, self.decode.positions)

    @property
    def mask(self) -> Bool[Array, "1 T"]:
        return _one_line(self.line.mask, self.decode.mask)

    @property
    def page_table(self) -> Table | None:
        """Of the rows that decode."""
        return self.decode.page_table

    @property
    def tables(self) -> tuple[Tables, Tables] | None:
        """As of a Batch."""
        line, decode = self.line.tables, self.decode.tables
        return None if line is None or decode is None else (line, decode)

    def of_layer(self, tables: "tuple[Tables, Tables]") -> "MixedBatch":
        """As of a Batch."""
        return MixedBatch(self.line.of_layer(tables[0]), self.decode.of_layer(tables[1]))


def _one_line(line: Array, decode: Array) -> Array:
    return jnp.concatenate([line, decode.reshape(1, -1)], axis=1)


AnyBatch = Batch | MixedBatch


def by_layer(function: Callable[[Any], Any], batch: AnyBatch) -> Any:
    """`function` of the batch of each layer, where layers differ; what it returns has the layers in front."""
    return jax.vmap(lambda tables: function(batch.of_layer(tables)))(batch.tables)


def bucket(n: int, least: int = 1) -> int:
    """The power of two that holds `n`, `least` at least."""
    return max(least, 1 << max(n - 1, 0).bit_length())
