"""A cache of latents in E4M3: its contents, the forms that attend to it, and its cost in bytes and in likelihood."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from mla_jax import LLM, Config, SamplingParams, Transformer
from mla_jax.base.batch import Batch
from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.cache import paged
from mla_jax.model import fp8_latent
from mla_jax.model.block_attention import StepCache
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.mla import FORMS

CONFIG = dataclasses.replace(Config.preset("tiny"), kv_lora_rank=256)
ROWS, TOKENS = 2, 12


def model_of(attention: str, kv_cache: str = "fp8") -> Transformer:
    return Transformer(CONFIG, nnx.Rngs(0), dispatch=Dispatch(attention, kv_cache=kv_cache))


def step(model: Transformer, pool: paged.Pool, first: int, new: int) -> tuple[np.ndarray, paged.Pool]:
    """The hidden states of `new` tokens from `first` on, of rows that differ."""
    tokens = jnp.asarray(
        np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, TOKENS))[:, first : first + new], jnp.int32
    )
    batch = Batch.after(jnp.full(ROWS, first, jnp.int32), jnp.ones((ROWS, new), bool), paged.in_order(ROWS, TOKENS))
    hidden, pool, _ = jax.jit(model.__call__)(tokens, batch, pool)
    return np.asarray(hidden), pool


def test_codes_are_those_of_ml_dtypes_and_scales_the_least_powers_of_two_that_hold_a_group():
    rng = np.random.default_rng(0)
    c_kv = rng.standard_normal((2, 3, 256)).astype(np.float32) * np.float32(10.0) ** rng.integers(-4, 5, (2, 3, 1))
    c_kv[0, 0, :128] = 0
    held = fp8_latent.remembers(jnp.asarray(c_kv, jnp.float32), jnp.zeros((2, 3, 8)))
    groups = c_kv.astype(np.float32).reshape(2, 3, 2, 128)
    largest = np.abs(groups).max(-1)
    scale = np.where(largest > 0, np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1) / 448))), 0).astype(np.float32)
    np.testing.assert_array_equal(held["c_kv_scale"], scale)
    codes = (groups / np.where(scale > 0, scale, 1)[..., None]).astype(ml_dtypes.float8_e4m3fn).reshape(2, 3, 256)
    np.testing.assert_array_equal(np.asarray(held["c_kv"]).view(np.uint8), codes.view(np.uint8))
    back = np.asarray(fp8_latent.unpacked_latent(held)["c_kv"]).reshape(groups.shape)
    assert (np.abs(back - groups) <= np.maximum(np.abs(groups) / 16, scale[..., None] * 2.0**-10)).all()


@pytest.mark.deep
@pytest.mark.parametrize("form", ["compressed", "absorbed", "move_elided"])
def test_a_form_attends_to_the_numbers_that_the_codes_stand_for(form):
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = (2, 1, 4, 16), (2, 1, 4, 8), (2, 5, 256), (2, 5, 8), (4, 16, 256), (4, 16, 256)
    q_nope, q_pe, c_kv, k_pe, uk, uv = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    held = fp8_latent.remembers(c_kv, k_pe)
    numbers = np.asarray(held["c_kv"]).astype(np.float32) * np.repeat(np.asarray(held["c_kv_scale"]), 128, axis=-1)
    mask = jnp.ones((2, 1, 1, 5), bool)
    found = [
        row.attends((q_nope, q_pe), StepCache(cached, None, mask, row.reads), (uk, uv), 0.1)
        for row, cached in (
            (fp8_latent.over(FORMS[form]), held),
            (FORMS[form], {"c_kv": jnp.asarray(numbers), "k_pe": k_pe}),
        )
    ]
    np.testing.assert_array_equal(*found)


@pytest.mark.deep
def test_the_forms_agree_over_one_cache():
    said = {}
    for attention in ("compressed", "absorbed", "move_elided", "fused"):
        model = model_of(attention)
        _, pool = step(model, model.new_pool(ROWS), 0, TOKENS - 1)
        said[attention] = step(model, pool, TOKENS - 1, 1)[0]
    for name, hidden in said.items():
        np.testing.assert_allclose(hidden, said["move_elided"], atol=2e-2 * said["move_elided"].std(), err_msg=name)


def test_a_token_takes_half_the_bytes_of_bfloat16_and_its_scales():
    model = Transformer(CONFIG, nnx.Rngs(0), dispatch=Dispatch(kv_cache="fp8"))
    pool = model.new_pool(3)
    tokens = model.cached_layers * 3 * paged.PAGE
    assert pool["c_kv"].nbytes + pool["c_kv_scale"].nbytes == tokens * (256 + 4 * 256 // 128)


def loss(llm: LLM, tokens: list[int]) -> float:
    """Nats a token, read over the cache in two chunks."""
    model, table, said = llm.model, paged.in_order(1, len(tokens)), []
    pool = model.new_pool(table.size)
    call = jax.jit(lambda ids, batch, pool: model(ids, batch, pool)[:2])
    for some in (slice(0, 40), slice(40, len(tokens))):
        ids = jnp.asarray(tokens[some], jnp.int32)[None]
        hidden, pool = call(ids, Batch.after(jnp.full(1, some.start), jnp.ones(ids.shape, bool), table), pool)
        said.append(model.unembed(hidden)[0])
    logits = jnp.concatenate(said)[:-1]
    return float(-jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens[1:])[:, None], axis=1).mean())


@pytest.mark.deep
@pytest.mark.once
def test_the_demo_model_loses_little_and_says_so():
    plain, packed = LLM(), LLM(kv_cache="fp8")
    assert "in E4M3 with a scale" in packed.explain()
    assert "in E4M3 with a scale" not in plain.explain()
    text = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n" * 2
    tokens = plain.tokenizer.encode(text)
    losses = [loss(llm, tokens) for llm in (plain, packed)]
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 0.05
    assert packed.generate(text, SamplingParams(temperature=0, max_tokens=4))[0].text


def test_what_holds_no_such_latents_refuses():
    with pytest.raises(Unsupported, match="only latents are packed"):
        LLM(attention="naive", kv_cache="fp8")
    with pytest.raises(BadRequest, match="kv_cache is 'int7'"):
        LLM(kv_cache="int7")
    assert "latent has 16" in (fp8_latent.why_not(dataclasses.replace(CONFIG, kv_lora_rank=16), "auto") or "")
