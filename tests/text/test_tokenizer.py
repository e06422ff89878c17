"""The folder's tokenizer: BOS once, ids within the vocabulary, damaged files refused."""

import json
from pathlib import Path

import pytest
import tokenizers
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
    assert tokenizer.encode("<bos>hi").count(BOS) == 1, "text that brings its own is not given another"
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
