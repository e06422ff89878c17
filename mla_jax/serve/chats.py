"""Answers of /v1/chat/completions, whole and as a stream."""

from collections.abc import AsyncIterator
from typing import Any

from mla_jax.engine.core.request import Chunk, Output, Request
from mla_jax.serve import logprobs
from mla_jax.serve.answering import Answering

CHAT, CHAT_PIECE = "chat.completion", "chat.completion.chunk"


async def whole_chat(answering: Answering) -> dict[str, Any]:
    """The answer, once all of it is there."""
    outputs = await answering.outputs()
    choices = [_choice(answering, number, output) for number, output in enumerate(outputs)]
    answer = {**answering.head(CHAT), "choices": choices, "usage": answering.usage()}
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
        "message": {"role": "assistant", "content": output.text or "", "refusal": None},
        "logprobs": _logprobs(answering, request, output.token_ids, output.logprobs),
        **answering.ending(number, output.finish_reason),
    }
    return choice | ({"token_ids": output.token_ids} if answering.asked.form.ids else {})


async def chat_events(answering: Answering) -> AsyncIterator[dict[str, Any]]:
    """The answer in pieces: the role, texts, and the finish reason in an event of its own; figures come without choices."""
    for number in range(len(answering.asked.requests)):
        yield _event(answering, number, {"role": "assistant", "content": ""})
    async for number, chunk in answering.pieces():
        request = answering.asked.requests[number]
        if chunk.text or chunk.logprobs or (chunk.token_ids and answering.asked.form.ids):
            yield _piece(answering, number, request, chunk)
        if chunk.finish_reason is not None:
            yield _event(answering, number, {}, **answering.ending(number, chunk.finish_reason))
    for figures in answering.figures(CHAT_PIECE):
        yield figures


def _piece(answering: Answering, number: int, request: Request, chunk: Chunk) -> dict[str, Any]:
    further: dict[str, Any] = {"logprobs": _logprobs(answering, request, chunk.token_ids, chunk.logprobs)}
    if answering.asked.form.ids:
        further["token_ids"] = chunk.token_ids
    return _event(answering, number, {"content": chunk.text}, **further)


def _event(answering: Answering, number: int, delta: dict[str, Any], **further: Any) -> dict[str, Any]:
    choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None, **further}
    return answering.event(CHAT_PIECE, choice)


def _logprobs(answering: Answering, request: Request, ids: list[int], scores: Any) -> dict[str, Any] | None:
    most = request.params.logprobs
    if most is None or scores is None:
        return None
    return logprobs.of_chat(answering.tokenizer, ids, scores, most)
