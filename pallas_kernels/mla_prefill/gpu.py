"""Ragged causal flash attention for Hopper, in Pallas Mosaic GPU.

A block holds 128 queries of one head. Two warpgroups take 64 each and walk the same tiles of keys and values, which a third
orders from the copy engine through a ring of slots. Each starts a tile's scores together with the sums of the tile before,
and weighs the former while the latter are computed; the two take turns in starting, so that one's weighing runs beside the
other's products. A head's blocks lie next to each other in the grid, for they share its keys in the L2; those with
the most keys to see come first. Not timed yet."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import LOG2E, LOW, ROW, clean, over, swizzled, zeros

ROWS = 64  # queries of a warpgroup
WORKERS, FEEDER = 2, 2
COPIED = 8  # rows that the copy engine moves at least


def _parts(width, value):
    """The columns of queries and keys, first those whose place the output takes."""
    return [(0, value), (value, width - value)][: 1 + (width > value)]


def _kernel(
    q_g, k_g, v_g, q_lens, kv_lens, out_g, lse_g, q_s, k_s, v_s, q_in, k_in, v_in, k_free, v_free, turn, cleaned,
    *, scale, causal, sizes, interpret,
):  # fmt: skip
    (T, S), (chunk, slots) = (q_g.shape[1], k_g.shape[1]), (sizes["chunk"], sizes["slots"])
    V = v_s.shape[-1]
    H = sum(part.shape[-1] for part in q_s)
    parts = _parts(H, V)
    head, b, role = lax.axis_index("head"), lax.axis_index("row"), lax.axis_index("role")
    pairs = -(-T // (WORKERS * ROWS))
    pair = pairs - 1 - lax.axis_index("pair")
    held, asked = kv_lens[b], q_lens[b]
    prefix = held - asked
    first = pair * (WORKERS * ROWS)  # of the block's queries
    stop = jnp.minimum(held, prefix + first + WORKERS * ROWS) if causal else held
    tiles = jnp.where(first < asked, lax.div(jnp.maximum(stop, 1) + (chunk - 1), jnp.int32(chunk)), 1)  # one of nothing, too
    blocks = -(-T // ROWS)
    last_rows = T - (blocks - 1) * ROWS

    def rows_of(which, do):
        """Runs `do` with the static number of query rows that the array has for warpgroup block `which`."""
        pl.when(which < blocks - 1)(lambda: do(ROWS))
        pl.when(which == blocks - 1)(lambda: do(last_rows))

    def columns(width, start, count):
        """Of this head's `width` columns."""
        return pl.ds(pl.multiple_of(head * width + start, 64), count)

    def base_of(t):
        """The first key of tile t: the last tile of the array is a whole one, some of which was seen before."""
        return pl.multiple_of(t * chunk if S % chunk == 0 else jnp.minimum(t * chunk, S - chunk), COPIED)

    def feeder():
        for me in range(WORKERS):
            which = pair * WORKERS + me

            def queries(count, me=me, which=which):
                for part, to in zip(parts, q_s, strict=True):
                    source = q_g.at[b, pl.ds(pl.multiple_of(which * ROWS, ROWS), count), columns(H, *part)]
                    plgpu.copy_gmem_to_smem(source, to.at[me, pl.ds(0, count)], q_in.at[me])

            rows_of(which, queries)

        def tile(t, _):
            slot, keys = lax.rem(t, jnp.int32(slots)), pl.ds(base_of(t), chunk)
            pl.when(t >= slots)(lambda: plgpu.barrier_wait(k_free.at[slot]))
            for part, to in zip(parts, k_s, strict=True):
                plgpu.copy_gmem_to_smem(k_g.at[b, keys, columns(H, *part)], to.at[slot], k_in.at[slot])
            pl.when(t >= slots)(lambda: plgpu.barrier_wait(v_free.at[slot]))
            plgpu.copy_gmem_to_smem(v_g.at[b, keys, columns(V, 0, V)], v_s.at[slot], v_in.at[slot])
            return ()

        lax.fori_loop(0, tiles, tile, ())

        def drain(t, _):  # every completion has to be observed
            for free in (k_free, v_free):
                plgpu.barrier_wait(free.at[lax.rem(t, jnp.int32(slots))])
            return ()

        lax.fori_loop(jnp.maximum(tiles - slots, 0), tiles, drain, ())

    def start(me):
        """Takes this worker's turn at the matrix units, and hands it on when `started` what it has to start."""
        plgpu.barrier_wait(turn.at[me])

    def started(me):
        plgpu.barrier_arrive(turn.at[1 - me])

    def multiply(ref, me, slot):
        for q, k in zip(q_s, k_s, strict=True):
            plgpu.wgmma(ref, q.at[me], k.at[slot].transpose((1, 0)))

    def dots(me, slot):
        """What `multiply` computes, for the interpreter."""
        out = sum(jnp.dot(q[me], k[slot].T, preferred_element_type=jnp.float32) for q, k in zip(q_s, k_s, strict=True))
        plgpu.commit_smem()
        return out

    def first_scores(me):
        plgpu.barrier_wait(k_in.at[0])
        start(me)
        if interpret:
            started(me)
            return dots(me, 0)

        def run(ref):
            multiply(ref, me, 0)
            started(me)
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

    def scores_and_values(me, slot, weigh, acc, w, before):
        """The scores in `slot`, of which `weigh` makes something while the values in slot `before` join the sums."""
        plgpu.barrier_wait(k_in.at[slot])
        plgpu.barrier_wait(v_in.at[before])
        start(me)
        if interpret:
            started(me)
            s = dots(me, slot)
            plgpu.barrier_arrive(k_free.at[slot])
            return weigh(s), add_values(acc, w, before)

        def run(s_ref, acc_ref):
            acc_ref[...] = acc
            multiply(s_ref, me, slot)
            plgpu.wgmma(acc_ref, w, v_s.at[before])
            started(me)
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=1)
            plgpu.barrier_arrive(k_free.at[slot])
            return weigh(s), acc_ref[...]

        return pl.run_scoped(run, plgpu.ACC((ROWS, chunk), jnp.float32), plgpu.ACC(acc.shape, jnp.float32))

    def worker(me):
        which = pair * WORKERS + me
        row0 = pl.multiple_of(which * ROWS, ROWS)
        clear = prefix + row0 + 1 if causal else held  # every query sees what is before

        def hide(s, t):
            at = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA) + base_of(t)
            limit = held
            if causal:
                row = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
                limit = jnp.minimum(clear + row, held)
            seen = at < limit
            if S % chunk:
                seen = seen & (at >= t * chunk)
            return jnp.where(seen, s, -jnp.inf)

        def weigh(s, t, top, total):
            """Weights of the scores of tile t, how much of the sums so far to keep, and the new maximum and total."""
            s = lax.cond((t + 1) * chunk > jnp.minimum(clear, held), hide, lambda s, t: s, s, t)
            higher = jnp.maximum(top, s.max(axis=1) * (scale * LOG2E))
            keep = jnp.exp2(top - higher)
            w = jnp.exp2(s * (scale * LOG2E) - over(higher, s.shape))
            return w.astype(v_s.dtype), keep, higher, total * keep + w.sum(axis=1)

        def tile(t, carry):
            w, top, total, acc = carry
            slot, before = lax.rem(t, jnp.int32(slots)), lax.rem(t - 1, jnp.int32(slots))
            (w, keep, top, total), acc = scores_and_values(me, slot, lambda s: weigh(s, t, top, total), acc, w, before)
            plgpu.barrier_arrive(v_free.at[before])
            return w, top, total, acc * over(keep, acc.shape)

        if me == 1:
            started(me)  # the other is the first
        pl.when(which < blocks)(lambda: plgpu.barrier_wait(q_in.at[me]))
        low = plgpu.layout_cast(jnp.full((ROWS,), LOW, jnp.float32), ROW)
        s = first_scores(me)
        plgpu.barrier_arrive(k_free.at[0])
        w, _, top, total = weigh(s, jnp.int32(0), low, zeros((ROWS,), ROW))
        carry = w, top, total, zeros((ROWS, V), plgpu.Layout.WGMMA)
        w, top, total, acc = lax.fori_loop(1, tiles, tile, carry)
        if me == 0:
            start(me)  # every completion has to be observed
        last = lax.rem(tiles - 1, jnp.int32(slots))
        plgpu.barrier_wait(v_in.at[last])

        @pl.when(tiles * chunk > held)  # who comes first cleans the last tile of the row for both
        def _():
            if me == 0:
                clean(v_s, last, held - base_of(tiles - 1))
                plgpu.commit_smem()
                plgpu.barrier_arrive(cleaned)
            else:
                plgpu.barrier_wait(cleaned)

        acc = add_values(acc, w, last)
        plgpu.barrier_arrive(v_free.at[last])
        row = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=plgpu.Layout.WGMMA) + row0
        # a query past the end may have added anything
        some = (total > 0) & (row.max(axis=1) < asked)
        norm = jnp.where(some, 1 / total, 0.0)
        out = jnp.where(over(norm, acc.shape) > 0, acc * over(norm, acc.shape), 0.0)
        lse = jnp.where(some, (top + jnp.log2(total)) * (1 / LOG2E), -jnp.inf)

        @pl.when(which < blocks)
        def _():
            lse_g[b, head, which] = lse
            staged = q_s[0]  # the queries are dead by then
            staged[me] = out.astype(staged.dtype)
            plgpu.commit_smem()

            def write(count):
                plgpu.copy_smem_to_gmem(staged.at[me, pl.ds(0, count)], out_g.at[b, pl.ds(row0, count), columns(V, 0, V)])

            rows_of(which, write)
            plgpu.wait_smem_to_gmem(0)

    bodies = {0: lambda: worker(0), 1: lambda: worker(1), FEEDER: feeder}
    for number, body in bodies.items():

        @pl.when(role == number)
        def _(number=number, body=body):
            plgpu.set_max_registers(sizes["registers"][number], action="decrease" if number == FEEDER else "increase")
            body()


def mla_prefill(q, k, v, q_lens, kv_lens, *, scale, causal, sizes, interpret=None):
    """The contract is the package's; `sizes`: keys in a tile, slots, registers; `interpret` runs the kernel on a CPU."""
    (B, T, N, H), V = q.shape, v.shape[-1]
    chunk, slots, parts = sizes["chunk"], sizes["slots"], _parts(H, V)
    q = jnp.pad(q, ((0, 0), (0, -T % COPIED), (0, 0), (0, 0)))
    k, v = (jnp.pad(x, ((0, 0), (0, max(-x.shape[1] % COPIED, chunk - x.shape[1])), (0, 0), (0, 0))) for x in (k, v))
    rows = q.shape[1]
    blocks = -(-rows // ROWS)
    kernel = functools.partial(_kernel, scale=scale, causal=causal, sizes=sizes, interpret=interpret)
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B, rows, N * V), q.dtype),
            jax.ShapeDtypeStruct((B, N, blocks, ROWS), jnp.float32),
        ),
        scratch_types=[
            [plgpu.SMEM((WORKERS, ROWS, width), q.dtype, transforms=swizzled(64)) for _, width in parts],
            [plgpu.SMEM((slots, chunk, width), k.dtype, transforms=swizzled(64)) for _, width in parts],
            plgpu.SMEM((slots, chunk, V), v.dtype, transforms=swizzled(64)),
            plgpu.Barrier(num_arrivals=len(parts), num_barriers=WORKERS),
            plgpu.Barrier(num_arrivals=len(parts), num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_arrivals=WORKERS, num_barriers=slots),
            plgpu.Barrier(num_arrivals=WORKERS, num_barriers=slots),
            plgpu.Barrier(num_barriers=WORKERS),
            plgpu.Barrier(),
        ],
        grid=(N, B, -(-rows // (WORKERS * ROWS))),
        grid_names=("head", "row", "pair"),
        num_threads=WORKERS + 1,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=128, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )(*(x.reshape(B, x.shape[1], -1) for x in (q, k, v)), q_lens.astype(jnp.int32), kv_lens.astype(jnp.int32))
    return out[:, :T].reshape(B, T, N, V), lse.reshape(B, N, -1)[:, :, :T].swapaxes(1, 2)
