"""E4M3 with float32 scales: the kernels' format of quantised caches, activations and weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

GROUP = 128  # columns that share a scale; in a weight, also rows
LARGEST = 448.0  # of E4M3; a cast of a larger number gives NaN


class Fp8(NamedTuple):
    """`codes * scale`: activations and caches have a scale per row and 128 columns, weights a scale per block of 128 by 128."""

    codes: jax.Array  # [.. D], or [.. F D] of a weight; float8_e4m3fn
    scale: jax.Array  # [.. ceil(D/128)], or [.. ceil(F/128) ceil(D/128)]; float32


def codes(x: jax.Array | Fp8) -> jax.Array:
    """`x`, or the codes of a quantised `x`: the array that has the logical shape."""
    return x.codes if isinstance(x, Fp8) else x


def quantize(x: jax.Array) -> Fp8:
    """Quantises rows `[.. D]`, D a multiple of 128, with the smallest scales that do not overflow; zeros have the scale 0."""
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, GROUP)
    return _with_scale(x.shape, groups, jnp.max(jnp.abs(groups), axis=-1) / LARGEST)


def quantize_cache(x: jax.Array) -> Fp8:
    """As `quantize`, but scales are powers of two: code times scale is then exact in bfloat16."""
    groups = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, GROUP)
    bits = jax.lax.bitcast_convert_type(jnp.max(jnp.abs(groups), axis=-1) / LARGEST, jnp.uint32)
    return _with_scale(
        x.shape, groups, jax.lax.bitcast_convert_type((bits + 0x7FFFFF) >> 23 << 23, jnp.float32)
    )


def _with_scale(shape, groups, scale):
    values = groups / jnp.where(scale > 0, scale, 1)[..., None]
    codes = jnp.clip(values, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    return Fp8(codes.reshape(shape), scale)


def quantize_weight(w: jax.Array) -> Fp8:
    """Quantises weights `[.. F D]` with the smallest scale per block of 128 by 128; the last blocks may be smaller."""
    *stack, F, D = w.shape
    padded = jnp.pad(w.astype(jnp.float32), [(0, 0)] * len(stack) + [(0, -F % GROUP), (0, -D % GROUP)])
    blocks = padded.reshape(*stack, -(-F // GROUP), GROUP, -(-D // GROUP), GROUP)
    scale = jnp.max(jnp.abs(blocks), axis=(-3, -1)) / LARGEST
    values = blocks / jnp.where(scale > 0, scale, 1)[..., None, :, None]
    codes = jnp.clip(values, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
    return Fp8(codes.reshape(padded.shape)[..., :F, :D], scale)


def dequantize(x: Fp8, rows: int = 1) -> jax.Array:
    """The values in float32; `rows` share a scale: 1, or GROUP for a weight."""
    scale = jnp.repeat(x.scale, GROUP, axis=-1)[..., : x.codes.shape[-1]]
    if rows > 1:
        scale = jnp.repeat(scale, rows, axis=-2)[..., : x.codes.shape[-2], :]
    return x.codes.astype(jnp.float32) * scale
