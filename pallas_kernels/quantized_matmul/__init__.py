"""A matmul with weights of 4 to 8 bits: the contract, and the choice of implementation.

Rows are bfloat16 or, with weights in E4M3, E4M3; sums are in float32. Weights have the output axis first, as in checkpoints: in
E4M3 as they are stored, in other formats as packed.py reorders them."""

import jax
import jax.numpy as jnp

from pallas_kernels import choice, tuning
from pallas_kernels.choice import Unsupported
from pallas_kernels.fp8 import Fp8
from pallas_kernels.packed import Packed
from pallas_kernels.quantized_matmul import xla
from pallas_kernels.ragged_dot import check_gpu as check_groups

__all__ = ["CHECKS", "Unsupported", "quantized_matmul"]


def check_gpu(x, w: Fp8 | Packed) -> str | None:
    """Why the Hopper kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    return check_groups(x, jax.tree.map(lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype), w))


CHECKS = {"mosaic_gpu": check_gpu}


def quantized_matmul(
    x: jax.Array | Fp8, w: Fp8 | Packed, *, out_dtype=None, impl: str | None = None
) -> jax.Array:
    """`[M D]`, `[F D]` -> `[M F]`, in `out_dtype`, else x's (E4M3: bfloat16).

    `impl`: "mosaic_gpu" or "xla"; None takes the first that supports the arrays and the device. Raises Unsupported if the named
    one does not."""
    impl = choice.take("quantized_matmul", impl, CHECKS, x, w)
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if isinstance(x, Fp8) else x.dtype
    if impl == "xla":
        return xla.quantized_matmul(x, w, out_dtype=out_dtype)
    from pallas_kernels.quantized_matmul import gpu  # needs a newer JAX than the fallback

    units = tuning.UNITS.get(choice.device(), tuning.DEFAULT_UNITS)
    return gpu.quantized_matmul(x, w, out_dtype=out_dtype, units=units)
