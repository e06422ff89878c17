"""Types that a tool's JSON schema allows for a parameter, and a value as JSON text of such a type.

A model that writes values as plain text leaves it to the schema whether 42 is a number or a text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

TEXT = frozenset({"string"})
MOST_STEPS = 32  # from reference to reference, which may form a circle
MOST_DEPTH = 32  # of schemas within schemas


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The schema of the parameters of each tool by its name; `tools` are those of a chat request."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    named = [function for function in functions if isinstance(function, Mapping)]
    return {str(function.get("name")): function.get("parameters") for function in named}


def types_of(parameters: Any, key: str) -> frozenset[str] | None:
    """JSON types that `parameters` allow for the parameter `key`; None: any, since nothing restricts it."""
    schema = _resolved(parameters, parameters)
    if schema is None:
        return None
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return _types(properties[key], parameters, set(), 0)
    return _types(schema.get("additionalProperties"), parameters, set(), 0)


def json_of(text: str, types: frozenset[str] | None) -> str:
    """`text` as JSON: itself where it is JSON of an allowed type, else a JSON string.

    Where a string is allowed among other types, only JSON of one of the others is not a string."""
    value = text.strip()
    try:
        kinds = _kinds(json.loads(value, parse_constant=_refuse))
    except (ValueError, RecursionError):  # no JSON, or nested too deeply to know
        return string_of(text)
    if types is None or "string" not in types or kinds & (types - TEXT):
        return value
    return string_of(text)


def string_of(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _types(schema: Any, root: Any, seen: set[int], depth: int) -> frozenset[str] | None:
    """Types that `schema` allows, None for any. A schema of `seen`, which refers to itself, adds none."""
    schema = _resolved(schema, root)
    if schema is None or depth > MOST_DEPTH:
        return None
    if id(schema) in seen:
        return frozenset()
    seen.add(id(schema))
    named = schema.get("type")
    if isinstance(named, str | list):
        return frozenset([named] if isinstance(named, str) else map(str, named))
    if "const" in schema:
        return _kinds(schema["const"])
    if isinstance(values := schema.get("enum"), list):
        return frozenset().union(*map(_kinds, values))
    for word, combine in (("anyOf", _union), ("oneOf", _union), ("allOf", _intersection)):
        if isinstance(parts := schema.get(word), list):
            return combine([_types(part, root, seen, depth + 1) for part in parts])
    return _implied(schema)


def _resolved(schema: Any, root: Any) -> Mapping[str, Any] | None:
    """The schema itself, or the one within `root` that it refers to; None if it is no object or refers elsewhere."""
    for _ in range(MOST_STEPS):
        if not isinstance(schema, Mapping):
            return None
        reference = schema.get("$ref")
        if reference is None:
            return schema
        schema = _referred(reference, root)
    return None


def _referred(reference: Any, root: Any) -> Any:
    """The place in `root` of a reference such as "#/$defs/City"."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    place = root
    for word in reference[2:].split("/"):
        name = word.replace("~1", "/").replace("~0", "~")
        place = place.get(name) if isinstance(place, Mapping) else None
    return place


def _union(choices: list[frozenset[str] | None]) -> frozenset[str] | None:
    known = [types for types in choices if types is not None]
    return frozenset().union(*known) if len(known) == len(choices) else None


def _intersection(parts: list[frozenset[str] | None]) -> frozenset[str] | None:
    known = [types for types in parts if types]
    return frozenset.intersection(*known) if known else None


def _implied(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """The type of a schema that names none."""
    if "properties" in schema:
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else None


def _kinds(value: Any) -> frozenset[str]:
    """Names of the types that a JSON value has: a whole number is a number, too."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    names = {str: "string", float: "number", list: "array", dict: "object", type(None): "null"}
    return frozenset({names[type(value)]}) if type(value) in names else frozenset()


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
