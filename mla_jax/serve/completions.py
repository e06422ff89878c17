"""Answers of /v1/completions, whole and as a stream."""

from collections.abc import AsyncIterator
from typing import Any

from mla_jax.engine.core.request import Chunk, Output, Request
from mla_jax.serve import logprobs
from mla_jax.serve.answering import Answering, finish_of, stop_reason

TEXT_COMPLETION = "text_completion"


async def whole_completion(answering: Answering) -> dict[str, Any]:
    """The answer, once all of it is there."""
    outputs = await answering.outputs()
    choices = [_choice(answering, number, output) for number, output in enumerate(outputs)]
    return {**answering.head(TEXT_COMPLETION), "choices": choices, "usage": answering.usage()}


def _choice(answering: Answering, number: int, output: Output) -> dict[str, Any]:
    echo, request = _echo(answering, number), answering.asked.requests[number]
    choice = {
        "index": number,
        "text": (echo or "") + (output.text or ""),
        "logprobs": None if output.logprobs is None else _logprobs(answering, output, echo is not None),
        "finish_reason": finish_of(output.finish_reason),
        "stop_reason": stop_reason(request, output.token_ids),
    }
    if output.prompt_logprobs is not None and echo is None:
        choice["prompt_logprobs"] = logprobs.of_prompt(answering.tokenizer, output.prompt_logprobs)
    if answering.asked.form.ids:
        choice |= {"token_ids": output.token_ids, "prompt_token_ids": output.prompt_token_ids}
    return choice


def _logprobs(answering: Answering, output: Output, with_prompt: bool) -> dict[str, Any]:
    ids, scores = output.token_ids, [*(output.logprobs or [])]
    if with_prompt:
        ids, scores = [*output.prompt_token_ids, *ids], [*(output.prompt_logprobs or []), *scores]
    return logprobs.of_completion(answering.tokenizer, ids, scores, 0)


async def completion_events(answering: Answering) -> AsyncIterator[dict[str, Any]]:
    """The answer in pieces. The finish reason comes in an event of its own; figures, if asked for, in one without choices."""
    lengths: dict[int, int] = {}  # of the text so far, by answer
    async for number, chunk in answering.pieces():
        request = answering.asked.requests[number]
        echo = None if number in lengths else _echo(answering, number)
        start, text = lengths.get(number, 0), (echo or "") + chunk.text
        lengths[number] = start + len(text)
        if chunk.token_ids or text:
            choice = {"index": number, "text": text, "finish_reason": None}
            choice["logprobs"] = _piece_logprobs(answering, request, chunk, echo is not None, start)
            yield _event(
                answering, choice | ({"token_ids": chunk.token_ids} if answering.asked.form.ids else {})
            )
        if chunk.finish_reason is not None:
            end = {
                "finish_reason": finish_of(chunk.finish_reason),
                "stop_reason": stop_reason(request, answering.readers[number].ids),
            }
            yield _event(answering, {"index": number, "text": "", "logprobs": None, **end})
    if answering.asked.form.usage:
        yield {**answering.head(TEXT_COMPLETION), "choices": [], "usage": answering.usage()}


def _piece_logprobs(
    answering: Answering, request: Request, chunk: Chunk, with_prompt: bool, offset: int
) -> dict[str, Any] | None:
    if chunk.logprobs is None:
        return None
    ids, scores = chunk.token_ids, [*chunk.logprobs]
    if with_prompt:
        ids, scores = [*request.prompt, *ids], [*(chunk.prompt_logprobs or []), *scores]
    return logprobs.of_completion(answering.tokenizer, ids, scores, offset)


def _event(answering: Answering, choice: dict[str, Any]) -> dict[str, Any]:
    event = {**answering.head(TEXT_COMPLETION), "choices": [choice]}
    if answering.asked.form.running_usage:
        event["usage"] = answering.usage()
    elif answering.asked.form.usage:
        event["usage"] = None
    return event


def _echo(answering: Answering, number: int) -> str | None:
    """The text of an answer's prompt, if it is a part of the answer."""
    echo = answering.asked.echo
    return None if echo is None else echo[number // answering.asked.n]
