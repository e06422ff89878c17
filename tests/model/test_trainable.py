"""Gradients through a model, against finite differences."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from mla_jax import LLM
from mla_jax.base.batch import Batch
from mla_jax.base.errors import Unsupported
from mla_jax.base.qtensor import QTensor
from mla_jax.model.moe import Places
from mla_jax.model.trainable import trainable

V3 = Path(__file__).parents[1] / "golden" / "v3"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(V3)


def value_of(llm: LLM, tokens: jax.Array, **options):
    """The loss as a function of the weights, and these."""
    graph, weights, rest = nnx.split(llm.trainable(**options), nnx.Param, ...)
    batch = Batch.dense(tokens.shape[0], tokens.shape[1] - 1)

    def loss(weights: Any) -> jax.Array:
        model = nnx.merge(graph, weights, rest)
        logp = jax.nn.log_softmax(model.unembed(model(tokens[:, :-1], batch)[0]))
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()

    return loss, weights


def random_tokens(llm: LLM, rows: int = 2, count: int = 12) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, llm.config.vocab_size, (rows, count)), jnp.int32)


PARAMETERS = [
    "embed", "layers.0.attn_norm", "layers.0.mlp.down", "layers.1.attn.q_b_proj", "layers.1.attn.uk", "layers.1.attn.uv",
    "layers.1.mlp.router.weight", "layers.1.mlp.experts.gate", "layers.1.mlp.experts.down", "layers.1.mlp.shared.up",
]  # fmt: skip


@pytest.mark.deep
def test_gradients_equal_finite_differences(llm):
    """Along the gradient of all weights, and of some alone."""
    loss, weights = value_of(llm, random_tokens(llm))
    loss = jax.jit(loss)
    gradient = dict(nnx.to_flat_state(jax.grad(loss)(weights)))
    ways = [set(gradient), *({path} for path in gradient if ".".join(map(str, path)) in PARAMETERS)]
    assert len(ways) == 1 + len(PARAMETERS)
    for some in ways:
        way = nnx.from_flat_state([(path, g if path in some else g.replace(0 * g[...])) for path, g in gradient.items()])
        length = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(way)))
        assert length > 0, some
        found = slope(loss, weights, jax.tree.map(lambda g, length=length: g / length, way))
        np.testing.assert_allclose(found, length, rtol=2e-2, err_msg=str(some))


def slope(loss: Callable, weights: Any, way: Any, step: float = 1e-3) -> jax.Array:
    """By two losses, so near each other that no token changes its experts."""
    ahead, behind = (loss(jax.tree.map(lambda w, d, by=by: w + by * d, weights, way)) for by in (step, -step))
    return (ahead - behind) / (2 * step)


def test_the_routers_bias_has_no_gradient(llm):
    loss, weights = value_of(llm, random_tokens(llm))
    found = {path: v[...] for path, v in nnx.to_flat_state(jax.jit(jax.grad(loss))(weights))}
    biases = [path for path in found if path[-2:] == ("router", "bias")]
    assert biases
    assert not any(found[path].any() for path in biases)
    assert all(found[(*path[:-1], "weight")].any() for path in biases)


@pytest.mark.deep
def test_gradients_stay_where_activations_are_computed_again(llm):
    tokens = random_tokens(llm)
    loss, weights = value_of(llm, tokens)
    expected = jax.jit(jax.grad(loss))(weights)
    for other in (jax.checkpoint(loss), value_of(llm, tokens, remat=True)[0]):
        found = jax.jit(jax.grad(other))(weights)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, expected)


def test_a_layer_whose_activations_are_computed_again_keeps_its_input_alone(llm):
    tokens = random_tokens(llm, 8, 65)

    def kept(**options) -> list[jax.ShapeDtypeStruct]:
        """The arrays of the forward pass that the backward pass needs, except weights and logits."""
        loss, weights = value_of(llm, tokens, **options)
        shapes = [w.shape for w in jax.tree.leaves(weights)]
        residuals = jax.tree.leaves(jax.eval_shape(lambda weights: jax.vjp(loss, weights)[1], weights))
        return [r for r in residuals if r.shape not in shapes and llm.config.vocab_size not in r.shape]

    size = llm.config.hidden_size
    inputs = [r for r in kept(remat=True) if r.shape == (8, 64, size)]
    everything, less = (sum(r.size for r in some) for some in (kept(), kept(remat=True)))
    assert len(inputs) >= llm.config.num_hidden_layers
    assert less < 0.2 * everything


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["data=4", "data=2,tensor=2"])
def test_gradients_on_a_mesh_are_those_of_one_device(llm, mesh):
    tokens, spread = random_tokens(llm, 4), LLM(V3, mesh=mesh)
    loss, weights = value_of(llm, tokens)
    expected = jax.jit(jax.grad(loss))(weights)
    place = NamedSharding(spread.model.norm[...].sharding.mesh, PartitionSpec("data"))
    loss, weights = value_of(spread, jax.device_put(tokens, place))
    found = jax.jit(jax.grad(loss))(weights)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-5), found, expected)


@pytest.mark.deep
def test_it_computes_what_the_model_does_and_shares_its_weights(llm):
    tokens = np.random.default_rng(1).integers(0, llm.config.vocab_size, (1, 7))
    model = llm.trainable()
    got = jax.jit(lambda tokens: model.unembed(model(tokens, Batch.dense(1, 7))[0]))(jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(got, llm.logits(tokens), atol=1e-4)
    assert model.embed[...] is llm.model.embed[...]
    assert model.embed is not llm.model.embed, "an optimiser that changes it would change the model that is served"


@pytest.mark.deep
def test_quantised_weights_become_numbers_that_have_gradients():
    llm = LLM()
    packed = {path for path, v in nnx.to_flat_state(nnx.state(llm.model)) if isinstance(v.get_value(), QTensor)}
    assert packed
    state = dict(nnx.to_flat_state(nnx.state(llm.trainable())))
    assert {state[path].get_value().dtype for path in packed} == {llm.model.dtype}
    loss, weights = value_of(llm, random_tokens(llm), remat=True)
    gradient = dict(nnx.to_flat_state(jax.jit(jax.grad(loss))(weights)))
    dense = [path for path in packed if path[:2] == ("layers", 0)]
    assert dense
    assert all(jnp.abs(gradient[path][...]).max() > 0 for path in dense)


def test_experts_with_copies_are_refused(llm):
    model = nnx.clone(llm.model)
    model.layers[1].mlp.places = Places(jnp.zeros((9, 1), jnp.int32))
    with pytest.raises(Unsupported, match=r"experts with copies(.|\n)*device_experts=0"):
        trainable(model)
