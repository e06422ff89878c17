"""Ragged causal flash attention for Hopper, in Pallas Mosaic GPU.

A piece of work is 128 queries of one head. Two warpgroups take 64 each and loop over the same tiles of keys and values. A third
copies the tiles into a ring of slots, ahead into the next piece, so that loads never pause. The two blocks of a cluster take
adjacent pieces and load each tile once for both. A warpgroup starts a tile's scores, rescales its sums meanwhile where a
maximum grew by much, starts the sums of the previous tile, and computes the weights while those run.

Code that overlaps a product must not follow a join of control flow, nor write the registers that the product reads: ptxas waits
there. So tiles without a mask have a loop of their own, and weights are converted to bfloat16 after the sums.

schedule.py assigns the pieces: four heads at a time, whose keys and values stay in the L2; all units finish together. On an
H200 power is the limit: 700 W lower the clock from 1.98 to about 1.55 GHz. 4,096 tokens of 128 heads run at 632 TFLOP/s,
averaged over a quarter of a second; FlashInfer reached 609 in the same run. About a fifth of a piece's time is before its
second tile and after its last, as in FlashInfer. Other numbers of heads at a time, in TFLOP/s for 4,096 tokens (4 heads: 630):
2: 615, 6: 637, 9: 619, 16: 611; for 8,192 tokens (4 heads: 684): 2: 675, 8: 669. Tried without gain:
- pieces assigned unevenly by cost (5 to 7 % more than the mean for the longest): 598 with 9 heads, 601 with 5
- 33 heads at a time, assigned back and forth: 573
- the two warpgroups start in turn: 2 % slower
- all sums rescaled: 1 % slower
- each block loads its own tiles: 3 % slower
- tiles of 64 keys in three or four slots: 8 to 11 % slower
- totals added up across threads for every tile, and tiles masked behind a branch: 558
- a launch of one block per piece: 549 where this took 545
- the first scores of a piece overlapped with the last values of the one before: 536 where this took 542"""

import functools
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import FOLDED, LOG2E, LOW, ROW, clean, fold, over, raised, rescaled, swizzled, zeros
from pallas_kernels.mla_prefill.schedule import schedule

ROWS = 64  # queries of a warpgroup
WORKERS, FEEDER = 2, 2
COPIED = 8  # least rows of a copy
STAGED = 64  # columns that are written together


class Piece(NamedTuple):
    """Some queries of a head, and the keys that they attend to."""

    head: jax.Array
    b: jax.Array
    first: jax.Array  # of the queries
    held: jax.Array
    asked: jax.Array
    tiles: jax.Array  # of the cluster; at least one
    mine: jax.Array  # that some of this block's queries attend to


def _halves(width):
    """Columns of queries and keys, at most 128 at a time."""
    return [(at, min(128, width - at)) for at in range(0, width, 128)]


def _kernel(
    q_g, k_g, v_g, q_lens, kv_lens, order_g, out_g, lse_g,
    q_s, k_s, v_s, out_s, q_in, q_free, k_in, v_in, k_free, v_free, cleaned,
    *, heads, scale, causal, sizes, size, interpret,
):  # fmt: skip
    T, S, chunk, slots = q_g.shape[1], k_g.shape[1], sizes["chunk"], sizes["slots"]
    H, V = (x.shape[-1] // heads for x in (q_g, v_g))
    parts = _halves(H)
    unit, role = lax.axis_index("unit"), lax.axis_index("role")
    block = lax.axis_index("block") if size == 2 else jnp.int32(0)
    groups, blocks = -(-T // (size * WORKERS * ROWS)), -(-T // ROWS)
    collective = {"collective_axes": "block"} if size == 2 else {}
    last_rows = T - (blocks - 1) * ROWS

    def piece(k):
        number = order_g[unit, 1 + k]
        line, group = lax.div(number, jnp.int32(groups)), lax.rem(number, jnp.int32(groups))
        b = lax.div(line, jnp.int32(heads))
        start = group * (size * WORKERS * ROWS)
        held, asked = kv_lens[b], q_lens[b]

        def tiles(first, count):
            """Tiles that some of the queries attend to, at least one."""
            stop = jnp.minimum(held, held - asked + first + count) if causal else held
            return jnp.where(first < asked, lax.div(jnp.maximum(stop, 1) + (chunk - 1), jnp.int32(chunk)), 1)

        first = start + block * (WORKERS * ROWS)
        return Piece(line - b * heads, b, first, held, asked, tiles(start, size * WORKERS * ROWS), tiles(first, WORKERS * ROWS))

    def pieces(run):
        """Runs `run(k, step)` over this unit's pieces; `step` counts the tiles that went through the ring."""
        count = order_g[unit, 0]
        return lax.fori_loop(0, count, run, jnp.int32(0)), count

    def slot_of(step):
        return lax.rem(step, jnp.int32(slots))

    def rows_of(row, do):
        """Runs `do` with the static number of queries that the array has from `row` on, up to ROWS."""
        pl.when(row < (blocks - 1) * ROWS)(lambda: do(ROWS))
        pl.when(row == (blocks - 1) * ROWS)(lambda: do(last_rows))

    def columns(head, width, start, count):
        return pl.ds(pl.multiple_of(head * width + start, STAGED), count)

    def base_of(t):
        """The first key of tile t: the last tile of the array is a full one, which overlaps the tile before."""
        return pl.multiple_of(t * chunk if S % chunk == 0 else jnp.minimum(t * chunk, S - chunk), COPIED)

    def feeder():
        def feed(k, step):
            at = piece(k)
            for me in range(WORKERS):
                row = pl.multiple_of(at.first + me * ROWS, ROWS)
                pl.when(k > 0)(lambda me=me: plgpu.barrier_wait(q_free.at[me]))

                def queries(count, me=me, row=row):
                    for part, to in zip(parts, q_s, strict=True):
                        source = q_g.at[at.b, pl.ds(row, count), columns(at.head, H, *part)]
                        plgpu.copy_gmem_to_smem(source, to.at[me, pl.ds(0, count)], q_in.at[me])

                rows_of(row, queries)

            def tile(t, step):
                slot, keys = slot_of(step), pl.ds(base_of(t), chunk)
                pl.when(step >= slots)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                for part, to in zip(parts, k_s, strict=True):
                    source = k_g.at[at.b, keys, columns(at.head, H, *part)]
                    plgpu.copy_gmem_to_smem(source, to.at[slot], k_in.at[slot], **collective)
                pl.when(step >= slots)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                source = v_g.at[at.b, keys, columns(at.head, V, 0, V)]
                plgpu.copy_gmem_to_smem(source, v_s.at[slot], v_in.at[slot], **collective)
                return step + 1

            return lax.fori_loop(0, at.tiles, tile, step)

        step, count = pieces(feed)

        def drain(step, _):  # every completion must be observed
            for free in (k_free, v_free):
                plgpu.barrier_wait(free.at[slot_of(step)])
            return ()

        lax.fori_loop(jnp.maximum(step - slots, 0), step, drain, ())

        @pl.when(count > 0)
        def _():
            for me in range(WORKERS):
                plgpu.barrier_wait(q_free.at[me])

    def multiply(ref, me, slot):
        zero = jnp.minimum(slot, 0)  # zero, unknown to the compiler: else all addresses in Q stay in registers
        for q, k in zip(q_s, k_s, strict=True):
            plgpu.wgmma(ref, q.at[me + zero], k.at[slot].transpose((1, 0)))

    def dots(me, slot):
        """What `multiply` computes, for the interpreter."""
        out = sum(jnp.dot(q[me], k[slot].T, preferred_element_type=jnp.float32) for q, k in zip(q_s, k_s, strict=True))
        plgpu.commit_smem()
        return out

    def first_scores(me, slot):
        plgpu.barrier_wait(k_in.at[slot])
        if interpret:
            return dots(me, slot)

        def run(ref):
            multiply(ref, me, slot)
            return ref[...]

        return pl.run_scoped(run, plgpu.ACC((ROWS, chunk), jnp.float32))

    def add_values(acc, w, slot):
        """The sums with the values of one more tile."""
        if interpret:  # the interpreter takes no initialised accumulator
            out = acc + jnp.dot(w, v_s[slot], preferred_element_type=jnp.float32)
            plgpu.commit_smem()
            return out

        def run(ref):
            plgpu.wgmma(ref, w, v_s.at[slot])

        return pl.run_state(run)(plgpu.ACC.init(acc))

    def scores_and_values(me, slot, weigh, acc, keep, w, before):
        """`weigh` of the scores in `slot`, while the values in slot `before` are added to `keep` times the sums."""
        plgpu.barrier_wait(k_in.at[slot])
        if interpret:
            s = dots(me, slot)
            plgpu.barrier_arrive(k_free.at[slot])
            plgpu.barrier_wait(v_in.at[before])
            return weigh(s), add_values(acc * over(keep, acc.shape), w, before)

        def run(s_ref, acc_ref):
            multiply(s_ref, me, slot)
            [acc_ref[...]] = rescaled([acc], keep, interpret)  # while the first products run
            plgpu.barrier_wait(v_in.at[before])
            plgpu.wgmma(acc_ref, w, v_s.at[before])
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
            plgpu.barrier_arrive(k_free.at[slot])
            return weigh(s), acc_ref[...]

        return pl.run_scoped(run, plgpu.ACC((ROWS, chunk), jnp.float32), plgpu.ACC(acc.shape, jnp.float32))

    def attend(me, at, step):
        """Maximum, total and sums of this worker's queries over all tiles of a piece."""
        clear = at.held - at.asked + at.first + me * ROWS + 1 if causal else at.held  # every query attends to keys before

        def hide(s, t):
            key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA) + base_of(t)
            limit = at.held
            if causal:
                row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
                limit = jnp.minimum(clear + row, at.held)
            seen = key < limit
            if S % chunk:
                seen = seen & (key >= t * chunk)
            return jnp.where(seen, s, -jnp.inf)

        def weigh(s, top, total):
            """Weights of scores, how much of the sums so far to keep, and the new maximum and total."""
            higher = raised(top, s.max(axis=1) * (scale * LOG2E))
            keep = jnp.exp2(top - higher)
            w = jnp.exp2(s * (scale * LOG2E) - over(higher, s.shape))
            return w, keep, higher, total * over(keep, total.shape) + fold(w)

        def tile(t, carry, some=lambda s, t: s):
            w, keep, top, total, acc = carry
            slot, before = slot_of(step + t), slot_of(step + t - 1)
            scored = scores_and_values(me, slot, lambda s: weigh(some(s, t), top, total), acc, keep, w, before)
            (w, keep, top, total), acc = scored
            plgpu.barrier_arrive(v_free.at[before])
            return w.astype(v_s.dtype), keep, top, total, acc

        low = plgpu.layout_cast(jnp.full((ROWS,), LOW, jnp.float32), ROW)
        s = first_scores(me, slot_of(step))
        plgpu.barrier_arrive(k_free.at[slot_of(step)])
        whole = jnp.minimum(lax.div(jnp.minimum(clear, at.held), jnp.int32(chunk)), at.mine)  # tiles without a mask
        s = lax.cond(whole < 1, hide, lambda s, t: s, s, jnp.int32(0))
        w, keep, top, total = weigh(s, low, zeros((ROWS, FOLDED), plgpu.Layout.WGMMA))
        carry = w.astype(v_s.dtype), keep, top, total, zeros((ROWS, V), plgpu.Layout.WGMMA)
        carry = lax.fori_loop(1, whole, tile, carry)
        w, keep, top, total, acc = lax.fori_loop(jnp.maximum(whole, 1), at.mine, functools.partial(tile, some=hide), carry)
        plgpu.barrier_arrive(q_free.at[me])
        last = slot_of(step + at.mine - 1)
        plgpu.barrier_wait(v_in.at[last])

        # The first worker cleans the last tile of a row for both, a barrier a slot: several short pieces ahead of the other, it
        # would arrive twice at a single one.
        @pl.when(at.mine * chunk > at.held)
        def _():
            if me == 0:
                clean(v_s, last, at.held - base_of(at.mine - 1))
                plgpu.commit_smem()
                plgpu.barrier_arrive(cleaned.at[last])
            else:
                plgpu.barrier_wait(cleaned.at[last])

        acc = add_values(acc * over(keep, acc.shape), w, last)
        plgpu.barrier_arrive(v_free.at[last])

        def skip(t, _):
            """A tile that only the cluster's other block needs."""
            slot = slot_of(step + t)
            for arrived in (k_in, v_in):
                plgpu.barrier_wait(arrived.at[slot])
            plgpu.commit_smem()  # synchronises the warps, as products do: one arrives for all, and a late one would miss a phase
            for free in (k_free, v_free):
                plgpu.barrier_arrive(free.at[slot])
            return ()

        lax.fori_loop(at.mine, at.tiles, skip, ())
        return top, total.sum(axis=1), acc

    def finish(me, at, top, total, acc):
        row0 = pl.multiple_of(at.first + me * ROWS, ROWS)
        row = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=plgpu.Layout.WGMMA) + row0
        # a query past the end may have added anything; NaN of valid keys is not 0 and propagates
        none = (total == 0) | (row.max(axis=1) >= at.asked)
        norm = jnp.where(none, 0.0, 1 / total)
        out = jnp.where(over(norm, acc.shape) == 0, 0.0, acc * over(norm, acc.shape)).astype(out_s.dtype)
        lse = jnp.where(none, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E))

        @pl.when(row0 < T)
        def _():
            lse_g[at.b, at.head, lax.div(row0, jnp.int32(ROWS))] = lse
            for start in range(0, V, STAGED):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                out_s[me] = lax.slice(out, (0, start), (ROWS, start + STAGED))
                plgpu.commit_smem()

                def write(count, start=start):
                    to = out_g.at[at.b, pl.ds(row0, count), columns(at.head, V, start, STAGED)]
                    plgpu.copy_smem_to_gmem(out_s.at[me, pl.ds(0, count)], to)

                rows_of(row0, write)

    def worker(me):
        def work(k, step):
            at = piece(k)
            pl.when(at.first + me * ROWS < T)(lambda: plgpu.barrier_wait(q_in.at[me]))
            top, total, acc = attend(me, at, step)
            finish(me, piece(k), top, total, acc)  # recomputed, so that it holds no register meanwhile
            return step + at.tiles

        pieces(work)
        plgpu.wait_smem_to_gmem(0)

    bodies = {0: lambda: worker(0), 1: lambda: worker(1), FEEDER: feeder}
    for number, body in bodies.items():

        @pl.when(role == number)
        def _(number=number, body=body):
            plgpu.set_max_registers(sizes["registers"][number], action="decrease" if number == FEEDER else "increase")
            body()


def mla_prefill(q, k, v, q_lens, kv_lens, *, scale, causal, sizes, units, interpret=None):
    """As `mla_prefill` of the package; `sizes` as in tuning.py; `interpret` runs the kernel on a CPU."""
    return _mla_prefill(q, k, v, q_lens, kv_lens, scale, causal, tuple(sizes.items()), units, interpret)


def _order(lines, T, S, causal, size, sizes, units):
    """The table of schedule.py, for rows as long as their arrays."""
    rows = size * WORKERS * ROWS
    stops = [min(S, S - T + start + rows) if causal else S for start in range(0, T, rows)]
    tiles = tuple(max(-(-stop // sizes["chunk"]), 1) for stop in stops)
    return schedule(tiles, lines=lines, near=sizes["near"], units=units)


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9))  # so that all layers of a model are lowered once
def _mla_prefill(q, k, v, q_lens, kv_lens, scale, causal, sizes, units, interpret):
    (B, T, N, H), V, sizes = q.shape, v.shape[-1], dict(sizes)
    chunk, slots, widths = sizes["chunk"], sizes["slots"], [width for _, width in _halves(H)]
    q = jnp.pad(q, ((0, 0), (0, -T % COPIED), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, max(-x.shape[1] % COPIED, chunk - x.shape[1])), (0, 0), (0, 0))) for x in (k, v))
    rows = q.shape[1]
    blocks, pairs = -(-rows // ROWS), -(-rows // (WORKERS * ROWS))
    size = 2 if pairs % 2 == 0 or pairs > 8 else 1  # blocks that share tiles
    order = _order(B * N, T, k.shape[1], causal, size, sizes, units // size)
    kernel = functools.partial(_kernel, heads=N, scale=scale, causal=causal, sizes=sizes, size=size, interpret=interpret)
    free = functools.partial(plgpu.ClusterBarrier, collective_axes=("block",)) if size == 2 else plgpu.Barrier
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, rows, N * V), q.dtype),
            jax.ShapeDtypeStruct((B, N, blocks, ROWS), jnp.float32),
        ),
        scratch_types=[
            [plgpu.SMEM((WORKERS, ROWS, width), q.dtype, transforms=swizzled(64)) for width in widths],
            [plgpu.SMEM((slots, chunk, width), k.dtype, transforms=swizzled(64)) for width in widths],
            plgpu.SMEM((slots, chunk, V), v.dtype, transforms=swizzled(64)),
            plgpu.SMEM((WORKERS, ROWS, STAGED), q.dtype, transforms=swizzled(64)),
            plgpu.Barrier(num_arrivals=len(widths), num_barriers=WORKERS),
            plgpu.Barrier(num_barriers=WORKERS),
            plgpu.Barrier(num_arrivals=len(widths), num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            free(num_arrivals=WORKERS, num_barriers=slots),
            free(num_arrivals=WORKERS, num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
        grid=(order.shape[0],),
        grid_names=("unit",),
        cluster=(2,) if size == 2 else (),
        cluster_names=("block",) if size == 2 else (),
        num_threads=WORKERS + 1,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=128, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*(x.reshape(B, x.shape[1], -1) for x in (q, k, v)), q_lens.astype(jnp.int32), kv_lens.astype(jnp.int32), jnp.asarray(order))
    return out[:, :T].reshape(B, T, N, V), lse.reshape(B, N, -1)[:, :, :T].swapaxes(1, 2)
