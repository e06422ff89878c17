"""Divides the cached tokens of a batch into equal shares, one for each block (or cluster) that runs at a time.

The rows are laid end to end, with a fixed cost added for the start of each, and the line is cut into pieces of equal length. So
a share is a range of rows of which only the first and the last can be partial: four integers. For any lengths, no share exceeds
the mean by more than one start. Rows are not split if full rows give equally even shares."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

TILE = 64  # cached tokens in a tile
BLOCK = 64  # query rows in a block
START = 2  # cost of starting a row, in tiles
SPLIT = 3  # cost of splitting any row, in tiles


class Schedule(NamedTuple):
    """Depends on the lengths only, so one serves all layers of a step."""

    shares: jax.Array  # [units, 4] int32: first row, its first tile, last row, the tile after its last
    # [splits, 3] int32: row, slot of its first piece, number of pieces; at most 1: nothing to combine
    pieces: jax.Array


def groups(rows: int) -> tuple[int, int]:
    """The row blocks of a cluster (two share each tile of the cache if possible), and the clusters of a batch row."""
    blocks = -(-rows // BLOCK)
    size = 2 if blocks % 2 == 0 else 1
    return size, blocks // size


def schedule(seq_lens: jax.Array, *, rows: int, units: int) -> Schedule:
    """The schedule for `rows` queries (tokens times heads) in every batch row, on `units` multiprocessors; seq_lens `[B]`."""
    size, per_row = groups(rows)
    units = units // size
    tiles = jnp.maximum(-(-seq_lens.astype(jnp.int32) // TILE), 1)  # an empty row is one tile without tokens
    tiles = jnp.repeat(tiles, per_row)
    n = tiles.shape[0]
    end = jnp.cumsum(tiles + START)
    begin = end - tiles  # position of the first tile
    length = jnp.maximum(-(-end[-1] // units), 1)
    cuts = jnp.arange(units + 1, dtype=jnp.int32) * length
    low, high = cuts[:-1], cuts[1:]
    # a comparison with every row is one fused kernel; a binary search would be a loop of them
    first = jnp.sum(end[None] <= low[:, None], axis=1, dtype=jnp.int32)
    last = jnp.sum(begin[None] < high[:, None], axis=1, dtype=jnp.int32) - 1
    at = jnp.minimum(first, n - 1)
    start = jnp.maximum(low - begin[at], 0)
    stop = jnp.minimum(high - begin[last], tiles[last])
    # unsplit rows if that is as good: nothing to combine then
    each = -(-n // units)
    first_whole = jnp.minimum(jnp.arange(units, dtype=jnp.int32) * each, n)
    last_whole = jnp.minimum(first_whole + each, n) - 1
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), end])
    whole = jnp.max(ends[last_whole + 1] - ends[first_whole]) <= length + SPLIT
    shares = jnp.stack([first, start, last, stop], axis=1)
    shares_whole = jnp.stack(
        [first_whole, jnp.zeros_like(first_whole), last_whole, tiles[last_whole]], axis=1
    )
    shares = jnp.where(whole, shares_whole, shares)
    from_unit, to_unit = begin // length, (end - 1) // length
    slot = 2 * from_unit + (first[from_unit] != jnp.arange(n))
    rows_of = jnp.stack([jnp.arange(n), slot, to_unit - from_unit + 1], axis=1)
    if n > units:  # a share begins at most one split row: list those rather than all
        keep = from_unit[last] == jnp.arange(units)  # the last row of a share begins in it
        rows_of = jnp.where(keep[:, None], rows_of[last], 0)
    return Schedule(shares.astype(jnp.int32), jnp.where(whole, 0, rows_of).astype(jnp.int32))
