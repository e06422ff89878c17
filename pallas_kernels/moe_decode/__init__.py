"""MoE experts for a few tokens: the contract, and the choice of implementation.

Each token reads its own experts, and nothing is sorted. For many tokens ragged_dot reads an expert once for all of its tokens."""

import jax

from pallas_kernels import choice, tuning
from pallas_kernels.choice import Unsupported
from pallas_kernels.moe_decode import xla

__all__ = ["CHECKS", "TOKENS", "Unsupported", "moe_decode"]

TOKENS = 8  # at most


def check_gpu(x, topk_ids, gate, up, down) -> str | None:
    """Why the Hopper kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    if reason := choice.too_old():
        return reason
    (n, D), (X, F, _) = x.shape, gate.shape
    if D % 64 or F % 64:
        return f"it takes widths in multiples of 64, not {D} and {F}"
    if not 1 <= n <= TOKENS or not X or not topk_ids.shape[1]:
        return (
            f"it takes 1 to {TOKENS} tokens with at least one expert, not {n} with {topk_ids.shape[1]} of {X}"
        )
    return choice.not_bfloat16(x, gate, up, down)


CHECKS = {"mosaic_gpu": check_gpu}


def moe_decode(
    x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    *, impl: str | None = None,
) -> jax.Array:  # fmt: skip
    """`[n D]`, `[n K]` twice, `[X F D]` twice, `[X D F]` -> `[n D]`: the weighted sum of each token's SwiGLU experts.

    The id X means no expert; its weight may be anything. `impl`: "mosaic_gpu" or "xla"; None takes the first that supports the
    arrays and the device. Raises Unsupported if the named one does not."""
    if choice.take("moe_decode", impl, CHECKS, x, topk_ids, gate, up, down) == "xla":
        return xla.moe_decode(x, topk_ids, topk_weights, gate, up, down)
    from pallas_kernels.moe_decode import gpu  # needs a newer JAX than the fallback

    units = tuning.UNITS.get(choice.device(), tuning.DEFAULT_UNITS)
    return gpu.moe_decode(x, topk_ids, topk_weights, gate, up, down, units=units)
