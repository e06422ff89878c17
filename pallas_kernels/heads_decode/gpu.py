"""Decode attention over cached heads on a Hopper GPU: each head of each row is a sequence of its own.

Reading keys and values decides the time: a head has one query, so its products need a sixty-fourth of a matrix unit's rows, and
still take less time than the reads. A block takes a part of the tokens of one head. One warpgroup issues the copies of tiles of
64 tokens into a ring, the other computes. XLA merges the parts, of which there are enough to keep the multiprocessors busy."""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import LOG2E, LOW, ROW, clean, over, swizzled, zeros

TILE = 64  # tokens, which are a page
ROWS = 64  # of a product: one is the query
COPIED = 8  # least rows of a copy
WORKER, FEEDER = 0, 1
SHARED = 160 << 10  # bytes of the ring, about
WAVES = 4  # blocks per multiprocessor, at least


def _kernel(
    q_g, k_g, v_g, table_g, lens_g, out_g, lse_g,
    q_s, k_s, v_s, out_s, q_in, k_in, v_in, free,
    *, heads, own, parts, slots, scale, interpret,
):  # fmt: skip
    pair, part, role = (lax.axis_index(name) for name in ("pair", "part", "role"))
    b = lax.div(pair, jnp.int32(heads))
    n = pair - b * heads
    mine = n if own else jnp.int32(0)
    held = lens_g[mine, b]
    tiles = lax.div(held + (TILE - 1), jnp.int32(TILE))
    each = lax.div(tiles + (parts - 1), jnp.int32(parts))
    start = jnp.minimum(part * each, tiles)
    count = jnp.minimum(each, tiles - start)
    V = v_s.shape[-1]

    def slot_of(t):
        return lax.rem(t, jnp.int32(slots))

    def place_of(t):
        """The page of tile t, and the head that it is of."""
        entry = table_g[mine, b, start + t]
        page = lax.div(entry, jnp.int32(heads)) if own else entry
        head = entry - page * heads if own else n
        return jnp.clip(page, 0, k_g.shape[0] - 1), jnp.clip(head, 0, heads - 1)

    def feeder():
        plgpu.copy_gmem_to_smem(q_g.at[pair], q_s.at[pl.ds(0, COPIED)], q_in)

        def tile(t, _):
            slot = slot_of(t)
            page, head = place_of(t)
            pl.when(t >= slots)(lambda: plgpu.barrier_wait(free.at[slot]))
            plgpu.copy_gmem_to_smem(k_g.at[page, :, head], k_s.at[slot], k_in.at[slot])
            plgpu.copy_gmem_to_smem(v_g.at[page, :, head], v_s.at[slot], v_in.at[slot])
            return ()

        def drain(t, _):  # every completion must be observed
            plgpu.barrier_wait(free.at[slot_of(t)])
            return ()

        lax.fori_loop(0, count, tile, ())
        lax.fori_loop(jnp.maximum(count - slots, 0), count, drain, ())

    def scores(slot):
        plgpu.barrier_wait(k_in.at[slot])
        if interpret:
            return jnp.dot(q_s[...], k_s[slot].T, preferred_element_type=jnp.float32)

        def run(ref):
            plgpu.wgmma(ref, q_s, k_s.at[slot].transpose((1, 0)))
            return ref[...]

        return pl.run_scoped(run, plgpu.ACC((ROWS, TILE), jnp.float32))

    def add_values(acc, w, slot):
        if interpret:  # the interpreter takes no initialised accumulator
            return acc + jnp.dot(w, v_s[slot], preferred_element_type=jnp.float32)

        def run(ref):
            plgpu.wgmma(ref, w, v_s.at[slot])

        return pl.run_state(run)(plgpu.ACC.init(acc))

    def worker():
        plgpu.barrier_wait(q_in)

        def tile(t, carry):
            top, total, acc = carry
            slot, left = slot_of(t), held - (start + t) * TILE
            s = scores(slot)
            token = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
            s = jnp.where(token < left, s * (scale * LOG2E), -jnp.inf)
            higher = jnp.maximum(top, s.max(axis=1))
            keep, w = jnp.exp2(top - higher), jnp.exp2(s - over(higher, s.shape))
            plgpu.barrier_wait(v_in.at[slot])

            @pl.when(left < TILE)
            def _():
                clean(v_s, slot, left)
                plgpu.commit_smem()

            acc = add_values(acc * over(keep, acc.shape), w.astype(v_s.dtype), slot)
            plgpu.barrier_arrive(free.at[slot])
            return higher, total * keep + w.sum(axis=1), acc

        low = plgpu.layout_cast(jnp.full((ROWS,), LOW, jnp.float32), ROW)
        none = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), ROW)
        top, total, acc = lax.fori_loop(0, count, tile, (low, none, zeros((ROWS, V), plgpu.Layout.WGMMA)))
        norm = jnp.where(total == 0, 0.0, 1 / total)
        lse_g[pair, part] = jnp.where(total == 0, -jnp.inf, (top + jnp.log2(total)) * (1 / LOG2E))
        out_s[...] = acc * over(norm, acc.shape)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, COPIED)], out_g.at[pair, part])
        plgpu.wait_smem_to_gmem(0)

    for number, body in ((WORKER, worker), (FEEDER, feeder)):
        pl.when(role == number)(body)


@functools.partial(
    jax.jit, static_argnames=("scale", "units", "interpret")
)  # all layers of a model are lowered once
def heads_decode(q, k, v, page_table, seq_lens, *, scale, units, interpret=None):
    """As `heads_decode` of the package; `interpret` runs the kernel on a CPU."""
    (B, N, H), V = q.shape, v.shape[-1]
    slots = max(SHARED // (TILE * (H + V) * k.dtype.itemsize), 2)
    parts = min(-(-WAVES * units // (B * N)), page_table.shape[-1])
    kernel = functools.partial(
        _kernel,
        heads=N,
        own=page_table.shape[0] > 1,
        parts=parts,
        slots=slots,
        scale=scale,
        interpret=interpret,
    )
    queries = jnp.pad(q.reshape(B * N, 1, H), ((0, 0), (0, COPIED - 1), (0, 0)))
    out, lse = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct((B * N, parts, COPIED, V), jnp.float32),
            jax.ShapeDtypeStruct((B * N, parts, ROWS), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((ROWS, H), q.dtype, transforms=swizzled(64)),
            plgpu.SMEM((slots, TILE, H), k.dtype, transforms=swizzled(64)),
            plgpu.SMEM((slots, TILE, V), v.dtype, transforms=swizzled(64)),
            plgpu.SMEM((ROWS, V), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
            plgpu.Barrier(num_barriers=slots),
        ],
        grid=(B * N, parts),
        grid_names=("pair", "part"),
        num_threads=2,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=128, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )(queries, k, v, page_table, seq_lens)
    out, lse = merged(out[:, :, 0], lse[:, :, 0])
    return out.reshape(B, N, V).astype(q.dtype), lse.reshape(B, N)


def merged(out, lse):
    """Attention over the tokens of all parts: `[n parts V]`, `[n parts]` -> `[n V]`, `[n]`."""
    top = lse.max(1, keepdims=True)
    weights = jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - jnp.where(jnp.isneginf(top), 0.0, top)))
    total = weights.sum(1)
    out = jnp.einsum("npv,np->nv", out, weights) / jnp.where(total == 0, 1.0, total)[:, None]
    return out, jnp.where(total == 0, -jnp.inf, top[:, 0] + jnp.log(total))
