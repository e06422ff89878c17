"""Text while it arrives: the same as all at once, never half a character, never a stop text that is taken back."""

import time
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from mla_jax.base.errors import BadRequest
from mla_jax.text.byte_level import to_characters
from mla_jax.text.stream import TextStream, printable_text
from mla_jax.text.tokenizer import Tokenizer

PIECES = ["ab", "abc", "cd", "stop", " s", "€", "日本", "</s", "\n\n", "�"]


def byte_level() -> Tokenizer:
    """Every byte, some words, and tokens that end within a character: random ids often are no UTF-8."""
    broken = [b"\x82\xac\xe2", b"a\xe2", b"\xf0\x9f", b"\x98\x80", b"\xff"]
    tokens = [*(bytes([b]) for b in range(256)), *(p.encode() for p in PIECES), *broken]
    model = tokenizers.Tokenizer(models.BPE({to_characters(t): i for i, t in enumerate(dict.fromkeys(tokens))}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<eos>"])
    model.add_tokens(["<think>"])
    return Tokenizer(model, None)


def words() -> Tokenizer:
    """A vocabulary with a sign for a space and single bytes, as sentencepiece makes them."""
    tokens = ["<unk>", "▁", "▁a", "a", "b", "▁stop", "st", "op", *(f"<0x{b:02X}>" for b in (0x41, 0xE2, 0x82, 0xAC, 0xFF)), "€"]
    model = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate(tokens)}, unk_token="<unk>"))
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model.add_special_tokens(["<eos>"])
    return Tokenizer(model, None)


BYTE_LEVEL, WORDS = byte_level(), words()
TOKENIZERS = {"byte level": BYTE_LEVEL, "words": WORDS}


def cut(text: str, stops: list[str]) -> str:
    return text[: min((text.find(s) for s in stops if s in text), default=len(text))]


def first_with_a_stop(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> int | None:
    return next((n for n in range(1, len(ids) + 1) if any(s in tokenizer.decode(ids[:n]) for s in stops)), None)


def pushed(stream: TextStream, parts: list[list[int]]) -> list[str]:
    return [stream.push(part) for part in parts]


def split(ids: list[int], draw) -> list[list[int]]:
    ends = [0, *sorted(draw(st.lists(st.integers(0, len(ids)), max_size=5))), len(ids)]
    return [ids[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_the_parts_make_the_text_of_all_tokens_whatever_the_tokens_and_the_parts(kind, data):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.model.get_vocab_size() - 1), max_size=40))
    stream = TextStream(tokenizer)
    parts = pushed(stream, split(ids, data.draw))
    assert "".join(parts) + stream.finish() == tokenizer.decode(ids)
    assert (stream.stopped, stream.used) == (False, len(ids))


@given(data=st.data())
def test_a_stop_text_ends_the_text_where_it_begins(data):
    letters = st.sampled_from([*range(97, 101), *(256 + i for i in range(9)), 0xE2, 0x82, 0xAC])
    ids = data.draw(st.lists(letters, max_size=40))
    stops = data.draw(
        st.lists(st.text("abcd€s", min_size=1, max_size=4) | st.sampled_from(["stop", "</s>", "日"]), min_size=1, max_size=4)
    )
    stream = TextStream(BYTE_LEVEL, stops)
    text = "".join(pushed(stream, split(ids, data.draw))) + stream.finish()
    used = first_with_a_stop(BYTE_LEVEL, ids, stops)
    assert stream.stopped == (used is not None)
    assert stream.used == (len(ids) if used is None else used)
    assert text == cut(BYTE_LEVEL.decode(ids[: stream.used]), stops)


@given(data=st.data())
def test_what_is_shown_is_never_taken_back(data):
    ids = data.draw(st.lists(st.integers(0, 270), max_size=30))
    stops = data.draw(st.lists(st.text("abcd", min_size=1, max_size=3), max_size=3))
    final, stream = TextStream(BYTE_LEVEL, stops), TextStream(BYTE_LEVEL, stops)
    whole = final.push(ids) + final.finish()
    shown = ""
    for token in ids:
        shown += stream.push([token])
        assert whole.startswith(shown)


def test_half_a_character_waits_for_the_other_half():
    stream = TextStream(BYTE_LEVEL)
    assert pushed(stream, [[0xF0], [0x9F], [0x98], [0x80], [97]]) == ["", "", "", "😀", "a"]
    assert stream.push([0xE2, 0x82]) == ""
    assert stream.finish() == "\ufffd"


def test_what_may_become_a_stop_text_is_held_and_given_when_it_does_not():
    stream = TextStream(BYTE_LEVEL, ["abcd", "bx"])
    assert pushed(stream, [[97], [98], [99], [122]]) == ["", "", "", "abcz"]
    assert stream.push([97, 98]) == ""
    assert stream.finish() == "ab"
    assert not stream.stopped


def test_after_a_stop_nothing_is_shown_or_counted():
    stream = TextStream(BYTE_LEVEL, ["b"])
    assert stream.push([97, 98, 99]) == "a"
    assert (stream.push([97, 97]), stream.finish(), stream.used, stream.stopped) == ("", "", 2, True)


def test_a_stop_text_that_only_the_end_completes_stops():
    stream = TextStream(BYTE_LEVEL, ["\ufffd"])
    assert stream.push([97, 0xE2]) + stream.finish() == "a"
    assert stream.stopped


def test_a_stop_text_that_is_kept_is_the_end_of_the_text():
    stream = TextStream(BYTE_LEVEL, ["cd", "bc"], kept=True)
    assert pushed(stream, [[97, 98], [99, 100]]) == ["a", "bc"]
    assert (stream.stopped, stream.used, stream.finish()) == (True, 3, "")


def test_the_first_tokens_may_have_stop_texts():
    stream = TextStream(BYTE_LEVEL, ["bc", "b"], least=2)
    assert pushed(stream, [[97, 98], [99], [98], [99]]) == ["ab", "c", "", ""]
    assert (stream.stopped, stream.used) == (True, 4)


def test_an_empty_stop_text_is_refused():
    with pytest.raises(BadRequest, match="empty"):
        TextStream(BYTE_LEVEL, ["a", ""])


def test_a_plain_added_token_is_shown_and_a_special_one_is_not():
    think, eos = BYTE_LEVEL.control["<think>"], BYTE_LEVEL.control["<eos>"]
    assert TextStream(BYTE_LEVEL).push([think, eos, 97]) == "<think>a"


@pytest.mark.deep
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_long_text_takes_linear_time(kind):
    ids = TOKENIZERS[kind].model.token_to_id("a"), TOKENIZERS[kind].control["<eos>"]

    def seconds(tokens: int) -> float:
        """Of this thread alone, so that other work on the machine hardly counts."""
        stream, start = TextStream(TOKENIZERS[kind], ["a" * 50 + "b"]), time.thread_time()
        text = "".join(stream.push([ids[i % 2]]) for i in range(tokens)) + stream.finish()
        assert text == "a" * (tokens // 2)
        return time.thread_time() - start

    # of 16 times as many tokens: 16, where the time is linear, and 256, where it is quadratic
    assert seconds(64_000) < 64 * min(seconds(4_000) for _ in range(3))


@given(st.text())
def test_no_control_character_reaches_a_terminal(text):
    shown = printable_text(text + "\x1b[2J\x9b31m\r\x07\x7f")
    assert not any((c < " " and c not in "\n\t") or "\x7f" <= c < "\xa0" for c in shown)
    assert len(shown) == len(text) + 11
    assert printable_text("plain\n\tÜ €😀") == "plain\n\tÜ €😀"
