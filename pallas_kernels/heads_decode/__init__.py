"""Decode attention over a paged cache of heads, of which each may have tokens of its own: the contract, and the choice of
implementation.

Head n of row b attends to its `seq_lens[n, b]` cached tokens. Token s is in slot `s % Z` of the part `page_table[n, b, s // Z]`;
part g N + h is what page g has of head h. Where the table's first axis is 1, all heads of a row share its pages, and entries are
pages. Entries past the end may be anything, and so may slots. A head that attends to nothing gets zeros and an LSE of -inf."""

import jax

from pallas_kernels import choice, softmax, tuning
from pallas_kernels.choice import Unsupported
from pallas_kernels.heads_decode import xla

__all__ = ["CHECKS", "Unsupported", "heads_decode"]

PAGE = 64  # tokens of a page that the GPU kernel takes


def check_gpu(q, k, v, page_table) -> str | None:
    """Why the Hopper kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    if reason := choice.too_old():
        return reason
    H, V = k.shape[-1], v.shape[-1]
    if H % 64 or V % 64 or H > 256 or V > 256:
        return f"it takes widths that are multiples of 64 up to 256, not {H} and {V}"
    if k.shape[1] != PAGE:
        return f"it takes pages of {PAGE} tokens, not {k.shape[1]}"
    return choice.not_bfloat16(q, k, v)


CHECKS = {"mosaic_gpu": check_gpu}


def heads_decode(
    q: jax.Array, k: jax.Array, v: jax.Array, page_table: jax.Array, seq_lens: jax.Array,
    *, scale: float, impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """`[B N H]`, `[G Z N H]`, `[G Z N V]`, `[N or 1, B, pages]`, `[N or 1, B]` -> `[B N V]` in q's dtype, LSE `[B N]` float32.

    `impl`: "mosaic_gpu" or "xla"; None takes the first that supports the arrays and the device. Raises Unsupported if the named
    one does not."""
    arrays = q, k, v, page_table
    impl = choice.take("heads_decode", impl, CHECKS, *arrays)
    if not q.size or not page_table.size:
        return softmax.nothing(q, v.shape[-1])
    if impl == "xla":
        return xla.heads_decode(*arrays, seq_lens, scale=scale)
    from pallas_kernels.heads_decode import gpu  # needs a newer JAX than the fallback

    units = tuning.UNITS.get(choice.device(), tuning.DEFAULT_UNITS)
    return gpu.heads_decode(*arrays, seq_lens, scale=scale, units=units)
