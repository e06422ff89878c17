"""The tool from corpus to shipped folder, with a model of a few thousand weights."""

import json
from dataclasses import replace

import numpy as np
import pytest
import train_demo

from demo import corpus, data
from demo.recipe import MODEL, Recipe
from mla_jax import LLM, SamplingParams

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 500}
SIZES |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
RECIPE = Recipe(model=MODEL | SIZES | {"moe_intermediate_size": 16}, steps=6, extended=0.5, tokens=1024, length=512)
RECIPE = replace(RECIPE, extended_length=1024)

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A corpus, a run that was stopped and resumed, and its shipped model."""
    work, library = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("library")
    for i in range(60):
        (library / f"module_{i}.py").write_text(f'def first_{i}(x):\n    """Does {i}."""\n    y = x * {i}\n    return y\n' * 80)
    data.build(work / "corpus", SIZES["vocab_size"], corpus.sources(library))
    train_demo.train(work, RECIPE, minutes=0.0)  # no time for a step
    train_demo.train(work, RECIPE, minutes=10.0)
    train_demo.ship(work)
    return work


def test_a_run_without_time_stops_and_the_next_goes_through_both_phases(work, capsys):
    rows = [json.loads(line) for line in (work / "run/log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [3, 6]
    assert all(2 < row["held_out"] < 8 and np.isfinite(row["mtp"]) for row in rows)
    train_demo.train(work, RECIPE, minutes=10.0)
    assert "from step 6" in capsys.readouterr().err
    assert len((work / "run/log.jsonl").read_text().splitlines()) == 2


def test_another_recipe_in_the_same_folder_is_refused(work):
    with pytest.raises(SystemExit, match="another recipe"):
        train_demo.train(work, replace(RECIPE, steps=7))


def test_what_is_shipped_opens_and_chats_in_fp8_and_bfloat16(work):
    with np.load(work / "run/weights.npz") as arrays:
        trained = arrays["layers.0.mlp.gate"]
    for name, error in (("demo", 0.07), ("bf16", 0.004)):
        llm = LLM(work / name, dtype="float32")
        found = np.asarray(llm.model.layers[0].mlp.gate[...])
        assert 0 < np.abs(found - trained).max() < error * np.abs(trained).max()
        llm.chat([{"role": "user", "content": "first_1?"}], SamplingParams(max_tokens=3))
        assert llm.context == 1024
    assert (work / "demo/training.png").stat().st_size > 1000
