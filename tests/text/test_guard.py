"""A tokenizer.json of any form works as it would in this process, or is refused; it never hangs, kills or fills this process."""

import contextlib
import json
import os
import resource
import time
from pathlib import Path

import jaxtyping
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from mla_jax.base.errors import BadFile, BadRequest
from mla_jax.text import forms, guard
from mla_jax.text.patterns import BLANKS_AT_THE_END, KNOWN, LINE_ENDS, SLOW_BLANKS_AT_THE_END
from mla_jax.text.stream import TextStream
from mla_jax.text.tokenizer import InProcess, Tokenizer

DEMO = Path(guard.__file__).parents[1] / "demo"
TOKENS = ["<unk>", "▁", "▁a", "a", "b", "▁stop", "st", "op", *(f"<0x{b:02X}>" for b in range(256)), "€", "aa"]


def sentencepiece() -> tokenizers.Tokenizer:
    """As the tokenizers of Llama 2 and MiniCPM are converted: blanks become a sign, characters without a token become bytes."""
    vocabulary = {token: i for i, token in enumerate(TOKENS)}
    model = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "a"), ("▁", "a")], unk_token="<unk>", byte_fallback=True))
    model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    model.add_special_tokens(["<eos>"])
    return model


def byte_level(pre: str | None = None) -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    cuts = [pre_tokenizers.Split(Regex(p), "isolated") for p in (KNOWN[pre].patterns if pre else ())]
    model.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(["<eos>"])
    return model


def opened(folder, model: tokenizers.Tokenizer, **changes) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(json.loads(model.to_str()) | changes))
    tokenizer = Tokenizer.from_folder(folder, 600, None)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def guarded(tmp_path_factory) -> Tokenizer:
    tokenizer = opened(tmp_path_factory.mktemp("folder"), sentencepiece())
    assert isinstance(tokenizer.codec, guard.Guard)
    return tokenizer


IN_PROCESS = Tokenizer(sentencepiece(), None)


@settings(max_examples=200)
@given(text=st.text() | st.text("ab ▁€<0x41>\n"))
def test_text_becomes_the_same_ids_as_in_this_process_and_comes_back(guarded, text):
    ids = guarded.encode(text)
    assert ids == IN_PROCESS.encode(text)
    assert guarded.decode(ids) == IN_PROCESS.decode(ids)
    stream = TextStream(guarded)
    assert stream.push(ids) + stream.finish() == guarded.decode(ids)


def test_a_typed_control_token_stays_text_and_one_that_is_asked_for_is_found(guarded):
    eos = guarded.control["<eos>"]
    assert eos not in guarded.encode("a<eos>")
    assert guarded.encode("a<eos>", control=True)[-1] == eos


@pytest.mark.parametrize("pre", [None, *KNOWN])
def test_released_forms_work_in_this_process(tmp_path, pre):
    assert isinstance(opened(tmp_path, byte_level(pre)).codec, InProcess)


def test_the_demo_model_and_its_family_work_in_this_process():
    digits = {"type": "Digits", "individual_digits": True}
    content = json.loads(byte_level("deepseek-llm").to_str())
    content["pre_tokenizer"]["pretokenizers"].insert(5, digits)
    assert forms.known(content) is not None
    demo = Tokenizer.from_folder(DEMO, 1 << 20, 0)
    assert demo is not None
    assert isinstance(demo.codec, InProcess)


LINES = st.text("ab \t\u3000\u00a0\u2028\x0b\r\n").map(lambda text: text * 3)


@given(LINES)
def test_the_fast_pattern_for_blanks_cuts_as_the_released_one(text):
    def cut(pattern: str) -> list:
        parts = [pre_tokenizers.Split(Regex(p), "isolated") for p in (LINE_ENDS, pattern)]
        return pre_tokenizers.Sequence(parts).pre_tokenize_str(text)

    assert cut(BLANKS_AT_THE_END) == cut(SLOW_BLANKS_AT_THE_END)


def split(pattern: str, behavior: str = "Isolated") -> dict:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": False}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def test_deepseek_v2s_slow_pattern_takes_linear_time(tmp_path):
    cuts = [split(LINE_ENDS), split(SLOW_BLANKS_AT_THE_END), BYTES]
    tokenizer = opened(tmp_path, byte_level(), pre_tokenizer={"type": "Sequence", "pretokenizers": cuts})
    start = time.process_time()
    assert len(tokenizer.encode(" " * 500_000 + "a")) == 500_001
    assert time.process_time() - start < 10


@pytest.mark.parametrize("pre", [*KNOWN])
@pytest.mark.parametrize("text", [" " * 30_000 + "a", "\t \r" * 10_000 + "x", "Aa" * 15_000, "'" * 30_000, "\u0301" * 30_000])
def test_known_patterns_take_linear_time(pre, text):
    cuts = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(p), "isolated") for p in KNOWN[pre].patterns])
    start = time.process_time()
    cuts.pre_tokenize_str(text)
    assert time.process_time() - start < 2  # the slow pattern of DeepSeek-V2 took ten


DOUBLING = {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
TWICE = {"type": "TemplateProcessing", "single": [TEXT, TEXT], "pair": [TEXT, TEXT], "special_tokens": {}}


def added(content: str, **flags: bool) -> dict:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": 0, "content": content, **plain, **flags}


FOREIGN = {
    "normalizer that doubles": {"normalizer": DOUBLING},
    "regular expression without end": {"pre_tokenizer": split("(?:a|a|a|a){11}(?<!a)")},
    "slow pattern without line ends": {"pre_tokenizer": split(SLOW_BLANKS_AT_THE_END)},
    "bytes of bytes": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 40}},
    "pattern in a normalizer": {"normalizer": {"type": "Replace", "pattern": {"Regex": "(?:a|a|a|a){11}(?<!a)"}, "content": ""}},
    "nested sequences": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Sequence", "pretokenizers": []}]}},
    "text twice": {"post_processor": {"type": "Sequence", "processors": [TWICE] * 40}},
    "dropout": {"model": {**json.loads(byte_level().to_str())["model"], "dropout": 0.9999}},
    "added token that looks around": {"added_tokens": [added("e", lstrip=True)]},
    "two patterns": {"pre_tokenizer": {**split("a"), "pattern": {"Regex": r"\p{N}", "String": "a"}}},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_other_forms_are_not_taken_for_known_ones(name):
    assert forms.known(json.loads(byte_level().to_str()) | FOREIGN[name]) is None


@pytest.mark.parametrize("change", [{"model": None}, {"model": []}, {"pre_tokenizer": 5}, {"pre_tokenizer": []}, {"decoder": 5}])
@pytest.mark.parametrize("key", ["model", "normalizer", "pre_tokenizer", "decoder", "post_processor", "added_tokens"])
def test_no_content_fails_the_check_of_its_form(key, change):
    content = json.loads(byte_level().to_str()) | change
    for value in ({}, {"type": "Sequence"}, {"type": ["ByteLevel"]}, {"type": "Split", "pattern": []}, [None], "x", 1.5):
        forms.known(content | {key: value})
        forms.inert(content | {key: value})


@pytest.mark.deep
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("normalizer that doubles", "a" * 100),
        ("bytes of bytes", "é" * 100),
        ("regular expression without end", "a" * 5000),
        ("pattern in a normalizer", "a" * 5000),
        ("slow pattern without line ends", " " * 100_000 + "a"),
    ],
    ids=lambda value: value[:20],
)
def test_what_multiplies_text_or_never_ends_is_ended_and_the_next_text_is_encoded(tmp_path, monkeypatch, name, text):
    monkeypatch.setattr(guard, "SECONDS", 2 - len(text) / guard.BYTES_A_SECOND)
    monkeypatch.setattr(guard, "MEMORY", 1 << 30)
    tokenizer = opened(tmp_path, byte_level(), **FOREIGN[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadRequest, match=r"cannot encode the text\n.*more than (?:2 seconds|1 GiB|[0-9,]+ bytes)"):
        tokenizer.encode(text)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    monkeypatch.setattr(guard, "SECONDS", 60)
    assert len(tokenizer.encode("bc")) == 2


@pytest.mark.parametrize("key", ["normalizer", "pre_tokenizer", "decoder", "model", "unheard"])
def test_what_is_nested_too_deeply_is_refused(tmp_path, key):
    nested = '{"type": "Sequence", "normalizers": [' * 450 + "]}" * 450
    text = json.dumps(json.loads(byte_level().to_str()) | {key: 12345}).replace("12345", nested)
    (tmp_path / "tokenizer.json").write_text(text)
    with contextlib.suppress(BadFile):  # what the library leaves unread is harmless
        Tokenizer.from_folder(tmp_path, 600, None)


def test_what_the_library_cannot_load_in_time_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(guard, "START_SECONDS", 0.001)
    with pytest.raises(BadFile, match=r"tokenizer\.json is refused.*\n.*more than 0 seconds"):
        opened(tmp_path, sentencepiece())


@pytest.mark.parametrize("pattern", ["(", "(?:(?:a{99999}){99999}){99999}"])
def test_a_pattern_that_cannot_be_compiled_is_refused(tmp_path, pattern):
    with pytest.raises(BadFile, match=r"tokenizer\.json is refused by the tokenizers library"):
        opened(tmp_path, byte_level(), pre_tokenizer=split(pattern))


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "Strip", "content": "a", "start": 5, "stop": 5},
        {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40},
    ],
)
def test_a_decoder_that_fails_or_multiplies_text_is_refused(tmp_path, monkeypatch, decoder):
    monkeypatch.setattr(guard, "SECONDS", 2)
    monkeypatch.setattr(guard, "MEMORY", 1 << 30)
    tokenizer = opened(tmp_path, sentencepiece(), decoder=decoder)
    a, b = (tokenizer.model.token_to_id(letter) for letter in "ab")
    with pytest.raises(BadFile, match=r"tokenizer\.json cannot decode its tokens"):
        tokenizer.decode([a])
    assert tokenizer.decode([b]) == "b" if decoder["type"] == "Sequence" else True


def test_a_file_that_pads_without_end_does_not(tmp_path):
    padding = {"strategy": {"Fixed": 1 << 40}, "direction": "Left", "pad_to_multiple_of": None}
    padding |= {"pad_id": 5, "pad_type_id": 0, "pad_token": "x"}
    for normalizer in (None, {"type": "Lowercase"}):
        tokenizer = opened(tmp_path, byte_level(), padding=padding, normalizer=normalizer)
        assert len(tokenizer.encode("abc")) == 3


def test_too_many_control_tokens_are_refused(tmp_path):
    model = byte_level()
    model.add_special_tokens([f"<{i}>" for i in range(10_001)])
    model.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(BadFile, match="10,002 control tokens"):
        Tokenizer.from_folder(tmp_path, 1 << 20, None)


def test_a_question_that_was_interrupted_does_not_answer_the_next_one(tmp_path, monkeypatch):
    tokenizer = opened(tmp_path, sentencepiece())
    process = tokenizer.codec._process

    def interrupted(*args, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr(guard, "_clock", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")
    monkeypatch.undo()
    assert process.poll() is not None
    assert tokenizer.encode("b") == IN_PROCESS.encode("b")


def test_a_fork_has_a_process_of_its_own(tmp_path, monkeypatch):
    tokenizer = opened(tmp_path, sentencepiece())
    of_parent, expected = tokenizer.codec._process, tokenizer.encode("a")
    monkeypatch.setattr(guard.os, "getpid", lambda: -1)
    assert tokenizer.encode("a") == expected
    of_fork = tokenizer.codec._process
    assert of_fork is not of_parent
    tokenizer.codec._close()
    assert of_fork.poll() is not None
    assert of_parent.poll() is None
    monkeypatch.undo()
    guard._end(of_parent, os.getpid())


def test_a_process_that_cannot_be_started_is_an_error_of_ours(tmp_path, monkeypatch):
    tokenizer = opened(tmp_path, sentencepiece())
    tokenizer.codec._close()
    monkeypatch.setattr(guard.sys, "executable", str(tmp_path / "no python"))
    with pytest.raises(BadFile, match=r"works with tokenizer\.json cannot be started\n.*No such file"):
        tokenizer.encode("a")


def test_the_process_ends_with_its_tokenizer(tmp_path):
    tokenizer = opened(tmp_path, sentencepiece())
    process = tokenizer.codec._process
    del tokenizer
    process.wait(20)


anything = st.none() | st.integers() | st.floats() | st.text() | st.binary() | st.just(10**5000) | st.booleans()


@settings(max_examples=300)
@given(given_=anything | st.lists(anything | st.integers(0, 300), max_size=5) | st.dictionaries(st.text(), anything, max_size=2))
@pytest.mark.parametrize("kind", ["guarded", "byte level"])
def test_whatever_is_given_to_encode_and_decode_is_served_or_a_bad_request(guarded, kind, given_):
    tokenizer = {"guarded": guarded, "byte level": BYTE_LEVEL}[kind]
    jaxtyping.config.update("jaxtyping_disable", True)  # users run without the checks of the tests
    try:
        for task in (tokenizer.encode, tokenizer.decode):
            with contextlib.suppress(BadRequest):
                assert isinstance(task(given_), str | list)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


BYTE_LEVEL = Tokenizer(byte_level(), None)


def test_a_panic_of_the_library_is_an_error_of_ours(tmp_path, monkeypatch):
    demo = Tokenizer.from_folder(DEMO, 1 << 20, 0)
    assert demo is not None
    with pytest.raises(BadRequest, match="the text is too long: 10,000,000 bytes"):
        demo.encode(" " * 10_000_000)
    monkeypatch.setattr("mla_jax.text.tokenizer.MAX_TEXT", 20_000_000)
    with pytest.raises(BadRequest, match=r"the tokenizer cannot encode the text\n.*retry-limit-in-match"):
        demo.encode(" " * 10_000_000)
    assert demo.decode(demo.encode("hello")) == "hello"


def test_a_panic_while_decoding_is_an_error_of_ours():
    model = sentencepiece()
    model.decoder = decoders.Strip("a", 5, 5)
    with pytest.raises(BadFile, match="cannot decode"):
        Tokenizer(model, None).decode([3])
