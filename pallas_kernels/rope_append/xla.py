"""The fallback for any device and dtype."""

import jax.numpy as jnp
from jax import lax


def rope_append(q, kv, weight, tokens, cache, *, eps, interleave):
    """As `rope_append` of the package."""
    R, E, (B, S) = cache.c_kv.shape[-1], cache.k_pe.shape[-1], (q.shape[0], cache.c_kv.shape[1])
    c = kv[..., :R].astype(jnp.float32)
    c = weight * (c * lax.rsqrt(jnp.mean(c * c, axis=-1, keepdims=True) + eps)).astype(kv.dtype)
    k_pe = turn(kv[..., None, R:], tokens, interleave)[:, :, 0]
    slot = jnp.where(tokens.rank >= 0, cache.length[:B, None] + tokens.rank, S)
    at, news = (jnp.arange(B)[:, None], slot), (c, k_pe, tokens.positions)
    held = (old.at[at].set(new.astype(old.dtype), mode="drop") for old, new in zip(cache[:3], news, strict=True))
    length = cache.length.at[:B].add((tokens.rank >= 0).sum(1, dtype=jnp.int32))
    return turn(q[..., -E:], tokens, interleave), type(cache)(*held, length)


def turn(x, tokens, interleave):
    """`[B T N E]` with its pairs rotated by the angles of their token, computed in float32."""
    pairs = (-1, 2) if interleave else (2, -1)
    axis = -1 if interleave else -2
    a, b = jnp.moveaxis(x.astype(jnp.float32).reshape(*x.shape[:-1], *pairs), axis, 0)
    cos, sin = (angle[:, :, None] for angle in (tokens.cos, tokens.sin))
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=axis).reshape(x.shape).astype(x.dtype)
