"""Flash attention over a range of keys per query for Hopper, in Pallas Mosaic GPU.

A piece of work is 128 queries of one head. Two warpgroups take 64 each and loop over the same tiles of keys and values. A third
copies the tiles into a ring of slots, ahead into the next piece, so that loads never pause. The two blocks of a cluster take
adjacent pieces and load each tile once for both. A warpgroup starts a tile's scores, rescales its sums meanwhile where a
maximum grew by much, starts the sums of the previous tile, and computes the weights while those run.

Code that overlaps a product must not follow a join of control flow, nor write the registers that the product reads: ptxas waits
there. So tiles without a mask have a loop of their own, between two for tiles that some query of a warpgroup attends to in part,
and weights are converted to bfloat16 after the sums. A warpgroup only waits for and frees tiles that others of its cluster need.

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

from pallas_kernels.hopper import (
    FOLDED,
    LOG2E,
    LOW,
    ROW,
    clean,
    fold,
    over,
    raised,
    rescaled,
    swizzled,
    zeros,
)
from pallas_kernels.mla_prefill import ranges
from pallas_kernels.mla_prefill.schedule import schedule

ROWS = 64  # queries of a warpgroup
WORKERS, FEEDER = 2, 2
COPIED = 8  # least rows of a copy
STAGED = 64  # columns that are written together


class Piece(NamedTuple):
    """Some queries of a head."""

    head: jax.Array
    b: jax.Array
    block: jax.Array  # the first of its blocks of 64 queries


class Walk(NamedTuple):
    """A warpgroup's work on the tiles that its cluster needs, counted from the first of these."""

    start: jax.Array  # the number of the first among all tiles of keys
    tiles: jax.Array  # how many there are, at least one
    begin: jax.Array  # the first that the warpgroup computes; masked if it is not clear
    clear: jax.Array  # the first that is not masked, because all queries attend to all of it
    mixed: jax.Array  # the first that is masked again
    end: jax.Array  # after the last that either warpgroup of the block needs
    held: jax.Array  # the largest stop of the row, in keys


def _halves(width):
    """Columns of queries and keys, at most 128 at a time."""
    return [(at, min(128, width - at)) for at in range(0, width, 128)]


def _kernel(
    q_g, k_g, v_g, first_g, stop_g, walks_g, order_g, out_g, lse_g,
    q_s, k_s, v_s, out_s, q_in, q_free, k_in, v_in, k_free, v_free, cleaned,
    *, heads, scale, sizes, size, interpret,
):  # fmt: skip
    T = q_g.shape[1]
    S = k_g.shape[1]
    chunk = sizes["chunk"]
    slots = sizes["slots"]
    H, V = (x.shape[-1] // heads for x in (q_g, v_g))
    parts = _halves(H)
    unit, role = lax.axis_index("unit"), lax.axis_index("role")
    block = lax.axis_index("block") if size == 2 else jnp.int32(0)
    groups = -(-T // (size * WORKERS * ROWS))
    blocks = -(-T // ROWS)
    collective = {"collective_axes": "block"} if size == 2 else {}
    last_rows = T - (blocks - 1) * ROWS

    def piece(k):
        number = order_g[unit, 1 + k]
        line = lax.div(number, jnp.int32(groups))
        group = lax.rem(number, jnp.int32(groups))
        b = lax.div(line, jnp.int32(heads))
        return Piece(line - b * heads, b, (group * size + block) * WORKERS)

    def walk_of(at, me):
        return Walk(*(walks_g[at.b, at.block + me, i] for i in range(len(Walk._fields))))

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
            walk = walk_of(at, 0)
            for me in range(WORKERS):
                row = pl.multiple_of((at.block + me) * ROWS, ROWS)
                pl.when(k > 0)(lambda me=me: plgpu.barrier_wait(q_free.at[me]))

                def queries(count, me=me, row=row):
                    for part, to in zip(parts, q_s, strict=True):
                        source = q_g.at[at.b, pl.ds(row, count), columns(at.head, H, *part)]
                        plgpu.copy_gmem_to_smem(source, to.at[me, pl.ds(0, count)], q_in.at[me])

                rows_of(row, queries)

            def tile(t, step):
                slot = slot_of(step)
                keys = pl.ds(base_of(walk.start + t), chunk)
                pl.when(step >= slots)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                for part, to in zip(parts, k_s, strict=True):
                    source = k_g.at[at.b, keys, columns(at.head, H, *part)]
                    plgpu.copy_gmem_to_smem(source, to.at[slot], k_in.at[slot], **collective)
                pl.when(step >= slots)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                source = v_g.at[at.b, keys, columns(at.head, V, 0, V)]
                plgpu.copy_gmem_to_smem(source, v_s.at[slot], v_in.at[slot], **collective)
                return step + 1

            return lax.fori_loop(0, walk.tiles, tile, step)

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
        # Zero, unknown to the compiler: else all addresses in Q stay in registers
        zero = jnp.minimum(slot, 0)
        for q, k in zip(q_s, k_s, strict=True):
            plgpu.wgmma(ref, q.at[me + zero], k.at[slot].transpose((1, 0)))

    def dots(me, slot):
        """The same product as `multiply`, for the interpreter."""
        out = sum(
            jnp.dot(q[me], k[slot].T, preferred_element_type=jnp.float32)
            for q, k in zip(q_s, k_s, strict=True)
        )
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

    def of_queries(bounds, me, at):
        """The first keys, or the stops, of this worker's queries."""
        return plgpu.load(bounds.at[at.b, at.block + me], layout=ROW, optimized=False)

    def attend(me, at, walk, step):
        """Maximum, total and sums of this worker's queries over all tiles of a piece."""

        def hide(s, t, stop, first=None):
            """The scores, masked where a query does not attend to a key. Tiles after the first clear one need no `first`."""
            key = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA) + base_of(
                walk.start + t
            )
            seen = key < over(stop, s.shape)
            if first is not None:
                seen = seen & (key >= over(first, s.shape))
            if S % chunk:
                seen = seen & (key >= (walk.start + t) * chunk)
            return jnp.where(seen, s, -jnp.inf)

        def weigh(s, top, total):
            """Weights of scores, how much of the sums so far to keep, and the new maximum and total."""
            higher = raised(top, s.max(axis=1) * (scale * LOG2E))
            keep = jnp.exp2(top - higher)
            w = jnp.exp2(s * (scale * LOG2E) - over(higher, s.shape))
            return w, keep, higher, total * over(keep, total.shape) + fold(w)

        def tile(t, carry, masks=()):
            """Weighs tile t, while the values of the tile before are added; `masks`: the bounds to mask its scores by."""
            w, keep, top, total, acc = carry
            slot, before = slot_of(step + t), slot_of(step + t - 1)
            # Loaded here, so that they are on their way while the scores are computed
            limits = [of_queries(bounds, me, at) for bounds in masks]

            def weighed(s):
                return weigh(hide(s, t, *limits) if masks else s, top, total)

            (w, keep, top, total), acc = scores_and_values(me, slot, weighed, acc, keep, w, before)
            plgpu.barrier_arrive(v_free.at[before])
            return w.astype(v_s.dtype), keep, top, total, acc

        def skip(t, _):
            """A tile that only other warpgroups of the cluster need."""
            slot = slot_of(step + t)
            for arrived in (k_in, v_in):
                plgpu.barrier_wait(arrived.at[slot])
            # Synchronises the warps, as products do: one arrives for all, and a late one would miss a phase
            plgpu.commit_smem()
            for free in (k_free, v_free):
                plgpu.barrier_arrive(free.at[slot])
            return ()

        begin, end = walk.begin, walk.end
        lax.fori_loop(0, begin, skip, ())
        low = plgpu.layout_cast(jnp.full((ROWS,), LOW, jnp.float32), ROW)
        s = first_scores(me, slot_of(step + begin))
        plgpu.barrier_arrive(k_free.at[slot_of(step + begin)])
        whole = (walk.clear == begin) & (walk.mixed > begin)
        s = lax.cond(
            whole,
            lambda s: s,
            lambda s: hide(s, begin, of_queries(stop_g, me, at), of_queries(first_g, me, at)),
            s,
        )
        w, keep, top, total = weigh(s, low, zeros((ROWS, FOLDED), plgpu.Layout.WGMMA))
        carry = w.astype(v_s.dtype), keep, top, total, zeros((ROWS, V), plgpu.Layout.WGMMA)
        clear, mixed = (jnp.maximum(t, begin + 1) for t in (walk.clear, walk.mixed))
        carry = lax.fori_loop(begin + 1, clear, functools.partial(tile, masks=(stop_g, first_g)), carry)
        carry = lax.fori_loop(clear, mixed, tile, carry)
        w, keep, top, total, acc = lax.fori_loop(mixed, end, functools.partial(tile, masks=(stop_g,)), carry)
        plgpu.barrier_arrive(q_free.at[me])
        last = slot_of(step + end - 1)
        held = walk.held - base_of(walk.start + end - 1)
        plgpu.barrier_wait(v_in.at[last])

        # The first worker cleans the last tile of a row for both, a barrier a slot: several short pieces ahead of the other, it
        # would arrive twice at a single one.
        @pl.when((walk.start + end) * chunk > walk.held)
        def _():
            if me == 0:
                clean(v_s, last, held)
                plgpu.commit_smem()
                plgpu.barrier_arrive(cleaned.at[last])
            else:
                plgpu.barrier_wait(cleaned.at[last])

        acc = add_values(acc * over(keep, acc.shape), w, last)
        plgpu.barrier_arrive(v_free.at[last])

        lax.fori_loop(end, walk.tiles, skip, ())
        return top, total.sum(axis=1), acc

    def finish(me, at, top, total, acc):
        row0 = pl.multiple_of((at.block + me) * ROWS, ROWS)
        # a query without keys may have added anything; NaN of valid keys is not 0 and propagates
        none = (total == 0) | (of_queries(stop_g, me, at) == 0)
        norm = jnp.where(none, 0.0, 1 / total)
        out = jnp.where(over(norm, acc.shape) == 0, 0.0, acc * over(norm, acc.shape)).astype(out_s.dtype)
        lse = jnp.where(none, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E))

        @pl.when(row0 < T)
        def _():
            lse_g[at.b, at.head, at.block + me] = lse
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
            walk = walk_of(at, me)
            pl.when((at.block + me) * ROWS < T)(lambda: plgpu.barrier_wait(q_in.at[me]))
            top, total, acc = attend(me, at, walk, step)
            finish(me, piece(k), top, total, acc)  # recomputed, so that it holds no register meanwhile
            return step + walk.tiles

        pieces(work)
        plgpu.wait_smem_to_gmem(0)

    bodies = {0: lambda: worker(0), 1: lambda: worker(1), FEEDER: feeder}
    for number, body in bodies.items():

        @pl.when(role == number)
        def _(number=number, body=body):
            plgpu.set_max_registers(
                sizes["registers"][number], action="decrease" if number == FEEDER else "increase"
            )
            body()


def mla_prefill(q, k, v, first, stop, *, scale, sizes, units, interpret=None):
    """As `mla_prefill` of the package; `sizes` as in tuning.py; `interpret` runs the kernel on a CPU."""
    return _mla_prefill(q, k, v, first, stop, scale, tuple(sizes.items()), units, interpret)


def _order(lines, T, S, size, sizes, units):
    """The table of schedule.py, made before any range is known.

    It supposes ranges that grow with the queries where there are as many keys as queries, elsewhere all keys. Prompts packed in
    one row need less, and some units then get more work than others: with 16 heads, by the schedule's costs, 1.3 times the mean
    for 16 prompts of 256 tokens, 1.8 times for one of 2,048 before 16 of 128."""
    rows = size * WORKERS * ROWS
    stops = [min(S, start + rows) if S == T else S for start in range(0, T, rows)]
    tiles = tuple(-(-stop // sizes["chunk"]) for stop in stops)
    return schedule(tiles, lines=lines, near=sizes["near"], units=units)


def _walks(first, stop, size, chunk):
    """The Walk of every block of 64 queries, `[B blocks fields]` int32, for clipped ranges of whole clusters."""
    own = ranges.spans(first, stop, ROWS)

    def shared(count, pick, x):
        """The least or largest of `count` adjacent blocks, for each of them; by elements, so that XLA fuses it all."""
        return jnp.repeat(functools.reduce(pick, (x[:, i::count] for i in range(count))), count, axis=1)

    least = shared(size * WORKERS, jnp.minimum, own.first)
    most = shared(size * WORKERS, jnp.maximum, own.stop)
    start = jnp.minimum(least, most) // chunk  # 0 if none of the queries attends to anything

    def after(key):
        return -(-key // chunk) - start

    tiles = jnp.maximum(after(most), 1)
    end = jnp.maximum(after(shared(WORKERS, jnp.maximum, own.stop)), 1)
    # A block without keys computes the last tile, for nothing
    begin = jnp.minimum(own.first // chunk - start, end - 1)
    clear = jnp.clip(after(own.all_first), begin, end)
    mixed = jnp.clip(own.all_stop // chunk - start, clear, end)
    held = jnp.broadcast_to(stop.max(axis=1, keepdims=True), start.shape)
    return jnp.stack(Walk(start, tiles, begin, clear, mixed, end, held), axis=-1)


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8))  # so that all layers of a model are lowered once
def _mla_prefill(q, k, v, first, stop, scale, sizes, units, interpret):
    (B, T, N, H), S, V, sizes = q.shape, k.shape[1], v.shape[-1], dict(sizes)
    chunk = sizes["chunk"]
    slots = sizes["slots"]
    widths = [width for _, width in _halves(H)]
    pairs = -(-T // (WORKERS * ROWS))
    size = 2 if pairs % 2 == 0 or pairs > 8 else 1  # blocks that share tiles
    first, stop = (
        jnp.pad(x, ((0, 0), (0, -T % (size * WORKERS * ROWS)))) for x in ranges.clipped(first, stop, S)
    )
    walks, (first, stop) = _walks(first, stop, size, chunk), (x.reshape(B, -1, ROWS) for x in (first, stop))
    order = _order(B * N, T, S, size, sizes, units // size)
    q = jnp.pad(q, ((0, 0), (0, -T % COPIED), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, max(-S % COPIED, chunk - S)), (0, 0), (0, 0))) for x in (k, v))
    rows = q.shape[1]
    blocks = -(-rows // ROWS)
    kernel = functools.partial(_kernel, heads=N, scale=scale, sizes=sizes, size=size, interpret=interpret)
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
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=128, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )(*(x.reshape(B, x.shape[1], -1) for x in (q, k, v)), first, stop, walks, jnp.asarray(order))
    return out[:, :T].reshape(B, T, N, V), lse.reshape(B, N, -1)[:, :, :T].swapaxes(1, 2)
