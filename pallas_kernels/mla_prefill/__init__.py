"""Attention of many queries over expanded heads: the contract, who fulfils it, and how two parts of one become the whole.

Row b holds `q_lens[b]` queries and `kv_lens[b]` keys; what lies past either may be anything. Query t sits at position
`kv_lens[b] - q_lens[b] + t`, so keys of a prefix come before those of the queries; causal, it sees the keys up to its own
position, else all of the row. The output is the weighted sum of values, zeros where nothing is seen; the LSE is that of
the scaled scores, then -inf.

A long prefix may come in pieces: each is one call with `causal=False`, the queries' own keys are one with `causal=True`,
and `merge` joins the answers two by two, in any order."""

import jax
import jax.numpy as jnp

from pallas_kernels import choice, softmax, tuning
from pallas_kernels.choice import Unsupported
from pallas_kernels.mla_prefill import xla

__all__ = ["CHECKS", "Unsupported", "merge", "mla_prefill"]


def check_gpu(q, k, v) -> str | None:
    """Why the Hopper kernel cannot take these arrays (shapes and dtypes suffice); None: it can."""
    if reason := choice.too_old():
        return reason
    if (widths := (q.shape[-1], v.shape[-1])) not in tuning.MLA_PREFILL:
        known = " or ".join(f"{key} and {value}" for key, value in tuning.MLA_PREFILL)
        return f"it takes heads of {known}, not {widths[0]} and {widths[1]}"
    return choice.not_bfloat16(q, k, v)


def check_tpu(q, k, v) -> str | None:
    """Why the TPU kernel cannot take these arrays (shapes and dtypes suffice); None: it can."""
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

    `impl` is "mosaic_gpu", "mosaic_tpu", "xla" or, with None, the first of these that can; a name it cannot honour raises
    Unsupported."""
    impl = choice.take("mla_prefill", impl, CHECKS, q, k, v)
    if not q.size or not k.size:
        return softmax.nothing(q, v.shape[-1])
    if impl == "xla":
        return xla.mla_prefill(q, k, v, q_lens, kv_lens, scale=scale, causal=causal)
    if impl == "mosaic_tpu":
        from pallas_kernels.mla_prefill import tpu

        sizes = choice.sizes(tuning.MLA_PREFILL_TPU)
        return tpu.mla_prefill(q, k, v, q_lens, kv_lens, scale=scale, causal=causal, sizes=sizes)
    from pallas_kernels.mla_prefill import gpu  # needs a JAX that the others do not

    sizes = tuning.MLA_PREFILL[q.shape[-1], v.shape[-1]]
    units = tuning.UNITS.get(choice.device(), tuning.DEFAULT_UNITS)
    return gpu.mla_prefill(q, k, v, q_lens, kv_lens, scale=scale, causal=causal, sizes=sizes, units=units)


def merge(out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention over two sets of keys as one, from the answers over each: `[.. V]` in the wider dtype, LSE `[..]` float32."""
    lse = jnp.logaddexp(lse_a, lse_b)
    safe = jnp.where(jnp.isfinite(lse), lse, 0)[..., None]
    a, b = (jnp.exp(x[..., None] - safe) * out.astype(jnp.float32) for x, out in ((lse_a, out_a), (lse_b, out_b)))
    return (a + b).astype(jnp.promote_types(out_a.dtype, out_b.dtype)), lse
