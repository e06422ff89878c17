"""Attention of many queries over expanded heads: the contract, the choice of implementation, and `merge` for split keys.

Query t of row b attends to the keys `first[b, t] <= s < stop[b, t]`, of those that there are. The output is the weighted sum of
values, and the LSE is of the scaled scores; a query whose range is empty (0 and 0, say: padding) gets zeros and -inf.

A row can hold several prompts, one after the other. A query that attends to its prompt up to itself has the prompt's start and
`t + 1`, one that attends to all of a prompt's cached prefix has the prefix's bounds. Any ranges are right. They are fast where
neighbouring queries have nearly the same: the kernels compute all keys from the first to the last that any of a block of queries
attends to (64 to 256 on a GPU), and mask them where ranges differ.

What may be anything, NaN too: queries whose range is empty; keys that a query does not attend to; keys and values past the
row's largest stop. All values before that must be finite, also between ranges, because their weight of zero is multiplied by
them. A NaN in a prompt's own keys reaches its own queries alone.

A long prefix can be split: one call per piece, with ranges within the piece, and one for the queries' own keys. `merge` combines
the answers two by two, in any order."""

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
    first: jax.Array,
    stop: jax.Array,
    *,
    scale: float,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`[B T N H]`, `[B S N H]`, `[B S N V]`, `[B T]`, `[B T]` -> `[B T N V]` in q's dtype, LSE `[B T N]` float32.

    `impl`: "mosaic_gpu", "mosaic_tpu" or "xla"; None takes the first of these that supports the arrays and the device. Raises
    Unsupported if the named one does not."""
    impl = choice.take("mla_prefill", impl, CHECKS, q, k, v)
    if not q.size or not k.size:
        return softmax.nothing(q, v.shape[-1])
    if impl == "xla":
        return xla.mla_prefill(q, k, v, first, stop, scale=scale)
    if impl == "mosaic_tpu":
        from pallas_kernels.mla_prefill import tpu

        return tpu.mla_prefill(q, k, v, first, stop, scale=scale, sizes=choice.sizes(tuning.MLA_PREFILL_TPU))
    from pallas_kernels.mla_prefill import gpu  # needs a newer JAX than the others

    sizes = tuning.MLA_PREFILL[q.shape[-1], v.shape[-1]]
    units = tuning.UNITS.get(choice.device(), tuning.DEFAULT_UNITS)
    return gpu.mla_prefill(q, k, v, first, stop, scale=scale, sizes=sizes, units=units)


def merge(
    out_a: jax.Array, lse_a: jax.Array, out_b: jax.Array, lse_b: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention over two sets of keys, from the answers for each: `[.. V]` in the wider dtype, LSE `[..]` float32."""
    lse = jnp.logaddexp(lse_a, lse_b)
    safe = jnp.where(jnp.isfinite(lse), lse, 0)[..., None]
    a, b = (
        jnp.exp(x[..., None] - safe) * out.astype(jnp.float32) for x, out in ((lse_a, out_a), (lse_b, out_b))
    )
    return (a + b).astype(jnp.promote_types(out_a.dtype, out_b.dtype)), lse
