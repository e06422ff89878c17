"""Values as JSON text: the schema tells a text from other JSON, whatever form it has."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.text.answers.schemas import json_of, parameters_of, types_of

pytestmark = pytest.mark.once


def written(schema, text: str, **more):
    """The JSON that `text` becomes for a parameter of this schema."""
    return json.loads(json_of(text, types_of({"type": "object", "properties": {"key": schema}, **more}, "key")))


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "42", "42"),
        ({"type": "string"}, '"quoted"', '"quoted"'),
        ({"type": "string"}, " blank ", " blank "),
        ({"type": "integer"}, "42", 42),
        ({"type": "integer"}, "\n42\n", 42),
        ({"type": "integer"}, "many", "many"),
        ({"type": "number"}, "1e3", 1000.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "True", "True"),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "array"}, "[1, ", "[1, "),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "42", "42"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "42", 42),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "4.5", "4.5"),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "42", 42),
        ({"oneOf": [{"type": "string"}, {"type": "object"}]}, '"a"', '"a"'),
        ({"anyOf": [{"type": "string"}, {}]}, '"a"', "a"),
        ({"anyOf": [{"type": "string"}, {"enum": ["auto"]}]}, "42", "42"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "42", "42"),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, "null", "null"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"const": "1"}, "1", "1"),
        ({"properties": {}}, "{}", {}),
        ({"items": {}}, "[]", []),
        ({"$ref": "#/$defs/City"}, "42", "42"),
        ({"$ref": "#/$defs/a~1b"}, "42", 42),
        ({"$ref": "#/$defs/Nowhere"}, "42", 42),
        ({"$ref": "https://example.com/schema"}, "42", 42),
        ({"$ref": "#/$defs/Circle"}, "42", 42),
        ({"$ref": "#/$defs/Tree"}, "42", "42"),
        ({}, "42", 42),
        (True, "42", 42),
        (None, "text", "text"),
        ({"type": 7}, "42", 42),
    ],
)
def test_a_value_is_json_where_the_schema_allows_it_and_else_a_text(schema, text, expected):
    definitions = {
        "City": {"type": "string"},
        "a/b": {"type": "integer"},
        "Circle": {"$ref": "#/$defs/Circle"},
        "Tree": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/Tree"}]},
    }
    assert written(schema, text, **{"$defs": definitions}) == expected


@pytest.mark.parametrize("parameters", [None, {}, [], "no schema", {"properties": []}, {"type": "object"}])
def test_without_a_schema_a_value_is_json_if_it_is_any(parameters):
    types = types_of(parameters, "key")
    assert [json_of(text, types) for text in ("42", "null", "{", " a")] == ["42", "null", '"{"', '" a"']


def test_a_parameter_without_a_schema_of_its_own_has_that_of_additional_ones():
    assert types_of({"properties": {"a": {}}, "additionalProperties": {"type": "string"}}, "b") == {"string"}
    assert types_of({"properties": {"a": {}}, "additionalProperties": False}, "b") is None


def test_the_model_s_own_json_text_is_kept():
    text = '{"a":1.0,  "b":100000000000000000000}'
    assert json_of(f"\n{text} ", None) == text


def test_a_value_that_cannot_be_parsed_for_its_size_or_depth_is_a_text():
    for text in ("[" * 100_000, "1" * 10_000):
        assert json.loads(json_of(text, frozenset({"array", "integer"}))) == text


def test_schemas_that_refer_to_themselves_many_times_take_little_time():
    root = {"properties": {"key": {"$ref": "#/a"}}}
    for name, other in ("ab", "ba"):
        root[name] = {"anyOf": [{"anyOf": [{"$ref": f"#/{other}"}] * 50}] * 50}
    assert types_of(root, "key") in (None, frozenset())
    deep = {"type": "integer"}
    for _ in range(5000):
        deep = {"anyOf": [deep]}
    assert types_of({"properties": {"key": deep}}, "key") is None


@given(st.text(), st.sampled_from([None, frozenset({"string"}), frozenset({"integer"}), frozenset({"string", "null"})]))
def test_every_text_becomes_json(text, types):
    json.loads(json_of(text, types))


@given(st.text())
def test_a_string_stays_as_it_is(text):
    assert json.loads(json_of(text, frozenset({"string"}))) == text


def test_tools_are_found_by_name_with_and_without_the_wrapper_of_a_request():
    schema = {"type": "object"}
    wrapped = {"type": "function", "function": {"name": "a", "parameters": schema}}
    assert parameters_of([wrapped, {"name": "b", "parameters": schema}, {"function": {"name": "c"}}, {"function": 3}]) == {
        "a": schema,
        "b": schema,
        "c": None,
    }
