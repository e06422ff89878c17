"""Conversations on the command line: turns, commands, Ctrl-C, and the line editor of a terminal."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from models import FAMILIES, tensors, write
from pairs import pairs_tokenizer
from terminals import ROOT, Terminal

from mla_jax import LLM, BadRequest, SamplingParams
from mla_jax.ui.chat import COMMANDS, Chat, Conversation
from mla_jax.ui.console import Console

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
TURNS = [("user", "a1"), ("assistant", "b2"), ("user", "c3"), ("assistant", "d4")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 1, "first_k_dense_replace": 0, "max_position_embeddings": 8192}
    path = write(tmp_path_factory.mktemp("chat"), hf, tensors(hf))
    pairs_tokenizer().save(str(path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "add_bos_token": True, "chat_template": template})
    )
    return path


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder)


@pytest.fixture
def chat(llm) -> Chat:
    return Chat(llm, SHORT, Console(as_json=False, quiet=False), None)


def talk(chat: Chat, *lines: object) -> None:
    """Runs `chat` on lines; an exception among them is raised where it stands."""
    given = iter(lines)

    def read() -> str:
        line = next(given, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    assert chat.run(read) == 0


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.deep
def test_turns_alternate_and_each_answer_follows_all_before(chat, llm):
    talk(chat, "a1", "", "  ", "b2")
    first = llm.generate("a1", SHORT)[0].text
    second = llm.generate("a1" + first + "b2", SHORT)[0].text
    expected = [("user", "a1"), ("assistant", first), ("user", "b2"), ("assistant", second)]
    assert chat.conversation.messages == messages(expected)


def test_the_template_has_the_variables_of_the_command_line(llm, monkeypatch):
    template = dataclasses.replace(llm.chat_template, source="{{ bos_token }}{{ messages[-1].content }}{{ extra }}")
    monkeypatch.setattr(llm.inputs, "text", llm.inputs.text._replace(chat_template=template))
    chat = Chat(llm, SHORT, Console(as_json=False, quiet=False), None, {"extra": "b2"})
    talk(chat, "a1")
    assert chat.conversation.turns[1]["content"] == llm.generate("a1b2", SHORT)[0].text


def test_the_models_name_is_shown_and_every_command_has_a_line_of_help(chat, llm, capfd):
    talk(chat, "/help")
    shown = capfd.readouterr().err
    assert llm.name in shown
    for name in COMMANDS:
        assert f"\n  /{name} " in shown


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sytem x", "did you mean system?"),
        ("/", "there is no command"),
        ("/save", "no file given"),
        ("/load", "no file given"),
        ("/load nowhere.json", "nowhere.json cannot be read"),
        ("/drop two", "expected a number of turns"),
        ("half \ud83d", "not valid Unicode"),
    ],
)
def test_a_mistake_is_told_and_the_conversation_goes_on(chat, capfd, line, words):
    chat.conversation = Conversation("f6", messages(TURNS))
    talk(chat, line, "a1")
    assert words in capfd.readouterr().err
    assert len(chat.conversation.turns) == len(TURNS) + 2


def test_commands_change_the_conversation(chat, tmp_path):
    chat.conversation = Conversation(None, messages(TURNS))
    talk(chat, "/system e5f6", f"/save {tmp_path / 'talk.json'}", "/drop", "/exit", "a1")
    assert chat.conversation == Conversation("e5f6", messages(TURNS[2:]))
    talk(chat, "/clear")
    assert chat.conversation == Conversation("e5f6")
    talk(chat, "/system", f"/load {tmp_path / 'talk.json'}")
    assert chat.conversation == Conversation("e5f6", messages(TURNS))
    talk(chat, "/drop 7")
    assert chat.conversation.turns == []


def test_a_line_may_begin_with_a_slash_if_that_is_doubled(chat, monkeypatch):
    asked = []
    monkeypatch.setattr(chat, "ask", asked.append)
    talk(chat, "//etc/fstab", " /etc")
    assert asked == ["/etc/fstab", " /etc"]


NO_FILES = ["a" * 300, "a\0b", "half \ud83d", "/", ".", "/dev/null/a", "~nobody/" + "b" * 300]


@pytest.mark.parametrize("command", ["save", "load"])
@pytest.mark.parametrize("name", NO_FILES, ids=ascii)
def test_a_path_that_is_no_file_is_told_and_the_conversation_goes_on(chat, capfd, command, name):
    chat.conversation = Conversation("f6", messages(TURNS))
    talk(chat, f"/{command} {name}", "/drop")
    shown = capfd.readouterr().err
    assert shown.count("error: ") == 1
    assert "turns forgotten: 1, left: 1" in shown


@pytest.mark.parametrize("command", ["save", "load"])
def test_a_folder_that_may_not_be_looked_into_is_told(chat, tmp_path, command):
    tmp_path.chmod(0o000)
    user = os.geteuid()
    try:
        if user == 0:  # root may look into any
            os.seteuid(65534)
        with pytest.raises(BadRequest, match=r"cannot be (written|read)\n  Permission denied"):
            chat.take(f"/{command} {tmp_path / 'talk.json'}")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o700)


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": 5}]}',
        json.dumps({"messages": messages(TURNS[:3])}),
        json.dumps({"messages": messages(TURNS[1:])}),
    ],
)
def test_a_file_that_is_no_conversation_is_neither_loaded_nor_overwritten(chat, tmp_path, content):
    path = tmp_path / "notes.json"
    path.write_text(content)
    with pytest.raises(BadRequest):
        Conversation.load(path)
    with pytest.raises(BadRequest):
        Conversation(None, messages(TURNS)).save(path, "model")
    assert path.read_text() == content


def test_a_conversation_can_be_saved_again(tmp_path):
    for turns in (TURNS, TURNS[:2]):
        Conversation("be brief", messages(turns)).save(tmp_path / "talk.json", "model")
    assert Conversation.load(tmp_path / "talk.json") == Conversation("be brief", messages(TURNS[:2]))


def test_an_interrupted_answer_shows_its_own_figures_and_joins_as_far_as_it_came(chat, llm, monkeypatch, capfd):
    talk(chat, "a1b2c3d4")
    stream, said = llm.stream, []

    def interrupted(prompt, params):
        said.append(next(stream(prompt, params)))
        yield said[-1]
        raise KeyboardInterrupt

    monkeypatch.setattr(llm, "stream", interrupted)
    capfd.readouterr()
    talk(chat, "e5")
    # <bos>, 4 + 4, 1: not the 5+4 of the turn before
    assert f"stop: interrupted · 10+{len(said[0].token_ids)} tokens" in capfd.readouterr().err
    whole = llm.generate(chat_prompt(llm, chat), SHORT)[0].text
    assert [m["content"] for m in chat.conversation.turns[2:]] == ["e5", whole[: len(said[0].text)]]


def chat_prompt(llm: LLM, chat: Chat) -> list[int]:
    """The prompt of the last turn."""
    return llm.encode_chat(chat.conversation.turns[:-1])


def test_an_answer_interrupted_before_its_first_token_shows_no_figures_and_is_forgotten(chat, llm, monkeypatch, capfd):
    talk(chat, "a1")
    before = list(chat.conversation.turns)

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "step", interrupted)
    capfd.readouterr()
    talk(chat, "b2")
    shown = capfd.readouterr().err
    assert "stop: interrupted" in shown
    assert "tok/s" not in shown
    assert chat.conversation.turns == before


def test_ctrl_c_that_an_exception_handler_swallows_still_ends_the_answer(chat, llm, monkeypatch, capfd):
    stream = llm.stream

    def swallowing(prompt, params):
        for chunk in stream(prompt, params):
            with contextlib.suppress(KeyboardInterrupt):  # as the garbage collector does with what its callbacks raise
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            yield chunk

    monkeypatch.setattr(llm, "stream", swallowing)
    chat.sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    talk(chat, "a1")
    assert "stop: interrupted · 2+1 tokens" in capfd.readouterr().err


def test_a_turn_that_fails_is_forgotten(chat, llm, monkeypatch, capfd):
    def spoilt(prompt, params):
        raise BadRequest("it cannot be done")
        yield

    with monkeypatch.context() as patched:
        patched.setattr(llm, "stream", spoilt)
        talk(chat, "a1")
    assert "it cannot be done" in capfd.readouterr().err
    talk(chat, "a1")
    assert len(chat.conversation.turns) == 2


def test_a_full_context_is_told_and_the_oldest_turns_can_be_dropped(chat, llm, monkeypatch, capfd):
    monkeypatch.setattr(llm.inputs, "context", 8)
    talk(chat, "a1b2")  # <bos> and 2 tokens, 4 answered
    talk(chat, "c3")
    shown = capfd.readouterr().err
    assert "the context is full\n  the prompt has 8 tokens, the context holds 8\n  /drop" in shown
    assert len(chat.conversation.turns) == 2
    talk(chat, "/drop", "c3d4e5f6")  # 5 tokens leave room for 3
    assert "the context is full: /drop" in capfd.readouterr().err
    assert len(chat.conversation.turns) == 2


def test_a_system_prompt_stands_before_all_turns(llm):
    chat = Chat(llm, SHORT, Console(as_json=False, quiet=True), "f6")
    talk(chat, "a1")
    assert chat.conversation.messages[0] == {"role": "system", "content": "f6"}
    assert chat.conversation.turns[1]["content"] == llm.generate("f6a1", SHORT)[0].text


@pytest.fixture
def terminal(tmp_path):
    started = []

    def start(*arguments: object, **environment: str) -> Terminal:
        cache = {"JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path))}
        started.append(Terminal(*arguments, **cache, **environment))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.mark.deep
def test_on_a_terminal_lines_are_edited_and_recalled_and_ctrl_c_clears_and_stops(terminal, folder, llm):
    shell = terminal("--chat", "--model", folder, "--ignore-eos", "--max-tokens", 4000)
    shell.wait_for("/help lists commands")
    shell.type("/systemm\x1b[D\x7f h9\r")  # left, backspace, then typed in the middle: /syste h9m
    shell.wait_for("did you mean system?")
    shell.type("/system h9\r")
    shell.wait_for("system prompt: h9")
    shell.type("a line that is thrown away\x03")
    shell.type("/system\r")
    shell.wait_for("system prompt: h9")
    shell.type("\x1b[A\r")  # the line before, recalled
    shell.wait_for("system prompt: h9")
    shell.type("a1\r")
    shell.wait_for("compiling ...")
    shell.wait_for(llm.generate("h9a1", SHORT)[0].text[:2])  # the first token, before the loop is compiled
    shell.type("\x03")
    shell.wait_for("stop: interrupted")
    _, _, generated = shell.wait_for(" tokens").rpartition("+")
    assert 0 < int(generated) < 4000
    shell.wait_for("\x1b[?25h")  # the cursor is back, at the prompt
    shell.type("\x04")
    assert shell.process.wait(timeout=60) == 0


def test_ctrl_c_with_input_from_a_pipe_ends_the_chat(folder, tmp_path):
    environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str(tmp_path))}
    command = [sys.executable, "-m", "mla_jax.generate", "--chat", "--model", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    assert process.stderr is not None
    assert any(b"/help lists commands" in line for line in iter(process.stderr.readline, b""))
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert (process.returncode, complaint) == (130, b"interrupted\n")
