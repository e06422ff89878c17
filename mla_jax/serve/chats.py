"""Answers of /v1/chat/completions, whole and as a stream."""

import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

from mla_jax.engine.core.request import Chunk, Output, Request
from mla_jax.serve import logprobs
from mla_jax.serve.answering import Answering
from mla_jax.text.answers import (
    Answer,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
    ToolCall,
    answer_of,
)

CHAT_ANSWER, CHAT_PIECE = "chat.completion", "chat.completion.chunk"


async def whole_chat(answering: Answering) -> dict[str, Any]:
    """The answer, once all of it is there."""
    outputs = await answering.outputs()
    choices = [_choice(answering, number, output) for number, output in enumerate(outputs)]
    answer = {**answering.head(CHAT_ANSWER), "choices": choices, "usage": answering.usage()}
    scores = outputs[0].prompt_logprobs
    if scores is not None:
        answer["prompt_logprobs"] = logprobs.of_prompt(answering.tokenizer, scores)
    if answering.asked.form.ids:
        answer["prompt_token_ids"] = outputs[0].prompt_token_ids
    return answer


def _choice(answering: Answering, number: int, output: Output) -> dict[str, Any]:
    request = answering.asked.requests[number]
    choice: dict[str, Any] = {
        "index": number,
        "message": _message(answer_of(answering.readers[number].parts)),
        "logprobs": _logprobs(answering, request, output.token_ids, output.logprobs),
        **answering.ending(number, output.finish_reason),
    }
    return choice | ({"token_ids": output.token_ids} if answering.asked.form.ids else {})


def _message(answer: Answer) -> dict[str, Any]:
    """Content next to calls is null where it is empty."""
    content = answer.content if answer.content or not answer.calls else None
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if answer.reasoning:
        message |= _reasoning(answer.reasoning)
    if answer.calls:
        message["tool_calls"] = [_call(call) for call in answer.calls]
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    return {**_named(call.id), "function": {"name": call.name, "arguments": call.arguments}}


def _named(id: str | None) -> dict[str, Any]:
    """Id and type of a call; the model's id where it writes one, since it expects that back."""
    return {"id": id or f"call_{uuid.uuid4().hex[:24]}", "type": "function"}


def _reasoning(text: str) -> dict[str, str]:
    """Under both names that clients read: DeepSeek's, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


async def chat_events(answering: Answering) -> AsyncIterator[dict[str, Any]]:
    """The answer in pieces: the role, what comes of each part, and the finish reason in an event of its own.

    Figures come without choices."""
    for number in range(len(answering.asked.requests)):
        yield _event(answering, number, {"role": "assistant", "content": ""})
    async for number, chunk in answering.pieces():
        for event in _pieces(answering, number, chunk):
            yield event
        if chunk.finish_reason is not None:
            yield _event(answering, number, {}, **answering.ending(number, chunk.finish_reason))
    for figures in answering.figures(CHAT_PIECE):
        yield figures


def _pieces(answering: Answering, number: int, chunk: Chunk) -> Iterator[dict[str, Any]]:
    """An event for each part of a chunk. The first has what is told of tokens, whichever part they belong to."""
    request, wants_ids = answering.asked.requests[number], answering.asked.form.ids
    of_tokens: dict[str, Any] = {"logprobs": _logprobs(answering, request, chunk.token_ids, chunk.logprobs)}
    of_tokens |= {"token_ids": chunk.token_ids} if wants_ids else {}
    deltas = [_delta(part) for part in chunk.parts if not isinstance(part, CallEnd)]
    if not deltas and chunk.token_ids and (chunk.logprobs or wants_ids):
        deltas = [{"content": ""}]  # the text of these tokens is held back
    for delta in deltas:
        yield _event(answering, number, delta, **of_tokens)
        of_tokens = {}


def _delta(part: Part) -> dict[str, Any]:
    """A part as the delta of an event. The id and the name of a call come once, before its arguments."""
    match part:
        case Reasoning(text):
            return _reasoning(text)
        case Content(text):
            return {"content": text}
        case CallBegin(index, name, id):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, **_named(id), "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    raise AssertionError(part)


def _event(answering: Answering, number: int, delta: dict[str, Any], **further: Any) -> dict[str, Any]:
    choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None, **further}
    return answering.event(CHAT_PIECE, choice)


def _logprobs(answering: Answering, request: Request, ids: list[int], scores: Any) -> dict[str, Any] | None:
    most = request.params.logprobs
    if most is None or scores is None:
        return None
    return logprobs.of_chat(answering.tokenizer, ids, scores, most)
