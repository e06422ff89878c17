"""Answers of /v1/messages, whole and as a stream."""

import json
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
from mla_jax.serve.connections import StreamForm, named_line_of
from mla_jax.serve.errors import ApiError
from mla_jax.text.answers import CallBegin, Content, Reasoning

PING = {"type": "ping"}
MESSAGE_STREAM = StreamForm(named_line_of, ApiError.message_body, named_line_of(PING), end=b"")
# Of each kind of block: the type of a piece of it, and the key of the piece
DELTAS = {
    Reasoning: ("thinking_delta", "thinking"),
    Content: ("text_delta", "text"),
    CallBegin: ("input_json_delta", "partial_json"),
}


async def whole_message(answering: Answering) -> dict[str, Any]:
    """The answer, once all of it is there."""
    (output,) = await answering.outputs()
    blocks = blocks_of(answering.readers[0].parts, output.finish_reason)
    content = [_whole_block(block) for block in blocks]
    return _message(answering, content) | _stop(answering, blocks, output.finish_reason)


async def message_events(answering: Answering) -> AsyncIterator[dict[str, Any]]:
    """The answer in pieces: a message without content, its blocks one after the other, and how it ended."""
    yield {"type": "message_start", "message": _message(answering, [])}
    yield PING
    blocks = AnswerBlocks()
    async for _, chunk in answering.pieces():
        for part in chunk.parts:
            for event in _events(blocks.push(part)):
                yield event
        if (reason := chunk.finish_reason) is not None:
            for event in _events(blocks.finish(reason)):
                yield event
            stop = _stop(answering, blocks, reason)
            yield {"type": "message_delta", "delta": stop, "usage": _usage(answering)}
    yield {"type": "message_stop"}


def _events(steps: Iterator[BlockStep]) -> Iterator[dict[str, Any]]:
    for step in steps:
        place = {"index": step.index}
        match step:
            case BlockBegin(block, _):
                yield {"type": "content_block_start", **place, "content_block": _empty_block(block)}
            case BlockDelta(block, _, text):
                kind, key = DELTAS[block.kind]
                yield {"type": "content_block_delta", **place, "delta": {"type": kind, key: text}}
            case BlockEnd(block, _):
                if block.kind is Reasoning:
                    signature = {"type": "signature_delta", "signature": block.id}
                    yield {"type": "content_block_delta", **place, "delta": signature}
                yield {"type": "content_block_stop", **place}


def _message(answering: Answering, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": answering.id,
        "type": "message",
        "role": "assistant",
        "model": answering.asked.model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answering),
    }


def _empty_block(block: AnswerBlock) -> dict[str, Any]:
    if block.call is not None:
        # The model's own id where it writes one, since it expects that back
        id = block.call.id or f"toolu_{block.id[:24]}"
        return {"type": "tool_use", "id": id, "name": block.call.name, "input": {}}
    if block.kind is Reasoning:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": None}


def _whole_block(block: AnswerBlock) -> dict[str, Any]:
    """A block with all that it has. Clients send back only thinking that has a signature, so that it gets its block's id."""
    empty = _empty_block(block)
    if block.call is not None:
        return empty | {"input": _input(block.text)}
    if block.kind is Reasoning:
        return empty | {"thinking": block.text, "signature": block.id}
    return empty | {"text": block.text}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as an object. Others, such as those that a limit has cut, stay text in it."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments}


def _stop(answering: Answering, blocks: AnswerBlocks, reason: FinishReason) -> dict[str, Any]:
    """Why an answer ended, in Anthropic's words."""
    stopped_by = _stop_sequence(answering) if reason is FinishReason.STOP else None
    has_calls = any(block.call is not None for block in blocks)
    words = (
        ("max_tokens", is_cut(reason)),
        ("tool_use", has_calls),
        ("stop_sequence", stopped_by is not None),
        ("end_turn", True),
    )
    word = next(word for word, is_so in words if is_so)
    return {"stop_reason": word, "stop_sequence": stopped_by if word == "stop_sequence" else None}


def _stop_sequence(answering: Answering) -> str | None:
    """The stop text that has ended an answer: the first in the text of its tokens."""
    tokenizer, stops = answering.tokenizer, answering.asked.requests[0].params.stop
    assert tokenizer is not None, "a conversation was encoded"
    text = tokenizer.decode(answering.readers[0].ids)
    found = [stop for stop in stops if stop in text]
    return min(found, key=text.find, default=None)


def _usage(answering: Answering) -> dict[str, Any]:
    """Tokens so far. Those of the prompt that were in the cache are counted apart."""
    usage = answering.usage()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    thinking = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"thinking_tokens": thinking},
    }
