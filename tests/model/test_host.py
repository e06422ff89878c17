"""Experts on the CPU in the model: the same sums as on the device, within what bfloat16 rows lose, and what is left for later."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.base.batch import Batch
from mla_jax.decode.loop import Program, logits
from mla_jax.model import moe
from mla_jax.model.moe import HostExperts, How, MoE, settle
from mla_jax.model.ops import rms_norm
from mla_jax.weights.host import offload

pytestmark = pytest.mark.usefixtures("host_library")

CONFIG = Config.from_hf({**models.FAMILIES["v3"], "first_k_dense_replace": 1, "num_hidden_layers": 4})
ROWS = 0.02  # of the largest value: rows are rounded to bfloat16 twice, weights once


def model_of(defer: int = 0, host: bool = True) -> Transformer:
    """Its experts' weights are bfloat16's, so that the host has the same."""
    model = Transformer(CONFIG, nnx.Rngs(0), experts="dense", defer=defer)
    for block in model.layers:
        if isinstance(block.mlp, MoE):
            for w in (block.mlp.experts.gate, block.mlp.experts.up, block.mlp.experts.down):
                w.set_value((10 * w[...]).astype(jnp.bfloat16).astype(jnp.float32))
            if host:
                offload(block.mlp)
    return model


def logits_of(model: Transformer, tokens: jax.Array) -> np.ndarray:
    return np.asarray(Program(logits, model)(tokens))  # waited for: a program does not keep the experts that it calls


def close(found, expected):
    np.testing.assert_allclose(found, expected, atol=ROWS * np.abs(expected).max())


@pytest.mark.parametrize("tokens", [2, 40])
def test_a_layer_on_the_host_is_that_of_the_device_and_masked_tokens_cost_nothing(tokens):
    rng = np.random.default_rng(tokens)
    x = jnp.asarray(rng.standard_normal((2, tokens, CONFIG.hidden_size)), jnp.float32)
    mask = jnp.ones((2, tokens), bool).at[1, tokens // 2 :].set(False)
    on_device, on_host = (model_of(host=host).layers[2].mlp for host in (False, True))
    assert isinstance(on_host.experts, HostExperts)
    expected, load, _ = on_device(x, mask, How(moe.dense))
    y, same_load = jax.jit(lambda x: on_host(x, mask, How(moe.dense))[:2])(x)
    np.testing.assert_array_equal(load, same_load)
    close(y, expected)
    close(y[~mask], on_host.shared(x)[~mask])


def test_a_model_with_its_experts_on_the_host_gives_the_logits_of_one_without():
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 12)), jnp.int32)
    close(*(logits_of(model_of(host=host), tokens) for host in (True, False)))


def test_only_layers_that_were_moved_are_on_the_host():
    model = model_of(host=False)
    offload(model.layers[2].mlp)
    assert [*model.on_host()] == [2]
    assert [*model_of().on_host()] == [1, 2, 3]
    assert [*model_of(host=False).on_host()] == []


def by_hand(model: Transformer, tokens: jax.Array, defer: int) -> jax.Array:
    """The hidden states with the last `defer` experts of every token added a layer later, by `dense` sums on the device."""
    batch, x, left = Batch.dense(*tokens.shape), model.embedded(tokens), 0.0
    form = model.how(batch, None).form
    for block in model.layers:
        x = x + block.attn(rms_norm(x, block.attn_norm[...], block.eps), batch, None, form)[0]
        y = rms_norm(x, block.mlp_norm[...], block.eps)
        if not isinstance(block.mlp, MoE):
            x = x + block.mlp(y)
            continue
        ids, weights = block.mlp.router(y[0])
        stacks = tuple(w[...] for w in (block.mlp.experts.gate, block.mlp.experts.up, block.mlp.experts.down))
        now = ids.shape[1] - defer
        x, left = (
            x + block.mlp.shared(y) + moe.dense(y[0], ids[:, :now], weights[:, :now], stacks) + left,
            moe.dense(y[0], ids[:, now:], weights[:, now:], stacks) if defer else 0.0,
        )
    return rms_norm(x + left, model.norm[...], model.config.rms_norm_eps)


@pytest.mark.parametrize("defer", [0, 1, 2])
def test_the_lowest_scored_experts_are_added_a_layer_later(defer):
    tokens = jnp.asarray([[5, 6, 7, 8]])
    expected = by_hand(model_of(host=False), tokens, defer)
    model = model_of(defer)
    found = jax.jit(lambda tokens: model(tokens, Batch.dense(*tokens.shape))[0])(tokens)
    close(found, expected)
    if defer:  # and that is another sum
        with pytest.raises(AssertionError):
            close(found, by_hand(model_of(host=False), tokens, 0))


def test_many_new_tokens_defer_nothing():
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, CONFIG.vocab_size, (1, 12)), jnp.int32)
    found, exact = (logits_of(model_of(defer), tokens) for defer in (2, 0))
    np.testing.assert_array_equal(found, exact)


def test_a_layer_never_defers_all_of_a_token():
    layer, x = model_of().layers[1].mlp, jnp.ones((1, 1, CONFIG.hidden_size))
    y, _, pending = layer(x, jnp.ones((1, 1), bool), How(moe.dense, defer=99))
    whole, *_ = layer(x, jnp.ones((1, 1), bool), How(moe.dense))
    assert pending.topk_ids.shape == (1, CONFIG.num_experts_per_tok - 1)
    close(settle(y, pending), whole)


def test_an_mtp_layer_leaves_nothing_for_later():
    config = dataclasses.replace(CONFIG, num_nextn_predict_layers=1)
    model = Transformer(config, nnx.Rngs(0), mtp=True, defer=2)
    exact = Transformer(config, nnx.Rngs(0), mtp=True)
    tokens, hidden = jnp.asarray([[5, 6]]), jnp.ones((1, 2, config.hidden_size))
    for each in (model, exact):
        offload(each.mtp[0].block.mlp)
    found, expected = (each.draft(0, tokens, hidden, Batch.dense(1, 2))[0] for each in (model, exact))
    np.testing.assert_array_equal(found, expected)
