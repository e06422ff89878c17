"""moe_decode on a Hopper GPU, against the same by XLA and the bytes of the experts that are chosen."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ops import ragged_dot, timing

from pallas_kernels import choice, testing
from pallas_kernels.moe_decode import CHECKS, moe_decode, reference

# tokens, experts of a token, experts, model and width: V2-Lite, V3
SHAPES = [*((n, 6, 64, 2048, 1408) for n in (1, 2, 4, 8)), *((n, 8, 256, 7168, 2048) for n in (1, 2, 4, 8))]


def check() -> list[str]:
    """One line per named case; the kernel's error may be twice the fallback's."""
    return [_check(case) for case in testing.MOE_DECODE]


def _check(case: testing.MoeDecodeCase) -> str:
    inputs = testing.moe_decode_inputs(case)
    title = f"moe_decode, {case.name}"
    if reason := choice.why_not("mosaic_gpu", CHECKS, *(inputs[name] for name in ("x", "topk_ids", "gate", "up", "down"))):
        return f"ok   {title}: refused, {reason}"
    wanted = reference.moe_decode(**inputs)
    off, own = (testing.error(moe_decode(**inputs, impl=impl), wanted) for impl in ("mosaic_gpu", "xla"))
    return f"{'ok  ' if off <= 2 * own else 'FAIL'} {title}: {off:.5f}, fallback {own:.5f}"


def deal(tokens: int, chosen: int, experts: int, sets: int) -> list[jax.Array]:
    """Ids of different experts for all pairs of a set, and of the next sets as long as there are others."""
    order = np.resize(np.random.default_rng(0).permutation(experts), sets * tokens * chosen)
    return [jnp.asarray(ids, jnp.int32) for ids in order.reshape(sets, tokens, chosen)]


def _row(shape: tuple[int, ...], weights: list[jax.Array]) -> dict:
    n, K, X, D, F = shape
    each = 3 * 2 * D * F
    sets = deal(n, K, X, timing.sets_of(each * n * K))
    x, share = jax.random.normal(jax.random.key(1), (n, D), jnp.bfloat16), jnp.full((n, K), 1 / K)
    args_sets = [(x, ids, share, *weights) for ids in sets]
    us = {impl: timing.microseconds(lambda *a, impl=impl: moe_decode(*a, impl=impl), args_sets) for impl in ("mosaic_gpu", "xla")}
    read = each * float(np.mean([len(np.unique(ids)) for ids in sets]))
    row = {"op": "moe_decode", "rows": n, "experts": X, "chosen": K, "depth": D, "features": F, "us": us["mosaic_gpu"]}
    return row | {"floor": read / timing.HBM * 1e6, "TB/s": read / us["mosaic_gpu"] / 1e6, "XLA": us["xla"]}


def rows(peers: dict | None = None) -> Iterator[dict]:
    """Random weights, one set for each model; `peers` knows nothing of this op."""
    made: dict[tuple, list[jax.Array]] = {}
    for shape in SHAPES:
        _, _, X, D, F = shape
        if (X, D, F) not in made:
            made.clear()
            keys = jax.random.split(jax.random.key(0), 3)
            sizes = ((F, D), (F, D), (D, F))
            made[X, D, F] = [ragged_dot.weight(key, X, *size) for key, size in zip(keys, sizes, strict=True)]
        yield _row(shape, made[X, D, F])
