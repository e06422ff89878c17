"""Answers of /v1/responses, whole and as a stream."""

import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

from mla_jax.engine.core.request import FinishReason
from mla_jax.serve.answering import Answering
from mla_jax.serve.blocks import (
    AnswerBlock,
    AnswerBlocks,
    BlockBegin,
    BlockDelta,
    BlockEnd,
    BlockStep,
    blocks_of,
    is_cut,
)
from mla_jax.serve.bodies import ResponseBody
from mla_jax.serve.errors import ApiError
from mla_jax.text.answers import CallBegin, Content, Reasoning

# Of each kind of block: how its items' ids begin, and the events of its text
ID_BEGINS = {Reasoning: "rs", Content: "msg", CallBegin: "fc"}
TEXT_EVENTS = {
    Reasoning: "response.reasoning_text",
    Content: "response.output_text",
    CallBegin: "response.function_call_arguments",
}


class ResponseWriter:
    """Writes the answer to a body."""

    def __init__(self, body: ResponseBody):
        self._given = body.given()
        self._blocks = AnswerBlocks()
        self._sent = 0  # events

    async def whole(self, answering: Answering) -> dict[str, Any]:
        """The answer, once all of it is there."""
        (output,) = await answering.outputs()
        self._blocks = blocks_of(answering.readers[0].parts, output.finish_reason)
        return self._ended(answering, output.finish_reason)

    async def events(self, answering: Answering) -> AsyncIterator[dict[str, Any]]:
        """The answer in pieces. Items come one after the other; the last event has the whole answer."""
        self._answering = answering
        for kind in ("response.created", "response.in_progress"):
            yield self._event(kind, response=self._response(answering, "in_progress"))
        async for _, chunk in answering.pieces():
            for part in chunk.parts:
                for event in self._events(self._blocks.push(part)):
                    yield event
            if (reason := chunk.finish_reason) is not None:
                for event in self._events(self._blocks.finish(reason)):
                    yield event
                response = self._ended(answering, reason)
                yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event of a stream that an error ends."""
        told = {"code": error.code or "server_error", "message": error.message}
        response = self._response(self._answering, "failed") | {"error": told}
        return self._event("response.failed", response=response)

    # -- events

    def _event(self, kind: str, **about: Any) -> dict[str, Any]:
        self._sent += 1
        return {"type": kind, "sequence_number": self._sent - 1, **about}

    def _events(self, steps: Iterator[BlockStep]) -> Iterator[dict[str, Any]]:
        for step in steps:
            match step:
                case BlockBegin(block, index):
                    yield from self._began(block, index)
                case BlockDelta(block, index, text):
                    yield self._of_text(block, index, "delta", delta=text)
                case BlockEnd(block, index):
                    yield from self._ended_item(block, index)

    def _began(self, block: AnswerBlock, index: int) -> Iterator[dict[str, Any]]:
        yield self._event("response.output_item.added", output_index=index, item=_item(block, begins=True))
        if block.call is None:
            yield self._of_part(block, index, "added", "")

    def _ended_item(self, block: AnswerBlock, index: int) -> Iterator[dict[str, Any]]:
        key = "text" if block.call is None else "arguments"
        yield self._of_text(block, index, "done", **{key: block.text})
        if block.call is None:
            yield self._of_part(block, index, "done", block.text)
        yield self._event("response.output_item.done", output_index=index, item=_item(block))

    def _of_text(self, block: AnswerBlock, index: int, what: str, **about: Any) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": _id(block), "output_index": index}
        place |= {"content_index": 0} if block.call is None else {}
        place |= {"logprobs": []} if block.kind is Content else {}
        return self._event(f"{TEXT_EVENTS[block.kind]}.{what}", **place, **about)

    def _of_part(self, block: AnswerBlock, index: int, what: str, text: str) -> dict[str, Any]:
        place = {"item_id": _id(block), "output_index": index, "content_index": 0}
        return self._event(f"response.content_part.{what}", **place, part=_part(block, text))

    # -- the answer

    def _ended(self, answering: Answering, reason: FinishReason) -> dict[str, Any]:
        if is_cut(reason):
            cut = {"incomplete_details": {"reason": "max_output_tokens"}}
            return self._response(answering, "incomplete") | cut | {"usage": _usage(answering)}
        ended = {"completed_at": int(time.time()), "usage": _usage(answering)}
        return self._response(answering, "completed") | ended

    def _response(self, answering: Answering, status: str) -> dict[str, Any]:
        """The answer as far as it is, with the settings of its request."""
        given, params = self._given, answering.asked.requests[0].params
        text = given.get("text") or {}
        reasoning = given.get("reasoning") or {}
        return {
            "id": answering.id,
            "object": "response",
            "created_at": answering.created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "model": answering.asked.model,
            "output": [_item(block) for block in self._blocks],
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": text.get("format") or {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_logprobs": 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _id(block: AnswerBlock) -> str:
    return f"{ID_BEGINS[block.kind]}_{block.id}"


def _item(block: AnswerBlock, begins: bool = False) -> dict[str, Any]:
    """A block as an item of the output; one that `begins` is empty."""
    item = {"id": _id(block), "status": block.status}
    parts = [] if begins else [_part(block, block.text)]
    if block.call is not None:
        called = {"call_id": _call_id(block), "name": block.call.name, "arguments": block.text}
        return {**item, "type": "function_call", **called}
    if block.kind is Reasoning:
        return {**item, "type": "reasoning", "summary": [], "content": parts, "encrypted_content": None}
    return {**item, "type": "message", "role": "assistant", "content": parts}


def _part(block: AnswerBlock, text: str) -> dict[str, Any]:
    if block.kind is Reasoning:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_id(block: AnswerBlock) -> str:
    """The model's own where it writes one, since it expects that back."""
    assert block.call is not None
    return block.call.id or f"call_{block.id[:24]}"


def _usage(answering: Answering) -> dict[str, Any]:
    usage = answering.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": usage["completion_tokens_details"],
        "total_tokens": usage["total_tokens"],
    }
