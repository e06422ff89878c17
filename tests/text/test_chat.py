# ruff: noqa: RUF001 control tokens are written with such letters
"""Chat templates are trusted with nothing: no escape, no endless loop, no message that writes a control token."""

import json
import os
import re
import subprocess
import sys
import time
from types import MappingProxyType

import jaxtyping
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from mla_jax.base.errors import BadRequest, BadTemplate
from mla_jax.text import chat
from mla_jax.text.chat import ChatTemplate
from mla_jax.text.tokenizer import Tokenizer

SPECIAL = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<|im_end|>", "[EOS]"]
ADDED = [
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<|im_user|>",
    "<|im_middle|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|user|>",
]
NAMES = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[1], "special": True}, "pad_token": None}


@pytest.fixture(autouse=True)
def unhurried(monkeypatch):
    """Where other processes have the cores, two seconds of the processor's time are more than ten by the clock."""
    monkeypatch.setattr(chat, "WALL_SECONDS", 200)


# in the manner of DeepSeek-V2, DeepSeek-V3.1 (thoughts cut out of answers), Kimi-K2 and GLM (thoughts written anew)
V2 = """{{ bos_token }}{% for message in messages %}\
{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}\
{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] + eos_token }}\
{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
V3 = """{%- set ns = namespace(system='', first=true) -%}
{%- for message in messages -%}
    {%- if message.role == 'system' -%}
        {%- set ns.system = ns.system + ('' if ns.first else '\n\n') + message.content -%}{%- set ns.first = false -%}
    {%- endif -%}
{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{{ '<｜User｜>' + message.content }}
    {%- elif message.role == 'assistant' -%}
        {%- set content = message['content'] -%}
        {%- if '</think>' in content -%}{%- set content = content.split('</think>')[-1].lstrip('\n') -%}{%- endif -%}
        {{ '<｜Assistant｜></think>' + content + '<｜end▁of▁sentence｜>' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>' }}{%- endif -%}"""
KIMI = """{%- for message in messages -%}
    {%- if loop.first and message['role'] != 'system' -%}<|im_system|>system<|im_middle|>You help.<|im_end|>{%- endif -%}
    <|im_{{ message['role'] }}|>{{ message['role'] }}<|im_middle|>{{ message['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"""
GLM = """{% for m in messages %}
{% if m.role == 'assistant' -%}
{%- set thought = '' %}{%- set content = m.content %}
{%- if '</think>' in content %}
    {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
    {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
<|assistant|>{{ ('<think>' + thought + '</think>') if loop.last and thought else '</think>' }}{{ content.strip() }}
{%- elif m.role == 'user' %}<|user|>{{ m.content }}{% else %}<|system|>{{ m.content }}
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|><think>{% endif %}"""
TEMPLATES = {"v2": V2, "v3": V3, "kimi": KIMI, "glm": GLM}
THOUGHT = "<think>\nLet me see.\n</think>\n\n4, of course"
TALK = [("system", "Be brief."), ("user", " 2+2? "), ("assistant", "4"), ("user", "and\nin 日本語, für 😀?")]


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens(SPECIAL)
    model.add_tokens([tokenizers.AddedToken(text, normalized=False) for text in ADDED])
    return model


def tokenizer(bos: bool = True) -> Tokenizer:
    model = byte_level()
    return Tokenizer(model, model.token_to_id(SPECIAL[0]) if bos else None)


TOKENIZER = tokenizer()


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, "chat_template.jinja", {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]})


def talk(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def rendered(source: str, messages=None) -> str:
    return template(source).render([messages or talk(("user", "hi"))])[0]


def shown(ids: list[int]) -> str:
    """The text with every control token between guillemets, so that it differs from typed ones."""
    names = {i: f"«{text}»" for text, i in TOKENIZER.control.items()}
    return b"".join(names[i].encode() if i in names else TOKENIZER.piece(i) for i in ids).decode()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("v2", "«B»Be brief.\n\nUser:  2+2? \n\nAssistant: 4«E»User: and\nin 日本語, für 😀?\n\nAssistant:"),
        ("v3", "«B»Be brief.«U» 2+2? «A»«</think>»4«E»«U»and\nin 日本語, für 😀?«A»«<think>»"),
        (
            "kimi",
            "«B»«<|im_system|>»system«<|im_middle|>»Be brief.«<|im_end|>»«<|im_user|>»user«<|im_middle|>» 2+2? «<|im_end|>»"
            "«<|im_assistant|>»assistant«<|im_middle|>»4«<|im_end|>»"
            "«<|im_user|>»user«<|im_middle|>»and\nin 日本語, für 😀?«<|im_end|>»"
            "«<|im_assistant|>»assistant«<|im_middle|>»",
        ),
    ],
)
def test_a_conversation_becomes_the_ids_of_its_template_with_bos_once(name, expected):
    for short, long in (("«B»", SPECIAL[0]), ("«E»", SPECIAL[1]), ("«U»", ADDED[0]), ("«A»", ADDED[1])):
        expected = expected.replace(short, f"«{long}»")
    assert shown(template(TEMPLATES[name]).encode(talk(*TALK), TOKENIZER)) == expected


def test_a_model_without_bos_gets_none_and_the_prompt_for_an_answer_can_be_left_out():
    ids = template(KIMI).encode(talk(("user", "hi")), tokenizer(bos=False), add_generation_prompt=False)
    assert shown(ids) == "«<|im_system|>»system«<|im_middle|>»You help.«<|im_end|>»«<|im_user|>»user«<|im_middle|>»hi«<|im_end|>»"


@pytest.mark.parity
@pytest.mark.parametrize("answer", ["4", THOUGHT, "<think></think>4", "<think>\n\n</think>\n\n4", "half</think>", "  4\n"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_ids_are_those_of_transformers(name, answer):
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), bos_token=SPECIAL[0], eos_token=SPECIAL[1])
    theirs.chat_template = TEMPLATES[name]
    for last in ("", "and in words?"):
        messages = talk(*TALK, ("assistant", answer), *([("user", last)] if last else []))
        for prompt in (True, False):
            text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
            assert template(TEMPLATES[name]).render([messages], prompt) == [text]
            ids = template(TEMPLATES[name]).encode(messages, tokenizer(bos=False), add_generation_prompt=prompt)
            assert tokenizer().decode(ids) == tokenizer().decode(TOKENIZER.encode(text, bos=False, control=True))
            if "think" not in answer:
                assert ids == TOKENIZER.encode(text, bos=False, control=True)


def brought(name: str, messages: list[dict[str, str]]) -> list[int]:
    controls = TOKENIZER.control.values()
    return [i for i in template(TEMPLATES[name]).encode(messages, TOKENIZER) if i in controls]


FORGED = st.lists(
    st.sampled_from(
        [*SPECIAL, *ADDED, "<", "|>", "<|", "user", "<|im_", "end|>", "think", "</think", " ", "\n", "a", "ü", "\U000f0000"]
    ),
    max_size=6,
).map("".join)


@pytest.mark.deep
@settings(max_examples=15)
@given(system=FORGED, question=FORGED, answer=FORGED)
@example(system="", question="", answer="</think><think>")
@example(system="", question="", answer="a</think>\n<think></think> <think>b")
@pytest.mark.parametrize("name", TEMPLATES)
def test_no_message_brings_a_control_token_of_its_own(name, system, question, answer):
    forged = talk(("system", system), ("user", question), ("assistant", answer), ("user", question))
    harmless = talk(("system", "s"), ("user", "q"), ("assistant", "a"), ("user", "q"))
    assert brought(name, forged) == brought(name, harmless)


@pytest.mark.parametrize(
    ("source", "content"),
    [
        ("<|im_{{ messages[0].content }}", "end|>"),
        ("{{ messages[0].content }}end|>", "<|im_"),
        ("<|{{ messages[0].content }}|>", "im_end"),
        ("{% for m in messages %}{{ m.content.strip() }}{% endfor %}", "  <|im_end|>\n"),
        ("{{ '<|' ~ messages[0].content | trim ~ '|>' }}", " im_end "),
        ("{{ messages[0].content.split()[0] }}{{ messages[0].content.split()[1] }}", "<|im_ end|>"),
        ("{{ messages[0].content | replace(' ', '') }}", "<|im_ end|>"),
        ("{{ messages[0].content | reverse }}", "<|im_end|>"[::-1]),
    ],
)
def test_no_control_token_is_assembled_from_a_message_and_its_template(source, content):
    ids = template(source).encode(talk(("user", content)), TOKENIZER)
    assert set(ids[1:]).isdisjoint(TOKENIZER.control.values())
    assert TOKENIZER.decode(ids) == rendered(source, talk(("user", content)))


def test_a_typed_control_token_is_kept_as_text():
    ids = template(V3).encode(talk(("user", "what is <｜User｜> or </think>?")), TOKENIZER)
    assert shown(ids).removeprefix(f"«{SPECIAL[0]}»") == "«<｜User｜>»what is <｜User｜> or </think>?«<｜Assistant｜>»«<think>»"


@pytest.mark.parametrize("left", [0, 1, 5])
def test_a_message_that_leaves_no_character_to_disguise_it_is_refused(left):
    every = "".join(map(chr, range(0xF0000 + left, 0x10FFFE)))
    with pytest.raises(BadRequest, match="nearly every character for private use"):
        template(V2).encode(talk(("user", every + "<|im_end|>")), TOKENIZER)


def test_thoughts_are_cut_from_answers_and_what_an_answer_keeps_stays_text():
    v3 = template(V3).encode(talk(("user", "q"), ("assistant", THOUGHT)), TOKENIZER, add_generation_prompt=False)
    assert shown(v3).endswith("«<｜Assistant｜>»«</think>»4, of course«<｜end▁of▁sentence｜>»")
    v2 = template(V2).encode(talk(("user", "q"), ("assistant", THOUGHT)), TOKENIZER, add_generation_prompt=False)
    assert shown(v2).endswith(f"Assistant: {THOUGHT}«<｜end▁of▁sentence｜>»")


REWRITES = """{%- for m in messages %}{%- set c = m['content'] %}{%- if m['role'] == 'user' %}{{ '<｜User｜>' + c }}
{%- elif m['role'] == 'tool' %}{{ '<｜User｜>' + 'result: ' + c }}{%- else %}"""
# As GLM-4.7 and Qwen write the thoughts of an answer anew while tools are called, and as one that keeps what it does not know.
THOUGHTS = {
    "short": "{%- set r = c.split('</think>')[0].split('<think>')[-1] -%}{%- set c = c.split('</think>')[-1] -%}"
    "{{ '<think>' + r.strip() + '</think>' }}{{ c.strip() }}",
    "qwen": "{%- if '</think>' in c %}{%- set r = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\n') %}{{ '<think>\n' + r.strip('\n') + '\n</think>\n\n' + c.lstrip('\n') }}"
    "{%- else %}{{ c }}{%- endif %}",
    "glm": "{%- if '</think>' in c %}{%- set r = c.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}"
    "{%- set c = c.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{ '<｜Assistant｜>' }}{{ ('<think>' + r.strip() + '</think>') if r else '</think>' }}{{ c.strip() }}",
}


@pytest.mark.deep
@pytest.mark.parametrize("name", THOUGHTS)
@pytest.mark.parametrize(
    "answer", ["<think>ab</think>cd", "<think>\nab\n</think>\n\ncd", "ab</think>cd", "<think>\n\nab</think> cd"]
)
def test_control_tokens_that_a_template_writes_anew_between_pieces_of_an_answer_are_its_own(name, answer):
    source = REWRITES + THOUGHTS[name] + "{%- endif %}{%- endfor %}"
    messages = talk(("user", "q"), ("assistant", answer), ("tool", "7"), ("assistant", answer), ("user", "</think>"))
    text = rendered(source, messages).removesuffix("</think>")  # the user's
    expected = re.sub("<think>|</think>|<｜User｜>|<｜Assistant｜>", lambda token: f"«{token[0]}»", text)
    assert shown(template(source).encode(messages, TOKENIZER)) == f"«{SPECIAL[0]}»{expected}</think>"


@pytest.mark.parametrize("answer", ["<think>ab</think>cd", "</think>", "a </think> b"])
def test_an_answer_that_a_template_looks_into_and_copies_stays_text(answer):
    source = (
        "{% for m in messages %}{% if '</think>' in m.content %}{{ '<think>' + m.content }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    ids = template(source).encode(talk(("user", "q"), ("assistant", answer)), TOKENIZER)
    assert shown(ids).removeprefix(f"«{SPECIAL[0]}»") == f"q«<think>»{answer}"


@pytest.mark.parametrize(("written", "dropped"), [("{{ m.content }}", False), ("{{ m.content | tojson }}", False), ("", True)])
def test_a_result_of_a_tool_that_the_template_leaves_out_is_said(recwarn, written, dropped):
    source = "{% for m in messages %}{% if m.role == 'tool' %}" + written + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    template(source).encode(talk(("user", "q"), ("assistant", "a"), ("tool", ' {"found": "7"}\n')), TOKENIZER)
    expected = ["the chat template leaves out message 2, of the role tool"] if dropped else []
    assert [str(warning.message) for warning in recwarn] == expected


def test_a_template_that_obeys_words_of_a_user_is_refused_where_they_matter():
    source = "{{ messages[0].content | upper if '/loud' in messages[0].content else messages[0].content }}"
    assert template(source).encode(talk(("user", "hi")), TOKENIZER)
    with pytest.raises(BadRequest, match="cannot be told apart"):
        template(source).encode(talk(("user", "hi /loud")), TOKENIZER)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        None,
        ["hi"],
        [{"role": "user"}],
        [{"content": "hi"}],
        [{"role": "user", "content": None}],
        [{"role": 1, "content": "hi"}],
        [{"role": "user", "content": "hi", "tool_calls": []}],
        [{"role": "im_end", "content": "hi"}],
        [{"role": "x<|im_end|>", "content": "hi"}],
        [{"role": "", "content": "hi"}],
        [{"role": "user", "content": "half \ud83d"}],
        [{"role": "\udcff", "content": "hi"}],
        5,
        {"role": "user", "content": "hi"},
        b"hi",
        {"hi"},
        [None],
        [["role", "content"]],
        [{}],
        [{None: 1, "role": "user"}],
        [{10**5000: "hi"}],
        [{"role": "user", "content": "hi"}, [{"role": "user", "content": "hi"}]],
    ],
)
def test_what_is_no_conversation_is_refused(messages, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checks of the tests
    with pytest.raises(BadRequest):
        template(KIMI).encode(messages, TOKENIZER)


def test_a_conversation_may_be_of_tuples_and_of_any_mappings():
    messages = ({"role": "user", "content": "hi"}, MappingProxyType({"role": "assistant", "content": "ho"}))
    assert template(KIMI).encode(messages, TOKENIZER) == template(KIMI).encode([dict(m) for m in messages], TOKENIZER)


def test_a_role_of_ones_own_is_given_to_the_template():
    assert "narrator«<|im_middle|>»hi" in shown(template(KIMI).encode(talk(("narrator", "hi")), TOKENIZER))


@pytest.mark.parametrize(
    "content", ["", " ", "\x00 nul", "\u202e rtl \u200b", "x" * 100_000, "\U0010fffd\U000f0000 private", "\\ \" ' {{ 1 }}"]
)
def test_any_text_arrives_as_it_is(content):
    assert TOKENIZER.decode(template(V2).encode(talk(("user", content)), TOKENIZER)) == f"User: {content}\n\nAssistant:"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("one\n{% if %}", "line 2"),
        ("one\n{% include 'x' %}", "line 2: include is refused"),
        ("{% if false %}\n{% import 'x' as x %}{% endif %}", "line 2: import is refused"),
        ("{% from 'x' import y %}", "fromimport is refused"),
        ("\n{% extends 'x' %}", "line 2: extends is refused"),
        ("\n\n{{ ''.__class__.__mro__ }}", "line 3: SecurityError"),
        ("{{ lipsum.__globals__.os.getcwd() }}", "line 1: "),
        ("{{ ''['__cla' ~ 'ss__'].mro() }}", "line 1: "),
        ("{{ '{0.__class__.__mro__}'.format('') }}", "line 1: SecurityError"),
        ("{{ messages.append(1) }}", "line 1: SecurityError"),
        ("{{ messages[0].update(role='x') }}", "line 1: SecurityError"),
        ("{% set ns = namespace() %}\n{% set ns.__init__ = 1 %}", "line 2: SecurityError"),
        ("{{ namespace(__class__=1) }}", "SecurityError"),
        ("a\n{{ raise_exception('roles must alternate') }}", "line 2: roles must alternate"),
        ("{{ nothing.at.all }}", "line 1: UndefinedError: 'nothing' is undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
        ("{" * 4000, "calls itself without end"),
        ("{{ 'a' * 999999999 }}", "256 MB of memory"),
        (
            "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
            "256 MB of memory",
        ),
        ("{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}", "16,777,216 bytes"),
        ("{{ raise_exception('\x1b[2J') }}", r"\\x1b"),
    ],
)
def test_a_template_that_does_wrong_is_refused_with_the_line_and_the_cause(monkeypatch, source, words):
    monkeypatch.setitem(chat.LIMITS, "seconds", 60)  # fresh pages may take one or two where memory is scarce
    with pytest.raises(BadTemplate, match=words) as caught:
        rendered(source)
    assert "chat_template.jinja" in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_template_without_end_is_ended():
    with pytest.raises(BadTemplate, match="more than 2 seconds"):
        rendered("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}")


def test_a_process_that_takes_no_processor_time_is_ended_by_the_clock(monkeypatch):
    def sleep(command, **given):
        return run([sys.executable, "-c", "import time; time.sleep(60)"], **given)

    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", sleep)
    monkeypatch.setattr(chat, "WALL_SECONDS", 0.3)
    with pytest.raises(BadTemplate, match=r"more than 0\.3 seconds"):
        rendered("hi")


def test_a_process_that_cannot_be_started_is_an_error_of_ours(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with pytest.raises(BadTemplate, match=r"renders chat_template\.jinja cannot be started\n.*No such file"):
        rendered("hi")


def test_the_process_that_renders_is_fresh_and_has_nothing_of_ours(monkeypatch, tmp_path):
    """It neither sees our environment nor takes a module that lies in the working directory."""
    seen = {}
    run = subprocess.run

    def watched(command, **given):
        seen.update(command=command, env=given["env"])
        return run(command, **given)

    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "jinja2.py").write_text("raise SystemExit('the wrong jinja2')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", watched)
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    assert rendered("{{ messages[0].content }}") == "hi"
    assert set(seen["env"]) <= {"TZ", "LD_LIBRARY_PATH", "SYSTEMROOT"}
    assert seen["command"][1:3] == ["-I", "-S"]


def test_the_functions_of_transformers_are_there():
    source = """{%- for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}
    {% generation %}g{% endgeneration %}
{{ {'é': '<a>'} | tojson }}{{ [1, 2] | tojson(indent=1) }}{{ strftime_now('%Y') | length }}{{ dict(a=1).a }}{{ tools is none }}"""
    assert rendered(source) == '01g{"é": "<a>"}[\n 1,\n 2\n]41True'


@pytest.mark.parametrize("role", ["user", "assistant"])
@pytest.mark.parametrize("text", [" " * 300_000, "\n</think>" * 30_000, "<think> " * 30_000, "</think" * 30_000])
def test_long_runs_take_linear_time(role, text):
    start = time.process_time()
    assert len(template(V2).encode(talk((role, f"a{text}b")), TOKENIZER)) > len(text)
    assert time.process_time() - start < 10


def test_rendering_takes_little_of_the_processor():
    assert used(lambda: rendered(V3)) < 5


def used(action) -> float:
    """Seconds of the processor, here and in processes that were started and have ended."""
    start = os.times()
    action()
    return sum(os.times()[:4]) - sum(start[:4])


def folder(path, settings: dict | None = None, file: str | bytes | None = None):
    if settings is not None:
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
    if file is not None:
        (path / "chat_template.jinja").write_bytes(file.encode() if isinstance(file, str) else file)
    return ChatTemplate.from_folder(path)


@pytest.mark.parametrize(
    ("settings", "file", "source"),
    [
        (NAMES, "from the file", "from the file"),
        (NAMES | {"chat_template": "from the config"}, "from the file", "from the file"),
        (NAMES | {"chat_template": "from the config"}, None, "from the config"),
        (NAMES | {"chat_template": [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]}, None, "y"),
    ],
)
def test_the_template_is_the_folders_own(tmp_path, settings, file, source):
    found = folder(tmp_path, settings, file)
    assert found is not None
    assert found.source == source
    assert found.variables == {"bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}


def test_a_folder_without_a_template_has_none(tmp_path):
    assert ChatTemplate.from_folder(tmp_path) is None
    assert folder(tmp_path, NAMES) is None


@pytest.mark.parametrize(
    ("settings", "file", "words"),
    [
        ({"chat_template": 5}, None, "not text"),
        ({"chat_template": {"default": "x"}}, None, "not text"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, None, "none is called default"),
        ({"chat_template": [{"name": ["default"], "template": "x"}, 5]}, None, "none is called default"),
        ({"chat_template": "x" * (chat.MAX_TEMPLATE + 1)}, None, "too large"),
        (None, "x" * (chat.MAX_TEMPLATE + 1), "too large"),
        (None, b"\xff\xfe", "not UTF-8"),
    ],
)
def test_what_is_no_template_is_refused(tmp_path, settings, file, words):
    with pytest.raises(BadTemplate, match=words):
        folder(tmp_path, settings, file)


def test_a_template_that_is_no_regular_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "chat_template.jinja")
    with pytest.raises(BadTemplate, match="not a regular file"):
        folder(tmp_path)
