"""What the kernels for Hopper GPUs share."""

import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

LOG2E = math.log2(math.e)
LOW = -1e30  # a running maximum of nothing; finite, for infinities subtract to NaN
ROW = plgpu.Layout.WGMMA.reduce(1)


def over(x, shape):
    """A number a row, in every column."""
    return lax.broadcast_in_dim(x, shape, [0])


def zeros(shape, layout):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def swizzled(width):
    """Tiles as the matrix units read them; `width` columns of bfloat16."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)


def clean(tiles, slot, held):
    """Zeros in the rows of a tile from `held` on: a weight of zero times NaN is NaN."""

    def column(k, _):
        part = tiles.at[slot, :, pl.ds(pl.multiple_of(k * 64, 64), 64)]
        v = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        at = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        part[...] = jnp.where(at < held, v, jnp.zeros_like(v))
        return ()

    lax.fori_loop(0, tiles.shape[-1] // 64, column, ())
