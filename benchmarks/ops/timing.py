"""How a kernel is timed: wall time per call of many calls back to back inside one program, over inputs beyond the L2."""

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class Program:
    """Many calls back to back, compiled as one. `call` takes one of `args_sets`, and waits for the call before with the first.

    So the first is small, and what a call does to none but other arguments is done once for all."""

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
        """What the first of `args_sets` gives."""
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
    """What a program is made of, and the error of what the first of `args_sets` gives."""

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
    """The median per turn of a loop of steps, each of which updates the state that the last one left."""
    many = jax.jit(lambda state: jax.lax.fori_loop(0, steps, lambda _, state: step(state), state), donate_argnums=0)
    state, times = many(jax.tree.map(jax.numpy.copy, state)), []
    for _ in range(5):
        jax.block_until_ready(state)
        start = time.perf_counter()
        state = jax.block_until_ready(many(state))
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times) * 1e6
