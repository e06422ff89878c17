"""Calls of tools as parts of an answer, and arguments that come as keys and values as JSON text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mla_jax.text.answers.parts import CallArguments, CallBegin, CallEnd, Content, Part
from mla_jax.text.answers.schemas import TEXT, json_of, parameters_of, string_of, types_of

_NAME = re.compile(r"[\w.:/@$-]{1,256}")


def valid_name(text: str) -> str | None:
    """The name of a tool, None for a text that can be none."""
    name = text.strip()
    return name if _NAME.fullmatch(name) else None


class CallWriter:
    """Parts of the calls that a grammar reads, one call after the other; `tools` are those of the request."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()):
        self._parameters = parameters_of(tools)
        self._parts: list[Part] = []
        self._index = -1

    def begin(self, name: str, id: str | None = None) -> None:
        self._index += 1
        self._parts.append(CallBegin(self._index, name, id))

    def arguments(self, piece: str) -> None:
        if piece:
            self._parts.append(CallArguments(self._index, piece))

    def end(self) -> None:
        self._parts.append(CallEnd(self._index))

    def text(self, text: str) -> None:
        """Gives back text that is no part of a call."""
        if text:
            self._parts.append(Content(text))

    def pairs(self, name: str) -> "Pairs":
        """A writer of the arguments of the call that has just begun."""
        return Pairs(self, self._parameters.get(name))

    def take(self) -> list[Part]:
        """The parts since they were taken last."""
        parts, self._parts = self._parts, []
        return parts


class Pairs:
    """Keys and values as the JSON text of an object. The text of a string is written at once, other values when they are whole.

    `parameters` is the schema of the arguments, None if it is not known."""

    def __init__(self, writer: CallWriter, parameters: Any):
        self._writer, self._parameters = writer, parameters
        self._before = "{"
        self._types: frozenset[str] | None = None
        self._value: str | None = None  # None: a string, which is written while it arrives

    def begin(self, key: str, is_string: bool | None = None) -> None:
        """Begins the value of `key`; where the model does not say if it `is_string`, the schema does."""
        self._types = types_of(self._parameters, key) if is_string is None else None
        streams = self._types == TEXT if is_string is None else is_string
        self._value = None if streams else ""
        self._writer.arguments(self._before + string_of(key) + (': "' if streams else ": "))
        self._before = ", "

    def push(self, text: str) -> None:
        """Takes more of the value."""
        if self._value is None:
            self._writer.arguments(string_of(text)[1:-1])
        else:
            self._value += text

    def close(self) -> None:
        """Ends the value."""
        self._writer.arguments('"' if self._value is None else json_of(self._value, self._types))

    def cut(self) -> None:
        """Writes the part of the value that has come when the answer ends within it."""
        self._writer.arguments(self._value or "")

    def end(self) -> None:
        self._writer.arguments("{}" if self._before == "{" else "}")
        self._writer.end()
