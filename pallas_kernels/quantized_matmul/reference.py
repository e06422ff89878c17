"""The specification of `quantized_matmul`, in float32; used by tests only."""

import jax.numpy as jnp

from pallas_kernels import packed
from pallas_kernels.fp8 import GROUP, Fp8, dequantize


def quantized_matmul(x, w):
    """The product of the dequantised operands."""
    x = dequantize(x) if isinstance(x, Fp8) else x.astype(jnp.float32)
    w = dequantize(w, GROUP) if isinstance(w, Fp8) else packed.dequantize(w)
    return jnp.dot(x, w.T, precision="highest")
