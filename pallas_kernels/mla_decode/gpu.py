"""Paged MLA decode for Hopper, in Pallas Mosaic GPU. With at most 32 queries per sequence gpu_small_batch.py replaces `_partial`.

A block computes 64 query rows (tokens times heads) and loops over tiles of 64 cached tokens. It has four warpgroups:
  two scorers   alternate tiles: issue copies, compute Q K^T and the online softmax, write the weights to shared memory
  left, right   multiply the weights with one half of the latent each; the output accumulates in registers
The weights of a tile overwrite its rotary part, which is no longer needed, and the output is written through the slot of the
last tile: neither needs shared memory of its own. Where row blocks come in pairs, a cluster of two blocks loads each tile once.
A second kernel combines the pieces of sequences that the schedule split.

Shared memory holds Q and two tiles, one per scorer, so the time that a tile occupies its slot limits the speed: 1,100 cycles
until the tile has arrived, 1,400 for its scores (64 x 64 x 16 take 40 cycles: both operands come from shared memory at its full
rate), 1,200 for the softmax, 1,500 until its sums are done. The next limit is power: 700 W lower an H200's clock from 1.98 to
about 1.6 GHz. On an H200 with 128 heads: 134 us for 64 sequences of 4,096 tokens, 266 for 128 of 4,096, 1,005 for 128 of
16,384. Tried without gain:
- one scorer that makes the weights of two tiles at a time: 139, 287 and 1,063 us
- parts of a tile freed and reloaded in quarters: 1 % faster in batches, 14 % slower for one sequence
- sums rescaled ahead of the weights: ptxas moves the rescaling behind the wait for them
- two workers that each score every other tile and sum half of the latent (as FlashMLA does): 10 % slower, sums wait for scores
- tiles prefetched into the L2 two tiles ahead, by the copy engine or by plain loads
- no cluster, each block loads its own tiles: the same, except at batch 1, which is 4 % slower
- all or half of Q in registers, for a third slot: a product of 64 x 64 x 16 then takes 64 cycles
- tiles of 32 tokens in four slots
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.fp8 import Fp8
from pallas_kernels.hopper import (
    FOLDED,
    LOG2E,
    LOW,
    ROW,
    accumulated,
    clean,
    fold,
    over,
    raised,
    rescaled,
    swizzled,
    zeros,
)
from pallas_kernels.mla_decode import gpu_small_batch
from pallas_kernels.mla_decode.schedule import BLOCK, TILE, groups

LEFT, RIGHT = 2, 3  # the warpgroups with lower numbers compute scores
WARPGROUPS = 4
SLOTS = 2


def _partial(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, shares, *, scale, heads, tokens, knobs, interpret):
    """q_c `[B M R]` -> output of unsplit rows `[B M R]` and of pieces of split rows `[2*units, M per group, R]`, with LSEs."""
    B, M, R = q_c.shape
    E = q_pe.shape[-1]
    G, Z, _ = c_kv.shape
    size, per_row = groups(M)
    units = shares.shape[0]
    registers = knobs["registers"]
    chunk = min(Z, TILE)  # rows of a tile copied at a time
    per_tile = TILE // chunk
    last_rows = M - (size * per_row - 1) * BLOCK  # rows of the last block
    left = -(-R // 128) * 64
    halves = {LEFT: (0, left), RIGHT: (left, R - left)}  # of the latent
    shared_pe = E == TILE  # then the weights overwrite the rotary part
    dtype = q_c.dtype
    parts = [*halves.values()]
    widths = [*(width for _, width in parts), E]
    collective = {"collective_axes": "block"} if size == 2 else {}

    def kernel(qc_g, qpe_g, c_g, pe_g, table, lens, shares_g, o_g, lse_g, po_g, plse_g, q_s, tile_s, w_s, keep_s,
               top_s, part_s, q_in, tile_in, free, q_free, weighed, normed, norm_free, topped, given, joined):  # fmt: skip
        unit = lax.axis_index("unit")
        block = lax.axis_index("block") if size == 2 else jnp.int32(0)
        role = lax.axis_index("role")
        row0, row1 = shares_g[unit, 0], shares_g[unit, 2]
        w_s = tile_s[-1] if w_s is None else w_s

        def item(i):
            """Batch row, row block, length and tiles of piece i; whether it is an unsplit row, and else its slot.

            Called again if a value is needed after a loop over tiles: recomputed, it holds no register meanwhile."""
            row0, tile0, row1, tile1 = (shares_g[unit, k] for k in range(4))
            b, g = (
                (i, jnp.int32(0))
                if per_row == 1
                else (lax.div(i, jnp.int32(per_row)), lax.rem(i, jnp.int32(per_row)))
            )
            n = lens[b]
            tiles = jnp.maximum(lax.div(n + (TILE - 1), jnp.int32(TILE)), 1)
            start = jnp.where(i == row0, tile0, 0)
            stop = jnp.where(i == row1, tile1, tiles)
            whole = (start == 0) & (stop == tiles)
            return b, g * size + block, n, start, stop, whole, 2 * unit + jnp.where(i == row0, 0, 1)

        def items(piece):
            """Runs `piece` over the share, carrying the number of tiles that went through the ring."""
            return lax.fori_loop(row0, row1 + 1, piece, jnp.int32(0))

        def unknown_zero(step):
            """Zero, unknown to the compiler."""
            return jnp.minimum(step, 0)

        def slot_of(step):
            """The same for all tiles of a scorer, whose addresses would stay in registers too."""
            return (step & 1) + unknown_zero(step)

        def rows_of(which, do):
            """Calls `do` with the static number of rows of row block `which`."""
            if last_rows == BLOCK:
                do(BLOCK)
            elif size * per_row == 1:
                do(last_rows)
            else:
                pl.when(which < size * per_row - 1)(lambda: do(BLOCK))
                pl.when(which == size * per_row - 1)(lambda: do(last_rows))

        def pages(b, n, t):
            """The pages of tile t of batch row b, and their first row."""
            top = jnp.maximum(lax.div(n - 1, jnp.int32(Z)), 0)  # the last page that holds a token
            places = [jnp.minimum(lax.div(t * TILE, jnp.int32(Z)) + j, top) for j in range(per_tile)]
            base = pl.multiple_of(lax.rem(t * TILE, jnp.int32(Z)), TILE) if Z > TILE else 0
            return [jnp.clip(table[b, place], 0, G - 1) for place in places], base

        def order(found, base, step):
            """Copies a tile into the slot of `step`, each part as soon as its memory is free."""
            slot = slot_of(step)
            rows = [(page, pl.ds(base, chunk)) for page in found]
            halves_g = [[c_g.at[*some, pl.ds(*part)] for some in rows] for part in parts]
            for k, sources in enumerate([*halves_g, [pe_g.at[some] for some in rows]]):
                if k < len(parts):  # the rotary part is free when both halves are
                    pl.when(step >= SLOTS)(functools.partial(plgpu.barrier_wait, free[k].at[slot]))
                arrived = tile_in[min(k, len(parts) - 1)].at[slot]
                for j, source in enumerate(sources):
                    there = tile_s[k].at[slot, pl.ds(j * chunk, chunk)]
                    plgpu.copy_gmem_to_smem(source, there, arrived, **collective)

        def scores(me):
            to_log2 = scale * LOG2E
            other = 1 - me

            def operands(step):
                """The parts of Q and of the tile at `step`, each once it has arrived."""
                # Q is indexed by a zero unknown to the compiler: else all addresses in it stay in registers, which spill
                slot, zero = slot_of(step), unknown_zero(step)
                for k, (q, tile) in enumerate(zip(q_s, tile_s, strict=True)):
                    if k < len(parts):  # the rotary part comes with the right half
                        plgpu.barrier_wait(tile_in[k].at[slot])
                    yield q.at[zero], tile.at[slot]

            def product(step):
                if interpret:
                    dots = [
                        jnp.dot(q[...], part[...].T, preferred_element_type=jnp.float32)
                        for q, part in operands(step)
                    ]
                    plgpu.commit_smem()
                    return sum(dots)

                def run(acc):
                    for q, part in operands(step):
                        plgpu.wgmma(acc, q, part.transpose((1, 0)))
                    return acc[...]

                return pl.run_scoped(run, plgpu.ACC((BLOCK, TILE), jnp.float32))

            def piece(i, step):
                b, which, n, start, stop, _, _ = item(i)
                first = start + ((step + me) & 1)  # of this warpgroup's tiles
                clear = n - (tokens - 1)  # every query attends to tokens before
                low = plgpu.layout_cast(jnp.full((BLOCK,), LOW, jnp.float32), ROW)

                def queries(count):
                    rows, there = pl.ds(which * BLOCK, count), pl.ds(0, count)
                    sources = [*(qc_g.at[b, rows, pl.ds(*part)] for part in parts), qpe_g.at[b, rows]]
                    for source, to in zip(sources, q_s, strict=True):
                        plgpu.copy_gmem_to_smem(source, to.at[0, there], q_in)

                @pl.when(me == 0)
                def _():
                    pl.when(i > row0)(lambda: plgpu.barrier_wait(q_free))
                    rows_of(which, queries)

                def hide(s, t):
                    at = (
                        plgpu.broadcasted_iota(jnp.int32, (BLOCK, TILE), 1, layout=plgpu.Layout.WGMMA)
                        + t * TILE
                    )
                    limit = clear
                    if tokens > 1:
                        row = plgpu.broadcasted_iota(jnp.int32, (BLOCK, TILE), 0, layout=plgpu.Layout.WGMMA)
                        limit = clear + jnp.minimum(
                            lax.div(row + which * BLOCK, jnp.int32(heads)), tokens - 1
                        )
                    return jnp.where(at < limit, s, -jnp.inf)

                def weigh(k, carry):
                    """Publishes the weights of this warpgroup's tile k, and issues the copy of its next tile."""
                    own, total = carry
                    t = first + 2 * k
                    now = step + (t - start)
                    slot = slot_of(now)
                    ahead = pages(b, n, t + 2)  # prefetched, because it comes from global memory
                    s = product(now)
                    s = lax.cond((t + 1) * TILE > clear, hide, lambda s, t: s, s, t)
                    highest = s.max(axis=1) * to_log2
                    pl.when(now > 0)(lambda: plgpu.barrier_wait(topped.at[other]))
                    top = lax.cond(t == start, lambda: low, lambda: plgpu.load(top_s.at[other], layout=ROW))
                    higher = raised(top, highest)
                    top_s[me] = higher
                    plgpu.barrier_arrive(topped.at[me])
                    keep_s[slot] = jnp.exp2(top - higher)
                    w = jnp.exp2(s * to_log2 - over(higher, s.shape))
                    w_s[slot] = w.astype(dtype)
                    pl.when((t + 1) * TILE > n)(lambda: empty(slot, n - t * TILE))
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(weighed.at[slot])
                    total = total * over(jnp.exp2(own - higher), total.shape) + fold(w)
                    pl.when(t + 2 < stop)(lambda: order(*ahead, now + 2))
                    return higher, total

                def empty(slot, held):
                    for latent, _ in zip(tile_s, parts, strict=False):
                        clean(latent, slot, held)

                pl.when(first < stop)(lambda: order(*pages(b, n, first), step + (first - start)))
                plgpu.barrier_wait(q_in)
                mine = lax.div(jnp.maximum(stop - first + 1, 0), jnp.int32(2))
                top, total = lax.fori_loop(0, mine, weigh, (low, zeros((BLOCK, FOLDED), plgpu.Layout.WGMMA)))
                total = total.sum(axis=1)
                pl.when(me == 0)(lambda: join(i, top, total))
                pl.when(me == 1)(lambda: give(i, top, total))
                return step + (stop - start)

            def give(i, top, total):
                """Passes this warpgroup's part of a row's maximum and sum to the other."""
                plgpu.barrier_arrive(q_free)
                pl.when(i > row0)(lambda: plgpu.barrier_wait(joined))
                part_s[0] = top
                part_s[1] = total
                plgpu.barrier_arrive(given)

            def join(i, top, total):
                plgpu.barrier_wait(given)
                others = [plgpu.load(part_s.at[k], layout=ROW) for k in range(2)]
                plgpu.barrier_arrive(joined)
                higher = jnp.maximum(top, others[0])
                total = total * jnp.exp2(top - higher) + others[1] * jnp.exp2(others[0] - higher)
                none = total == 0  # False for NaN, which propagates to both
                pl.when(i > row0)(lambda: plgpu.barrier_wait(norm_free))
                keep_s[SLOTS] = jnp.where(none, 0.0, 1.0 / total)
                plgpu.barrier_arrive(normed)
                lse = jnp.where(none, -jnp.inf, higher + jnp.log2(total))
                b, which, _, _, _, whole, place = item(i)

                @pl.when(whole)
                def _():
                    lse_g[b, which] = lse * (1 / LOG2E)

                @pl.when(jnp.logical_not(whole))
                def _():
                    plse_g[place, block] = lse

            step = items(piece)
            # every completion must be observed
            pl.when((step > 0) & ((step & 1) == me))(lambda: plgpu.barrier_wait(topped.at[other]))

            @pl.when(step > me)
            def _():
                for barrier in free:
                    plgpu.barrier_wait(barrier.at[me])

            for number, barriers in enumerate(((q_free, norm_free), (joined,))):

                @pl.when((row1 >= row0) & (me == number))
                def _(barriers=barriers):
                    for barrier in barriers:
                        plgpu.barrier_wait(barrier)

        def sums(side):
            first, width = halves[side]
            latent = tile_s[side - LEFT]
            columns = [pl.ds(at, min(128, width - at)) for at in range(0, width, 128)]

            def piece(i, step):
                _, _, _, start, stop, _, _ = item(i)

                def tile(t, carry):
                    step, acc = carry
                    slot = slot_of(step)
                    plgpu.barrier_wait(weighed.at[slot])
                    acc = rescaled(acc, plgpu.load(keep_s.at[slot], layout=ROW), interpret)
                    acc = accumulated(
                        acc, w_s.at[slot], [latent.at[slot, :, some] for some in columns], interpret
                    )

                    @pl.when(t < stop - start - 1)
                    def _():
                        plgpu.barrier_arrive(free[side - LEFT].at[slot])

                    return step + 1, acc

                zero = [zeros((BLOCK, some.size), plgpu.Layout.WGMMA) for some in columns]
                step, acc = lax.fori_loop(0, stop - start, tile, (step, zero))
                b, which, _, _, _, whole, place = item(i)
                slot = slot_of(step - 1)
                plgpu.barrier_wait(normed)
                norm = plgpu.load(keep_s.at[SLOTS], layout=ROW)
                for some, x in zip(columns, acc, strict=True):
                    latent[slot, :, some] = (x * over(norm, x.shape)).astype(dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(norm_free)

                def write(count):
                    out = latent.at[slot, pl.ds(0, count)]
                    cols = pl.ds(first, width)

                    @pl.when(whole)
                    def _():
                        plgpu.copy_smem_to_gmem(out, o_g.at[b, pl.ds(which * BLOCK, count), cols])

                    @pl.when(jnp.logical_not(whole))
                    def _():
                        plgpu.copy_smem_to_gmem(out, po_g.at[place, pl.ds(block * BLOCK, count), cols])

                rows_of(which, write)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(free[side - LEFT].at[slot])
                return step

            items(piece)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(role < LEFT)
        def _():
            plgpu.set_max_registers(registers[0], action="decrease")
            scores(role)

        for side in (LEFT, RIGHT):

            @pl.when(role == side)
            def _(side=side):
                plgpu.set_max_registers(registers[1], action="increase")
                sums(side)

    layouts = [*(swizzled(64) for _ in parts), swizzled(E)]
    free = plgpu.Barrier(num_barriers=SLOTS)
    if size == 2:
        free = plgpu.ClusterBarrier(collective_axes=("block",), num_barriers=SLOTS)
    part_rows = BLOCK * size if per_row * size > 1 else last_rows
    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, M, R), dtype),
            f32((B, size * per_row, BLOCK)),
            jax.ShapeDtypeStruct((2 * units, part_rows, R), dtype),
            f32((2 * units, size, BLOCK)),
        ),
        scratch_types=[
            [
                plgpu.SMEM((1, BLOCK, w), dtype, transforms=layout)
                for w, layout in zip(widths, layouts, strict=True)
            ],
            [
                plgpu.SMEM((SLOTS, TILE, w), dtype, transforms=layout)
                for w, layout in zip(widths, layouts, strict=True)
            ],
            None if shared_pe else plgpu.SMEM((SLOTS, BLOCK, TILE), dtype, transforms=swizzled(64)),
            plgpu.SMEM((SLOTS + 1, BLOCK), jnp.float32),
            plgpu.SMEM((2, BLOCK), jnp.float32),
            plgpu.SMEM((2, BLOCK), jnp.float32),
            plgpu.Barrier(num_arrivals=len(widths)),
            [plgpu.Barrier(num_arrivals=per_tile * copies, num_barriers=SLOTS) for copies in (1, 2)],
            [free, free],
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_barriers=2),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
        grid=(units,),
        grid_names=("unit",),
        cluster=(2,) if size == 2 else (),
        cluster_names=("block",) if size == 2 else (),
        num_threads=WARPGROUPS,
        thread_name="role",
        # no automatic barriers (2 % faster): only `clean` reads and writes the same memory, and has its own
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=128, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, shares)


def _combine(partial_out, partial_lse, pieces, out, lse, *, units, interpret):
    """Combines the pieces of split rows by their LSEs, and overwrites these rows of `out` and `lse`."""
    B, M, R = out.shape
    size, per_row = groups(M)
    rows = min(M, size * BLOCK)  # of a group
    ways = WARPGROUPS if units >= 8 * B * per_row else 1  # warpgroups that share the pieces of one row
    batch = 8 if ways > 1 else 4  # pieces loaded at a time
    turns = 1 if ways > 1 else 4  # rows per warpgroup, loaded together
    layout = plgpu.Layout.WG_STRIDED((R,), R // 128)

    def kernel(po_g, plse_g, pieces_g, o_g, lse_g, acc_s, top_s, total_s, done):
        if not interpret:
            plgpu.griddepcontrol_wait()  # launched while the previous kernel still runs
        me = lax.axis_index("wg")
        i, first, count = (pieces_g[lax.axis_index("split"), k] for k in range(3))
        b = lax.div(i, jnp.int32(per_row))
        g = lax.rem(i, jnp.int32(per_row))
        base = (lax.axis_index("row") * (WARPGROUPS // ways) + lax.div(me, jnp.int32(ways))) * turns
        limit = jnp.minimum(rows, M - g * (size * BLOCK))
        locals_ = [jnp.minimum(base + k, limit - 1) for k in range(turns)]  # past the end: the last one again
        way = lax.rem(me, jnp.int32(ways))

        def splat(x):
            return lax.broadcast_in_dim(x, (R,), ())

        def some(step, carry):
            numbers = [step * (ways * batch) + way * batch + j for j in range(batch)]
            slots = [
                jnp.where(p == 0, first, 2 * (lax.div(first, jnp.int32(2)) + jnp.minimum(p, count - 1)))
                for p in numbers
            ]
            found = []
            for row in locals_:
                lses = [
                    plse_g[slot, lax.div(row, jnp.int32(BLOCK)), lax.rem(row, jnp.int32(BLOCK))]
                    for slot in slots
                ]
                found.append((lses, [plgpu.load(po_g.at[slot, row], layout=layout) for slot in slots]))
            return [join(numbers, *x, *old) for x, old in zip(found, carry, strict=True)]

        def join(numbers, lses, outs, top, total, acc):
            lses = [jnp.where(p < count, x, -jnp.inf) for p, x in zip(numbers, lses, strict=True)]
            higher = functools.reduce(jnp.maximum, lses, top)
            keep = jnp.exp2(top - higher)
            acc, total = acc * splat(keep), total * keep
            for x, out in zip(lses, outs, strict=True):
                weight = jnp.exp2(x - higher)
                acc = acc + out.astype(jnp.float32) * splat(weight)
                total = total + weight
            return higher, total, acc

        def finish(row, top, total, acc):
            none, at = total == 0, g * (size * BLOCK) + row
            o_g[b, at] = (acc * splat(jnp.where(none, 0.0, 1 / total))).astype(o_g.dtype)
            lse_g[b, lax.div(at, jnp.int32(BLOCK)), lax.rem(at, jnp.int32(BLOCK))] = jnp.where(
                none, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E)
            )

        @pl.when((count > 1) & (base < limit))
        def _():
            zero = plgpu.layout_cast(jnp.zeros((R,), jnp.float32), layout)
            steps = lax.div(count + (ways * batch - 1), jnp.int32(ways * batch))
            carry = lax.fori_loop(0, steps, some, [(jnp.float32(LOW), jnp.float32(0), zero) for _ in locals_])
            if ways == 1:
                for row, result in zip(locals_, carry, strict=True):
                    finish(row, *result)
                return
            [(top, total, acc)] = carry
            acc_s[me] = acc
            top_s[me] = plgpu.layout_cast(
                lax.broadcast_in_dim(top, (128,), ()), plgpu.Layout.WG_STRIDED((128,), 1)
            )
            total_s[me] = plgpu.layout_cast(
                lax.broadcast_in_dim(total, (128,), ()), plgpu.Layout.WG_STRIDED((128,), 1)
            )
            plgpu.barrier_arrive(done)

            @pl.when(me == 0)
            def _():
                plgpu.barrier_wait(done)
                tops = [top_s[k, 0] for k in range(ways)]
                higher = functools.reduce(jnp.maximum, tops)
                total, acc = jnp.float32(0), zero
                for k in range(ways):
                    weight = jnp.exp2(tops[k] - higher)
                    total = total + total_s[k, 0] * weight
                    acc = acc + plgpu.load(acc_s.at[k], layout=layout) * splat(weight)
                finish(locals_[0], higher, total, acc)

    out, lse = jax.new_ref(out), jax.new_ref(lse)
    plgpu.kernel(
        kernel,
        out_type=(),
        scratch_types=[
            plgpu.SMEM((WARPGROUPS, R), jnp.float32),
            plgpu.SMEM((WARPGROUPS, 128), jnp.float32),
            plgpu.SMEM((WARPGROUPS, 128), jnp.float32),
            plgpu.Barrier(num_arrivals=WARPGROUPS),
        ],
        grid=(pieces.shape[0], -(-rows * ways // (WARPGROUPS * turns))),
        grid_names=("split", "row"),
        num_threads=WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(partial_out, partial_lse, pieces, out, lse)
    return jax.freeze(out), jax.freeze(lse)


# Jitted, so that all layers of a model are lowered once
@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def mla_decode(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, *, scale, schedule, interpret=None):
    """As `mla_decode` of the package; `interpret` runs the kernels on a CPU."""
    B, T, N, R = q_c.shape
    M = T * N
    q_c, q_pe = (x.reshape(B, M, -1) for x in (q_c, q_pe))
    page_table, seq_lens = (x.astype(jnp.int32) for x in (page_table, seq_lens))
    if M % 8:  # the copy engine moves eight rows at a time
        q_c, q_pe = (jnp.pad(x, ((0, 0), (0, -M % 8), (0, 0))) for x in (q_c, q_pe))
    partial, table = _partial, tuning.MLA_DECODE
    if M <= tuning.MLA_DECODE_MOST:
        partial = gpu_small_batch.partial
        table = tuning.MLA_DECODE_FEW_FP8 if isinstance(c_kv, Fp8) else tuning.MLA_DECODE_FEW
    shares = schedule.shares
    out, lse, partial_out, partial_lse = partial(
        q_c, q_pe, c_kv, k_pe, page_table, seq_lens, shares,
        scale=scale, heads=N, tokens=T, knobs=table[R], interpret=interpret,
    )  # fmt: skip
    out, lse = _combine(
        partial_out, partial_lse, schedule.pieces, out, lse, units=shares.shape[0], interpret=interpret
    )
    return out[:, :M].reshape(B, T, N, R), lse.reshape(B, -1)[:, :M].reshape(B, T, N)
