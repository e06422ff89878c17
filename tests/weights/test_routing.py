"""Statistics of what tokens choose: kept in a file, refused where they are damaged or another model's, and what follows."""

import itertools
import json
from pathlib import Path

import models
import numpy as np
import pytest

from mla_jax import Config
from mla_jax.base.errors import BadFile, BadRequest
from mla_jax.base.roofline import Routed
from mla_jax.weights.hottest import best_split, hottest
from mla_jax.weights.routing import LARGEST, Routing

CONFIG = Config.from_hf(models.FAMILIES["v3"])  # layers 1 and 2 have 8 experts, of which 3 are chosen
COUNTS = np.arange(16).reshape(2, 8) * 3


def written(path: Path) -> dict:
    routing = Routing.open(path, CONFIG)
    routing.counts += COUNTS
    routing.save()
    return json.loads(path.read_text())


def test_what_was_counted_is_there_at_the_next_start(tmp_path):
    path = tmp_path / "routing.json"
    empty = Routing.open(path, CONFIG)
    assert empty.tokens == 0
    np.testing.assert_allclose(empty.chosen([1, 2]), 3 / 8)
    assert not path.exists()
    written(path)
    again = Routing.open(path, CONFIG)
    np.testing.assert_array_equal(again.counts, COUNTS)
    assert again.tokens == COUNTS[0].sum() // 3
    np.testing.assert_allclose(again.chosen([2]), 3 * COUNTS[1:] / COUNTS[1].sum())
    written(path)
    np.testing.assert_array_equal(Routing.open(path, CONFIG).counts, 2 * COUNTS)
    assert [*tmp_path.iterdir()] == [path]


def changed(**changes):
    return lambda found: {**found, **changes}


def row(value):
    return lambda found: {**found, "chosen": {**found["chosen"], "2": value}}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed(model=None), "holds no routing statistics"),
        (lambda found: {}, "holds no routing statistics"),
        (lambda found: {**found, "model": {**found["model"], "n_routed_experts": 64}}, "n_routed_experts: found 64, expected 8"),
        (changed(model={}), "of another model\n  model_type: found None, expected 'deepseek_v3'"),
        (changed(chosen=[]), "damaged routing statistics\n  found list\n  expected layers 1 to 2"),
        (changed(chosen={}), "found no layers"),
        (changed(chosen={"1": [0] * 8}), "found 1\n  expected layers 1 to 2"),
        *((row(value), "layer 2 has something else\n  expected 8 whole numbers") for value in (
            None, [0] * 7, [0] * 9, [*[0] * 7, -1], [*[0] * 7, 0.5], [*[0] * 7, True], [*[0] * 7, LARGEST + 1]
        )),
    ],
)  # fmt: skip
def test_a_file_that_is_damaged_or_another_models_is_refused_with_what_to_do(tmp_path, change, said):
    path = tmp_path / "routing.json"
    path.write_text(json.dumps(change(written(path))))
    with pytest.raises(BadFile) as error:
        Routing.open(path, CONFIG)
    assert said in str(error.value)
    assert str(error.value).endswith("choose another file, or delete it and it is made anew")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"model": NaN}'])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "routing.json").write_text(text)
    with pytest.raises(BadFile, match=r"routing\.json"):
        Routing.open(tmp_path / "routing.json", CONFIG)


def test_what_cannot_be_written_or_counted_is_said(tmp_path):
    with pytest.raises(BadRequest, match="cannot be written"):
        Routing.open(tmp_path / "none" / "routing.json", CONFIG).save()
    with pytest.raises(BadRequest, match="no routed experts to count"):
        Routing.open(tmp_path / "routing.json", Config.from_hf(models.FAMILIES["youtu"]))


# what is placed by it


@pytest.mark.parametrize("seed", range(5))
def test_the_hottest_experts_are_the_best_set_that_fits_by_trying_all(seed):
    chosen = np.random.default_rng(seed).random((2, 4))
    for count in range(9):
        held = hottest(chosen, [10, 10], 10 * count + 9)
        assert held.sum() == count
        best = max(chosen.ravel()[list(s)].sum() for s in itertools.combinations(range(8), count))
        assert chosen[held].sum() == pytest.approx(best)
        np.testing.assert_array_equal(held, hottest(chosen, [10, 10], 1e9, count))


def test_hits_are_weighed_by_bytes_and_without_statistics_layers_get_as_many():
    held = hottest(np.array([[0.5, 0.4], [0.6, 0.1]]), [1, 2], 2)
    np.testing.assert_array_equal(held, [[True, True], [False, False]])
    np.testing.assert_array_equal(hottest(np.full((3, 4), 0.25), [1, 1, 1], 6).sum(1), [2, 2, 2])
    assert not hottest(np.full((3, 4), 0.25), [1, 1, 1], -1).any()


def test_what_tokens_touch_is_what_they_touch_when_they_draw():
    """Independent draws of each expert, of which the expectation knows."""
    rng, tokens = np.random.default_rng(0), 5
    chosen, held = rng.random((3, 8)), rng.random((3, 8)) < 0.4
    drawn = (rng.random((20_000, tokens, 3, 8)) < chosen).any(1)
    routed = Routed(chosen, held)
    expected = [(drawn & where).sum((1, 2)).mean() / 3 for where in (~held, held)]
    np.testing.assert_allclose(routed.touched(tokens), expected, rtol=0.01)
    assert routed.touched(1) == pytest.approx([chosen[~held].sum() / 3, chosen[held].sum() / 3])
    assert routed.left == pytest.approx(chosen[~held].sum() / chosen.sum())


def test_of_splits_the_fastest_is_taken_and_more_layers_only_if_they_gain():
    splits = [(count, Routed(np.ones((1, 1)), np.zeros((1, 1), bool))) for count in range(1, 5)]
    times = {1: 10.0, 2: 9.95, 3: 8.0, 4: 7.99}
    assert best_split(splits, lambda count, _: times[count])[0] == 3
    assert best_split(splits[:2], lambda count, _: times[count])[0] == 1
