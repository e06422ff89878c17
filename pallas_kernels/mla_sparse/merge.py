"""Merges attention over parts of a query's tokens, by their LSEs: one kernel instead of XLA's five."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import LOG2E, LOW


def _kernel(out_g, lse_g, merged_g, merged_lse_g, *, interpret):
    if not interpret:
        plgpu.griddepcontrol_wait()  # launched while the previous kernel still runs
    parts, R = out_g.shape[1], out_g.shape[-1]
    query, head = lax.axis_index("query"), lax.axis_index("head")
    layout = plgpu.Layout.WG_STRIDED((R,), R // 128)
    outs = [plgpu.load(out_g.at[query, part, head], layout=layout) for part in range(parts)]
    lses = [lse_g[query, part, head] for part in range(parts)]
    top = functools.reduce(jnp.maximum, lses, jnp.float32(LOW))
    weights = [jnp.exp2(lse - top) for lse in lses]
    total = sum(weights)
    none = total == 0  # False for NaN, which propagates to both
    norm = jnp.where(none, 0.0, 1 / total)
    sums = sum(
        out.astype(jnp.float32) * lax.broadcast_in_dim(weight * norm, (R,), ())
        for out, weight in zip(outs, weights, strict=True)
    )
    merged_g[query, head] = sums.astype(merged_g.dtype)
    merged_lse_g[query, head] = jnp.where(none, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E))


def merge(out, lse, interpret):
    """`[queries parts N R]` -> `[queries N R]` in `out`'s dtype, and LSEs `[queries N]`.

    `lse` `[queries parts N or more]` is of base 2."""
    queries, _, N, R = out.shape
    return plgpu.kernel(
        functools.partial(_kernel, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((queries, N, R), out.dtype),
            jax.ShapeDtypeStruct((queries, N), jnp.float32),
        ),
        grid=(queries, N),
        grid_names=("query", "head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(out, lse)
