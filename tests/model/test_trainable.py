"""Gradients through a model, against finite differences."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import LLM
from mla_jax.base.batch import Batch
from mla_jax.base.qtensor import QTensor

V3 = Path(__file__).parents[1] / "golden" / "v3"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(V3)


@pytest.mark.deep
def test_gradients_equal_finite_differences(llm):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, llm.config.vocab_size, (2, 12)), jnp.int32)
    graph, state = nnx.split(llm.trainable())
    batch = Batch.dense(2, 11)

    @jax.jit
    def loss(state: nnx.State) -> jax.Array:
        model = nnx.merge(graph, state)
        logp = jax.nn.log_softmax(model.unembed(model(tokens[:, :-1], batch)[0]))
        return -jnp.take_along_axis(logp, tokens[:, 1:, None], axis=-1).mean()

    gradient = jax.jit(jax.grad(loss, allow_int=True))(state)
    floats = jax.tree.map(lambda w: jnp.issubdtype(w.dtype, jnp.floating), state)
    gradient = jax.tree.map(lambda is_float, g, w: g if is_float else jnp.zeros_like(w), floats, gradient, state)
    length = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradient)))
    assert length > 0
    step = 1e-3  # so small that no token changes its experts
    ahead, behind = (
        loss(jax.tree.map(lambda w, g, sign=sign: w + sign * step * g / length, state, gradient)) for sign in (1.0, -1.0)
    )
    np.testing.assert_allclose((ahead - behind) / (2 * step), length, rtol=1e-2)


@pytest.mark.deep
def test_it_computes_what_the_model_does_and_shares_its_weights(llm):
    tokens = np.random.default_rng(1).integers(0, llm.config.vocab_size, (1, 7))
    model = llm.trainable()
    got = jax.jit(lambda tokens: model.unembed(model(tokens, Batch.dense(1, 7))[0]))(jnp.asarray(tokens, jnp.int32))
    np.testing.assert_allclose(got, llm.logits(tokens), atol=1e-4)
    assert model.embed[...] is llm.model.embed[...]


@pytest.mark.deep
def test_quantised_weights_become_numbers():
    llm = LLM()
    packed = {path for path, v in nnx.to_flat_state(nnx.state(llm.model)) if isinstance(v.get_value(), QTensor)}
    assert packed
    state = dict(nnx.to_flat_state(nnx.state(llm.trainable())))
    assert {state[path].get_value().dtype for path in packed} == {llm.model.dtype}
