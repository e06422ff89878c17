"""Divides the sorted activations into tiles, and orders the tiles over the weights.

A group has the fewest tiles of up to `width` rows that hold it, with its rows divided evenly: full tiles and one small rest
would use the rest's weights poorly. Copies start at multiples of 8 rows, so a tile can begin with up to 7 rows of the previous
group and end with rows of the next; these are computed and not stored. Groups without rows have no tiles.

A launch computes every tile times every block of features. Up to SHARE tiles of a group process a block of features one after
the other, then the next block: weights are read from the HBM once, and from the L2 for the other tiles."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ALIGNED = 8  # rows
# About the square root of the number of multiprocessors, which balances reads of tokens and weights
SHARE = 12


class Table(NamedTuple):
    """Per group, `[X]` int32."""

    start: jax.Array  # its first row
    end: jax.Array
    last: jax.Array  # the tile after its last one


class Tile(NamedTuple):
    group: jax.Array
    number: jax.Array  # among all tiles
    row: jax.Array  # its first, a multiple of ALIGNED
    start: jax.Array  # its own rows
    stop: jax.Array


def best_width(rows: int, groups: int, widths: Iterable[int]) -> int:
    """The smallest of `widths` that holds nearly every group in one tile if rows are routed at random, else the largest."""
    mean = rows / min(rows, groups)
    wanted = rows if groups == 1 else mean + ALIGNED - 1 + 2 * math.sqrt(mean)
    return next((width for width in sorted(widths) if min(wanted, rows) <= width), max(widths))


def tiles_of(start, end, width: int):
    """The number of tiles of a group."""
    return jnp.where(
        end > start, lax.div(end - (start & -ALIGNED) + (width - 1), jnp.full_like(start, width)), 0
    )


def most_tiles(rows: int, groups: int, width: int) -> int:
    """The most tiles that `rows` rows have, whichever groups they are of."""
    touched = min(rows, groups)
    return -(-rows // width) if groups == 1 else touched + (rows + (ALIGNED - 2) * touched) // width


def columns_of(group_sizes: jax.Array, rows: int, width: int) -> jax.Array:
    """`[M]`: where each row is if every tile is written at a place of its own, at full width; any place for a row of no group."""
    end = jnp.cumsum(group_sizes)
    start = end - group_sizes
    tiles = tiles_of(start, end, width)
    shift = (jnp.cumsum(tiles) - tiles) * width - (start & -ALIGNED)  # of a group's rows
    row = jnp.arange(rows)
    is_of = (start <= row[:, None]) & (row[:, None] < end)
    return row + jnp.where(is_of, shift, 0).sum(1)


def locate(at, table: Table, *, groups: int, width: int, grain: int, blocks: int) -> tuple[Tile, jax.Array]:
    """The tile (a multiple of `grain` rows) and the block of features of piece `at`."""
    near = lax.div(at, jnp.int32(blocks))  # some tile of the same group
    group = jnp.int32(0)
    for bit in reversed(range((groups - 1).bit_length())):
        probe = group + (1 << bit)
        passed = (probe <= groups - 1) & (table.last[jnp.minimum(probe, groups) - 1] <= near)
        group = jnp.where(passed, probe, group)
    start, end = table.start[group], table.end[group]
    count = tiles_of(start, end, width)
    first = table.last[group] - count
    before = lax.div(near - first, jnp.int32(SHARE)) * SHARE
    together = jnp.minimum(count - before, SHARE)
    place = at - (first + before) * blocks
    block = lax.div(place, together)
    number = before + place - block * together  # in its group
    origin, grains = start & -ALIGNED, count * grain
    rows = lax.div(end - origin + (grains - 1), grains) * grain
    row = origin + number * rows
    return Tile(group, first + number, row, jnp.maximum(row, start), jnp.minimum(row + rows, end)), block
