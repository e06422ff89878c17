# ruff: noqa: RUF001 letters of every kind are the point
"""Moonshot's tiktoken.model as a BPE: the same ids as tiktoken, control tokens where the folder says, damaged files refused."""

import base64
import json
import random
import time
from itertools import pairwise

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from mla_jax.base.errors import BadFile
from mla_jax.text import tiktoken_model
from mla_jax.text.tokenizer import Tokenizer

TEXT = "the then there these 123 4567 中文 漢字かな don't we'll THE Über naïve éa ...!! \n\n  \t été ΑΒγ हिन्दी 😀👍🏽 "


def learned(count: int = 400) -> dict[bytes, int]:
    """A vocabulary as training makes it: each token joins the two that stood side by side most often."""
    parts = [[bytes([b]) for b in word.encode()] for word in (TEXT * 2).split(" ")] + [[b" ", b" ", b" ", b" "]]
    ranks = {bytes([b]): i for i, b in enumerate(random.Random(0).sample(range(256), 256))}
    while len(ranks) < count:
        pairs: dict[bytes, int] = {}
        for word in parts:
            for a, b in pairwise(word):
                pairs[a + b] = pairs.get(a + b, 0) + 1
        best = max((p for p in pairs if p not in ranks), key=lambda p: (pairs[p], p), default=None)
        if best is None:
            break
        ranks[best] = len(ranks)
        for word in parts:
            at = 0
            while at + 1 < len(word):
                if word[at] + word[at + 1] == best:
                    word[at : at + 2] = [best]
                at += 1
    return ranks


def wild(seed: int) -> dict[bytes, int]:
    """Tokens of any ranks, whose parts may rank behind them or be no tokens at all."""
    draw = random.Random(seed)
    tokens = {bytes([b]) for b in range(256)}
    tokens |= {bytes(draw.choices(b"abc ", k=draw.randint(2, 6))) for _ in range(150)}
    return {token: i for i, token in enumerate(draw.sample(sorted(tokens), len(tokens)))}


def lines(ranks: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items())


def reference(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    return tiktoken.Encoding("reference", pat_str=tiktoken_model.PATTERN, mergeable_ranks=ranks, special_tokens={})


RANKS = learned()
FIRST = len(RANKS)
NAMES = {FIRST: "[BOS]", FIRST + 1: "[EOS]", FIRST + 2: "<|im_end|>", FIRST + 11: "<|tool_calls_section_begin|>"}
SETTINGS = {
    "bos_token": "[BOS]",
    "added_tokens_decoder": {str(i): {"content": text, "special": "tool" not in text} for i, text in NAMES.items()},
}
VOCAB = FIRST + tiktoken_model.RESERVED


def folder(path, data: bytes | None = None, settings: dict | None = None):
    (path / "tiktoken.model").write_bytes(lines(RANKS) if data is None else data)
    (path / "tokenizer_config.json").write_text(json.dumps(SETTINGS if settings is None else settings))
    return path


OURS = Tokenizer(tiktoken_model.build(lines(RANKS), "tiktoken.model", SETTINGS, VOCAB), None)
TIKTOKEN = reference(RANKS)


@given(
    st.text()
    | st.lists(st.sampled_from(TEXT.split() + [" ", "\n", "'S", "ſ", "\u212a", "\r\n", "\u3000", "々", "〇"])).map("".join)
)
@example(TEXT)
@example("I'LL don'T  we've \r\n\r\n  中文Latin漢字123456 ")
def test_text_becomes_the_ids_that_tiktoken_gives(text):
    ids = OURS.encode(text)
    assert ids == TIKTOKEN.encode_ordinary(text)
    assert OURS.decode(ids) == text


@pytest.mark.parametrize("seed", range(20))
def test_ranks_in_any_order_give_the_ids_of_tiktoken(seed):
    ranks, draw = wild(seed), random.Random(seed)
    ours, theirs = tiktoken_model.build(lines(ranks), "", {}, 2000), reference(ranks)
    for _ in range(200):
        text = "".join(draw.choices("abc ", k=draw.randint(1, 14)))
        assert ours.encode(text).ids == theirs.encode_ordinary(text), text


def test_control_tokens_stand_behind_the_vocabulary_under_their_names(tmp_path):
    tokenizer = Tokenizer.from_folder(folder(tmp_path), VOCAB, None)
    assert tokenizer is not None
    assert {i: tokenizer.model.id_to_token(i) for i in NAMES} == NAMES
    assert tokenizer.model.token_to_id(f"<|reserved_token_{VOCAB - 1}|>") == VOCAB - 1
    assert len(tokenizer.control) == tiktoken_model.RESERVED
    assert tokenizer.encode("[BOS]hi<|im_end|>", control=True) == [FIRST, *tokenizer.encode("hi"), FIRST + 2]
    assert set(tokenizer.encode("[BOS]hi<|im_end|>")).isdisjoint(NAMES)
    assert tokenizer.decode([FIRST, *tokenizer.encode("hi"), FIRST + 11, FIRST + 2]) == "hi<|tool_calls_section_begin|>"


def test_a_tokenizer_json_goes_before_a_tiktoken_model(tmp_path):
    (folder(tmp_path, b"nonsense") / "tokenizer.json").write_text(tiktoken_model.build(lines(RANKS), "", {}, VOCAB).to_str())
    assert Tokenizer.from_folder(tmp_path, VOCAB, None) is not None


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "256 of the 256 single bytes"),
        (lines(RANKS) + b"not*base64 500\n", "line"),
        (lines(RANKS) + b"YWJjZGVm\n", "line"),
        (lines(RANKS) + b"YWJjZGVm 1 2\n", "line"),
        (lines(RANKS) + b"YWJjZGVm -5\n", "line"),
        (lines(RANKS) + b"YWJjZGVm 99999999999999999999\n", "line"),
        (lines(RANKS) + b"YQ== 400\n", "line"),
        (lines(RANKS) + b"YWJjZGVm 3\n", "ranks"),
        (lines(RANKS) + b"YWJjZGVm 5000\n", "ranks"),
        (lines(RANKS) + base64.b64encode(b"a" * 1025) + b" %d\n" % FIRST, "line"),
        (lines({t: r for t, r in RANKS.items() if r != FIRST - 1 and t != b"a"} | {b"xyz": RANKS[b"a"]}), "byte"),
        (b"\x00" * 100, "line 1"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, data, words):
    with pytest.raises(BadFile, match=words) as caught:
        Tokenizer.from_folder(folder(tmp_path, data), VOCAB, None)
    assert "tiktoken.model" in str(caught.value)


def chain(longest: int) -> dict[bytes, int]:
    """Tokens of one letter, each a letter longer than the one before: every cut of each of them makes two tokens."""
    return {token: i for i, token in enumerate([*(bytes([b]) for b in range(256)), *(b"a" * n for n in range(2, longest + 1))])}


def test_a_chain_of_tokens_loads_at_once_or_is_refused_at_once(tmp_path):
    start = time.process_time()
    model = tiktoken_model.build(lines(chain(256)), "", {}, 2000)
    assert model.encode("a" * 500).ids == reference(chain(256)).encode_ordinary("a" * 500)
    with pytest.raises(BadFile, match="too many tokens that are made of other tokens"):
        Tokenizer.from_folder(folder(tmp_path, lines(chain(1024)), {}), 2000, None)
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    "entries",
    [
        {str(VOCAB): {"content": "<beyond>"}},
        {str(FIRST - 1): {"content": "<inside>"}},
        {"x": {"content": "<x>"}},
        {str(FIRST): {"content": ""}},
        {str(FIRST): "text"},
        {str(FIRST): {"content": "<a>"}, str(FIRST + 1): {"content": "<a>"}},
        {str(FIRST): {"content": "t"}},
    ],
)
def test_control_tokens_that_cannot_be_are_refused(tmp_path, entries):
    with pytest.raises(BadFile, match=r"tokenizer_config\.json"):
        Tokenizer.from_folder(folder(tmp_path, settings={"added_tokens_decoder": entries}), VOCAB, None)


def test_a_vocabulary_larger_than_the_model_is_refused_and_unnamed_control_tokens_beyond_it_are_left_out(tmp_path):
    with pytest.raises(BadFile, match="vocab_size 300"):
        Tokenizer.from_folder(folder(tmp_path, settings={}), 300, None)
    tokenizer = Tokenizer.from_folder(tmp_path, FIRST + 5, None)
    assert tokenizer is not None
    assert len(tokenizer.control) == 5


def test_an_oversized_file_is_refused_unread(tmp_path):
    with open(folder(tmp_path) / "tiktoken.model", "wb") as file:
        file.truncate(500 << 20)
    with pytest.raises(BadFile, match="too large"):
        Tokenizer.from_folder(tmp_path, VOCAB, None)
