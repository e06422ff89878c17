"""The specification of `ragged_dot` and `ragged_swiglu`, in float32; used by tests only."""

import jax
import jax.numpy as jnp

from pallas_kernels import packed
from pallas_kernels.fp8 import GROUP, Fp8, dequantize


def ragged_dot(x, w, group_sizes):
    """Group by group, each over all rows; rows of no group are zeros."""
    x = dequantize(x) if isinstance(x, Fp8) else x.astype(jnp.float32)
    w = packed.dequantize(w) if isinstance(w, packed.Packed) else w
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(x.shape[0]), side="right")

    def add(out, item):
        number, weight = item
        weight = dequantize(weight, GROUP) if isinstance(weight, Fp8) else weight.astype(jnp.float32)
        own = (group == number)[:, None]
        return out + jnp.dot(jnp.where(own, x, 0), weight.T, precision="highest"), None

    X, F = jax.tree.leaves(w)[0].shape[:2]
    return jax.lax.scan(add, jnp.zeros((x.shape[0], F), jnp.float32), (jnp.arange(X), w))[0]


def ragged_swiglu(x, gate, up, group_sizes):
    """`silu(x @ gate.T) * (x @ up.T)`, group by group."""
    return jax.nn.silu(ragged_dot(x, gate, group_sizes)) * ragged_dot(x, up, group_sizes)
