# ruff: noqa: RUF001 letters of every kind are the point
"""A folder's tokenizer as GGUF metadata: what llama.cpp's converter writes of it, and the same tokens when it is read."""

import json

import numpy as np
import pytest
from text.test_gguf_tokenizer import SPECIAL, TEXT, metadata, trained
from text.test_tiktoken_model import RANKS, SETTINGS, VOCAB, lines
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library

from mla_jax.base.errors import Unsupported
from mla_jax.text.gguf_tokenizer import KNOWN, from_metadata
from mla_jax.text.gguf_vocabulary import to_metadata
from mla_jax.text.tokenizer import Tokenizer

FIRST_OF = {"joyai-llm": "deepseek-v3", "chatglm-bpe": "glm4", "llama3": "llama-bpe", "llama-v3": "llama-bpe"}
FIRST_OF |= {"gigachat": "gpt-2", "kanana2": "gpt-4o"}  # names of the same patterns
NAMES = [name for name in KNOWN if name not in ("default", "kimi-k2", "qwen2")]


def opened(path, model: Library, size: int) -> Tokenizer:
    model.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": SPECIAL[0], "add_bos_token": True}))
    tokenizer = Tokenizer.from_folder(path, size, None)
    assert tokenizer is not None
    return tokenizer


def same(found: dict, expected: dict) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize("pre", NAMES)
def test_every_released_tokenizer_becomes_what_llama_cpps_converter_makes_of_it(tmp_path, pre):
    model = trained(pre)
    size = model.get_vocab_size(with_added_tokens=True)
    ids = [model.token_to_id(token) for token in SPECIAL]
    found = to_metadata(opened(tmp_path, model, size), size, ids[0], ids[1:], "{{ bos_token }}")
    assert same(found, metadata(trained(pre), FIRST_OF.get(pre, pre)))


def test_composed_text_has_a_name_of_its_own(tmp_path):
    model = trained("qwen2")
    model.normalizer = normalizers.NFC()
    size = model.get_vocab_size(with_added_tokens=True)
    found = to_metadata(opened(tmp_path, model, size), size, None, (), None)
    assert found["tokenizer.ggml.pre"] == "qwen2"
    read = from_metadata(found, "m.gguf", size)
    assert read.tokenizer.encode("e\u0301" + TEXT, bos=False) == model.encode("e\u0301" + TEXT, add_special_tokens=False).ids


def test_ids_that_the_tokenizer_lacks_are_unused_tokens(tmp_path):
    model = trained("deepseek-v3")
    size = model.get_vocab_size(with_added_tokens=True)
    found = to_metadata(opened(tmp_path, model, size + 3), size + 3, None, (), None)
    assert found["tokenizer.ggml.tokens"][size:] == [f"[PAD{size + i}]" for i in range(3)]
    assert found["tokenizer.ggml.token_type"][size - 1 :].tolist() == [4, 5, 5, 5]
    assert "tokenizer.ggml.eos_token_id" not in found


def test_what_looks_like_a_control_token_is_one_or_llama_cpp_would_find_it_in_any_text(tmp_path):
    model = trained("deepseek-v3")
    looks, others = ["<｜Assistant｜>", "<|im_end|>", "<pad>"], ["<tool>", "ü~", "<｜half"]
    model.add_tokens([AddedToken(text, special=False) for text in (*looks, *others)])
    size = model.get_vocab_size(with_added_tokens=True)
    found = to_metadata(opened(tmp_path, model, size), size, None, (), None)
    types = dict(zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.token_type"], strict=True))
    assert {types[text] for text in (*looks, *SPECIAL)} == {3}
    assert {types[text] for text in (*others, "<think>")} == {4}


def test_kimis_ranks_become_merges_that_give_its_tokens(tmp_path):
    (tmp_path / "tiktoken.model").write_bytes(lines(RANKS))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    tokenizer = Tokenizer.from_folder(tmp_path, VOCAB, None)
    found = to_metadata(tokenizer, VOCAB, None, (), None)
    assert found["tokenizer.ggml.pre"] == "kimi-k2"
    ids = {text: number for number, text in enumerate(found["tokenizer.ggml.tokens"])}
    made = [ids[merge.replace(" ", "")] for merge in found["tokenizer.ggml.merges"]]
    assert made == sorted(made)
    assert set(made) == {rank for token, rank in RANKS.items() if len(token) > 1}
    read = from_metadata(found, "m.gguf", VOCAB)
    assert read.tokenizer.encode(TEXT) == tokenizer.encode(TEXT)


def digits(model: Library):
    """DeepSeek-V2's tokenizer.json has a part for digits where others have a pattern."""
    *cuts, _ = (pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in KNOWN["deepseek-llm"].patterns)
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.Digits(individual_digits=True), last])


def bytes_alone(model: Library):
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


@pytest.mark.parametrize(("change", "name"), [(digits, "deepseek-llm"), (bytes_alone, "gpt-2")])
def test_parts_of_the_library_are_known_as_the_patterns_they_are(tmp_path, change, name):
    model = trained(name)
    change(model)
    size = model.get_vocab_size(with_added_tokens=True)
    assert to_metadata(opened(tmp_path, model, size), size, None, (), None)["tokenizer.ggml.pre"] == name


def other_pattern(model: Library):
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+"), "isolated")


def spaces_in_front(model: Library):
    *cuts, _ = (pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in KNOWN["deepseek-v3"].patterns)
    model.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)])


def prefixed(model: Library):
    model.normalizer = normalizers.Prepend("x")


@pytest.mark.parametrize("change", [other_pattern, spaces_in_front, prefixed])
def test_other_tokenizers_are_refused(tmp_path, change):
    model = trained("deepseek-v3")
    change(model)
    size = 500
    with pytest.raises(Unsupported, match="the tokenizer cannot be written to a GGUF file") as caught:
        to_metadata(opened(tmp_path, model, size), size, None, (), None)
    assert "known: deepseek-llm, " in str(caught.value)


def test_a_tokenizer_of_whole_words_is_refused(tmp_path):
    model = Library(models.WordLevel({"a": 0, SPECIAL[0]: 1}, unk_token="a"))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    model.decoder = decoders.ByteLevel()
    with pytest.raises(Unsupported, match="the tokenizer cannot be written to a GGUF file"):
        to_metadata(opened(tmp_path, model, 2), 2, 0, (), None)


def test_a_tokenizer_that_would_make_other_tokens_is_refused(tmp_path):
    """Tokens without merges, which are found whole: a name of these patterns says nothing of that."""
    content = json.loads(trained("deepseek-v3").to_str())
    content["model"] |= {"ignore_merges": True, "merges": content["model"]["merges"][:-5]}
    model = Library.from_str(json.dumps(content))
    size = model.get_vocab_size(with_added_tokens=True)
    with pytest.raises(Unsupported, match="cannot be written") as caught:
        to_metadata(opened(tmp_path, model, size), size, None, (), None)
    assert "by the name deepseek-v3 of its patterns a text would become other tokens" in str(caught.value)
