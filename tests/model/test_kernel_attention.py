"""The fused form beside move-elided, over one pool filled in steps of any shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.base import roofline
from mla_jax.base.batch import Batch
from mla_jax.cache import paged
from mla_jax.model import rope
from mla_jax.model.dispatch import Dispatch, form_named

ROWS = 3
COUNTS = {  # new tokens of each row, padding behind them
    "a prompt of its own for each row": (5, 3, 2),
    "padding behind two, and behind one": (3, 2, 1),
    "a row that brings nothing": (2, 0, 1),
    "one token each": (1, 1, 1),
    "one token, of one row": (0, 1, 0),
    "many, which attend to heads rebuilt": (11, 8, 0),
}


def stepped(attention: str, size: int) -> list[np.ndarray]:
    """A model's outputs for the tokens of each batch, one batch after the other; without padding."""
    config = Config.preset("tiny")
    model = Transformer(config, nnx.Rngs(0), dispatch=Dispatch(attention))
    call, rng = jax.jit(lambda tokens, batch, pool: model(tokens, batch, pool)[:2]), np.random.default_rng(0)
    table = jnp.asarray(rng.permutation(ROWS * -(-64 // size)).reshape(ROWS, -1), jnp.int32)
    pool, held, said = model.new_pool(table.size, size), jnp.zeros(ROWS, jnp.int32), []
    for counts in (*COUNTS.values(), *COUNTS.values()):
        mask = np.arange(max(counts)) < np.array(counts)[:, None]
        tokens = jnp.asarray(rng.integers(0, config.vocab_size, mask.shape), jnp.int32)
        hidden, pool = call(tokens, Batch.after(held, jnp.asarray(mask), table), pool)
        held += jnp.asarray(counts, jnp.int32)
        said.append(np.asarray(hidden)[mask])
    return said


def in_lines(attention: str, size: int) -> list[np.ndarray]:
    """The same as `stepped`, where each batch is one line with the tokens of all rows and some padding."""
    config = Config.preset("tiny")
    model = Transformer(config, nnx.Rngs(0), dispatch=Dispatch(attention))
    call, rng = jax.jit(lambda tokens, batch, pool: model(tokens, batch, pool)[:2]), np.random.default_rng(0)
    table = jnp.asarray(rng.permutation(ROWS * -(-64 // size)).reshape(ROWS, -1), jnp.int32)
    pool, held, said = model.new_pool(table.size, size), jnp.zeros(ROWS, jnp.int32), []
    for counts in (*COUNTS.values(), *COUNTS.values()):
        mask = np.arange(max(counts)) < np.array(counts)[:, None]
        tokens = rng.integers(0, config.vocab_size, mask.shape)[mask]
        new = jnp.asarray(counts, jnp.int32)
        batch = Batch.in_line(held, held, new, tokens.size + 2, table)
        hidden, pool = call(jnp.asarray([*tokens, 0, 0], jnp.int32)[None], batch, pool)
        held += new
        said.append(np.asarray(hidden)[0, : tokens.size])
    return said


DEEP = pytest.mark.deep


@DEEP
@pytest.mark.parametrize("attention", ["fused", "compressed"])
@pytest.mark.parametrize("size", [64, 8])
def test_tokens_in_a_line_say_what_they_say_in_rows_of_their_own(attention, size):
    for name, line, rows in zip([*COUNTS] * 2, in_lines(attention, size), stepped("move_elided", size), strict=True):
        assert np.abs(line - rows).max() < 1e-5 * rows.std(), name


@DEEP
def test_a_line_attends_to_what_its_rows_have_cached_block_by_block(monkeypatch):
    moved = stepped("move_elided", 8)
    monkeypatch.setattr(roofline, "block_slots", lambda *_: 8)
    for name, blocks, whole in zip([*COUNTS] * 2, in_lines("fused", 8), moved, strict=True):
        assert np.abs(blocks - whole).max() < 1e-5 * whole.std(), name


@pytest.mark.deep
# a page for all, pages of 8, 16 and 2 tokens
@pytest.mark.parametrize("size", [8, *(pytest.param(size, marks=DEEP) for size in (64, 16, 2))])
def test_it_says_what_move_elided_says_whatever_the_padding(size):
    for name, fused, moved in zip([*COUNTS] * 2, stepped("fused", size), stepped("move_elided", size), strict=True):
        assert np.abs(fused - moved).max() < 1e-5 * moved.std(), name


@DEEP
def test_many_tokens_attend_to_what_is_cached_block_by_block(monkeypatch):
    moved = stepped("move_elided", 8)
    monkeypatch.setattr(roofline, "block_slots", lambda *_: 8)
    for name, blocks, whole in zip([*COUNTS] * 2, stepped("fused", 8), moved, strict=True):
        assert np.abs(blocks - whole).max() < 1e-5 * whole.std(), name


@pytest.mark.deep
@pytest.mark.parametrize("new", [4, 11])
def test_tokens_that_the_cache_drops_change_nothing_for_those_it_holds(new):
    config, size = Config.preset("tiny"), 16
    before, fits = 14, 2
    tokens = jax.random.randint(jax.random.key(1), (ROWS, before + new), 0, config.vocab_size)
    table = paged.in_order(ROWS, size, size)

    def said(attention: str, new: int) -> np.ndarray:
        model = Transformer(config, nnx.Rngs(0), dispatch=Dispatch(attention))
        call = jax.jit(lambda tokens, batch, pool: model(tokens, batch, pool)[:2])
        held, pool, found = jnp.zeros(ROWS, jnp.int32), model.new_pool(ROWS, size), None
        for part in (tokens[:, :before], tokens[:, before : before + new]):
            found, pool = call(part, Batch.after(held, jnp.ones(part.shape, bool), table), pool)
            held += part.shape[1]
        return np.asarray(found)[:, :fits]

    fused, moved, exactly = said("fused", new), said("move_elided", new), said("move_elided", fits)
    assert np.abs(fused - moved).max() < 1e-5 * moved.std()
    assert np.abs(moved - exactly).max() < 1e-5 * moved.std()


def test_without_a_cache_it_is_move_elided():
    config, tokens = Config.preset("tiny"), jnp.arange(12).reshape(2, 6)
    mask = jnp.array([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 1]], bool)
    batch = Batch(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, mask)
    models = (Transformer(config, nnx.Rngs(0), dispatch=Dispatch(name)) for name in ("fused", "move_elided"))
    fused, moved = (model(tokens, batch)[0] for model in models)
    np.testing.assert_array_equal(fused, moved)


def takes_kernel_naive(monkeypatch):
    """The form of the kernel over cached heads, which its fallback computes."""
    asked = Dispatch.attention_kernel

    def kernel(self, model, form, *shape):
        return "mosaic_gpu" if form == "kernel_naive" else asked(self, model, form, *shape)

    monkeypatch.setattr(Dispatch, "attention_kernel", kernel)


def test_one_new_token_over_cached_heads_is_what_move_elided_says(monkeypatch):
    takes_kernel_naive(monkeypatch)
    for name, heads, moved in zip([*COUNTS] * 2, stepped("naive", 8), stepped("move_elided", 8), strict=True):
        assert np.abs(heads - moved).max() < 1e-5 * moved.std(), name


def test_heads_that_have_dropped_tokens_of_their_own_are_read_by_their_own_pages(monkeypatch):
    config, size, rng = Config.preset("tiny"), 8, np.random.default_rng(0)
    heads, pages = config.num_attention_heads, 12
    lens = rng.integers(1, 3 * size, (heads, ROWS)).astype(np.int32)
    table = rng.permutation(heads * pages)[: heads * ROWS * 3].reshape(heads, ROWS, 3).astype(np.int32)
    position, lens = jnp.full((ROWS, 1), 50), jnp.asarray(lens)
    batch = Batch(position, jnp.ones((ROWS, 1), bool), lens, jnp.asarray(table), lens[..., None] - 1)
    x, said = jnp.asarray(rng.standard_normal((ROWS, 1, config.hidden_size)), jnp.float32), []
    for form in ("naive", "kernel_naive"):
        model = Transformer(config, nnx.Rngs(0), dispatch=Dispatch("naive"))
        empty = model.new_pool(pages, size, 1)
        pool = {name: jax.random.normal(jax.random.key(1), array.shape) for name, array in empty.items()}
        row, attn = form_named(form), model.layers[0].attn
        step = row.prepare(batch, pool, config, size)
        layer = paged.Layer(paged.stored(pool, empty), jnp.int32(0))
        said.append(np.asarray(attn(x, layer, row, step, rope.turns(batch.positions, config))[0]))
    assert np.abs(said[0] - said[1]).max() < 1e-5 * said[0].std()
