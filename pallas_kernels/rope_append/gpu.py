"""RoPE on queries and in-place append of tokens on a Hopper GPU: one kernel instead of XLA's seven to nine.

Each of XLA's kernels costs a decode step about 1.3 us, many times the time of its memory traffic. For each row one block
computes the keys, the others some query heads each. The elements of a pair meet through shared memory: a line is read again
from one position further and one back.

A pool may have more numbers than 32 bits count. Slots are 32 bits wide, addresses are not: Mosaic widens an index before it
multiplies it by a stride (its index type has 64 bits), for loads, stores and bulk copies alike; tests/pallas_kernels/compile.py
looks whether that is so."""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

LINE = 128  # least numbers that a warpgroup loads: the rotary ones, preceded by some that are not rotated
EDGE = 32  # scratch at each side of a line, which a shifted read may touch
HEADS = 4  # query heads in a block, at most


def factors(cos, sin, interleave):
    """`[B T E/2]` -> `[B T 3 LINE]`: the factors of a line, of the line one position further, and of the line one back."""
    half, none = cos.shape[-1], jnp.zeros_like(sin)
    before = [(0, 0), (0, 0), (LINE - 2 * half, 0)]

    def line(a, b, fill=0.0):
        pairs = jnp.stack([a, b], axis=-1 if interleave else -2).reshape(*a.shape[:2], 2 * half)
        return jnp.pad(pairs, before, constant_values=fill)

    return jnp.stack([line(cos, cos, 1.0), line(-sin, none), line(none, sin)], axis=2)


def _kernel(q_g, kv_g, weight_g, factors_g, slot_g, c_kv_g, k_pe_g, q_pe_g, line_s, out_s, *, eps, shift):
    (T, _, H), (slots, R), E, each = q_g.shape[1:], c_kv_g.shape, k_pe_g.shape[-1], line_s.shape[0]
    b, part = lax.axis_index("row"), lax.axis_index("part")
    one_each = plgpu.Layout.WG_STRIDED((LINE,), 1)
    whole = plgpu.Layout.WG_STRIDED((R,), R // LINE)

    def turn(t, sources, targets):
        """Writes the last E numbers of each source, rotated by the angles of token t."""
        for i, source in enumerate(sources):
            line_s[i, pl.ds(EDGE, LINE)] = plgpu.load(source, layout=one_each).astype(jnp.float32)
        plgpu.commit_smem()
        by = [plgpu.load(factors_g.at[b, t, k], layout=one_each) for k in range(3)]
        for i in range(len(sources)):
            moved = [
                plgpu.load(line_s.at[i, pl.ds(EDGE + k, LINE)], layout=one_each) for k in (0, shift, -shift)
            ]
            turned = sum(jnp.where(f == 0, 0.0, f * x) for f, x in zip(by, moved, strict=True))
            # At E, so that the part that is copied begins at LINE, which is aligned
            out_s[i, pl.ds(E, LINE)] = turned.astype(out_s.dtype)
        plgpu.commit_smem()
        for i, target in enumerate(targets):
            plgpu.copy_smem_to_gmem(out_s.at[i, pl.ds(LINE, E)], target)
        plgpu.wait_smem_to_gmem(0)

    def normed(t):
        x = plgpu.load(kv_g.at[b, t, pl.ds(0, R)], layout=whole).astype(jnp.float32)
        y = (x * lax.rsqrt(jnp.sum(x * x) / R + eps)).astype(kv_g.dtype).astype(jnp.float32)
        return (y * plgpu.load(weight_g, layout=whole).astype(jnp.float32)).astype(kv_g.dtype)

    @pl.when(part == 0)
    def keys():
        for t in range(T):
            slot = slot_g[b, t]

            @pl.when((slot >= 0) & (slot < slots))
            def _(t=t, slot=slot):
                c_kv_g[slot] = normed(t)
                turn(t, [kv_g.at[b, t, pl.ds(R + E - LINE, LINE)]], [k_pe_g.at[slot]])

    @pl.when(part > 0)
    def queries():
        heads = [(part - 1) * each + i for i in range(each)]
        for t in range(T):
            turn(
                t,
                [q_g.at[b, t, n, pl.ds(H - LINE, LINE)] for n in heads],
                [q_pe_g.at[b, t, n] for n in heads],
            )


# Jitted, so that all layers of a model are lowered once
@functools.partial(jax.jit, static_argnames=("eps", "interleave", "interpret"))
def rope_append(q, kv, weight, tokens, cache, *, eps, interleave, interpret=None):
    """As `rope_append` of the package; `interpret` runs the kernel on a CPU."""
    (B, T, N, _), E = q.shape, cache.k_pe.shape[-1]
    each = math.gcd(N, HEADS)
    # By slots: no copy, and no division in the kernel
    held = [jax.new_ref(x.reshape(-1, x.shape[-1])) for x in cache]
    q_pe = plgpu.kernel(
        functools.partial(_kernel, eps=eps, shift=1 if interleave else E // 2),
        out_type=jax.ShapeDtypeStruct((B, T, N, E), q.dtype),
        scratch_types=[
            plgpu.SMEM((each, LINE + 2 * EDGE), jnp.float32),
            plgpu.SMEM((each, 2 * LINE), q.dtype),
        ],
        grid=(B, 1 + N // each),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=128),
        interpret=interpret,
    )(q, kv, weight, factors(tokens.cos, tokens.sin, interleave), tokens.slot, *held)
    return q_pe, type(cache)(*(new[...].reshape(old.shape) for new, old in zip(held, cache, strict=True)))
