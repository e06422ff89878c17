"""Attention of many queries over expanded heads: the contract, the choice of implementation, and `merge` for split keys.

Row b (a sequence) has `q_lens[b]` queries and `kv_lens[b]` keys; entries past these may hold anything. Query t has position
`kv_lens[b] - q_lens[b] + t`, so the keys of a prefix come before the queries' own. With `causal` it attends to keys up to its
own position, else to all of the row. The output is the weighted sum of values, and the LSE is of the scaled scores; a query
that attends to nothing gets zeros and -inf.

A long prefix can be split: one call with `causal=False` per piece, one with `causal=True` for the queries' own keys. `merge`
combines the answers two by two, in any order."""

import jax
import jax.numpy as jnp

from pallas_kernels import choice, softmax, tuning
from pallas_kernels.choice import Unsupported
from pallas_kernels.mla_prefill import xla

__all__ = ["CHECKS", "Unsupported", "merge", "mla_prefill"]


def check_gpu(q, k, v) -> str | None:
    """Why the Hopper kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    if reason := choice.too_old():
        return reason
    if (widths := (q.shape[-1], v.shape[-1])) not in tuning.MLA_PREFILL:
        known = " or ".join(f"{key} and {value}" for key, value in tuning.MLA_PREFILL)
        return f"it takes heads of {known}, not {widths[0]} and {widths[1]}"
    return choice.not_bfloat16(q, k, v)


def check_tpu(q, k, v) -> str | None:
    """Why the TPU kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    widths = {q.shape[-1], v.shape[-1]}
    if max(widths) > 256 or any(width % 32 for width in widths):
        return f"it takes heads of up to 256, in multiples of 32, not {q.shape[-1]} and {v.shape[-1]}"
    return choice.not_bfloat16(q, k, v)


CHECKS = {"mosaic_gpu": check_gpu, "mosaic_tpu": check_tpu}


def mla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_lens: jax.Array,
    kv_lens: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`[B T N H]`, `[B S N H]`, `[B S N V]`, `[B]`, `[B]` -> `[B T N V]` in q's dtype, LSE `[B T N]` float32.

    `impl`: "mosaic_gpu", "mosaic_tpu" or "xla"; None takes the first of these that supports the arrays and the device. Raises
    Unsupported if the named one does not."""
    impl = choice.take("mla_prefill", impl, CHECKS, q, k, v)
    if not q.size or not k.size:
        return softmax.nothing(q, v.shape[-1])
    if impl == "xla":
        return xla.mla_prefill(q, k, v, q_lens, kv_lens, scale=scale, causal=causal)
    if impl == "mosaic_tpu":
        from pallas_kernels.mla_prefill import tpu

        sizes = choice.sizes(tuning.MLA_PREFILL_TPU)
        return tpu.mla_prefill(q, k, v, q_lens, kv_lens, scale=scale, causal=causal, sizes=sizes)
    from pallas_kernels.mla_prefill import gpu  # needs a newer JAX than the others

    sizes = tuning.MLA_PREFILL[q.shape[-1], v.shape[-1]]
    units = tuning.UNITS.get(choice.device(), tuning.DEFAULT_UNITS)
    return gpu.mla_prefill(q, k, v, q_lens, kv_lens, scale=scale, causal=causal, sizes=sizes, units=units)


def merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over two sets of keys, from the answers for each: `[.. V]` in the wider dtype, LSE `[..]` float32."""
    lse = jnp.logaddexp(lse_a, lse_b)
    safe = jnp.where(jnp.isfinite(lse), lse, 0)[..., None]
    a, b = (jnp.exp(x[..., None] - safe) * out.astype(jnp.float32) for x, out in ((lse_a, out_a), (lse_b, out_b)))
    return (a + b).astype(jnp.promote_types(out_a.dtype, out_b.dtype)), lse
