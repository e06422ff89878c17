"""A client's JSON object becomes the request that it means, in the words of OpenAI's interface, of vLLM's and in ours."""

import contextlib

import jaxtyping
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mla_jax.base.errors import BadRequest
from mla_jax.base.grammar import Grammar
from mla_jax.base.grammar_keys import FORM_KEYS
from mla_jax.base.options import SamplingParams, names
from mla_jax.base.request_fields import IGNORED, KEYS, NEUTRAL, TOKENS, read_fields

DEFAULTS = SamplingParams(temperature=0.5, max_tokens=9, seed=7, top_k=3)


@pytest.fixture(autouse=True)
def no_checks_of_type(monkeypatch):
    """Users run without the checks of the tests, and a client may send anything."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def params(**fields) -> dict:
    """The sampling parameters in `fields` that differ from the defaults."""
    found = vars(read_fields({"prompt": "a", **fields}, DEFAULTS).params)
    return {name: value for name, value in found.items() if value != getattr(DEFAULTS, name)}


@pytest.mark.parametrize("key", ["messages", *names(SamplingParams), *IGNORED.split(), *NEUTRAL, *FORM_KEYS, "no such key"])
def test_null_is_absent(key):
    assert params(**{key: None}) == {}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5, "max_tokens": 5}, {"max_tokens": 5}),
        ({"max_tokens": 5.0, "n": 2.0, "seed": 3.0}, {"max_tokens": 5, "n": 2, "seed": 3}),
        ({"stop_token_ids": [4.0, 5]}, {"stop_token_ids": (4, 5)}),
        ({"temperature": 1, "top_p": 1}, {"temperature": 1, "top_p": 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": -1.0}, {"top_k": 0}),
        ({"seed": -1}, {}),
        ({"stop": "x"}, {"stop": ("x",)}),
        ({"stop": ["x", "y"]}, {"stop": ("x", "y")}),
        ({"stop": []}, {}),
        ({"logit_bias": {"50": 2}}, {"logit_bias": {50: 2.0}}),
        ({"logprobs": 2}, {"logprobs": 2}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False}, {}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"model": "x", "stream": True, "user": "u", "metadata": {"a": 1}}, {}),
        ({"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "echo": False}, {}),
    ],
)
def test_a_value_becomes_ours(fields, expected):
    found = params(**fields)
    assert found == expected
    assert [type(value) for value in found.values()] == [type(value) for value in expected.values()]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 2.5}, "max_tokens is 2.5, expected a whole number"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens and max_completion_tokens differ"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"temperature": "warm"}, "temperature is 'warm'"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_logprobs": 3}, 'expected "logprobs": true beside it'),
        ({"logprobs": True, "top_logprobs": 21}, "logprobs is 21"),
        ({"echo": True}, "echo is not supported\n  found True, expected False or no such key"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1"),
        ({"suffix": "b"}, "suffix is not supported\n  found 'b', expected '' or no such key"),
        ({"guided_jso": {}}, "unknown key guided_jso\n  did you mean guided_json?"),
        ({"max_new_tokens": 5}, "unknown key max_new_tokens\n  did you mean max_tokens?"),
        ({"tools": [{}]}, "tools needs messages\n  a plain prompt has no chat template"),
        ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs needs messages"),
        ({"continue_final_message": True}, "continue_final_message needs messages"),
        ({"add_generation_prompt": 0}, "add_generation_prompt is 0\n  expected true or false"),
        ({"messages": []}, 'expected either "prompt" or "messages"'),
        ({"prompt": None}, 'expected either "prompt" or "messages"\n  found an empty object'),
    ],
)
def test_a_value_that_cannot_be_served_is_refused_in_words(fields, words):
    with pytest.raises(BadRequest) as refused:
        params(**fields)
    assert words in str(refused.value)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
NAMED = {"name": "a", "schema": SCHEMA}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        ({"response_format": {"type": "json_object", "json_schema": None}}, Grammar.json_object()),
        ({"response_format": {"type": "json_schema", "json_schema": NAMED}}, Grammar.json_schema(SCHEMA)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {**NAMED, "strict": False, "description": None}}},
            Grammar.json_schema(SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar.json_schema(SCHEMA)),
        ({"structured_outputs": {"json": '{"type": "null"}', "regex": None}}, Grammar.json_schema({"type": "null"})),
        ({"structured_outputs": {"regex": "a+"}}, Grammar.regex("a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar.choice(["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"', "json_object": False}}, Grammar.lark('start: "a"')),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"guided_json": SCHEMA}, Grammar.json_schema(SCHEMA)),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"guided_grammar": 'start: "a"'}, Grammar.lark('start: "a"')),
        ({"grammar": {"regex": "a+"}}, Grammar.regex("a+")),
        ({"guided_regex": "a+", "guided_json": None, "response_format": {"type": "text"}}, Grammar.regex("a+")),
    ],
)
def test_every_name_for_the_form_of_an_answer_becomes_a_grammar(fields, expected):
    for more in ({}, {"messages": [], "prompt": None}):
        assert read_fields({"prompt": "a", **fields, **more}, DEFAULTS).params.grammar == expected


def named(**schema) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"response_format": "json"}, "response_format is 'json'\n  expected an object"),
        ({"response_format": {}}, "the type of response_format is None\n  expected one of text, json_object, json_schema"),
        ({"response_format": {"type": "xml"}}, "the type of response_format is 'xml'"),
        ({"response_format": {"type": ["text"]}}, "the type of response_format is ['text']"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format has the key schema\n  known: type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is None\n  expected an object"),
        (named(name="a"), 'response_format.json_schema has no schema\n  expected {"name"'),
        (named(schema="{}"), "response_format.json_schema.schema is '{}'\n  expected a JSON schema, which is an object"),
        (named(schema={}, name=3), "response_format.json_schema.name is 3\n  expected text"),
        (named(schema={}, strict=1), "response_format.json_schema.strict is 1\n  expected true or false"),
        (named(schema={}, title="a"), "response_format.json_schema has the key title"),
        ({"structured_outputs": ["a"]}, "structured_outputs is ['a']\n  expected an object"),
        ({"structured_outputs": {}}, "structured_outputs has 0 grammars: none\n  expected one of json, regex, choice"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs has 2 grammars: regex, json"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs has the key regexp\n  did you mean regex?"),
        (
            {"structured_outputs": {"json": 3}},
            "structured_outputs.json is no grammar\n  json_schema is 3\n  expected a JSON schema",
        ),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json is no grammar\n  a JSON schema is not JSON"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice is no grammar\n  choices are a list of texts"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs.json_object is no grammar"),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "structured_outputs.grammar has rules of GBNF"),
        ({"guided_grammar": 'start: "a"\n x ::= "b"'}, "guided_grammar has rules of GBNF"),
        ({"guided_choice": "ab"}, "guided_choice is no grammar\n  choice is 'ab'\n  expected a list of texts"),
        ({"guided_choice": ["a", 3]}, "guided_choice is no grammar\n  choices are a list of texts\n  found ['a', 3]"),
        ({"guided_regex": 3}, "guided_regex is no grammar"),
        ({"guided_regex": "a" * 300_000}, "guided_regex is no grammar\n  a grammar has 300,000 characters"),
        ({"guided_regex": "a", "guided_json": {}}, "guided_json and guided_regex each name a form of the answer"),
        ({"guided_regex": "a", "grammar": {"regex": "a"}}, "guided_regex and grammar each name"),
        ({**named(schema={}), "structured_outputs": {"regex": "a"}}, "response_format and structured_outputs each name"),
    ],
)
def test_a_form_of_answers_that_is_none_is_refused_in_words(fields, words):
    with pytest.raises(BadRequest) as refused:
        params(**fields)
    assert words in str(refused.value)


def test_unknown_keys_can_be_told_in_place_of_refused():
    assert read_fields({"prompt": "a", "new": 1, "seed": 2}, DEFAULTS, strict=False).unknown == ("new",)


def test_prompts_of_token_ids_may_be_written_as_floats():
    assert read_fields({"prompt": [3.0, 4]}, DEFAULTS).prompt == [3, 4]


def test_a_chat_has_all_that_its_template_is_given():
    tools, variables = [{"type": "function"}], {"thinking": True}
    body = {"messages": [], "tools": tools, "chat_template_kwargs": variables, "continue_final_message": True}
    expected = {"tools": tools, "chat_template_kwargs": variables, "add_generation_prompt": True, "continue_final_message": True}
    assert read_fields(body, DEFAULTS).chat == expected
    assert read_fields({"messages": [], "add_generation_prompt": False}, DEFAULTS).chat["add_generation_prompt"] is False


@pytest.mark.parametrize(
    "neutral", [{}, {"tools": [], "chat_template_kwargs": {}}, {"tools": None, "add_generation_prompt": None}]
)
@pytest.mark.parametrize("asked", [{"prompt": "a"}, {"messages": []}])
def test_what_asks_for_nothing_is_absent(asked, neutral):
    assert read_fields(asked | neutral, DEFAULTS) == read_fields(asked, DEFAULTS)


@pytest.mark.parametrize("messages", [5, "a", [5], [None], [{"role": 3, "name": None}]])
def test_what_is_no_message_is_left_to_the_chat_template(messages):
    assert read_fields({"messages": messages}, DEFAULTS).messages == messages


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
BODIES = st.dictionaries(st.sampled_from([*KEYS, *TOKENS, *NEUTRAL, *FORM_KEYS, "top_logprobs", "other"]), ANY, max_size=5)


@given(BODIES, st.booleans())
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_object_is_read_or_refused_in_words(body, strict):
    with contextlib.suppress(BadRequest):
        read_fields({"prompt": "a"} | body, DEFAULTS, strict)
