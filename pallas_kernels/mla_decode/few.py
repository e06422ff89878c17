"""Paged MLA decode for Hopper where few queries read a row (at most 32 tokens times heads): the bytes of the cache decide.

A product of the matrix units has 64 rows, so the held tokens are the rows and the queries the columns: no row is padding.
A block walks tiles of 64 held tokens. Three warpgroups:
  two workers   every other tile each, all of it: scores K Q^T, softmax down the columns, weights to shared memory, sums
                V^T P^T of the whole latent in registers; the softmax of one runs beside the products of the other
  feeder        the copy engine's orders, for each worker a ring of its own: of parts of a tile, that each is freed as soon
                as its sums are done, so what is on its way is not whole tiles. Its orders run ahead into the next rows
At the end of a row the workers swap halves of their sums, each weighs and writes one half. What is swapped, and then the
output, lies in the place of Q, which the same worker then orders anew: the feeder never waits for a row's end.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import LOG2E, LOW, clean, swizzled, zeros
from pallas_kernels.mla_decode.schedule import TILE

MOST = 32  # rows of queries
WORKERS = 2
FEEDER = WORKERS
COLUMN = plgpu.Layout.WGMMA.reduce(0)
TURNED = plgpu.Layout.WGMMA_TRANSPOSED


def _under(x, shape):
    """A number a column, in every row."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, [1]), plgpu.Layout.WGMMA)


def _fold(x, how, scratch, interpret):
    """The maximum or the sum of every column; each warpgroup needs a scratch of its own, which `x.max` does not give it."""
    if interpret:
        return x.max(axis=0) if how == "max" else x.sum(axis=0)
    out = plgpu.ShapeDtypeStruct(x.shape[1:], x.dtype, layout=COLUMN)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()), return_type=out)
    def reduced(_, x, scratch):
        return x.reduce(how, 0, scratch)

    return reduced(x, scratch)


def _store(ref, x):
    """`x` into the transposed of `ref`."""
    ref.transpose((1, 0))[...] = plgpu.layout_cast(x.astype(ref.dtype), TURNED)


def _load(ref):
    """The transposed of `ref`, in float32."""
    x = plgpu.load(ref.transpose((1, 0)), layout=TURNED)
    return plgpu.layout_cast(x, plgpu.Layout.WGMMA).astype(jnp.float32)


def partial(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, shares, *, scale, heads, tokens, knobs, interpret):
    """q_c `[B, M, R]` -> finished rows `[B, M, R]` and, for the pieces of split rows, `[2 units, M, R]`, with LSEs."""
    B, M, R = q_c.shape
    E = q_pe.shape[-1]
    G, Z, _ = c_kv.shape
    units = shares.shape[0]
    width, slots = knobs["width"], knobs["slots"]
    parts = R // width
    half = parts // WORKERS
    slots_pe = slots // parts
    chunk = min(Z, TILE)  # rows of a tile copied at a time
    per_tile = TILE // chunk
    columns = [pl.ds(k * width, width) for k in range(parts)]
    dtype = q_c.dtype

    def kernel(qc_g, qpe_g, c_g, pe_g, table, lens, shares_g, o_g, lse_g, po_g, plse_g,
               qc_s, qpe_s, c_s, pe_s, w_s, stats_s, scratch_s, q_in, c_in, pe_in, c_free, pe_free, met):  # fmt: skip
        unit = lax.axis_index("unit")
        role = lax.axis_index("role")
        row0, row1 = shares_g[unit, 0], shares_g[unit, 2]

        def item(b):
            """Length and tiles of the piece in batch row b; whether it is a whole row, and else its slot.

            Called again where a value is needed after a loop over tiles: read anew it takes no register meanwhile."""
            row0, tile0, row1, tile1 = (shares_g[unit, k] for k in range(4))
            n = lens[b]
            tiles = jnp.maximum(lax.div(n + (TILE - 1), jnp.int32(TILE)), 1)
            start = jnp.where(b == row0, tile0, 0)
            stop = jnp.where(b == row1, tile1, tiles)
            return n, start, stop, (start == 0) & (stop == tiles), 2 * unit + jnp.where(b == row0, 0, 1)

        def place(me, use, count):
            """Where the `use`th part or tile lies that goes through worker `me`'s ring of `count`."""
            return me * count + lax.rem(use, jnp.int32(count))

        def feeder():
            def copy(sources, to, arrived, free, me, use, count):
                at = place(me, use, count)

                @pl.when(use >= count)
                def _():
                    plgpu.barrier_wait(free.at[at])

                for j, source in enumerate(sources):
                    plgpu.copy_gmem_to_smem(source, to.at[at, pl.ds(j * chunk, chunk)], arrived.at[at])

            def piece(b, step):
                n, start, stop, _, _ = item(b)
                top = jnp.maximum(lax.div(n - 1, jnp.int32(Z)), 0)  # the last page that holds a token

                def tile(t, step):
                    me, turn = lax.rem(step, jnp.int32(WORKERS)), lax.div(step, jnp.int32(WORKERS))
                    base = pl.multiple_of(lax.rem(t * TILE, jnp.int32(Z)), TILE) if Z > TILE else 0
                    places = [jnp.minimum(lax.div(t * TILE, jnp.int32(Z)) + j, top) for j in range(per_tile)]
                    pages = [jnp.clip(table[b, place], 0, G - 1) for place in places]
                    rows = pl.ds(base, chunk)
                    for k, some in enumerate(columns):
                        latent = [c_g.at[page, rows, some] for page in pages]
                        copy(latent, c_s, c_in, c_free, me, turn * parts + k, slots)
                    copy([pe_g.at[page, rows] for page in pages], pe_s, pe_in, pe_free, me, turn, slots_pe)
                    return step + 1

                return lax.fori_loop(start, stop, tile, step)

            steps = lax.fori_loop(row0, row1 + 1, piece, jnp.int32(0))
            for me in range(WORKERS):  # every completion has to be observed
                turns = lax.div(steps + (WORKERS - 1 - me), jnp.int32(WORKERS))
                for free, uses, count in (c_free, turns * parts, slots), (pe_free, turns, slots_pe):

                    def drain(use, _, free=free, me=me, count=count):
                        plgpu.barrier_wait(free.at[place(me, use, count)])
                        return ()

                    lax.fori_loop(jnp.maximum(uses - count, 0), uses, drain, ())

        def queries(b, me):
            """Orders worker `me`'s half of the queries of row b."""
            for k in range(me * half, (me + 1) * half):
                plgpu.copy_gmem_to_smem(qc_g.at[b, pl.ds(0, M), columns[k]], qc_s.at[k], q_in)
            if me == 0:
                plgpu.copy_gmem_to_smem(qpe_g.at[b], qpe_s, q_in)

        def each(do):
            """Runs `do` with the number of this worker as a Python integer."""
            for me in range(WORKERS):
                pl.when(role == me)(functools.partial(do, me))

        def product(turn):
            """The scores of this worker's tile number `turn`, tokens by queries."""
            uses = [place(role, turn * parts + k, slots) for k in range(parts)]
            at = place(role, turn, slots_pe)
            arrived = [*(c_in.at[use] for use in uses), pe_in.at[at]]
            tiles = [*(c_s.at[use] for use in uses), pe_s.at[at]]
            zero = jnp.minimum(turn, 0)  # known at run time alone: else every address in Q stays in registers, and spills
            qs = [*(qc_s.at[k + zero] for k in range(parts)), qpe_s]
            if interpret:
                for barrier in arrived:
                    plgpu.barrier_wait(barrier)
                out = sum(jnp.dot(a[...], q[...].T, preferred_element_type=jnp.float32) for a, q in zip(tiles, qs, strict=True))
                plgpu.commit_smem()
                return out

            def run(ref):
                for barrier, tile, q in zip(arrived, tiles, qs, strict=True):
                    plgpu.barrier_wait(barrier)
                    plgpu.wgmma(ref, tile, q.transpose((1, 0)))
                return ref[...]

            return pl.run_scoped(run, plgpu.ACC((TILE, M), jnp.float32))

        def add(accs, turn):
            """The sums with this worker's tile number `turn`, whose parts are free then."""
            uses = [place(role, turn * parts + k, slots) for k in range(parts)]
            weights = w_s.at[role].transpose((1, 0))
            if interpret:
                dot = functools.partial(jnp.dot, preferred_element_type=jnp.float32)
                accs = [acc + dot(c_s[use].T, weights[...]) for acc, use in zip(accs, uses, strict=True)]
                plgpu.commit_smem()
                for use in uses:
                    plgpu.barrier_arrive(c_free.at[use])
                return accs

            def run(refs):
                for ref, use in zip(refs, uses, strict=True):
                    plgpu.wgmma(ref, c_s.at[use].transpose((1, 0)), weights)
                for k, use in enumerate(uses):
                    plgpu.wgmma_wait(parts - 1 - k)
                    plgpu.barrier_arrive(c_free.at[use])

            return list(pl.run_state(run)([plgpu.ACC.init(acc) for acc in accs]))

        def worker():
            to_log2 = scale * LOG2E

            def piece(b, carry):
                step, turn = carry
                n, start, stop, _, _ = item(b)
                clear = n - (tokens - 1)  # every query sees what is before
                late = lax.rem(step + role, jnp.int32(WORKERS))  # whether the other worker takes the first tile

                def hide(s, t):
                    iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, s.shape, layout=plgpu.Layout.WGMMA)
                    limit = clear
                    if tokens > 1:
                        limit = clear + jnp.minimum(lax.div(iota(1), jnp.int32(heads)), tokens - 1)
                    return jnp.where(iota(0) + t * TILE < limit, s, -jnp.inf)

                def empty(turn, held):
                    for k in range(parts):
                        clean(c_s, place(role, turn * parts + k, slots), held)

                def tile(k, carry):
                    turn, top, sums, accs = carry
                    t = start + late + WORKERS * k
                    s = product(turn)
                    plgpu.barrier_arrive(pe_free.at[place(role, turn, slots_pe)])
                    s = lax.cond((t + 1) * TILE > clear, hide, lambda s, t: s, s, t)
                    higher = jnp.maximum(top, _fold(s, "max", scratch_s.at[role], interpret) * to_log2)
                    keep = jnp.exp2(top - higher)
                    w = jnp.exp2(s * to_log2 - _under(higher, s.shape))
                    _store(w_s.at[role], w)
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
            """Joins both workers' sums; this one writes its half."""
            _, _, _, whole, place = item(b)
            mine, theirs = (range(who * half, (who + 1) * half) for who in (me, 1 - me))
            stats_s[me, 0] = top
            stats_s[me, 1] = total
            meet()  # now Q is dead
            for k in theirs:
                _store(qc_s.at[k], accs[k])
            top_2, total_2 = (plgpu.load(stats_s.at[1 - me, k], layout=COLUMN) for k in range(2))
            higher = jnp.maximum(top, top_2)
            share, share_2 = jnp.exp2(top - higher), jnp.exp2(top_2 - higher)
            total = total * share + total_2 * share_2
            some = total > 0
            norm = jnp.where(some, 1.0 / total, 0.0)
            meet()
            for k in mine:
                acc = accs[k] * _under(share * norm, accs[k].shape)
                _store(qc_s.at[k], acc + _load(qc_s.at[k]) * _under(share_2 * norm, acc.shape))
            plgpu.commit_smem()
            lse = jnp.where(some, higher + jnp.log2(total), -jnp.inf)

            def write(out, at, lses, lse):
                for k in mine:
                    plgpu.copy_smem_to_gmem(qc_s.at[k], out.at[at, pl.ds(0, M), columns[k]])
                if me == 0:
                    lses[at, 0] = lse

            pl.when(whole)(lambda: write(o_g, b, lse_g, lse * (1 / LOG2E)))
            pl.when(jnp.logical_not(whole))(lambda: write(po_g, place, plse_g, lse))

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
            feeder()

    f32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    smem, barrier = plgpu.SMEM, plgpu.Barrier
    return plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, M, R), dtype),
            f32((B, 1, M)),
            jax.ShapeDtypeStruct((2 * units, M, R), dtype),
            f32((2 * units, 1, M)),
        ),
        scratch_types=[
            smem((parts, M, width), dtype, transforms=swizzled(64)),
            smem((M, E), dtype, transforms=swizzled(E)),
            smem((WORKERS * slots, TILE, width), dtype, transforms=swizzled(64)),
            smem((WORKERS * slots_pe, TILE, E), dtype, transforms=swizzled(E)),
            smem((WORKERS, M, TILE), dtype, transforms=swizzled(64)),
            smem((WORKERS, 2, M), jnp.float32),
            smem((WORKERS, 512), jnp.float32),
            barrier(num_arrivals=parts + 1),
            barrier(num_arrivals=per_tile, num_barriers=WORKERS * slots),
            barrier(num_arrivals=per_tile, num_barriers=WORKERS * slots_pe),
            barrier(num_barriers=WORKERS * slots),
            barrier(num_barriers=WORKERS * slots_pe),
            barrier(num_arrivals=WORKERS),
        ],
        grid=(units,),
        grid_names=("unit",),
        num_threads=WORKERS + 1,
        thread_name="role",
        # without automatic barriers: what a warpgroup both reads and writes, `clean` guards itself, and in `finish` every
        # thread writes what it alone has read
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, shares)
