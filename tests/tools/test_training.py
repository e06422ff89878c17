"""A step of training learns, balances, resumes exactly, and computes what the model computes when it is used."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from demo import training
from demo.recipe import MODEL, Recipe
from mla_jax.base.batch import Batch

TINY = MODEL | {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64}
TINY |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
TINY |= {"moe_intermediate_size": 16}
RECIPE = Recipe(model=TINY, steps=40, drop=0.0, learning_rate=1e-2)


@functools.cache
def step_of(**changed):
    """The step of RECIPE with changes; compiled once for all tests."""
    return training.step_of(replace(RECIPE, **changed), RECIPE.config(False))


def batch(step: int, rows: int = 4, length: int = 24):
    """Sequences that count upwards, so that there is something to learn."""
    starts = np.random.default_rng(step).integers(0, 30, (rows, 1))
    return jnp.asarray((starts + np.arange(length + 2)) % 60, jnp.int32), jnp.ones((rows, length + 2))


@pytest.mark.parametrize("optimizer", [pytest.param("muon", marks=pytest.mark.deep), "adamw"])
def test_the_losses_fall(optimizer):
    recipe = replace(RECIPE, optimizer=optimizer)
    trained, step = training.start(recipe), step_of(optimizer=optimizer)
    figures = []
    for i in range(recipe.steps):
        trained, found = step(trained, *batch(i))
        figures.append({k: float(v) for k, v in found.items()})
    assert figures[0]["loss"] == pytest.approx(np.log(64), rel=0.05)
    assert figures[-1]["loss"] < 0.5 * figures[0]["loss"]
    assert figures[-1]["mtp"] < 0.7 * figures[0]["mtp"]


@pytest.mark.deep
def test_a_run_that_stops_and_resumes_is_the_same_run(tmp_path):
    recipe = replace(RECIPE, drop=0.2)
    step = step_of(drop=0.2)
    whole, part = training.start(recipe), training.start(recipe)
    for i in range(4):
        whole, _ = step(whole, *batch(i))
    for i in range(2):
        part, _ = step(part, *batch(i))
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(2, args=ocp.args.StandardSave(part))
        manager.wait_until_finished()
        part = manager.restore(2, args=ocp.args.StandardRestore(training.start(recipe)))
    for i in range(2, 4):
        part, _ = step(part, *batch(i))
    jax.tree.map(np.testing.assert_array_equal, part, whole)


@pytest.mark.deep
def test_the_main_loss_is_the_cross_entropy_of_the_model_in_use():
    model = training.Model(RECIPE.config(True))
    values, bias = model.init(3)
    tokens, weight = batch(0)
    found = training.losses(model(values | bias), tokens, weight)
    used = model(values | bias)
    used.attention = "naive"
    hidden, _, _ = used(tokens[:, :-2], Batch.dense(4, 24))
    expected = optax.softmax_cross_entropy_with_integer_labels(used.unembed(hidden), tokens[:, 1:-1]).mean()
    assert float(found.main) == pytest.approx(float(expected), rel=1e-4)


def test_a_negative_weight_makes_a_token_less_likely():
    loss = jnp.array([0.01, 3.0])
    said, unsaid = training._mean(loss, jnp.array([1.0, 0.0])), training._mean(loss, jnp.array([-1.0, 0.0]))
    assert float(said) == pytest.approx(0.01)
    assert float(unsaid) == pytest.approx(-np.log(-np.expm1(-0.01)), rel=1e-4)
    assert jax.grad(lambda x: training._mean(x, jnp.array([-1.0, 0.0])))(loss)[0] < 0


@pytest.mark.deep
def test_the_biases_push_towards_experts_with_too_few_tokens():
    config, before = RECIPE.config(False), training.start(RECIPE)
    values = {path: value.astype(jnp.bfloat16) for path, value in (before.values | before.bias).items()}
    load = jax.jit(lambda values, *batch: training.losses(training.Model(config)(values), *batch).load)(values, *batch(1))
    after, _ = step_of(optimizer=RECIPE.optimizer)(before, *batch(1))
    for path, count in load.items():
        assert (np.sign(after.bias[path]) == np.sign(np.mean(count) - count)).all()


def test_matrices_go_to_muon_with_their_output_and_input_axes():
    values, _ = training.Model(RECIPE.config(False)).init(0)
    axes = training._matrices(values)
    assert axes["embed"] is None
    assert axes["norm"] is None
    assert axes["layers.1.mlp.experts.down"] == optax.contrib.MuonDimensionNumbers(2, 1)
    assert axes["layers.0.attn.o_proj"] == optax.contrib.MuonDimensionNumbers((1,), (0,))
    assert axes["layers.0.attn.q_b_proj"] == optax.contrib.MuonDimensionNumbers((1,), (0,))
