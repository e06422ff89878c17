"""Which rows of the sorted activations lie in which tile, and in which order tiles meet the weights.

A group has as few tiles of up to `width` rows as hold it, and they share its rows evenly: beside full tiles, one for the rest
would make little of its weights. The copy engine begins at multiples of 8 rows, so a tile may begin with up to 7 rows of the
group before and end with rows of the next: computed, not stored. Groups without rows have no tiles.

The work of a launch is every tile times every block of features. Up to SHARE tiles of a group take a block of features one
after the other, then the next, so that weights come from the HBM once and to the other tiles from the L2."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ALIGNED = 8  # rows
SHARE = 12  # about the root of the multiprocessors: then tokens and weights are read as often


class Table(NamedTuple):
    """Of every group."""

    start: jax.Array  # its first row
    end: jax.Array
    last: jax.Array  # the tile after its last


class Tile(NamedTuple):
    group: jax.Array
    row: jax.Array  # its first, a multiple of ALIGNED
    start: jax.Array  # its own rows
    stop: jax.Array


def best_width(rows: int, groups: int, widths: Iterable[int]) -> int:
    """The least that holds nearly every group in one tile if rows are dealt out at random, or the greatest."""
    mean = rows / min(rows, groups)
    wanted = rows if groups == 1 else mean + ALIGNED - 1 + 2 * math.sqrt(mean)
    return next((width for width in sorted(widths) if min(wanted, rows) <= width), max(widths))


def tiles_of(start, end, width: int):
    """How many tiles a group has."""
    return jnp.where(end > start, lax.div(end - (start & -ALIGNED) + (width - 1), jnp.full_like(start, width)), 0)


def locate(at, table: Table, *, groups: int, width: int, grain: int, blocks: int) -> tuple[Tile, jax.Array]:
    """The tile, of a multiple of `grain` rows, and the block of features of piece `at`."""
    near = lax.div(at, jnp.int32(blocks))  # a tile of the same group
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
    origin, grains = start & -ALIGNED, count * grain
    rows = lax.div(end - origin + (grains - 1), grains) * grain
    row = origin + (before + place - block * together) * rows
    return Tile(group, row, jnp.maximum(row, start), jnp.minimum(row + rows, end)), block
