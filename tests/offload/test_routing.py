"""Statistics of what tokens choose: kept in a file, refused where they are damaged or another model's."""

import json
from pathlib import Path

import models
import numpy as np
import pytest

from mla_jax import Config
from mla_jax.base.errors import BadFile, BadRequest
from mla_jax.offload.routing import MAX_COUNT, Routing

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
            None, [0] * 7, [0] * 9, [*[0] * 7, -1], [*[0] * 7, 0.5], [*[0] * 7, True], [*[0] * 7, MAX_COUNT + 1]
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
