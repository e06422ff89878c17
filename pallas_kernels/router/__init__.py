"""The routers of DeepSeek-V2 and V3, from scores to chosen experts and their weights: the contract, and the choice of
implementation.

Of equals the first expert comes before the next. With a bias, as in V3, experts are chosen by score plus bias and weighed by
score, and a group is rated by its two best experts; without, as in V2, by its best one."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import choice
from pallas_kernels.choice import Unsupported
from pallas_kernels.router import xla

__all__ = ["CHECKS", "Rule", "Unsupported", "router"]

WARP = 32  # experts in a register of the GPU kernel
EXPERTS = 512  # whose scores it keeps in registers


class Rule(NamedTuple):
    """How experts are chosen and weighed; the first five are fields of config.json."""

    num_experts_per_tok: int
    scoring_func: str = "softmax"  # or "sigmoid"
    n_group: int = 1
    topk_group: int = 1  # groups whose experts may be chosen
    norm_topk_prob: bool = False  # weights are divided by their sum
    scale: float = 1.0  # of the weights


def check_gpu(logits) -> str | None:
    """Why the Hopper kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    if reason := choice.too_old():
        return reason
    tokens, experts = logits.shape
    if not tokens:
        return "it takes at least one token"
    if experts % WARP or not 0 < experts <= EXPERTS:
        return f"it takes experts in multiples of {WARP} up to {EXPERTS}, not {experts}"
    return None if logits.dtype == jnp.float32 else f"it takes float32, not {logits.dtype}"


CHECKS = {"mosaic_gpu": check_gpu}


def router(
    logits: jax.Array, bias: jax.Array | None, some: jax.Array | None, *, rule: Rule, impl: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """`[n X]` float32, `[X]`, `[n]` bool -> ids `[n K]` int32 and weights `[n K]` float32, the best first.

    Tokens that are not in `some` get the id X, which means no expert, and any weight; None: all choose. The gradients are those
    of the fallback. `impl`: "mosaic_gpu" or "xla"; None takes the first that supports the arrays and the device. Raises
    Unsupported if the named one does not."""
    if choice.take("router", impl, CHECKS, logits) == "xla":
        return xla.router(logits, bias, some, rule=rule)
    return _by_kernel(rule, logits, bias, some)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_kernel(rule: Rule, logits, bias, some):
    from pallas_kernels.router import gpu  # needs a newer JAX than the fallback

    return gpu.router(logits, bias, some, rule=rule)


@_by_kernel.defjvp
def _derivative(rule: Rule, primals, tangents):
    return jax.jvp(functools.partial(xla.router, rule=rule), primals, tangents)
