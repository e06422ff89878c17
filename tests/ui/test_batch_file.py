"""A file of prompts becomes a file of answers, in order, line by line, however often it is stopped meanwhile."""

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import compiling
import jaxtyping
import pytest
from terminals import Terminal

from mla_jax import LLM, SamplingParams
from mla_jax.base.options import OPENING, Options
from mla_jax.engine.opening.opened import open_model
from mla_jax.engine.request_groups import WAITING
from mla_jax.ui import batch_file
from mla_jax.ui.batch_file import answer_file
from mla_jax.ui.console import Console

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=4, seed=7)
LINES = [
    '{"prompt": "def f(x):", "max_tokens": 9}',
    '"import os"',
    "",
    '{"prompt": [20, 21, 22], "id": "ids", "logprobs": 1}',
    '{"messages": [{"role": "user", "content": "hello"}], "id": 99}',
    '{"prompt": "class A", "n": 2, "temperature": 1, "seed": 3, "prompt_logprobs": 0}',
    '{"prompt": "class A", "logit_bias": {"50": 100}, "stop": ["zz"]}',
]


@pytest.fixture(autouse=True, scope="module")
def no_checks_of_type():
    """Users run without the checks of the tests, and lines may hold anything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        yield


@pytest.fixture(scope="module")
def opened():
    return open_model(Options.of(cache_tokens=4096))


@pytest.fixture(scope="module")
def llm(opened) -> LLM:
    return LLM(opened)


@pytest.fixture
def files(tmp_path):
    """Paths of the prompts and of the answers."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(LINES))
    return tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"


@pytest.fixture
def run(opened, llm, files, monkeypatch):
    """Answers the file in this process; returns the exit code."""
    monkeypatch.setattr(batch_file, "LLM", lambda *_, **__: llm)
    prompts, out = files

    def once(sampling: SamplingParams = GREEDY, quiet: bool = True, out: Path | None = out) -> int:
        return answer_file(opened, str(prompts), out, sampling, Console(as_json=False, quiet=quiet))

    return once


def answers(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def tokens(lines: bytes) -> list:
    """Ids of lines and their tokens: the last digits of log-probabilities depend on how many rows are computed together."""
    return [
        [answer["id"], *(one["token_ids"] for one in answer.get("answers", [answer]))]
        for answer in map(json.loads, lines.splitlines())
    ]


def idle(llm: LLM) -> bool:
    engine = llm.engine
    llm._worker.join()
    return not engine.jobs and not engine.running and engine.shards[0].pages.free == engine.size.pages


# what is written


@pytest.mark.deep
def test_every_line_gets_what_generate_gives_in_order(run, llm, files):
    assert run() == 0
    first, second, ids, chat, forked, biased = answers(files[1])
    assert [a["id"] for a in (first, second, ids, chat, forked, biased)] == [1, 2, "ids", 99, 6, 7]
    (expected,) = llm.generate("def f(x):", SamplingParams(temperature=0, max_tokens=9))
    assert (first["text"], first["token_ids"]) == (expected.text, expected.token_ids)
    assert first["finish_reason"] == expected.finish_reason
    assert first["usage"] == {"prompt_tokens": len(expected.prompt_token_ids), "generated_tokens": len(expected.token_ids)}
    assert len(second["token_ids"]) <= 4
    assert second["seed"] == 7
    assert "logprobs" not in second
    assert [len(one) for one in ids["logprobs"]] == [len({*one}) for one in ids["logprobs"]]
    assert len(ids["logprobs"]) == len(ids["token_ids"])
    assert chat["token_ids"] == llm.chat([{"role": "user", "content": "hello"}], GREEDY).token_ids
    twice = llm.generate("class A", SamplingParams(temperature=1, max_tokens=4, seed=3, n=2))
    assert [(a["seed"], a["token_ids"]) for a in forked["answers"]] == [(3, twice[0].token_ids), (4, twice[1].token_ids)]
    assert forked["usage"]["generated_tokens"] == sum(len(output.token_ids) for output in twice)
    assert forked["prompt_logprobs"][0] is None
    assert set(biased["token_ids"]) == {50}


@pytest.mark.deep
def test_without_a_file_for_them_answers_go_to_stdout_and_figures_to_stderr(run, files, capfdbinary):
    assert run(quiet=False, out=None) == 0
    shown = capfdbinary.readouterr()
    assert [json.loads(line)["id"] for line in shown.out.splitlines()] == [1, 2, "ids", 99, 6, 7]
    assert b" 6 lines answered" in shown.err
    assert run() == 0
    assert files[1].read_bytes() == shown.out


@pytest.mark.deep
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("def f(x):", "the line is not valid JSON"),
        ('{"prompt": "a", "prompt": "b"}', "key given twice: prompt"),
        ("[1, 2]", 'expected an object with "prompt" or "messages", or a text'),
        ("7", "the line is 7"),
        ("{}", "found an empty object"),
        ('{"id": 5}', 'expected either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', 'expected either "prompt" or "messages"'),
        ('{"promt": "a"}', "unknown key promt: did you mean prompt?"),
        ('{"custom_id": "x", "body": [5]}', "the body is [5]: expected an object"),
        ('{"custom_id": "x", "url": "/v1/embeddings", "body": {}}', "expected POST /v1/chat/completions or"),
        ('{"custom_id": "x", "bdy": {}, "body": {}}', "unknown key bdy beside body: did you mean body?"),
        ('{"prompt": "a", "tools": [{"type": "function"}]}', "tools needs messages"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}', "tool 0 has no function"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": 1}}',
            "chat_template_kwargs sets tools",
        ),
        ('{"prompt": "a", "id": [1]}', "the id is [1]"),
        ('{"prompt": "a", "temperature": "warm"}', "temperature is 'warm', expected a number 0 to 1,000"),
        ('{"prompt": "a", "n": 1000000}', "n is 1000000, expected a whole number 1 to 128"),
        (json.dumps({"prompt": "a", "stop": ["x"] * 10_000}), "expected at most 64"),
        ('{"prompt": "a", "max_tokens": 100000}', "max_tokens 100,000 does not fit the context"),
        (json.dumps({"prompt": [5] * 20_000}), "the prompt is too long: 20,000 tokens"),
        ('{"prompt": [9999999]}', "is not in the vocabulary"),
        ('{"prompt": ["a"]}', "neither text nor a list of token ids"),
        ('{"messages": [{"role": "user"}]}', "the content of message 0 is not text"),
        ('{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ("[" * 100_000, "nested too deeply"),
        ('{"prompt": "' + "a" * 3000 + '"}', "the line is too long"),
    ],
    ids=lambda value: value[:40],
)
def test_a_bad_line_is_reported_and_has_its_place_and_the_others_are_answered(run, files, capsys, monkeypatch, line, words):
    if "too long" in words and "line" in words:
        monkeypatch.setattr(batch_file, "MAX_LINE", 2000)
    files[0].write_text("\n".join(['"import os"', "", line, '"import os"', ""]))
    assert run() == 2
    first, bad, last = answers(files[1])
    name = bad["custom_id"] if "custom_id" in bad else bad["id"]
    assert (first["id"], name, last["id"]) == (1, "x" if "custom_id" in line else 5 if line == '{"id": 5}' else 3, 4)
    assert words in bad["error"]
    assert first["text"] == last["text"]
    error = capsys.readouterr().err
    assert error.startswith("error: line 3: ")
    assert error.count("error") - bad["error"].count("error") == 1
    before = files[1].read_bytes()
    assert run() == 2, "there is an error among the answers, from the earlier run"
    assert files[1].read_bytes() == before


def test_a_chat_has_its_tools_and_variables_and_may_be_continued(run, llm, files, monkeypatch):
    source = "{{ messages[-1].content }}{{ tools[0].function.name if tools }}{{ thinking }}{{ add_generation_prompt }}"
    written = dataclasses.replace(llm.chat_template, source=source)
    monkeypatch.setattr(llm.inputs, "text", llm.inputs.text._replace(chat_template=written))
    chat = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
        "tools": [{"type": "function", "function": {"name": "look"}}],
        "chat_template_kwargs": {"thinking": True},
    }
    continued = {"messages": [{"role": "assistant", "content": "It is"}], "continue_final_message": True}
    lines = [chat, {**chat, "add_generation_prompt": False}, continued, {"prompt": "x", "tools": [], "chat_template_kwargs": {}}]
    files[0].write_text("\n".join(map(json.dumps, lines)))
    assert run() == 0
    expected = ["qlookTrueTrue", "qlookTrueFalse", "It is", "x"]
    assert [a["token_ids"] for a in answers(files[1])] == [o.token_ids for o in llm.generate(expected, GREEDY)]


@pytest.mark.deep
def test_lines_for_openai_get_the_answers_of_ours(run, files):
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}], "name": None}]
    body = {"model": "any", "messages": parts, "max_completion_tokens": 5.0, "stop": None, "top_k": -1, "user": "u"}
    envelope = {"custom_id": "one", "method": "POST", "url": "/v1/chat/completions", "body": body}
    completion = {"custom_id": "two", "body": {"prompt": "class A", "seed": None, "logprobs": None, "max_tokens": 3}}
    ours = {"id": "two", "prompt": "class A", "max_tokens": 3}
    files[0].write_bytes(b"\xef\xbb\xbf" + "\n".join(map(json.dumps, (chat, envelope, completion, ours))).encode())
    assert run() == 0
    found = answers(files[1])
    assert [answer.get("custom_id", answer.get("id")) for answer in found] == [1, "one", "two", "two"]
    assert "id" not in found[1]
    assert found[0]["token_ids"] == found[1]["token_ids"]
    assert found[2]["token_ids"] == found[3]["token_ids"]
    before = files[1].read_bytes()
    assert run() == 0
    assert files[1].read_bytes() == before


def test_bad_bytes_are_a_bad_line(run, files):
    files[0].write_bytes(b'"a"\n\xff\xfe\n"b"')
    assert run() == 2
    assert [("error" in answer) for answer in answers(files[1])] == [False, True, False]


@pytest.mark.deep
def test_logits_that_are_not_finite_end_with_their_exit_code(run, llm, files):
    norm = llm.model.norm[...]
    try:
        llm.model.norm.set_value(norm * float("nan"))
        assert run() == 1
    finally:
        llm.model.norm.set_value(norm)
    assert answers(files[1])[0]["finish_reason"] == "error"


# what goes on behind what is there


@pytest.fixture(scope="module")
def whole(opened, llm, tmp_path_factory) -> bytes:
    """The answers of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    prompts, out = folder / "prompts.jsonl", folder / "answers.jsonl"
    prompts.write_text("\n".join(LINES))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_file, "LLM", lambda *_, **__: llm)
        assert answer_file(opened, str(prompts), out, GREEDY, Console(as_json=False, quiet=True)) == 0
    return out.read_bytes()


@pytest.mark.deep
def test_a_second_run_goes_on_wherever_the_first_was_cut(run, files, whole, monkeypatch):
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in sorted({0, 60, *(end + step for end in ends[:3] for step in (-1, 0, 1, 30)), *ends[3:]}):
        files[1].write_bytes(whole[:cut])
        assert run() == 0
        assert tokens(files[1].read_bytes()) == tokens(whole), cut
    monkeypatch.setattr(batch_file, "LLM", lambda *_, **__: pytest.fail("nothing is left to be answered"))
    files[1].write_bytes(whole)
    assert run() == 0
    assert files[1].read_bytes() == whole


@pytest.mark.parametrize(
    "change", ["a prompt", "an id", "fewer prompts", "settings", "notes", "notes without end", "a brace", "a number", "a folder"]
)
def test_answers_to_something_else_are_refused_and_stay_as_they_are(run, files, whole, change, capsys):
    sampling, words = GREEDY, "is not from an earlier run of this command"
    files[1].write_bytes(whole)
    if change == "a prompt":
        files[0].write_text(files[0].read_text().replace("import os", "import re"))
    elif change == "an id":
        files[0].write_text(files[0].read_text().replace('"ids"', '"id"'))
    elif change == "fewer prompts":
        files[0].write_text("\n".join(LINES[:-1]))
    elif change == "settings":
        sampling = SamplingParams(temperature=0, max_tokens=5, seed=7)
    elif change in ("a brace", "a number"):
        files[1].write_text("{" if change == "a brace" else '{"id": 1')
    elif change.startswith("notes"):
        files[1].write_text("milk\nbread\n" if change == "notes" else "milk")
    else:
        files[1].unlink()
        files[1].mkdir()
        words = "cannot be written"
    before = files[1].read_bytes() if files[1].is_file() else None
    with pytest.raises(batch_file.BadRequest, match=words):
        run(sampling)
    assert before is None or files[1].read_bytes() == before


OTHER = {  # another value of each setting
    "model": "demo",
    "dtype": "bfloat16",
    "context": 100,
    "attention": "naive",
    "kv_cache": "fp8",
    "experts": "host",
    "host_layers": 1,
    "host_precision": "int8",
    "host_folder": "packed",
    "defer": 1,
    "stream_tokens": 64,
    "routing_stats": "counts.json",
    "device_experts": 1,
    "draft": "lookup",
    "draft_tokens": 2,
    "evict": "snapkv",
    "evict_budget": "pyramid",
    "evict_keep": 0.5,
    "evict_chunk": 128,
    "evict_sinks": 8,
    "evict_recent": 16,
    "retrieve": "quest",
    "retrieve_tokens": 512,
    "retrieve_window": {"retrieve": "infllm", "retrieve_tokens": 1024, "retrieve_window": 256},
    "memory_fraction": 0.5,
    "batch": 2,
    "cache_tokens": 8192,
    "max_rows": 8,
    "max_waiting": 8,
    "host_cache": 1,
    "mesh": "data=2",
    "device": "h100",
    "coordinator": {"coordinator": "a:1", "processes": 2, "process_id": 0},
    "processes": {"coordinator": "a:1", "processes": 2, "process_id": 0},
    "process_id": {"coordinator": "a:1", "processes": 2, "process_id": 0},
}
# Settings by which a run may go on with other values: they change where and how fast the same is computed
FREE = {
    "model", "host_folder", "stream_tokens", "routing_stats", "device_experts", "draft", "draft_tokens", "memory_fraction",
    "batch", "max_rows", "max_waiting", "cache_tokens", "host_cache", "mesh", "device", "coordinator", "processes", "process_id",
}  # fmt: skip


def test_each_setting_is_said_to_change_answers_or_not_and_those_that_do_are_in_the_digest(opened):
    assert OTHER.keys() == set(OPENING)
    before = batch_file._settings(opened, GREEDY)
    for name, value in OTHER.items():
        changed = opened.options.replace(**(value if isinstance(value, dict) else {name: value}))
        after = batch_file._settings(dataclasses.replace(opened, options=changed), GREEDY)
        assert (after == before) == (name in FREE), name


def test_the_model_is_told_by_its_files_wherever_they_are(tmp_path):
    first, second = tmp_path / "a/model", tmp_path / "b/model"
    demo = Path(batch_file.__file__).parents[1] / "demo"
    shutil.copytree(demo, first)
    shutil.copytree(demo, second)

    def digest() -> bytes:
        return batch_file._settings(open_model(Options.of(model=second)), GREEDY)

    before = batch_file._settings(open_model(Options.of(model=first)), GREEDY)
    assert digest() == before
    (second / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5, "eos_token_id": 3}')
    assert digest() != before
    shutil.copy(first / "generation_config.json", second)
    assert digest() == before
    with open(second / "model.safetensors", "r+b") as file:
        file.seek(5_000_000)
        file.write(bytes(100_000))
    assert digest() != before


def test_more_prompts_at_the_end_of_the_file_are_answered_by_a_second_run(run, files, whole):
    files[1].write_bytes(whole)
    with open(files[0], "a") as file:
        file.write('\n"import re"\n')
    assert run() == 0
    assert files[1].read_bytes().startswith(whole)
    assert len(answers(files[1])) == 7


def test_two_runs_cannot_write_one_file(run, files):
    with batch_file.Answers(str(files[1])), pytest.raises(batch_file.BadRequest, match="is being written by another process"):
        run()


@pytest.mark.deep
def test_ctrl_c_gives_pages_back_leaves_whole_lines_and_says_how_to_go_on(run, llm, files, whole, monkeypatch, capsys):
    write = batch_file.Answers.write

    def interrupted(self, *arguments, **options):
        write(self, *arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch_file.Answers, "write", interrupted)
        for done in range(1, 4):
            assert run(quiet=False) == 130
            shown = capsys.readouterr().err
            assert f" interrupted: {done} line{'s' * (done > 1)} answered" in shown
            assert "the same command goes on behind them" in shown
            assert files[1].read_bytes().endswith(b"}\n")
            assert tokens(files[1].read_bytes()) == tokens(whole)[:done]
            assert idle(llm)
    assert run() == 0
    assert tokens(files[1].read_bytes()) == tokens(whole)


@pytest.mark.deep
def test_of_a_long_file_few_requests_are_in_the_engine_at_once(run, llm, files, monkeypatch):
    files[0].write_text("".join(f'{{"prompt": [{20 + i}], "max_tokens": 1}}\n' for i in range(300)))
    most, step = 0, llm.engine.step

    def watched():
        nonlocal most
        most = max(most, len(llm.engine.jobs))
        step()

    monkeypatch.setattr(llm.engine, "step", watched)
    assert run() == 0
    assert [answer["id"] for answer in answers(files[1])] == list(range(1, 301))
    assert most == WAITING * llm.engine.size.rows < 300


def test_a_million_lines_are_read_a_few_at_a_time(files):
    def prompts():
        yield from (b'"%d"\n' % i for i in range(1_000_000))
        pytest.fail("all lines were read")

    class Endless:
        def __init__(self):
            self.lines = prompts()

        def readline(self, _):
            return next(self.lines)

    with batch_file.ThreadPoolExecutor(2) as threads:
        found = batch_file.ahead(lambda line: line.number, batch_file.batch_lines(Endless()), threads)
        assert [next(found) for _ in range(1000)] == list(range(1, 1001))


# the command line


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "mla_jax.generate", *map(str, arguments)]


def flags(files: tuple[Path, Path]) -> tuple:
    return ("--batch-file", files[0], "--out", files[1], "--temperature", 0, "--ignore-eos", "--seed", 1, "--max-tokens", 400)


def wait_for_lines(process: subprocess.Popen, path: Path, lines: int) -> None:
    end = time.monotonic() + 600
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, "it ended before it was stopped"
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.deep
@pytest.mark.slow
def test_killed_or_interrupted_the_same_command_resumes_and_loses_and_repeats_nothing(llm, files):
    prompts = [{"prompt": [20 + i, 30 + i], "max_tokens": 10 + 2 * i} for i in range(60)]
    files[0].write_text("\n".join(map(json.dumps, prompts)))
    environment = compiling.as_users()
    for lines, stop in ((2, signal.SIGKILL), (25, signal.SIGINT)):
        process = subprocess.Popen(command(*flags(files)), stderr=subprocess.PIPE, cwd=ROOT, env=environment)
        wait_for_lines(process, files[1], lines)
        process.send_signal(stop)
        said = process.communicate(timeout=600)[1].decode()
        assert process.returncode == (130 if stop == signal.SIGINT else -9)
        assert "Traceback" not in said
        if stop == signal.SIGINT:
            assert " interrupted: " in said
        kept = files[1].read_bytes()
        assert lines <= kept.count(b"\n") < len(prompts)
        with open(files[1], "ab") as file:  # as a kill in the middle of a write leaves it
            file.write(b'{"id": %d, "dig' % (kept.count(b"\n") + 1) if kept.endswith(b"\n") else b"")
    done = subprocess.run(command(*flags(files)), stderr=subprocess.PIPE, cwd=ROOT, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    found = answers(files[1])
    assert [answer["id"] for answer in found] == list(range(1, 61))
    assert [len(answer["token_ids"]) for answer in found] == [prompt["max_tokens"] for prompt in prompts]
    expected = llm.generate(
        [prompt["prompt"] for prompt in prompts[:8]],
        [SamplingParams(temperature=0, ignore_eos=True, max_tokens=prompt["max_tokens"]) for prompt in prompts[:8]],
    )
    assert [answer["token_ids"] for answer in found[:8]] == [output.token_ids for output in expected]
    other = subprocess.run(command(*flags(files), "--top-k", 5), capture_output=True, cwd=ROOT, env=environment, timeout=600)
    assert other.returncode == 2
    assert b"is not from an earlier run of this command" in other.stderr


@pytest.mark.deep
def test_a_terminal_shows_a_bar_and_stdin_can_be_the_file(tmp_path, files):
    files[0].write_text("\n".join(f'{{"prompt": [{20 + i}], "max_tokens": 2}}' for i in range(40)))
    terminal = Terminal("--batch-file", files[0], "--out", files[1], "--seed", 1, **compiling.as_users())
    shown = terminal.to_the_end()
    terminal.close()
    assert "40/40" in shown
    assert "tokens/s" in shown
    assert " 40 lines answered" in shown
    piped = subprocess.run(
        command("--batch-file", "-", "--seed", 1, "--quiet"),
        input=files[0].read_bytes(),
        capture_output=True,
        cwd=ROOT,
        env=compiling.as_users(),
        timeout=600,
    )
    assert piped.returncode == 0
    assert piped.stderr == b""
    assert piped.stdout == files[1].read_bytes()
