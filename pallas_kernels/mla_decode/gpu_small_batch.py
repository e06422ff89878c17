"""Paged MLA decode for Hopper with few queries per sequence (at most 32 tokens times heads), where reading the cache dominates.

A matrix unit multiplies 64 rows at a time, so the cached tokens are the rows and the queries the columns: no row is padding. A
block loops over tiles of 64 cached tokens. It has three warpgroups:
  two workers   alternate tiles and compute all of a tile: scores K Q^T, softmax down the columns, weights to shared memory, sums
                V^T P^T of the full latent in registers. The softmax of one overlaps the products of the other
  feeder        issues copies into a ring per worker. A ring slot is a part of a tile, freed as soon as its sums are done (codes:
                as soon as they are read). Copies run ahead into the next sequences; each of its four warps fills its own slots
At the end of a sequence the workers exchange halves of their sums; each combines and writes one half. The exchanged sums, and
then the output, use the memory of Q, which the same worker reloads afterwards: the feeder never waits for the end of a
sequence.

An E4M3 latent goes through the ring as it is. With up to 16 queries it stays E4M3 in shared memory: a worker converts codes in
registers, which the matrix units accept as the left operand of either product (gpu_fp8_registers.py), once for the scores and
once for the sums. A scale belongs to a token and 128 columns, so scales multiply the scores of those columns and, per 128
columns, the weights. 128 sequences of 16,384 tokens take 377 to 392 us on an H200 (bf16: 566). More queries leave no registers
for that (32 queries: 961 us, with spills), so their codes are converted in shared memory: a worker converts a part to float16,
scaled, and frees it while the product of the previous part runs. 32 queries take 556 to 566 us (bf16: 581 to 590).

The copies alone take 540 us for those sequences in bf16, for any shape of copies and with 128 KiB or more in flight, on 120
multiprocessors as on 132. Tried without gain:
- both workers at every tile, each half of its columns: 13 % faster for one sequence of 4,096, 4 % slower for one of 16,384, the
  same in batches, and with E4M3 there 17 to 20 % slower
- sequences cut into equal pieces, one per share, so that no share begins two: the same
- up to 16 queries of E4M3 converted in shared memory: 468 us by each worker for itself, 491 by one more warpgroup per worker,
  505 by one more for both
- parts of 64 columns in registers, the codes of the next part loaded before those of this part are converted: 377 us, and 60.3
  instead of 62.5 us for 64 sequences of 4,096, for a second way to walk through a tile
- programmatic dependent launch (the kernel starts before the previous one ends): the same, or 1 % slower
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu

from pallas_kernels.fp8 import GROUP, Fp8
from pallas_kernels.hopper import LOG2E, LOW, ROW, bits, clean, over, swizzled, zeros
from pallas_kernels.mla_decode import gpu_fp8_registers as fp8
from pallas_kernels.mla_decode.schedule import TILE

WORKERS = 2
FEEDER = WORKERS
WARPS = 4  # of a warpgroup
RAISED = 128.0  # factor of weights times scales, so that small products keep their digits in float16
DIRECT = 16  # most queries that leave registers for codes
COLUMN = plgpu.Layout.WGMMA.reduce(0)
TURNED = plgpu.Layout.WGMMA_TRANSPOSED


class Ring(NamedTuple):
    """Slots in shared memory that the feeder fills and the workers free, `size` per worker."""

    slots: Any
    arrived: Any
    free: Any
    first: int  # slots of the previous rings
    size: int

    def at(self, me, use):
        """The slot of item `use` in worker `me`'s part of the ring."""
        return me * self.size + lax.rem(use, jnp.int32(self.size))


def _under(x, shape):
    """A number per column, broadcast to every row."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [1]), plgpu.Layout.WGMMA)


def _fold(x, how, scratch, interpret):
    """The maximum or the sum of every column, with a scratch per warpgroup, which `x.max` does not provide."""
    if interpret:
        return x.max(axis=0) if how == "max" else x.sum(axis=0)
    out = plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=COLUMN)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=out)
    def reduced(_, x, scratch):
        return x.reduce(how, 0, scratch)

    return reduced(x, scratch)


def _scales(ref, which, groups, layout, interpret):
    """Column `which` of `ref` as rows of `groups`; Pallas does not load with such a stride itself."""
    rows = ref.shape[0] // groups
    if interpret:
        return ref[...].reshape(rows, groups)[:, which]
    out = plgpu.ShapeDtypeStruct((rows,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=out)
    def strided(_, ref):
        column = mgpu.memref_slice(mgpu.memref_reshape(ref, (rows, groups)), (slice(None), which))
        return mgpu.FragmentedArray.load_untiled(column, layout=layout.to_mgpu(), optimized=False)

    return strided(ref)


def _store(ref, x, dtype=None):
    """Stores `x` in `dtype` (default: the ref's own) transposed in `ref`."""
    x = plgpu.layout_cast(x.astype(dtype or ref.dtype), TURNED)
    ref.transpose((1, 0))[...] = bits(x, ref.dtype)


def _load(ref, dtype):
    """`ref`, which holds numbers of `dtype`, transposed, in float32."""
    x = plgpu.load(ref.transpose((1, 0)), layout=TURNED)
    return bits(plgpu.layout_cast(x, plgpu.Layout.WGMMA), dtype).astype(jnp.float32)


def partial(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, shares, *, scale, heads, tokens, knobs, interpret):
    """q_c `[B M R]` -> output of unsplit rows `[B M R]` and of the pieces of split rows `[2*units M R]`, with LSEs."""
    B, M, R = q_c.shape
    E = q_pe.shape[-1]
    packed = isinstance(c_kv, Fp8)
    codes, scales = c_kv if packed else (c_kv, None)
    G, Z, _ = codes.shape
    groups = R // GROUP
    units = shares.shape[0]
    width = knobs["width"]
    parts = R // width
    half = parts // WORKERS
    direct = packed and M <= DIRECT
    size = knobs["slots"][M // 8 - 1]
    chunk = min(Z, TILE)  # rows of a tile copied at a time
    per_tile = TILE // chunk
    columns = [pl.ds(k * width, width) for k in range(parts)]
    dtype = q_pe.dtype  # of the output; products use `factor`
    factor = jnp.float16 if packed else dtype
    q_c = fp8.shuffled(q_c.astype(factor), interpret) if direct else q_c.astype(factor)
    # a page's scales in one row, so that any multiple of four can be copied
    caches = [codes, k_pe, *([scales.reshape(G, Z * groups)] if packed else [])]
    sizes = [size, max(size // parts, 1), min(size - 1, 2)]

    def kernel(qc_g, qpe_g, *refs):
        caches_g, (table, lens, shares_g, o_g, lse_g, po_g, plse_g, *scratch) = (
            refs[: len(caches)],
            refs[len(caches) :],
        )
        qc_s, qpe_s, rings, wide_s, w_s, scratch_s, q_in, met = scratch
        rings = [Ring(*ring, WORKERS * sum(sizes[:k]), sizes[k]) for k, ring in enumerate(rings)]
        latent, rope, scale_s = [*rings, None][:3]
        unit = lax.axis_index("unit")
        role = lax.axis_index("role")
        row0, row1 = shares_g[unit, 0], shares_g[unit, 2]

        def item(b):
            """Length and tiles of the piece in batch row b; whether it is an unsplit row, and else its slot.

            Called again if a value is needed after a loop over tiles: recomputed, it holds no register meanwhile."""
            row0, tile0, row1, tile1 = (shares_g[unit, k] for k in range(4))
            n = lens[b]
            tiles = jnp.maximum(lax.div(n + (TILE - 1), jnp.int32(TILE)), 1)
            start = jnp.where(b == row0, tile0, 0)
            stop = jnp.where(b == row1, tile1, tiles)
            return n, start, stop, (start == 0) & (stop == tiles), 2 * unit + jnp.where(b == row0, 0, 1)

        def feeder():
            """Issues copies per warp: a copy then takes the arrival of 32 threads, not 128, and four run at a time."""
            warp = lax.axis_index("warp")

            def mine(do, ring, me, use):
                """Calls `do` with the slot if it is this warp's."""
                at = ring.at(me, use)
                pl.when(lax.rem(at + ring.first, jnp.int32(WARPS)) == warp)(lambda: do(at))

            def copy(sources, ring, me, use):
                def order(at):
                    pl.when(use >= ring.size)(lambda: plgpu.barrier_wait(ring.free.at[at]))
                    for j, source in enumerate(sources):
                        count = source.shape[0]
                        plgpu.copy_gmem_to_smem(
                            source, ring.slots.at[at, pl.ds(j * count, count)], ring.arrived.at[at]
                        )

                mine(order, ring, me, use)

            def piece(b, step):
                n, start, stop, _, _ = item(b)
                top = jnp.maximum(lax.div(n - 1, jnp.int32(Z)), 0)  # the last page that holds a token

                def tile(t, step):
                    me = lax.rem(step, jnp.int32(WORKERS))
                    turn = lax.div(step, jnp.int32(WORKERS))
                    base = lax.rem(t, jnp.int32(Z // TILE)) * TILE if Z > TILE else 0
                    places = [jnp.minimum(lax.div(t * TILE, jnp.int32(Z)) + j, top) for j in range(per_tile)]
                    pages = [jnp.clip(table[b, place], 0, G - 1) for place in places]
                    rows = pl.ds(base, chunk)
                    c_g, pe_g, *scale_g = caches_g
                    if packed:
                        flat = pl.ds(base * groups, chunk * groups)
                        copy([scale_g[0].at[page, flat] for page in pages], scale_s, me, turn)
                    for k, some in enumerate(columns):
                        copy([c_g.at[page, rows, some] for page in pages], latent, me, turn * parts + k)
                    copy([pe_g.at[page, rows] for page in pages], rope, me, turn)
                    return step + 1

                return lax.fori_loop(start, stop, tile, step)

            steps = lax.fori_loop(row0, row1 + 1, piece, jnp.int32(0))
            for me in range(WORKERS):  # every completion must be observed
                turns = lax.div(steps + (WORKERS - 1 - me), jnp.int32(WORKERS))
                for ring, uses in zip(rings, (turns * parts, turns, turns), strict=False):

                    def drain(use, _, ring=ring, me=me):
                        mine(lambda at: plgpu.barrier_wait(ring.free.at[at]), ring, me, use)
                        return ()

                    lax.fori_loop(jnp.maximum(uses - ring.size, 0), uses, drain, ())

        def queries(b, me):
            """Copies worker `me`'s half of the queries of row b."""
            for k in range(me * half, (me + 1) * half):
                plgpu.copy_gmem_to_smem(qc_g.at[b, pl.ds(0, M), columns[k]], qc_s.at[k], q_in)
            if me == 0:
                plgpu.copy_gmem_to_smem(qpe_g.at[b], qpe_s, q_in)

        def each(do):
            """Calls `do` with the number of this worker as a Python integer."""
            for me in range(WORKERS):
                pl.when(role == me)(functools.partial(do, me))

        tile_s = wide_s if packed and not direct else latent.slots

        def zero(turn):
            """Known at run time only: else every constant address stays in registers, which spill."""
            return jnp.minimum(turn, 0)

        def weights_at(turn, k):
            """The position in `w_s` of the weights for part k of this worker's tile."""
            return w_s.at[(role + zero(turn), k * width // GROUP) if direct else (role, 0)]

        def place(turn, k):
            """The slot in `tile_s` of part k of this worker's tile number `turn`."""
            return (
                latent.at(role, turn * parts + k) if tile_s is latent.slots else role * parts + k + zero(turn)
            )

        def scales_of(turn, left):
            """The scales of this worker's tile number `turn`, with `left` valid tokens: a vector per group of columns."""
            at = scale_s.at(role, turn)
            plgpu.barrier_wait(scale_s.arrived.at[at])
            token = plgpu.broadcasted_iota(jnp.int32, (TILE,), 0, layout=ROW)
            each = [_scales(scale_s.slots.at[at], g, groups, ROW, interpret) for g in range(groups)]
            return [jnp.where(token < left, x, 0.0) for x in each]

        def widen(turn, k):
            """Converts part k of a tile; its codes are free afterwards."""
            at = latent.at(role, turn * parts + k)
            scale_at = scale_s.at(role, turn)
            if k == 0:
                plgpu.commit_smem()  # until here a warp may still read the last tile
                plgpu.barrier_wait(scale_s.arrived.at[scale_at])
            plgpu.barrier_wait(latent.arrived.at[at])
            layout = fp8.wide(width)
            ours = _scales(
                scale_s.slots.at[scale_at], k * width // GROUP, groups, layout.reduce(1), interpret
            )
            x = plgpu.load(latent.slots.at[at], layout=layout).astype(factor)
            wide_s[place(turn, k)] = x * plgpu.layout_cast(over(ours.astype(factor), x.shape), layout)
            plgpu.commit_smem()
            plgpu.barrier_arrive(latent.free.at[at])
            if k == parts - 1:
                plgpu.barrier_arrive(scale_s.free.at[scale_at])

        def operands(turn):
            """The parts of this worker's tile number `turn`, each once it has arrived, with their parts of Q."""
            for k in range(parts):
                at, q = place(turn, k), qc_s.at[k + zero(turn)]
                widen(turn, k) if tile_s is wide_s else plgpu.barrier_wait(latent.arrived.at[at])
                yield fp8.keys(tile_s.at[at], interpret) if direct else tile_s.at[at], q
            at = rope.at(role, turn)
            plgpu.barrier_wait(rope.arrived.at[at])
            yield rope.slots.at[at], qpe_s

        def product(turn, scales):
            """The scores of this worker's tile number `turn`, tokens by queries."""

            def scaled(k, x):
                return x * over(scales[k * width // GROUP], x.shape) if direct and k < parts else x

            if interpret:
                dots = [
                    jnp.dot(k[...], q[...].T, preferred_element_type=jnp.float32) for k, q in operands(turn)
                ]
                plgpu.commit_smem()
                return sum(map(scaled, range(parts + 1), dots))

            def together(ref):
                for k, q in operands(turn):
                    plgpu.wgmma(ref, k, q.transpose((1, 0)))
                return ref[...]

            def apart(*refs):
                s = zeros((TILE, M), plgpu.Layout.WGMMA)
                for i, (k, q) in enumerate(operands(turn)):
                    plgpu.wgmma(refs[i], k, q.transpose((1, 0)))
                    if i:  # the codes of the previous part leave their registers
                        s = s + scaled(i - 1, plgpu.wgmma_accumulator_load(refs[i - 1], wait_n=1))
                return s + refs[parts][...]

            acc = plgpu.ACC((TILE, M), jnp.float32)
            return pl.run_scoped(apart, *[acc] * (parts + 1)) if direct else pl.run_scoped(together, acc)

        def weigh(w, scales, turn):
            """Writes weights to shared memory; for codes once per group of columns, times its scales."""
            for g in range(w_s.shape[1]):
                _store(
                    weights_at(turn, g * GROUP // width),
                    w * over(scales[g] * RAISED, w.shape) if direct else w,
                )

        def add(accs, turn):
            """Adds this worker's tile number `turn` to the sums; the tile is free afterwards."""
            tiles = [place(turn, k) for k in range(parts)]

            def operands(k):
                held = tile_s.at[tiles[k]]
                values = fp8.values(held, interpret) if direct else held.transpose((1, 0))
                return values, weights_at(turn, k).transpose((1, 0))

            def release(k):
                if tile_s is latent.slots:
                    plgpu.barrier_arrive(latent.free.at[tiles[k]])

            if interpret:
                dots = [
                    jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
                    for a, b in map(operands, range(parts))
                ]
                plgpu.commit_smem()
                for k in range(parts):
                    release(k)
                return [acc + dot for acc, dot in zip(accs, dots, strict=True)]

            def run(refs):
                for k, ref in enumerate(refs):
                    plgpu.wgmma(ref, *operands(k))
                    if direct:
                        release(k)
                        plgpu.wgmma_wait(1)  # the codes of the previous part leave their registers
                if not direct:
                    for k in range(parts):
                        plgpu.wgmma_wait(parts - 1 - k)
                        release(k)

            return list(pl.run_state(run)([plgpu.ACC.init(acc) for acc in accs]))

        def worker():
            to_log2 = scale * LOG2E

            def piece(b, carry):
                step, turn = carry
                n, start, stop, _, _ = item(b)
                clear = n - (tokens - 1)  # every query attends to tokens before
                # Whether the other worker takes the first tile
                late = lax.rem(step + role, jnp.int32(WORKERS))

                def hide(s, t):
                    iota = functools.partial(
                        plgpu.broadcasted_iota, jnp.int32, s.shape, layout=plgpu.Layout.WGMMA
                    )
                    limit = clear
                    if tokens > 1:
                        limit = clear + jnp.minimum(lax.div(iota(1), jnp.int32(heads)), tokens - 1)
                    return jnp.where(iota(0) + t * TILE < limit, s, -jnp.inf)

                def empty(turn, held):
                    for k in range(parts):
                        fp8.clean(tile_s.at[place(turn, k)], held) if direct else clean(
                            tile_s, place(turn, k), held
                        )

                def tile(k, carry):
                    turn, top, sums, accs = carry
                    t = start + late + WORKERS * k
                    scales = scales_of(turn, n - t * TILE) if direct else ()
                    s = product(turn, scales)
                    for read in [rope, scale_s] if direct else [rope]:
                        plgpu.barrier_arrive(read.free.at[read.at(role, turn)])
                    s = lax.cond((t + 1) * TILE > clear, hide, lambda s, t: s, s, t)
                    higher = jnp.maximum(top, _fold(s, "max", scratch_s.at[role], interpret) * to_log2)
                    keep = jnp.exp2(top - higher)
                    w = jnp.exp2(s * to_log2 - _under(higher, s.shape))
                    weigh(w, scales, turn)
                    pl.when((t + 1) * TILE > n)(lambda: empty(turn, n - t * TILE))
                    plgpu.commit_smem()
                    sums = sums * _under(keep, s.shape) + w
                    accs = add([acc * _under(keep, acc.shape) for acc in accs], turn)
                    return turn + 1, higher, sums, accs

                low = plgpu.layout_cast(jnp.full((M,), LOW, jnp.float32), COLUMN)
                accs = [zeros((width, M), plgpu.Layout.WGMMA) for _ in range(parts)]
                carry = turn, low, zeros((TILE, M), plgpu.Layout.WGMMA), accs
                plgpu.barrier_wait(q_in)
                count = lax.div(stop - start - late + (WORKERS - 1), jnp.int32(WORKERS))
                turn, top, sums, accs = lax.fori_loop(0, count, tile, carry)
                total = _fold(sums, "add", scratch_s.at[role], interpret)
                each(lambda me: finish(me, b, top, total, accs))
                return step + stop - start, turn

            @pl.when(row1 >= row0)
            def _():
                each(functools.partial(queries, row0))

            lax.fori_loop(row0, row1 + 1, piece, (jnp.int32(0), jnp.int32(0)))
            plgpu.wait_smem_to_gmem(0)

        def meet():
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def finish(me, b, top, total, accs):
            """Combines both workers' sums; this one writes its half."""
            _, _, _, whole, piece = item(b)
            mine, theirs = (range(who * half, (who + 1) * half) for who in (me, 1 - me))
            stats = [pl.ds(k * M, M) for k in range(2)]
            for some, x in zip(stats, (top, total), strict=True):
                scratch_s[me, some] = x
            meet()  # now Q is no longer needed
            for k in theirs:
                _store(qc_s.at[k], accs[k], dtype)
            top_2, total_2 = (plgpu.load(scratch_s.at[1 - me, some], layout=COLUMN) for some in stats)
            higher = jnp.maximum(top, top_2)
            share, share_2 = jnp.exp2(top - higher), jnp.exp2(top_2 - higher)
            total = total * share + total_2 * share_2
            none = total == 0  # False for NaN, which propagates to both
            norm = jnp.where(none, 0.0, (1 / RAISED if direct else 1.0) / total)
            meet()
            for k in mine:
                acc = accs[k] * _under(share * norm, accs[k].shape)
                acc = acc + _load(qc_s.at[k], dtype) * _under(share_2 * norm, acc.shape)
                if direct:
                    plgpu.commit_smem()  # a thread overwrites what others have read
                    qc_s[k] = bits(fp8.natural(acc, interpret).astype(dtype), factor)
                else:
                    _store(qc_s.at[k], acc, dtype)
            plgpu.commit_smem()
            lse = jnp.where(none, -jnp.inf, higher + jnp.log2(total))

            def write(out, at, lses, lse):
                for k in mine:
                    plgpu.copy_smem_to_gmem(qc_s.at[k], out.at[at, pl.ds(0, M), columns[k]])
                if me == 0:
                    lses[at, 0] = lse

            pl.when(whole)(lambda: write(o_g, b, lse_g, lse * (1 / LOG2E)))
            pl.when(jnp.logical_not(whole))(lambda: write(po_g, piece, plse_g, lse))

            @pl.when(b < row1)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                queries(b + 1, me)

        @pl.when(role < WORKERS)
        def _():
            plgpu.set_max_registers(knobs["registers"][0], action="increase")
            worker()

        @pl.when(role == FEEDER)
        def _():
            plgpu.set_max_registers(knobs["registers"][1], action="decrease")
            pl.kernel(feeder, mesh=plgpu.WarpMesh(axis_name="warp"))()

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    smem, barrier = plgpu.SMEM, plgpu.Barrier

    def ring(size, shape, dtype, transforms):
        """The slots of a ring, and the barriers for their arrival and release."""
        slots = smem((WORKERS * size, *shape), dtype, transforms=transforms)
        return [
            slots,
            barrier(num_arrivals=per_tile, num_barriers=WORKERS * size),
            barrier(num_barriers=WORKERS * size),
        ]

    rings = [
        ring(sizes[0], (TILE, width), codes.dtype, fp8.swizzled(width) if packed else swizzled(64)),
        ring(sizes[1], (TILE, E), dtype, swizzled(E)),
        *([ring(sizes[2], (TILE * groups,), jnp.float32, ())] if packed else []),
    ]
    out, lse, some, lses = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, M, R), factor),
            f32((B, 1, M)),
            jax.ShapeDtypeStruct((2 * units, M, R), factor),
            f32((2 * units, 1, M)),
        ),
        scratch_types=[
            smem((parts, M, width), factor, transforms=swizzled(64)),
            smem((M, E), dtype, transforms=swizzled(E)),
            rings,
            smem((WORKERS * parts, TILE, width), factor, transforms=swizzled(64))
            if packed and not direct
            else None,
            smem((WORKERS, groups if direct else 1, M, TILE), factor, transforms=swizzled(64)),
            smem((WORKERS, 512), jnp.float32),
            barrier(num_arrivals=parts + 1),
            barrier(num_arrivals=WORKERS),
        ],
        grid=(units,),
        grid_names=("unit",),
        num_threads=WORKERS + 1,
        thread_name="role",
        # no automatic barriers: `clean` and `widen` have their own where they read and write the same memory; in `finish` a
        # thread overwrites only what it alone has read, except after a barrier
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(q_c, q_pe, *caches, page_table, seq_lens, shares)
    return bits(out, dtype), lse, bits(some, dtype), lses
