"""heads_decode on a Hopper GPU, compared with XLA and the bytes of the keys and values."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ops import timing

from pallas_kernels import choice, testing
from pallas_kernels.heads_decode import CHECKS, heads_decode, reference

# rows, heads, tokens of a head on average: V2-Lite, of whose 8k, 32k and 128k tokens a tenth was kept
SHAPES = [(rows, 16, tokens) for rows in (8, 64) for tokens in (820, 3277, 13_107)]
KEY, VALUE, PAGE, SCALE = 192, 128, 64, 192**-0.5


def check() -> list[str]:
    """One line per named case; the kernel's error may be twice the fallback's."""
    return [_check(case) for case in testing.HEADS_DECODE]


def _check(case: testing.HeadsDecodeCase) -> str:
    inputs = testing.heads_decode_inputs(case)
    title = f"heads_decode, {case.name}"
    if reason := choice.why_not(
        "mosaic_gpu", CHECKS, *(inputs[name] for name in ("q", "k", "v", "page_table"))
    ):
        return f"ok   {title}: refused, {reason}"
    wanted = reference.heads_decode(**inputs, scale=SCALE)[0]
    off, own = (
        testing.error(heads_decode(**inputs, scale=SCALE, impl=impl)[0], wanted)
        for impl in ("mosaic_gpu", "xla")
    )
    return f"{'ok  ' if off <= max(2 * own, 1e-6) else 'FAIL'} {title}: {off:.5f}, fallback {own:.5f}"


def made(rows: int, heads: int, tokens: int) -> tuple[list, int]:
    """Arguments in which each head has a length of its own, and the tokens of all heads together."""
    rng = np.random.default_rng(0)
    lens = rng.integers(tokens // 2, tokens * 3 // 2, (heads, rows))
    width = -(-int(lens.max()) // PAGE)
    pages = rows * width
    table = rng.permutation(pages * heads).reshape(heads, rows, width)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (rows, heads, KEY), jnp.bfloat16)
    k, v = (
        jax.random.normal(key, (pages, PAGE, heads, numbers), jnp.bfloat16)
        for key, numbers in zip(keys[1:], (KEY, VALUE), strict=True)
    )
    return [q, k, v, jnp.asarray(table, jnp.int32), jnp.asarray(lens, jnp.int32)], int(lens.sum())


def _row(shape: tuple[int, int, int]) -> dict:
    arguments, tokens = made(*shape)
    read = tokens * (KEY + VALUE) * 2
    wanted = heads_decode(*arguments, scale=SCALE, impl="xla")[0]

    def timed(impl: str) -> timing.Work:
        call = functools.partial(heads_decode, scale=SCALE, impl=impl)
        return timing.Work(
            call, [arguments], lambda out: testing.error(out[0], np.asarray(wanted, np.float64))
        )

    (us, error), beside = timed("mosaic_gpu").measure(), timed("xla").program().microseconds()
    row = {"op": "heads_decode", "rows": shape[0], "heads": shape[1], "tokens": shape[2], "us": us}
    return row | {"floor": read / timing.HBM * 1e6, "TB/s": read / us / 1e6, "XLA": beside, "error": error}


def rows(peers: dict | None = None) -> Iterator[dict]:
    """Pools are larger than the L2, so one of them is enough; there are no `peers` of this op."""
    yield from map(_row, SHAPES)
