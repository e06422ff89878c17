"""What goes where, and in which form."""

import json

import pytest

from mla_jax.engine.request import Chunk, FinishReason
from mla_jax.engine.stats import Stats
from mla_jax.ui.console import Console, summary

STATS = Stats(27, 41, 0.18, 0.65, 8.4, seed=5, bandwidth_share=0.71, peak_bytes=int(31.2 * 2**30))


def test_the_summary_is_one_line_with_every_figure():
    line = summary(STATS, "end")
    expected = ("stop: end of text", "27+41 tokens", "first 0.18 s", "61.5 tok/s (71% of bandwidth)", "peak 31.2 GiB")
    for part in (*expected, "compile 8.4 s", "seed 5"):
        assert part in line
    assert "\n" not in line


def test_text_goes_to_stdout_and_figures_to_stderr(capfdbinary):
    console = Console(as_json=False, quiet=False)
    console.note("note: a note")
    console.chunk(Chunk("héllo \x1b[31m", [1, 2], None), has_text=True)
    console.done(STATS, "end")
    captured = capfdbinary.readouterr()
    assert captured.out.decode() == "héllo \x1b[31m\n"  # no terminal: bytes as the model wrote them
    assert b"note: a note" in captured.err
    assert b"tok/s" in captured.err


def test_on_a_terminal_control_characters_cannot_act(capfdbinary):
    console = Console(as_json=False, quiet=False)
    console.terminal = True
    console.chunk(Chunk("a\x1b[2Jb\r\x07\n", [1], None), has_text=True)
    out = capfdbinary.readouterr().out.decode()
    assert not {"\x1b", "\r", "\x07"} & set(out)
    assert out.endswith("\n")


def test_quiet_leaves_the_text_alone(capfdbinary):
    console = Console(as_json=False, quiet=True)
    console.note("note: a note")
    console.chunk(Chunk("x", [1], None), has_text=True)
    console.done(STATS, "length")
    assert capfdbinary.readouterr() == (b"x\n", b"")


def test_json_is_one_object_an_event(capfdbinary):
    console = Console(as_json=True, quiet=False)
    console.chunk(Chunk('"\n', [1, 2], None, [{1: -0.5}, {2: -0.25}]), has_text=True)
    console.chunk(Chunk("", [3], FinishReason.END), has_text=False)
    console.done(STATS, FinishReason.END)
    first, second, last = map(json.loads, capfdbinary.readouterr().out.decode().splitlines())
    assert first == {"event": "token", "text": '"\n', "token_ids": [1, 2], "logprobs": [{"1": -0.5}, {"2": -0.25}]}
    assert second == {"event": "token", "text": None, "token_ids": [3]}
    assert (last["event"], last["finish_reason"]) == ("done", "end")
    assert last["usage"] == {"prompt_tokens": 27, "generated_tokens": 41}
    assert last["stats"]["bandwidth_share"] == 0.71


def test_a_model_without_tokenizer_shows_its_token_ids(capfdbinary):
    Console(as_json=False, quiet=True).chunk(Chunk("", [7, 8], None), has_text=False)
    assert capfdbinary.readouterr().out == b"7 8 "


@pytest.mark.parametrize(
    ("reason", "words"),
    [("length", "length"), ("stop", "stop text"), ("error", "logits not finite"), ("interrupted", "interrupted")],
)
def test_every_way_to_end_has_its_words(reason, words):
    assert f"stop: {words}" in summary(STATS, reason)


def test_loading_shows_on_a_terminal_only_and_leaves_no_line(capfd, monkeypatch):
    console = Console(as_json=False, quiet=False)
    console.loading(2**30, 2**31)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for done in (2**30, 2**30 + 1, 2**31):
        console.loading(done, 2**31)
    assert capfd.readouterr().err == "\rloading 1.0 of 2.0 GiB\r\x1b[K"
