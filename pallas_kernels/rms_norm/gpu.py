"""RMS norm of one row on a Hopper GPU: one kernel, where XLA takes one for the sum of squares and one for the rest."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.rms_norm import THREADS


def _normed(total, load, weight_g, eps):
    """The norm of a row in registers, in its dtype."""
    wide = total.astype(jnp.float32)
    normed = (wide * lax.rsqrt(jnp.sum(wide * wide) / wide.shape[0] + eps)).astype(total.dtype)
    return (normed.astype(jnp.float32) * load(weight_g).astype(jnp.float32)).astype(total.dtype)


def _layout(width):
    together = next(n for n in (8, 4, 2, 1) if width % (n * THREADS) == 0)  # that a thread loads at once
    return plgpu.Layout.WG_STRIDED((width,), together)


def _alone(x_g, weight_g, normed_g, *, eps):
    load = functools.partial(plgpu.load, layout=_layout(x_g.shape[1]))
    normed_g[0] = _normed(load(x_g.at[0]), load, weight_g, eps)


def _of_sum(x_g, weight_g, y_g, total_g, normed_g, *, eps):
    load = functools.partial(plgpu.load, layout=_layout(x_g.shape[1]))
    x, y = (load(source.at[0]).astype(jnp.float32) for source in (x_g, y_g))
    total = (x + y).astype(total_g.dtype)
    total_g[0] = total
    normed_g[0] = _normed(total, load, weight_g, eps)


# Jitted, so that all layers of a model are lowered once
@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def rms_norm(x, weight, y=None, *, eps, interpret=None):
    """As `rms_norm` of the package; `interpret` runs the kernel on a CPU."""
    given, out = [x, weight], jax.ShapeDtypeStruct(x.shape, x.dtype)
    if y is not None:
        given.append(y)

    found = plgpu.kernel(
        functools.partial(_alone if y is None else _of_sum, eps=eps),
        out_type=(out,) if y is None else (out, out),
        grid=(1,),
        grid_names=("row",),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=128),
        interpret=interpret,
    )(*given)
    return (x, *found) if y is None else tuple(found)
