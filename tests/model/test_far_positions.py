"""Distances that end at a window's edge, against loops in numpy: prompts in a line, rows that decode, and without a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import Config
from mla_jax.base.batch import Batch
from mla_jax.cache import paged
from mla_jax.cache.paged import Layer
from mla_jax.model import far_positions
from mla_jax.model.block_attention import StepCache
from mla_jax.model.dispatch import form_named

N, P, E, R, V, SIZE, SCALE = 2, 3, 6, 5, 4, 4, 0.4
HELD = np.array([9, 23, 0, 14])  # tokens of each row
PAGES = 6
CONFIGS = {
    style: dataclasses.replace(Config.preset("tiny"), qk_rope_head_dim=E, rope_interleave=style, rope_scaling=None)
    for style in (True, False)
}


class Drawn:
    """Rows of tokens with queries and unturned keys."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.q, self.q_pe = rng.standard_normal((2, len(HELD), max(HELD), N, E))
        self.q = self.q[..., :P]
        self.c_kv, self.k_pe = rng.standard_normal((len(HELD), max(HELD), R)), rng.standard_normal((len(HELD), max(HELD), E))
        self.up = rng.standard_normal((N, P, R)), rng.standard_normal((N, V, R))
        self.table = rng.permutation(len(HELD) * PAGES).reshape(len(HELD), PAGES)

    def expected(self, window: int, config: Config) -> np.ndarray:
        """`[B T N V]`, where every token sees those before it."""
        uk, uv = self.up
        out = np.zeros((len(HELD), max(HELD), N, V))
        for row, token, n in np.ndindex(len(HELD), max(HELD), N):
            scores = [
                (self.q[row, token, n] @ uk[n]) @ self.c_kv[row, s]
                + turned(self.q_pe[row, token, n], min(token - s, window), config) @ self.k_pe[row, s]
                for s in range(token + 1)
            ]
            weights = np.exp(SCALE * np.array(scores))
            out[row, token, n] = uv[n] @ (weights / weights.sum() @ self.c_kv[row, : token + 1])
        return out


def turned(x: np.ndarray, position: int, config: Config) -> np.ndarray:
    pairs = x.reshape(-1, 2) if config.rope_interleave else x.reshape(2, -1).T
    angles = position / config.rope_theta ** (np.arange(0, E, 2) / E)
    spun = (pairs[:, 0] + 1j * pairs[:, 1]) * np.exp(1j * angles)
    found = np.stack([spun.real, spun.imag], -1)
    return found.ravel() if config.rope_interleave else found.T.ravel()


def found(drawn: Drawn, batch: Batch, at: tuple[np.ndarray, np.ndarray], window: int, config: Config, block: int) -> np.ndarray:
    """Attention of the tokens `at` (row, token), in the batch's lines; all rows' tokens are cached."""
    form = far_positions.windowed(form_named("move_elided", "auto"), window, config)
    layer = Layer(pool_of(drawn), jnp.int32(0))

    @jax.jit
    def attend(q, layer, batch, up):
        step = form.prepare(batch, layer.pool, config, block)
        return form.attends(q, StepCache({}, layer, step, form.reads), up, SCALE)

    q = tuple(floats(x[at]) for x in (drawn.q, drawn.q_pe))
    return np.asarray(attend(q, layer, batch, tuple(map(floats, drawn.up))))


def pool_of(drawn: Drawn) -> paged.Pool:
    arrays = {"c_kv": drawn.c_kv, "k_pe": drawn.k_pe}
    pool = {name: np.full((drawn.table.size, SIZE, a.shape[-1]), np.nan, np.float32) for name, a in arrays.items()}
    for row, token in np.ndindex(len(HELD), max(HELD)):
        if token < HELD[row]:
            for name, array in arrays.items():
                pool[name][drawn.table[row, token // SIZE], token % SIZE] = array[row, token]
    return {name: jnp.asarray(a) for name, a in pool.items()}


def floats(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def ints(x) -> jax.Array:
    return jnp.asarray(x, jnp.int32)


@pytest.mark.parametrize("window", [1, 5, 12, 100])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=["neighbours", "halves"])
def test_rows_and_lines_attend_as_loops_do(window, config):
    drawn = Drawn()
    expected = drawn.expected(window, config)
    new = np.minimum(HELD, 3)
    rows = Batch.behind(ints(HELD - new), ints(HELD - new), ints(new), 3, ints(drawn.table))
    places = np.arange(len(HELD))[:, None], np.maximum((HELD - new)[:, None] + np.arange(3), 0).clip(max=max(HELD) - 1)
    out = found(drawn, rows, places, window, config, 8)
    for row in range(len(HELD)):
        np.testing.assert_allclose(out[row, : new[row]], expected[row, HELD[row] - new[row] : HELD[row]], rtol=2e-4, atol=2e-5)
    counts = np.minimum(HELD, 7)
    line = Batch.in_line(ints(HELD - counts), ints(HELD - counts), ints(counts), 24, ints(drawn.table))
    row = np.repeat(np.arange(len(HELD)), counts)
    token = np.concatenate([np.arange(held - count, held) for held, count in zip(HELD, counts, strict=True)])
    padded = tuple(np.pad(x, (0, 24 - len(x)))[None] for x in (row, token))
    out = found(drawn, line, padded, window, config, 12)
    np.testing.assert_allclose(out[0, : len(row)], expected[row, token], rtol=2e-4, atol=2e-5)


def test_without_a_cache_tokens_attend_to_each_other_alike():
    drawn, config, window = Drawn(), CONFIGS[True], 5
    form = far_positions.windowed(form_named("move_elided", "auto"), window, config)
    batch = Batch.dense(len(HELD), int(max(HELD)))
    up, q = (tuple(map(floats, pair)) for pair in (drawn.up, (drawn.q, drawn.q_pe)))
    new, step = form.remembers(floats(drawn.c_kv), floats(drawn.k_pe), up), form.prepare(batch, None, config, 8)
    out = form.attends(q, StepCache(new, None, step), up, SCALE)
    np.testing.assert_allclose(out, drawn.expected(window, config), rtol=2e-4, atol=2e-5)
