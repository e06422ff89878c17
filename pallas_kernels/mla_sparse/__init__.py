"""Attention over chosen tokens of a paged latent cache, in absorbed form: the contract, and the choice of implementation.

Query t of row b attends to the first `counts[b, t]` of its own `slots[b, t]`, in any order. A slot is a place in the pool:
`page * Z + offset`. Slots past the count may be anything. The output is the weighted sum of latents, and the LSE is of the scaled
scores; a query that attends to nothing gets zeros and -inf. The latent is as `mla_decode` takes it: bfloat16, or E4M3 with a
scale per token and 128 columns, of which the GPU kernel converts latents, keys, queries and weights to float16."""

import jax

from pallas_kernels import choice, softmax, tuning
from pallas_kernels.choice import Unsupported
from pallas_kernels.fp8 import Fp8
from pallas_kernels.mla_sparse import xla

__all__ = ["CHECKS", "Unsupported", "mla_sparse"]

RANKS = 128, 256, 512  # of the GPU kernel
RANKS_FP8 = 256, 512  # with a latent in E4M3


def check_gpu(q_c, q_pe, c_kv, k_pe, slots) -> str | None:
    """Why the Hopper kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    if reason := choice.too_old():
        return reason
    R, E = q_c.shape[-1], q_pe.shape[-1]
    if E != 64:
        return f"it takes the rotary width 64, not {E}"
    ranks = RANKS_FP8 if isinstance(c_kv, Fp8) else RANKS
    if R not in ranks:
        return f"it takes latent ranks {', '.join(map(str, ranks))}, not {R}"
    if isinstance(c_kv, Fp8):
        return choice.not_e4m3(c_kv.codes) or choice.not_bfloat16(q_c, q_pe, k_pe)
    return choice.not_bfloat16(q_c, q_pe, c_kv, k_pe)


CHECKS = {"mosaic_gpu": check_gpu}


def mla_sparse(
    q_c: jax.Array,
    q_pe: jax.Array,
    c_kv: jax.Array | Fp8,
    k_pe: jax.Array,
    slots: jax.Array,
    counts: jax.Array,
    *,
    scale: float,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`[B T N R]`, `[B T N E]`, `[G Z R]`, `[G Z E]`, `[B T K]`, `[B T]` -> `[B T N R]` in q_c's dtype, LSE `[B T N]` float32.

    `impl`: "mosaic_gpu" or "xla"; None takes the first that supports the arrays and the device. Raises Unsupported if the named
    one does not."""
    arrays = q_c, q_pe, c_kv, k_pe, slots
    impl = choice.take("mla_sparse", impl, CHECKS, *arrays)
    if not q_c.size or not slots.size:
        return softmax.nothing(q_c, q_c.shape[-1])
    if impl == "xla":
        return xla.mla_sparse(*arrays, counts, scale=scale)
    from pallas_kernels.mla_sparse import gpu  # needs a newer JAX than the fallback

    units = tuning.UNITS.get(choice.device(), tuning.DEFAULT_UNITS)
    return gpu.mla_sparse(*arrays, counts, scale=scale, units=units)
