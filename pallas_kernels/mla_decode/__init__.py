"""Decode attention over a paged latent cache, in absorbed form: the contract, and the choice of implementation.

Row b (a sequence) has `seq_lens[b]` cached tokens, of which its T query tokens are the last: query t attends to the first
`seq_lens[b] - T + t + 1`. Token s is in page `page_table[b, s // Z]`, slot `s % Z`. Pages and page-table entries past the end
may hold anything. The output is the weighted sum of latents, and the LSE is of the scaled scores; a query that attends to
nothing gets zeros and -inf.

The latent is bfloat16, or E4M3 with a scale per token and 128 columns, as `fp8.quantize_cache` makes it; all else is bfloat16.
A kernel may convert E4M3 and its other operand to bfloat16 or float16. This is exact for the output of `quantize_cache`
(rounded for `fp8.quantize`), except that in float16 |x| > 65,504 overflows, < 2^-24 flushes to zero. The GPU kernel, with up to
16 queries per row, rounds a weight times the scale to float16 instead of a latent value times the scale: scales must be below
512, and such a product loses at most 2^-32, or its last digits."""

import jax

from pallas_kernels import choice, softmax, tuning
from pallas_kernels.choice import Unsupported
from pallas_kernels.fp8 import Fp8, codes
from pallas_kernels.mla_decode import xla
from pallas_kernels.mla_decode.schedule import Schedule
from pallas_kernels.mla_decode.schedule import schedule as _schedule

__all__ = ["CHECKS", "Schedule", "Unsupported", "mla_decode", "schedule"]


def _shapes(q_c, q_pe, c_kv, k_pe) -> str | None:
    """Why neither kernel supports these arrays; None: it does."""
    T = q_c.shape[1]
    E = q_pe.shape[-1]
    Z = codes(c_kv).shape[1]
    if E not in (32, 64):
        return f"it takes rotary widths 32 and 64, not {E}"
    if Z < 16 or Z & (Z - 1):
        return f"it takes page sizes that are powers of two from 16, not {Z}"
    if not 1 <= T <= 8:
        return f"it takes 1 to 8 query tokens in a row, not {T}"
    return choice.not_bfloat16(q_c, q_pe, k_pe)


def check_gpu(q_c, q_pe, c_kv, k_pe, page_table) -> str | None:
    """Why the Hopper kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    if reason := choice.too_old():
        return reason
    if q_c.shape[-1] not in tuning.MLA_DECODE:
        return f"it takes latent ranks {', '.join(map(str, sorted(tuning.MLA_DECODE)))}, not {q_c.shape[-1]}"
    if not isinstance(c_kv, Fp8):
        return choice.not_bfloat16(c_kv) or _shapes(q_c, q_pe, c_kv, k_pe)
    if (rows := q_c.shape[1] * q_c.shape[2]) > tuning.MLA_DECODE_MOST:
        return f"with a latent in E4M3 it takes up to {tuning.MLA_DECODE_MOST} queries (tokens times heads), not {rows}"
    if reason := choice.not_e4m3(c_kv.codes):
        return reason
    if c_kv.codes.shape[1] * c_kv.scale.shape[-1] < 32:  # the copy engine writes to multiples of 128 bytes
        return f"with a latent in E4M3 of rank 128 it takes pages of 32 tokens or more, not {c_kv.codes.shape[1]}"
    return _shapes(q_c, q_pe, c_kv, k_pe)


def check_tpu(q_c, q_pe, c_kv, k_pe, page_table) -> str | None:
    """Why the TPU kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    if isinstance(c_kv, Fp8):
        return "it takes no latent in E4M3"
    R, Z = q_c.shape[-1], c_kv.shape[1]
    if R % 128 or R > 512:
        return f"it takes latent ranks that are multiples of 128 up to 512, not {R}"
    if Z > 1024:
        return f"it takes pages of up to 1024 tokens, not {Z}"
    if page_table.size > tuning.PAGE_TABLE_TPU:
        return f"it takes page tables of up to {tuning.PAGE_TABLE_TPU} entries, not {page_table.size}"
    return choice.not_bfloat16(c_kv) or _shapes(q_c, q_pe, c_kv, k_pe)


CHECKS = {"mosaic_gpu": check_gpu, "mosaic_tpu": check_tpu}


def schedule(seq_lens: jax.Array, *, heads: int, tokens: int = 1, units: int | None = None) -> Schedule:
    """Divides a step's work among multiprocessors; computed once per step, under jit, for all layers.

    seq_lens `[B]`; `heads` and `tokens` of the queries per row; `units`: multiprocessors, by default the device's."""
    if units is None:
        units = tuning.UNITS.get(choice.device(), tuning.DEFAULT_UNITS)
    return _schedule(seq_lens, rows=heads * tokens, units=units)


def mla_decode(
    q_c: jax.Array,
    q_pe: jax.Array,
    c_kv: jax.Array | Fp8,
    k_pe: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    schedule: Schedule | None = None,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`[B T N R]`, `[B T N E]`, `[G Z R]`, `[G Z E]`, `[B pages]`, `[B]` -> `[B T N R]` in q_c's dtype, LSE `[B T N]` float32.

    `impl`: "mosaic_gpu", "mosaic_tpu" or "xla"; None takes the first of these that supports the arrays and the device. Raises
    Unsupported if the named one does not. Only the GPU kernel reads `schedule`. A TPU wants `k_pe` row-major: see tpu.py."""
    arrays = q_c, q_pe, c_kv, k_pe, page_table
    impl = choice.take("mla_decode", impl, CHECKS, *arrays)
    if not q_c.size or not page_table.size:
        return softmax.nothing(q_c, q_c.shape[-1])
    if impl == "xla":
        return xla.mla_decode(*arrays, seq_lens, scale=scale)
    if impl == "mosaic_tpu":
        from pallas_kernels.mla_decode import tpu

        return tpu.mla_decode(*arrays, seq_lens, scale=scale, sizes=choice.sizes(tuning.MLA_DECODE_TPU))
    from pallas_kernels.mla_decode import gpu  # needs a newer JAX than the others

    if schedule is None:
        schedule = globals()["schedule"](seq_lens, heads=q_c.shape[2], tokens=q_c.shape[1])
    return gpu.mla_decode(*arrays, seq_lens, scale=scale, schedule=schedule)
