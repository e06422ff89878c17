"""The experts of a few tokens, which each read their own: the contract, and who fulfils it.

Where many tokens share an expert, ragged_dot reads it once for all; here it is read for each, and nothing is sorted."""

import jax

from pallas_kernels import choice, tuning
from pallas_kernels.choice import Unsupported
from pallas_kernels.moe_decode import xla

__all__ = ["CHECKS", "TOKENS", "Unsupported", "moe_decode"]

TOKENS = 8  # at most


def check_gpu(x, topk_ids, gate, up, down) -> str | None:
    """Why the Hopper kernel cannot take these arrays (shapes and dtypes suffice); None: it can."""
    if reason := choice.too_old():
        return reason
    (n, D), (X, F, _) = x.shape, gate.shape
    if D % 64 or F % 64:
        return f"it takes widths in multiples of 64, not {D} and {F}"
    if not 1 <= n <= TOKENS or not X or not topk_ids.shape[1]:
        return f"it takes 1 to {TOKENS} tokens with at least one expert, not {n} with {topk_ids.shape[1]} of {X}"
    return choice.not_bfloat16(x, gate, up, down)


CHECKS = {"mosaic_gpu": check_gpu}


def moe_decode(
    x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array,
    *, impl: str | None = None,
) -> jax.Array:  # fmt: skip
    """`[n D]`, `[n K]` twice, `[X F D]` twice, `[X D F]` -> `[n D]`: the weighted sum of each token's SwiGLU experts.

    The id X stands for no expert, whose weight may be anything. `impl` is "mosaic_gpu", "xla" or, with None, the first of these
    that can; a name it cannot honour raises Unsupported."""
    if choice.take("moe_decode", impl, CHECKS, x, topk_ids, gate, up, down) == "xla":
        return xla.moe_decode(x, topk_ids, topk_weights, gate, up, down)
    from pallas_kernels.moe_decode import gpu  # needs a JAX that the fallback does not

    units = tuning.UNITS.get(choice.device(), tuning.DEFAULT_UNITS)
    return gpu.moe_decode(x, topk_ids, topk_weights, gate, up, down, units=units)
