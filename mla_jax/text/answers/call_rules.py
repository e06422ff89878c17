"""Grammars of calls in each format. Arguments follow the schemas of the tools, as far as the format can say it.

Where arguments are JSON, that is all of the schema. Where they are keys and values in tags, the keys come in the order of the
schema, and each value is JSON of its own schema, or text: of a given choice or length, or any."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mla_jax.base.errors import BadRequest, printable, shown
from mla_jax.text.answers.arguments import valid_name
from mla_jax.text.answers.grammars import (
    CallGrammar,
    DsmlCalls,
    GlmCalls,
    JsonCalls,
    function_header,
    id_header,
)
from mla_jax.text.answers.lark_rules import ANY_TEXT, MAYBE_LINE, LarkRules, json_item, quoted
from mla_jax.text.answers.schemas import MOST_STEPS, TEXT, types_of

MOST_FORCED = 512  # tools whose calls one grammar describes
_NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
_NAME_END, _IS_TEXT, _IS_JSON = (
    '">\n',
    '" string="true">',
    '" string="false">',
)  # behind names and keys of DSML
_ANY_KEY = r"/[^<>\"\s]{1,100}/"
_BEYOND = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentSchemas", "propertyNames")
_DEFINITIONS = ("$defs", "definitions")

# Of the rule's name, the key (None: any) and the form of its value
PairRule = Callable[[str, str | None, "ValueForm"], str]


def add_calls(
    rules: LarkRules, calls: CallGrammar, tools: Sequence[Mapping[str, Any]], one_call: bool
) -> str:
    """Adds the rule of one or more calls of `tools`, or of exactly one, and returns its name.

    Raises BadRequest for a tool whose calls no grammar can describe."""
    if len(tools) > MOST_FORCED:
        raise BadRequest(
            f"tools has {len(tools):,} entries, and a grammar is to describe their calls",
            f"the limit is {MOST_FORCED}",
        )
    written = [_add_call(rules, calls, f"call_{at}", tool["function"]) for at, tool in enumerate(tools)]
    call = rules.add("call", " | ".join(written))
    between = "" if isinstance(calls, DsmlCalls) else MAYBE_LINE
    several = call if one_call else f"{call} ({between} {call})*"
    return rules.add("calls", _section(rules, calls, several))


def _section(rules: LarkRules, calls: CallGrammar, several: str) -> str:
    """The calls within the tags around all of them."""
    if isinstance(calls, GlmCalls):
        return several
    if isinstance(calls, JsonCalls):
        return f"{rules.tag(calls.section[0])} {several} {rules.tag(calls.section[1])}"
    sections = [(rules.tag(f"{begin}\n"), rules.tag(end)) for begin, end in calls.sections]
    return " | ".join(f"{begin} {several} {end}" for begin, end in sections)


def _add_call(rules: LarkRules, calls: CallGrammar, rule: str, function: Mapping[str, Any]) -> str:
    name, parameters = function["name"], function.get("parameters")
    if valid_name(name) != name:
        raise BadRequest(
            f"a call of the tool {printable(name)} cannot be forced",
            "its name has other signs than names have",
        )
    if isinstance(calls, JsonCalls):
        return rules.add(rule, _json_call(rules, calls, name, parameters))
    if isinstance(calls, GlmCalls):
        return rules.add(rule, _glm_call(rules, calls, rule, name, parameters))
    return rules.add(rule, _dsml_call(rules, calls, rule, name, parameters))


def _json_call(rules: LarkRules, calls: JsonCalls, name: str, parameters: Any) -> str:
    """The words between the tags are those that the format's header reads."""
    arguments = json_item(_NO_ARGUMENTS if parameters is None else {"type": "object", **parameters})
    begin, (first, *others), end = calls.begin, calls.separators, rules.tag(calls.ends[0])
    if calls.header is function_header:
        head = rules.tag(f"{begin}function{first}{name}\n{''.join(others)}\n")
        return f"{head} {arguments} {MAYBE_LINE} {end}"
    if calls.header is id_header:
        return f"{rules.tag(f'{begin}functions.{name}:')} /[0-9]{{1,4}}/ {rules.tag(first)} {arguments} {end}"
    return f"{rules.tag(begin + name + first)} {arguments} {end}"


def _glm_call(rules: LarkRules, calls: GlmCalls, rule: str, name: str, parameters: Any) -> str:
    """The tags do not say if a value is text. Where other types are allowed as well, any text is."""
    value_begin, value_end = calls.value

    def pair(at: str, key: str | None, form: ValueForm) -> str:
        head = f"{rules.tag(calls.key[0])} {_key(key)} {rules.tag(calls.key[1])} {MAYBE_LINE} {rules.tag(value_begin)}"
        values = _text_value(rules, at, form, value_end)
        if form.schema is not None and (not values or form.choices):
            values.append(f"{json_item(form.schema)} {rules.tag(value_end)}")
        return rules.add(at, f"{head} ({' | '.join(values)}) {MAYBE_LINE}")

    pairs = _pairs(rule, name, parameters, pair)
    return f"{rules.tag(calls.call[0] + name)} {MAYBE_LINE} {pairs} {rules.tag(calls.call[1])}"


def _dsml_call(rules: LarkRules, calls: DsmlCalls, rule: str, name: str, parameters: Any) -> str:
    """The tag of a key says if its value is text."""
    key_begin, value_end = calls.parameter

    def pair(at: str, key: str | None, form: ValueForm) -> str:
        texts = _text_value(rules, at, form, value_end)
        values = [f"{quoted(_IS_TEXT)} {text}" for text in texts]
        if form.schema is not None:
            values.append(f"{quoted(_IS_JSON)} {json_item(form.schema)} {rules.tag(value_end)}")
        return rules.add(at, rf'{rules.tag(key_begin)} {_key(key)} ({" | ".join(values)}) "\n"')

    pairs = _pairs(rule, name, parameters, pair)
    begin, end = rules.tag(calls.call[0] + name), rules.tag(calls.call[1] + "\n")
    return f"{begin} {quoted(_NAME_END)} {pairs} {end}"


def _text_value(rules: LarkRules, at: str, form: "ValueForm", end: str) -> list[str]:
    """Forms of a value that is text, each with the tag behind it."""
    found = [f"{quoted(choice)} {rules.tag(end)}" for choice in form.choices]
    return found if form.text is None else [*found, rules.up_to(f"{at}_text", end, form.text)]


def _key(key: str | None) -> str:
    """A key, or any."""
    if key is None:
        return _ANY_KEY
    if key != key.strip() or not key or set(key) & set('<>"\n'):
        raise BadRequest(
            f"a call with the parameter {printable(key)} cannot be forced", "this model writes it in tags"
        )
    return quoted(key)


def _pairs(rule: str, name: str, parameters: Any, pair: PairRule) -> str:
    """The pairs of a call. A schema without properties allows any, unless it says otherwise."""
    if parameters is None:
        return ""
    properties, required = _properties(name, parameters)
    keys = [*properties, *(key for key in required if key not in properties)]
    if not keys:
        closed = _followed(parameters, parameters).get("additionalProperties") is False
        return "" if closed else pair(f"{rule}_any", None, ValueForm.of(parameters, "")) + "*"
    found = [pair(f"{rule}_{at}", key, ValueForm.of(parameters, key)) for at, key in enumerate(keys)]
    return " ".join(one if key in required else f"{one}?" for key, one in zip(keys, found, strict=True))


def _properties(name: str, parameters: Any) -> tuple[Mapping[str, Any], list[str]]:
    """The properties of a call's arguments, and the names of those that are required."""
    schema = _followed(parameters, parameters)
    beyond = next((word for word in (*_BEYOND, "$ref") if word in schema), None)
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if beyond is None and isinstance(properties, Mapping) and isinstance(required, list):
        return properties, [key for key in required if isinstance(key, str)]
    found = beyond or shown({"properties": properties, "required": required})
    raise BadRequest(
        f"a call of {name} cannot be forced: its parameters have {found}",
        "this model writes arguments in tags: expected an object with properties",
    )


@dataclass(frozen=True)
class ValueForm:
    """Forms of a value: some texts, text of a pattern, or JSON of a schema. There may be several; None is none."""

    choices: tuple[str, ...] = ()
    text: str | None = None
    schema: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, parameters: Any, key: str) -> "ValueForm":
        """The forms that the schema of the arguments allows for `key`."""
        types, schema = types_of(parameters, key), _schema_of(parameters, key)
        followed = _followed(schema, parameters)
        listed = [followed["const"]] if "const" in followed else followed.get("enum")
        if isinstance(listed, list):
            texts = tuple(value for value in listed if isinstance(value, str))
            others = [value for value in listed if not isinstance(value, str)]
            return cls(texts, schema={"enum": others} if others else None)
        if types == TEXT:
            return cls(text=_text_of(followed))
        own = schema if isinstance(schema, Mapping) else {}
        whole = {**{word: parameters[word] for word in _DEFINITIONS if word in parameters}, **own}
        return cls(text=ANY_TEXT if types is None or "string" in types else None, schema=whole)


def _schema_of(parameters: Any, key: str) -> Any:
    root = _followed(parameters, parameters)
    properties = root.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return root.get("additionalProperties")


def _followed(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema, or the definition that it refers to; empty where it says nothing. One that refers elsewhere stays as it is."""
    for _ in range(MOST_STEPS):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or reference.count("/") != 2:
            break
        _, words, name = reference.split("/")
        definitions = root.get(words) if words in _DEFINITIONS else None
        if not isinstance(definitions, Mapping) or name not in definitions:
            break
        schema = definitions[name]
    return schema if isinstance(schema, Mapping) else {}


def _text_of(schema: Mapping[str, Any]) -> str:
    """Text of the length that a schema wants."""
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if any(value != "" and (type(value) is not int or value < 0) for value in (least, most)):
        raise BadRequest(f"the length of a text is {shown(least)} to {shown(most)}", "expected whole numbers")
    return ANY_TEXT if (least, most) == (0, "") else f"(?s:.{{{least},{most}}})"
