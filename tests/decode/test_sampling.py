"""Filters, penalties and tokens against plain numpy in float64; draws against the softmax; the inputs of a draw."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from mla_jax.decode import sampling
from mla_jax.decode.sampling import OUTPUT, PROMPT, Sampling

WORDS = 11
SLACK = 2e-6  # of what rounding may decide, as a share
penalise, choose = jax.jit(sampling.penalise), jax.jit(sampling.choose)


def settings_of(rows: list[dict]) -> Sampling:
    """Sampling with one entry a row; settings that a row leaves out are neutral."""
    neutral = {
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": (0, 0),
        "bias_ids": (-1, -1),
        "bias": (0.0, 0.0),
        "ends": (-1, -1),
        "may_end": 0,
    }
    kinds = dict.fromkeys(("top_k", "bias_ids", "ends", "may_end"), jnp.int32) | {"seed": jnp.uint32}
    columns = {name: [{**neutral, **row}[name] for row in rows] for name in neutral}
    return Sampling(**{name: jnp.asarray(column, kinds.get(name, jnp.float32)) for name, column in columns.items()})


def chosen(logits: np.ndarray, rows: list[dict], position: int = 5) -> tuple[list[int], list[bool]]:
    """The tokens of `choose`, with no token seen before."""
    seen, at = jnp.zeros(logits.shape, jnp.uint16), jnp.full(len(logits), position)
    token, fit = choose(jnp.asarray(logits, jnp.float32), seen, jnp.arange(len(logits)), at, settings_of(rows))
    return token.tolist(), fit.tolist()


logits_rows = st.lists(
    st.lists(st.integers(-400, 400), min_size=WORDS, max_size=WORDS, unique=True).map(lambda row: np.array(row) / 32),
    min_size=3,
    max_size=3,
).map(lambda rows: np.array(rows, np.float32))
shares = st.one_of(st.sampled_from([0.0, 1.0, 1e-9]), st.floats(0, 1, width=32))
filter_rows = st.lists(
    st.fixed_dictionaries(
        {"top_k": st.sampled_from([0, 1, 2, 5, WORDS, WORDS + 1, 2**31 - 1]), "top_p": shares, "min_p": shares}
    ),
    min_size=3,
    max_size=3,
)


def among(logits: np.ndarray, row: dict, slack: float) -> np.ndarray:
    """The tokens that top-k, then top-p, then min-p keep; `slack` moves the borders by a share of them, as rounding may."""
    ordered = np.sort(logits.astype(np.float64))[::-1]
    ordered = ordered[: row["top_k"] or len(ordered)]
    p = np.exp(ordered - ordered[0])
    p /= p.sum()
    before = np.concatenate([[0.0], np.cumsum(p)[:-1]])
    in_nucleus = before < row["top_p"] * (1 + slack) if row["top_p"] < 1 else np.ones(len(p), bool)
    kept = in_nucleus & (p >= row["min_p"] * p[0] * (1 - slack)) & np.isfinite(ordered)
    return logits >= ordered[max(kept.sum() - 1, 0)]


def reference_kept(logits: np.ndarray, row: dict, slack: float) -> set[int]:
    return set(np.flatnonzero(among(logits, row, slack)).tolist())


@pytest.fixture(scope="module")
def kept():
    """Which tokens of a row are kept, of those asked about: noise prefers the token that `position` says: kept, it is drawn."""

    def preferring(token: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jnp.where(jnp.arange(shape[0]) == token, 1e6, 0.0)

    @jax.jit
    def drawn(logits, tokens, row):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(jax.random, "fold_in", lambda _, position: position)
            patch.setattr(jax.random, "gumbel", preferring)
            logits, rows = jnp.broadcast_to(logits, (len(tokens), len(logits))), jnp.arange(len(tokens))
            return sampling.choose(logits, jnp.zeros(logits.shape, jnp.uint16), rows, tokens, row)[0]

    def kept_of(logits: np.ndarray, row: dict, tokens: np.ndarray) -> set[int]:
        tokens = np.asarray(tokens, np.int32)
        found = np.asarray(drawn(jnp.asarray(logits, jnp.float32), tokens, settings_of([row] * len(tokens))))
        return set(tokens[found == tokens].tolist())

    return kept_of


@pytest.mark.deep
@settings(max_examples=150)
@given(logits_rows, filter_rows)
def test_the_filters_keep_what_a_plain_reference_keeps(kept, logits, rows):
    for values, row in zip(logits, rows, strict=True):
        found = kept(values, row, np.arange(WORDS))
        assert reference_kept(values, row, -SLACK) <= found <= reference_kept(values, row, SLACK)


def spread(kind: str, words: int, rng: np.random.Generator) -> np.ndarray:
    """Logits of a kind, in float32."""
    normal = rng.standard_normal(words)
    kinds = {
        "flat": normal / 100,
        "peaked": 8 * normal,
        "tied": np.round(2 * normal),
        "long tail": rng.permutation(-1.5 * np.log1p(np.arange(words))),
        "some impossible": np.where(normal > 0.5, -np.inf, 3 * normal),
        "equal": np.zeros(words),
    }
    return kinds[kind].astype(np.float32)


KINDS = ["flat", "peaked", "tied", "long tail", "some impossible", "equal"]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "words"), [(kind, words) for kind in KINDS for words in (7, 1000)] + [("flat", 102_400), ("long tail", 102_400)]
)
def test_the_border_of_top_p_is_where_exact_sums_have_it(kept, kind, words):
    """Tokens next to the border, for p just below and just above what the tokens before one of them add up to."""
    rng = np.random.default_rng(words)
    for top_k in (0, int(rng.integers(2, words)), 3 * words):
        logits = spread(kind, words, rng)
        order = np.argsort(-logits, kind="stable")
        weights = np.exp(logits[order].astype(np.float64) - logits.max())[: top_k or words]
        weights /= weights.sum()
        rank = int(rng.integers(1, (weights > 4 * SLACK).sum()))
        near = order[np.clip(rank + np.arange(-6, 6), 0, words - 1)]
        for factor in (1 - 2 * SLACK, 1 + 2 * SLACK):
            row = {"top_k": top_k, "top_p": np.float32(weights[:rank].sum() * factor), "min_p": 0.0}
            low, high = (reference_kept(logits, row, slack) & set(near.tolist()) for slack in (-SLACK, SLACK))
            assert low == high, "none is so near that rounding may decide"
            assert kept(logits, row, near) == low


@pytest.mark.deep
@pytest.mark.parametrize("words", [7, 1000, 102_400])
def test_the_tokens_are_those_that_sorting_would_choose(words):
    """For rows with all kinds of settings together: the largest sum of logit and noise among what the reference keeps."""
    rng, count = np.random.default_rng(words), 30
    for position in range(1 if words > 1000 else 20):
        logits = np.stack([spread(KINDS[i % len(KINDS)], words, rng) for i in range(count)])
        rows = [
            {
                "temperature": rng.choice([0.0, 0.01, 0.6, 1.0, 3.0]),
                "top_k": rng.choice([0, 0, 1, 3, 50, words - 1, 2**31 - 1]),
                "top_p": np.float32(rng.choice([1.0, 0.95, 0.5, 1e-9, 0.0, rng.random()])),
                "min_p": np.float32(rng.choice([0.0, 0.0, 0.1, 1.0, rng.random() ** 3])),
                "seed": tuple(rng.integers(0, 2**32, 2)),
            }
            for _ in range(count)
        ]
        tokens, _ = chosen(logits, rows, position)
        for values, row, token in zip(logits, rows, tokens, strict=True):
            warm = (values - values.max()) / np.float32(row["temperature"] or 1.0)
            key = jax.random.wrap_key_data(jnp.asarray(row["seed"], jnp.uint32), impl="threefry2x32")
            noise = np.asarray(jax.random.gumbel(jax.random.fold_in(key, position), (words,)))
            sums = [np.where(among(warm, row, slack), warm + noise, -np.inf) for slack in (-SLACK, SLACK)]
            assert token in ({int(each.argmax()) for each in sums} if row["temperature"] else {values.argmax()})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", [2, 7, 1000, 5000])
def test_the_border_of_top_k_has_k_tokens_before_it(kind, words):
    rng = np.random.default_rng(words)
    warm = np.stack([-np.abs(spread(kind, words, rng)) for _ in range(20)])
    warm[:, rng.integers(words)] = 0
    k = np.minimum(rng.integers(1, words, 20), 1 + np.arange(20) ** 3)
    border = np.asarray(jax.jit(sampling.after_top_k)(warm, settings_of([{"top_k": each, "top_p": 0.5} for each in k])))
    assert ((warm > border[:, None]).sum(1) <= k).all()
    assert ((warm >= border[:, None]).sum(1) >= k).all()


@settings(max_examples=100)
@given(
    logits_rows,
    st.lists(st.lists(st.sampled_from([0, PROMPT, 1, 7, PROMPT | 3]), min_size=WORDS, max_size=WORDS), min_size=3, max_size=3),
    st.lists(
        st.tuples(*[st.floats(-3, 3, width=32)] * 2, st.floats(0.25, 4, width=32), st.integers(-1, WORDS - 1)),
        min_size=3,
        max_size=3,
    ),
)
def test_the_penalties_and_the_bias_follow_their_definition(logits, seen, penalties):
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    rows = [dict(zip(names, p[:3], strict=True)) | {"bias_ids": (p[3], -1), "bias": (2.5, 9.0)} for p in penalties]
    found = np.asarray(penalise(logits, jnp.asarray(seen, jnp.uint16), jnp.full(3, 5), settings_of(rows)))
    for r, (presence, frequency, repetition, biased) in enumerate(penalties):
        for w in range(WORDS):
            value = float(logits[r, w])
            if seen[r][w]:
                value = value / repetition if value > 0 else value * repetition
            if count := seen[r][w] & OUTPUT:
                value -= presence + frequency * count
            value += 2.5 * (w == biased)
            assert found[r, w] == pytest.approx(value, rel=1e-5, abs=1e-5)


@settings(max_examples=100)
@given(logits_rows, st.lists(st.tuples(*[st.integers(-1, WORDS - 1)] * 2, st.integers(3, 7)), min_size=3, max_size=3))
def test_no_end_token_comes_before_its_position(logits, given):
    rows = [{"temperature": 0.0, "ends": ends, "may_end": first} for *ends, first in given]
    found, fit = chosen(logits, rows, position=5)
    for row, token, (*ends, first) in zip(np.asarray(logits), found, given, strict=True):
        out = [end for end in ends if end >= 0] if first > 5 else []
        assert token == np.argmax(np.where(np.isin(range(WORDS), out), -np.inf, row))
    assert fit == [True] * 3


@settings(max_examples=100)
@given(
    logits_rows,
    filter_rows,
    st.lists(st.sampled_from([0.0, 1e-9, 1e-5, 0.3, 1.0, 50.0]), min_size=3, max_size=3),
    st.integers(0, 1000),
)
def test_every_setting_leaves_a_token_that_the_filters_allow_and_a_cold_row_takes_the_likeliest(
    logits, rows, temperatures, position
):
    rows = [{**row, "temperature": t, "seed": (position, 7)} for row, t in zip(rows, temperatures, strict=True)]
    tokens, fit = chosen(logits, rows, position)
    assert all(fit)
    for values, token, row in zip(logits, tokens, rows, strict=True):
        if row["temperature"] <= 1e-9:
            assert token == values.argmax()
        else:
            scaled = (values.astype(np.float64) - values.max()) / row["temperature"]
            assert token in reference_kept(scaled, row, 1e-5)


@pytest.mark.parametrize(
    "row", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-5}, {"temperature": 1e-9}]
)
def test_the_narrowest_settings_take_the_likeliest_token(row):
    logits = np.random.default_rng(0).standard_normal((200, WORDS)).astype(np.float32)
    tokens, _ = chosen(logits, [{**row, "seed": (i, i)} for i in range(200)])
    assert tokens == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 1000.0])
def test_the_largest_finite_logits_are_chosen_from_without_overflow(temperature):
    largest = np.finfo(np.float32).max
    logits = np.full((4, WORDS), -largest, np.float32)
    logits[:, 3], logits[:, 7] = largest / 2, largest
    tokens, fit = chosen(logits, [{"temperature": temperature, "seed": (0, i), "top_p": 0.9} for i in range(4)])
    assert tokens == [7] * 4
    assert all(fit)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_equal_logits_give_the_first_token_when_cold_and_any_when_warm(temperature):
    tokens, _ = chosen(np.zeros((300, WORDS)), [{"temperature": temperature, "seed": (0, i)} for i in range(300)])
    assert set(tokens) == ({0} if temperature == 0 else set(range(WORDS)))


@pytest.mark.deep
@pytest.mark.parametrize("row", [{"temperature": 0.0}, {"top_p": 0.9}, {"presence_penalty": 1.0}, {"top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("words", [WORDS, 1000])
def test_a_row_that_is_not_fit_is_reported_and_leaves_the_others_as_they_are(words, row):
    logits = np.random.default_rng(1).standard_normal((6, words)).astype(np.float32)
    rows = [{**row, "seed": (3, i)} for i in range(6)]
    alone, _ = chosen(logits, rows)
    logits[1, 4], logits[3, 0], logits[4, :] = np.nan, np.inf, -np.inf
    tokens, fit = chosen(logits, rows)
    assert fit == [True, False, True, False, False, True]
    assert [t for t, ok in zip(tokens, fit, strict=True) if ok] == [t for t, ok in zip(alone, fit, strict=True) if ok]


def test_minus_infinity_is_never_drawn():
    logits = np.where(np.arange(WORDS) % 2, -np.inf, 0.0) * np.ones((200, 1))
    tokens, fit = chosen(logits, [{"temperature": 100.0, "seed": (0, i)} for i in range(200)])
    assert all(fit)
    assert {t % 2 for t in tokens} == {0}


@pytest.mark.deep
@pytest.mark.parametrize("row", [{}, {"temperature": 0.5}, {"top_p": 0.8}, {"top_k": 3, "min_p": 0.1}])
def test_draws_follow_the_softmax_of_what_is_kept(row):
    logits, draws = np.array([1.0, 0.2, -0.5, 0.9, -1.0, 0.0]), 6000
    tokens, _ = chosen(np.tile(logits, (draws, 1)), [{**row, "seed": (17, i)} for i in range(draws)])
    warm = logits / row.get("temperature", 1.0)
    kept = sorted(reference_kept(warm, {"top_k": 0, "top_p": 1.0, "min_p": 0.0, **row}, 0.0))
    p = np.exp(warm[kept])
    counts = np.bincount(tokens, minlength=len(logits))
    assert counts.sum() == counts[kept].sum()
    assert stats.chisquare(counts[kept], draws * p / p.sum()).pvalue > 1e-3


def test_draws_at_the_positions_of_one_sequence_are_independent():
    logits, draws = np.zeros((4000, 4)), jnp.arange(4000)
    seen = jnp.zeros((4000, 4), jnp.uint16)
    token, _ = choose(jnp.asarray(logits, jnp.float32), seen, draws, draws, settings_of([{"seed": (1, 2)}] * 4000))
    pairs = np.bincount(4 * np.asarray(token[:-1]) + np.asarray(token[1:]), minlength=16)
    assert stats.chisquare(pairs).pvalue > 1e-3


def test_a_draw_depends_on_seed_and_position_alone():
    values = np.random.default_rng(2).standard_normal(WORDS).astype(np.float32)
    mine = {"temperature": 1.3, "seed": (5, 6)}
    others = [
        {"temperature": 0.0},
        {"top_p": 0.3},
        {"min_p": 0.5, "top_k": 2},
        {"repetition_penalty": 2.0},
        {"temperature": 90.0, "seed": (9, 9)},
    ]
    for position in range(20):
        expected = chosen(values[None], [mine], position)[0][0]
        for place in range(6):
            batch = np.random.default_rng(position).standard_normal((6, WORDS)).astype(np.float32)
            batch[place] = values
            rows = [*others[:place], mine, *others[place:]]
            assert chosen(batch, rows, position)[0][place] == expected


def test_both_halves_of_the_seed_and_the_position_change_the_draw():
    values = np.zeros((1, WORDS))
    series = [
        [chosen(values, [{"seed": seed}], at)[0][0] for at in range(start, start + 12)]
        for seed, start in [((0, 1), 0), ((1, 0), 0), ((0, 1), 12)]
    ]
    assert series[0] != series[1] != series[2] != series[0]


def test_a_row_without_filters_keeps_its_whole_tail_beside_a_row_with_them(kept):
    logits = np.linspace(0, -30, 20_000, dtype=np.float32)
    tail = np.arange(19_900, 20_000)
    assert kept(logits, {}, tail) == set(tail.tolist())
    assert kept(logits, {"top_p": 0.5}, tail) == set()


def test_a_penalty_that_overflows_leaves_a_token_to_choose():
    logits = np.full((1, WORDS), -1.0, np.float32)
    logits[0, 4] = 3e38
    row = {"temperature": 1.0, "repetition_penalty": 0.5, "top_p": 0.9, "top_k": 3}
    seen = jnp.full(logits.shape, PROMPT, jnp.uint16)
    token, fit = choose(logits, seen, jnp.arange(1), jnp.arange(1), settings_of([row]))
    assert (token.tolist(), fit.tolist()) == ([4], [True])
