"""How a kernel is timed: wall time per call of many calls back to back inside one program, over inputs beyond the L2."""

import statistics
import time
from collections.abc import Callable, Sequence

import jax

BEYOND_L2 = 256 << 20
HBM = 4.56e12  # bytes a second an H200 reads
BF16 = 811e12  # operations a second of its matrix units, on random data
FP8 = 1408e12


def sets_of(nbytes: int, most: int = 16) -> int:
    """How many inputs of `nbytes` to walk through, so that none is still in the L2."""
    return min(max(1, -(-BEYOND_L2 // nbytes)), most)


def microseconds(call: Callable, args_sets: Sequence[tuple], seconds: float = 0.25, most: int = 64) -> float:
    """The median per call. `call` takes one of `args_sets`, whose first is the smallest; each call waits for the one before."""
    call = jax.jit(call)
    calls = _calls(call, args_sets, most)

    @jax.jit
    def many(args_sets):
        out = ()
        for i in range(calls):
            first, *rest = args_sets[i % len(args_sets)]
            first, _ = jax.lax.optimization_barrier((first, out))
            out = jax.tree.leaves(call(first, *rest))[0]
        return out

    for _ in range(2):
        once = _seconds(lambda: many(args_sets))
    rounds = [_seconds(lambda: many(args_sets), max(2, int(seconds / 5 / once))) for _ in range(5)]
    return statistics.median(rounds) / calls * 1e6


def _calls(call: Callable, args_sets: Sequence[tuple], most: int) -> int:
    """As many as take some milliseconds, and a multiple of the sets."""
    jax.block_until_ready(call(*args_sets[0]))
    rough = max(_seconds(lambda: call(*args_sets[0]), 3), 1e-5)
    rounds = max(1, round(min(most, 4e-3 / rough) / len(args_sets)))
    return rounds * len(args_sets)


def _seconds(run: Callable, repeats: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        last = run()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / repeats
