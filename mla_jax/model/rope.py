"""Rotary positions on the `rope` part of queries and keys, with YaRN: frequencies, factor on cos and sin, softmax scale.

Llama 4 also scales a whole query by its position."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from mla_jax.base.config import Config, RopeScaling


def mscale(factor: float, weight: float) -> float:
    """YaRN's correction of attention entropy for a context stretched `factor` times."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def softmax_scale(config: Config) -> float:
    """(nope + rope)^-1/2, times mscale(mscale_all_dim)^2 where the context is stretched. The same in all four forms."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_scaling
    return scale * mscale(rope.factor, rope.mscale_all_dim) ** 2 if rope and rope.mscale_all_dim else scale


def amplitude(rope: RopeScaling | None) -> float:
    """The factor on cos and sin: 1 for the DeepSeek releases, whose two mscales are equal."""
    if rope is None or rope.rope_type == "linear":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type == "longrope":
        trained = rope.original_max_position_embeddings
        return math.sqrt(1 + math.log(rope.factor) / math.log(trained)) if rope.factor > 1 else 1.0
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.factor, rope.mscale) / mscale(rope.factor, rope.mscale_all_dim)
    return mscale(rope.factor, 1.0)


def inverse_frequencies(config: Config) -> Float[np.ndarray, " half"]:
    """Radians a position for each rotated pair. YaRN keeps the fast ones, divides the slow ones by `factor`, blends between;
    longrope divides each by its own."""
    dim, rope = config.qk_rope_head_dim, config.rope_scaling
    kept = 1.0 / config.rope_theta ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
    if rope is None:
        return kept.astype(np.float32)
    if rope.rope_type == "longrope":
        return (kept / np.array(rope.short_factor, np.float32)).astype(np.float32)
    stretched = kept / rope.factor
    if rope.rope_type == "linear":
        return stretched.astype(np.float32)

    def pair_that_turns(times: float) -> float:
        span = math.log(rope.original_max_position_embeddings / (times * 2 * math.pi))
        return dim * span / (2 * math.log(config.rope_theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0.0
    slow = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    return (stretched * slow + kept * (1 - slow)).astype(np.float32)


class Turns(NamedTuple):
    """The effect of positions on queries and keys, in float32: cosine and sine of each pair's angle, times the amplitude, and the
    factor on each query as a whole, None for 1."""

    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    growth: Float[Array, "B T"] | None = None


def turns(positions: Int[Array, "B T"], config: Config) -> Turns:
    cos, sin, _ = angles(positions, config)
    factor = amplitude(config.rope_scaling)
    return Turns(cos * factor, sin * factor, growth(positions, config.rope_scaling))


def angles(positions: Int[Array, "B T"], config: Config) -> Turns:
    """The turns alone: of length 1, nothing grows."""
    angle = positions[..., None].astype(jnp.float32) * inverse_frequencies(config)
    return Turns(jnp.cos(angle), jnp.sin(angle))


def unturned(positions: Int[Array, "B T"], config: Config) -> Turns:
    """All that `turns` has but the angles, for a form that turns by itself."""
    return turns(0 * positions, config)._replace(growth=growth(positions, config.rope_scaling))


def growth(positions: Int[Array, "B T"], rope: RopeScaling | None) -> Float[Array, "B T"] | None:
    """Llama 4's factor on queries: one step up at each multiple of the trained length, 1 before the first."""
    if rope is None or not rope.llama_4_scaling_beta:
        return None
    lengths = positions // rope.original_max_position_embeddings
    return 1 + rope.llama_4_scaling_beta * jnp.log1p(lengths.astype(jnp.float32))


def grown(q: Float[Array, "B T N H"], turns: Turns) -> Float[Array, "B T N H"]:
    """Queries times their positions' factor."""
    return q if turns.growth is None else q * turns.growth[..., None, None].astype(q.dtype)


def rotate(x: Float[Array, "B T *H E"], turns: Turns, interleave: bool) -> Float[Array, "B T *H E"]:
    """Turns the pairs of `x` by their token's angles, in float32. Pairs are neighbours, or halves unless `interleave`."""
    cos, sin = (t.reshape(*t.shape[:2], *(1,) * (x.ndim - 3), -1) for t in turns[:2])
    y = x.astype(jnp.float32)
    pairs = (*y.shape[:-1], -1, 2) if interleave else (*y.shape[:-1], 2, -1)
    axis = -1 if interleave else -2
    a, b = (jnp.take(y.reshape(pairs), i, axis=axis) for i in (0, 1))
    return jnp.stack([a * cos - b * sin, a * sin + b * cos], axis=axis).reshape(x.shape).astype(x.dtype)
