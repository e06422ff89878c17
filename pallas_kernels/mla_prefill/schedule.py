"""Assigns pieces of the attention to units (a multiprocessor, or a cluster of two), in order.

Computed from shapes when the kernel is compiled. A few heads are processed at a time, so that their keys and values stay in the
L2, each from its longest piece to its shortest; the unit that is free first, by estimated cost, takes the next piece. The last
heads are processed together, so that the shortest pieces come last and all units finish at about the same time."""

import functools
import heapq
import itertools

import numpy as np

START = 2  # cost of starting a piece, in tiles


@functools.lru_cache(maxsize=64)
def schedule(tiles: tuple[int, ...], *, lines: int, near: int, units: int) -> np.ndarray:
    """`[units, 1 + most]` int32: how many pieces each unit takes, and which; piece `g + line * len(tiles)` has `tiles[g]` tiles.

    A line is a head of a row; `near` of them are processed at a time."""
    costs = np.asarray(tiles) + START
    longest_first = np.argsort(-costs, kind="stable")
    last = min(lines, -(-2 * units * int(costs.max()) // int(costs.sum())))
    cuts = [*range(0, lines - last, near), lines - last, lines]
    heads = itertools.starmap(range, itertools.pairwise(cuts))
    pieces = [g + line * len(tiles) for some in heads for g in longest_first for line in some]
    free = [(0, unit) for unit in range(units)]
    taken = [[] for _ in range(units)]
    for piece in pieces:
        when, unit = free[0]
        heapq.heapreplace(free, (when + int(costs[piece % len(tiles)]), unit))
        taken[unit].append(int(piece))
    table = np.zeros((units, 1 + max(map(len, taken))), np.int32)
    for row, mine in zip(table, taken, strict=True):
        row[: 1 + len(mine)] = [len(mine), *mine]
    table.setflags(write=False)  # cached, so shared by all callers
    return table
