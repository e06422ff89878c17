"""Which rows of the sorted activations lie in which tile: a row of integers for each tile, made from the group sizes.

A tile is `width` rows of one group's weights. The copy engine begins at multiples of 8 rows, so a tile may begin with up to
7 rows of the group before and end with rows of the next: computed, not stored. Groups without rows have no tiles.

The work of a launch is every tile times every block of features. Tiles of a group come in clusters of at most SHARE that
take a block of features one after the other, so that weights come from the HBM once and to the other tiles from the L2."""

import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp

ALIGNED = 8  # rows
SHARE = 12  # tiles that read a block of weights at the same time: about the root of the multiprocessors


def best_width(rows: int, groups: int, widths: Iterable[int]) -> int:
    """The least that holds nearly every group in one tile if rows are dealt out at random, or the greatest."""
    mean = rows / min(rows, groups)
    wanted = rows if groups == 1 else mean + ALIGNED - 1 + 2 * math.sqrt(mean)
    return next((width for width in sorted(widths) if min(wanted, rows) <= width), max(widths))


def most_tiles(rows: int, groups: int, width: int) -> int:
    """How many tiles there can be, whatever the sizes."""
    some = min(rows, groups)  # groups with rows
    return max(1, min(rows, some + (rows + (ALIGNED - 2) * some) // width))


def plan(group_sizes: jax.Array, *, rows: int, width: int) -> jax.Array:
    """`[tiles 7]` int32: group, first row, first own row, row after its last own; the cluster's first tile and size; all tiles.

    The tiles there are come first; others are zero but for the last number."""
    sizes = group_sizes.astype(jnp.int32)
    X = sizes.shape[0]
    before = jnp.tri(X, dtype=bool)
    # sums by comparison: each is one fused kernel, where a scan would be several
    end = jnp.sum(jnp.where(before, sizes, 0), axis=1)
    start = end - sizes
    base = start // ALIGNED * ALIGNED
    count = jnp.where(sizes > 0, -(-(end - base) // width), 0)
    last = jnp.sum(jnp.where(before, count, 0), axis=1)
    tile = jnp.arange(most_tiles(rows, X, width), dtype=jnp.int32)[:, None]
    mine = (last - count <= tile) & (tile < last)

    def of_group(x):
        return jnp.sum(jnp.where(mine, x, 0), axis=1)

    within = tile - (last - count)
    first = base + within * width
    cluster = within // SHARE * SHARE
    columns = [
        jnp.arange(X, dtype=jnp.int32),
        first,
        jnp.maximum(first, start),
        jnp.minimum(first + width, end),
        last - count + cluster,
        jnp.minimum(count - cluster, SHARE),
    ]
    return jnp.stack([*(of_group(x) for x in columns), jnp.full(tile.shape[0], last[-1])], axis=1)
