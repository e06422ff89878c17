"""Grouped matmul for Hopper, in Pallas Mosaic GPU.

The weights are the left operand of the matrix units and the tokens the right one, so that few tokens waste nothing: a sum
holds features by tokens. A block takes 256 rows of weights (of a SwiGLU 128 of gate and the same 128 of up) against a tile
of tokens. Two warpgroups take two times 64 of these rows each; a third orders weights and tokens from the copy engine
through a ring of slots, one piece of work after the other, so that loads never pause. The sums are transposed on their way
to shared memory, and only the tile's own rows leave it. Not timed yet."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.hopper import LOG2E, swizzled
from pallas_kernels.ragged_dot.plan import ALIGNED, best_width, plan

ROWS = 64  # rows of weights in a product
WORKERS, FEEDER = 2, 2
HALF = WORKERS * ROWS  # rows of weights that the two take together, twice
STORED = 64  # features in a row of the staged output: a span of the swizzle


def _kernel(x_g, *refs, weights, steps, blocks, units, sizes, act):
    weights_g, (plan_g, out_g, x_s, w_s, out_s, full, free) = refs[:weights], refs[weights:]
    slots, width, depth = x_s.shape
    taken = 2 * HALF // weights  # features of a block
    unit, role = lax.axis_index("unit"), lax.axis_index("role")
    tiles = plan_g[0, 6]
    pieces = lax.div(tiles * blocks - unit + (units - 1), jnp.int32(units))

    def piece(i):
        """The row of the plan and the first feature of this unit's piece i."""
        at = unit + i * units
        somewhere = lax.div(at, jnp.int32(blocks))  # a tile of the cluster
        first, count = plan_g[somewhere, 4], plan_g[somewhere, 5]
        place = at - first * blocks
        block = lax.div(place, count)
        return first + place - block * count, block * taken

    def feeder():
        def one(i, step):
            tile, feature = piece(i)
            group, row = plan_g[tile, 0], pl.multiple_of(plan_g[tile, 1], 8)
            rows = pl.ds(pl.multiple_of(feature, HALF), taken)

            def load(k, step):
                slot, columns = lax.rem(step, jnp.int32(slots)), pl.ds(pl.multiple_of(k * depth, depth), depth)
                pl.when(step >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
                for j, w_g in enumerate(weights_g):
                    to = w_s.at[slot, pl.ds(j * taken, taken)]
                    plgpu.copy_gmem_to_smem(w_g.at[group, rows, columns], to, full.at[slot])
                plgpu.copy_gmem_to_smem(x_g.at[pl.ds(row, width), columns], x_s.at[slot], full.at[slot])
                return step + 1

            return lax.fori_loop(0, steps, load, step)

        step = lax.fori_loop(0, pieces, one, jnp.int32(0))

        def drain(step, _):  # every completion has to be observed
            plgpu.barrier_wait(free.at[lax.rem(step, jnp.int32(slots))])
            return ()

        lax.fori_loop(jnp.maximum(step - slots, 0), step, drain, ())

    def worker():
        mine = pl.multiple_of(role * ROWS, ROWS)

        def sums(step):
            """The sums of both halves over a piece's depth, features by tokens."""

            def run(*accs):
                def add(k, step):
                    slot = lax.rem(step, jnp.int32(slots))
                    plgpu.barrier_wait(full.at[slot])
                    for half, acc in enumerate(accs):
                        rows = pl.ds(half * HALF + mine, ROWS)
                        plgpu.wgmma(acc, w_s.at[slot, rows], x_s.at[slot].transpose((1, 0)))
                    plgpu.wgmma_wait(len(accs))  # the step before is done

                    @pl.when(k > 0)
                    def _():
                        plgpu.barrier_arrive(free.at[lax.rem(step - 1, jnp.int32(slots))])

                    return step + 1

                lax.fori_loop(0, steps, add, step)
                return [acc[...] for acc in accs]

            out = pl.run_scoped(run, *[plgpu.ACC((ROWS, width), jnp.float32)] * 2)
            step = step + steps
            plgpu.barrier_arrive(free.at[lax.rem(step - 1, jnp.int32(slots))])
            return out, step

        def store(out, tile, feature):
            """Sums of ROWS features, of which the tile's own rows are written."""
            first, start, stop = (plan_g[tile, k] for k in (1, 2, 3))
            staged = out_s.at[role]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            staged.transpose((1, 0))[...] = out.astype(out_s.dtype)
            plgpu.commit_smem()
            at, count = start - first, stop - start
            rows = 1 << (width.bit_length() - 1)
            while rows:  # copies have static sizes: one for each bit of the count

                @pl.when(count & rows != 0)
                def _(at=at, rows=rows):
                    to = out_g.at[pl.ds(first + at, rows), pl.ds(pl.multiple_of(feature, STORED), STORED)]
                    plgpu.copy_smem_to_gmem(staged.at[pl.ds(at, rows)], to, commit_group=False)

                at = at + (count & rows)
                rows //= 2
            plgpu.commit_smem_to_gmem_group()

        def one(i, step):
            tile, feature = piece(i)
            out, step = sums(step)
            for half, result in enumerate(act(*out)):
                store(result, tile, feature + half * HALF + mine)
            return step

        lax.fori_loop(0, pieces, one, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    increase, decrease = sizes["registers"]

    @pl.when(role < WORKERS)
    def _():
        plgpu.set_max_registers(increase, action="increase")
        worker()

    @pl.when(role == FEEDER)
    def _():
        plgpu.set_max_registers(decrease, action="decrease")
        feeder()


def _swiglu(gate, up):
    return [gate * (1 / (1 + jnp.exp2(gate * -LOG2E))) * up]


def _both(*sums):
    return sums


def grouped(x, weights, group_sizes, *, out_dtype, units, interpret=None, width=None):
    """The rows of x times the weights of their groups; with two weights the SwiGLU of both products."""
    (M, D), (X, F) = x.shape, weights[0].shape[:2]
    rows = -(-M // ALIGNED) * ALIGNED
    x = jnp.pad(x, ((0, rows - M), (0, 0)))
    width = width or best_width(M, X, tuning.RAGGED_DOT)
    sizes = tuning.RAGGED_DOT[width]
    slots, depth = sizes["slots"], sizes["depth"]
    kernel = functools.partial(
        _kernel,
        weights=len(weights),
        steps=-(-D // depth),
        blocks=-(-F * len(weights) // (2 * HALF)),
        units=units,
        sizes=sizes,
        act=_swiglu if len(weights) == 2 else _both,
    )
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, F), out_dtype),
        scratch_types=[
            plgpu.SMEM((slots, width, depth), x.dtype, transforms=swizzled(64)),
            plgpu.SMEM((slots, 2 * HALF, depth), weights[0].dtype, transforms=swizzled(64)),
            plgpu.SMEM((WORKERS, width, STORED), out_dtype, transforms=(plgpu.SwizzleTransform(2 * STORED),)),
            plgpu.Barrier(num_arrivals=1 + len(weights), num_barriers=slots),
            plgpu.Barrier(num_arrivals=WORKERS, num_barriers=slots),
        ],
        grid=(units,),
        grid_names=("unit",),
        num_threads=WORKERS + 1,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=128, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(x, *weights, plan(group_sizes, rows=M, width=width))
    return out[:M]
