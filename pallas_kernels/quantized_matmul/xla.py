"""The fallback for any device: XLA's matmul. E4M3 rows are converted to bfloat16, weights to the rows' dtype."""

import jax.numpy as jnp

from pallas_kernels import packed
from pallas_kernels.fp8 import GROUP, Fp8, dequantize


def quantized_matmul(x, w, *, out_dtype):
    """Sums in float32."""
    x = dequantize(x).astype(jnp.bfloat16) if isinstance(x, Fp8) else x
    w = (dequantize(w, GROUP) if isinstance(w, Fp8) else packed.dequantize(w)).astype(x.dtype)
    return jnp.einsum("md,fd->mf", x, w, preferred_element_type=jnp.float32).astype(out_dtype)
