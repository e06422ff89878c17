"""quantized_matmul on a Hopper GPU, compared with XLA's matmul in bfloat16 and the floor."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from ops import timing

from pallas_kernels import choice, fp8, testing
from pallas_kernels.quantized_matmul import CHECKS, quantized_matmul, reference

# depth, features: DeepSeek-V3's projections
WEIGHTS = {
    "q_a_proj": (7168, 1536),
    "kv_a_proj": (7168, 576),
    "q_b_proj": (1536, 24576),
    "o_proj": (16384, 7168),
    "gate_proj of the shared expert": (7168, 2048),
    "down_proj of the shared expert": (2048, 7168),
    "a square": (8192, 8192),
}
ROWS = (1, 16, 64, 4096)


def check() -> list[str]:
    """One line per named case and kind of rows; the kernel's error may be twice the fallback's."""
    return [line for case in testing.QUANTIZED_MATMUL for line in _check(case)]


def _check(case: testing.QuantizedMatmulCase) -> Iterator[str]:
    inputs = testing.quantized_matmul_inputs(case)
    w = fp8.quantize_weight(inputs["w"])
    for held, x in (("w8", inputs["x"]), ("w8a8", fp8.quantize(inputs["x"]))):
        title = f"quantized_matmul, {case.name}, {held}"
        if reason := choice.why_not("mosaic_gpu", CHECKS, x, w):
            yield f"ok   {title}: refused, {reason}"
            continue
        wanted = reference.quantized_matmul(x, w)
        off, own = (
            testing.error(jax.jit(functools.partial(quantized_matmul, impl=impl))(x, w), wanted)
            for impl in ("mosaic_gpu", "xla")
        )
        yield f"{'ok  ' if off <= 2 * own else 'FAIL'} {title}: {off:.5f}, fallback {own:.5f}"


def _plain(x, w):
    return jnp.einsum("md,fd->mf", x, w)


def _row(name: str, M: int) -> Iterator[dict]:
    D, F = WEIGHTS[name]
    sets = timing.sets_of(D * F)
    keys = jax.random.split(jax.random.key(0), 1 + sets)
    x = jax.random.normal(keys[0], (M, D), jnp.bfloat16)
    plain = [jax.random.normal(key, (F, D), jnp.bfloat16) * D**-0.5 for key in keys[1:]]
    weights = [jax.jit(fp8.quantize_weight)(w) for w in plain]
    beside = timing.microseconds(_plain, [(x, w) for w in plain])
    codes, scale = jax.jit(fp8.quantize)(x)
    for held, rows, first, call in (
        ("w8", x, (x,), quantized_matmul),
        (
            "w8a8",
            fp8.Fp8(codes, scale),
            (scale, codes),
            lambda scale, codes, w: quantized_matmul(fp8.Fp8(codes, scale), w),
        ),
    ):
        wanted = jax.jit(reference.quantized_matmul)(rows, weights[0])
        work = timing.Work(
            call, [(*first, w) for w in weights], functools.partial(testing.error, wanted=wanted)
        )
        us, error = work.measure()
        flops = 2 * M * D * F
        floor = max(D * F / timing.HBM, flops / (timing.FP8 if held == "w8a8" else timing.BF16)) * 1e6
        row = {
            "op": "quantized_matmul",
            "weight": name,
            "held": held,
            "rows": M,
            "depth": D,
            "features": F,
            "us": us,
        }
        row |= {
            "floor": floor,
            "XLA in bfloat16": beside,
            "TB/s": D * F / us / 1e6,
            "TFLOP/s": flops / us / 1e6,
        }
        yield row | {"error": error}


def rows(peers: dict[tuple, float] | None = None) -> list[dict]:
    """E4M3 rows are quantised in advance; there are no `peers` of this op."""
    found = []
    for row in (row for name in WEIGHTS for M in ROWS for row in _row(name, M)):
        found.append(row)
        print(row, flush=True)
    return found
