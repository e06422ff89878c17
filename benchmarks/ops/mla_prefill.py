"""mla_prefill on a Hopper GPU, against FlashInfer, cuDNN and the floor."""

import functools

import jax
import jax.numpy as jnp
from ops import timing

from pallas_kernels import testing, tuning
from pallas_kernels.mla_prefill import mla_prefill, reference

# batch, heads, queries, keys, width, value
SHAPES = [
    (1, 128, 4096, 4096, 192, 128),
    (1, 128, 8192, 8192, 192, 128),
    (1, 128, 2048, 16384, 192, 128),
    (8, 16, 4096, 4096, 192, 128),
    (1, 64, 4096, 4096, 256, 256),
]


def check() -> list[str]:
    """One line per named case that the kernel takes; its error may be twice the fallback's."""
    return [_check(case) for case in testing.MLA_PREFILL if (case.width, case.value) in tuning.MLA_PREFILL]


def _check(case: testing.MlaPrefillCase) -> str:
    inputs, options = testing.mla_prefill_inputs(case), {"scale": case.scale, "causal": case.causal}
    wanted, lse = reference.mla_prefill(**inputs, **options)
    own, _ = mla_prefill(**inputs, **options, impl="xla")
    out, got_lse = jax.jit(functools.partial(mla_prefill, **options, impl="mosaic_gpu"))(**inputs)
    off, own_off, lse_off = testing.error(out, wanted), testing.error(own, wanted), testing.lse_error(got_lse, lse)
    good = off <= 2 * own_off and lse_off < 1e-3
    return f"{'ok  ' if good else 'FAIL'} mla_prefill, {case.name}: {off:.5f}, fallback {own_off:.5f}, lse {lse_off:.1e}"


def _cudnn(scale: float):
    """JAX's own way to cuDNN; it wants values as wide as keys."""

    def call(q, k, v, *_):
        wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[-1] - v.shape[-1])))
        return jax.nn.dot_product_attention(q, k, wide, scale=scale, is_causal=True, implementation="cudnn")

    return call


def _row(shape: tuple[int, ...], peers: dict[tuple, float]) -> dict:
    B, N, T, S, H, V = shape
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, dims, jnp.bfloat16)
        for key, dims in zip(keys, ((B, T, N, H), (B, S, N, H), (B, S, N, V)), strict=True)
    )
    args = q, k, v, jnp.full((B,), T, jnp.int32), jnp.full((B,), S, jnp.int32)
    call = functools.partial(mla_prefill, scale=H**-0.5)
    us = timing.microseconds(lambda *args: call(*args)[0], [args])
    some = slice(0, 2)  # heads
    wanted = reference.mla_prefill(
        q[:1, -128:, some], k[:1, :, some], v[:1, :, some], jnp.array([128]), jnp.array([S]), scale=H**-0.5, causal=True
    )[0]
    error = testing.error(jax.jit(call)(*args)[0][:1, -128:, some], wanted)
    flops = 2 * B * N * (T * (S - T) + T * (T + 1) / 2) * (H + V)
    row = {"op": "mla_prefill", "batch": B, "heads": N, "queries": T, "held": S, "widths": f"{H}/{V}", "us": us}
    row |= {"peer": peers.get(("mla_prefill", B, N, S)) if S == T and H == 192 else None, "floor": flops / timing.BF16 * 1e6}
    if S == T and H <= 192:
        try:
            row["cuDNN"] = timing.microseconds(_cudnn(H**-0.5), [args])
        except Exception as fault:  # a peer that refuses is no fault of ours
            row["cuDNN refuses"] = str(fault)[:60]
    return row | {"TFLOP/s": flops / us / 1e6, "error": error}


def rows(peers: dict[tuple, float] | None = None) -> list[dict]:
    """`peers`: microseconds by ("mla_prefill", batch, heads, held), of the fastest."""
    return [_row(shape, peers or {}) for shape in SHAPES]
