"""Decode attention over a paged latent cache, in absorbed form: the contract, and who fulfils it.

Row b holds `seq_lens[b]` tokens, its T query tokens being the last of them: query t sees `seq_lens[b] - T + t + 1`. Token s
lies in page `page_table[b, s // Z]`, slot `s % Z`; what lies past the end, in pages and in the table, may be anything. The
output is the weighted sum of latents, zeros where nothing is seen; the LSE is that of the scaled scores, then -inf."""

import jax

from pallas_kernels import tuning
from pallas_kernels.mla_decode import xla
from pallas_kernels.mla_decode.schedule import Schedule
from pallas_kernels.mla_decode.schedule import schedule as _schedule

__all__ = ["Schedule", "Unsupported", "check", "mla_decode", "schedule"]


class Unsupported(NotImplementedError):
    """A named implementation cannot do this, for the reason given."""


def check(q_c, q_pe, c_kv, k_pe) -> str | None:
    """Why the Hopper kernel cannot take these arrays (shapes and dtypes suffice); None: it can."""
    if tuple(map(int, jax.__version__.split(".")[:3])) < (0, 11, 2):
        return f"it needs JAX 0.11.2 or newer, this is {jax.__version__}"
    (_, T, _, R), E, Z = q_c.shape, q_pe.shape[-1], c_kv.shape[1]
    odd = {str(x.dtype) for x in (q_c, q_pe, c_kv, k_pe)} - {"bfloat16"}
    if odd:
        return f"it takes bfloat16, not {', '.join(sorted(odd))}"
    if R not in tuning.MLA_DECODE:
        return f"it takes latent ranks {', '.join(map(str, sorted(tuning.MLA_DECODE)))}, not {R}"
    if E not in (32, 64):
        return f"it takes rotary widths 32 and 64, not {E}"
    if Z < 16 or Z & (Z - 1):
        return f"it takes page sizes that are powers of two from 16, not {Z}"
    if not 1 <= T <= 8:
        return f"it takes 1 to 8 query tokens in a row, not {T}"
    return None


def _device() -> str:
    return jax.devices()[0].device_kind


def _hopper() -> bool:
    device = jax.devices()[0]
    return device.platform == "gpu" and str(getattr(device, "compute_capability", "")) == "9.0"


def schedule(seq_lens: jax.Array, *, heads: int, tokens: int = 1, units: int | None = None) -> Schedule:
    """Shares a step's work out; computed once per step, under jit, for all layers. `units`: multiprocessors of the device."""
    if units is None:
        units = tuning.UNITS.get(_device(), tuning.DEFAULT_UNITS)
    return _schedule(seq_lens, rows=heads * tokens, units=units)


def mla_decode(
    q_c: jax.Array,
    q_pe: jax.Array,
    c_kv: jax.Array,
    k_pe: jax.Array,
    page_table: jax.Array,
    seq_lens: jax.Array,
    *,
    scale: float,
    schedule: Schedule | None = None,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`[B T N R]`, `[B T N E]`, `[G Z R]`, `[G Z E]`, `[B pages]`, `[B]` -> `[B T N R]` in q_c's dtype, LSE `[B T N]` float32.

    `impl` is "mosaic_gpu", "xla" or, with None, the first of these that can; a name it cannot honour raises Unsupported."""
    reason = check(q_c, q_pe, c_kv, k_pe)
    if not reason and not _hopper():
        reason = f"it needs a Hopper GPU, this is {_device()}"
    if impl == "mosaic_gpu" and reason:
        raise Unsupported(f'mla_decode: impl="mosaic_gpu": {reason}')
    if impl not in (None, "mosaic_gpu", "xla"):
        raise Unsupported(f'mla_decode: no impl "{impl}"; there are "mosaic_gpu" and "xla"')
    if impl == "xla" or reason:
        return xla.mla_decode(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, scale=scale)
    from pallas_kernels.mla_decode import gpu  # needs a JAX that the fallback does not

    if schedule is None:
        schedule = globals()["schedule"](seq_lens, heads=q_c.shape[2], tokens=q_c.shape[1])
    return gpu.mla_decode(q_c, q_pe, c_kv, k_pe, page_table, seq_lens, scale=scale, schedule=schedule)
