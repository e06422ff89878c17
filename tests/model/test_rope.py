"""Rotation, frequencies and softmax scale against their formulas in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.base.config import Config
from mla_jax.model import rope

SIZES = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 8,
    "kv_lora_rank": 4,
}
DIM, THETA, ORIGINAL = 64, 10000.0, 4096
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": ORIGINAL}
SCALINGS = {
    "none": None,
    "linear": {"type": "linear", "factor": 8.0},
    "yarn, equal mscales": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn, different mscales": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, no mscales": YARN,
    "yarn, attention_factor": {**YARN, "attention_factor": 1.5},
    "yarn, no truncation": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "truncate": False},
    "yarn, equal betas": {**YARN, "beta_fast": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, factor 1": {**YARN, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    "yarn, short original": {**YARN, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
}


def config_of(scaling: dict | None, interleave: bool = True) -> Config:
    hf = {**SIZES, "qk_rope_head_dim": DIM, "rope_theta": THETA, "rope_interleave": interleave, "model_type": "youtu"}
    return Config.from_hf({**hf, "rope_scaling": scaling})


def mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1


def frequencies(scaling: dict | None) -> np.ndarray:
    extrapolated = THETA ** (-2 * np.arange(DIM // 2) / DIM)
    if scaling is None:
        return extrapolated
    if scaling["type"] == "linear":
        return extrapolated / scaling["factor"]

    def dimension(turns: float) -> float:
        return DIM * math.log(scaling["original_max_position_embeddings"] / (2 * math.pi * turns)) / (2 * math.log(THETA))

    low, high = dimension(scaling["beta_fast"]), dimension(scaling["beta_slow"])
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, DIM - 1)
    if low == high:
        high += 0.001
    mask = 1 - np.clip((np.arange(DIM // 2) - low) / (high - low), 0, 1)
    return extrapolated / scaling["factor"] * (1 - mask) + extrapolated * mask


def amplitude(scaling: dict | None) -> float:
    if scaling is None or scaling["type"] != "yarn":
        return 1.0
    if "attention_factor" in scaling:
        return scaling["attention_factor"]
    if "mscale" in scaling:
        return mscale(scaling["factor"], scaling["mscale"]) / mscale(scaling["factor"], scaling["mscale_all_dim"])
    return mscale(scaling["factor"], 1.0)


def rotated(x: np.ndarray, positions: np.ndarray, scaling: dict | None, interleave: bool) -> np.ndarray:
    """Each pair of `x [T E]` as a complex number, turned."""
    first, second = (x[:, 0::2], x[:, 1::2]) if interleave else (x[:, : DIM // 2], x[:, DIM // 2 :])
    turned = (first + 1j * second) * np.exp(1j * positions[:, None] * frequencies(scaling)) * amplitude(scaling)
    out = np.empty_like(x)
    if interleave:
        out[:, 0::2], out[:, 1::2] = turned.real, turned.imag
    else:
        out[:, : DIM // 2], out[:, DIM // 2 :] = turned.real, turned.imag
    return out


def turned(x: jax.Array, positions: jax.Array, config: Config) -> jax.Array:
    return rope.rotate(x, rope.turns(positions, config), config.rope_interleave)


@pytest.mark.parametrize("interleave", [True, False], ids=["neighbours", "halves"])
@pytest.mark.parametrize("name", SCALINGS)
def test_rotation_follows_its_formula(name, interleave):
    x, positions = np.random.default_rng(0).standard_normal((9, DIM)), np.array([0, 1, 2, 3, 17, 100, 999, 2048, 4095])
    found = turned(jnp.asarray(x[None], jnp.float32), jnp.asarray(positions[None]), config_of(SCALINGS[name], interleave))
    np.testing.assert_allclose(found[0], rotated(x, positions, SCALINGS[name], interleave), atol=4e-3)
    np.testing.assert_allclose(found[0, :4], rotated(x, positions, SCALINGS[name], interleave)[:4], atol=1e-5)


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_follow_their_formula(name):
    np.testing.assert_allclose(rope.inverse_frequencies(config_of(SCALINGS[name])), frequencies(SCALINGS[name]), rtol=1e-6)


@pytest.mark.parametrize("position", [2**15, 2**15 + 1, 131_071, 159_999, 163_839])
def test_far_positions_lose_no_more_than_float32_of_the_angle_does(position):
    scaling, x = SCALINGS["yarn, equal mscales"], np.random.default_rng(1).standard_normal((1, DIM))
    found = np.asarray(turned(jnp.asarray(x[None], jnp.float32), jnp.asarray([[position]]), config_of(scaling)))[0]
    size = np.abs(x).reshape(-1, 2).sum(1).repeat(2)
    bound = 1e-5 + 4 * 2**-24 * position * frequencies(scaling).repeat(2) * size  # the frequency and the product are rounded
    assert (np.abs(found - rotated(x, np.array([position]), scaling, True))[0] <= bound).all()


def test_bfloat16_input_is_turned_in_float32():
    x = np.random.default_rng(2).standard_normal((1, 1, DIM)).astype(np.float32)
    at, config = jnp.asarray([[100_000]]), config_of(None)
    low, exact = (turned(jnp.asarray(x, dtype).astype(dtype), at, config) for dtype in ("bfloat16", "float32"))
    assert low.dtype == jnp.bfloat16
    np.testing.assert_allclose(low.astype(jnp.float32), exact, atol=0.03)


@settings(max_examples=30)
@given(st.integers(0, 2000), st.integers(0, 2000), st.booleans())
def test_scores_depend_on_the_distance_alone(at, distance, interleave):
    config = config_of(None, interleave)
    q, k = jnp.asarray(np.random.default_rng(at).standard_normal((2, 1, 1, DIM)), jnp.float32)

    def score(query: int, key: int) -> float:
        return float(jnp.vdot(turned(q, jnp.asarray([[query]]), config), turned(k, jnp.asarray([[key]]), config)))

    assert score(at + distance, at) == pytest.approx(score(distance, 0), abs=1e-2)


def test_heads_turn_as_if_alone():
    x, positions = (
        np.random.default_rng(3).standard_normal((2, 3, 4, DIM)).astype(np.float32),
        jnp.asarray([[0, 5, 9], [7, 7, 1]]),
    )
    together = turned(jnp.asarray(x), positions, config_of(None))
    for head in range(4):
        np.testing.assert_array_equal(together[:, :, head], turned(jnp.asarray(x[:, :, head]), positions, config_of(None)))


@pytest.mark.parametrize(("preset", "expected"), [("v3", 0.13523), ("v2", 0.11472), ("v2_lite", 0.11472)])
def test_softmax_scales_are_those_of_the_released_models(preset, expected):
    config = Config.preset(preset)
    assert rope.softmax_scale(config) == pytest.approx(expected, abs=5e-6)
    assert rope.amplitude(config.rope_scaling) == 1.0


@pytest.mark.parametrize("name", ["none", "linear", "yarn, no mscales", "yarn, factor 1"])
def test_softmax_scale_is_plain_where_no_mscale_says_otherwise(name):
    config = config_of(SCALINGS[name])
    assert rope.softmax_scale(config) == pytest.approx((config.qk_nope_head_dim + DIM) ** -0.5)
