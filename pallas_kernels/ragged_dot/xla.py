"""The fallback for any device: XLA's grouped matmul. E4M3 rows are converted to bfloat16, weights to the rows' dtype."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import packed
from pallas_kernels.fp8 import GROUP, Fp8, dequantize
from pallas_kernels.packed import Packed

LAST = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def _sums(x, w, group_sizes):
    x = dequantize(x).astype(jnp.bfloat16) if isinstance(x, Fp8) else x
    if isinstance(w, Fp8 | Packed):
        w = (dequantize(w, GROUP) if isinstance(w, Fp8) else packed.dequantize(w)).astype(x.dtype)
    return lax.ragged_dot_general(x, w, group_sizes, LAST, preferred_element_type=jnp.float32).astype(
        jnp.float32
    )


def ragged_dot(x, w, group_sizes, *, out_dtype):
    """Sums in float32."""
    return _sums(x, w, group_sizes).astype(out_dtype)


def ragged_swiglu(x, gate, up, group_sizes, *, out_dtype):
    """Sums and SwiGLU in float32."""
    return (jax.nn.silu(_sums(x, gate, group_sizes)) * _sums(x, up, group_sizes)).astype(out_dtype)
