"""moe_decode on a Hopper GPU, compared with XLA and the bytes of the chosen experts."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from ops import ragged_dot, timing

from pallas_kernels import choice, testing
from pallas_kernels.moe_decode import CHECKS, moe_decode, reference

# tokens, experts per token, experts, model and expert width: V2-Lite, V3
SHAPES = [*((n, 6, 64, 2048, 1408) for n in (1, 2, 4, 8)), *((n, 8, 256, 7168, 2048) for n in (1, 2, 4, 8))]


def check() -> list[str]:
    """One line per named case; the kernel's error may be twice the fallback's."""
    return [_check(case) for case in testing.MOE_DECODE]


def _check(case: testing.MoeDecodeCase) -> str:
    inputs = testing.moe_decode_inputs(case)
    title = f"moe_decode, {case.name}"
    if reason := choice.why_not(
        "mosaic_gpu", CHECKS, *(inputs[name] for name in ("x", "topk_ids", "gate", "up", "down"))
    ):
        return f"ok   {title}: refused, {reason}"
    wanted = reference.moe_decode(**inputs)
    off, own = (testing.error(moe_decode(**inputs, impl=impl), wanted) for impl in ("mosaic_gpu", "xla"))
    return f"{'ok  ' if off <= 2 * own else 'FAIL'} {title}: {off:.5f}, fallback {own:.5f}"


def deal(tokens: int, chosen: int, experts: int, sets: int) -> list[jax.Array]:
    """Ids: different experts for all pairs of a set, and for the next sets as long as there are unused ones."""
    order = np.resize(np.random.default_rng(0).permutation(experts), sets * tokens * chosen)
    return [jnp.asarray(ids, jnp.int32) for ids in order.reshape(sets, tokens, chosen)]


def work(shape: tuple[int, ...], weights: list[jax.Array], impl: str = "mosaic_gpu") -> timing.Work:
    """The error is of the last two tokens."""
    n, K, X, D, F = shape
    sets = deal(n, K, X, timing.sets_of(3 * 2 * D * F * n * K))
    x, share = jax.random.normal(jax.random.key(1), (n, D), jnp.bfloat16), jnp.full((n, K), 1 / K)
    last = sets[0][-2:]
    own = np.arange(last.size).reshape(last.shape)  # all experts would not fit in float64
    wanted = reference.moe_decode(x[-2:], own, share[-2:], *(w[last.reshape(-1)] for w in weights))
    call = functools.partial(moe_decode, impl=impl)
    return timing.Work(
        call, [(x, ids, share, *weights) for ids in sets], lambda out: testing.error(out[-2:], wanted)
    )


def _row(shape: tuple[int, ...], weights: list[jax.Array]) -> dict:
    n, K, X, D, F = shape
    ours = work(shape, weights)
    (us, error), beside = ours.measure(), work(shape, weights, "xla").program().microseconds()
    read = 3 * 2 * D * F * float(np.mean([len(np.unique(ids)) for _, ids, *_ in ours.args_sets]))
    row = {"op": "moe_decode", "rows": n, "experts": X, "chosen": K, "depth": D, "features": F, "us": us}
    return row | {"floor": read / timing.HBM * 1e6, "TB/s": read / us / 1e6, "XLA": beside, "error": error}


def weights(shape: tuple[int, ...]) -> list[jax.Array]:
    """Random gate, up and down of all experts."""
    _, _, X, D, F = shape
    keys = jax.random.split(jax.random.key(0), 3)
    return [
        ragged_dot.weight(key, X, *size) for key, size in zip(keys, ((F, D), (F, D), (D, F)), strict=True)
    ]


def rows(peers: dict | None = None) -> Iterator[dict]:
    """One set of random weights per model; there are no `peers` of this op."""
    made: dict[tuple, list[jax.Array]] = {}
    for shape in SHAPES:
        if shape[2:] not in made:
            made.clear()
            made[shape[2:]] = weights(shape)
        yield _row(shape, made[shape[2:]])
