"""Messages, tools and variables of clients: shapes that are taken, and words that say what is wrong with others."""

import contextlib

import jaxtyping
import pytest
from chat_templates import deepseek_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_jax.base.errors import BadRequest
from mla_jax.text.messages import MAX_NESTING, checked_messages, checked_tools, checked_variables

pytestmark = pytest.mark.once
TOKENIZER = deepseek_tokenizer()


@pytest.fixture(autouse=True)
def no_checks_of_type(monkeypatch):
    """Users run without the checks of the tests, and a client may send anything."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def nested(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def message(role: str = "user", **keys) -> dict:
    return {"role": role, **keys}


def answer(*calls, **keys) -> dict:
    return {"role": "assistant", "tool_calls": [*calls], **keys}


def call(arguments="{}", **keys) -> dict:
    return {"id": "i", "type": "function", "function": {"name": "f", "arguments": arguments}, **keys}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (message(content="a", name=None, tool_calls=None, refusal=None, audio=None), message(content="a")),
        (message(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]), message(content="ab")),
        (message(content=[]), message(content="")),
        (message(content="a", name="Ann"), message(content="a", name="Ann")),
        (message("assistant", content="a", reasoning="r"), message("assistant", content="a", reasoning_content="r")),
        (
            message("assistant", content="a", reasoning="r", reasoning_content="r"),
            message("assistant", content="a", reasoning_content="r"),
        ),
        (message("assistant", content="a", reasoning_content=""), message("assistant", content="a")),
        (message("assistant", content="a", tool_calls=[]), message("assistant", content="a")),
        (message("tool", content="5", tool_call_id="i"), message("tool", content="5", tool_call_id="i")),
        (answer(call()), answer(call({"text": "{}", "object": {}}), content=None)),
        (answer(call(index=0), content=""), answer(call({"text": "{}", "object": {}}), content=None)),
        (answer(call('{"a": 1}')), answer(call({"text": '{"a": 1}', "object": {"a": 1}}), content=None)),
        (answer(call({"a": "é"})), answer(call({"text": '{"a": "é"}', "object": {"a": "é"}}), content=None)),
        (answer(call("no JSON")), answer(call("no JSON"), content=None)),
        (
            answer({"function": {"name": "f"}}, content="x"),
            answer({"type": "function", "function": {"name": "f", "arguments": {"text": "{}", "object": {}}}}, content="x"),
        ),
    ],
)
def test_a_message_becomes_plain(given, expected):
    assert checked_messages([given], TOKENIZER) == [expected]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (message(), "the content of message 1 is not text\n  found NoneType"),
        (message("assistant", reasoning="r"), "the content of message 1 is not text"),
        (message(content={"text": "a"}), "the content of message 1 is not text\n  found dict"),
        (message(content=["a"]), "message 1 has a content part without a type\n  found 'a'"),
        (message(content=[{"type": "text"}]), "the text of a content part in message 1 is not text"),
        (
            message(content=[{"type": "image_url", "image_url": {}}]),
            "content part of type image_url is not supported\n  it is in message 1",
        ),
        (
            message(content="a", tool_calls=[]),
            "message 1, of the role user, has the key 'tool_calls'\n  only the role assistant has it",
        ),
        (message(content="a", tool_call_id="i"), "only the role tool has it"),
        (message("tool", content="a", reasoning="i"), "only the role assistant has it"),
        (message("assistant", content="a", refusal="no"), "has the key 'refusal'\n  expected role, content, name"),
        (message(content="a", name=5), "the name of message 1 is not text\n  found int"),
        (message("tool", content="a", tool_call_id=5), "the tool_call_id of message 1 is not text"),
        (message("assistant", content="a", reasoning="r", reasoning_content="s"), "message 1 has two different reasonings"),
        (message("assistant", content="a", tool_calls={"a": 1}), "tool_calls of message 1 is {'a': 1}\n  expected a list"),
        (answer(5), "tool call 0 of message 1 has no function\n  found 5"),
        (answer(call(), {"id": "i"}), "tool call 1 of message 1 has no function"),
        (answer({"function": {"arguments": "{}"}}), "the name of tool call 0 of message 1 is not text"),
        (answer({"function": {"name": ""}}), "the name of tool call 0 of message 1 is empty"),
        (answer(call(type="custom")), "tool call 0 of message 1 is of the type 'custom'"),
        (answer(call(id=7)), "the id of tool call 0 of message 1 is not text"),
        (answer(call([1])), "the arguments of tool call 0 of message 1 is not text"),
        (answer(call({"a": {1: 2}})), "arguments of tool call 0 of message 1 is no JSON value"),
        (answer(call({"a": float("inf")})), "is no JSON value\n  found inf"),
        (answer(call({"a": 10**5000})), "is no JSON value"),
        (answer(call({"a": "\ud800"})), "the text is not valid Unicode"),
        (answer(call({"a": nested(MAX_NESTING)})), "is nested too deeply"),
        (answer(call('{"a": ' + "[" * 101 + "]" * 101 + "}")), "is nested too deeply"),
    ],
)
def test_a_message_of_another_shape_is_refused_in_words(given, words):
    with pytest.raises(BadRequest) as refused:
        checked_messages([message(content="first"), given], TOKENIZER)
    assert words in str(refused.value)


def test_tools_are_taken_as_they_are():
    tool = {"type": "function", "function": {"name": "f", "parameters": {"b": 1, "a": [None, True]}, "strict": None}, "x": 1}
    (found,) = checked_tools((tool,)) or []
    assert found == tool
    assert [*found["function"]["parameters"]] == ["b", "a"]
    assert checked_tools([{"function": {"name": "f"}}]) == [{"type": "function", "function": {"name": "f"}}]
    assert checked_tools(None) is checked_tools([]) is None


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ({}, "tools is {}\n  expected [{"),
        ("f", "tools is 'f'"),
        ([5], "tool 0 has no function"),
        ([{"function": {"name": "f"}}, {"name": "g"}], "tool 1 has no function"),
        ([{"type": "web_search", "function": {"name": "f"}}], "tool 0 is of the type 'web_search'"),
        ([{"function": {"name": 5}}], "the name of tool 0 is not text"),
        ([{"function": {"name": "f", "description": 5}}], "the description of tool 0 is not text"),
        ([{"function": {"name": "f", "parameters": []}}], "the parameters of tool 0 are []"),
        ([{"function": {"name": "f", "parameters": {"a": {1, 2}}}}], "tool 0 is no JSON value"),
        ([{"function": {"name": "f", "parameters": {"a": nested(MAX_NESTING)}}}], "tool 0 is nested too deeply"),
    ],
)
def test_tools_of_another_shape_are_refused_in_words(tools, words):
    with pytest.raises(BadRequest) as refused:
        checked_tools(tools)
    assert words in str(refused.value)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ROLE = st.sampled_from(["user", "assistant", "tool", "x"])
KEY = st.sampled_from(["content", "name", "tool_call_id", "reasoning", "reasoning_content", "other"])
CALL = st.fixed_dictionaries({"function": ANY | st.fixed_dictionaries({"name": ANY, "arguments": ANY})})
MESSAGE = st.builds(
    lambda role, keys, calls: {"role": role, **keys, **calls},
    ANY | ROLE,
    st.dictionaries(KEY, ANY | st.text(), max_size=3),
    st.fixed_dictionaries({}, optional={"tool_calls": ANY | st.lists(CALL, max_size=2)}),
)


@given(messages=st.lists(MESSAGE, max_size=3), tools=ANY | st.lists(CALL, max_size=2), variables=ANY)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_anything_is_taken_or_refused_in_words(messages, tools, variables):
    for check, value in ((checked_tools, tools), (lambda given: checked_variables(given, ()), variables)):
        with contextlib.suppress(BadRequest):
            check(value)
    with contextlib.suppress(BadRequest):
        assert len(checked_messages(messages, TOKENIZER)) == len(messages)
