"""Ragged causal flash attention for TPUs, in Pallas.

A grid step takes a block of queries of one head and a chunk of its keys. The state that a block carries from chunk to chunk
(largest score, sum of weights, weighted values) stays in VMEM. Chunks that a block does not attend to cost no copy, because
their index is that of the last chunk needed, and no arithmetic; chunks that every query attends to are not masked. Heads come
before tokens, so that a tile holds tokens of one head: XLA fuses that transposition into the projections before and after.

By the compiler's schedule the matrix units are busy for 84 % of a step on a v5e and 55 % on a v6e, where the vector units are
as busy with the softmax."""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LOG2E = math.log2(math.e)
LOW = -1e30  # initial running maximum; finite, because infinities subtract to NaN
LANES = 128
NT = (((1,), (1,)), ((), ()))  # a @ b.T


def across(x, width):
    """`[rows LANES]`, equal in all lanes, to `[rows width]`: a number per row stored so needs no lane shuffles."""
    return jnp.concatenate([x] * -(-width // LANES), axis=1)[:, :width]


def _chunks(b, i, q_lens, kv_lens, sizes, causal):
    """The number of chunks of keys that block i of row b attends to."""
    block, chunk = sizes["block"], sizes["chunk"]
    some = i * block < q_lens[b]
    stop = jnp.minimum(kv_lens[b], kv_lens[b] - q_lens[b] + (i + 1) * block) if causal else kv_lens[b]
    return jnp.where(some, pl.cdiv(jnp.maximum(stop, 0), chunk), 0)


def _kernel(q_lens, kv_lens, q, k, v, out, lse, top, total, acc, *, scale, causal, sizes):
    block, chunk = q.shape[0], k.shape[0]
    b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    chunks = _chunks(b, i, q_lens, kv_lens, sizes, causal)
    clear = kv_lens[b] - q_lens[b] + i * block + 1 if causal else kv_lens[b]  # keys that every query attends to
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
            limit = clear + iota((block, chunk), 0) if causal else clear
            s = jnp.where(j * chunk + iota((block, chunk), 1) < limit, s, -jnp.inf)
            # a weight of zero times NaN is NaN
            values = jnp.where(j * chunk + iota(values.shape, 0) < kv_lens[b], values, jnp.zeros_like(values))
        higher = jnp.maximum(top[...], jnp.max(s, axis=1, keepdims=True))
        keep = jnp.exp2(top[...] - higher)
        w = jnp.exp2(s - across(higher, chunk))
        top[...] = higher
        total[...] = total[...] * keep + jnp.sum(w, axis=1, keepdims=True)
        product = jnp.dot(w.astype(values.dtype), values, preferred_element_type=jnp.float32)
        acc[...] = acc[...] * across(keep, product.shape[1]) + product

    whole = (j + 1) * chunk <= clear
    pl.when((j < chunks) & whole)(lambda: add(False))
    pl.when((j < chunks) & jnp.logical_not(whole))(lambda: add(True))

    @pl.when(j == pl.num_programs(3) - 1)
    def _():
        # a query past the end may have added anything; NaN of valid keys propagates (it is not `== 0`; nor, to Mosaic, `!= 0`)
        none = (total[...] == 0) | (i * block + iota(total.shape, 0) >= q_lens[b])
        norm = across(jnp.where(none, 0, 1 / total[...]), acc.shape[1])
        out[...] = jnp.where(norm == 0, 0, acc[...] * norm).astype(out.dtype)
        lse[...] = jnp.where(none, -jnp.inf, (top[...] + jnp.log2(total[...])) * (1 / LOG2E)).T[:1]


def mla_prefill(q, k, v, q_lens, kv_lens, *, scale, causal, sizes, interpret=False):
    """As `mla_prefill` of the package; `sizes`: queries in a block, keys in a chunk; `interpret` runs the kernel on a CPU."""
    (B, T, N, H), V = q.shape, v.shape[-1]
    # multiples of a tile: a block must not be longer than its array
    q, k, v = (jnp.pad(x, ((0, 0), (0, -x.shape[1] % LANES), (0, 0), (0, 0))).swapaxes(1, 2) for x in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    sizes = {"block": min(sizes["block"], rows), "chunk": min(sizes["chunk"], keys)}
    block, chunk = sizes["block"], sizes["chunk"]

    def queries(b, n, i, j, q_lens, kv_lens):
        return b, n, i, 0

    def held(b, n, i, j, q_lens, kv_lens):
        return b, n, jnp.clip(j, 0, jnp.maximum(_chunks(b, i, q_lens, kv_lens, sizes, causal) - 1, 0)), 0

    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale, causal=causal, sizes=sizes),
        out_shape=(jax.ShapeDtypeStruct((B, N, rows, V), q.dtype), jax.ShapeDtypeStruct((B, N, 1, rows), jnp.float32)),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, N, pl.cdiv(rows, block), pl.cdiv(keys, chunk)),
            in_specs=[
                pl.BlockSpec((None, None, block, H), queries),
                pl.BlockSpec((None, None, chunk, H), held),
                pl.BlockSpec((None, None, chunk, V), held),
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
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
        interpret=interpret,
    )(q_lens.astype(jnp.int32), kv_lens.astype(jnp.int32), q, k, v)
    return out.swapaxes(1, 2)[:, :T], lse[:, :, 0, :T].swapaxes(1, 2)
