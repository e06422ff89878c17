"""The console's outputs: stdout, stderr and JSON."""

import dataclasses
import json

import jax
import pytest

from mla_jax.engine.core.request import Chunk, FinishReason
from mla_jax.engine.core.stats import Stats
from mla_jax.ui.console import COMPILED, Console, Status, summary

STATS = Stats(27, 41, 0.18, 0.65, 8.4, seed=5, bandwidth_share=0.71, peak_bytes=int(31.2 * 2**30))


def test_the_summary_is_one_line_with_every_figure():
    line = summary(STATS, "end")
    expected = ("stop: end of text", "27+41 tokens", "first 0.18 s", "61.5 tok/s (71% of bandwidth)", "peak 31.2 GiB")
    for part in (*expected, "compile 8.4 s", "seed 5"):
        assert part in line
    assert "\n" not in line


def test_what_is_not_known_or_means_nothing_is_left_out_of_the_summary():
    small = dataclasses.replace(STATS, bandwidth_share=0.004, peak_bytes=40 << 20)
    assert "61.5 tok/s · peak 40 MiB" in summary(small, "end")
    unknown = dataclasses.replace(STATS, bandwidth_share=None, peak_bytes=None)
    assert "61.5 tok/s · compile 8.4 s" in summary(unknown, "end")


def test_an_answer_without_figures_ends_without_them(capfdbinary):
    Console(as_json=False, quiet=False).done(None, "interrupted")
    assert capfdbinary.readouterr() == (b"\n", b"\n stop: interrupted\n")
    Console(as_json=True, quiet=False).done(None, "interrupted")
    assert json.loads(capfdbinary.readouterr().out) == {"event": "done", "finish_reason": "interrupted"}


def test_log_probabilities_are_a_line_per_token_on_stderr(capfd):
    logprobs = [{7: -0.105, 8: -2.5}, {9: -12.0}]
    Console(as_json=False, quiet=False).logprobs(logprobs, None)
    assert capfd.readouterr() == ("", "\n logprobs:\n  -0.105 7                -2.500 8\n -12.000 9\n")
    for silent in (Console(as_json=False, quiet=True), Console(as_json=True, quiet=False)):
        silent.logprobs(logprobs, None)
        assert capfd.readouterr() == ("", "")


def test_no_notes_print_no_line(capfd):
    Console(as_json=False, quiet=False).note()
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def status(monkeypatch) -> Status:
    """Of a terminal of 20 columns."""
    monkeypatch.setenv("COLUMNS", "20")
    return Status(enabled=True)


def test_a_status_is_shown_at_the_cursor_and_taken_away_again(status, capfd):
    status.show("compiling ...")
    status.show("compiling ...")
    status.clear()
    status.clear()
    assert capfd.readouterr().err == "\x1b7compiling ...\x1b8\x1b[K"


@pytest.mark.parametrize(("text", "shown"), [("é" * 3, True), ("x" * 7, False), ("x" * 90, False), ("x" * 90 + "\nab", True)])
def test_a_status_that_would_wrap_is_not_shown(status, capfd, text, shown):
    status.moved(text.encode())
    status.show("compiling ...")
    assert bool(capfd.readouterr().err) == shown


def test_compiling_is_shown_from_the_first_trace_until_a_program_is_compiled(status, capfd):
    console = Console(as_json=False, quiet=False)
    console.status = status
    with console.compiling():
        jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 0.1)
        assert capfd.readouterr().err == "\x1b7compiling ..."
        jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.1)
        assert capfd.readouterr().err == ""
        jax.monitoring.record_event_duration_secs(COMPILED, 0.1)
        assert capfd.readouterr().err == "\x1b8\x1b[K"
    jax.monitoring.record_event_duration_secs("/jax/core/compile/jaxpr_trace_duration", 0.1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("term", "terminal", "enabled"), [("xterm", True, True), ("dumb", True, False), ("xterm", False, False)])
def test_a_status_needs_a_terminal_that_obeys(monkeypatch, term, terminal, enabled):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    assert Console(as_json=False, quiet=False).status.enabled == enabled
    assert not Console(as_json=True, quiet=False).status.enabled
    assert not Console(as_json=False, quiet=True).status.enabled


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


def test_loading_shows_on_a_terminal_only_and_leaves_no_line(capfd, status, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    console = Console(as_json=False, quiet=False)
    console.loading(2**30, 2**31)
    assert capfd.readouterr().err == ""
    console.status = status
    for done in (2**30, 2**30 + 1, 2**31):
        console.loading(done, 2**31)
    assert capfd.readouterr().err == "\x1b7loading 1.0 of 2.0 GiB\x1b8\x1b[K"
