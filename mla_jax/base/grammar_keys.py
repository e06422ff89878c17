"""Keys of OpenAI's interface and of vLLM that name the form of an answer, as a `Grammar`. No JAX here."""

import re
from collections.abc import Mapping
from typing import Any

from mla_jax.base.errors import BadRequest, printable, shown
from mla_jax.base.grammar import Grammar
from mla_jax.base.names import nearest

# Keys that hold a grammar, and what `Grammar.of` calls it
GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
}
STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
    "json_object": "json_object",
}
FORM_KEYS = ("response_format", "structured_outputs", *GUIDED)
RESPONSE_FORMATS = ("text", "json_object", "json_schema")
_SCHEMA_KEYS = {  # of response_format.json_schema; only its schema changes the answer
    "name": (str, "text"),
    "description": (str, "text"),
    "schema": (Mapping, "a JSON schema, which is an object"),
    "strict": (bool, "true or false"),
}
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)


def take_grammar(given: dict[str, Any]) -> None:
    """Leaves one `grammar` instead of the keys that name the form of an answer.

    Raises BadRequest for two of them, and for one that is not understood; the text names the key."""
    asked = {key: _read(key, given.pop(key)) for key in FORM_KEYS if key in given}
    found = {key: grammar for key, grammar in asked.items() if grammar is not None}
    named = [*found, *(["grammar"] if "grammar" in given else [])]
    if len(named) > 1:
        raise BadRequest(f"{' and '.join(named)} each name a form of the answer", "expected one of them")
    if found:
        given["grammar"] = found[named[0]]


def _read(key: str, value: Any) -> Grammar | None:
    if key in GUIDED:
        return _grammar(key, GUIDED[key], value)
    return _response_format(value) if key == "response_format" else _structured(value)


def _response_format(value: Any) -> Grammar | None:
    """OpenAI's key. The type text asks for nothing."""
    given = _without_nulls(_object("response_format", value))
    kind = given.get("type")
    if kind not in RESPONSE_FORMATS:
        expected = f"expected one of {', '.join(RESPONSE_FORMATS)}"
        raise BadRequest(f"the type of response_format is {shown(kind)}", expected)
    _refuse_others("response_format", given, ("type", "json_schema") if kind == "json_schema" else ("type",))
    if kind == "json_schema":
        return _named_schema(given.get("json_schema"))
    return Grammar.json_object() if kind == "json_object" else None


def _named_schema(value: Any) -> Grammar:
    """A schema with its name, as OpenAI has it. It is followed strictly, whether or not `strict` says so."""
    where = "response_format.json_schema"
    given = _without_nulls(_object(where, value))
    _refuse_others(where, given, _SCHEMA_KEYS)
    for key, one in given.items():
        kinds, expected = _SCHEMA_KEYS[key]
        if not isinstance(one, kinds):
            raise BadRequest(f"{where}.{key} is {shown(one)}", f"expected {expected}")
    if "schema" not in given:
        raise BadRequest(f"{where} has no schema", 'expected {"name": ..., "schema": {...}}')
    return _grammar(f"{where}.schema", "json_schema", given["schema"])


def _structured(value: Any) -> Grammar:
    """vLLM's key: an object with one key, which may be among others that are null."""
    where = "structured_outputs"
    given = _without_nulls(_object(where, value))
    _refuse_others(where, given, STRUCTURED)
    if given.get("json_object") is False:
        del given["json_object"]
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise BadRequest(
            f"{where} has {len(given)} grammars: {found}", f"expected one of {', '.join(STRUCTURED)}"
        )
    ((key, one),) = given.items()
    return _grammar(f"{where}.{key}", STRUCTURED[key], one)


def _grammar(where: str, form: str, value: Any) -> Grammar:
    """The grammar in a key; the key's name stands before the reason why there is none."""
    if form == "lark" and isinstance(value, str) and _GBNF.search(value):
        hint = 'expected Lark, whose rules are written as in: start: "yes" | "no"'
        raise BadRequest(f"{where} has rules of GBNF, written with ::=", hint)
    try:
        return Grammar.of({form: value})
    except BadRequest as e:
        raise BadRequest(f"{where} is no grammar", *e.args) from e


def _object(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRequest(f"{where} is {shown(value)}", "expected an object")
    return value


def _without_nulls(given: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if value is not None}


def _refuse_others(where: str, given: Mapping[str, Any], known: Any) -> None:
    """Raises BadRequest for a key that is not `known`."""
    for key in given:
        if key not in known:
            raise BadRequest(f"{where} has the key {printable(str(key))}", nearest(str(key), known))
