"""Ranges and shapes of keys as /openapi.json documents them. They are checked where sampling parameters and prompts are made."""

from typing import Any

from pydantic import Field

from mla_jax.base.grammar import MAX_CHOICES
from mla_jax.base.grammar_keys import RESPONSE_FORMATS
from mla_jax.base.options import MAX_BIASES, MAX_FORKS, MAX_LOGPROBS, MAX_STOPS, MAX_TIMEOUT
from mla_jax.text.messages import ROLES

KeyShape = dict[str, Any]  # a JSON schema

TEXT_VALUE: KeyShape = {"type": "string"}
TOKEN_ID: KeyShape = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
NAME: KeyShape = {"type": "string", "minLength": 1}
SCORES: KeyShape = {"minimum": 0, "maximum": MAX_LOGPROBS}
PROBABILITY: KeyShape = {"minimum": 0, "maximum": 1}
PENALTY: KeyShape = {"minimum": -100, "maximum": 100}
TOKEN_COUNT: KeyShape = {"minimum": 0}
ANSWER_COUNT: KeyShape = {"minimum": 1, "maximum": MAX_FORKS}
TIME_LIMIT: KeyShape = {"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT}


def or_null(*shapes: KeyShape) -> KeyShape:
    """Any of the shapes, or null, which is an absent key."""
    return {"anyOf": [*shapes, {"type": "null"}]}


def object_with(*required: str, **properties: KeyShape) -> KeyShape:
    return {"type": "object", "properties": properties, "required": list(required)}


def closed(shape: KeyShape) -> KeyShape:
    """The object without further keys."""
    return {**shape, "additionalProperties": False}


def list_of(shape: KeyShape, **limits: int) -> KeyShape:
    return {"type": "array", "items": shape, **limits}


STOPS = or_null(NAME, list_of(NAME, maxItems=MAX_STOPS))
STOP_IDS = or_null(list_of(TOKEN_ID, maxItems=MAX_STOPS))
PROMPT_KEY: KeyShape = {
    "anyOf": [TEXT_VALUE, *(list_of(one, minItems=1) for one in (TOKEN_ID, TEXT_VALUE, list_of(TOKEN_ID)))]
}
BIASES: KeyShape = {"propertyNames": {"pattern": "^[0-9]{1,9}$"}, "maxProperties": MAX_BIASES}
BIASES |= {"additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}

SCHEMA: KeyShape = {"type": "object", "description": "a JSON schema"}
CHOICE_TEXTS = list_of(TEXT_VALUE, minItems=1, maxItems=MAX_CHOICES)
NAMED_SCHEMA = closed(object_with("schema", name=TEXT_VALUE, strict={"type": "boolean"}, schema=SCHEMA))
RESPONSE_FORMAT = or_null(
    closed(object_with("type", type={"enum": [kind for kind in RESPONSE_FORMATS if kind != "json_schema"]})),
    closed(object_with("type", "json_schema", type={"const": "json_schema"}, json_schema=NAMED_SCHEMA)),
)
GRAMMARS = {
    "json": SCHEMA,
    "regex": TEXT_VALUE,
    "choice": CHOICE_TEXTS,
    "grammar": TEXT_VALUE,
    "json_object": {"const": True},
}
STRUCTURED_OUTPUTS = or_null(*(closed(object_with(key, **{key: shape})) for key, shape in GRAMMARS.items()))

CONTENT = {
    "anyOf": [TEXT_VALUE, list_of(object_with("type", "text", type={"const": "text"}, text=TEXT_VALUE))]
}
CALLED = object_with("name", "arguments", name=NAME, arguments=TEXT_VALUE)
CALL = object_with("function", id=TEXT_VALUE, type={"const": "function"}, function=CALLED)
ANSWER_SHAPE = {"role": {"const": "assistant"}, "reasoning_content": or_null(TEXT_VALUE)}
MESSAGE: KeyShape = {
    "anyOf": [
        object_with(
            "role", "content", role={"enum": [one for one in ROLES if one != "tool"]}, content=CONTENT
        ),
        object_with("role", "content", **ANSWER_SHAPE, content=CONTENT),
        object_with(
            "role",
            "tool_calls",
            **ANSWER_SHAPE,
            content=or_null(CONTENT),
            tool_calls=list_of(CALL, minItems=1),
        ),
        object_with("role", "content", role={"const": "tool"}, content=CONTENT, tool_call_id=TEXT_VALUE),
    ]
}
MESSAGES = or_null(list_of(MESSAGE, minItems=1))
TEXT_OR_MESSAGES: KeyShape = {"anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}]}
FUNCTION = object_with("name", name=NAME, description=TEXT_VALUE, parameters=SCHEMA)
TOOL = object_with("function", type={"const": "function"}, function=FUNCTION)
TOOLS = or_null(list_of(TOOL))
NAMED_FUNCTION = object_with(
    "type", "function", type={"const": "function"}, function=object_with("name", name=TEXT_VALUE)
)
ALLOWED_TOOLS = object_with(
    "mode", "tools", mode={"enum": ["auto", "required"]}, tools=list_of(NAMED_FUNCTION)
)
TOOL_CHOICE = or_null(
    {"enum": ["auto", "none", "required"]},
    NAMED_FUNCTION,
    object_with("type", "allowed_tools", type={"const": "allowed_tools"}, allowed_tools=ALLOWED_TOOLS),
)


def key(shape: KeyShape) -> Any:
    """A key of a body that may be absent, and is documented to have this shape."""
    return Field(None, json_schema_extra=shape)
