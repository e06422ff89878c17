"""Bodies of /v1/responses as those of chats. Nothing is stored: a request has the whole conversation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mla_jax.base.errors import shown
from mla_jax.base.options import SamplingParams
from mla_jax.engine.llm import LLM
from mla_jax.serve.asked import Asked, read_chat
from mla_jax.serve.bodies import SAMPLING_KEYS, ChatBody, ResponseBody
from mla_jax.serve.conversations import Variables
from mla_jax.serve.dialogues import Dialogue
from mla_jax.serve.errors import BadField, renamed
from mla_jax.serve.fields import known_word, required_text

# Keys of chats in errors, and their names here
RESPONSE_NAMES = {
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
NOT_STORED = "nothing is stored here: send the whole conversation as input"
# Keys for features that are not there, the values that do not ask for them, and what to do
UNSERVED: dict[str, tuple[tuple, str]] = {
    "background": ((False,), "wait for the answer, or stream it"),
    "context_management": (([],), "shorten the input yourself"),
    "conversation": ((), NOT_STORED),
    "moderation": ((), "expected no such key"),
    "previous_response_id": ((), NOT_STORED),
    "prompt": ((), "send the prompt as input and instructions"),
    "top_logprobs": ((0,), "chats and completions have them"),
    "truncation": (("disabled",), "expected disabled: an input that is too long gets an error"),
}
LOGPROBS = "message.output_text.logprobs"
# Agents send such tools with every request, whatever the model. The model is not told of them
LEFT_OUT = ("custom", "image_generation", "namespace", "tool_search", "web_search")
FUNCTION_KEYS = ("name", "description", "parameters", "strict")
FORMAT_KEYS = ("name", "description", "schema", "strict")
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
SPEAKERS = ("user", "assistant", "system", "developer")


def read_response(
    body: ResponseBody, llm: LLM, defaults: SamplingParams, model: str, variables: Variables
) -> Asked:
    """As `read_chat`."""
    chat = chat_of_response(body)
    with renamed(RESPONSE_NAMES):
        return read_chat(chat, llm, defaults, model, variables)


def chat_of_response(body: ResponseBody) -> ChatBody:
    """The chat that a body asks for. Raises BadField for what cannot be served."""
    given = body.given()
    _refuse_unserved(given)
    chat = {key: given[key] for key in SAMPLING_KEYS if key in given}
    kept = ("parallel_tool_calls", "chat_template_kwargs")
    chat |= {key: given[key] for key in kept if key in given}
    chat["messages"] = _messages(given)
    if "max_output_tokens" in given:
        chat["max_tokens"] = given["max_output_tokens"]
    tools = [_tool(f"tools[{at}]", tool) for at, tool in enumerate(given.get("tools", []))]
    chat["tools"] = [tool for tool in tools if tool is not None]
    chat["tool_choice"] = _tool_choice(given.get("tool_choice", "auto"))
    chat["response_format"] = _response_format(given.get("text", {}))
    return ChatBody(**chat)


def _refuse_unserved(given: Mapping[str, Any]) -> None:
    for key, (neutral, hint) in UNSERVED.items():
        if key in given and given[key] not in neutral:
            raise BadField(key, f"is {shown(given[key])}, which is not supported", hint)
    if LOGPROBS in given.get("include", []):
        raise BadField(
            "include", f"has {LOGPROBS}, which is not supported", "chats and completions have them"
        )


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation; instructions stand before it."""
    dialogue, said = Dialogue(), given["input"]
    if instructions := given.get("instructions"):
        dialogue.say("system", instructions)
    if isinstance(said, str):
        dialogue.say("user", said)
    elif not said:
        raise BadField("input", "is an empty list", "give at least one item")
    else:
        for at, item in enumerate(said):
            _add_item(dialogue, f"input[{at}]", item)
    return dialogue.messages


def _add_item(dialogue: Dialogue, where: str, item: Mapping[str, Any]) -> None:
    kind = item.get("type") or "message"
    hint = NOT_STORED if kind == "item_reference" else None
    ITEMS[known_word(f"{where}.type", kind, ITEMS, hint)](dialogue, where, item)


def _add_message(dialogue: Dialogue, where: str, item: Mapping[str, Any]) -> None:
    role = known_word(f"{where}.role", item.get("role"), SPEAKERS)
    text = _text(f"{where}.content", item.get("content"))
    if role == "assistant":
        dialogue.answer(text)
    else:
        dialogue.say(role, text)


def _add_reasoning(dialogue: Dialogue, where: str, item: Mapping[str, Any]) -> None:
    """Its content. Summaries are not made here, and nothing is encrypted."""
    content = item.get("content") or []
    if not isinstance(content, list):
        raise BadField(f"{where}.content", f"is {shown(content)}", "expected a list of reasoning_text")
    texts = [required_text(f"{where}.content[{at}]", part, "text") for at, part in enumerate(content)]
    if texts:
        dialogue.reason("".join(texts))


def _add_call(dialogue: Dialogue, where: str, item: Mapping[str, Any]) -> None:
    id, name, arguments = (required_text(where, item, key) for key in ("call_id", "name", "arguments"))
    dialogue.call(id, name, arguments)


def _add_result(dialogue: Dialogue, where: str, item: Mapping[str, Any]) -> None:
    dialogue.result(required_text(where, item, "call_id"), _text(f"{where}.output", item.get("output")))


ITEMS: dict[str, Callable[[Dialogue, str, Mapping[str, Any]], None]] = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_result,
}


def _text(where: str, content: Any) -> str:
    """A text, or the texts of parts in a row."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadField(where, f"is {shown(content)}", "expected a text, or a list of parts")
    return "".join(_part(f"{where}[{at}]", part) for at, part in enumerate(content))


def _part(where: str, part: Any) -> str:
    kind = known_word(f"{where}.type", part.get("type") if isinstance(part, Mapping) else None, TEXT_PARTS)
    return required_text(where, part, TEXT_PARTS[kind])


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """A tool as chats have it; None for one that is left out."""
    kind = tool.get("type")
    if kind in LEFT_OUT:
        return None
    known_word(f"{where}.type", kind, ("function",))
    required_text(where, tool, "name")
    return {"type": "function", "function": _without_nulls(tool, FUNCTION_KEYS)}


def _tool_choice(choice: Any) -> Any:
    match choice:
        case str():
            return choice
        case {"type": "function", "name": name}:
            return _named(name)
        case {"type": "allowed_tools", "mode": mode, "tools": [*tools]}:
            names = [_named(tool.get("name")) for tool in tools if isinstance(tool, Mapping)]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": names}}
    expected = 'expected auto, none, required, {"type": "function", "name": ...} or allowed_tools'
    raise BadField("tool_choice", f"is {shown(choice)}", expected)


def _named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _response_format(text: Mapping[str, Any]) -> dict[str, Any]:
    form = text.get("format") or {"type": "text"}
    if not isinstance(form, Mapping):
        raise BadField("text.format", f"is {shown(form)}", "expected an object")
    if form.get("type") != "json_schema":
        return {"type": form.get("type")}
    return {"type": "json_schema", "json_schema": _without_nulls(form, FORMAT_KEYS)}


def _without_nulls(given: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """Those of `keys` that are given, and not null."""
    return {key: given[key] for key in keys if given.get(key) is not None}
