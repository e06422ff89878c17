"""mla_prefill on a Hopper GPU, compared with FlashInfer, cuDNN and the floor."""

import functools
from collections.abc import Iterator

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


def check() -> Iterator[str]:
    """One line per named case that the kernel supports; its error may be twice the fallback's."""
    return (_check(case) for case in testing.MLA_PREFILL if (case.width, case.value) in tuning.MLA_PREFILL)


def _check(case: testing.MlaPrefillCase) -> str:
    inputs, options = testing.mla_prefill_inputs(case), {"scale": case.scale, "causal": case.causal}
    wanted, lse = jax.jit(functools.partial(reference.mla_prefill, **options))(**inputs)
    own, _ = jax.jit(functools.partial(mla_prefill, **options, impl="xla"))(**inputs)
    out, got_lse = jax.jit(functools.partial(mla_prefill, **options, impl="mosaic_gpu"))(**inputs)
    off, own_off, lse_off = testing.error(out, wanted), testing.error(own, wanted), testing.lse_error(got_lse, lse)
    good = off <= 2 * own_off and lse_off < 1e-3
    return f"{'ok  ' if good else 'FAIL'} mla_prefill, {case.name}: {off:.5f}, fallback {own_off:.5f}, lse {lse_off:.1e}"


def work(shape: tuple[int, ...]) -> timing.Work:
    """The error is of the last queries of two heads."""
    B, N, T, S, H, V = shape
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, dims, jnp.bfloat16)
        for key, dims in zip(keys, ((B, T, N, H), (B, S, N, H), (B, S, N, V)), strict=True)
    )
    args = jnp.full((B,), T, jnp.int32), q, k, v, jnp.full((B,), S, jnp.int32)
    call = functools.partial(mla_prefill, scale=H**-0.5)
    some = slice(0, 2)  # heads
    wanted = reference.mla_prefill(
        q[:1, -128:, some], k[:1, :, some], v[:1, :, some], jnp.array([128]), jnp.array([S]), scale=H**-0.5, causal=True
    )[0]
    return timing.Work(
        lambda q_lens, q, k, v, kv_lens: call(q, k, v, q_lens, kv_lens)[0],
        [args],
        lambda out: testing.error(out[:1, -128:, some], wanted),
        most=16,
    )


def _row(shape: tuple[int, ...], peers: dict[tuple, dict]) -> dict:
    B, N, T, S, H, V = shape
    us, error = work(shape).measure()
    flops = 2 * B * N * (T * (S - T) + T * (T + 1) / 2) * (H + V)
    row = {"op": "mla_prefill", "batch": B, "heads": N, "queries": T, "held": S, "widths": f"{H}/{V}", "us": us}
    row |= {"floor": flops / timing.BF16 * 1e6}
    known = peers.get(("mla_prefill", B, N, S), {}) if S == T and H == 192 else {}
    return row | {"TFLOP/s": flops / us / 1e6, "error": error} | known


def rows(peers: dict[tuple, dict] | None = None) -> Iterator[dict]:
    """`peers`: microseconds by ("mla_prefill", batch, heads, tokens), then by name."""
    return (_row(shape, peers or {}) for shape in SHAPES)
