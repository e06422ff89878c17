"""The paged cache: one pool of pages for all rows and layers; a layer's appends and reads.

A pool is `{name: [G Z ..]}`: G pages of Z tokens, the same number of them for each layer, one layer's after the other's. It knows
nothing of the names' meaning: a form of attention names its arrays. Metadata of a whole page is `[G ..]`. A row fills its pages
in the order of arrival, so the order of its slots is the causal order. Slots that no row holds may contain anything, even NaN.

Where all arrays are of single heads, `[G Z H ..]`, each head may have tokens of its own. A page then has H lanes, and a
part is one lane of a page: part g H + h is lane h of page g. Page tables are `[H R P]`, and their entries are parts. All
numbers of rows and views have this H in front.

On a mesh with a `context` axis of C devices, each of them has a part of every page: Z tokens of C Z. Page tables and lengths are
the same on all; slots are of the tokens that are here."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from mla_jax.base.axes import CONTEXT
from mla_jax.base.batch import Batch, Tables
from mla_jax.mesh import across

PAGE = 64  # tokens
COPIED = 8  # pages that one program copies to the host, or from there
COPIES = 4  # such programs whose contents are on the device at a time, each way
NOWHERE = jnp.iinfo(jnp.int32).max  # a slot past the end of any pool: what is written there is dropped

# A CPU stores these as their bits: at each write XLA would convert the whole pool to float32 and back there.
BITS = {jnp.dtype(jnp.bfloat16): jnp.uint16, jnp.dtype(jnp.float8_e4m3fn): jnp.uint8}
NUMBERS = {jnp.dtype(bits): numbers for numbers, bits in BITS.items()}

# Retrieval's metadata of tokens and pages (cache/retrieve.py); attention ignores it.
ASKED, SUMMARY = "asked", "summary"  # [G Z] and, not of tokens but of pages, [G V L]
NOTES = {ASKED, SUMMARY}
# What an indexer caches of tokens (model/fp8_index.py), in those layers that have one; attention ignores it too.
INDEX_K, INDEX_SCALE = "index_k", "index_k_scale"
OF_INDEX = {INDEX_K, INDEX_SCALE}
ASIDE = NOTES | OF_INDEX

Pool = dict[str, Shaped[Array, "G ..."]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's part of a pool: its pages begin at page `first`, and those of its indexer's keys at `first_of_index`."""

    pool: Pool
    first: Int[Array, ""]
    first_of_index: Int[Array, ""] | None = None  # None: the layer has no indexer

    @property
    def size(self) -> int:
        """Tokens of a page."""
        return page_size(self.pool)

    @property
    def of_index(self) -> "Layer":
        """The same pages, of the indexer's keys."""
        assert self.first_of_index is not None, "this layer has no indexer"
        return dataclasses.replace(self, first=self.first_of_index)


class StepRows(NamedTuple):
    """Where the rows of a step keep their tokens: the same in all layers, made once a step."""

    page_table: Int[Array, "*H R P"]
    # Cached tokens with the new ones; 0 for a row without new ones, which attends to nothing
    seq_lens: Int[Array, "*H R"]
    counts: Int[Array, "*H R"]  # new tokens that have a slot on any device
    row: Int[Array, "*H B T"] | None  # of a new token; None: line b is row b
    index: Int[Array, "*H B T"]  # of a new token in its row
    # Of a new token in the pool's first layer, NOWHERE for padding and what is on other devices
    slots: Int[Array, "*H B T"]
    real: Bool[Array, "*H B T"]  # whether a new token has a slot on any device

    @property
    def lanes(self) -> int:
        """Of a page."""
        return _lanes(self.page_table)

    def of_tokens(self, value: Int[Array, " R"]) -> Int[Array, "B T"]:
        """A value of each row, repeated for each of the row's new tokens."""
        return jnp.broadcast_to(value[:, None], self.index.shape) if self.row is None else value[self.row]


class View(NamedTuple):
    """The pages that the lines of a step read: those of a row, or of all rows, one row's after the other's."""

    table: Int[Array, "*H B P"]
    filled: Int[Array, "*H B P"]  # tokens in each
    start: Int[Array, "*H R"]  # page of its line at which a row begins

    @property
    def used(self) -> Int[Array, ""]:
        """Pages up to the last one, of any line, that holds anything."""
        return jnp.where(self.filled > 0, jnp.arange(1, self.filled.shape[-1] + 1), 0).max()

    def in_blocks(self, pages: int) -> "View":
        """With empty pages at the end, so that blocks of `pages` pages are all full."""
        padding = *((0, 0),) * (self.table.ndim - 1), (0, -self.table.shape[-1] % pages)
        return View(jnp.pad(self.table, padding), jnp.pad(self.filled, padding), self.start)


def init(
    token: Mapping[str, jax.ShapeDtypeStruct],
    layers: int,
    pages: int,
    size: int = PAGE,
    *,
    page: Mapping[str, jax.ShapeDtypeStruct] | None = None,
    fewer: Mapping[str, int] | None = None,
    as_bits: bool = False,
) -> Pool:
    """A pool with `pages` pages for each of `layers` layers; `token` has the shapes of one token in a layer, as `[1 1 ..]`, and
    `page` those of a page's metadata, as `[1 ..]`. Names that `fewer` layers have are there with their number.

    `as_bits` stores narrow floats as integers, for a CPU."""
    of_layers = fewer or {}

    def zeros(name: str, one: jax.ShapeDtypeStruct, *shape: int) -> Array:
        dtype = BITS.get(jnp.dtype(one.dtype), one.dtype) if as_bits else one.dtype
        return jnp.zeros((of_layers.get(name, layers) * pages, *shape), dtype)

    of_tokens = {name: zeros(name, one, size, *one.shape[2:]) for name, one in token.items()}
    return of_tokens | {name: zeros(name, one, *one.shape[1:]) for name, one in (page or {}).items()}


def numbers(pool: Mapping[str, Array]) -> Pool:
    """The same with numbers where their bits are stored."""
    return {name: _numbers(array) for name, array in pool.items()}


def stored(numbers: Mapping[str, Array], like: Mapping[str, Array]) -> Pool:
    """The inverse of `numbers`, for a pool that stores what `like` does."""
    return {name: _stored(array, like[name].dtype) for name, array in numbers.items()}


def _numbers(array: Array) -> Array:
    return jax.lax.bitcast_convert_type(array, NUMBERS[array.dtype]) if array.dtype in NUMBERS else array


def _stored(value: Array, dtype: jnp.dtype) -> Array:
    if dtype not in NUMBERS:
        return value.astype(dtype)
    return jax.lax.bitcast_convert_type(value.astype(NUMBERS[dtype]), dtype)


def page_size(pool: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> int:
    return next(array for name, array in pool.items() if name != SUMMARY).shape[1]


def in_order(rows: int, slots: int, size: int = PAGE) -> Int[Array, "B P"]:
    """A page table that gives each row the pages for `slots` tokens, one row's after the other's."""
    pages = -(-slots // size)
    return jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)


def held_here(tokens: Int[Array, "*B"], size: int) -> Int[Array, "*B"]:
    """How many of a row's first `tokens` are on this device, in pages with `size` tokens here."""
    devices = across.size(CONTEXT)
    if devices == 1:
        return tokens
    full, more = jnp.divmod(tokens, devices * size)
    return full * size + jnp.clip(more - across.index(CONTEXT) * size, 0, size)


def order_of(slot: Int[Array, "*B"], size: int) -> Int[Array, "*B"]:
    """Where the token of a row's slot on this device is in the row, in pages with `size` tokens here."""
    devices = across.size(CONTEXT)
    return slot + (slot // size * (devices - 1) + across.index(CONTEXT)) * size if devices > 1 else slot


def gathered_slots(slots: Shaped[Array, "*B S"], size: int) -> Shaped[Array, "*B N"]:
    """All-gathers a row's slots from its devices, in the order of the row, in pages with `size` tokens here."""
    devices = across.size(CONTEXT)
    if devices == 1:
        return slots
    pages = slots.reshape(*slots.shape[:-1], -1, size)
    return across.gathered(pages, CONTEXT, along=-1).reshape(*slots.shape[:-1], -1)


def rows_of(batch: Batch, size: int) -> StepRows:
    """`size` is the number of tokens in a page on this device. Tokens past the end of the page table are dropped."""
    assert batch.page_table is not None, "a step with a cache needs a page table"
    assert batch.seq_lens is not None, "a step with a cache needs seq_lens"
    assert batch.index is not None, "a step with a cache needs the index of each token"
    assert not isinstance(batch.page_table, Tables), "layers that differ need `of_layer`"
    if _lanes(batch.page_table) > 1:
        heads = batch.page_table, batch.seq_lens, batch.index
        return jax.vmap(lambda *head: rows_of(batch.of_head(*head), size))(*heads)
    (lines, _), (count, pages), index = batch.mask.shape, batch.page_table.shape, batch.index
    row = jnp.arange(lines)[:, None] if batch.row is None else batch.row
    whole = across.size(CONTEXT) * size
    room = pages * whole
    page = batch.page_table[row, jnp.clip(index, 0, room - 1) // whole]
    place = index % whole
    real = batch.mask & (index < room)
    here = real & (place // size == across.index(CONTEXT)) if whole > size else real
    slots = jnp.where(here, page * size + place % size, NOWHERE)
    counts = _of_rows(real, batch.row, count)
    seq_lens = jnp.where(counts > 0, jnp.minimum(batch.seq_lens, room), 0)
    return StepRows(batch.page_table, seq_lens, counts, batch.row, index, slots, real)


def _lanes(table: Int[Array, "*H R P"]) -> int:
    return 1 if table.ndim == 2 else len(table)


def _of_rows(token: Shaped[Array, "B T"], row: Int[Array, "B T"] | None, rows: int) -> Int[Array, " R"]:
    if row is None:
        return token.sum(1, dtype=jnp.int32)
    return jnp.zeros(rows, jnp.int32).at[row].add(token.astype(jnp.int32))


def view_of(rows: StepRows, lens: Int[Array, "*H R"], size: int) -> View:
    """The pages with the first `lens` tokens of each row."""
    if rows.lanes > 1:
        return jax.vmap(lambda rows, lens: view_of(rows, lens, size))(rows, lens)
    count, width = rows.page_table.shape
    here = held_here(lens, size)
    if rows.row is None:
        filled = jnp.clip(here[:, None] - jnp.arange(width) * size, 0, size)
        return View(rows.page_table, filled, jnp.zeros_like(lens))
    pages = -(-lens // (across.size(CONTEXT) * size))
    stop = jnp.cumsum(pages)
    start, place = stop - pages, jnp.arange(count * width)
    row = jnp.minimum(jnp.searchsorted(stop, place, side="right", method="compare_all"), count - 1)
    page = place - start[row]  # past the last row's end there are no tokens
    table = rows.page_table[row, jnp.minimum(page, width - 1)]
    filled = jnp.clip(here[row] - page * size, 0, size)
    return View(table[None], filled[None], start)


def slots_in(layer: Layer, rows: StepRows) -> Int[Array, "*H B T"]:
    """The slot of each new token in the whole pool, NOWHERE for padding."""
    return jnp.where(rows.slots == NOWHERE, NOWHERE, rows.slots + layer.first * rows.lanes * layer.size)


def places(part: Int[Array, "*B"], place: Int[Array, "*B"], lanes: int) -> tuple[Int[Array, "*B"], ...]:
    """The indices, in an array of the pool, of places in parts of it."""
    if lanes == 1:
        return part, place
    page, lane = jnp.divmod(part, lanes)
    return page, place, lane


def append(layer: Layer, new: Mapping[str, Shaped[Array, "B T ..."]], rows: StepRows) -> Layer:
    """Writes what the new tokens leave in this layer to their slots."""
    slots = slots_in(layer, rows)
    slots = slots if rows.lanes == 1 else jnp.moveaxis(slots, 0, -1)  # as heads are in what is new
    at = places(*jnp.divmod(slots, layer.size), rows.lanes)

    # Not through a flat view of the pool: with one token XLA would copy it
    def written(old: Array, value: Array) -> Array:
        return old.at[at].set(_stored(value, old.dtype), mode="drop")

    return dataclasses.replace(
        layer, pool=layer.pool | {name: written(layer.pool[name], value) for name, value in new.items()}
    )


def note(layer: Layer, page: Int[Array, " G"], notes: Mapping[str, Shaped[Array, "G ..."]]) -> Layer:
    """Writes the metadata of pages, whose numbers count from the pool's first page; NOWHERE is none."""
    pool = layer.pool
    written = {
        name: pool[name].at[page].set(_stored(new, pool[name].dtype), mode="drop")
        for name, new in notes.items()
    }
    return dataclasses.replace(layer, pool=pool | written)


def summaries(layer: Layer, table: Int[Array, "B P"]) -> Float[Array, "B P V L"]:
    """The summaries of the pages of a table, as numbers."""
    return _numbers(layer.pool[SUMMARY].at[table + layer.first].get(mode="clip"))


def read(
    layer: Layer, view: View, first: Array | int, count: int, names: Collection[str] | None = None
) -> dict[str, Shaped[Array, "B S ..."]]:
    """The contents of `count` pages of each line, from its page `first` on; zeros in slots that hold nothing of it.

    These are the arrays of the `names`; by default those that attention reads."""
    table, filled = (
        jax.lax.dynamic_slice_in_dim(array, first, count, axis=-1) for array in (view.table, view.filled)
    )
    held = jnp.arange(layer.size) < filled[..., None]
    held = held.reshape(*held.shape[:-2], -1)

    def gathered(array: Array) -> Array:
        found = _numbers(_of_pages(array, layer.first, table))
        found = found.reshape(*held.shape, *found.shape[table.ndim + 1 :])
        found = jnp.where(
            held.reshape(*held.shape, *(1,) * (found.ndim - held.ndim)), found, jnp.zeros((), found.dtype)
        )
        return found if _lanes(table) == 1 else jnp.moveaxis(found, 0, 2)

    names = layer.pool.keys() - ASIDE if names is None else names
    return {name: gathered(array) for name, array in layer.pool.items() if name in names}


def read_slots(
    layer: Layer, slots: Int[Array, "B K"], counts: Int[Array, " B"]
) -> dict[str, Shaped[Array, "B K ..."]]:
    """The arrays that attention reads, of single tokens; zeros behind the first `counts` of a row.

    Slots count from the layer's first page."""
    page, place = jnp.divmod(slots, layer.size)
    held = jnp.arange(slots.shape[1]) < counts[:, None]

    def gathered(array: Array) -> Array:
        found = _numbers(array.at[page + layer.first, place].get(mode="clip"))
        return jnp.where(
            held.reshape(*held.shape, *(1,) * (found.ndim - 2)), found, jnp.zeros((), found.dtype)
        )

    return {name: gathered(array) for name, array in layer.pool.items() if name not in ASIDE}


def _of_pages(array: Shaped[Array, "G Z ..."], first: Array, table: Int[Array, "*H B P"]) -> Array:
    """`[*H B P Z ..]`: whole pages of a layer that begins at page `first`, or parts of them."""
    if _lanes(table) == 1:
        return array.at[table + first].get(mode="clip")
    page, lane = jnp.divmod(table, len(table))
    # The second axis is indexed too: a gather by the first and the third alone copies the pool on a GPU
    place = jnp.arange(array.shape[1])
    return array.at[(page + first)[..., None], place, lane[..., None]].get(mode="clip")
