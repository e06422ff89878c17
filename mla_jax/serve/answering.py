"""Requests of one body at the engine: their pieces as they come, and their answers."""

import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from mla_jax.engine.async_llm import AsyncLLM
from mla_jax.engine.core.request import Chunk, FinishReason, Output
from mla_jax.engine.reader import Reader
from mla_jax.serve.asked import Asked
from mla_jax.serve.errors import ApiError
from mla_jax.serve.metrics import Metrics
from mla_jax.text.answers import CallBegin
from mla_jax.text.tokenizer import Tokenizer

# A time limit cuts an answer as a limit of tokens does: clients know no other word for it
FINISHES = {
    FinishReason.END: "stop",
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.TIMEOUT: "length",
}


@dataclass
class Answering:
    """The requests of a body, and how far their answers are. `kind` begins the answer's id."""

    llm: AsyncLLM
    asked: Asked
    metrics: Metrics
    kind: str
    readers: list[Reader] = field(default_factory=list)

    def __post_init__(self):
        self.id = f"{self.kind}{uuid.uuid4().hex}"
        self.created = int(time.time())
        self._ending = contextlib.AsyncExitStack()

    async def begin(self) -> None:
        """Gives the requests to the engine. Raises Overloaded or DoesNotFit if it does not take them."""
        asked = self.asked
        submitted = self.llm.submitted(asked.requests, asked.form.stream, asked.reading)
        self.readers, self._news = await self._ending.enter_async_context(submitted)

    async def end(self) -> None:
        """Cancels whatever is not done."""
        self.metrics.forget(self.readers)
        await self._ending.aclose()

    async def pieces(self) -> AsyncIterator[tuple[int, Chunk]]:
        """The number of an answer and what has come of it; its last piece has a finish reason.

        Raises ApiError where an answer cannot be completed."""
        numbers = {reader: number for number, reader in enumerate(self.readers)}
        unfinished = len(self.readers)
        while unfinished:
            reader = await self._news.get()
            chunk = reader.read()
            if chunk is None:
                continue
            unfinished -= reader.done
            self.metrics.note(reader, chunk)
            _refuse_unfinished(reader.reason)
            yield numbers[reader], chunk

    async def outputs(self) -> list[Output]:
        """All answers, once they are done."""
        async for _ in self.pieces():
            pass
        return [self.llm.llm.output_of(reader) for reader in self.readers]

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.llm.tokenizer

    def event(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        """An event of a stream; it has figures, or says that they come later, as the request asks."""
        event = {**self.head(kind), "choices": [choice]}
        if self.asked.form.running_usage:
            event["usage"] = self.usage()
        elif self.asked.form.usage:
            event["usage"] = None
        return event

    def figures(self, kind: str) -> list[dict[str, Any]]:
        """The event with figures at the end of a stream, which has no choices, if the request asks for it."""
        asks = self.asked.form.usage
        return [{**self.head(kind), "choices": [], "usage": self.usage()}] if asks else []

    def ending(self, number: int, reason: FinishReason) -> dict[str, Any]:
        """How an answer ended: OpenAI's word, and the stop token if one of the request's own did it."""
        reader, stops = self.readers[number], self.asked.requests[number].params.stop_token_ids
        stopped_by = reader.ids[-1] if reader.ids and reader.ids[-1] in stops else None
        finish = FINISHES[reason]
        if finish == "stop" and any(isinstance(part, CallBegin) for part in reader.parts):
            finish = "tool_calls"
        return {"finish_reason": finish, "stop_reason": stopped_by}

    def head(self, kind: str) -> dict[str, Any]:
        """The keys that an answer, or each of its events, begins with."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.asked.model}

    def usage(self) -> dict[str, Any]:
        """Tokens so far; those of a prompt count once, however many answers it has."""
        prompt = sum(len(request.prompt) for request in self.asked.prompts)
        generated = sum(len(reader.ids) for reader in self.readers)
        cached = sum(reader.job.cached for reader in self.readers[:: self.asked.n])
        reasoning = sum(reader.reasoning_tokens for reader in self.readers)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }


def _refuse_unfinished(reason: FinishReason | None) -> None:
    if reason is FinishReason.ERROR:
        raise ApiError(500, "the model's logits are not finite", headers={"x-should-retry": "false"})
    if reason is FinishReason.CANCELLED:
        raise ApiError(503, "the server has ended the request", headers={"Retry-After": "5"})
