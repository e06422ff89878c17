# ruff: noqa: RUF001 control tokens are written with such letters
"""A conversation as token ids by the rules of DeepSeek-V3.2, whose folder has no chat template.

The folder has these rules as Python, in `encoding/encoding_dsv32.py`, which is never run. To compare: `pieces` is its
`encode_messages`, joined; each function here is a branch of its `render_message` or one of its templates. Beyond them, a
conversation without a system prompt gets an empty one for its tools, and results end where the last one is given.

Only the rules write control tokens: all that a client gives is encoded as plain text."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from mla_jax.base.errors import BadRequest, BadTemplate, printable
from mla_jax.text.messages import (
    PROTECTED,
    ROLES,
    ChatMessage,
    call_without_object,
    checked_messages,
    checked_tools,
    checked_variables,
    refuse_no_answer,
)
from mla_jax.text.tokenizer import Tokenizer

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, THOUGHT = "<think>", "</think>"
DSML = "｜DSML｜"  # a control token or text, as the tokenizer has it
CONTROL_TOKENS = (BEGIN, END, USER, ASSISTANT, THINK, THOUGHT)
ASKING = ("user", "developer")  # roles that the model answers

# The model was trained with exactly these words; schemas stand between the two
BEFORE_TOOLS = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use \
JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, \
booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here \
is an example:

<{DSML}function_calls>
...
</{DSML}function_calls>

<function_results>
...
</function_results>

{THINK}...thinking about results{THOUGHT}

Here are the functions available in JSONSchema format:
<functions>
"""
AFTER_TOOLS = "\n</functions>\n"


class Segment(NamedTuple):
    """A part of the text. `own`: the rules wrote it, so its control tokens are meant."""

    text: str
    own: bool = True


@dataclass(frozen=True)
class DeepSeekV32Rules:
    """In the place of a ChatTemplate."""

    name: str = "the rules of DeepSeek-V3.2"
    source: ClassVar[None] = None
    reads_tools: ClassVar[bool] = True

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """As `ChatTemplate.encode`. Of the variables, `thinking` has a meaning; without it the model does not think."""
        if missing := [token for token in CONTROL_TOKENS if token not in tokenizer.control]:
            found = f"the tokenizer has no control token {printable(missing[0])}"
            raise BadTemplate(f"{self.name} cannot be used", found)
        given = checked_messages(messages, tokenizer)
        thinking = bool(checked_variables(variables, PROTECTED.split()).get("thinking"))
        if continue_final_message:
            refuse_no_answer(given[-1])
        found = [*pieces(given, checked_tools(tools), thinking, add_generation_prompt)]
        if continue_final_message:
            del found[-1]  # END
        return tokenizer.with_bos(_ids(found, tokenizer))


def pieces(
    messages: list[ChatMessage],
    tools: list[dict[str, Any]] | None = None,
    thinking: bool = False,
    add_generation_prompt: bool = True,
) -> Iterator[Segment]:
    """The text of checked messages; raises BadRequest for a role or an order that the rules do not have."""
    _check(messages)
    if tools and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": ""}, *messages]
    if thinking:
        messages = _without_earlier_developers(messages)
    last_asking = _last_asking(messages)
    yield Segment(BEGIN)
    for at, message in enumerate(messages):
        follows_result = at > 0 and messages[at - 1]["role"] == "tool"
        is_last = at + 1 == len(messages)
        opens = add_generation_prompt or not is_last
        thought = THINK if thinking and at >= last_asking else THOUGHT
        match message["role"]:
            case "system":
                yield from _system(message["content"], tools if at == 0 else None)
            case "user":
                yield from _user([Segment(message["content"], own=False)], thought if opens else None)
            case "developer":
                words = [Segment("\n\n# The user's message is: "), Segment(message["content"], own=False)]
                yield from _user(words, thought if opens else None)
            case "assistant":
                yield from _assistant(message, thinking and at > last_asking)
            case "tool":
                yield from _result(message["content"], not follows_result)
                if is_last or messages[at + 1]["role"] != "tool":
                    yield Segment("\n</function_results>")
                    yield from [Segment(f"\n\n{thought}")] if opens else []


def _check(messages: list[ChatMessage]) -> None:
    """Raises BadRequest for a role without a rule, a result that belongs to no call, and arguments that are no object."""
    if where := call_without_object(messages):
        found = f"the arguments of {where} are no JSON object"
        raise BadRequest(found, "DeepSeek-V3.2 has them one by one")
    open_calls = 0
    for at, message in enumerate(messages):
        role = message["role"]
        if role not in ROLES:
            raise BadRequest(
                f"the role of message {at} is {printable(role)}", "DeepSeek-V3.2 has no such role"
            )
        if role == "tool" and not open_calls:
            raise BadRequest(f"message {at}, of the role tool, answers no call", "results follow their calls")
        open_calls = open_calls - 1 if role == "tool" else len(message.get("tool_calls", ()))


def _last_asking(messages: list[ChatMessage]) -> int:
    """The number of the last message that the model answers; -1 for none."""
    return max((at for at, message in enumerate(messages) if message["role"] in ASKING), default=-1)


def _without_earlier_developers(messages: list[ChatMessage]) -> list[ChatMessage]:
    last = _last_asking(messages)
    return [message for at, message in enumerate(messages) if message["role"] != "developer" or at >= last]


def _system(content: str, tools: list[dict[str, Any]] | None) -> Iterator[Segment]:
    yield Segment(content, own=False)
    if tools:
        schemas = "\n".join(_json(tool["function"]) for tool in tools)
        yield Segment("\n\n" + BEFORE_TOOLS)
        yield Segment(schemas, own=False)
        yield Segment(AFTER_TOOLS)


def _user(words: Iterable[Segment], thought: str | None) -> Iterator[Segment]:
    """A message that the model answers, and the beginning of the answer unless `thought` is None."""
    yield Segment(USER)
    yield from words
    if thought is not None:
        yield Segment(ASSISTANT + thought)


def _assistant(message: ChatMessage, with_reasoning: bool) -> Iterator[Segment]:
    """An answer. Its beginning belongs to the message before it."""
    if with_reasoning:
        yield Segment(message.get("reasoning_content", ""), own=False)
        yield Segment(THOUGHT)
    yield Segment(message["content"] or "", own=False)
    calls = message.get("tool_calls", [])
    if calls:
        yield Segment(f"\n\n<{DSML}function_calls>\n")
        for call in calls:
            yield from _call(call["function"])
            yield Segment("\n")
        yield Segment(f"</{DSML}function_calls>")
    yield Segment(END)


def _call(function: dict[str, Any]) -> Iterator[Segment]:
    yield Segment(f'<{DSML}invoke name="')
    yield Segment(function["name"], own=False)
    yield Segment('">\n')
    for number, (name, value) in enumerate(function["arguments"]["object"].items()):
        is_text = isinstance(value, str)
        yield Segment("\n" * (number > 0) + f'<{DSML}parameter name="')
        yield Segment(name, own=False)
        yield Segment(f'" string="{"true" if is_text else "false"}">')
        yield Segment(value if is_text else _json(value), own=False)
        yield Segment(f"</{DSML}parameter>")
    yield Segment(f"\n</{DSML}invoke>")


def _result(content: str, is_first: bool) -> Iterator[Segment]:
    yield Segment("\n\n<function_results>" * is_first + "\n<result>")
    yield Segment(content, own=False)
    yield Segment("</result>")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _ids(found: Iterable[Segment], tokenizer: Tokenizer) -> list[int]:
    """Token ids of the pieces; texts between control tokens are encoded together."""
    ids, waiting = [], ""
    for piece in found:
        end = 0
        for token in tokenizer.control_pattern.finditer(piece.text) if piece.own else ():
            ids += tokenizer.encode(waiting + piece.text[end : token.start()], bos=False)
            ids.append(tokenizer.control_id(token[0]))
            waiting, end = "", token.end()
        waiting += piece.text[end:]
    return ids + tokenizer.encode(waiting, bos=False)
