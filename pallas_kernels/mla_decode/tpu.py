"""Paged MLA decode for TPUs, in Pallas.

A grid step takes a block of query rows (tokens times heads) of one batch row and loops over the row's chunks of pages. The
pages stay in HBM. While one chunk is multiplied, the pages of the next chunk (or of the next step's first) are copied, each by
its entry in the page table, into the other half of a double buffer.

`k_pe` should be row-major (`jax.experimental.layout`). By default XLA stores an array this narrow with its pages along the
lanes, and then copies the full pool at every call."""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LOG2E = math.log2(math.e)
LOW = -1e30  # initial running maximum; finite, because infinities subtract to NaN
NT = (((1,), (1,)), ((), ()))  # a @ b.T


def _kernel(table, lens, q_c, q_pe, c_hbm, pe_hbm, out, lse, c_s, pe_s, acc, top, total, turn, arrived,
            *, scale, heads, tokens, groups, width):  # fmt: skip
    G, Z, _ = c_hbm.shape
    rows, per = q_c.shape[0], c_s.shape[1]
    chunk = per * Z
    step, steps = pl.program_id(0), pl.num_programs(0)
    b, n = step // groups, lens[step // groups]
    chunks = jnp.maximum(pl.cdiv(n, chunk), 1)  # an empty row is one chunk without tokens
    pairs = (c_hbm, c_s), (pe_hbm, pe_s)
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32)

    def pages(b, i):
        """The number of pages of chunk i of row b that hold tokens."""
        return jnp.clip(pl.cdiv(lens[b], Z) - i * per, 0, per)

    def start(b, i, slot):
        def page(j, _):
            at = jnp.clip(table[b * width + i * per + j], 0, G - 1)
            for hbm, to in pairs:
                pltpu.make_async_copy(hbm.at[at], to.at[slot, j], arrived.at[slot]).start()

        count = pages(b, i)  # a full chunk is unrolled: issuing its copies overlaps
        pl.when(count == per)(lambda: jax.lax.fori_loop(0, per, page, None, unroll=min(per, 8)))
        pl.when(count < per)(lambda: jax.lax.fori_loop(0, count, page, None))

    def wait(b, i, slot):
        def some(*where):
            for _, to in pairs:  # only the size matters
                pltpu.make_async_copy(to.at[where], to.at[where], arrived.at[slot]).wait()

        count = pages(b, i)
        pl.when(count == per)(lambda: some(slot))
        pl.when(count < per)(lambda: jax.lax.fori_loop(0, count, lambda j, _: some(slot, j), None))

    @pl.when(step == 0)
    def _():
        turn[0] = 0
        start(b, 0, 0)

    acc[...] = jnp.zeros_like(acc)
    top[...] = jnp.full_like(top, LOW)
    total[...] = jnp.zeros_like(total)
    row = (step % groups) * rows + iota((rows, chunk), 0)
    # This is row // heads, without a division, which is slow for vectors
    token = sum((row >= t * heads).astype(jnp.int32) for t in range(1, tokens))

    def add(i, slot):
        more = i + 1 < chunks

        @pl.when(more | (step + 1 < steps))
        def _():
            start(jnp.where(more, b, (step + 1) // groups), jnp.where(more, i + 1, 0), 1 - slot)

        wait(b, i, slot)

        @pl.when((i + 1) * chunk > n)  # zeros past the end: a weight of zero times NaN is NaN
        def _():
            place = i * chunk + iota(c_s.shape[1:], 0) * Z + iota(c_s.shape[1:], 1)
            c_s[slot] = jnp.where(place < n, c_s[slot], jnp.zeros((), c_s.dtype))

        c, pe = (x[slot].reshape(chunk, -1) for x in (c_s, pe_s))
        s = jax.lax.dot_general(q_c[...], c, NT, preferred_element_type=jnp.float32)
        s += jax.lax.dot_general(q_pe[...], pe, NT, preferred_element_type=jnp.float32)
        seen = i * chunk + iota((rows, chunk), 1) < n - (tokens - 1) + token
        s = jnp.where(seen, s * (scale * LOG2E), -jnp.inf)
        higher = jnp.maximum(top[...], jnp.max(s, axis=1, keepdims=True))
        keep = jnp.exp2(top[...] - higher)
        w = jnp.exp2(s - higher)
        top[...] = higher
        total[...] = total[...] * keep + jnp.sum(w, axis=1, keepdims=True)
        acc[...] = acc[...] * keep + jnp.dot(w.astype(c.dtype), c, preferred_element_type=jnp.float32)
        return 1 - slot

    turn[0] = jax.lax.fori_loop(0, chunks, add, turn[0])
    none = total[...] == 0  # NaN propagates: it is not `== 0`; Mosaic does not find it `!= 0` either
    out[...] = (acc[...] * jnp.where(none, 0, 1 / total[...])).astype(out.dtype)
    lse[...] = jnp.where(none, -jnp.inf, (top[...] + jnp.log2(total[...])) * (1 / LOG2E))


def mla_decode(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, *, scale, sizes, interpret=False):
    """As `mla_decode` of the package; `sizes`: query rows in a block, tokens in a chunk; `interpret` runs it on a CPU."""
    (B, T, N, R), E, Z = q_c.shape, q_pe.shape[-1], c_kv.shape[1]
    M, width = T * N, page_table.shape[1]
    groups = -(-M // sizes["rows"])
    rows = -(-M // (16 * groups)) * 16  # multiples of a tile, divided evenly
    q_c, q_pe = (jnp.pad(x.reshape(B, M, -1), ((0, 0), (0, groups * rows - M), (0, 0))) for x in (q_c, q_pe))
    q_c, q_pe = (x.reshape(B * groups, rows, -1) for x in (q_c, q_pe))
    per = max(min(sizes["chunk"] // Z, width), 1)
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)

    def block(width):
        return pl.BlockSpec((None, rows, width), lambda step, *_: (step, 0, 0))

    out, lse = pl.pallas_call(
        functools.partial(_kernel, scale=scale, heads=N, tokens=T, groups=groups, width=width),
        out_shape=(
            jax.ShapeDtypeStruct(q_c.shape, q_c.dtype),
            jax.ShapeDtypeStruct((B * groups, rows, 1), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B * groups,),
            in_specs=[block(R), block(E), hbm, hbm],
            out_specs=(block(R), block(1)),
            scratch_shapes=[
                pltpu.VMEM((2, per, Z, R), c_kv.dtype),
                pltpu.VMEM((2, per, Z, E), k_pe.dtype),
                pltpu.VMEM((rows, R), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.VMEM((rows, 1), jnp.float32),
                pltpu.SMEM((1,), jnp.int32),  # the half of the buffer with which this step begins
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        # page numbers are clipped above; the compiler's checks take two thirds of the time of issuing a copy
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), disable_bounds_checks=True),
        interpret=interpret,
    )(page_table.reshape(-1).astype(jnp.int32), seq_lens.astype(jnp.int32), q_c, q_pe, c_kv, k_pe)
    out, lse = (x.reshape(B, groups * rows, -1)[:, :M] for x in (out, lse))
    return out.reshape(B, T, N, R), lse.reshape(B, T, N)
