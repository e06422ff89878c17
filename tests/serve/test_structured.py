"""Answers of a form, as OpenAI's client asks for them: JSON of a schema, a pattern, a choice, a grammar."""

import json
import re

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from servers import Running

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("serve")]

ASKED = [{"role": "user", "content": "Who?"}]
DRAWN = {"model": "m", "temperature": 2.0, "seed": 3, "max_tokens": 400}
THINKING, AT_ONCE = ({"chat_template_kwargs": {"thinking": wanted}} for wanted in (True, False))
TALK = {"messages": ASKED, "extra_body": AT_ONCE, **DRAWN}  # what is drawn has no end of reasoning


class Person(BaseModel):
    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=150)
    tags: list[bool] = Field(max_length=2)


SCHEMA = {**Person.model_json_schema(), "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
RULES = 'start: word ("," word){0,3}\nword: "ja" | "nei"'


def check(text: str | None) -> None:
    jsonschema.validate(json.loads(text or ""), SCHEMA)


def matches(pattern: str):
    return re.compile(pattern).fullmatch


FORMS = [
    ({"response_format": FORMAT}, lambda text: check(text) is None),
    ({"structured_outputs": {"json": SCHEMA}}, lambda text: check(text) is None),
    ({"structured_outputs": {"regex": "[a-f]{3}/[0-9]"}}, matches("[a-f]{3}/[0-9]")),
    ({"structured_outputs": {"choice": ["ja", "nei då"]}}, matches("ja|nei då")),
    ({"structured_outputs": {"grammar": RULES}}, matches("(ja|nei)(,(ja|nei)){0,3}")),
    ({"guided_json": json.dumps(SCHEMA)}, lambda text: check(text) is None),
    ({"guided_regex": "x{2,4}"}, matches("x{2,4}")),
    ({"guided_choice": ["a", "b"]}, matches("a|b")),
    ({"guided_grammar": RULES}, matches("(ja|nei)(,(ja|nei)){0,3}")),
    ({"grammar": {"regex": "[01]{5}"}}, matches("[01]{5}")),
]


@pytest.mark.deep
@pytest.mark.parametrize(("form", "good"), FORMS, ids=[next(iter(form)) + str(at) for at, (form, _) in enumerate(FORMS)])
def test_every_form_is_followed_by_completions_and_chats_whole_and_in_streams(deepseek, form, good):
    client = deepseek.client
    texts = [choice.text for choice in client.completions.create(prompt="a", n=2, extra_body=form, **DRAWN).choices]
    texts.append(
        "".join(one.choices[0].text for one in client.completions.create(prompt="a", stream=True, extra_body=form, **DRAWN))
    )
    for more, temperature in ((AT_ONCE, 2.0), (THINKING, 0.0)):
        asked = {"messages": ASKED, "extra_body": {**form, **more}, **DRAWN, "temperature": temperature}
        found = client.chat.completions.create(**asked, n=2)
        assert [choice.finish_reason for choice in found.choices] == ["stop", "stop"]
        texts += [choice.message.content for choice in found.choices]
        pieces = client.chat.completions.create(**asked, stream=True)
        texts.append("".join(piece.choices[0].delta.content or "" for piece in pieces))
        assert texts[-1] == texts[-3], "the stream is the first of both answers"
    assert [text for text in texts if not good(text)] == []


@pytest.mark.deep
def test_a_schema_is_followed_by_each_of_several_answers_and_by_others_at_the_same_time(deepseek):
    asked = {**TALK, "response_format": FORMAT, "n": 4}
    choices = deepseek.client.chat.completions.create(**asked).choices
    for choice in choices:
        check(choice.message.content)
    assert len({choice.message.content for choice in choices}) > 1
    pieces = [piece.choices[0] for piece in deepseek.client.chat.completions.create(**asked, stream=True)]
    for choice in choices:
        text = "".join(piece.delta.content or "" for piece in pieces if piece.index == choice.index)
        assert text == choice.message.content


def test_an_answer_is_parsed_as_the_class_that_was_asked_for(deepseek):
    for seed in range(3):
        asked = {**TALK, "seed": seed}
        found = deepseek.client.chat.completions.parse(response_format=Person, **asked).choices[0].message.parsed
        assert isinstance(found, Person)
        with deepseek.client.chat.completions.stream(response_format=Person, **asked) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == found


@pytest.mark.deep
def test_reasoning_is_free_and_comes_apart(deepseek):
    asked = {**TALK, "response_format": FORMAT, "temperature": 0, "extra_body": THINKING}
    message = deepseek.client.chat.completions.create(**asked).choices[0].message
    assert message.reasoning_content == "Let me see."
    check(message.content)
    pieces = [piece.choices[0].delta for piece in deepseek.client.chat.completions.create(**asked, stream=True)]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in pieces) == "Let me see."
    assert "".join(delta.content or "" for delta in pieces) == message.content


@pytest.mark.deep
def test_any_object_is_json(deepseek):
    asked = {**TALK, "response_format": {"type": "json_object"}}
    found = deepseek.client.chat.completions.create(**asked, n=4)
    ended = [choice.message.content for choice in found.choices if choice.finish_reason == "stop"]
    assert all(isinstance(json.loads(text or ""), dict) for text in ended)
    assert all((choice.message.content or "").startswith("{") for choice in found.choices)


def test_a_limit_cuts_an_answer_within_its_form(deepseek):
    asked = {**TALK, "response_format": FORMAT, "max_tokens": 5}
    (choice,) = deepseek.client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "length"
    assert (choice.message.content or "").startswith("{")


def test_the_type_text_asks_for_nothing(deepseek):
    asked = {"messages": ASKED, "model": "m", "temperature": 0, "max_tokens": 60}
    plain = deepseek.client.chat.completions.create(**asked)
    given = deepseek.client.chat.completions.create(**asked, response_format={"type": "text"})
    assert given.choices[0].message.content == plain.choices[0].message.content


BROKEN = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
ROUTES = [("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": ASKED})]


@pytest.mark.deep
@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ({"response_format": "json"}, "response_format", "response_format is 'json'\n  expected an object"),
        ({"response_format": {"type": "json"}}, "response_format", "expected one of text, json_object, json_schema"),
        ({"response_format": {**FORMAT, "name": "a"}}, "response_format", "response_format has the key name"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "did you mean regex?"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "has 2 grammars: regex, choice"),
        ({"guided_json": BROKEN}, "guided_json", "guided_json cannot be followed\n  the JSON schema cannot be compiled\n"),
        ({"response_format": {"type": "text"}, "guided_regex": "("}, "guided_regex", "the regular expression cannot be compiled"),
        ({"guided_grammar": "begin: /a/"}, "guided_grammar", "the Lark grammar cannot be compiled"),
        ({"grammar": {"regex": "("}}, "grammar", "the regular expression cannot be compiled"),
        ({"response_format": FORMAT, "guided_regex": "a"}, "response_format", "each name a form of the answer"),
        ({"guided_choice": ["a"], "ignore_eos": True}, "ignore_eos", "exclude each other"),
        ({"guided_regex": "a" * 300_000}, "guided_regex", "300,000 characters"),
    ],
)
def test_a_form_that_cannot_be_followed_is_refused_with_the_reason(deepseek: Running, path, body, stream, more, param, words):
    response = httpx.post(deepseek.url + path, json={"model": "m", **body, **more, "stream": stream}, timeout=120)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


def test_the_client_raises_for_a_schema_that_cannot_be_compiled(deepseek):
    form = {"type": "json_schema", "json_schema": {"name": "broken", "schema": BROKEN}}
    with pytest.raises(openai.BadRequestError, match="the JSON schema cannot be compiled"):
        deepseek.client.chat.completions.create(model="m", messages=ASKED, response_format=form)


def test_a_tokenizer_without_bytes_has_no_grammars(running):
    response = running.post("/v1/completions", {"prompt": "a1", "guided_regex": "a"})
    assert response.status_code == 400
    assert "byte-level" in response.json()["error"]["message"]
