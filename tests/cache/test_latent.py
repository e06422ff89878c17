"""append and read against lists in plain Python; queries with nothing to attend to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.base.batch import Batch
from mla_jax.base.config import Config
from mla_jax.cache import latent
from mla_jax.cache.latent import EMPTY
from mla_jax.model.mla import FORMS
from mla_jax.model.ops import masked_exp

ROWS, SLOTS, TOKENS, WIDTH = 3, 8, 5, 2
append = jax.jit(latent.append)


def empty(rows: int = ROWS) -> latent.Layer:
    token = {"c_kv": jax.ShapeDtypeStruct((1, 1, WIDTH), jnp.float32), "k_pe": jax.ShapeDtypeStruct((1, 1), jnp.bfloat16)}
    return latent.init(token, 1, rows, SLOTS)[0]


masks = st.lists(st.lists(st.booleans(), min_size=TOKENS, max_size=TOKENS), min_size=ROWS, max_size=ROWS)


@settings(max_examples=100)
@given(st.lists(masks, min_size=1, max_size=5), st.integers(0, 100))
def test_append_holds_the_unmasked_tokens_in_order_of_arrival_until_it_is_full(arrivals, offset):
    layer, held = empty(), [[] for _ in range(ROWS)]
    for turn, mask in enumerate(arrivals):
        number = 1 + 100 * turn + np.arange(ROWS * TOKENS).reshape(ROWS, TOKENS)
        values = {"c_kv": jnp.asarray(np.stack([number, -number], -1), jnp.float32), "k_pe": jnp.asarray(number, jnp.bfloat16)}
        batch = Batch(jnp.asarray(number + offset, jnp.int32), jnp.asarray(mask))
        layer = append(layer, values, batch)
        for row, more, allowed in zip(held, number.tolist(), mask, strict=True):
            row += [n for n, yes in zip(more, allowed, strict=True) if yes]
    found, positions = latent.read(layer, batch)
    assert set(found) == {"c_kv", "k_pe"}
    for i, row in enumerate(held):
        row, free = row[:SLOTS], [0] * (SLOTS - len(row[:SLOTS]))
        assert positions[i].tolist() == [n + offset for n in row] + [EMPTY] * len(free)
        assert found["c_kv"][i, :, 0].tolist() == row + free
        assert found["c_kv"][i, :, 1].tolist() == [-n for n in row] + free
        assert np.array_equal(found["k_pe"][i], jnp.asarray(row + free, jnp.bfloat16))


def test_a_batch_of_fewer_rows_than_are_held_touches_and_reads_only_its_own():
    layer, batch = empty(rows=2), Batch.dense(1, 3)
    layer = append(layer, {"c_kv": jnp.ones((1, 3, WIDTH)), "k_pe": jnp.ones((1, 3), jnp.bfloat16)}, batch)
    held, positions = latent.read(layer, batch)
    assert positions.tolist() == [[0, 1, 2] + [EMPTY] * (SLOTS - 3)]
    assert held["c_kv"].shape == (1, SLOTS, WIDTH)
    assert layer["length"].tolist() == [3, 0]
    assert not layer["c_kv"][1].any()


def test_span_bounds_what_is_read_and_not_what_is_held():
    batch = Batch(jnp.arange(5)[None], jnp.ones((1, 5), bool), span=4)
    layer = append(empty(1), {"c_kv": jnp.ones((1, 5, WIDTH)), "k_pe": jnp.ones((1, 5), jnp.bfloat16)}, batch)
    held, positions = latent.read(layer, batch)
    assert positions.tolist() == [[0, 1, 2, 3]]
    assert held["c_kv"].shape == (1, 4, WIDTH)
    assert layer["positions"][0].tolist() == [0, 1, 2, 3, 4] + [EMPTY] * (SLOTS - 5)


def random_model_parts(form: str) -> tuple[tuple, dict, tuple]:
    config, rng = Config.preset("tiny"), np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    n, p, e, r, v = (
        config.num_attention_heads,
        config.qk_nope_head_dim,
        config.qk_rope_head_dim,
        config.kv_lora_rank,
        config.v_head_dim,
    )
    up = (normal(n, p, r), normal(n, v, r))
    return (normal(2, 3, n, p), normal(2, 3, n, e)), FORMS[form].remembers(normal(2, 6, r), normal(2, 6, e), up), up


@pytest.mark.parametrize("form", FORMS)
def test_a_query_with_nothing_to_attend_to_gives_exact_zeros(form):
    q, held, up = random_model_parts(form)
    mask = np.ones((2, 3, 6), bool)
    mask[0, 1], mask[1] = False, False
    out = np.asarray(FORMS[form].attends(q, held, up, jnp.asarray(mask[:, :, None]), 0.1))
    assert (out[0, 1] == 0).all()
    assert (out[1] == 0).all()
    assert np.abs(out[0, [0, 2]]).min() > 0


@pytest.mark.parametrize("form", FORMS)
def test_a_form_attends_by_stored_positions_wherever_the_slots_are(form):
    q, held, up = random_model_parts(form)
    positions, order = np.array([4, 0, 9, 2, 7, 5]), np.array([3, 5, 0, 1, 4, 2])
    mask = np.broadcast_to(positions <= 5, (2, 3, 1, 6))
    out = FORMS[form].attends(q, held, up, jnp.asarray(mask), 0.1)
    moved = FORMS[form].attends(q, {k: x[:, order] for k, x in held.items()}, up, jnp.asarray(mask[..., order]), 0.1)
    np.testing.assert_allclose(out, moved, atol=1e-5)


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(-(2.0**100), 2.0**100, width=32), st.booleans()), min_size=4, max_size=4))
def test_masked_weights_are_a_softmax_of_what_is_allowed_and_exact_zeros_elsewhere(row):
    scores, mask = np.array([s for s, _ in row], np.float32), np.array([m for _, m in row])
    weights, total = masked_exp(jnp.asarray(scores), jnp.asarray(mask))
    weights = np.asarray(weights / total, np.float64)
    assert (weights[~mask] == 0).all()
    if mask.any():
        allowed = scores[mask].astype(np.float64)
        expected = np.exp(allowed - allowed.max())
        np.testing.assert_allclose(weights[mask], expected / expected.sum(), atol=1e-6)
