"""The fused form beside move-elided, over one cache filled in steps of any shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.base.batch import Batch
from mla_jax.model.dispatch import Dispatch

ROWS = 3
MASKS = {
    "a prompt of its own for each row": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]],
    "padding before, between and behind": [[0, 1, 1, 0, 1], [1, 0, 0, 1, 0], [0, 0, 0, 0, 1]],
    "a row that brings nothing": [[1, 1], [0, 0], [1, 0]],
    "one token each": [[1], [1], [1]],
    "one token, of one row": [[0], [1], [0]],
    "many, which attend to heads rebuilt": [[1] * 11, [0] * 3 + [1] * 4 + [0, 1] * 2, [0] * 11],
}


def stepped(attention: str, slots: int) -> list[np.ndarray]:
    """What a model says of the tokens that each batch brings, one batch after the other; nothing of padding."""
    config = Config.preset("tiny")
    model = Transformer(config, nnx.Rngs(0), dispatch=Dispatch(attention))
    call, rng = jax.jit(lambda tokens, batch, cache: model(tokens, batch, cache)[:2]), np.random.default_rng(0)
    cache, position, said = model.new_cache(ROWS, slots), np.zeros(ROWS, np.int32), []
    for mask in (np.array(mask, bool) for mask in (*MASKS.values(), *MASKS.values())):
        positions = position[:, None] + np.cumsum(mask, axis=1) - 1
        tokens = jnp.asarray(rng.integers(0, config.vocab_size, mask.shape), jnp.int32)
        hidden, cache = call(tokens, Batch(jnp.asarray(positions, jnp.int32), jnp.asarray(mask)), cache)
        position += mask.sum(1, dtype=np.int32)
        said.append(np.asarray(hidden)[mask])
    return said


# a page of 64, of 8, and of one slot
@pytest.mark.parametrize("slots", [64, *(pytest.param(slots, marks=pytest.mark.once) for slots in (72, 57))])
def test_it_says_what_move_elided_says_whatever_the_padding(slots):
    for name, fused, moved in zip([*MASKS] * 2, stepped("fused", slots), stepped("move_elided", slots), strict=True):
        assert np.abs(fused - moved).max() < 1e-5 * moved.std(), name


@pytest.mark.parametrize("new", [4, 11])
def test_tokens_that_the_cache_drops_change_nothing_for_those_it_holds(new):
    config, slots = Config.preset("tiny"), 16
    before, fits = 14, 2
    tokens = jax.random.randint(jax.random.key(1), (ROWS, before + new), 0, config.vocab_size)

    def said(attention: str) -> np.ndarray:
        model = Transformer(config, nnx.Rngs(0), dispatch=Dispatch(attention))
        cache = model(tokens[:, :before], Batch.dense(ROWS, before), model.new_cache(ROWS, slots))[1]
        positions = jnp.broadcast_to(before + jnp.arange(new, dtype=jnp.int32), (ROWS, new))
        step = Batch(positions, jnp.ones((ROWS, new), bool))
        return np.asarray(model(tokens[:, before:], step, cache)[0])[:, :fits]

    fused, moved = said("fused"), said("move_elided")
    assert np.abs(fused - moved).max() < 1e-5 * moved.std()


def test_without_a_cache_it_is_move_elided():
    config, tokens = Config.preset("tiny"), jnp.arange(12).reshape(2, 6)
    mask = jnp.array([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 1]], bool)
    batch = Batch(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, mask)
    models = (Transformer(config, nnx.Rngs(0), dispatch=Dispatch(name)) for name in ("fused", "move_elided"))
    fused, moved = (model(tokens, batch)[0] for model in models)
    np.testing.assert_array_equal(fused, moved)
