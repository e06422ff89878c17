"""Answers of /v1/completions, whole and as a stream."""

from collections.abc import AsyncIterator
from typing import Any

from mla_jax.engine.core.request import Chunk, Output
from mla_jax.serve import logprobs
from mla_jax.serve.answering import Answering

TEXT_COMPLETION = "text_completion"


async def whole_completion(answering: Answering) -> dict[str, Any]:
    """The answer, once all of it is there."""
    outputs = await answering.outputs()
    choices = [_choice(answering, number, output) for number, output in enumerate(outputs)]
    return {**answering.head(TEXT_COMPLETION), "choices": choices, "usage": answering.usage()}


def _choice(answering: Answering, number: int, output: Output) -> dict[str, Any]:
    echo = _echo(answering, number)
    choice = {
        "index": number,
        "text": (echo or "") + (output.text or ""),
        "logprobs": _logprobs(answering, number, output, 0, with_prompt=echo is not None),
        **answering.ending(number, output.finish_reason),
    }
    if output.prompt_logprobs is not None and echo is None:
        choice["prompt_logprobs"] = logprobs.of_prompt(answering.tokenizer, output.prompt_logprobs)
    if answering.asked.form.ids:
        choice |= {"token_ids": output.token_ids, "prompt_token_ids": output.prompt_token_ids}
    return choice


async def completion_events(answering: Answering) -> AsyncIterator[dict[str, Any]]:
    """The answer in pieces. The finish reason comes in an event of its own; figures, if asked for, in one without choices."""
    lengths: dict[int, int] = {}  # of the text so far, by answer
    async for number, chunk in answering.pieces():
        echo = None if number in lengths else _echo(answering, number)
        start, text = lengths.get(number, 0), (echo or "") + chunk.text
        lengths[number] = start + len(text)
        if chunk.token_ids or text:
            scores = _logprobs(answering, number, chunk, start, with_prompt=echo is not None)
            ids = {"token_ids": chunk.token_ids} if answering.asked.form.ids else {}
            piece = {"index": number, "text": text, "logprobs": scores, "finish_reason": None, **ids}
            yield answering.event(TEXT_COMPLETION, piece)
        if chunk.finish_reason is not None:
            end = answering.ending(number, chunk.finish_reason)
            yield answering.event(TEXT_COMPLETION, {"index": number, "text": "", "logprobs": None, **end})
    for figures in answering.figures(TEXT_COMPLETION):
        yield figures


def _logprobs(
    answering: Answering, number: int, part: Chunk | Output, offset: int, *, with_prompt: bool
) -> dict[str, Any] | None:
    """Those of an answer or a piece of one, behind those of its prompt if that is a part of it."""
    if part.logprobs is None:
        return None
    ids, scores = part.token_ids, [*part.logprobs]
    if with_prompt:
        ids = [*answering.asked.requests[number].prompt, *ids]
        scores = [*(part.prompt_logprobs or []), *scores]
    return logprobs.of_completion(answering.tokenizer, ids, scores, offset)


def _echo(answering: Answering, number: int) -> str | None:
    """The text of an answer's prompt, if it is a part of the answer."""
    echo = answering.asked.echo
    return None if echo is None else echo[number // answering.asked.n]
