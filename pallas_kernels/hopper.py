"""Helpers shared by the kernels for Hopper GPUs."""

import functools
import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, nvvm, scf, vector

LOG2E = math.log2(math.e)
LOW = -1e30  # initial running maximum; finite, because infinities subtract to NaN
ROW = plgpu.Layout.WGMMA.reduce(1)
FOLDED = 8  # columns that the same four threads hold
STEP = 8.0  # log2 of how far weights may exceed 1 before sums are rescaled


def over(x, shape):
    """A number per row, broadcast to every column."""
    return lax.broadcast_in_dim(x, shape, [0])


def fold(x):
    """Sums of the columns within a thread, `[.. FOLDED]`: the sum across threads can wait until the last tile."""
    while x.shape[1] > FOLDED:
        half = x.shape[1] // 2
        x = lax.slice(x, (0, 0), (x.shape[0], half)) + lax.slice(x, (0, half), x.shape)
    return x


def raised(top, highest):
    """The running maximum, as log2. If it would grow by at most STEP it stays, and no sum is rescaled."""
    return jnp.where(highest > top + STEP, highest, top)


def rescaled(sums, keep, interpret):
    """Each of `sums` times a number per row. A warp whose factors are all 1, as most are, skips the multiplication."""
    if interpret:
        return [x * over(keep, x.shape) for x in sums]
    matrix = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(*[matrix] * len(sums), ROW),
        return_type=[plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=matrix) for x in sums],
    )
    def scale(_, *args):
        *sums, keep = args
        one = mgpu.c(1.0, keep.mlir_dtype)
        kept = [vector.extract(k, dynamic_position=[], static_position=[0]) for k in keep.registers.flat]
        other = [arith.cmpf(arith.CmpFPredicate.UNE, k, one) for k in kept]
        other = nvvm.vote_sync(
            mgpu.c(-1, ir.IntegerType.get_signless(32)), functools.reduce(arith.ori, other), "any"
        )
        flat = [register for x in sums for register in x.registers.flat]
        branch = scf.IfOp(other, [register.type for register in flat], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            scaled = [x * keep.broadcast_in_dim(x.shape, (0,), x.layout) for x in sums]
            scf.yield_([register for x in scaled for register in x.registers.flat])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(flat)
        results, out = list(branch.results), []
        for x in sums:
            mine, results = results[: x.registers.size], results[x.registers.size :]
            registers = np.array(mine, dtype=object).reshape(x.registers.shape)
            out.append(mgpu.FragmentedArray(_registers=registers, _layout=x.layout, _is_signed=None))
        return out

    return scale(*sums, keep)


def accumulated(accs, a, bs, interpret):
    """acc + a @ b for each, with the sums in registers."""
    if interpret:  # the interpreter takes no initialised accumulator
        a = a[...]
        out = [
            acc + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
            for acc, b in zip(accs, bs, strict=True)
        ]
        plgpu.commit_smem()
        return out

    def run(refs):
        for ref, b in zip(refs, bs, strict=True):
            plgpu.wgmma(ref, a, b)

    return list(pl.run_state(run)([plgpu.ACC.init(acc) for acc in accs]))


def bits(x, dtype):
    """`x` bitcast to another 16-bit dtype."""
    return x if x.dtype == dtype else lax.bitcast_convert_type(x, dtype)


def zeros(shape, layout):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def swizzled(width):
    """Transforms of tiles as the matrix units read them; `width` columns of bfloat16."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)


def clean(tiles, slot, held):
    """Writes zeros to the rows of a tile from `held` on: a weight of zero times NaN is NaN."""

    def column(k, _):
        part = tiles.at[slot, :, pl.ds(pl.multiple_of(k * 64, 64), 64)]
        v = plgpu.load(part, layout=plgpu.Layout.WGMMA)
        at = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
        plgpu.commit_smem()
        part[...] = jnp.where(at < held, v, jnp.zeros_like(v))
        return ()

    lax.fori_loop(0, tiles.shape[-1] // 64, column, ())
