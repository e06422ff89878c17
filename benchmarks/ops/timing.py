"""Timing of kernels: wall time per call, of many calls back to back in one program, over inputs that exceed the L2."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

BEYOND_L2 = 256 << 20
HBM = 4.56e12  # bytes per second that an H200 reads
BF16 = 811e12  # operations per second of its matrix units, on random data
FP8 = 1408e12


def sets_of(nbytes: int, most: int = 16) -> int:
    """The number of inputs of `nbytes` to rotate over, so that none is still in the L2."""
    return min(max(1, -(-BEYOND_L2 // nbytes)), most)


def after(first: jax.Array, out: jax.Array) -> jax.Array:
    """`first`, made to depend on `out`: independent calls would run concurrently or be removed."""
    if (first.shape, first.dtype) == (out.shape, out.dtype):
        return out
    return first + (0 * out[(0,) * out.ndim]).astype(first.dtype)


class Program:
    """Many calls back to back, in one program. `call` takes one of `args_sets`; its first argument waits for the call before.

    So the first argument should be small; work on other arguments only is done once for all calls."""

    def __init__(self, call: Callable, args_sets: Sequence[tuple], most: int = 64):
        call = jax.jit(call)  # so that all calls are lowered once
        self.args_sets, self.calls = args_sets, len(args_sets) * max(1, most // len(args_sets))

        def many(args_sets):
            outs = []
            for i in range(self.calls):
                first, *rest = args_sets[i % len(args_sets)]
                if outs:
                    first = jax.tree.map(functools.partial(after, out=outs[-1]), first)
                outs = [*outs[:1], jax.tree.leaves(call(first, *rest))[0]]
            return outs

        self.many = jax.jit(many).lower(args_sets).compile()

    def out(self) -> jax.Array:
        """The result for the first of `args_sets`."""
        return self.many(self.args_sets)[0]

    def microseconds(self, seconds: float = 0.25) -> float:
        """The median per call."""
        self._seconds()
        repeats = max(1, int(seconds / 5 / self._seconds()))
        return statistics.median(self._seconds(repeats) for _ in range(5)) / self.calls * 1e6

    def _seconds(self, repeats: int = 1) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            last = self.many(self.args_sets)
        jax.block_until_ready(last)
        return (time.perf_counter() - start) / repeats


class Work(NamedTuple):
    """A program's call and arguments, and the error of its result for the first of `args_sets`."""

    call: Callable
    args_sets: Sequence[tuple]
    error: Callable[[jax.Array], float]
    most: int = 64

    def program(self) -> Program:
        return Program(self.call, self.args_sets, self.most)

    def measure(self) -> tuple[float, float]:
        """Microseconds per call, and the error."""
        program = self.program()
        return program.microseconds(), self.error(program.out())


def microseconds(call: Callable, args_sets: Sequence[tuple]) -> float:
    """The median per call."""
    return Program(call, args_sets).microseconds()


def microseconds_in_place(step: Callable, state: dict, steps: int = 256) -> float:
    """The median per iteration of a loop of steps, each of which updates the state of the one before."""
    many = jax.jit(
        lambda state: jax.lax.fori_loop(0, steps, lambda _, state: step(state), state), donate_argnums=0
    )
    state, times = many(jax.tree.map(jax.numpy.copy, state)), []
    for _ in range(5):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = jax.block_until_ready(many(state))
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times) * 1e6
