"""Disguises of the words that a client gives a template in addition to contents: names, ids, tools, arguments, variables.

Templates look for some of them, as in `schema.type == 'string'`. So harmless words may stay: those that cannot become a part of a
control token, whatever a template writes next to them."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mla_jax.text.messages import ChatMessage

# Keys of tools that are the interface's own, wherever control tokens have such words
TOOL_KEYS = ("type", "function", "name", "description", "parameters", "strict")


class PartsOfTokens:
    """Texts of which a part can be a part of a control token, in any case of letters: one is within the other, one ends as the
    other begins, or the text has a sign of a token, such as "<"."""

    def __init__(self, control: Iterable[str]):
        tokens = [token.casefold() for token in control]
        self._signs = {c for token in tokens for c in token if not (c.isalnum() or c.isspace() or c == "_")}
        self._within = re.compile("|".join(map(re.escape, tokens)) or "(?!)")
        self._joined = "\n".join(tokens)
        self._longest = max(map(len, tokens), default=0)
        self._beginnings = {token[:end] for token in tokens for end in range(1, len(token))}
        self._ends = {token[start:] for token in tokens for start in range(1, len(token))}

    def __contains__(self, text: str) -> bool:
        text = text.casefold()
        sizes = range(1, min(self._longest, len(text) + 1))
        return (
            not self._signs.isdisjoint(text)
            or text in self._joined
            or any(text[-size:] in self._beginnings or text[:size] in self._ends for size in sizes)
            or self._within.search(text) is not None
        )


@functools.lru_cache(maxsize=8)
def token_parts(control: tuple[str, ...]) -> PartsOfTokens:
    """Those of these control tokens. A tokenizer has hundreds, so this takes tens of milliseconds once."""
    return PartsOfTokens(control)


@dataclass(frozen=True)
class Words:
    """Disguises words by `table`: all, or those among `parts` alone."""

    table: dict[int, str]
    parts: PartsOfTokens | None = None

    def disguised(self, value: Any) -> Any:
        """A JSON value with its texts and keys disguised."""
        if isinstance(value, str):
            stays = self.parts is not None and value not in self.parts
            return value if stays else value.translate(self.table)
        if isinstance(value, list):
            return [self.disguised(one) for one in value]
        if isinstance(value, dict):
            return {self.disguised(key): self.disguised(one) for key, one in value.items()}
        return value

    def of_message(self, message: ChatMessage) -> ChatMessage:
        """The message with all disguised but its role, content and reasoning."""
        found = {key: self.disguised(message[key]) for key in ("name", "tool_call_id") if key in message}
        if "tool_calls" in message:
            found["tool_calls"] = [self._tool_call(call) for call in message["tool_calls"]]
        return {**message, **found}

    def of_tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """A tool with the interface's own keys and type as they are."""
        found = self._entries(tool)
        found["type"], found["function"] = tool["type"], self._entries(tool["function"])
        return found

    def _tool_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, dict):
            arguments = {form: self.disguised(value) for form, value in arguments.items()}
        else:
            arguments = self.disguised(arguments)
        found = {"name": self.disguised(function["name"]), "arguments": arguments}
        return {key: self.disguised(call[key]) for key in ("id",) if key in call} | {
            "type": call["type"],
            "function": found,
        }

    def _entries(self, given: dict[str, Any]) -> dict[str, Any]:
        return {
            key if key in TOOL_KEYS else self.disguised(key): self.disguised(value)
            for key, value in given.items()
        }
