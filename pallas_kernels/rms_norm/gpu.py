"""RMS norm of one row on a Hopper GPU: one kernel, where XLA takes one for the sum of squares and one for the rest."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rms_norm import THREADS


def _kernel(x_g, y_g, weight_g, total_g, normed_g, *, eps):
    row, width = lax.axis_index("row"), x_g.shape[1]
    together = next(n for n in (8, 4, 2, 1) if width % (n * THREADS) == 0)  # that a thread loads at once
    layout = plgpu.Layout.WG_STRIDED((width,), together)
    x, y, weight = (
        plgpu.load(source, layout=layout).astype(jnp.float32)
        for source in (x_g.at[row], y_g.at[row], weight_g)
    )
    total = (x + y).astype(total_g.dtype)
    total_g[row] = total
    wide = total.astype(jnp.float32)
    normed = (wide * lax.rsqrt(jnp.sum(wide * wide) / width + eps)).astype(total_g.dtype)
    normed_g[row] = (normed.astype(jnp.float32) * weight).astype(normed_g.dtype)


# Jitted, so that all layers of a model are lowered once
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_rms_norm(x, y, weight, *, eps, interpret=None):
    """As `add_rms_norm` of the package; `interpret` runs the kernel on a CPU."""
    return plgpu.kernel(
        functools.partial(_kernel, eps=eps),
        out_type=(jax.ShapeDtypeStruct(x.shape, x.dtype),) * 2,
        grid=x.shape[:1],
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=128),
        interpret=interpret,
    )(x, y, weight)
