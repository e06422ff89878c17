# ruff: noqa: RUF001 DeepSeek's control tokens are written with such letters
"""Grammars of answers take calls as each model writes them, and nothing else. All that they allow is read back as calls."""

import functools
import json

import jsonschema
import numpy as np
import pytest
from answer_formats import FORM, MODELS, Model

from mla_jax.base.errors import BadRequest
from mla_jax.base.grammar import MAX_GRAMMAR, Grammar
from mla_jax.text.answers import PLAIN_ANSWER, parse_answer
from mla_jax.text.answers.call_rules import MOST_FORCED
from mla_jax.text.answers.constrained import Thinking, constrained_answer, thinking_of
from mla_jax.text.grammar import Grammars, Masked

pytestmark = pytest.mark.once

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
TAGGED = pytest.mark.parametrize("name", ["V3.2", "V4", "GLM-4.5", "GLM-4.7", "GLM, tags as text"])
COLOR = {"$defs": {"Color": {"enum": ["red", "dark blue"], "type": "string"}}}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "color": {"$ref": "#/$defs/Color"},
        "unit": {"enum": ["C", 1, None]},
        "where": {
            "type": "object",
            "properties": {"lat": {"type": "number"}},
            "required": ["lat"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    **COLOR,
}
CITY, GOOD = {"city": "Zürich 😀", "days": 3}, {"city": "a", "days": 14, "color": "dark blue", "unit": 1, "where": {"lat": 1.5}}


def tool(name: str, parameters: dict | None) -> dict:
    function = {"name": name} if parameters is None else {"name": name, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [tool("weather", WEATHER), tool("mcp.find-places", {"type": "object", "properties": {}}), tool("now", None)]


@functools.cache
def grammars_of(model: Model) -> Grammars:
    return Grammars(model.tokenizer, model.tokenizer.model.get_vocab_size(), [model.tokenizer.control["<eos>"]])


def follows(model: Model, grammar: Grammar, text: str) -> bool:
    """Whether `text`, as the model writes it, is a whole answer of `grammar`."""
    ids = [*model.ids(text), model.tokenizer.control["<eos>"]]
    return grammars_of(model).matcher(grammar).taken(ids) == len(ids)


def forced(model: Model, tools=TOOLS, thinking=Thinking.NONE, **more) -> Grammar:
    return constrained_answer(model.tokenizer, model.form, thinking, tools=tools, **more)


def read(model: Model, ids: list[int], **more):
    return parse_answer(ids, model.tokenizer, model.form, tools=TOOLS, **more)


@EVERY_MODEL
@pytest.mark.parametrize(
    "calls",
    [[("weather", CITY)], [("weather", GOOD)], [("now", {})], [("weather", CITY), ("now", {}), ("weather", GOOD)]],
)
def test_calls_as_the_model_writes_them_are_allowed_and_read_back(name, calls):
    model = MODELS[name]
    text = model.write(calls)
    assert follows(model, forced(model), text)
    answer = read(model, model.ids(text))
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls
    assert not answer.content


@EVERY_MODEL
@pytest.mark.parametrize(
    ("call", "values"),
    [
        ("wether", CITY),
        ("weather", {}),
        ("weather", {"city": "a"}),
        ("weather", {"days": 3}),
        ("weather", {"city": "a", "days": 15}),
        ("weather", {"city": "a", "days": "3"}),
        ("weather", {"city": "a" * 10, "days": 3}),
        ("weather", {"city": "a", "days": 3, "color": "blue"}),
        ("weather", {"city": "a", "days": 3, "unit": "F"}),
        ("weather", {"city": "a", "days": 3, "unit": 2}),
        ("weather", {"city": "a", "days": 3, "where": {"lat": "north"}}),
        ("weather", {"city": "a", "days": 3, "where": {}}),
        ("weather", {"city": "a", "days": 3, "more": 3}),
        ("now", {"more": 3}),
    ],
)
def test_other_calls_are_refused(name, call, values):
    model = MODELS[name]
    if model.form is FORM["glm"] and values.get("days") == "3":
        return  # it writes texts and numbers alike
    assert not follows(model, forced(model), model.write([(call, values)]))


@EVERY_MODEL
def test_text_before_calls_and_behind_them_and_an_answer_without_any_are_refused(name):
    model = MODELS[name]
    text, grammar = model.write([("weather", CITY)]), forced(model)
    assert follows(model, grammar, "\n\n" + text)
    for other in ("", "weather", f"I look. {text}", f"{text} Done.", text[:-1]):
        assert not follows(model, grammar, other)


@EVERY_MODEL
def test_one_call_is_one(name):
    model = MODELS[name]
    one, two = model.write([("now", {})]), model.write([("now", {}), ("now", {})])
    grammar = forced(model, one_call=True)
    assert follows(model, grammar, one)
    assert not follows(model, grammar, two)


@EVERY_MODEL
def test_reasoning_that_the_prompt_has_begun_goes_on_to_its_end(name):
    model = MODELS[name]
    call, grammar = model.write([("weather", CITY)]), forced(model, thinking=Thinking.OPEN)
    for text in (f"I </th {{}}\n\nsee.</think>\n\n{call}", f"</think>{call}"):
        assert follows(model, grammar, text)
        answer = read(model, model.ids(text), in_reasoning=True)
        assert [json.loads(found.arguments) for found in answer.calls] == [CITY]
    for text in (call, f"I see. {call}", f"I see.</think>So {call}", "I see.</think>"):
        assert not follows(model, grammar, text)


@EVERY_MODEL
def test_reasoning_that_the_model_begins_itself_may_be_missing(name):
    model = MODELS[name]
    call, grammar = model.write([("now", {})]), forced(model, thinking=Thinking.MAYBE)
    for text in (call, f"<think>I see.</think>{call}", f"\n<think>\n</think>\n{call}"):
        assert follows(model, grammar, text)
    for text in (f"I see.</think>{call}", f"<think>I see.{call}"):
        assert not follows(model, grammar, text)


@pytest.mark.parametrize("name", ["V3.1", "GLM, tags as text"])
@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar.json_schema({"type": "object", "required": ["a"]}), '{"a": 1}', '{"b": 1}'),
        (Grammar.regex("[a-c]+/|\\/x\\\\"), "abc/", "abc"),
        (Grammar.regex("[a-c]+/|\\/x\\\\"), "/x\\", "/x"),
        (Grammar.lark('start: word+ // a }\nword: "}" | "b"'), "b}b", "b{"),
        (Grammar.choice(["yes", "no"]), "no", "nope"),
    ],
)
def test_text_of_every_kind_of_grammar_stands_behind_reasoning_or_beside_calls(name, grammar, good, bad):
    model = MODELS[name]
    behind = constrained_answer(model.tokenizer, model.form, Thinking.OPEN, text=grammar)
    assert follows(model, behind, f"Hm \n</think>\n{good}")
    for text in (good, bad, f"Hm </think>{bad}", "Hm </think>"):
        assert not follows(model, behind, text)
    beside, call = forced(model, text=grammar), model.write([("now", {})])
    assert follows(model, beside, good)
    assert follows(model, beside, call)
    for text in (bad, good + call, call + good, ""):
        assert not follows(model, beside, text)


@pytest.mark.parametrize("blanks", [20, 100])
def test_json_has_no_more_blanks_than_where_it_is_the_whole_answer(blanks):
    model, schema = MODELS["V3.1"], {"type": "object", "properties": {"a": {"type": "array"}}}
    alone, values = Grammar.json_schema(schema), f'{{"a":{" " * blanks}[]}}'
    behind = constrained_answer(model.tokenizer, model.form, Thinking.OPEN, text=alone)
    for grammar, text in (
        (alone, values),
        (behind, f"Hm</think>{values}"),
        (forced(model, [tool("f", schema)]), model.write([("f", {})]).replace("{}", values)),
    ):
        assert follows(model, grammar, text) == (blanks == 20), text


def test_a_grammar_of_text_alone_stays_as_it_is():
    model, grammar = MODELS["V3.1"], Grammar.regex("a")
    assert constrained_answer(model.tokenizer, model.form, Thinking.NONE, text=grammar) is grammar


@pytest.mark.parametrize(
    ("name", "prompt", "expected"),
    [
        ("V3.1", "<｜Assistant｜><think>", Thinking.OPEN),
        ("V3.1", "<think>a</think><｜Assistant｜>", Thinking.MAYBE),
        ("V3.1", "<｜Assistant｜></think>", Thinking.NONE),
        ("V3.1", "<｜Assistant｜><think></think>\n", Thinking.NONE),
        ("GLM, tags as text", "assistant: <think>\n", Thinking.OPEN),
        ("GLM, tags as text", "assistant:", Thinking.NONE),
    ],
)
def test_the_end_of_the_prompt_tells_which_reasoning_may_come(name, prompt, expected):
    model = MODELS[name]
    assert thinking_of(model.ids(prompt), model.tokenizer, model.form) is expected
    assert thinking_of(model.ids(prompt), model.tokenizer, PLAIN_ANSWER) is Thinking.NONE


def drawn(model: Model, grammar: Grammar, seed: int, most: int = 3_000) -> list[int]:
    """Tokens of an answer that are drawn from those allowed, more often of those that end something."""
    rng, grammars, answer = np.random.default_rng(seed), grammars_of(model), []
    matcher, eos = grammars.matcher(grammar), model.tokenizer.control["<eos>"]
    ending = {*model.ids('"]}<>/0123456789'), *model.tokenizer.control.values()}
    while len(answer) < most:
        masks = np.zeros((1, 1, grammars.words), np.uint32)
        grammars.fill([Masked(0, matcher)], masks)
        tokens = np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()
        if eos in tokens and (len(tokens) == 1 or rng.random() < 0.5):
            return answer
        tokens = [token for token in tokens if token != eos]
        closing = [token for token in tokens if token in ending]
        token = int(rng.choice(closing if closing and rng.random() < 0.8 else tokens))
        matcher.follow([token])
        answer.append(token)
    raise AssertionError(f"no end after {most} tokens: {model.tokenizer.decode(answer)[-200:]!r}")


@pytest.mark.deep
@EVERY_MODEL
@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_grammar_allows_is_read_as_calls_of_the_tools(name, seed):
    model = MODELS[name]
    tools = [TOOLS[0], TOOLS[2]]
    opened = model.form.think[1] in model.tokenizer.control  # no random text spells the tag
    ids = drawn(model, forced(model, tools, thinking=Thinking.OPEN if opened else Thinking.NONE), seed)
    answer = read(model, ids, in_reasoning=opened)
    assert answer.calls
    assert not answer.content
    for call in answer.calls:
        schema = {"weather": WEATHER, "now": {"maxProperties": 0}}[call.name]
        jsonschema.validate(json.loads(call.arguments), schema)
        assert call.complete


@TAGGED
def test_any_text_may_be_a_value_but_the_end_of_the_value(name):
    model, schema = MODELS[name], {"properties": {"code": {"type": "string"}}, "required": ["code"]}
    grammar = forced(model, [tool("run", schema)])
    for code in ("", "a < b </p>\n\\\"'😀", "</", "<｜", '{"a": 1}', "</｜DSML｜", "</arg_"):
        text = model.write([("run", {"code": code})])
        if "DSML" in code and name == "V4":
            continue  # a control token there
        assert follows(model, grammar, text), code


@TAGGED
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"type": ["string", "integer"]}}}, [{"a": 1}, {"a": "x"}, {}], [{"b": 1}]),
        ({"properties": {"a": {}}}, [{"a": {"b": [1]}}, {"a": "x"}], [{"b": 1}]),
        ({"properties": {"a": {"minLength": 2, "type": "string"}}}, [{"a": "xy"}], [{"a": "x"}]),
        ({"properties": {"a": {"const": "x"}, "b": {"const": 2}}}, [{"a": "x"}, {"a": "x", "b": 2}], [{"a": "y"}, {"b": 3}]),
        ({"required": ["a"]}, [{"a": 1}, {"a": "x"}], [{}, {"b": 1}]),
        ({}, [{}, {"a": 1}, {"b": "x", "c": [1]}], []),
        ({"additionalProperties": {"type": "integer"}}, [{}, {"b": 1}], [{"b": [1]}]),
        ({"additionalProperties": False}, [{}], [{"b": 1}]),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"$ref": "#/$defs/B"}}}, "B": {"type": "integer"}}},
            [{"a": 1}, {}],
            [{"a": [1]}, {"b": 1}],
        ),
    ],
)
def test_values_in_tags_follow_their_own_schemas(name, schema, good, bad):
    model = MODELS[name]
    grammar = forced(model, [tool("f", schema)])
    for values in good:
        assert follows(model, grammar, model.write([("f", values)])), values
    for values in bad:
        assert not follows(model, grammar, model.write([("f", values)])), values


@TAGGED
@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({"anyOf": [{"type": "object"}]}, "a call of f cannot be forced: its parameters have anyOf"),
        ({"$ref": "#/properties/a"}, r"have \$ref"),
        ({"properties": 3}, "'properties': 3"),
        ({"properties": {"a": {"type": "string", "maxLength": "3"}}}, "the length of a text is 0 to '3'"),
        ({"properties": {'a"': {}}}, 'the parameter a" cannot be forced'),
    ],
)
def test_parameters_that_cannot_be_written_in_tags_are_refused(name, parameters, says):
    with pytest.raises(BadRequest, match=says):
        forced(MODELS[name], [tool("f", parameters)])


@pytest.mark.parametrize(
    ("tools", "says"),
    [
        ([tool("two words", None)], "two words cannot be forced"),
        ([tool("now", None)] * (MOST_FORCED + 1), r"tools has 513 entries.*\n.*512"),
        ([tool("f", {"description": "x" * MAX_GRAMMAR})], r"tools have schemas that make a grammar of 262,\d+ characters"),
    ],
)
def test_tools_that_no_grammar_can_hold_are_refused(tools, says):
    with pytest.raises(BadRequest, match=says):
        forced(MODELS["V3.1"], tools)


def test_a_model_whose_calls_are_not_known_cannot_be_forced():
    with pytest.raises(BadRequest, match="tool_choice cannot force a call"):
        constrained_answer(MODELS["V3.1"].tokenizer, PLAIN_ANSWER, Thinking.NONE, tools=TOOLS)


@pytest.mark.deep
@EVERY_MODEL
def test_a_grammar_of_many_tools_compiles(name):
    model = MODELS[name]
    tools = [tool(f"f{at}", {"type": "object", "properties": {f"p{at}": {"type": "integer"}}}) for at in range(128)]
    assert follows(model, forced(model, tools), model.write([("f127", {"p127": 1})]))
