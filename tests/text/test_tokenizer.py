"""The folder's tokenizer: BOS once, ids within the vocabulary, damaged files refused."""

import json
import os
import time
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from mla_jax.base.errors import BadFile, BadRequest
from mla_jax.text.tokenizer import MAX_TOKENIZER, Tokenizer

BOS, EOS = 0, 1


def byte_level(adds_bos: bool = False) -> tokenizers.Tokenizer:
    """One token a byte behind <bos> and <eos>: 258 in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({"<bos>": BOS, "<eos>": EOS} | {c: 2 + i for i, c in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<bos>", "<eos>"])
    if adds_bos:
        model.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return model


def opened(
    folder: Path, settings: dict | None = None, adds_bos: bool = False, vocab: int = 258, default: int | None = BOS
) -> Tokenizer:
    byte_level(adds_bos).save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_folder(folder, vocab, default)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    ("settings", "adds_bos", "expected"),
    [
        ({"bos_token": "<bos>", "add_bos_token": True}, False, True),
        ({"bos_token": "<bos>", "add_bos_token": True}, True, True),
        ({"bos_token": {"content": "<bos>", "special": True}, "add_bos_token": True}, True, True),
        ({"add_bos_token": True}, False, True),
        ({"bos_token": "<bos>", "add_bos_token": False}, True, False),
        ({"bos_token": "<bos>"}, True, True),
        ({"bos_token": "<bos>"}, False, False),
        ({"bos_token": None}, True, True),
        (None, True, True),
        (None, False, False),
    ],
)
def test_bos_stands_in_front_exactly_once_where_the_folder_wants_it(tmp_path, settings, adds_bos, expected):
    tokenizer = opened(tmp_path, settings, adds_bos)
    ids = tokenizer.encode("hi")
    assert ids.count(BOS) == expected
    assert (ids[0] == BOS) == expected
    assert tokenizer.encode("<bos>hi", control=True).count(BOS) == 1, "text that brings its own is not given another"
    assert tokenizer.encode("<bos>hi").count(BOS) == expected, "a typed one is text"
    assert tokenizer.encode("hi", bos=False).count(BOS) == 0
    assert tokenizer.encode("") == [BOS] * expected


def test_a_bos_token_that_the_tokenizer_lacks_is_refused(tmp_path):
    with pytest.raises(BadFile, match="BOS"):
        opened(tmp_path, {"bos_token": "<nowhere>", "add_bos_token": True})


@pytest.mark.parametrize("text", ["plain", "Größe ∑ 😀", "\x00 nul", "right-to-left \u202e and zero\u200bwidth", " spaces  \n"])
def test_text_comes_back_as_it_went_in_without_control_tokens(tmp_path, text):
    tokenizer = opened(tmp_path, {"bos_token": "<bos>", "add_bos_token": True})
    assert tokenizer.decode([*tokenizer.encode(text), EOS]) == text


@pytest.mark.parametrize("text", ["half \ud83d", "\udcff"])
def test_text_that_is_no_unicode_is_refused(tmp_path, text):
    with pytest.raises(BadRequest, match="not valid Unicode"):
        opened(tmp_path).encode(text)


def test_ids_beyond_the_model_are_refused_and_ids_up_to_it_are_not(tmp_path):
    with pytest.raises(BadFile, match="vocab_size 257"):
        opened(tmp_path, vocab=257)
    assert opened(tmp_path, vocab=258).encode("a")


def test_an_added_token_beyond_the_model_is_refused(tmp_path):
    model = byte_level()
    model.add_tokens(["<extra>"])
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadFile, match="token ids the model lacks"):
        Tokenizer.from_folder(tmp_path, 258, None)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"type": "Unheard"}}', "\x00\x01", "null"])
def test_a_broken_tokenizer_is_refused_by_name(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadFile, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path, 258, None)


@pytest.mark.parametrize("damage", ["merges that name no token", "a bad regex"])
def test_a_tokenizer_that_parses_but_cannot_work_is_refused(tmp_path, damage):
    content = json.loads(byte_level().to_str())
    if damage == "a bad regex":
        content["pre_tokenizer"] = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
    else:
        content["model"]["merges"] = [["ab", "cd"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(BadFile, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path, 258, None)


CONTROLS = ["<bos>", "<eos>", "<think>", "<|User|>", "<|end|>"]


def with_controls(letters: str = "") -> Tokenizer:
    """Special and plain added tokens, and DeepSeek's letters that were added because bytes of their value never occur."""
    model = byte_level()
    model.add_tokens(["<think>", "<|User|>", *letters])
    model.add_special_tokens(["<|end|>"])
    return Tokenizer(model, BOS)


@given(st.lists(st.sampled_from([*CONTROLS, "<", "|", ">", "think", "<|", "é", " ", "\n"]) | st.text(), max_size=8).map("".join))
def test_no_typed_text_becomes_a_control_token(text):
    tokenizer = with_controls()
    ids = tokenizer.encode(text, bos=False)
    assert set(ids).isdisjoint(tokenizer.control.values())
    assert tokenizer.decode(ids) == text


def test_control_tokens_are_read_where_that_is_asked_for():
    tokenizer = with_controls()
    ids = tokenizer.encode("<|User|>a<think>b<|end|>", control=True)
    assert [i for i in ids if i in tokenizer.control.values()] == [
        BOS,
        *map(tokenizer.control.get, ["<|User|>", "<think>", "<|end|>"]),
    ]
    assert tokenizer.decode(ids) == "<|User|>a<think>b", "special tokens have no text, the others do"


@pytest.mark.parametrize(("flag", "taken"), [("lstrip", "<x>b"), ("rstrip", "a<x>"), ("single_word", "a<x> b")])
def test_the_flags_of_a_control_token_mean_what_the_library_says(flag, taken):
    def model():
        plain = byte_level()
        plain.add_tokens([tokenizers.AddedToken("<x>", normalized=False, **{flag: True})])
        return plain

    for text in ("a <x> b", taken, "a<x>b", "<x><x> <x>", "\t<x>  \n <x>", " " * 100_000):
        assert Tokenizer(model(), None).encode(text, control=True) == model().encode(text).ids


def test_added_letters_are_text_in_both_directions():
    tokenizer = with_controls("üö")
    ids = tokenizer.encode("für Öl, schön", bos=False)
    assert ids == byte_level_with("üö").encode("für Öl, schön").ids, "as transformers encodes them"
    assert tokenizer.decode(ids) == "für Öl, schön"


def byte_level_with(letters: str) -> tokenizers.Tokenizer:
    model = byte_level()
    model.add_tokens(["<think>", "<|User|>", *letters])
    return model


@given(st.lists(st.integers(0, 260), max_size=20))
def test_bytes_decode_as_the_library_decodes_them(ids):
    tokenizer = with_controls()
    assert tokenizer.decode(ids) == tokenizer.model.decode(
        [i for i in ids if i not in (BOS, EOS, 260)], skip_special_tokens=False
    )


def test_a_text_that_the_vocabulary_itself_makes_a_control_token_is_refused(tmp_path):
    model = tokenizers.Tokenizer(models.WordLevel({"<eos>": 0, "a": 1}, unk_token="<eos>"))
    model.add_special_tokens(["<eos>"])
    tokenizer = Tokenizer(model, None)
    assert tokenizer.encode("a") == [1]
    for text in ("<eos>", "unheard"):
        with pytest.raises(BadRequest, match="<eos>"):
            tokenizer.encode(text)


def test_a_tokenizer_that_would_cut_or_pad_prompts_does_not(tmp_path):
    model = byte_level()
    model.enable_truncation(3)
    model.enable_padding(length=9, pad_id=EOS, pad_token="<eos>")
    assert len(Tokenizer(model, None).encode("hello world")) == 11


def test_an_added_token_whose_id_the_library_would_change_is_refused(tmp_path):
    model = byte_level()
    model.add_tokens(["<extra>"])
    content = json.loads(model.to_str())
    content["added_tokens"][-1]["id"] = 300
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(BadFile, match="<extra> has id 300, the vocabulary leaves it 258"):
        Tokenizer.from_folder(tmp_path, 400, None)


def test_merges_that_go_in_a_circle_end(tmp_path):
    content = json.loads(byte_level().to_str())
    content["model"]["vocab"] |= {"aa": 258, "aaa": 259}
    content["model"]["merges"] = [["aa", "a"], ["a", "aa"], ["a", "a"], ["a", "a"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.from_folder(tmp_path, 260, None)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("a" * 1001)) == "a" * 1001


def test_a_tokenizer_that_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(BadFile, match="not a regular file"):
        Tokenizer.from_folder(tmp_path, 258, None)


def test_megabytes_of_text_take_seconds():
    text = "a line of text with <eos> and <| in it\n" * 50_000
    start = time.process_time()
    assert len(with_controls().encode(text, bos=False)) == len(text)
    assert time.process_time() - start < 30


def test_an_oversized_tokenizer_is_refused_unread(tmp_path):
    with open(tmp_path / "tokenizer.json", "wb") as file:
        file.truncate(MAX_TOKENIZER + 1)  # sparse: takes no room
    with pytest.raises(BadFile, match="too large"):
        Tokenizer.from_folder(tmp_path, 258, None)


def test_a_broken_tokenizer_config_is_refused(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(BadFile, match=r"tokenizer_config\.json"):
        opened(tmp_path)


def test_a_folder_without_a_tokenizer_has_none(tmp_path):
    assert Tokenizer.from_folder(tmp_path, 258, None) is None
