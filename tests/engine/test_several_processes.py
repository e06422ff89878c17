"""Two real processes with four simulated devices each: the tokens of one process, and an end of all when one of them is lost."""

import os
import signal
import socket
import sys
import time

import numpy as np
import pytest
import several
from checkpoints import released

START, END = 240, 30  # seconds until two processes answer on a busy machine, and in which a loss must be noticed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return released(tmp_path_factory.mktemp("model") / "v3", "v3", "f32")


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def pair(folder, tmp_path, port):
    """`pair(mesh, what)` are process 0 and process 1."""
    started = []

    def start(mesh: str, what: str) -> list[several.Run]:
        started.extend(several.start(folder, tmp_path, mesh, what, port, 2, number) for number in (0, 1))
        return started[-2:]

    yield start
    for run in started:
        run.process.kill()
        run.process.wait()


def found_by(runs) -> dict:
    codes = [run.ended(START) for run in runs]
    assert codes == [0] * len(runs), "\n".join(run.words() for run in runs)
    return runs[0].found()


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """One process's answers with one device, and with eight."""
    found = {}

    def on(mesh: str) -> dict:
        if mesh not in found:
            found[mesh] = found_by([several.start(folder, tmp_path_factory.mktemp("alone"), mesh, "answers")])
        return found[mesh]

    return on


def same(one: dict, other: dict) -> None:
    """All tokens; figures as far as the order of sums allows."""
    for name in ("logits", "prompt_logprobs"):
        for ours, theirs in zip(one[name], other[name], strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    figures = ("logits", "prompt_logprobs", "hits")
    assert {k: v for k, v in one.items() if k not in figures} == {k: v for k, v in other.items() if k not in figures}


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["data=8", "data=4,tensor=2"])
def test_two_processes_say_what_one_says_whatever_they_are_asked(alone, pair, mesh):
    found = found_by(pair(mesh, "answers"))
    assert found["cancelled"]
    assert "longer than the context" in found["refused"] or "too long" in found["refused"]
    same(found, alone("data=1"))
    same(found, alone(mesh))


@pytest.mark.deep
def test_guesses_are_as_many_in_both_processes_whatever_the_clock_of_each_says(alone, pair):
    same(found_by(pair("data=4,tensor=2", "drafts")), alone("data=1"))


@pytest.mark.deep
def test_experts_are_counted_over_both_processes_and_copied_by_the_counts_of_the_first(pair, folder, tmp_path_factory):
    first, second = (found_by(pair("data=8", "counts")) for _ in range(2))
    one, two = (found_by([several.start(folder, tmp_path_factory.mktemp("one"), "data=1", "counts")]) for _ in range(2))
    assert (first, first["has_copies"], second["has_copies"]) == (one, False, True)
    assert (second["tokens"], second["chosen"]) == (two["tokens"], two["chosen"])
    assert len(list(folder.parent.glob("*.counts3*"))) == 1, "of both processes the first one has the file"


def ends_with_one_error(run: several.Run, words: str, since: float) -> None:
    """A process that is left ends in time, and says why in one place."""
    code = run.ended(END)
    assert time.monotonic() - since < END
    said = run.words()
    assert code == 5, said
    assert said.count("error: ") == 1, said
    assert words in said
    assert "Traceback" not in said
    assert "*** Check failure" not in said


@pytest.mark.deep
def test_a_killed_process_ends_the_other_at_once_with_one_error(pair):
    leader, follower = pair("data=8", "endless")
    leader.await_line("running", START)
    since = time.monotonic()
    follower.process.kill()
    ends_with_one_error(leader, "process 1 of 2, on ", since)
    assert time.monotonic() - since < 10


@pytest.mark.deep
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_whoever_is_lost_ends_the_other_in_time(pair, number, how):
    runs = pair("data=4,tensor=2", "endless")
    runs[0].await_line("running", START)
    since = time.monotonic()
    os.kill(runs[number].process.pid, how)
    ends_with_one_error(runs[1 - number], f"process {number} of 2, on {socket.gethostname()}, was lost", since)


@pytest.mark.deep
def test_ctrl_c_in_process_0_leaves_both_ready_for_the_next_prompt(pair, folder, tmp_path_factory):
    found = found_by(pair("data=8", "interrupted"))
    assert found["how"] == "interrupted"
    assert [words.split(" ")[0] for words in found["refused"]] == ["trainable", "a", "this"]
    one = found_by([several.start(folder, tmp_path_factory.mktemp("one"), "data=1", "interrupted")])
    assert found["tokens"] == one["tokens"]


def command(folder, port, number, *more) -> list[str]:
    own = ("--coordinator", f"127.0.0.1:{port}", "--processes", "2", "--process-id", str(number))
    return [sys.executable, "-m", "mla_jax.generate", "--model", str(folder), "--context", "256", *own, *more]


@pytest.mark.deep
def test_the_command_line_answers_in_process_0_alone(folder, tmp_path, port):
    asked = ("a3a4a5b8d1", "--max-tokens", "8", "--ignore-eos", "--temperature", "0")
    lines = [command(folder, port, number, *asked) for number in (0, 1)]
    runs = [several.start_line(line, tmp_path, 2, number) for number, line in enumerate(lines)]
    assert [run.ended(START) for run in runs] == [0, 0], [run.words() for run in runs]
    texts = [(tmp_path / f"told2.{number}").read_text() for number in (0, 1)]
    assert len(texts[0].strip()) == 16
    assert texts[1] == ""
    assert "process 1 of 2 follows process 0" in runs[1].words()


@pytest.mark.deep
@pytest.mark.parametrize(
    ("others", "words"),
    [
        (("--batch", "4"), "process 1: batch is 4 there, 1 in process 0"),
        (("--model", "/nowhere/at/all"), "process 1 of 2, on "),
    ],
)
def test_a_process_with_other_options_or_without_the_files_ends_both(folder, tmp_path, port, others, words):
    asked = ("a3a4", "--max-tokens", "8")
    lines = [command(folder, port, 0, *asked), command(folder, port, 1, *asked, *others)]
    runs = [several.start_line(line, tmp_path, 2, number) for number, line in enumerate(lines)]
    codes = [run.ended(START) for run in runs]
    assert 0 not in codes
    assert words in runs[0].words()
    assert runs[0].words().count("error: ") == 1
