"""Answers to clients that may go away at any time: then what they asked for is cancelled."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mla_jax.serve import log
from mla_jax.serve.errors import ApiError, api_error

Result = TypeVar("Result")
# A stream without news gets a comment after these, so that proxies keep it open
SILENT_SECONDS = 10.0
STREAM_END = b"data: [DONE]\n\n"
COMMENT = b": ping\n\n"


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled if the client goes away; then raises ClientGone."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _end(task, gone)


async def _gone(receive: Receive) -> None:
    """Returns when the client has closed the connection; the body was read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(*tasks: asyncio.Future) -> None:
    """Cancels what still runs, and waits for that."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def line_of(event: dict[str, Any]) -> bytes:
    """An event as a line; JSON writes line ends within texts as signs."""
    return b"data: " + json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def named_line_of(event: dict[str, Any]) -> bytes:
    """An event as a line below another one with its type."""
    return b"event: " + event["type"].encode() + b"\n" + line_of(event)


@dataclass(frozen=True)
class StreamForm:
    """How events are written. `failed` makes the event of an error; `comment` keeps a stream open, and `end` closes it."""

    line: Callable[[dict[str, Any]], bytes] = line_of
    failed: Callable[[ApiError], dict[str, Any]] = ApiError.body
    comment: bytes = COMMENT
    end: bytes = STREAM_END


class EventStream(Response):
    """Events as server-sent ones, a line of JSON each; one with an error ends them. `end` is called however they end."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        end: Callable[[], Awaitable[None]],
        form: StreamForm | None = None,
    ):
        self.events, self.end, self.form = events, end, form or StreamForm()
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._wrote = 0.0  # when, by the clock of the event loop

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(_gone(receive))
        writing = asyncio.ensure_future(self._write(send))
        try:
            await asyncio.wait({gone, writing}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            await _end(gone, writing)
            await self.end()

    async def _write(self, send: Send) -> None:
        async def body(data: bytes, more: bool = True) -> None:
            self._wrote = asyncio.get_running_loop().time()
            await send({"type": "http.response.body", "body": data, "more_body": more})

        comments = asyncio.ensure_future(self._comments(body))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self.events:
                await body(self.form.line(event))
            await body(self.form.end)
        except OSError:  # the client has gone
            return
        except Exception as error:
            told = api_error(error)
            if told.status == 500:
                log.error("a stream has failed", exc_info=error)
            await body(self.form.line(self.form.failed(told)))
        finally:
            await _end(comments)
        await body(b"", more=False)

    async def _comments(self, body: Callable[[bytes], Awaitable[None]]) -> None:
        """A comment wherever nothing has been written for some seconds. A task for each stream: one for each event costs more."""
        clock = asyncio.get_running_loop().time
        self._wrote = clock()
        while True:
            silent = clock() - self._wrote
            if silent >= SILENT_SECONDS:
                await body(self.form.comment)
                silent = 0.0
            await asyncio.sleep(SILENT_SECONDS - silent)
