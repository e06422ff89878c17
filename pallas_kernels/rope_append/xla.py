"""The fallback for any device and dtype."""

import jax.numpy as jnp
from jax import lax


def rope_append(q, kv, weight, tokens, cache, *, eps, interleave):
    """As `rope_append` of the package."""
    R, E = cache.c_kv.shape[-1], cache.k_pe.shape[-1]
    c = kv[..., :R].astype(jnp.float32)
    c = weight * (c * lax.rsqrt(jnp.mean(c * c, axis=-1, keepdims=True) + eps)).astype(kv.dtype)
    k_pe = turn(kv[..., None, R:], tokens, interleave)[:, :, 0]
    held = (write(old, tokens.slot, new) for old, new in zip(cache, (c, k_pe), strict=True))
    return turn(q[..., -E:], tokens, interleave), type(cache)(*held)


def write(pages, slot, new):
    """`[G Z W]` with `new`, `[B T W]`, in its slots. Slots outside of the pool, negative ones too, are dropped."""
    flat = pages.reshape(-1, pages.shape[-1])
    slot = jnp.where(slot < 0, len(flat), slot)  # a negative index would count from the end
    return flat.at[slot].set(new.astype(pages.dtype), mode="drop").reshape(pages.shape)


def turn(x, tokens, interleave):
    """`[B T N E]` with its pairs rotated by the angles of their token, computed in float32."""
    pairs = (-1, 2) if interleave else (2, -1)
    axis = -1 if interleave else -2
    a, b = jnp.moveaxis(x.astype(jnp.float32).reshape(*x.shape[:-1], *pairs), axis, 0)
    cos, sin = (angle[:, :, None] for angle in (tokens.cos, tokens.sin))
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=axis).reshape(x.shape).astype(x.dtype)
