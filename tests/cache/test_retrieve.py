"""Pages are summed up and chosen as plain loops say; Quest's bounds bound."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.cache import retrieve
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES, InfLLM, Quest, Retrieval

PAGES, SIZE, HEADS, WIDTH = 7, 8, 3, 10
choose = jax.jit(retrieve.chosen, static_argnums=(2, 3))


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries `[1 N L]`, keys `[G Z L]`, and which slots are held: a page's first ones, at least one."""
    rng = np.random.default_rng(seed)
    filled = rng.integers(1, SIZE + 1, PAGES)
    q, keys = rng.normal(size=(1, HEADS, WIDTH)), rng.normal(size=(PAGES, SIZE, WIDTH)) * rng.lognormal(size=(PAGES, 1, 1))
    return q.astype(np.float32), keys.astype(np.float32), np.arange(SIZE) < filled[:, None]


# Quest


@pytest.mark.parametrize("seed", range(20))
def test_no_token_of_a_page_exceeds_its_bound_in_any_head(seed):
    q, keys, held = drawn(seed)
    bounds = np.asarray(Quest().bounds(jnp.asarray(q), Quest().summary(jnp.asarray(keys), jnp.asarray(held), None)[None]))[0]
    logits = np.where(held, np.einsum("nl,gzl->ngz", q[0], keys), -np.inf).max(-1)
    assert (bounds >= logits - 1e-5 * np.abs(bounds)).all()
    pages = [page[on] for page, on in zip(keys, held, strict=True)]
    exact = [[np.maximum(head * page.min(0), head * page.max(0)).sum() for page in pages] for head in q[0]]
    np.testing.assert_allclose(bounds, exact, rtol=1e-5, atol=1e-5)


def test_the_bound_of_a_page_with_one_token_is_its_logit():
    q, keys, _ = drawn(0)
    one = np.arange(SIZE) < np.ones((PAGES, 1))
    bounds = Quest().bounds(jnp.asarray(q), Quest().summary(jnp.asarray(keys), jnp.asarray(one), None)[None])[0]
    np.testing.assert_allclose(bounds, np.einsum("nl,gl->ng", q[0], keys[:, 0]), rtol=1e-4, atol=1e-5)


def test_every_head_has_one_vote_however_long_its_queries():
    """Two heads, two channels: each head wants another page, and the first one's queries are 50 times as long."""
    summary = np.zeros((1, 3, 2, 2), np.float32)
    summary[0, 0, :, 0], summary[0, 1, :, 1] = 1, 1
    q = np.array([[[50, 0], [0, 1]]], np.float32)
    scores = np.asarray(Quest().scores(jnp.asarray(q), jnp.asarray(summary), jnp.ones((1, 3), bool), 1.0))[0]
    weights = np.exp([[50, 0, 0], [0, 1, 0]])
    np.testing.assert_allclose(np.exp(scores), (weights / weights.sum(1, keepdims=True)).sum(0), rtol=1e-5)


def test_pages_that_no_head_wants_still_differ():
    summary = np.zeros((1, 4, 2, 1), np.float32)
    summary[0, :, :, 0] = np.array([1000, 3, 1, 2])[:, None]
    scores = np.asarray(Quest().scores(jnp.ones((1, 1, 1)), jnp.asarray(summary), jnp.ones((1, 4), bool), 1.0))[0]
    assert np.argsort(-scores).tolist() == [0, 1, 3, 2]


# InfLLM


def representatives(keys: np.ndarray, queries: np.ndarray, count: int) -> list[int]:
    """By the definition, of one page; `queries` are sums over heads."""
    tokens = range(len(keys))
    asked = [np.mean([queries[t] @ keys[m] for t in tokens[m:]]) for m in tokens]
    return sorted(tokens, key=lambda m: -asked[m])[:count]


@pytest.mark.parametrize("seed", range(10))
def test_a_page_stands_for_the_tokens_that_those_after_them_ask_for_most(seed):
    q, keys, held = drawn(seed)
    queries = np.random.default_rng(seed + 100).normal(size=keys.shape).astype(np.float32)
    policy, asked = InfLLM(), np.zeros((PAGES, SIZE), np.float32)
    for part in (held & (np.arange(SIZE) < 3), held & (np.arange(SIZE) >= 3)):  # as the tokens come, in two steps
        asked += np.asarray(policy.asked(jnp.asarray(queries), jnp.asarray(keys), jnp.asarray(part)))
    summary = policy.summary(jnp.asarray(keys), jnp.asarray(held), jnp.asarray(asked))
    scores = policy.scores(jnp.asarray(q), summary[None], jnp.ones((1, PAGES), bool), 1.0)[0]
    for g, filled in enumerate(held.sum(1)):
        chosen = representatives(keys[g, :filled], queries[g], policy.representatives)
        np.testing.assert_allclose(summary[g, 0], keys[g, chosen].mean(0), rtol=1e-4, atol=1e-5)
        expected = np.mean([q[0, n] @ keys[g, m] for n in range(HEADS) for m in chosen]) * HEADS
        np.testing.assert_allclose(scores[g], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", RETRIEVAL_POLICIES.values(), ids=RETRIEVAL_POLICIES)
def test_slots_that_are_not_held_change_nothing(policy):
    _, keys, held = drawn(3)
    other = np.where(held[..., None], keys, 1e6).astype(np.float32)
    asked = np.where(held, 1.0, 1e6).astype(np.float32)
    found = [policy.summary(jnp.asarray(k), jnp.asarray(held), jnp.asarray(asked)) for k in (keys, other)]
    np.testing.assert_array_equal(*found)


# the choice


def expected(scores: np.ndarray, pages: int, count: int, recent: int) -> list[int]:
    """By a stable sort."""
    worth = np.where(np.isfinite(scores[:pages]), scores[:pages], np.finfo(np.float32).min)
    always = {0, *range(max(pages - recent, 0), pages)}
    worth[list(always)[: max(pages, 0)]] = np.inf
    return sorted(np.argsort(-worth, kind="stable")[:count].tolist())


@given(st.integers(0, 10**6), st.integers(4, 8), st.integers(1, 3))
def test_the_choice_is_that_of_a_stable_sort(seed, count, recent):
    rng, width = np.random.default_rng(seed), 12
    scores = rng.integers(-3, 3, (5, width)).astype(np.float32)  # with many ties
    scores[rng.random(scores.shape) < 0.2] = rng.choice([np.nan, np.inf, -np.inf])
    pages = rng.integers(1, width + 1, 5)
    place, left_out = choose(jnp.asarray(scores), jnp.asarray(pages), count, recent)
    for row, mine in enumerate(pages):
        wanted = expected(scores[row], mine, count, recent)
        assert place[row, : len(wanted)].tolist() == wanted
        assert left_out[row] == mine - len(wanted)
        assert wanted[-1] == mine - 1  # the page that is written


def test_what_is_not_a_number_never_wins():
    scores = jnp.asarray([[0, np.nan, -1e30, np.nan, -5, 0, 0]], jnp.float32)
    assert choose(scores, jnp.asarray([7]), 5, 2).place.tolist() == [[0, 2, 4, 5, 6]]
    assert retrieve.best(scores, 2).tolist() == [[True, False, False, False, False, True, False]]


def test_fewer_pages_than_are_always_read_are_refused():
    with pytest.raises(AssertionError, match="always read"):
        Retrieval(Quest(), 128).pages(64)
