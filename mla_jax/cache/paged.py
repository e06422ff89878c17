"""The paged cache: one pool of pages for all rows and layers, and what a layer does with it.

A pool is `{name: [G Z ..]}`: G pages of Z tokens, the same number of them for each layer, one layer's after the other's. It knows
nothing of what the names mean: a form of attention says what it remembers. A row fills its pages in the order of arrival, so the
order of its slots is the causal order. What no row holds may be anything, NaN as well."""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from mla_jax.base.batch import Batch

PAGE = 64  # tokens
NOWHERE = jnp.iinfo(jnp.int32).max  # a slot past the end of any pool: what is written there is dropped

# A CPU stores these as their bits: at each write XLA would convert the whole pool to float32 and back there.
BITS = {jnp.dtype(jnp.bfloat16): jnp.uint16, jnp.dtype(jnp.float8_e4m3fn): jnp.uint8}
NUMBERS = {jnp.dtype(bits): numbers for numbers, bits in BITS.items()}

Pool = dict[str, Shaped[Array, "G Z ..."]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's part of a pool: its pages begin at page `first`."""

    pool: Pool
    first: Int[Array, ""]

    @property
    def size(self) -> int:
        """Tokens of a page."""
        return page_size(self.pool)


class Rows(NamedTuple):
    """Where the rows of a step keep their tokens: the same in all layers, made once a step."""

    page_table: Int[Array, "B P"]
    seq_lens: Int[Array, " B"]  # cached tokens with the new ones; 0 for a row without new ones, which attends to nothing
    counts: Int[Array, " B"]  # new tokens that have a slot
    index: Int[Array, "B T"]  # of a new token in its row
    slots: Int[Array, "B T"]  # of a new token in the pool's first layer, NOWHERE for padding


def init(token: Mapping[str, jax.ShapeDtypeStruct], layers: int, pages: int, size: int = PAGE, *, as_bits: bool = False) -> Pool:
    """A pool with `pages` pages for each of `layers` layers; `token` shows what one token leaves in a layer, as `[1 1 ..]`.

    `as_bits` stores narrow floats as integers, for a CPU."""

    def zeros(one: jax.ShapeDtypeStruct) -> Array:
        dtype = BITS.get(jnp.dtype(one.dtype), one.dtype) if as_bits else one.dtype
        return jnp.zeros((layers * pages, size, *one.shape[2:]), dtype)

    return {name: zeros(one) for name, one in token.items()}


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
    return next(iter(pool.values())).shape[1]


def in_order(rows: int, slots: int, size: int = PAGE) -> Int[Array, "B P"]:
    """A page table that gives each row the pages for `slots` tokens, one row's after the other's."""
    pages = -(-slots // size)
    return jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)


def rows_of(batch: Batch, size: int) -> Rows:
    """`size` is the number of tokens in a page. Tokens past the end of the page table are dropped."""
    assert batch.page_table is not None, "a step with a cache needs a page table"
    assert batch.seq_lens is not None, "a step with a cache needs seq_lens"
    room = batch.page_table.shape[1] * size
    before = batch.seq_lens - batch.mask.sum(1, dtype=jnp.int32)
    index = before[:, None] + jnp.arange(batch.mask.shape[1], dtype=jnp.int32)
    page = jnp.take_along_axis(batch.page_table, jnp.minimum(index, room - 1) // size, axis=1)
    slots = jnp.where(batch.mask & (index < room), page * size + index % size, NOWHERE)
    counts = (slots != NOWHERE).sum(1, dtype=jnp.int32)
    seq_lens = jnp.where(counts > 0, jnp.minimum(batch.seq_lens, room), 0)
    return Rows(batch.page_table, seq_lens, counts, index, slots)


def slots_in(layer: Layer, rows: Rows) -> Int[Array, "B T"]:
    """The slot of each new token in the whole pool, NOWHERE for padding."""
    return jnp.where(rows.slots == NOWHERE, NOWHERE, rows.slots + layer.first * layer.size)


def append(layer: Layer, new: Mapping[str, Shaped[Array, "B T ..."]], rows: Rows) -> Layer:
    """Writes what the new tokens leave in this layer to their slots."""
    page, place = jnp.divmod(slots_in(layer, rows), layer.size)

    def written(old: Array, value: Array) -> Array:  # not through a flat view of the pool: with one token XLA would copy it
        return old.at[page, place].set(_stored(value, old.dtype), mode="drop")

    return dataclasses.replace(layer, pool={name: written(layer.pool[name], value) for name, value in new.items()})


def read(layer: Layer, rows: Rows, first: Array | int, pages: int) -> dict[str, Shaped[Array, "B S ..."]]:
    """What each row holds in `pages` pages of its own, from its page `first` on; zeros in the slots that hold nothing of it."""
    table = jax.lax.dynamic_slice_in_dim(rows.page_table, first, pages, axis=1) + layer.first
    held = first * layer.size + jnp.arange(pages * layer.size) < rows.seq_lens[:, None]

    def gathered(array: Array) -> Array:
        found = _numbers(array.at[table].get(mode="clip"))
        found = found.reshape(found.shape[0], -1, *array.shape[2:])
        return jnp.where(held.reshape(*held.shape, *(1,) * (found.ndim - 2)), found, jnp.zeros((), found.dtype))

    return {name: gathered(array) for name, array in layer.pool.items()}
