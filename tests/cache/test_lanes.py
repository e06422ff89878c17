"""Pages with a lane for each head: every head attends to tokens of its own, wherever they are, and writes to its own parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax import Config
from mla_jax.base.batch import Batch, Tables, by_layer
from mla_jax.cache import paged
from mla_jax.cache.paged import Layer, Pool
from mla_jax.model import block_attention
from mla_jax.model.block_attention import StepCache
from mla_jax.model.mla import FORMS

LAYERS, HEADS, PAGES, SIZE, WIDTH = 2, 3, 16, 4, 5  # of a pool; pages of a row
HELD = np.array([9, 0, 13, 4])  # tokens that rows had before they dropped any
KEY, VALUE, SCALE = (3, 2), 5, 0.3  # numbers of a plain and a rotary key, and of a value
UP = jnp.zeros((HEADS, KEY[0], 1)), jnp.zeros((HEADS, VALUE, 1))  # of no use where heads are cached
CONFIG = Config.preset("tiny")


class Rows:
    """Tokens of rows in one layer, of which each head has dropped some; their parts are anywhere in the pool."""

    def __init__(self, new: int, number: int = 1, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.new, self.number, most = new, number, HELD.max() + new
        self.q = tuple(rng.standard_normal((len(HELD), new, HEADS, n)).astype(np.float32) for n in KEY)
        self.k = rng.standard_normal((len(HELD), most, HEADS, sum(KEY))).astype(np.float32)
        self.v = rng.standard_normal((len(HELD), most, HEADS, VALUE)).astype(np.float32)
        kept = rng.random((HEADS, len(HELD), HELD.max())) < 0.6
        self.kept = [[np.flatnonzero(kept[head, row, :n]) for row, n in enumerate(HELD)] for head in range(HEADS)]
        self.dropped = np.array([[n - len(kept) for n, kept in zip(HELD, rows, strict=True)] for rows in self.kept])
        every = rng.permutation(LAYERS * PAGES * HEADS)
        self.parts = every[: HEADS * len(HELD) * WIDTH].reshape(HEADS, len(HELD), WIDTH)

    @property
    def tables(self) -> Tables:
        """Of all layers; those of other layers say nothing."""
        own, none = self.parts - self.number * PAGES * HEADS, np.zeros((HEADS, len(HELD)), int)
        pages, dropped = np.array([0 * own] * LAYERS), np.array([none] * LAYERS)
        pages[self.number], dropped[self.number] = own, self.dropped
        return Tables(ints(pages), ints(dropped))

    @property
    def pool(self) -> Pool:
        """The tokens cached before, put there by hand; NaN elsewhere."""
        pool = {"k": np.full((LAYERS * PAGES, SIZE, HEADS, sum(KEY)), np.nan, np.float32)}
        pool["v"] = np.full((LAYERS * PAGES, SIZE, HEADS, VALUE), np.nan, np.float32)
        for (head, row), parts in zip(np.ndindex(HEADS, len(HELD)), self.parts.reshape(-1, WIDTH), strict=True):
            for slot, token in enumerate(self.kept[head][row]):
                page, lane = divmod(parts[slot // SIZE], HEADS)
                pool["k"][page, slot % SIZE, lane] = self.k[row, token, head]
                pool["v"][page, slot % SIZE, lane] = self.v[row, token, head]
        return {name: jnp.asarray(array) for name, array in pool.items()}

    def of_new(self, row: np.ndarray, token: np.ndarray) -> tuple[tuple, dict]:
        """Queries, and keys and values, of new tokens of some rows."""
        at = HELD[row] + token
        return tuple(q[row, token] for q in self.q), {"k": self.k[row, at], "v": self.v[row, at]}

    def attended(self, batch: Batch, q: tuple, new: dict, block: int) -> tuple[np.ndarray, Pool]:
        @jax.jit
        def run(pool: Pool, batch: Batch, q: tuple, new: dict) -> tuple[jax.Array, Pool]:
            layer = Layer(pool, jnp.int32(self.number * PAGES))
            steps = by_layer(lambda batch: block_attention.prepare(batch, pool, CONFIG, block), batch)
            step = jax.tree.map(lambda x: x[self.number], steps)
            layer = paged.append(layer, new, step.rows)
            return FORMS["naive"].attends(q, StepCache(new, layer, step), UP, SCALE), layer.pool

        out, pool = run(self.pool, batch, q, jax.tree.map(jnp.asarray, new))
        return np.asarray(out), pool

    def expected(self, counts: np.ndarray) -> np.ndarray:
        """In float64, for each head over a row of its kept tokens."""
        q, found = np.concatenate(self.q, -1).astype(float), np.zeros((len(HELD), self.new, HEADS, VALUE))
        for row, head in np.ndindex(len(HELD), HEADS):
            for token in range(counts[row]):
                sees = [*self.kept[head][row], *range(HELD[row], HELD[row] + token + 1)]
                weights = np.exp(SCALE * self.k[row, sees, head].astype(float) @ q[row, token, head])
                found[row, token, head] = weights @ self.v[row, sees, head] / weights.sum()
        return found


def ints(numbers) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


COUNTS = np.array([3, 2, 0, 1])


@pytest.mark.parametrize("number", range(LAYERS))
@pytest.mark.parametrize("block", [4, 8, 1024])
def test_each_head_attends_to_what_it_has_kept_and_to_what_is_new(number, block):
    rows = Rows(new=3, number=number)
    token = np.arange(rows.new)[None]
    batch = Batch.behind(ints(HELD), ints(HELD), ints(COUNTS), rows.new, rows.tables)
    found, _ = rows.attended(batch, *rows.of_new(np.arange(len(HELD))[:, None], token), block)
    np.testing.assert_allclose(found[token < COUNTS[:, None]], rows.expected(COUNTS)[token < COUNTS[:, None]], atol=1e-5)
    assert not found[token >= COUNTS[:, None]].any()


@pytest.mark.parametrize("block", [4, 12, 1024])
def test_in_a_line_of_several_rows_it_is_the_same(block):
    rows, padding = Rows(new=3, seed=1), 2
    row = np.concatenate([np.repeat(np.arange(len(HELD)), COUNTS), [0] * padding])[None]
    token = np.concatenate([*map(np.arange, COUNTS), [0] * padding])[None].astype(int)
    batch = Batch.in_line(ints(HELD), ints(HELD), ints(COUNTS), row.size, rows.tables)
    found, _ = rows.attended(batch, *rows.of_new(row, token), block)
    np.testing.assert_allclose(found[0, :-padding], rows.expected(COUNTS)[row, token][0, :-padding], atol=1e-5)
    assert not found[0, -padding:].any()


def test_new_tokens_are_written_behind_those_of_each_head_and_nowhere_else():
    rows = Rows(new=3, seed=2)
    batch = Batch.behind(ints(HELD), ints(HELD), ints(COUNTS), rows.new, rows.tables)
    _, pool = rows.attended(batch, *rows.of_new(np.arange(len(HELD))[:, None], np.arange(rows.new)[None]), 1024)
    expected = {name: np.array(array) for name, array in rows.pool.items()}
    for head, row in np.ndindex(HEADS, len(HELD)):
        for token in range(COUNTS[row]):
            slot = len(rows.kept[head][row]) + token
            page, lane = divmod(rows.parts[head, row, slot // SIZE], HEADS)
            expected["k"][page, slot % SIZE, lane] = rows.k[row, HELD[row] + token, head]
            expected["v"][page, slot % SIZE, lane] = rows.v[row, HELD[row] + token, head]
    jax.tree.map(np.testing.assert_array_equal, pool, expected)


@pytest.mark.deep
def test_where_no_head_has_dropped_any_lanes_of_pages_are_the_pages():
    shapes = {name: jax.ShapeDtypeStruct((1, 1, HEADS, n), jnp.float32) for name, n in (("k", sum(KEY)), ("v", VALUE))}
    pool = paged.init(shapes, LAYERS, PAGES, SIZE)
    pages = np.random.default_rng(3).permutation(PAGES)[: len(HELD) * 3].reshape(len(HELD), 3)
    lanes = Tables(ints(pages * HEADS + np.arange(HEADS)[:, None, None]), ints(np.zeros((HEADS, len(HELD)))))
    new = {
        name: jnp.asarray(np.random.default_rng(4).random((len(HELD), 9, *one.shape[2:]), np.float32))
        for name, one in shapes.items()
    }
    found = []
    for table in (ints(pages), lanes):
        batch = Batch.behind(ints(0 * HELD), ints(0 * HELD), ints([9, 1, 0, 5]), 9, table)
        rows = paged.rows_of(batch if batch.tables is None else batch.of_layer(batch.tables), SIZE)
        layer = paged.append(Layer(pool, jnp.int32(PAGES)), new, rows)
        found.append((layer.pool, paged.read(layer, paged.view_of(rows, rows.seq_lens, SIZE), 1, 2)))
    jax.tree.map(np.testing.assert_array_equal, *found)
