"""Policies by hand, against plain loops and against kvpress; who keeps how many; Ada-KV's theorems, by trying all ways."""

import dataclasses
import functools
import itertools
import math
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.cache import evict
from mla_jax.cache.evict import (
    BUDGET_RULES,
    EVICTION_POLICIES,
    H2O,
    TOVA,
    Ada,
    AdaFloor,
    AdaPyramid,
    Critical,
    EvictionPolicy,
    KeyDiff,
    Pyramid,
    Random,
    Seen,
    SnapKV,
    Streaming,
)

KVPRESS = np.load(Path(__file__).with_name("kvpress.npz"))
WINDOW, KERNEL = 4, 5  # of the policies here


@functools.partial(jax.jit, static_argnames=("rule", "sinks", "window", "first"))
def choose(scores: jax.Array, held: jax.Array, count: jax.Array, rule: evict.Budget, **others) -> jax.Array:
    """`held [L B]` where all heads have as many tokens, or `[L B H]`."""
    return evict.kept(scores, held if held.ndim == 3 else held[..., None], count, rule, **others)


class Attention(NamedTuple):
    """One layer's, of a row: queries may share keys and values."""

    q: np.ndarray  # [N S D]
    k: np.ndarray  # [K S D]
    v: np.ndarray  # [K S D]
    o: np.ndarray  # [N D W]

    @classmethod
    def random(cls, seed: int, tokens: int = 24, heads: int = 3) -> "Attention":
        rng = np.random.default_rng(seed)
        q, k, v = 2 * rng.normal(size=(3, heads, tokens, 4))
        return cls(q, k, v, rng.normal(size=(heads, 4, 6)))

    @property
    def groups(self) -> int:
        return len(self.q) // len(self.k)

    def weights(self) -> np.ndarray:
        """[N S S]: of each query, over the tokens up to its own."""
        heads, tokens, width = self.q.shape
        found = np.zeros((heads, tokens, tokens))
        for head, at in itertools.product(range(heads), range(tokens)):
            logits = self.k[head // self.groups, : at + 1].astype(float) @ self.q[head, at] / np.sqrt(width)
            e = np.exp(logits - logits.max())
            found[head, at, : at + 1] = e / e.sum()
        return found

    def worth(self) -> np.ndarray:
        """[N S]"""
        return np.array([[np.abs(v @ o).sum() for v in self.v[head // self.groups]] for head, o in enumerate(self.o)])


def array(numbers) -> jax.Array:
    return jnp.asarray(numbers, jnp.float32)


def shown(layer: Attention, policy: EvictionPolicy, start: int, stop: int) -> Seen:
    tokens = layer.q.shape[1]
    anchor = (layer.k / np.linalg.norm(layer.k, axis=-1, keepdims=True)).mean(1)
    return Seen(
        weights=array(layer.weights()[:, tokens - policy.window :, start:stop].swapaxes(0, 1)[None]),
        keys=array(layer.k[:, start:stop].swapaxes(0, 1)[None]),
        anchor=array(anchor[None]) if policy.needs_anchor else None,
        worth=array(layer.worth()[:, start:stop].T[None]) if policy.needs_worth else None,
        slot=jnp.arange(start, stop),
        held=jnp.array([[tokens]]),
    )


def scored(layer: Attention, policy: EvictionPolicy, cuts: tuple[int, ...] = ()) -> jax.Array:
    """[1 M S]: M counts heads of keys, where several heads share them."""
    tokens = layer.q.shape[1]
    blocks = itertools.pairwise([0, *cuts, tokens])
    scores = jnp.concatenate([policy.of_block(shown(layer, policy, *block)) for block in blocks], axis=-1)
    if scores.shape[1] == policy.stages * len(layer.q):
        scores = scores.reshape(1, -1, layer.groups, tokens).mean(2)
    return policy.finished(scores, jnp.array([[tokens]]))


def seen(weights, held: int, **others) -> Seen:
    """A block that is all of a row; `weights [W N S]`."""
    weights = array(weights)[None]
    slots = weights.shape[-1]
    empty = {"keys": jnp.zeros((1, slots, 1, 2)), "anchor": None, "worth": None}
    return Seen(weights=weights, slot=jnp.arange(slots), held=jnp.array([[held]]), **(empty | others))


def small(name: str) -> EvictionPolicy:
    policy = EVICTION_POLICIES[name]
    if isinstance(policy, Critical):
        return Critical(SnapKV(WINDOW, KERNEL))
    return dataclasses.replace(policy, window=WINDOW) if isinstance(policy, SnapKV | H2O) else policy


# Each policy


def test_streaming_prefers_the_newest():
    assert Streaming().of_block(seen(np.zeros((0, 1, 4)), 4)).tolist() == [[[0, 1, 2, 3]]]


def test_h2o_divides_by_the_queries_that_see_a_token():
    found = H2O(2).of_block(seen([[[0.5, 0.5, 0, 0]], [[0.25, 0.25, 0.5, 0]]], held=3))
    np.testing.assert_allclose(found[0, 0], [0.375, 0.375, 0.5, 0])


def test_snapkv_averages_neighbours_before_the_window_and_counts_zeros():
    policy, block = SnapKV(window=2, kernel=3), seen([[[3, 6, 9, 6, 0]], [[3, 0, 9, 3, 9]]], held=5)
    found = policy.finished(policy.of_block(block), block.held)
    np.testing.assert_allclose(found[0, 0], [(0 + 3 + 3) / 3, (3 + 3 + 9) / 3, (3 + 9 + 0) / 3, 0, 0])


def test_snapkv_can_take_the_largest_of_neighbours():
    policy, block = SnapKV(window=2, kernel=3, pooling="max"), seen([[[0, 4, 0, 0, 0, 2, 0, 0, 9, 9]]] * 2, held=10)
    found = policy.finished(policy.of_block(block), block.held)
    assert found[0, 0].tolist() == [4, 4, 4, 0, 2, 2, 2, 0, 0, 0]


def test_tova_takes_the_mean_over_heads_of_the_newest_query():
    found = TOVA().of_block(seen([[[0.25, 0.75], [0.5, 0.5]]], held=2))
    np.testing.assert_allclose(found, [[[0.375, 0.625]]])


def test_keydiff_prefers_keys_unlike_the_others():
    keys, anchor = array([[[[2, 0]], [[1, 0]], [[0, 5]]]]), array([[[2 / 3, 1 / 3]]])
    found = KeyDiff().of_block(seen(np.zeros((0, 1, 3)), 3, keys=keys, anchor=anchor))
    np.testing.assert_allclose(found[0, 0], [-2 / 5**0.5, -2 / 5**0.5, -1 / 5**0.5], rtol=1e-6)


def test_random_depends_on_slot_and_seed_alone():
    block = seen(np.zeros((0, 1, 64)), 64)
    first, again, other = (Random(seed).of_block(block)[0, 0] for seed in (0, 0, -1))
    assert first.tolist() == again.tolist()
    assert len(set(first.tolist())) == 64
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.4
    assert Random(0).of_block(block._replace(slot=jnp.arange(64, 128)))[0, 0].tolist() != first.tolist()


def test_critical_keeps_scores_and_their_products_with_the_worth_apart():
    policy, block = Critical(TOVA()), seen([[[0.25, 0.75], [0.75, 0.25]]], held=2, worth=array([[[2, 4], [6, 8]]]))
    found = policy.finished(policy.of_block(block), block.held)
    np.testing.assert_allclose(found[0, :2], [[0.5, 0.5]] * 2)
    np.testing.assert_allclose(found[0, 2:], [[0.5001 * 2, 0.5001 * 6], [0.5001 * 4, 0.5001 * 8]])
    np.testing.assert_allclose(evict.shared(found, policy.stages)[0], [[0.5, 0.5], [0.5001 * 3, 0.5001 * 7]])


@pytest.mark.deep
@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_cuts_of_blocks_change_no_score(name):
    layer, policy = Attention.random(0), small(name)
    np.testing.assert_allclose(scored(layer, policy), scored(layer, policy, cuts=(5, 16)), rtol=1e-6)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_what_no_row_holds_changes_nothing(name):
    layer, policy = Attention.random(1), small(name)
    whole, held = shown(layer, policy, 0, 24), jnp.array([[24]])

    def padded(x, axis, value=jnp.nan):
        return None if x is None else jnp.pad(x, [(0, 3 * (i == axis)) for i in range(x.ndim)], constant_values=value)

    longer = whole._replace(
        weights=padded(whole.weights, 3, 0), keys=padded(whole.keys, 1), worth=padded(whole.worth, 1), slot=jnp.arange(27)
    )  # fmt: skip
    scores, more = (policy.finished(policy.of_block(block), held) for block in (whole, longer))
    np.testing.assert_allclose(scores, more[..., :24], rtol=1e-6)
    found = choose(more[None], held[None], jnp.array([9]), BUDGET_RULES["ada"], sinks=2, window=WINDOW, first=policy.first)
    assert not found[..., 24:].any()
    assert (found.sum(-1).mean(2) == 9).all()


# Against plain loops, and against kvpress


def best(scores, count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda slot: -scores[slot])[:count])


def snapkv_by_hand(layer: Attention) -> np.ndarray:
    weights, tokens = layer.weights(), layer.q.shape[1]
    found = np.full((len(layer.q), tokens), 9.0)  # the window's tokens stay
    for head, slot in itertools.product(range(len(layer.q)), range(tokens - WINDOW)):
        near = [n for n in range(slot - 2, slot + 3) if 0 <= n < tokens - WINDOW]
        found[head, slot] = sum(weights[head, query, n] for n in near for query in range(tokens - WINDOW, tokens)) / 5 / WINDOW
    return found


def h2o_by_hand(layer: Attention) -> np.ndarray:
    weights, tokens = layer.weights(), layer.q.shape[1]
    return np.array([[np.mean([head[q, slot] for q in range(slot, tokens)]) for slot in range(tokens)] for head in weights])


def tova_by_hand(layer: Attention) -> np.ndarray:
    mean = layer.weights()[:, -1].mean(0)
    return np.array([mean] * len(layer.q))


def keydiff_by_hand(layer: Attention) -> np.ndarray:
    found = []
    for keys in layer.k:
        unit = [k / np.sqrt(sum(k * k)) for k in keys]
        anchor = sum(unit) / len(unit)
        found.append([-sum(u * anchor) / np.sqrt(sum(anchor * anchor)) for u in unit])
    return np.array(found)


def critical_by_hand(layer: Attention, count: int, first: float) -> list[list[int]]:
    found = []
    for score, worth in zip(snapkv_by_hand(layer), layer.worth(), strict=True):
        sure = best(score, int(count * first))
        product = [np.inf if s in sure or s >= len(score) - WINDOW else (score[s] + 1e-4) * worth[s] for s in range(len(score))]
        found.append(best(product, count))
    return found


def ada_by_hand(scores: np.ndarray, count: int, floor: float) -> list[list[int]]:
    chosen = {(head, slot) for head, score in enumerate(scores) for slot in best(score, max(1, int(count * floor)))}
    rest = sorted(set(np.ndindex(scores.shape)) - chosen, key=lambda at: -scores[at])
    chosen |= set(rest[: count * len(scores) - len(chosen)])
    return [[slot for slot in range(scores.shape[1]) if (head, slot) in chosen] for head in range(len(scores))]


def kept_of(
    layer: Attention, policy: EvictionPolicy, count: int, rule=BUDGET_RULES["uniform"], sinks: int = 0, window: int = 0
) -> list[list[int]]:
    scores = scored(layer, policy)
    heads = len(layer.k) * policy.stages
    scores = jnp.broadcast_to(scores, (1, max(heads, scores.shape[1]), scores.shape[2]))
    held = jnp.array([[layer.q.shape[1]]])
    found = choose(scores[None], held, jnp.array([count]), rule, sinks=sinks, window=window, first=policy.first)
    return [np.flatnonzero(head).tolist() for head in found[0, 0]]


@pytest.mark.parametrize("seed", range(3))
def test_policies_and_rules_keep_what_plain_loops_keep(seed):
    layer = Attention.random(seed)
    snap, count = snapkv_by_hand(layer), 9
    assert kept_of(layer, SnapKV(WINDOW, KERNEL), count, window=WINDOW) == [best(score, count) for score in snap]
    assert kept_of(layer, H2O(24), count) == [best(score, count) for score in h2o_by_hand(layer)]
    assert kept_of(layer, TOVA(), count) == [best(score, count) for score in tova_by_hand(layer)]
    assert kept_of(layer, KeyDiff(), count) == [best(score, count) for score in keydiff_by_hand(layer)]
    for first in (0.5, 0.0):
        policy = Critical(SnapKV(WINDOW, KERNEL), first=first)
        assert kept_of(layer, policy, count, window=WINDOW) == critical_by_hand(layer, count, first)
    for floor in (0.2, 0.6, 1.0):
        assert kept_of(layer, SnapKV(WINDOW, KERNEL), count, AdaFloor(floor), window=WINDOW) == ada_by_hand(snap, count, floor)


AS_KVPRESS = {  # policy, rule, sinks, window
    "snapkv": (SnapKV(WINDOW, KERNEL), BUDGET_RULES["uniform"], 0, WINDOW),
    "tova": (TOVA(), BUDGET_RULES["uniform"], 0, 1),
    "keydiff": (KeyDiff(), BUDGET_RULES["uniform"], 0, 0),
    "observed": (H2O(48), BUDGET_RULES["uniform"], 0, 0),
    "streaming": (Streaming(), BUDGET_RULES["uniform"], 4, 0),
    "critical": (Critical(SnapKV(WINDOW, KERNEL)), BUDGET_RULES["uniform"], 0, WINDOW),
    "ada": (SnapKV(WINDOW, KERNEL), AdaFloor(), 0, WINDOW),
    "pyramid": (SnapKV(WINDOW, KERNEL), Pyramid(beta=2), 0, WINDOW),
}


@pytest.mark.parametrize("count", [12, 24])
@pytest.mark.parametrize("press", AS_KVPRESS)
def test_kvpress_keeps_the_same_tokens(press, count):
    """See kvpress_fixture.py. No two scores at a cut are equal there."""
    policy, rule, sinks, window = AS_KVPRESS[press]
    layers = [Attention(*(KVPRESS[name][layer] for name in "qkvo")) for layer in range(2)]
    scores = jnp.stack([scored(layer, policy) for layer in layers])
    scores = jnp.broadcast_to(scores, (2, 1, 2 * policy.stages, 48))
    held = jnp.full((2, 1), 48)
    found = choose(scores, held, jnp.array([count]), rule, sinks=sinks, window=window, first=policy.first)
    np.testing.assert_array_equal(found[:, 0], KVPRESS[f"{press}_{count}"])


@pytest.mark.parametrize(
    ("held", "count", "window", "expected"),
    [
        (4096, 2048, 64, [3994, 2697, 1399, 102]),
        (40000, 4000, 64, [7800, 5267, 2733, 200]),
        (100, 50, 2, [98, 66, 34, 2]),  # the first layer can have no more
        (4096, 410, 64, [410] * 4),  # the last would have 20
        (100, 99, 2, [99] * 4),
    ],
)
def test_a_pyramid_is_that_of_kvpress(held, count, window, expected):
    """As PyramidKVPress.get_layer_budget says."""
    nothing = jnp.zeros((4, 1, 1, 1))
    ranked = evict.Ranked(nothing, nothing, jnp.full((4, 1, 1), held), jnp.array([count]), window)
    assert Pyramid().counts(ranked)[:, 0, 0].tolist() == expected


# Choosing

LAYERS, BATCH, SLOTS, SINKS, RECENT = 3, 4, 10, 2, 3
SCORES = np.float32([0, 1, 2, 3, -1, np.nan, np.inf, -np.inf])


def drawn(seed: int, heads: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores with many ties, held tokens, and counts."""
    rng = np.random.default_rng(seed)
    scores = rng.choice(SCORES[: rng.integers(1, len(SCORES) + 1)], (LAYERS, BATCH, heads, SLOTS))
    return scores, rng.integers(0, SLOTS + 1, (LAYERS, BATCH, heads)), rng.integers(0, SLOTS + 3, BATCH)


EXACT = {"uniform": BUDGET_RULES["uniform"], "pyramid": Pyramid(beta=2), "ada": Ada(0.3), "ada alone": Ada(1.0)}
EXACT |= {"ada_floor": AdaFloor(0.3), "ada_pyramid": AdaPyramid(Pyramid(beta=2), Ada(0.7))}
RULE = pytest.mark.parametrize("rule", EXACT.values(), ids=EXACT)


def expected(scores: np.ndarray, held, count: int, rule) -> np.ndarray:
    """The result of `kept`, by sorting tuples; `held [L H]`. [L H S]"""
    layers, heads, _ = scores.shape
    recent = max(RECENT, count == 0)
    count = max(count, 1)

    def order(layer, head, slot, reserved=()):
        """Smaller is better."""
        age, score = held[layer, head] - slot, scores[layer, head, slot]
        forced = age <= recent or slot < SINKS
        turn = (0, age) if age <= recent else (1, slot) if forced else (2, age)
        if forced or slot in reserved:
            return -np.inf, turn, layer, head
        return -score if np.isfinite(score) else 1e30, turn, layer, head

    def best(sets, count, reserved=None):
        tokens = [(*each, slot) for each in sets for slot in range(held[each])]
        return sorted(tokens, key=lambda token: order(*token, (reserved or {}).get(token[:2], ())))[:count]

    sets = list(itertools.product(range(layers), range(heads)))
    together = [sets] if heads == 1 else [[each for each in sets if each[0] == layer] for layer in range(layers)]

    def pyramid(beta: int) -> list[int]:
        first = held.max() - SINKS - RECENT - count
        above = min(count * (beta - 1) / beta, first)
        above = above if 0 <= above <= count - SINKS - RECENT else 0
        return [count + int(np.sign(x) * np.floor(abs(x) + 0.5)) for x in (above, 0, -above)]  # three layers

    def ada(share: float, average: int, some: list) -> list:
        """alpha B* + (1 - alpha) B/h of each, rounded so that the sum stays; all, if they are no more."""
        tokens = best(some, average * len(some))
        if len(tokens) == sum(held[each] for each in some):
            return tokens
        among = [token[:2] for token in tokens]
        exact = [Fraction(str(share)) * among.count(each) + (1 - Fraction(str(share))) * average for each in some]
        until = [0, *(math.floor(sum(exact[: i + 1]) + Fraction(1, 2)) for i in range(len(some)))]
        return [
            token
            for each, (start, end) in zip(some, itertools.pairwise(until), strict=True)
            for token in best([each], end - start)
        ]

    if isinstance(rule, AdaFloor):
        floor = max(int(count * rule.floor), 1) if rule.floor else 0
        reserved = {each: [token[2] for token in best([each], floor)] for each in sets}
        chosen = [token for some in together for token in best(some, count * len(some), reserved)]
    elif isinstance(rule, Ada):
        chosen = [token for some in together for token in ada(rule.safeguard, count, some)]
    elif isinstance(rule, AdaPyramid) and heads > 1:
        counts = pyramid(rule.layers.beta)
        chosen = [token for some in together for token in ada(rule.heads.safeguard, counts[some[0][0]], some)]
    elif isinstance(rule, (Pyramid, AdaPyramid)):
        counts = pyramid((rule if isinstance(rule, Pyramid) else rule.layers).beta)
        chosen = [token for each in sets for token in best([each], counts[each[0]])]
    else:
        chosen = [token for each in sets for token in best([each], count)]
    found = np.zeros(scores.shape, bool)
    for token in chosen:
        found[token] = True
    return found


@RULE
@pytest.mark.parametrize("heads", [1, 2])
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1))
def test_kept_is_what_sorting_says_whatever_the_scores_and_the_count(rule, heads, seed):
    scores, held, count = drawn(seed, heads)
    found = choose(jnp.asarray(scores), jnp.asarray(held), jnp.asarray(count), rule, sinks=SINKS, window=RECENT)
    for row in range(BATCH):
        np.testing.assert_array_equal(found[:, row], expected(scores[:, row], held[:, row], count[row], rule))


@RULE
@pytest.mark.parametrize("heads", [1, 2])
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, SLOTS))
def test_so_many_are_kept_as_the_count_says(rule, heads, seed, length):
    scores, _, count = drawn(seed, heads)
    held = jnp.full((LAYERS, BATCH), length)
    found = np.asarray(choose(jnp.asarray(scores), held, jnp.asarray(count), rule, sinks=SINKS, window=RECENT))
    each = np.clip(count, 1, length)
    assert (found.sum((0, 2, 3)) == LAYERS * heads * each).all()
    if heads > 1 and not isinstance(rule, (Pyramid, AdaPyramid)):
        assert (found.sum((2, 3)) == heads * each).all()  # of every layer
    counts = found.sum(-1)
    for row, wanted in enumerate(each):
        forced = found[:, row, :, max(length - RECENT, 0) : length][..., -wanted:]
        assert forced.all(), "the newest are kept"
        if wanted >= SINKS + RECENT:
            assert found[:, row, :, : min(SINKS, length)].all()
            assert counts[:, row].min() >= SINKS + RECENT


def chosen(
    scores, count: int, held: int | None = None, rule=BUDGET_RULES["uniform"], sinks: int = 0, window: int = 1
) -> list[int]:
    scores = array(scores)[None, None, None]
    lengths = jnp.array([[scores.shape[-1] if held is None else held]])
    return np.flatnonzero(choose(scores, lengths, jnp.array([count]), rule, sinks=sinks, window=window)).tolist()


@pytest.mark.parametrize("rule", BUDGET_RULES.values(), ids=BUDGET_RULES)
def test_no_count_and_no_score_empties_a_row_or_overruns_it(rule):
    scores = [5, 4, np.nan, 3, np.inf, 1, 0, 0]
    cases = {0: [7], 1: [7], 2: [6, 7], 3: [0, 6, 7], 4: [0, 1, 6, 7], 5: [0, 1, 3, 6, 7], 8: [*range(8)], 99: [*range(8)]}
    assert {count: chosen(scores, count, rule=rule, sinks=2, window=2) for count in cases} == cases
    assert chosen(scores, 99, held=3, rule=rule, sinks=2, window=2) == [0, 1, 2]
    assert chosen(scores, 5, held=0, rule=rule, sinks=2, window=2) == []
    assert chosen(scores, 0, held=3, rule=rule, sinks=0, window=0) == [2]


def test_of_equal_scores_the_newer_stays_and_none_counts_that_is_not_finite():
    assert chosen([1, 1, 1, 1, 1, 0], 3) == [3, 4, 5]
    assert chosen([np.nan, -9, np.inf, -9, -np.inf, 0], 3) == [1, 3, 5]
    assert chosen([np.nan] * 6, 3) == [3, 4, 5]


def test_of_equal_scores_that_of_the_earlier_layer_or_head_stays():
    same, held = jnp.zeros((3, 1, 1, 4)), jnp.full((3, 1), 4)
    found = choose(same, held, jnp.array([2]), Ada(1.0), sinks=0, window=1)  # the newest three times, the ones before three times
    assert found.sum(-1).ravel().tolist() == [2, 2, 2]
    uneven = same.at[2, 0, 0, 1].set(1.0)
    found = choose(uneven, held, jnp.array([2]), Ada(1.0), sinks=0, window=1)
    assert [np.flatnonzero(layer).tolist() for layer in found[:, 0, 0]] == [[2, 3], [2, 3], [1, 3]]
    found = choose(jnp.moveaxis(uneven, 0, 2), held[:1], jnp.array([2]), Ada(1.0), sinks=0, window=1)
    assert [np.flatnonzero(head).tolist() for head in found[0, 0]] == [[2, 3], [2, 3], [1, 3]]


@pytest.mark.parametrize(("safeguard", "expected"), [(1.0, [6, 0]), (0.5, [5, 1]), (0.2, [4, 2]), (0.0, [3, 3])])
def test_a_safeguard_mixes_the_best_of_all_with_the_average(safeguard, expected):
    scores = array([[9, 8, 7, 6, 5, 4], [1, 1, 1, 1, 1, 1]])[None, None]
    found = choose(scores, jnp.array([[6]]), jnp.array([3]), Ada(safeguard), sinks=0, window=0)
    assert found.sum(-1).ravel().tolist() == expected


def test_counts_of_a_million_tokens_are_exact():
    best = jnp.array([[[999_999, 0, 1, 500_000]]], jnp.int32)
    count = jnp.full((1, 1, 1), 375_000, jnp.int32)
    assert evict.safeguarded(best, count, 0.29, axis=2).sum() == best.sum()


def test_a_share_of_a_small_count_is_one_token_unless_it_is_none():
    score, worth = [[9, 8, 7], [1, 2, 1]], [[1, 9, 9], [9, 1, 1]]
    both, held, one = array([*score, *worth])[None, None], jnp.array([[3]]), jnp.array([1])
    assert choose(both[:, :, :2], held, one, AdaFloor(0.2), sinks=0, window=0).sum(-1).ravel().tolist() == [1, 1]
    assert choose(both[:, :, :2], held, one, Ada(1.0), sinks=0, window=0).sum(-1).ravel().tolist() == [2, 0]
    for first, best in ((0.5, [0, 1]), (0.0, [2, 0])):
        found = choose(both, held, one, BUDGET_RULES["uniform"], sinks=0, window=0, first=first)
        assert found.argmax(-1).ravel().tolist() == best


def test_critical_with_ada_has_adas_counts_and_a_second_stage():
    score, worth = [[9, 8, 7, 6, 0], [5, 1, 1, 1, 0]], [[1, 1, 1, 9, 1], [1, 2, 3, 4, 1]]
    both = array([*score, *(np.array(score) * worth)])[None, None]
    found = choose(both, jnp.array([[5]]), jnp.array([3]), Ada(1.0), sinks=0, window=1, first=0.5)
    # 6 in all: the newest twice, then 9, 8, 7, 6 by score; of the first head 5, and 2 of these sure
    assert [np.flatnonzero(head).tolist() for head in found[0, 0]] == [[0, 1, 2, 3, 4], [4]]
    found = choose(both, jnp.array([[5]]), jnp.array([3]), BUDGET_RULES["uniform"], sinks=0, window=1, first=0.7)
    assert [np.flatnonzero(head).tolist() for head in found[0, 0]] == [[0, 3, 4], [0, 3, 4]]


@given(st.lists(st.booleans(), min_size=12, max_size=12))
@settings(max_examples=20)
def test_places_are_those_of_the_kept_in_order(kept):
    source, count = evict.new_slots(jnp.array(kept).reshape(2, 6))
    for row, flags in enumerate(np.array(kept).reshape(2, 6)):
        assert source[row, : count[row]].tolist() == np.flatnonzero(flags).tolist()
        assert sorted(source[row].tolist()) == list(range(6))


# Ada-KV's theorems

HEADS, TOKENS, SHARE = 2, 5, 2


@functools.cache
def ways(sets: int) -> np.ndarray:
    """[C sets TOKENS]: all ways to keep SHARE tokens of each set on average."""
    spots = itertools.combinations(range(sets * TOKENS), sets * SHARE)
    return np.array([np.isin(np.arange(sets * TOKENS), some).reshape(sets, TOKENS) for some in spots])


def rule_keeps(scores: np.ndarray, rule, window: int = 0) -> np.ndarray:
    """`scores [L M S]`"""
    held, count = jnp.full((len(scores), 1), TOKENS), jnp.array([SHARE])
    return np.asarray(choose(array(scores)[:, None], held, count, rule, sinks=0, window=window)[:, 0])


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3.0))
def test_what_an_output_changes_by_is_at_most_the_bound(seed, spread):
    """Theorem 3.1: |y - y'|_1 <= 2 C sum_i (1 - kept weight of head i), C the largest L1 norm of a value times W_o."""
    rng = np.random.default_rng(seed)
    weights = rng.dirichlet(np.full(TOKENS, spread), HEADS)
    values = rng.normal(size=(HEADS, TOKENS, 6))  # times W_o
    for rule in BUDGET_RULES.values():
        keeps = rule_keeps(weights[None], rule, window=1)[0]
        left = (weights * keeps).sum(1)
        before = np.einsum("ns,nsd->d", weights, values)
        after = np.einsum("ns,nsd->d", weights * keeps / left[:, None], values)
        bound = 2 * np.abs(values).sum(-1).max() * (1 - left).sum()
        assert np.abs(before - after).sum() <= bound + 1e-6


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3.0))
def test_over_heads_ada_reaches_the_least_bound_of_all_ways(seed, spread):
    """Theorem 3.3, each head with tokens of its own."""
    weights = np.random.default_rng(seed).dirichlet(np.full(TOKENS, spread), HEADS)

    def bound(keeps):
        return (1 - (weights * keeps).sum(-1)).sum(-1)

    ada = bound(rule_keeps(weights[None], Ada(1.0))[0])
    assert ada <= bound(ways(HEADS)).min() + 1e-6
    assert ada <= bound(rule_keeps(weights[None], AdaFloor(0.2))[0]) + 1e-6
    assert ada <= bound(rule_keeps(weights[None], BUDGET_RULES["uniform"])[0]) + 1e-6


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3.0))
def test_in_a_pyramid_ada_reaches_the_least_bound_of_all_ways_in_each_layer(seed, spread):
    """Theorem 3.3 for the count that the pyramid gives a layer."""
    weights = np.random.default_rng(seed).dirichlet(np.full(TOKENS, spread), (2, HEADS))
    keeps = rule_keeps(weights, AdaPyramid(Pyramid(beta=2), Ada(1.0)))
    pyramid = rule_keeps(weights, Pyramid(beta=2))
    for layer in range(2):
        total = pyramid[layer].sum()
        assert keeps[layer].sum() == total
        every = itertools.combinations(weights[layer].ravel(), int(total))
        kept = (weights[layer] * keeps[layer]).sum()
        assert kept >= max(map(sum, every)) - 1e-6
        assert kept >= (weights[layer] * pyramid[layer]).sum() - 1e-6


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.floats(0.1, 3.0))
def test_over_layers_ada_reaches_the_least_bound_where_heads_share_tokens(seed, spread):
    """Ours: with one set of tokens for all heads, the sum over layers of the bounds is least for the top of the heads' sums."""
    layers = 3
    weights = np.random.default_rng(seed).dirichlet(np.full(TOKENS, spread), (layers, HEADS))
    scores = np.asarray(evict.shared(array(weights)))

    def bound(keeps):
        """`keeps [.. L S]`"""
        return (1 - (weights * keeps[..., None, :]).sum(-1)).sum((-1, -2))

    ada = bound(rule_keeps(scores, Ada(1.0))[:, 0])
    assert ada <= bound(ways(layers)).min() + 1e-6
    for rule in (Ada(0.5), AdaFloor(0.2), BUDGET_RULES["uniform"], Pyramid(beta=2)):
        assert ada <= bound(rule_keeps(scores, rule)[:, 0]) + 1e-6
