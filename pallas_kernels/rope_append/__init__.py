"""RoPE on queries, and in-place append of a step's tokens to a pool of pages: the contract, and the choice of implementation.

Token t of row b goes to slot `slot[b, t]` of the pool: its latent (the first R columns of `kv`) after RMSNorm with `weight`, and
its rotary key (the last E columns) after RoPE. The last E columns of each head's query are rotated by the same angles."""

from typing import NamedTuple

import jax

from pallas_kernels import choice
from pallas_kernels.choice import Unsupported
from pallas_kernels.rope_append import xla

__all__ = ["CHECKS", "Latents", "Tokens", "Unsupported", "rope_append"]


class Latents(NamedTuple):
    """The pool's pages, of all layers."""

    c_kv: jax.Array  # [G Z R]
    k_pe: jax.Array  # [G Z E]


class Tokens(NamedTuple):
    """The new tokens of a step. Their slots are distinct."""

    # [B T] int32: page * Z + place in the page; negative, or G * Z and more: the token is written nowhere
    slot: jax.Array
    cos: jax.Array  # [B T E/2] float32
    sin: jax.Array  # [B T E/2] float32


def check_gpu(q, kv, cache: Latents) -> str | None:
    """Why the Hopper kernel does not support these arrays (shapes and dtypes suffice); None: it does."""
    if reason := choice.too_old():
        return reason
    (_, T, _, H), R, E = q.shape, cache.c_kv.shape[-1], cache.k_pe.shape[-1]
    if R not in (128, 256, 512) or E not in (32, 64) or H < 128:
        return f"it takes latent ranks 128, 256 and 512, rotary widths 32 and 64, and heads of 128 or more, not {R}, {E} and {H}"
    if not 1 <= T <= 8:
        return f"it takes 1 to 8 tokens in a row, not {T}"
    return choice.not_bfloat16(q, kv, cache.c_kv, cache.k_pe)


CHECKS = {"mosaic_gpu": check_gpu}


def rope_append(
    q: jax.Array, kv: jax.Array, weight: jax.Array, tokens: Tokens, cache: Latents,
    *, eps: float, interleave: bool, impl: str | None = None,
) -> tuple[jax.Array, Latents]:  # fmt: skip
    """`[B T N H]`, `[B T R+E]`, `[R]` -> the rotated `[B T N E]`, and the pool with the tokens in it.

    `interleave`: the two elements of a pair are adjacent, else E/2 apart. `impl`: "mosaic_gpu" or "xla"; None takes the first
    that supports the arrays and the device. Raises Unsupported if the named one does not."""
    if choice.take("rope_append", impl, CHECKS, q, kv, cache) == "xla":
        return xla.rope_append(q, kv, weight, tokens, cache, eps=eps, interleave=interleave)
    from pallas_kernels.rope_append import gpu  # needs a newer JAX than the fallback

    return gpu.rope_append(q, kv, weight, tokens, cache, eps=eps, interleave=interleave)
