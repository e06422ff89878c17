"""RMS norm, of a sum too, in float32: the contract, and the choice of implementation.

The sum is rounded to its dtype first, and the quotient before it is multiplied by the weight, as the released models do."""

import functools

import jax

from pallas_kernels import choice
from pallas_kernels.choice import Unsupported
from pallas_kernels.rms_norm import xla

__all__ = ["CHECKS", "Unsupported", "rms_norm"]

THREADS = 128


def check_gpu(x, weight) -> str | None:
    """Why the Hopper kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    if reason := choice.too_old():
        return reason
    rows, width = x.shape
    if rows != 1:
        return f"it takes one row, not {rows}: of more XLA makes one kernel, too"
    if width % THREADS or not 0 < width <= 64 * THREADS:
        return f"it takes widths in multiples of {THREADS} up to {64 * THREADS}, not {width}"
    return choice.not_bfloat16(x, weight)


CHECKS = {"mosaic_gpu": check_gpu}


def rms_norm(
    x: jax.Array, weight: jax.Array, y: jax.Array | None = None, *, eps: float, impl: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """`[n D]`, `[D]`, `[n D]` -> `x + y`, or `x` without a `y`, and that divided by its root mean square, times `weight`.

    The gradients are those of the fallback. `impl`: "mosaic_gpu" or "xla"; None takes the first that supports the arrays and the
    device. Raises Unsupported if the named one does not."""
    if choice.take("rms_norm", impl, CHECKS, x, weight) == "xla":
        return xla.rms_norm(x, weight, y, eps=eps)
    return _by_kernel(eps, x, weight, y)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _by_kernel(eps: float, x, weight, y):
    from pallas_kernels.rms_norm import gpu  # needs a newer JAX than the fallback

    return gpu.rms_norm(x, weight, y, eps=eps)


@_by_kernel.defjvp
def _derivative(eps: float, primals, tangents):
    return jax.jvp(functools.partial(xla.rms_norm, eps=eps), primals, tangents)
