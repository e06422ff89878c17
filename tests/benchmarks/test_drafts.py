"""The benchmark of drafts gives sane rows for a tiny model, and its coin is as fair as it is asked to be."""

import math

import drafts
import jax.numpy as jnp
import numpy as np
import pytest

from mla_jax.decode import speculative

CHANCES = (0.5, 0.95)


@pytest.fixture(scope="module")
def rows():
    return list(drafts.measured(drafts.TINY, [2], CHANCES, "bf16"))


@pytest.mark.deep
def test_there_is_a_row_for_plain_decoding_and_for_each_acceptance_and_number_of_guesses(rows):
    assert [(row["acceptance"], row["k"]) for row in rows] == [(None, 0), *((p, k) for p in CHANCES for k in (1, 2, 3))]
    for row in rows:
        assert row["tokens/s"] > 0
        assert all(math.isfinite(figure) and figure >= 0 for figure in row.values() if figure is not None)


@pytest.mark.deep
def test_guesses_stand_as_often_as_they_are_made_to(rows):
    assert rows[0]["tokens a pass"] == 1
    for row in rows[1:]:  # the last passes of a dispatch have no room for all guesses
        expected = sum(row["acceptance"] ** i for i in range(row["k"] + 1))
        assert 0.8 * expected < row["tokens a pass"] < 1.15 * expected


@pytest.mark.deep
def test_what_is_allowed_is_more_where_more_stands_and_the_choice_is_the_best_of_it(rows):
    for low, high in zip(rows[1:4], rows[4:], strict=True):
        assert low["allowed"] < high["allowed"]
    for chance in CHANCES:
        allowed = {row["k"]: row["allowed"] for row in rows if row["acceptance"] == chance} | {0: 1.0}
        (chosen,) = {row["chosen k"] for row in rows if row["acceptance"] == chance}
        assert allowed[chosen] == max(allowed.values())


@pytest.mark.deep
def test_the_comparison_is_the_librarys_again_afterwards(rows):
    assert speculative.stands(jnp.array([4, 5]), jnp.array([4, 4])).tolist() == [True, False]


@pytest.mark.parametrize("chance", [0.1, 0.5, 0.85])
def test_the_coin_is_fair_for_every_row_and_place(chance):
    thrown = np.asarray(drafts.scrambled(jnp.arange(64)[:, None], jnp.arange(4096)[None])) < chance * 2**32
    assert thrown.mean() == pytest.approx(chance, abs=0.005)
    assert thrown.mean(1) == pytest.approx(chance, abs=0.05)
    again = (thrown[:, 1:] & thrown[:, :-1]).mean()  # one place says nothing about the next
    assert again == pytest.approx(chance**2, abs=0.01)


@pytest.mark.deep
def test_the_demo_models_tokens_are_the_same_whoever_guesses():
    found = list(drafts.demo(2, 16))
    assert [(row["draft"], row["temperature"]) for row in found] == [(d, t) for t in (0.0, 1.0) for d in ("off", "mtp", "lookup")]
    for row in found:
        assert row["as plain"] == 2
        assert 1 <= row["tokens a pass"] <= 4
        assert all(row[f"place {i}"] is None or 0 <= row[f"place {i}"] <= 1 for i in (1, 2, 3))
