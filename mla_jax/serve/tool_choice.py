"""The key tool_choice: whether the model may call tools, must, and which."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mla_jax.base.errors import BadRequest, printable, shown
from mla_jax.text.answers.schemas import parameters_of

EXPECTED = 'expected auto, none, required, or {"type": "function", "function": {"name": ...}}'


class ForcedCalls(NamedTuple):
    """An answer that has to call a tool: one of `names`. `once`: that is one call, no more."""

    names: tuple[str, ...]
    once: bool

    def of(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of `tools` that may be called."""
        return [tool for tool in tools if any(name in self.names for name in parameters_of([tool]))]


def take_tool_choice(given: dict[str, Any]) -> ForcedCalls | None:
    """Leaves tools that the model is to know of; None where it need not call any. Raises BadRequest for another choice."""
    choice = given.pop("tool_choice", "auto")
    if choice == "none":
        given.pop("tools", None)
    if choice in ("none", "auto"):
        return None
    known = [*parameters_of(given.get("tools") or [])]
    if not known:
        raise BadRequest(
            f"tool_choice is {shown(choice)}", "there are no tools to call: expected tools beside it"
        )
    if choice == "required":
        return ForcedCalls(tuple(known), once=False)
    kind, body = _chosen(choice)
    if kind == "function":
        return ForcedCalls((_known_name(body.get("name"), known),), once=True)
    return _allowed(given, body, known)


def _chosen(choice: Any) -> tuple[str, Mapping[str, Any]]:
    """The type of an object, and the object that it has under that name."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    body = choice.get(kind) if kind in ("function", "allowed_tools") else None
    if not isinstance(body, Mapping):
        raise BadRequest(f"tool_choice is {shown(choice)}", EXPECTED)
    return str(kind), body


def _known_name(name: Any, known: list[str]) -> str:
    if name not in known:
        found = printable(name) if isinstance(name, str) else shown(name)
        raise BadRequest(
            f"tool_choice names the function {found}", f"tools has {', '.join(map(printable, known))}"
        )
    return name


def _allowed(given: dict[str, Any], body: Mapping[str, Any], known: list[str]) -> ForcedCalls | None:
    """OpenAI's list of tools: where the model may do without a call, it is told of these tools alone."""
    mode, entries = body.get("mode"), body.get("tools")
    if mode not in ("auto", "required") or not isinstance(entries, list) or not entries:
        expected = 'expected {"mode": "auto" or "required", "tools": [{"type": "function", "function": {"name": ...}}, ...]}'
        raise BadRequest(f"tool_choice has allowed_tools {shown(body)}", expected)
    names = tuple(_known_name(_chosen(entry)[1].get("name"), known) for entry in entries)
    forced = ForcedCalls(names, once=False)
    if mode == "required":
        return forced
    given["tools"] = forced.of(given["tools"])
    return None
