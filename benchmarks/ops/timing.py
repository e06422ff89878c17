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


def after(first: jax.Array, out: jax.Array) -> jax.Array:
    """`first`, or as good as it, but not before `out` is there: what does not depend on it would run beside it or not at all."""
    if (first.shape, first.dtype) == (out.shape, out.dtype):
        return out
    return first + (0 * out[(0,) * out.ndim]).astype(first.dtype)


def measure(call: Callable, args_sets: Sequence[tuple], seconds: float = 0.25, most: int = 64) -> tuple[float, jax.Array]:
    """The median of microseconds per call, and what the first of `args_sets` gives.

    `call` takes one of `args_sets`, whose first is the smallest; each call waits for the one before."""
    call = jax.jit(call)  # so that all calls are lowered once
    calls = len(args_sets) * max(1, most // len(args_sets))

    @jax.jit
    def many(args_sets):
        outs = []
        for i in range(calls):
            first, *rest = args_sets[i % len(args_sets)]
            first = after(first, outs[-1]) if outs else first
            outs = [*outs[:1], jax.tree.leaves(call(first, *rest))[0]]
        return outs

    def run(repeats: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            last = many(args_sets)
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / repeats

    run()
    repeats = max(1, int(seconds / 5 / run()))
    return statistics.median(run(repeats) for _ in range(5)) / calls * 1e6, many(args_sets)[0]


def microseconds(call: Callable, args_sets: Sequence[tuple], seconds: float = 0.25, most: int = 64) -> float:
    """The first that `measure` gives."""
    return measure(call, args_sets, seconds, most)[0]


def microseconds_in_place(step: Callable, state: dict, steps: int = 256) -> float:
    """The median per turn of a loop of steps, each of which updates the state that the last one left."""
    many = jax.jit(lambda state: jax.lax.fori_loop(0, steps, lambda _, state: step(state), state), donate_argnums=0)
    state, times = many(jax.tree.map(jax.numpy.copy, state)), []
    for _ in range(5):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = jax.block_until_ready(many(state))
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times) * 1e6
