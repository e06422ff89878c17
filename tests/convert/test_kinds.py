"""Every kind of checkpoint becomes an Orbax folder that is the same model: its packed weights still packed, its text the same."""

import json

import models
import numpy as np
import pytest
from checkpoints import assert_same_model, convert, packed_gguf, parts, raw, released
from weights import as_gguf

from mla_jax import LLM, SamplingParams
from mla_jax.base.qtensor import QTensor
from mla_jax.weights.load import load
from mla_jax.weights.orbax_store import open_store

pytestmark = pytest.mark.deep

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LAYOUTS = ["new", "old", "both", "fused"]


def plain_gguf(file, layout: str, family: str = "v3", mtp: bool = True):
    hf = as_gguf.full(family)
    tensors = as_gguf.gguf_tensors(hf, models.tensors(hf, mtp=mtp), layout)
    return as_gguf.write(file, as_gguf.keyed(hf, old=layout == "old"), tensors)


SOURCES = {
    "released": lambda path: released(path / "m", "v3", "fp8", shards=2),
    "gguf": lambda path: packed_gguf(path / "m.gguf", "new"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SOURCES)
def test_the_model_says_and_writes_the_same(tmp_path, kind):
    source = SOURCES[kind](tmp_path)
    assert convert(source, tmp_path / "out") == 0
    one, two = LLM(source), LLM(tmp_path / "out")
    tokens = np.random.default_rng(0).integers(0, 96, (2, 30))
    np.testing.assert_array_equal(one.logits(tokens), two.logits(tokens))
    prompt = one.tokenizer.decode([20, 30, 40])
    a, b = one.generate(prompt, GREEDY)[0], two.generate(prompt, GREEDY)[0]
    assert (a.text, a.token_ids, a.prompt_token_ids) == (b.text, b.token_ids, b.prompt_token_ids)
    assert len(a.text) > 3
    assert [*one.config.eos_token_id] == [*two.config.eos_token_id]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gguf_blocks_stay_as_they_are_in_every_layout(tmp_path, layout):
    source = packed_gguf(tmp_path / "m.gguf", layout)
    assert convert(source, tmp_path / "out") == 0
    assert_same_model(source, tmp_path / "out")
    experts = load(tmp_path / "out").layers[1].mlp.experts.down[...]
    assert isinstance(experts, QTensor)
    assert experts.format == "Q8_0"
    held = {name: entry.format for name, entry in open_store(tmp_path / "out").tensors.items()}
    assert held["embed"] == "Q8_0"
    assert held["layers.1.mlp.router.weight"] == "F32"
    halves = {"kv_b_proj"} if layout == "old" else {"k_b", "v_b"}
    assert {name for name in ("kv_b_proj", "k_b", "v_b") if f"layers.1.attn.{name}" in held} == halves


@pytest.mark.parametrize("family", ["v2_lite", "glm_4_7_flash", "youtu"])
def test_plain_gguf_files_of_other_families_stay_the_same_model(tmp_path, family):
    source = plain_gguf(tmp_path / "m.gguf", "new", family)
    assert convert(source, tmp_path / "out") == 0
    assert_same_model(source, tmp_path / "out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gguf_file_becomes_the_released_folder_it_was_made_of(tmp_path, layout):
    source, hf = plain_gguf(tmp_path / "m.gguf", layout), as_gguf.full("v3")
    copies = ("model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight")
    weights = {name: value for name, value in models.tensors(hf, mtp=True).items() if name not in copies}
    models.write(tmp_path / "hf", hf, weights)
    assert convert(source, tmp_path / "direct", "--to", "hf") == 0
    assert raw(tmp_path / "direct") == raw(tmp_path / "hf")
    assert convert(source, tmp_path / "out") == 0
    assert convert(tmp_path / "out", tmp_path / "back", "--to", "hf") == 0
    assert raw(tmp_path / "back") == raw(tmp_path / "hf")
    assert_same_model(tmp_path / "back", tmp_path / "hf")
    said, expected = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("back", "hf"))
    assert {key: value for key, value in said.items() if key in expected and value != expected[key]} == {}


@pytest.mark.parametrize("count", [1, 2])
def test_deepseeks_parts_become_one_released_folder(tmp_path, count):
    source = parts(tmp_path / "own", count)
    assert convert(source, tmp_path / "out") == 0
    assert_same_model(source, tmp_path / "out")
    assert convert(tmp_path / "out", tmp_path / "back", "--to", "hf") == 0
    assert_same_model(source, tmp_path / "back")


def test_packed_gguf_weights_are_unpacked_for_a_released_folder_if_a_dtype_is_asked_for(tmp_path, capsys):
    source = packed_gguf(tmp_path / "m.gguf", "fused")
    assert convert(source, tmp_path / "hf", "--to", "hf") == 3
    assert "a Hugging Face folder cannot hold Q8_0\n  as " in (said := capsys.readouterr().err)
    assert "--dtype bf16 or --dtype f32" in said
    assert not (tmp_path / "hf").exists()
    assert convert(source, tmp_path / "hf", "--to", "hf", "--dtype", "f32") == 0
    assert_same_model(tmp_path / "hf", source, dtype="float32")


def test_what_was_converted_is_converted_again(tmp_path):
    source = released(tmp_path / "hf", "v3", "fp8_e8m0")
    assert convert(source, tmp_path / "one") == 0
    assert convert(tmp_path / "one", tmp_path / "two", "--mesh", "tensor=2") == 0
    assert_same_model(tmp_path / "one", tmp_path / "two")
    assert convert(tmp_path / "two", tmp_path / "back", "--to", "hf") == 0
    assert raw(tmp_path / "back") == raw(source)
