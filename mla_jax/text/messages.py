"""A client's messages, tools and template variables, checked, as plain JSON values. Templates are not known here.

The shapes are those of OpenAI's chat interface. null is absent, for every key."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mla_jax.base.errors import BadRequest, printable, shown
from mla_jax.base.files import MAX_DIGITS, json_value
from mla_jax.text.tokenizer import Tokenizer, check_text

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_KEYS = ("role", "content", "name")  # of a message of any role
KEYS_OF = {
    "assistant": ("reasoning_content", "reasoning", "tool_calls"),
    "tool": ("tool_call_id",),
}
REASONING = ("reasoning_content", "reasoning")  # two names of one key; templates know the first
THINKING = ("thinking", "enable_thinking")  # two names of one variable; templates know one of them
# Names in a template that are not the client's to set, in addition to the folder's own
PROTECTED = """
    messages tools add_generation_prompt continue_final_message chat_template tokenize bos_token eos_token pad_token unk_token
    raise_exception strftime_now namespace dict range lipsum cycler joiner
"""
SHAPE_OF_TOOLS = 'expected [{"type": "function", "function": {"name": ..., "parameters": {...}}}, ...]'
MAX_NESTING = 100  # of lists and objects in each other

ChatMessage = dict[str, Any]


def checked_messages(messages: Any, tokenizer: Tokenizer) -> list[ChatMessage]:
    """The messages as plain dicts, with texts for contents.

    `content` is None where an answer has only `tool_calls`. `arguments` of a call are {"text", "object"}, both the same JSON,
    or a text where the client gave none that is an object. Raises BadRequest for other shapes, and for a role that is part of a
    control token."""
    if not isinstance(messages, list | tuple) or not messages:
        raise BadRequest(
            "the conversation is not a list of messages", 'expected [{"role": "user", "content": ...}, ...]'
        )
    return [_message(f"message {at}", message, tokenizer) for at, message in enumerate(messages)]


def checked_tools(tools: Any) -> list[dict[str, Any]] | None:
    """The tools, each with its type; None if there are none. Raises BadRequest for other shapes."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise BadRequest(f"tools is {shown(tools)}", SHAPE_OF_TOOLS)
    return [_tool(f"tool {at}", tool) for at, tool in enumerate(tools)] or None


def checked_variables(variables: Any, reserved: Iterable[str]) -> dict[str, Any]:
    """The template variables, `thinking` and `enable_thinking` both if one is given. Raises BadRequest for a `reserved` name."""
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise BadRequest(f"chat_template_kwargs is {shown(variables)}", "expected an object of variables")
    taken = set(reserved)
    for name in variables:
        if not isinstance(name, str) or not name.isidentifier():
            raise BadRequest(f"{shown(name)} in chat_template_kwargs is no name of a template variable")
        if name in taken:
            raise BadRequest(f"chat_template_kwargs sets {name}", "this variable is not the client's to set")
    given = plain_json(variables, "chat_template_kwargs")
    thinking = [given[name] for name in THINKING if name in given]
    return {**dict.fromkeys(THINKING, thinking[0]), **given} if thinking else given


def refuse_no_answer(last: ChatMessage) -> None:
    """Raises BadRequest for a last message that the model cannot continue."""
    if last["role"] != "assistant" or "tool_calls" in last:
        found = "it has tool calls" if "tool_calls" in last else f"its role is {printable(last['role'])}"
        raise BadRequest("the last message cannot be continued", f"{found}; expected an answer of text")


def call_without_object(messages: list[ChatMessage]) -> str | None:
    """The first tool call whose arguments are no object."""
    for at, message in enumerate(messages):
        for number, call in enumerate(message.get("tool_calls", ())):
            if isinstance(call["function"]["arguments"], str):
                return f"tool call {number} of message {at}"
    return None


def plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of a JSON value in dicts and lists; raises BadRequest for anything else, such as NaN or half a surrogate pair."""
    if depth > MAX_NESTING:
        raise BadRequest(f"{where} is nested too deeply", f"the limit is {MAX_NESTING} levels")
    if isinstance(value, str):
        check_text(value)
        return value
    if isinstance(value, Mapping):
        texts = [key for key in value if isinstance(key, str)]
        if len(texts) == len(value):
            return {plain_json(key, where): plain_json(value[key], where, depth + 1) for key in texts}
    if isinstance(value, list | tuple):
        return [plain_json(one, where, depth + 1) for one in value]
    if value is None or isinstance(value, bool) or _is_number(value):
        return value
    raise BadRequest(f"{where} is no JSON value", f"found {shown(value)}")


def _is_number(value: Any) -> bool:
    """A number that JSON can have."""
    if isinstance(value, int):
        return abs(value) < 10**MAX_DIGITS
    return isinstance(value, float) and math.isfinite(value)


def _message(where: str, given: Any, tokenizer: Tokenizer) -> ChatMessage:
    if not isinstance(given, Mapping):
        raise BadRequest(f"{where} is not a role and a content", f"found {type(given).__name__}")
    given = {key: value for key, value in given.items() if value is not None}
    role = _text(where, given, "role")
    _check_role(where, role, tokenizer)
    _check_keys(where, role, given)
    message = {"role": role, "content": _content(where, given)}
    if reasoning := _reasoning(where, given):
        message["reasoning_content"] = reasoning
    message |= {key: _text(where, given, key) for key in ("name", "tool_call_id") if key in given}
    if calls := _tool_calls(where, given.get("tool_calls", [])):
        message["tool_calls"] = calls
    return message


def _check_role(where: str, role: str, tokenizer: Tokenizer) -> None:
    if role in ROLES:
        return
    if not role.strip() or any(role in text or text in role for text in tokenizer.control):
        raise BadRequest(
            f"the role of {where} is refused", f"found {printable(role)}, known: " + ", ".join(ROLES)
        )


def _check_keys(where: str, role: str, given: Mapping) -> None:
    """Raises BadRequest for a key that messages of this role do not have."""
    known = (*MESSAGE_KEYS, *KEYS_OF.get(role, ()))
    wrong = next((key for key in given if key not in known), None)
    if wrong is None:
        return
    finding = f"{where}, of the role {printable(role)}, has the key {shown(wrong)}"
    owners = [owner for owner, keys in KEYS_OF.items() if wrong in keys]
    expected = f"only the role {owners[0]} has it" if owners else f"expected {', '.join(known)}"
    raise BadRequest(finding, expected)


def _text(where: str, given: Mapping, key: str) -> str:
    """The text of a key that must be there."""
    value = given.get(key)
    if not isinstance(value, str):
        raise BadRequest(f"the {key} of {where} is not text", f"found {type(value).__name__}")
    check_text(value)
    return value


def _content(where: str, given: Mapping) -> str | None:
    """The content, of parts if it is a list; None for none next to tool calls, where clients also send an empty text."""
    content = given.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part(where, part) for part in content)
    if not content and given.get("tool_calls"):
        return None
    return _text(where, {"content": content}, "content")


def _part(where: str, part: Any) -> str:
    if not isinstance(part, Mapping) or not isinstance(kind := part.get("type"), str):
        raise BadRequest(f"{where} has a content part without a type", f"found {shown(part)}")
    if kind != "text":
        raise BadRequest(
            f"content part of type {printable(kind)} is not supported", f"it is in {where}; expected text"
        )
    return _text(f"a content part in {where}", part, "text")


def _reasoning(where: str, given: Mapping) -> str:
    """The reasoning of an answer, under either name; empty for none."""
    texts = [_text(where, given, key) for key in REASONING if key in given]
    if len({*texts}) > 1:
        raise BadRequest(f"{where} has two different reasonings", f"give one of {' and '.join(REASONING)}")
    return texts[0] if texts else ""


def _tool_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise BadRequest(f"tool_calls of {where} is {shown(calls)}", "expected a list")
    return [_tool_call(f"tool call {at} of {where}", call) for at, call in enumerate(calls)]


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    """A call without the keys that only streams have."""
    function = _function(where, call)
    named = {} if call.get("id") is None else {"id": _text(where, call, "id")}
    written = {"name": function["name"], "arguments": _arguments(where, function.get("arguments"))}
    return {**named, "type": "function", "function": written}


def _function(where: str, given: Any) -> Mapping:
    """The function of a tool or of a call, which has a name."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping):
        raise BadRequest(f"{where} has no function", f"found {shown(given)}")
    if given.get("type", "function") != "function":
        raise BadRequest(f"{where} is of the type {shown(given['type'])}", "only functions are supported")
    if not _text(where, function, "name"):
        raise BadRequest(f"the name of {where} is empty", "a function has a name")
    return function


def _arguments(where: str, given: Any) -> str | dict[str, Any]:
    """Arguments as JSON text and as an object; a text that is no such JSON stays alone."""
    if given is None or (isinstance(given, str) and not given.strip()):
        given = {}
    if isinstance(given, Mapping):
        found = plain_json(given, f"arguments of {where}")
        return {"text": json.dumps(found, ensure_ascii=False), "object": found}
    text = _text(where, {"arguments": given}, "arguments")
    try:
        found = json_value(text.encode(), "arguments", BadRequest)
    except BadRequest:
        return text
    if not isinstance(found, dict):
        return text
    return {"text": text, "object": plain_json(found, f"arguments of {where}")}


def _tool(where: str, tool: Any) -> dict[str, Any]:
    function = _function(where, tool)
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping | None):
        raise BadRequest(f"the parameters of {where} are {shown(parameters)}", "expected a JSON schema")
    if not isinstance(function.get("description"), str | None):
        raise BadRequest(f"the description of {where} is not text", f"found {shown(function['description'])}")
    return {"type": "function", **plain_json(tool, where)}
