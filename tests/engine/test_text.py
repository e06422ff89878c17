"""A checkpoint's tokenizer, chat template and end tokens."""

import dataclasses
import json

import models
import pytest
import tokenizers
from tokenizers.models import WordLevel

from mla_jax.base.config import Config
from mla_jax.base.options import SamplingParams
from mla_jax.engine.inputs import InputProcessor
from mla_jax.engine.text import NO_END, UNKNOWN_FORM, Text, open_text
from mla_jax.text.chat import ChatTemplate
from mla_jax.text.deepseek_v32 import DeepSeekV32Rules
from mla_jax.weights.open import open_source

HF = {**models.FAMILIES["v3"], "num_nextn_predict_layers": 0}


@pytest.mark.parametrize(("normalizer", "notes"), [(None, ()), ({"type": "NFC"}, ()), ({"type": "Lowercase"}, (UNKNOWN_FORM,))])
def test_a_tokenizer_of_unknown_form_is_noted_and_works(tmp_path, normalizer, notes):
    models.write(tmp_path, HF, models.tensors(HF))
    model = tokenizers.Tokenizer(WordLevel({"a": 0, "A": 1}, unk_token="a"))
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(model.to_str()) | {"normalizer": normalizer}))
    text = open_text(open_source(tmp_path))
    assert text.notes == notes
    assert text.tokenizer.encode("A") == ([0] if notes else [1])


def opened(folder, eos=None, generation=None, settings=None):
    """The text of a model folder whose files name these end tokens."""
    models.write(folder, {**HF, "eos_token_id": eos}, models.tensors(HF))
    model = tokenizers.Tokenizer(WordLevel({"a": 0, "<end>": 5, "<turn>": 6}, unk_token="a"))
    (folder / "tokenizer.json").write_text(model.to_str())
    for name, content in (("generation_config.json", generation), ("tokenizer_config.json", settings)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return open_text(open_source(folder))


@pytest.mark.parametrize(
    ("given", "ends"),
    [
        ({"settings": {"eos_token": "<end>"}}, (5,)),
        ({"settings": {"eos_token": {"content": "<end>"}}, "generation": {"eos_token_id": [6]}}, (6, 5)),
        ({"settings": {"eos_token": "<end>"}, "generation": {}, "eos": 6}, (6, 5)),
        ({"settings": {"eos_token": "<end>"}, "generation": {"eos_token_id": 6}, "eos": 7}, (6, 5)),
        ({"settings": {"eos_token": "<unknown>"}, "eos": 5}, (5,)),
        ({"settings": {"eos_token": None}, "eos": [5, 6]}, (5, 6)),
    ],
    ids=str,
)
def test_the_end_token_of_the_tokenizer_counts_whatever_else_is_named(tmp_path, given, ends):
    found = opened(tmp_path, **given)
    assert (found.end_ids, found.notes) == (ends, ())


def test_a_folder_that_names_no_end_token_says_so(tmp_path):
    found = opened(tmp_path)
    assert (found.end_ids, found.notes) == ((), (NO_END,))


def test_only_what_a_request_does_not_give_takes_the_default():
    text = Text(None, None, {"temperature": 0.6, "top_p": 0.95, "top_k": 0}, (1,))
    asked = SamplingParams(temperature=0, seed=0, max_tokens=3, min_p=0.5)
    filled = InputProcessor(Config.from_hf(HF), text, 8).request([2, 3], asked).params
    assert (filled.temperature, filled.top_p, filled.top_k, filled.min_p) == (0, 0.95, 0, 0.5)
    assert (filled.max_tokens, filled.seed, filled.logprobs) == (3, 0, None)


@pytest.mark.parametrize(
    ("model_type", "settings", "kind"),
    [
        ("deepseek_v32", {}, DeepSeekV32Rules),
        ("deepseek_v32", {"chat_template": "x"}, ChatTemplate),
        ("deepseek_v3", {}, type(None)),
    ],
)
def test_the_rules_of_v32_take_the_place_of_its_template_and_no_code_of_a_folder_is_run(
    tmp_path, monkeypatch, model_type, settings, kind
):
    opened(tmp_path, eos=5, settings=settings)
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding_dsv32.py").write_text("raise SystemExit('it was run')")
    source = open_source(tmp_path)
    monkeypatch.setattr(source, "config", dataclasses.replace(source.config, model_type=model_type))
    assert type(open_text(source).chat_template) is kind
