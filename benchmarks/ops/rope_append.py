"""rope_append on a Hopper GPU, compared with XLA; the floor is the time of a kernel launch."""

import functools
from collections.abc import Iterator

import jax
from ops import timing

from pallas_kernels import choice, testing
from pallas_kernels.rope_append import CHECKS, reference, rope_append

SHAPES = [(1, 16), (8, 16), (64, 16), (1, 128), (64, 128)]  # rows, heads
HELD = 4096


def check() -> list[str]:
    """One line per named case; the kernel's error may be twice the fallback's."""
    return [_check(case) for case in testing.ROPE_APPEND]


def _check(case: testing.RopeAppendCase) -> str:
    inputs = testing.rope_append_inputs(case)
    title = f"rope_append, {case.name}"
    if reason := choice.why_not("mosaic_gpu", CHECKS, inputs["q"], inputs["kv"], inputs["cache"]):
        return f"ok   {title}: refused, {reason}"
    wanted = reference.rope_append(**inputs)
    off, own = (testing.rope_append_errors(rope_append(**inputs, impl=impl), wanted) for impl in ("mosaic_gpu", "xla"))
    good = all(off[name] <= 2 * own[name] for name in off)
    return f"{'ok  ' if good else 'FAIL'} {title}: {off}, fallback {own}"


def _row(rows: int, heads: int) -> dict:
    case = testing.RopeAppendCase("timed", (HELD // 2,) * rows, ((0,),) * rows, heads, slots=HELD)
    arrays = testing.rope_append_inputs(case)
    fixed = {name: arrays.pop(name) for name in ("eps", "interleave")}
    steps = {impl: functools.partial(_step, impl=impl, **fixed) for impl in ("mosaic_gpu", "xla")}
    us = {impl: timing.microseconds_in_place(step, arrays) for impl, step in steps.items()}
    return {"op": "rope_append", "batch": rows, "heads": heads, "us": us["mosaic_gpu"], "XLA": us["xla"]}


def _step(arrays: dict, *, impl: str, **fixed) -> dict:
    """The same step again, on the state after this one."""
    q_pe, cache = rope_append(**arrays, impl=impl, **fixed)
    q = jax.lax.dynamic_update_slice(arrays["q"], q_pe, (0, 0, 0, 0))
    return arrays | {"cache": cache._replace(length=arrays["cache"].length), "q": q}


def rows(peers: dict | None = None) -> Iterator[dict]:
    """The op of one layer, repeated over one cache; there are no `peers` of this op."""
    return (_row(*shape) for shape in SHAPES)
