# ruff: noqa: RUF001 letters of every kind are the point
"""The tokenizer in GGUF metadata encodes as the tokenizer that the metadata was made of."""

import contextlib
import json

import numpy as np
import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mla_jax.base.errors import BadFile, Unsupported
from mla_jax.text import gguf_tokenizer, tiktoken_model
from mla_jax.text.byte_level import to_characters
from mla_jax.text.gguf_tokenizer import KNOWN, from_metadata

TEXT = (
    "the then there these 123 4567 中文 漢字かな don't WE'LL THE Über naïve éa ...!! \n\n  \t été ΑΒγ हिन्दी 한국어 😀 。（ x=\r"
)
SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"]
texts = st.text() | st.lists(st.sampled_from([*TEXT.split(), " ", "\n", "\r", "'S", "ſ", "\u212a", "\r\n", "\u3000", "٣"])).map(
    "".join
)


def trained(pre: str) -> Tokenizer:
    """A BPE of 400 tokens that cuts text as `pre` does, made as model releases are: control tokens behind the vocabulary."""
    model = Tokenizer(models.BPE(ignore_merges=KNOWN[pre].whole))
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in KNOWN[pre].patterns]
    model.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator([TEXT] * 3, trainer)
    model.add_special_tokens(SPECIAL)
    model.add_tokens(["<think>"])
    return model


def metadata(original: Tokenizer, kind: str, **changes) -> dict:
    """The metadata that llama.cpp's converter writes for `original`."""
    vocabulary = sorted(original.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])
    types = [3 if t in SPECIAL else 4 if t == "<think>" else 1 for t, _ in vocabulary]
    merges = json.loads(original.to_str())["model"]["merges"]
    ids = {name: original.token_to_id(token) for name, token in zip(("bos", "eos", "eot"), SPECIAL, strict=True)}
    found = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": [t for t, _ in vocabulary],
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": "{{ bos_token }}",
        **{f"tokenizer.ggml.{name}_token_id": number for name, number in ids.items()},
    }
    found |= {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return {key: value for key, value in found.items() if value is not ...}


MODEL = trained("deepseek-v3")
VALID = metadata(MODEL, "deepseek-v3")
SIZE = len(VALID["tokenizer.ggml.tokens"])
OURS = {pre: from_metadata(metadata(trained(pre), pre), "x.gguf", 1000) for pre in KNOWN if pre not in ("kimi-k2", "qwen2")}
THEIRS = {pre: trained(pre) for pre in OURS}


@pytest.mark.parametrize("pre", OURS)
@given(text=texts)
@example(TEXT)
def test_text_becomes_the_ids_that_the_original_gives(pre, text):
    ids = OURS[pre].tokenizer.encode(text, bos=False)
    assert ids == THEIRS[pre].encode(text, add_special_tokens=False).ids
    assert OURS[pre].tokenizer.decode(ids) == text


# what each released tokenizer makes of a text that the others cut otherwise
CUTS = {
    "deepseek-llm": ["Hi", " there", ",", " ", "1", "2", "3", "4", "中文", "!?", "\n", "\n", " don", "'", "T"],
    "deepseek-coder": ["Hi", " there", ",", " ", "1", "2", "3", "4", "中文", "!?", "\n", "\n", " don", "'", "T"],
    "deepseek-v3": ["Hi", " there", ",", " ", "123", "4", "中文", "!?\n\n", " don", "'T"],
    "glm4": ["Hi", " there", ",", " ", "123", "4", "中文", "!?\n\n", " don", "'T"],
    "qwen2": ["Hi", " there", ",", " ", "1", "2", "3", "4", "中文", "!?\n\n", " don", "'T"],
    "gpt-2": ["Hi", " there", ",", " 1234", "中文", "!?", "\n\n", " don", "'", "T"],
    "gpt-4o": ["Hi", " there", ",", " ", "123", "4", "中文", "!?\n\n", " don'T"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_text_is_cut_as_the_release_cuts_it(pre):
    cuts = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in KNOWN[pre].patterns])
    text = "Hi there, 1234中文!?\n\n don'T"
    found = [piece for piece, _ in cuts.pre_tokenize_str(text)]
    assert "".join(found) == text
    assert found == CUTS[pre]


def test_qwens_text_is_composed_first():
    found = from_metadata(metadata(trained("qwen2"), "qwen2"), "x.gguf", 1000)
    assert found.tokenizer.encode("e\u0301", bos=False) == found.tokenizer.encode("\xe9", bos=False)


def kimi_metadata(merges: list[str]) -> tuple[dict, tiktoken.Encoding]:
    """A tiktoken vocabulary as llama.cpp's converter writes it: tokens by rank, control tokens, padding."""
    parts = [bytes([b]) for b in range(256)] + [
        b"ab",
        b"bc",
        b" a",
        b"abc",
        b" abc",
        "中".encode()[:2],
        "中".encode(),
        "中文".encode(),
    ]
    ranks = {token: i for i, token in enumerate(parts)}
    tokens = [*map(to_characters, parts), "[BOS]", "<|im_end|>", f"[PAD{len(parts) + 2}]"]
    found = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "kimi-k2", "tokenizer.ggml.tokens": tokens}
    found["tokenizer.ggml.token_type"] = np.array([1] * len(parts) + [3, 3, 5], np.int32)
    found |= {"tokenizer.ggml.merges": merges} if merges else {}
    return found, tiktoken.Encoding("reference", pat_str=tiktoken_model.PATTERN, mergeable_ranks=ranks, special_tokens={})


@pytest.mark.deep
@pytest.mark.parametrize("merges", [[], ["a b"]], ids=["without merges", "with merges"])
@given(text=texts | st.text("abc 中文[]PAD0123456789"))
def test_kimis_text_becomes_the_ids_that_tiktoken_gives(merges, text):
    found, reference = kimi_metadata(merges)
    assert from_metadata(found, "x.gguf", 267).tokenizer.encode(text) == reference.encode_ordinary(text)


def test_control_tokens_are_found_only_when_asked_for():
    ours, ids = OURS["deepseek-v3"].tokenizer, [MODEL.token_to_id(t) for t in (*SPECIAL, "<think>")]
    assert ours.encode(SPECIAL[2] + "<think>", bos=False, control=True) == ids[2:]
    assert not {*ids} & {*ours.encode(SPECIAL[2] + "<think>", bos=False)}
    assert ours.decode([ids[2], ids[3]]) == "<think>"


def test_bos_eos_and_template_are_those_of_the_file():
    found = from_metadata(VALID, "x.gguf", 1000)
    bos, eos, eot = (MODEL.token_to_id(t) for t in SPECIAL)
    assert (found.bos_id, found.eos_ids, found.chat_template, found.notes) == (bos, (eos, eot), "{{ bos_token }}", ())
    assert found.tokenizer.encode("a")[0] == bos


def test_a_control_token_that_ends_turns_by_its_text_ends_answers_too():
    """A file of Kimi-K2 names [EOS] as its end, and its turns end with <|im_end|>; as plain text that ends nothing."""
    found, _ = kimi_metadata([])
    first = len(found["tokenizer.ggml.tokens"]) - 3
    assert from_metadata(found | {"tokenizer.ggml.eos_token_id": first}, "x.gguf", 267).eos_ids == (first, first + 1)
    found["tokenizer.ggml.token_type"][first + 1] = 1
    assert from_metadata(found | {"tokenizer.ggml.eos_token_id": first}, "x.gguf", 267).eos_ids == (first,)


@pytest.mark.parametrize(
    ("pre", "said", "in_front"), [("glm4", ..., False), ("llama-bpe", ..., True), ("llama-bpe", False, False)]
)
def test_bos_stands_in_front_as_the_file_says_or_else_as_its_kind_does(pre, said, in_front):
    found = from_metadata(metadata(trained(pre), pre, add_bos_token=said), "x.gguf", 1000)
    assert (found.tokenizer.bos_id == found.bos_id) is in_front
    assert found.bos_id is not None


def test_a_file_without_a_tokenizer_gives_none():
    assert from_metadata({"general.architecture": "deepseek2"}, "x.gguf", 10) is None
    assert from_metadata({"tokenizer.ggml.model": "none"}, "x.gguf", 10) is None


def test_a_file_without_a_pre_tokenizer_is_noted():
    assert "does not name its pre-tokenizer" in from_metadata(metadata(MODEL, "deepseek-v3", pre=...), "x.gguf", 1000).notes[0]


def replaced(index: int, token: str) -> list[str]:
    return [token if i == index else t for i, t in enumerate(VALID["tokenizer.ggml.tokens"])]


FAULTS = {
    "unknown pre": ({"pre": "tekken"}, Unsupported, "names the pre-tokenizer tekken\n.*deepseek-llm.*deepseek-v3"),
    "pre is a number": ({"pre": 7}, Unsupported, "names the pre-tokenizer 7"),
    "pre is a list": ({"pre": ["gpt-2"]}, Unsupported, "names the pre-tokenizer"),
    "sentencepiece": ({"model": "llama"}, Unsupported, "tokenizer of type llama\n.*known: gpt2"),
    "no tokens": ({"tokens": ...}, BadFile, "has no vocabulary"),
    "tokens are numbers": ({"tokens": np.arange(3)}, BadFile, "has no vocabulary"),
    "empty list": ({"tokens": []}, BadFile, "has no vocabulary"),
    "empty token": ({"tokens": replaced(5, "")}, BadFile, "an empty or too long token\n.*id 5"),
    "long token": ({"tokens": replaced(5, "a" * 2000)}, BadFile, "an empty or too long token\n.*id 5"),
    "token twice": ({"tokens": replaced(5, "the")}, BadFile, "has a token twice\n.*the has the ids 5 and"),
    "too few types": ({"token_type": np.ones(3, np.int32)}, BadFile, "another number of token types"),
    "types are texts": ({"token_type": ["a"]}, BadFile, "another number of token types"),
    "types are fractions": (
        {"token_type": np.ones(SIZE)},
        BadFile,
        "another number of token types",
    ),
    "merges are numbers": ({"merges": np.arange(3)}, BadFile, "has no merges"),
    "merge of one part": ({"merges": ["the"]}, BadFile, "merge of parts that are not tokens\n.*merge 0 is the"),
    "empty merge": ({"merges": [""]}, BadFile, "merge of parts that are not tokens"),
    "merge of no tokens": ({"merges": ["t h", "q zz"]}, BadFile, "merge of parts that are not tokens"),
    "merge that makes no token": ({"merges": ["q x"]}, BadFile, "merge of parts that are not tokens\n.*merge 0 is q x"),
    "bos beyond the tokens": ({"bos_token_id": SIZE}, BadFile, f"bos_token_id is {SIZE}\n.*expected 0 to {SIZE - 1}"),
    "bos is a text": ({"bos_token_id": "a"}, BadFile, "bos_token_id is a"),
    "bos wanted by a number": ({"add_bos_token": np.ones(2)}, BadFile, "add_bos_token is .*\n.*expected true or false"),
    "bos wanted and not named": ({"bos_token_id": ...}, BadFile, "asks for a BOS token and names none"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_tokenizer_is_refused(fault):
    changes, error, words = FAULTS[fault]
    with pytest.raises(error, match="x.gguf.*" + words):
        from_metadata(metadata(MODEL, "deepseek-v3", **changes), "x.gguf", 1000)


odd = st.sampled_from([[], np.array([]), np.ones(SIZE), ["a"] * SIZE, [["a"]], "", "gpt2", 1.5, True, -1, 2**70])


@given(st.dictionaries(st.sampled_from([*VALID]), odd, max_size=4))
def test_any_metadata_is_a_tokenizer_or_refused(changes):
    with contextlib.suppress(BadFile, Unsupported):
        from_metadata(VALID | changes, "x.gguf", 1000)


def test_a_vocabulary_beyond_the_models_is_refused():
    with pytest.raises(BadFile, match=f"token ids the model lacks\n.*{SIZE} tokens, the vocabulary is {SIZE - 1}"):
        from_metadata(VALID, "x.gguf", SIZE - 1)


def test_a_template_that_is_no_text_is_refused():
    with pytest.raises(BadFile, match="chat_template is not text"):
        from_metadata({**VALID, "tokenizer.chat_template": 7}, "x.gguf", 1000)


def test_a_vocabulary_of_kimis_kind_that_would_take_hours_is_refused(monkeypatch):
    monkeypatch.setattr(gguf_tokenizer.tiktoken_model, "MAX_TIKTOKEN_FILE", 100)
    with pytest.raises(BadFile, match="too large a vocabulary"):
        from_metadata(kimi_metadata([])[0], "x.gguf", 1000)
