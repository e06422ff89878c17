"""Features that exclude each other are refused by name, before anything is allocated; the docs show the same table."""

from pathlib import Path

import models
import pytest

from mla_jax import LLM
from mla_jax.base.axes import parse_mesh
from mla_jax.base.errors import Unsupported
from mla_jax.base.options import Options
from mla_jax.engine.opening.combinations import FEATURES, INDEXER, OF_MODELS, REFUSED, matrix, refuse
from mla_jax.engine.opening.opened import open_model
from mla_jax.mesh.partition import Layout

# Options that turn each feature on
ON = {
    'attention="naive"': {"attention": "naive"},
    'attention="fused"': {"attention": "fused"},
    'kv_cache="fp8"': {"kv_cache": "fp8"},
    'draft="mtp"': {"draft": "mtp"},
    'draft="lookup"': {"draft": "lookup"},
    "evict": {"evict": "snapkv"},
    "retrieve": {"retrieve": "quest"},
    'retrieve="infllm"': {"retrieve": "infllm"},
    "retrieve_window": {"retrieve": "infllm", "retrieve_window": 64},
    "host_cache": {"host_cache": 0.01},
    "mesh data": {"mesh": "data=2"},
    "mesh tensor": {"mesh": "tensor=2"},
    "mesh context": {"mesh": "context=2"},
    'experts="host"': {"experts": "host"},
    "several processes": {"coordinator": "127.0.0.1:1", "processes": 2, "process_id": 0},
    INDEXER: {},
}
OF_OPTIONS = [refusal for refusal in REFUSED if not {*OF_MODELS} & {*refusal.features}]
OF_INDEXERS = [refusal for refusal in REFUSED if INDEXER in refusal.features]


def options_of(features: tuple[str, ...]) -> dict:
    return {name: value for feature in features for name, value in ON[feature].items()}


def layout_of(options: dict) -> Layout:
    return Layout(**parse_mesh(options.get("mesh", "")))


@pytest.mark.parametrize("feature", FEATURES)
def test_each_feature_is_told_by_its_options_alone(feature):
    options = options_of((feature,))
    used = [name for name, is_used in FEATURES.items() if is_used(Options.of(**options), layout_of(options))]
    needs = {'retrieve="infllm"': ["retrieve"], "retrieve_window": ["retrieve", 'retrieve="infllm"']}
    assert used == [*needs.get(feature, []), feature]
    refuse(Options.of(**options), layout_of(options))


@pytest.mark.parametrize("refusal", OF_OPTIONS, ids=lambda refusal: " with ".join(refusal.features))
def test_what_excludes_each_other_is_refused_by_name_before_a_file_is_read(refusal, monkeypatch):
    monkeypatch.setattr("mla_jax.engine.opening.choose.Checkpoint", lambda *_, **__: pytest.fail("a checkpoint was opened"))
    options, (first, *others) = options_of(refusal.features), refusal.features
    for make in (LLM, lambda **fields: open_model(Options.of(**fields))):
        with pytest.raises(Unsupported) as refused:
            make(**options)
        assert refused.value.args[0].startswith(f"{first} does not work with {' and '.join(others)}")
        assert refused.value.args[1] == refusal.reason


@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: " with ".join(refusal.features))
def test_without_any_one_of_them_the_others_work_together(refusal):
    for left_out in refusal.features:
        options = options_of(tuple(name for name in refusal.features if name != left_out))
        refuse(Options.of(**options), layout_of(options), {*OF_MODELS} & {*refusal.features} - {left_out})


@pytest.mark.parametrize("refusal", OF_INDEXERS, ids=lambda refusal: refusal.features[0])
def test_a_model_that_chooses_its_tokens_is_refused_from_its_headers(refusal, tmp_path):
    hf = models.FAMILIES["glm_5"]
    folder = models.write(tmp_path, hf, models.tensors(hf))
    with pytest.raises(Unsupported) as refused:
        open_model(Options.of(model=folder, **options_of(refusal.features)))
    assert refused.value.args[0].startswith(f"{refusal.features[0]} does not work with lightning indexer")
    assert refused.value.args[1] == refusal.reason


def test_a_mesh_that_is_chosen_for_the_user_is_held_to_the_same(monkeypatch):
    monkeypatch.setattr("mla_jax.weights.auto_mesh.choose_mesh", lambda *_: ({"data": 2, "tensor": 2}, "why"))
    with pytest.raises(Unsupported, match=r"does not work with .* \(mesh data=2,tensor=2\)"):
        open_model(Options.of(mesh="auto", evict="snapkv", attention="naive"))


def test_the_docs_show_the_table():
    page = Path(__file__).parents[3] / "docs/combinations.md"
    assert matrix() in page.read_text(), "make the table anew: python -m mla_jax.engine.opening.combinations"
