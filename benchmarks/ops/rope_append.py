"""rope_append on a Hopper GPU, compared with XLA; the floor is the time of a kernel launch."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from ops import timing

from pallas_kernels import choice, testing
from pallas_kernels.rope_append import CHECKS, Latents, reference, rope_append

SHAPES = [(1, 16), (8, 16), (64, 16), (1, 128), (64, 128)]  # rows, heads
HELD = 4096  # tokens that the pool has room for, per row


def check() -> list[str]:
    """One line per named case, the kernel's error may be twice the fallback's; and one for a pool beyond 2^31 numbers."""
    return [
        *(_check(case) for case in testing.ROPE_APPEND),
        *(_check_large(impl) for impl in ("mosaic_gpu", "xla")),
    ]


def _check(case: testing.RopeAppendCase) -> str:
    inputs = testing.rope_append_inputs(case)
    title = f"rope_append, {case.name}"
    if reason := choice.why_not("mosaic_gpu", CHECKS, inputs["q"], inputs["kv"], inputs["cache"]):
        return f"ok   {title}: refused, {reason}"
    wanted = reference.rope_append(**inputs)
    off, own = (
        testing.rope_append_errors(rope_append(**inputs, impl=impl), wanted, inputs)
        for impl in ("mosaic_gpu", "xla")
    )
    good = all(off[name] <= 2 * own[name] for name in off)
    return f"{'ok  ' if good else 'FAIL'} {title}: {off}, fallback {own}"


def _check_large(impl: str) -> str:
    """Tokens on both sides of the 2^31st number, and of the 2^31st byte, are where they belong, and nothing else is anywhere."""
    small = testing.rope_append_inputs(testing.RopeAppendCase("large", ("nn", "nn"), 16))
    pages, fixed = (1 << 31) // (64 * 512) + 5, {name: small.pop(name) for name in ("eps", "interleave")}
    slots = jnp.array([[0, pages * 64 - 1], [(1 << 30) // 512 + 1, (1 << 31) // 512 + 2]], jnp.int32)
    pool = Latents(*(jnp.zeros((pages, *x.shape[1:]), x.dtype) for x in small["cache"]))
    step = jax.jit(functools.partial(rope_append, impl=impl, **fixed), donate_argnames="cache")
    large = step(**small | {"tokens": small["tokens"]._replace(slot=slots), "cache": pool})[1]
    wanted = rope_append(**small, impl=impl, **fixed)[1]
    good = True
    for got, one in zip(large, wanted, strict=True):
        of = jnp.stack([one[divmod(slot, 64)] for slot in small["tokens"].slot.reshape(-1).tolist()])
        at = jnp.stack([got[divmod(slot, 64)] for slot in slots.reshape(-1).tolist()])
        good &= bool((at == of).all()) and int((got != 0).any(-1).sum()) == slots.size
    return f"{'ok  ' if good else 'FAIL'} rope_append, a pool of more than 2^31 numbers, {impl}"


def _row(rows: int, heads: int) -> dict:
    case = testing.RopeAppendCase("timed", ("n",) * rows, heads, pages=rows * HELD // 64)
    arrays = testing.rope_append_inputs(case)
    fixed = {name: arrays.pop(name) for name in ("eps", "interleave")}
    steps = {impl: functools.partial(_step, impl=impl, **fixed) for impl in ("mosaic_gpu", "xla")}
    us = {impl: timing.microseconds_in_place(step, arrays) for impl, step in steps.items()}
    return {"op": "rope_append", "batch": rows, "heads": heads, "us": us["mosaic_gpu"], "XLA": us["xla"]}


def _step(arrays: dict, *, impl: str, **fixed) -> dict:
    """The same step again, on the state after this one."""
    q_pe, cache = rope_append(**arrays, impl=impl, **fixed)
    return arrays | {"cache": cache, "q": jax.lax.dynamic_update_slice(arrays["q"], q_pe, (0, 0, 0, 0))}


def rows(peers: dict | None = None) -> Iterator[dict]:
    """The op of one layer, repeated over one cache; there are no `peers` of this op."""
    return (_row(*shape) for shape in SHAPES)
