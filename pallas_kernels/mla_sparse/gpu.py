"""Attention over chosen tokens for Hopper, in Pallas Mosaic GPU.

A block computes 64 heads of a query over a part of its tokens, 64 of which are a tile. Its four warpgroups are those of
mla_decode/gpu.py:
  two scorers   alternate tiles: copy chosen tokens, compute Q K^T and the online softmax, write the weights to shared memory
  left, right   multiply the weights with one half of the latent each; the output accumulates in registers
The weights of a tile overwrite its rotary part, and the output is written through the slot of the last tile. A scorer has a slot
of its own: the copies, scores and weights of one tile overlap the sums of the other. Tokens past a query's count are copied as
zeros. merge.py merges the parts, of which there are several where queries alone leave multiprocessors idle."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8 import GROUP, Fp8
from pallas_kernels.hopper import (
    FOLDED,
    LOG2E,
    LOW,
    ROW,
    accumulated,
    bits,
    fold,
    over,
    raised,
    rescaled,
    swizzled,
    zeros,
)
from pallas_kernels.mla_sparse import codes, gather
from pallas_kernels.mla_sparse.merge import merge

TILE = gather.ROWS  # tokens
BLOCK = 64  # heads
LEFT, RIGHT = 2, 3  # the warpgroups with lower numbers compute scores
WARPGROUPS = 4
SLOTS = 2
REGISTERS = 96, 160  # of a scorer, of a warpgroup for sums
START = 3  # cost of starting a block, in tiles
MOST = 32  # parts, which are merged in registers
COPIED = 8  # the copy engine moves eight rows at a time


def _kernel(
    qc_g, qpe_g, c_g, scale_g, pe_g, slots_g, counts_g, out_g, lse_g,
    q_s, tile_s, scale_s, keep_s, top_s, part_s, q_in, free, weighed, normed, topped, given,
    *, heads, parts, scale, interpret,
):  # fmt: skip
    blocks = -(-heads // BLOCK)
    last_rows = heads - (blocks - 1) * BLOCK
    left = tile_s[0].shape[-1]
    halves = {LEFT: (0, left), RIGHT: (left, tile_s[1].shape[-1])}  # of the latent
    index, role = lax.axis_index("block"), lax.axis_index("role")
    line, which = lax.div(index, jnp.int32(blocks)), lax.rem(index, jnp.int32(blocks))
    query, part = lax.div(line, jnp.int32(parts)), lax.rem(line, jnp.int32(parts))
    factor, packed = q_s[0].dtype, scale_g is not None

    def span():
        """The first tile of this block, how many there are, and the tokens that the query has: a part of none is a tile of none.

        Called again where a value is needed after a loop over tiles: recomputed, it holds no register meanwhile."""
        held = counts_g[query]
        tiles = lax.div(held + (TILE - 1), jnp.int32(TILE))
        each = lax.div(tiles + (parts - 1), jnp.int32(parts))
        start = part * each
        some = start < tiles
        count = jnp.where(some, jnp.minimum(each, tiles - start), 1)
        return jnp.where(some, start, 0), count, jnp.where(some, held, 0)

    def rows_of(do):
        """Calls `do` with the static number of heads of this block."""
        if last_rows == BLOCK:
            do(BLOCK)
        elif blocks == 1:
            do(last_rows)
        else:
            pl.when(which < blocks - 1)(lambda: do(BLOCK))
            pl.when(which == blocks - 1)(lambda: do(last_rows))

    def scores(me):
        to_log2 = scale * LOG2E
        other = 1 - me
        start, count, held = span()
        mine = lax.div(count + (1 - me), jnp.int32(2))

        def queries(rows):
            some, there = pl.ds(which * BLOCK, rows), pl.ds(0, rows)
            sources = [
                *(qc_g.at[query, some, pl.ds(*half)] for half in halves.values()),
                qpe_g.at[query, some],
            ]
            for source, to in zip(sources, q_s, strict=True):
                plgpu.copy_gmem_to_smem(source, to.at[0, there], q_in)

        def tokens(t):
            """The tokens of this query's tile t."""
            at = pl.ds(pl.multiple_of(t * TILE, TILE), TILE)
            return gather.numbers(slots_g.at[query, at], held - t * TILE, c_g.shape[0])

        def zero(k):
            """Unknown to the compiler, which does not see that `held` is not negative.

            Else all addresses in shared memory stay in registers, which spill."""
            return jnp.minimum(held + k, 0)

        def copy(chosen, k):
            """Copies the tokens of this scorer's tile k to its slot, each half as soon as its memory is free."""
            slot = me + zero(k)
            *both, rotary = (part.at[slot] for part in tile_s)

            def vacant(half):
                pl.when(k > 0)(lambda: plgpu.barrier_wait(free[half].at[slot]))

            if packed:
                vacant(0)
                vacant(1)
                codes.fetch(c_g, scale_g, chosen, both, scale_s.at[slot], interpret)
            else:
                for half, first in enumerate((0, left)):
                    vacant(half)
                    gather.fetch(c_g, first, chosen, both[half], interpret)
            gather.fetch(pe_g, 0, chosen, rotary, interpret)

        def arrive(k):
            """Waits for the tokens of tile k; the matrix units see them then."""
            gather.wait(interpret)
            if packed:
                slot = me + zero(k)
                *both, rotary = (part.at[slot] for part in tile_s)
                codes.convert(both, rotary, scale_s.at[slot], interpret)
            plgpu.commit_smem()

        def product(k):
            operands = [(q.at[zero(k)], tile.at[me + zero(k)]) for q, tile in zip(q_s, tile_s, strict=True)]
            if interpret:
                dots = [jnp.dot(q[...], x[...].T, preferred_element_type=jnp.float32) for q, x in operands]
                plgpu.commit_smem()
                return sum(dots)

            def run(acc):
                for q, x in operands:
                    plgpu.wgmma(acc, q, x.transpose((1, 0)))
                return acc[...]

            return pl.run_scoped(run, plgpu.ACC((BLOCK, TILE), jnp.float32))

        def hide(s, t):
            at = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            return jnp.where(at < held - t * TILE, s, -jnp.inf)

        low = plgpu.layout_cast(jnp.full((BLOCK,), LOW, jnp.float32), ROW)

        def weigh(k, carry):
            """Publishes the weights of this scorer's tile k, and copies its next tile."""
            own, total = carry
            number, slot = 2 * k + me, me + zero(k)
            t = start + number
            more = number + 2 < count
            ahead = tokens(jnp.where(more, t + 2, t))  # loaded early, because it comes from global memory
            arrive(k)
            s = product(k)
            s = lax.cond((t + 1) * TILE > held, hide, lambda s, t: s, s, t)
            highest = s.max(axis=1) * to_log2
            pl.when(number > 0)(lambda: plgpu.barrier_wait(topped.at[other]))
            top = lax.cond(number == 0, lambda: low, lambda: plgpu.load(top_s.at[other], layout=ROW))
            higher = raised(top, highest)
            top_s[slot] = higher
            plgpu.barrier_arrive(topped.at[slot])
            keep_s[slot] = jnp.exp2(top - higher)
            w = jnp.exp2(s * to_log2 - over(higher, s.shape))
            tile_s[-1][slot] = w.astype(factor)
            plgpu.commit_smem()
            plgpu.barrier_arrive(weighed.at[slot])
            total = total * over(jnp.exp2(own - higher), total.shape) + fold(w)
            pl.when(more)(lambda: copy(ahead, k + 1))
            return higher, total

        pl.when(me == 0)(lambda: rows_of(queries))
        pl.when(mine > 0)(lambda: copy(tokens(start + me), jnp.int32(0)))
        plgpu.barrier_wait(q_in)
        top, total = lax.fori_loop(0, mine, weigh, (low, zeros((BLOCK, FOLDED), plgpu.Layout.WGMMA)))
        _, count, _ = span()
        # every completion must be observed
        pl.when(lax.rem(count, jnp.int32(2)) == me)(lambda: plgpu.barrier_wait(topped.at[other]))
        total = total.sum(axis=1)
        pl.when(me == 0)(lambda: join(top, total))
        pl.when(me == 1)(lambda: give(top, total))

    def give(top, total):
        """Passes this scorer's part of the maximum and sum to the other."""
        part_s[0] = top
        part_s[1] = total
        plgpu.barrier_arrive(given)

    def join(top, total):
        plgpu.barrier_wait(given)
        others = [plgpu.load(part_s.at[k], layout=ROW) for k in range(2)]
        higher = jnp.maximum(top, others[0])
        total = total * jnp.exp2(top - higher) + others[1] * jnp.exp2(others[0] - higher)
        none = total == 0  # False for NaN, which propagates to both
        keep_s[SLOTS] = jnp.where(none, 0.0, 1.0 / total)
        plgpu.barrier_arrive(normed)
        lse = jnp.where(none, -jnp.inf, higher + jnp.log2(total))
        lse_g[line, which] = lse if parts > 1 else lse * (1 / LOG2E)

    def sums(side):
        first, width = halves[side]
        latent = tile_s[side - LEFT]
        columns = [pl.ds(at, min(128, width - at)) for at in range(0, width, 128)]
        _, count, _ = span()

        def tile(k, acc):
            slot = lax.rem(k, jnp.int32(SLOTS))
            plgpu.barrier_wait(weighed.at[slot])
            acc = rescaled(acc, plgpu.load(keep_s.at[slot], layout=ROW), interpret)
            values = [latent.at[slot, :, some] for some in columns]
            acc = accumulated(acc, tile_s[-1].at[slot], values, interpret)

            @pl.when(k + SLOTS < count)
            def _():
                plgpu.barrier_arrive(free[side - LEFT].at[slot])

            return acc

        acc = lax.fori_loop(
            0, count, tile, [zeros((BLOCK, some.size), plgpu.Layout.WGMMA) for some in columns]
        )
        _, count, _ = span()
        slot = lax.rem(count - 1, jnp.int32(SLOTS))
        plgpu.barrier_wait(normed)
        norm = plgpu.load(keep_s.at[SLOTS], layout=ROW)
        for some, x in zip(columns, acc, strict=True):
            latent[slot, :, some] = bits((x * over(norm, x.shape)).astype(jnp.bfloat16), factor)
        plgpu.commit_smem()

        def write(rows):
            to = out_g.at[line, pl.ds(which * BLOCK, rows), pl.ds(first, width)]
            plgpu.copy_smem_to_gmem(latent.at[slot, pl.ds(0, rows)], to)

        rows_of(write)
        plgpu.wait_smem_to_gmem(0)

    @pl.when(role < LEFT)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="decrease")
        scores(role)

    for side in (LEFT, RIGHT):

        @pl.when(role == side)
        def _(side=side):
            plgpu.set_max_registers(REGISTERS[1], action="increase")
            sums(side)


def _parts(lines, tiles, units):
    """Into how many parts the tokens of a query are divided: as is fastest with full lists, the fewest of those."""

    def cost(parts):
        return -(-lines * parts // units) * (-(-tiles // parts) + START)

    return min(range(1, min(tiles, MOST) + 1), key=cost)


# Jitted, so that all layers of a model are lowered once
@functools.partial(jax.jit, static_argnames=("scale", "units", "interpret"))
def mla_sparse(q_c, q_pe, c_kv, k_pe, slots, counts, *, scale, units, interpret=None):
    """As `mla_sparse` of the package; `interpret` runs the kernel on a CPU."""
    (B, T, N, R), E, K = q_c.shape, q_pe.shape[-1], slots.shape[-1]
    q_c, q_pe = (jnp.pad(x.reshape(B * T, N, -1), ((0, 0), (0, -N % COPIED), (0, 0))) for x in (q_c, q_pe))
    slots = jnp.pad(slots.reshape(B * T, K), ((0, 0), (0, -K % TILE))).astype(jnp.int32)
    counts = jnp.clip(counts.reshape(B * T), 0, K).astype(jnp.int32)
    heads, packed = q_c.shape[1], isinstance(c_kv, Fp8)
    factor = jnp.float16 if packed else q_c.dtype
    latents, numbers = c_kv if packed else (c_kv, None)
    pool = [None if x is None else x.reshape(-1, x.shape[-1]) for x in (latents, numbers, k_pe)]
    blocks = -(-heads // BLOCK)
    parts = _parts(B * T * blocks, slots.shape[1] // TILE, units)
    left = -(-R // 128) * 64
    widths = left, R - left, E
    smem, f32 = functools.partial(plgpu.SMEM, transforms=swizzled(gather.SPAN)), jnp.float32
    out, lse = plgpu.kernel(
        functools.partial(_kernel, heads=heads, parts=parts, scale=scale, interpret=interpret),
        out_type=(
            jax.ShapeDtypeStruct((B * T * parts, heads, R), factor),
            jax.ShapeDtypeStruct((B * T * parts, blocks, BLOCK), f32),
        ),
        scratch_types=[
            [smem((1, BLOCK, width), factor) for width in widths],
            [smem((SLOTS, TILE, width), factor) for width in widths],
            plgpu.SMEM((SLOTS, TILE, R // GROUP), f32) if packed else None,
            plgpu.SMEM((SLOTS + 1, BLOCK), f32),
            plgpu.SMEM((SLOTS, BLOCK), f32),
            plgpu.SMEM((2, BLOCK), f32),
            plgpu.Barrier(num_arrivals=len(widths)),
            [plgpu.Barrier(num_barriers=SLOTS)] * 2,
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(),
        ],
        grid=(B * T * parts * blocks,),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=128, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )(q_c.astype(factor), q_pe.astype(factor), *pool, slots, counts)
    out, lse = bits(out, q_c.dtype), lse.reshape(B * T, parts, -1)
    if parts > 1:
        out, lse = merge(out.reshape(B * T, parts, heads, R), lse, interpret)
    return out.reshape(B, T, heads, R)[:, :, :N], lse.reshape(B, T, -1)[:, :, :N]
