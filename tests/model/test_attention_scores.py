"""A policy's inputs, against heads that are rebuilt and attended to in float64, row by row; a pass over cached tokens."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.base.batch import Batch, Tables, by_layer
from mla_jax.cache import paged
from mla_jax.cache.evict import H2O, TOVA, Critical, EvictionPolicy, KeyDiff, Seen, SnapKV
from mla_jax.cache.paged import Layer, Pool
from mla_jax.model import attention_scores
from mla_jax.model.block_attention import StepCache
from mla_jax.model.dispatch import Dispatch, form_named

CONFIG = Config.preset("tiny")
N, P, E, V, D = 3, 4, 2, 5, 6  # heads; numbers of a plain key, a rotary key, a value, an output
WINDOW, SCALE = 4, 0.3
HELD = (17, 3, 0, 26, 4, 1, 9)  # tokens of rows
NO_ROW = (2, 6)  # rows of which no query is looked at: one has nothing, of the other something is cached
CACHES = {"latents": ("auto", "move_elided"), "heads": ("auto", "naive"), "fp8": ("fp8", "move_elided")}


@dataclasses.dataclass(frozen=True)
class Shown(EvictionPolicy):
    """Returns its inputs as scores: the weights of each query and head, keys, anchor, worth, slots, and tokens held."""

    window = WINDOW
    needs_anchor = True
    needs_worth = True

    def of_block(self, seen: Seen) -> jax.Array:
        rows, slots = len(seen.held), seen.slot.size
        assert seen.anchor is not None
        assert seen.worth is not None
        of_all = (seen.anchor, seen.held)
        of_slots = (seen.weights.reshape(rows, -1, slots), seen.keys.reshape(rows, slots, -1).swapaxes(1, 2))
        same = [jnp.broadcast_to(x.reshape(rows, -1, 1), (rows, x[0].size, slots)) for x in of_all]
        slot = jnp.broadcast_to(seen.slot, (rows, 1, slots))
        return jnp.concatenate([*of_slots, seen.worth.swapaxes(1, 2), *same, slot], axis=1)

    def parts(self, scores: np.ndarray, heads: int, width: int) -> dict[str, np.ndarray]:
        """The parts of its scores; a key has `heads` of `width` numbers."""
        rows, _, slots = scores.shape
        sizes = {"weights": self.window * N, "keys": heads * width, "worth": N, "anchor": heads * width}
        sizes |= {"held": scores.shape[1] - sum(sizes.values()) - 1, "slot": 1}
        ends = np.cumsum([*sizes.values()])
        assert sizes["held"] in (1, heads)
        found = dict(zip(sizes, np.split(scores, ends[:-1], axis=1), strict=True))
        found["weights"] = found["weights"].reshape(rows, self.window, N, slots)
        for name in ("keys", "anchor"):
            found[name] = found[name].reshape(rows, heads, width, slots)
        return found


class Cached:
    """Tokens of some rows in random pages of a poisoned pool, in the second of its layers, as a form caches them."""

    def __init__(self, cache: str, size: int = 4, spread: float = 2.0):
        kv_cache, name = CACHES[cache]
        self.form, self.size, self.held = form_named(name, kv_cache), size, np.array(HELD)
        self.counts = np.where(np.isin(np.arange(len(HELD)), NO_ROW), 0, self.held)
        rng = np.random.default_rng(0)
        rank, rows, most = 128 if cache == "fp8" else 8, len(HELD), max(HELD)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(rng.standard_normal(shape), jnp.float32)

        self.q = (spread * normal(rows, most, N, P), spread * normal(rows, most, N, E))
        self.c_kv, self.k_pe, self.out = normal(rows, most, rank), normal(rows, most, E), normal(D, N * V)
        self.up = (normal(N, P, rank) / rank**0.5, normal(N, V, rank))
        self.pages = -(-most // size) + 1
        self.table = rng.permutation(rows * self.pages + 3)[: rows * self.pages].reshape(rows, self.pages)
        self.layer = self._layer()

    def _layer(self) -> Layer:
        new, count = self.form.remembers(self.c_kv, self.k_pe, self.up), self.table.size + 3
        shapes = {name: jax.ShapeDtypeStruct((1, 1, *array.shape[2:]), array.dtype) for name, array in new.items()}
        pool = poisoned(paged.init(shapes, 2, count, self.size, as_bits=True))
        batch = Batch.behind(*map(ints, (0 * self.held, 0 * self.held, self.held)), max(HELD), ints(self.table))
        append = jax.jit(lambda layer, new, batch: paged.append(layer, new, paged.rows_of(batch, self.size)))
        return append(Layer(pool, jnp.int32(count)), new, batch)

    def batch(self, window: int) -> Batch:
        """The newest tokens of each row once more."""
        again = np.minimum(self.counts, window)
        first = self.held - again
        used = np.arange(self.pages) < -(-self.held[:, None] // self.size)
        table = np.where(used, self.table, np.resize([-1, 10**6, 2**31 - 1], self.table.shape))  # past the end: anything
        return Batch.behind(ints(first), ints(first + 100), ints(again), window, ints(table))

    def scores(self, policy: EvictionPolicy, block: int, layer: Layer | None = None, tables: Tables | None = None) -> np.ndarray:
        """With `tables` the tokens are in parts of another `layer`, the second of its pool."""
        batch, layer = self.batch(max(policy.window, 1)), self.layer if layer is None else layer
        at = np.minimum(np.asarray(batch.index), max(HELD) - 1)  # padding asks for anything
        batch = batch if tables is None else batch.of_layer(Tables(*(x[1] for x in tables)))
        q = tuple(x[np.arange(len(HELD))[:, None], at] for x in self.q)

        @jax.jit
        def scored(layer: Layer, batch: Batch, q: Any, up: Any, out: jax.Array) -> jax.Array:
            step = self.form.prepare(batch, layer.pool, CONFIG, block)
            return attention_scores.scores(policy, q, StepCache({}, layer, step, self.form.reads), up, out, SCALE)

        found = np.asarray(scored(layer, batch, q, self.up, self.out))
        blocks = min(max(block // self.size, 1), self.pages)
        assert found.shape[2] == -(-self.pages // blocks) * blocks * self.size
        return found

    @functools.cached_property
    def numbers(self) -> tuple[np.ndarray, np.ndarray]:
        """`c_kv` and `k_pe` as they are cached, in float64."""
        c_kv, k_pe = np.asarray(self.c_kv), np.asarray(self.k_pe)
        if "c_kv_scale" in self.layer.pool:
            stored = self.form.remembers(self.c_kv, self.k_pe, self.up)
            c_kv = np.asarray(stored["c_kv"]).astype(np.float64) * np.repeat(np.asarray(stored["c_kv_scale"]), 128, axis=-1)
            assert np.abs(c_kv - np.asarray(self.c_kv)).max() > 1e-3
        return c_kv.astype(np.float64), k_pe.astype(np.float64)

    def expected(self, window: int, slots: int) -> dict[str, np.ndarray]:
        """The same as `Shown.parts`, by loops over rows, queries and heads."""
        c_kv, k_pe = self.numbers
        uk, uv, out = (np.asarray(x, np.float64) for x in (*self.up, self.out))
        plain, value = np.einsum("bsr,npr->bsnp", c_kv, uk), np.einsum("bsr,nvr->bsnv", c_kv, uv)
        key = np.concatenate([plain, np.repeat(k_pe[:, :, None], N, 2)], -1)
        query = np.concatenate([np.asarray(x, np.float64) for x in self.q], -1)
        shown = key if "k" in self.layer.pool else np.concatenate([c_kv, k_pe], -1)[:, :, None]
        rows, (heads, width) = len(HELD), shown.shape[2:]
        found = {
            "weights": np.zeros((rows, window, N, slots)),
            "keys": np.zeros((rows, heads, width, slots)),
            "worth": np.zeros((rows, N, slots)),
            "anchor": np.zeros((rows, heads, width)),
        }
        for row, held in enumerate(self.counts):
            again = min(held, window)
            for turn, n in np.ndindex(again, N):
                sees = held - again + turn + 1
                logits = SCALE * key[row, :sees, n] @ query[row, sees - 1, n]
                weights = np.exp(logits - logits.max())
                found["weights"][row, turn, n, :sees] = weights / weights.sum()
            mine = shown[row, :held]
            found["keys"][row, ..., :held] = np.moveaxis(mine, 0, -1)
            found["anchor"][row] = (mine / np.linalg.norm(mine, axis=-1, keepdims=True)).mean(0) if held else 0
            for slot, n in np.ndindex(held, N):
                found["worth"][row, n, slot] = np.abs(out[:, n * V : (n + 1) * V] @ value[row, slot, n]).sum()
        return found

    def whole(self, window: int, slots: int) -> Seen:
        """All of it in a single block."""
        found = {name: jnp.asarray(x, jnp.float32) for name, x in self.expected(window, slots).items()}
        return Seen(
            weights=found["weights"],
            keys=jnp.moveaxis(found["keys"], -1, 1),
            anchor=found["anchor"],
            worth=found["worth"].swapaxes(1, 2),
            slot=jnp.arange(slots, dtype=jnp.int32),
            held=ints(self.counts[:, None]),
        )


def ints(numbers: np.ndarray) -> jax.Array:
    return jnp.asarray(numbers, jnp.int32)


def poisoned(pool: Pool) -> Pool:
    """NaN wherever nothing was written, in numbers as well as in bits."""

    def nan(array: jax.Array) -> jax.Array:
        bits = jnp.issubdtype(array.dtype, jnp.integer)
        return jnp.full(array.shape, jnp.iinfo(array.dtype).max if bits else jnp.nan, array.dtype)

    return {name: nan(array) for name, array in pool.items()}


def close(found: np.ndarray, expected: np.ndarray, rtol: float = 1e-5):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol * np.abs(expected).max())


@functools.cache
def cached(cache: str, size: int, spread: float = 2.0) -> Cached:
    return Cached(cache, size, spread)


def check_shown(rows: Cached, block: int, rtol: float = 1e-5):
    scores = rows.scores(Shown(), block)
    expected = rows.expected(WINDOW, scores.shape[2])
    found = Shown().parts(scores, *expected["anchor"].shape[1:])
    used = -(-max(HELD) // (step := min(max(block // rows.size, 1), rows.pages) * rows.size)) * step
    assert not scores[..., used:].any(), "blocks that nothing is in are not scored"
    assert (found["weights"][expected["weights"] == 0] == 0).all()
    close(found["weights"], expected["weights"], rtol)
    close(found["weights"].sum(-1), expected["weights"].sum(-1), rtol)
    held = np.arange(scores.shape[2]) < rows.counts[:, None]
    for name in ("keys", "worth"):
        theirs, ours = (np.moveaxis(x[name], -1, 1)[held] for x in (found, expected))
        close(theirs, ours, rtol)
    for name, all_slots in (("anchor", expected["anchor"][..., None]), ("held", rows.counts[:, None, None])):
        close(found[name][..., :used], np.broadcast_to(all_slots, found[name][..., :used].shape), rtol)
    assert (found["slot"][..., :used] == np.arange(used)).all()


BLOCKS = {"latents": [(4, 1), (4, 12), (4, 1024), (1, 7)], "heads": [(4, 1), (4, 12), (1, 1024)], "fp8": [(4, 12), (1, 7)]}


@pytest.mark.deep
@pytest.mark.parametrize(("cache", "size", "block"), [(cache, *sizes) for cache, each in BLOCKS.items() for sizes in each])
def test_a_policy_is_shown_what_is_cached_and_the_softmax_over_what_each_query_may_see(cache, size, block):
    check_shown(cached(cache, size), block)


@pytest.mark.parametrize("cache", ["latents", "heads"])
def test_weights_of_large_scores_are_a_softmax_too(cache):
    rows = cached(cache, 4, spread=60.0)
    largest = [np.abs(np.asarray(x)).max() for x in rows.q]
    assert max(largest) > 150
    check_shown(rows, 12, rtol=1e-3)  # float32 has 5 digits of scores of a hundred


POLICY = {
    "h2o": H2O(WINDOW),
    "snapkv": SnapKV(WINDOW, kernel=3),
    "tova": TOVA(),
    "keydiff": KeyDiff(),
    "critical": Critical(SnapKV(WINDOW, kernel=3)),
}


@pytest.mark.deep
@pytest.mark.parametrize(
    ("cache", "name"), [*(("latents", name) for name in POLICY), ("heads", "keydiff"), ("heads", "critical")]
)
def test_a_policy_scores_blocks_as_it_scores_a_single_one_of_all(cache, name):
    rows, policy = cached(cache, 4), POLICY[name]
    scores = rows.scores(policy, 12)
    seen = rows.whole(max(policy.window, 1), scores.shape[2])
    expected = np.asarray(policy.finished(policy.of_block(seen), seen.held))
    assert scores.shape == expected.shape
    held = np.arange(scores.shape[2]) < rows.counts[:, None]
    close(*(np.moveaxis(x, 1, -1)[held] for x in (scores, expected)))
    assert np.isfinite(scores).all()


def test_a_layer_that_has_dropped_tokens_is_scored_as_a_row_without_them():
    rows = cached("latents", 4)
    dropped = np.array([5, 1, 0, 300, 2, 7, 1])
    alone = rows.batch(WINDOW)
    table, gone = np.asarray(alone.page_table), np.array([0 * dropped, dropped])
    tables = Tables(ints(np.array([0 * table, table])[:, None]), ints(gone[:, None]))
    further = dataclasses.replace(
        alone, page_table=tables, index=alone.index + dropped[:, None], seq_lens=alone.seq_lens + dropped
    )

    def prepare(batch: Batch) -> Any:
        return rows.form.prepare(batch, rows.layer.pool, CONFIG, 8)

    of_second = jax.tree.map(lambda x: x[1], by_layer(prepare, further))
    jax.tree.map(np.testing.assert_array_equal, prepare(alone), of_second)


def test_each_head_is_scored_by_its_own_parts_wherever_they_are():
    """Head n has dropped the first n pages of the rows that are long enough."""
    rows, rng = cached("heads", 4), np.random.default_rng(5)
    long, first = np.flatnonzero(np.array(HELD) > 16), int(rows.layer.first)
    of_pages = next(iter(rows.layer.pool.values())).shape[0]
    place = rng.permutation(of_pages * N)  # of each part
    parts = place[(rows.table + first) * N + np.arange(N)[:, None, None]] - first * N
    dropped = np.zeros((N, len(HELD)), int)
    for n in range(N):
        dropped[n, long] = n * rows.size
        parts[n, long] = np.roll(parts[n, long], -n, axis=-1)
    pool = {name: _parts_at(place, array) for name, array in rows.layer.pool.items()}
    tables = Tables(ints(np.array([0 * parts, parts])), ints(np.array([0 * dropped, dropped])))
    scores = rows.scores(Shown(), 12, Layer(pool, rows.layer.first), tables)
    expected, found = rows.expected(WINDOW, scores.shape[2]), Shown().parts(scores, N, P + E)
    expected["by_head"] = expected["keys"].swapaxes(1, 2)
    for row, n in itertools.product(np.flatnonzero(rows.counts), range(N)):
        gone, held = dropped[n, row], rows.counts[row] - dropped[n, row]
        weights, keys, worth = (expected[name][row][..., n, gone : gone + held] for name in ("weights", "by_head", "worth"))
        close(found["weights"][row, :, n, :held], weights / np.maximum(weights.sum(-1, keepdims=True), 1e-9))
        close(found["keys"][row, n, :, :held], keys)
        close(found["worth"][row, n, :held], worth)
        close(found["anchor"][row, n, :, 0], (keys / np.linalg.norm(keys, axis=0)).mean(-1))
        assert not found["weights"][row, :, n, held:].any()
        assert (found["held"][row, n, : rows.size] == held).all()


def _parts_at(place: np.ndarray, array: jax.Array) -> jax.Array:
    """The parts of pages `[G Z N ..]`, each at its place."""
    parts = np.asarray(array).swapaxes(1, 2).reshape(len(place), array.shape[1], -1)
    moved = np.empty_like(parts)
    moved[place] = parts
    return jnp.asarray(moved.reshape(len(array), N, *moved.shape[1:]).swapaxes(1, 2))


# Through a model

SMALL = Config.preset("tiny", num_hidden_layers=2, hidden_size=64, kv_lora_rank=128)  # a dense layer, and one of experts
ROWS = (21, 3, 0, 70)  # tokens; a page has 64
SIZE = paged.PAGE


@dataclasses.dataclass(frozen=True)
class Weights(EvictionPolicy):
    """The weights of each query and head: M = W N."""

    window = WINDOW

    def of_block(self, seen: Seen) -> jax.Array:
        return seen.weights.reshape(len(seen.held), -1, seen.slot.size)


def bits(pool: Pool) -> dict[str, np.ndarray]:
    return {name: np.asarray(array).view(np.uint8) for name, array in pool.items()}


@functools.cache
def drawn() -> tuple[Any, Any]:
    return nnx.split(Transformer(SMALL, nnx.Rngs(0)))


def one_lane(pages: np.ndarray, dropped: np.ndarray) -> Tables:
    """`pages [L R P]` and `dropped [L R]`"""
    return Tables(ints(pages[:, None]), ints(dropped[:, None]))


class Read:
    """A model that has prefilled some rows, and its scores when the newest tokens pass once more."""

    def __init__(self, attention: str, kv_cache: str):
        self.model = nnx.merge(*drawn())
        self.model.dispatch = Dispatch(attention, kv_cache=kv_cache)
        self.held, rng = np.array(ROWS), np.random.default_rng(0)
        self.again = np.minimum(self.held, WINDOW)
        self.tokens = rng.integers(0, SMALL.vocab_size, (len(ROWS), max(ROWS)))
        self.count = 11
        self.table = rng.permutation(self.count)[: 2 * len(ROWS)].reshape(len(ROWS), 2)
        start = Batch.behind(*map(ints, (0 * self.held, 0 * self.held, self.held)), max(ROWS), ints(self.table))
        read = jax.jit(lambda tokens, batch, pool: self.model(tokens, batch, pool)[:2])
        hidden, self.pool = read(ints(self.tokens), start, poisoned(self.model.new_pool(self.count)))
        self.at = np.minimum((self.held - self.again)[:, None] + np.arange(WINDOW), max(ROWS) - 1)
        self.hidden = np.take_along_axis(np.asarray(hidden), self.at[..., None], axis=1)
        self.looks = jax.jit(
            lambda tokens, batch, pool: self.model(
                tokens, batch, pool, watch=functools.partial(attention_scores.scores, Weights())
            )
        )

    def once_more(self, table: Any, pool: Pool) -> tuple[np.ndarray, Pool, dict[str, list[jax.Array]]]:
        first = ints(self.held - self.again)
        batch = Batch.behind(first, first, ints(self.again), WINDOW, table)
        return self.looks(ints(np.take_along_axis(self.tokens, self.at, axis=1)), batch, pool)

    @property
    def queries(self) -> np.ndarray:
        """Which of the window's places have a token."""
        return np.arange(WINDOW) < self.again[:, None]


@functools.cache
def read_by(attention: str, kv_cache: str) -> Read:
    return Read(attention, kv_cache)


@pytest.mark.deep
@pytest.mark.parametrize(("attention", "kv_cache"), [("auto", "auto"), ("naive", "auto"), ("auto", "fp8")])
def test_a_pass_for_a_policy_leaves_the_pool_as_it_is_and_scores_all_that_each_layer_holds(attention, kv_cache):
    read = read_by(attention, kv_cache)
    hidden, pool, aux = read.once_more(ints(read.table), read.pool)
    jax.tree.map(np.testing.assert_array_equal, bits(pool), bits(read.pool))
    close(np.asarray(hidden)[read.queries], read.hidden[read.queries], 1e-3 if kv_cache == "fp8" else 1e-4)
    heads = SMALL.num_attention_heads
    assert len(aux["watched"]) == SMALL.num_hidden_layers
    for scores in aux["watched"]:
        assert scores.shape == (len(ROWS), WINDOW * heads, 2 * SIZE)
        weights = np.asarray(scores).reshape(len(ROWS), WINDOW, heads, -1)
        close(weights.sum(-1), np.broadcast_to(read.queries[..., None], weights.shape[:3]))
        sees = np.arange(2 * SIZE) <= (read.held - read.again)[:, None, None] + np.arange(WINDOW)[:, None]
        assert ((weights > 0) == (sees & read.queries[..., None])[:, :, None]).all()


@pytest.mark.deep
def test_each_layer_is_scored_by_its_own_pages_wherever_they_are():
    read, layers = read_by("auto", "auto"), SMALL.num_hidden_layers
    found = read.once_more(ints(read.table), read.pool)[2]["watched"]
    place = np.random.default_rng(1).permutation(layers * read.count)
    mixed = {name: array[jnp.argsort(ints(place))] for name, array in read.pool.items()}  # page i is at place[i]
    first = np.arange(layers)[:, None, None] * read.count
    pages = place[read.table + first] - first
    none = np.zeros((layers, len(ROWS)), int)
    same = read.once_more(one_lane(pages, none), mixed)[2]["watched"]
    jax.tree.map(np.testing.assert_array_equal, same, found)
    for layer in range(layers):  # it drops the first page of the longest row
        dropped, less = none.copy(), pages.copy()
        dropped[layer, 3], less[layer, 3] = SIZE, [pages[layer, 3, 1], 10**6]
        scores = np.asarray(read.once_more(one_lane(less, dropped), mixed)[2]["watched"][layer])
        left = np.asarray(found[layer])[3, :, SIZE : 2 * SIZE]
        close(scores[3, :, :SIZE], left / left.sum(-1, keepdims=True))
        assert not scores[3, :, SIZE:].any()
        np.testing.assert_array_equal(scores[:3], np.asarray(found[layer])[:3])
