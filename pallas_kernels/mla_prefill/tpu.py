"""Flash attention over a range of keys per query for TPUs, in Pallas.

A grid step takes a block of queries of one head and a chunk of its keys. The state that a block carries from chunk to chunk
(largest score, sum of weights, weighted values) stays in VMEM. A block's steps begin at the first chunk that any of its queries
attends to; steps past the last one cost no copy, because their index is the last one's, and no arithmetic. Chunks that every
query attends to are not masked. Heads come before tokens, so that a tile holds tokens of one head: XLA fuses that transposition
into the projections before and after.

By the compiler's schedule the matrix units are busy for 84 % of a step on a v5e and 55 % on a v6e, where the vector units are
as busy with the softmax."""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.mla_prefill import ranges

LOG2E = math.log2(math.e)
LOW = -1e30  # initial running maximum; finite, because infinities subtract to NaN
LANES = 128
NT = (((1,), (1,)), ((), ()))  # a @ b.T
# Rows of a plan: a block's first chunk, its chunks; bounds of keys for all its queries
START, CHUNKS, FIRST, STOP = range(4)


def across(x, width):
    """`[rows LANES]`, equal in all lanes, to `[rows width]`: a number per row stored so needs no lane shuffles."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def down(x):
    """`[1 rows]` to `[rows LANES]`, equal in all lanes."""
    return jnp.broadcast_to(x, (LANES, x.shape[1])).T


def _plan(first, stop, sizes):
    """`[4, B * blocks]`: flat, because the scalar memory would pad a last dimension of a few blocks to 128."""
    block = ranges.spans(first, stop, sizes["block"])
    start = jnp.minimum(block.first, block.stop) // sizes["chunk"]  # 0 in a block that attends to nothing
    chunks = pl.cdiv(block.stop, sizes["chunk"]) - start
    return jnp.stack([start, chunks, block.all_first, block.all_stop]).reshape(4, -1)


def _kernel(plan, held, q, bounds, k, v, out, lse, top, total, acc, *, scale):
    chunk = k.shape[0]
    b, j = pl.program_id(0), pl.program_id(3)
    at = b * pl.num_programs(2) + pl.program_id(2)
    base = (plan[START, at] + j) * chunk  # the first key
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32)

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, LOW)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    def add(masked):
        s = jax.lax.dot_general(q[...], k[...], NT, preferred_element_type=jnp.float32) * (scale * LOG2E)
        values = v[...]
        if masked:
            first, stop = (across(down(bounds[i : i + 1]), chunk) for i in range(2))
            key = base + iota(s.shape, 1)
            s = jnp.where((key >= first) & (key < stop), s, -jnp.inf)
            # a weight of zero times NaN is NaN
            values = jnp.where(base + iota(values.shape, 0) < held[b], values, jnp.zeros_like(values))
        higher = jnp.maximum(top[...], jnp.max(s, axis=1, keepdims=True))
        keep = jnp.exp2(top[...] - higher)
        w = jnp.exp2(s - across(higher, chunk))
        top[...] = higher
        total[...] = total[...] * keep + jnp.sum(w, axis=1, keepdims=True)
        product = jnp.dot(w.astype(values.dtype), values, preferred_element_type=jnp.float32)
        acc[...] = acc[...] * across(keep, product.shape[1]) + product

    some = j < plan[CHUNKS, at]
    whole = (base >= plan[FIRST, at]) & (base + chunk <= plan[STOP, at])
    pl.when(some & whole)(lambda: add(False))
    pl.when(some & jnp.logical_not(whole))(lambda: add(True))

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        # a query without keys may have added anything; NaN of valid keys propagates (it is not `== 0`; nor, to Mosaic, `!= 0`)
        none = (total[...] == 0) | (down(bounds[1:]) == 0)
        norm = across(jnp.where(none, 0, 1 / total[...]), acc.shape[1])
        out[...] = jnp.where(norm == 0, 0, acc[...] * norm).astype(out.dtype)
        lse[...] = jnp.where(none, -jnp.inf, (top[...] + jnp.log2(total[...])) * (1 / LOG2E)).T[:1]


def mla_prefill(q, k, v, first, stop, *, scale, sizes, interpret=False):
    """As `mla_prefill` of the package; `sizes`: queries in a block, keys in a chunk; `interpret` runs the kernel on a CPU."""
    (B, T, N, H), V = q.shape, v.shape[-1]
    first, stop = (jnp.pad(x, ((0, 0), (0, -T % LANES))) for x in ranges.clipped(first, stop, k.shape[1]))
    # multiples of a tile: a block must not be longer than its array
    q, k, v = (
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES), (0, 0), (0, 0))).swapaxes(1, 2) for x in (q, k, v)
    )
    rows, keys = q.shape[2], k.shape[2]
    sizes = {"block": min(sizes["block"], rows), "chunk": min(sizes["chunk"], keys)}
    block, chunk = sizes["block"], sizes["chunk"]
    blocks = pl.cdiv(rows, block)

    def queries(b, n, i, j, *_):
        return b, n, i, 0

    def keys_of(b, n, i, j, plan, held):
        at = b * blocks + i
        return b, n, plan[START, at] + jnp.clip(j, 0, jnp.maximum(plan[CHUNKS, at] - 1, 0)), 0

    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale),
        out_shape=(
            jax.ShapeDtypeStruct((B, N, rows, V), q.dtype),
            jax.ShapeDtypeStruct((B, N, 1, rows), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, N, blocks, pl.cdiv(keys, chunk)),
            in_specs=[
                pl.BlockSpec((None, None, block, H), queries),
                pl.BlockSpec((None, 2, block), lambda b, n, i, j, *_: (b, 0, i)),
                pl.BlockSpec((None, None, chunk, H), keys_of),
                pl.BlockSpec((None, None, chunk, V), keys_of),
            ],
            out_specs=(
                pl.BlockSpec((None, None, block, V), queries),
                pl.BlockSpec((None, None, 1, block), lambda b, n, i, j, *_: (b, n, 0, i)),
            ),
            scratch_shapes=[
                pltpu.VMEM((block, LANES), jnp.float32),
                pltpu.VMEM((block, LANES), jnp.float32),
                pltpu.VMEM((block, V), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
    )(_plan(first, stop, sizes), stop.max(axis=1), q, jnp.stack([first, stop], axis=1), k, v)
    return out.swapaxes(1, 2)[:, :T], lse[:, :, 0, :T].swapaxes(1, 2)
