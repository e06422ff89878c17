"""Grouped matmul: each expert's weights times its own rows. The contract, and the choice of implementation.

The rows of x are sorted by group: first `group_sizes[0]` rows of group 0, and so on, without gaps. Rows past the last group may
hold anything, and their output is unspecified. Weights have the output axis first, as in checkpoints."""

import jax
import jax.numpy as jnp

from pallas_kernels import choice, tuning
from pallas_kernels.choice import Unsupported
from pallas_kernels.fp8 import Fp8, codes
from pallas_kernels.packed import Packed
from pallas_kernels.ragged_dot import xla

__all__ = ["CHECKS", "Unsupported", "ragged_dot", "ragged_swiglu"]

MOST_GROUPS = 512  # whose table has room in shared memory


def check_gpu(x, *weights) -> str | None:
    """Why the Hopper kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    if reason := choice.too_old():
        return reason
    if any(isinstance(w, Packed) for w in weights):
        return _check_packed(x, *weights)
    kinds = {isinstance(w, Fp8) for w in weights}
    if len(kinds) > 1 or (isinstance(x, Fp8) and kinds == {False}):
        return "it takes weights that are all E4M3 or none, and with rows of E4M3 all"
    rows, *rest = (codes(a) for a in (x, *weights))
    X, F, D = rest[0].shape
    least = 128 if kinds == {True} else 64
    if D % least or F % 8:
        return f"it takes depths in multiples of {least} and features in multiples of 8, not {D} and {F}"
    if rows.shape[1] != D:
        return f"it takes rows as deep as the weights, not {rows.shape[1]} and {D}"
    if not rows.shape[0] or not 0 < X <= MOST_GROUPS:
        return f"it takes at least one row, and up to {MOST_GROUPS} groups, not {rows.shape[0]} and {X}"
    packed = [a.codes for a in (x, *weights) if isinstance(a, Fp8)]
    return choice.not_e4m3(*packed) or choice.not_bfloat16(
        *(a for a in (x, *weights) if not isinstance(a, Fp8))
    )


def _check_packed(x, *weights) -> str | None:
    """The same of packed weights."""
    if isinstance(x, Fp8) or {getattr(w, "format", None) for w in weights} != {weights[0].format}:
        return "it takes packed weights that are all of one format, and rows in bfloat16"
    X, (F, D) = weights[0].arrays[0].shape[0], weights[0].shape
    if F % 8 or x.shape[1] != D:
        return f"it takes features in multiples of 8 and rows as deep as the weights, not {F}, and {x.shape[1]} and {D}"
    if not x.shape[0] or not 0 < X <= MOST_GROUPS:
        return f"it takes at least one row, and up to {MOST_GROUPS} groups, not {x.shape[0]} and {X}"
    return choice.not_bfloat16(x)


CHECKS = {"mosaic_gpu": check_gpu}


def _run(name, impl, x, weights, group_sizes, expected, out_dtype):
    if out_dtype is None:
        out_dtype = jnp.bfloat16 if isinstance(x, Fp8) else x.dtype
    other = None if out_dtype == jnp.bfloat16 else f"it gives bfloat16, not {jnp.dtype(out_dtype)}"
    impl = choice.take(
        name,
        impl,
        {k: lambda *a, check=check: check(*a) or other for k, check in CHECKS.items()},
        x,
        *weights,
    )
    if impl == "xla":
        return getattr(xla, name)(x, *weights, group_sizes, out_dtype=out_dtype)
    from pallas_kernels.ragged_dot import gpu  # needs a newer JAX than the fallback

    units = tuning.UNITS.get(choice.device(), tuning.DEFAULT_UNITS)
    return gpu.grouped(x, weights, group_sizes, expected=expected, out_dtype=out_dtype, units=units)


def ragged_dot(
    x: jax.Array | Fp8, w: jax.Array | Fp8 | Packed, group_sizes: jax.Array,
    *, expected: int | None = None, out_dtype=None, impl: str | None = None,
) -> jax.Array:  # fmt: skip
    """`[M D]`, `[X F D]`, `[X]` -> `[M F]`, each row times the weights of its group; in `out_dtype`, else x's (E4M3: bfloat16).

    Any rows may have a group, but the GPU's kernel is fastest if about `expected` have one; None: all.

    `impl`: "mosaic_gpu" or "xla"; None takes the first that supports the arrays and the device. Raises Unsupported if the named
    one does not."""
    return _run("ragged_dot", impl, x, (w,), group_sizes, expected, out_dtype)


def ragged_swiglu(
    x: jax.Array | Fp8, gate: jax.Array | Fp8 | Packed, up: jax.Array | Fp8 | Packed, group_sizes: jax.Array,
    *, expected: int | None = None, out_dtype=None, impl: str | None = None,
) -> jax.Array:  # fmt: skip
    """`silu(x @ gate.T) * (x @ up.T)` of each row with the weights of its group; else as `ragged_dot`."""
    return _run("ragged_swiglu", impl, x, (gate, up), group_sizes, expected, out_dtype)
