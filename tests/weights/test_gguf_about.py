"""GGUF files that are no models are refused by what they are; of models the plan and explain() say what the file does."""

import re

import gguf
import models
import numpy as np
import pytest
from weights.as_gguf import full, gguf_tensors, keyed, write

import mla_jax
from mla_jax.base.errors import Unsupported
from mla_jax.base.options import Options
from mla_jax.engine.opening import choose
from mla_jax.engine.opening.opened import open_model
from mla_jax.weights.gguf_about import _FILE_TYPES, self_description
from mla_jax.weights.open import open_source

Kind = gguf.GGUFValueType
TEXT = {"tokenizer.ggml.model": ("gpt2", Kind.STRING), "tokenizer.ggml.tokens": (["a", "b"], Kind.ARRAY)}
LORA = {"blk.0.attn_q.weight.lora_a": np.ones((2, 4), np.float32), "blk.0.attn_q.weight.lora_b": np.ones((4, 2), np.float32)}


def named(**keys: str) -> dict:
    return {f"general.{key}": (value, Kind.STRING) for key, value in keys.items()}


def adapter(path):
    return write(path, {**named(type="adapter", name="Poet"), "adapter.type": ("lora", Kind.STRING)}, LORA)


def imatrix(path):
    keys = {**named(type="imatrix"), "imatrix.chunk_count": (3, Kind.UINT32)}
    return write(path, keys, {"blk.0.attn_q.weight.in_sum2": np.ones((1, 4), np.float32)}, architecture="")


def vision(path):
    return write(path, named(type="mmproj"), {"v.patch_embd.weight": np.ones((2, 4), np.float32)}, architecture="clip")


def control(path):
    return write(path, {}, {"direction.1": np.ones(4, np.float32)}, architecture="controlvector")


def vocabulary(path):
    return write(path, {**named(name="Words"), **TEXT}, architecture="llama")


FILES = {
    "an adapter, which changes some weights": adapter,
    "an importance matrix": imatrix,
    "the part of a model that sees or hears": vision,
    "a control vector": control,
    "a vocabulary, without the weights": vocabulary,
}


@pytest.mark.parametrize("what", FILES)
def test_files_that_are_no_model_are_refused_by_what_they_are(tmp_path, what, monkeypatch):
    file = FILES[what](tmp_path / "other.gguf")
    monkeypatch.setattr(choose, "planned_memory", lambda *_, **__: pytest.fail("it was planned"))
    for open_it in (open_source, lambda path: mla_jax.LLM(path)):
        with pytest.raises(Unsupported, match=f"other.gguf is {re.escape(what)}"):
            open_it(file)


def test_the_error_has_what_the_file_says_of_itself(tmp_path):
    with pytest.raises(Unsupported) as caught:
        open_source(adapter(tmp_path / "poet.gguf"))
    said = str(caught.value)
    for word in ("general.type is adapter", "adapter.type is lora", "general.name is Poet", "merge it into its model"):
        assert word in said


def test_other_architectures_are_still_refused_as_such(tmp_path):
    with pytest.raises(Exception, match="found architecture llama"):
        open_source(write(tmp_path / "m.gguf", named(type="model"), LORA, architecture="llama"))


# ---- what models say


def test_the_file_types_are_those_of_the_gguf_package():
    known = {int(kind): kind.name.partition("_")[2] for kind in gguf.LlamaFileType if kind.name != "GUESSED"}
    assert {number: name for number, name in _FILE_TYPES.items() if number in known} == known


SAID = {
    "V3 Chat, of Big-V3, 256x20B, mostly Q4_K_M, quantised by somebody, https://example.org/v3": {
        "general.name": "V3 Chat",
        "general.basename": "Big-V3",
        "general.size_label": "256x20B",
        "general.file_type": 15,
        "general.quantized_by": "somebody",
        "general.url": "https://example.org/v3",
    },
    "Big V3 Chat, mostly IQ1_M": {"general.name": "Big V3 Chat", "general.basename": "Big-V3", "general.file_type": 1024 + 31},
    "big, https://example.org/repo": {"general.basename": "big", "general.source.repo_url": "https://example.org/repo"},
    "a\\nb": {"general.name": "a\nb", "general.file_type": True, "general.size_label": 7},
    None: {"general.type": "model", "general.file_type": 999},
}


@pytest.mark.parametrize("line", SAID)
def test_a_line_says_name_size_type_maker_and_link(line):
    assert self_description(SAID[line]) == line


def test_the_plan_and_explain_say_it_and_other_folders_say_nothing(tmp_path):
    hf = full("v3")
    tensors = gguf_tensors(hf, models.tensors(hf), "new")
    keys = keyed({**hf, "num_nextn_predict_layers": 0}) | named(name="Tiny", quantized_by="somebody")
    file = write(tmp_path / "m.gguf", keys, tensors)
    line = "file: Tiny, quantised by somebody"
    assert open_model(Options.of(model=file)).explain()[1] == line
    assert mla_jax.LLM(file).explain().splitlines()[1] == line
    assert not any(said.startswith("file: ") for said in open_model(Options()).explain())
