"""Bodies of Anthropic's /v1/messages as those of chats."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mla_jax.base.errors import shown
from mla_jax.base.options import SamplingParams
from mla_jax.engine.llm import LLM
from mla_jax.serve.asked import Asked, read_chat, tokens_of_chat
from mla_jax.serve.bodies import SAMPLING_KEYS, ChatBody, MessageBody, PromptedBody
from mla_jax.serve.conversations import Variables
from mla_jax.serve.dialogues import Dialogue
from mla_jax.serve.errors import BadField, renamed
from mla_jax.serve.fields import known_word, required_text
from mla_jax.serve.tool_choice import take_tool_choice

# Keys of chats in errors, and their names here
MESSAGE_NAMES = {
    "continue_final_message": "messages",
    "response_format": "output_config.format",
    "response_format.json_schema": "output_config.format",
}
# A line that Claude Code writes before its system prompt, another one for each request: no prefix would be found again
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
THINKS = {"enabled": True, "adaptive": True, "disabled": False}
SAID_BY_MODEL = ("text", "thinking", "tool_use", "redacted_thinking")
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Keys for features that are not there. Others that are not known are let through, as in chats
NOT_SERVED = ("container", "mcp_servers")


def read_message(
    body: MessageBody, llm: LLM, defaults: SamplingParams, model: str, variables: Variables
) -> Asked:
    """As `read_chat`. More tokens than the context has room for are cut to that: clients always name a number."""
    given = body.given()
    for key in NOT_SERVED:
        if given.get(key):
            raise BadField(key, f"is {shown(given[key])}, which is not supported", "expected no such key")
    chat = {key: given[key] for key in SAMPLING_KEYS if key in given} | _prompted(given)
    if "stop_sequences" in given:
        chat["stop"] = given["stop_sequences"]
    chat["max_tokens"] = given["max_tokens"]
    with renamed(MESSAGE_NAMES):
        return read_chat(ChatBody(**chat), llm, defaults, model, variables, cut=True)


def tokens_of_message(body: PromptedBody, llm: LLM, variables: Variables) -> list[int]:
    """The prompt of a body; raises as `read_message`."""
    chat = _prompted(body.given())
    with renamed(MESSAGE_NAMES):
        take_tool_choice(chat)
        return tokens_of_chat(chat, llm, variables)


def _prompted(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a chat that its prompt and the form of its answer depend on. Raises BadField."""
    chat: dict[str, Any] = {"messages": _messages(given)}
    chat["tools"] = [_tool(f"tools.{at}", tool) for at, tool in enumerate(given.get("tools", []))]
    chat |= _tool_choice(given.get("tool_choice", {"type": "auto"}))
    chat["chat_template_kwargs"] = {**_thinking(given), **given.get("chat_template_kwargs", {})}
    if form := given.get("output_config", {}).get("format"):
        chat["response_format"] = _response_format(form)
    last = chat["messages"][-1]
    if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    return chat


def _messages(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    dialogue = Dialogue()
    if system := BILLING.sub("", _text("system", given.get("system", ""), "\n")):
        dialogue.say("system", system)
    for at, message in enumerate(given["messages"]):
        where = f"messages.{at}"
        role = known_word(f"{where}.role", message.get("role"), SAID_BY)
        SAID_BY[role](dialogue, f"{where}.content", message.get("content"))
    return dialogue.messages


def _add_system(dialogue: Dialogue, where: str, content: Any) -> None:
    dialogue.say("system", _text(where, content, "\n"))


def _add_user(dialogue: Dialogue, where: str, content: Any) -> None:
    """Results of tools, and texts, in their order. Texts in a row are one message."""
    texts: list[str] = []
    for place, kind, block in _blocks(where, content, ("text", "tool_result")):
        if kind == "text":
            texts.append(required_text(place, block, "text"))
            continue
        _say(dialogue, texts)
        result = _text(f"{place}.content", block.get("content") or "", "\n")
        dialogue.result(required_text(place, block, "tool_use_id"), result)
    _say(dialogue, texts)


def _say(dialogue: Dialogue, texts: list[str]) -> None:
    if texts:
        dialogue.say("user", "\n".join(texts))
        texts.clear()


def _add_assistant(dialogue: Dialogue, where: str, content: Any) -> None:
    """Thinking, texts and calls. Texts in a row are one; thinking that is encrypted cannot be read."""
    texts: list[str] = []
    for place, kind, block in _blocks(where, content, SAID_BY_MODEL):
        if kind == "text":
            texts.append(required_text(place, block, "text"))
            continue
        _answer(dialogue, texts)
        if kind == "thinking":
            dialogue.reason(required_text(place, block, "thinking"))
        if kind == "tool_use":
            id, name = required_text(place, block, "id"), required_text(place, block, "name")
            dialogue.call(id, name, _input(place, block))
    _answer(dialogue, texts)


def _answer(dialogue: Dialogue, texts: list[str]) -> None:
    if texts:
        dialogue.answer("".join(texts))
        texts.clear()


SAID_BY = {"user": _add_user, "assistant": _add_assistant, "system": _add_system}


def _blocks(where: str, content: Any, kinds: Sequence[str]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The place of each block, its type, which is one of `kinds`, and the block. A text is one block."""
    if isinstance(content, str):
        yield where, "text", {"text": content}
        return
    if not isinstance(content, list):
        raise BadField(where, f"is {shown(content)}", "expected a text, or a list of blocks")
    for at, block in enumerate(content):
        place = f"{where}.{at}"
        if not isinstance(block, Mapping):
            raise BadField(place, f"is {shown(block)}", "expected a block, which is an object")
        yield place, known_word(f"{place}.type", block.get("type"), kinds), block


def _text(where: str, content: Any, between: str) -> str:
    """A text, or the texts of blocks with something between them."""
    blocks = _blocks(where, content, ("text",))
    return between.join(required_text(place, block, "text") for place, _, block in blocks)


def _input(where: str, block: Mapping[str, Any]) -> Mapping[str, Any]:
    found = block.get("input")
    if not isinstance(found, Mapping):
        raise BadField(f"{where}.input", f"is {shown(found)}", "expected an object")
    return found


def _tool(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    known_word(f"{where}.type", tool.get("type") or "custom", ("custom",))
    schema = tool.get("input_schema")
    if not isinstance(schema, Mapping):
        raise BadField(f"{where}.input_schema", f"is {shown(schema)}", "expected a JSON schema")
    function = {"name": required_text(where, tool, "name"), "parameters": schema}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _tool_choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a chat that say which tools are called, and whether several may be."""
    chat: dict[str, Any] = {"parallel_tool_calls": not choice.get("disable_parallel_tool_use", False)}
    kind = known_word("tool_choice.type", choice.get("type"), (*CHOICES, "tool"))
    named = {"type": "function", "function": {"name": choice.get("name")}}
    return chat | {"tool_choice": CHOICES.get(kind, named)}


def _thinking(given: Mapping[str, Any]) -> dict[str, bool]:
    """The variable of the template. How much the model thinks cannot be said."""
    if "thinking" not in given:
        return {}
    return {"thinking": THINKS[known_word("thinking.type", given["thinking"].get("type"), THINKS)]}


def _response_format(form: Any) -> dict[str, Any]:
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise BadField(
            "output_config.format", f"is {shown(form)}", 'expected {"type": "json_schema", "schema": {...}}'
        )
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.get("schema")}}
