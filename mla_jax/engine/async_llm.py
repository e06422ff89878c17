"""An LLM for asyncio: answers are awaited, and a task that is cancelled cancels its requests."""

import asyncio
import contextlib
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from mla_jax.base.errors import BadRequest
from mla_jax.base.options import SamplingParams
from mla_jax.engine.core.compressed import CompressedContext
from mla_jax.engine.core.request import Chunk, Output, Request
from mla_jax.engine.llm import LLM
from mla_jax.engine.reader import Reader, TokenReading


class AsyncLLM:
    """`LLM`'s methods as coroutines. Tasks of any number of event loops, and threads that use `llm` itself, share its engine."""

    def __init__(self, model: Any = None, *given: Any, **settings: Any):
        """An LLM, or what `LLM` takes. Loading blocks: `await asyncio.to_thread(AsyncLLM, model)` does not."""
        self.llm = model if isinstance(model, LLM) else LLM(model, *given, **settings)
        self._posts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Post] = weakref.WeakKeyDictionary()

    async def generate(
        self, prompts: Any, params: Any = None, *, context: CompressedContext | None = None
    ) -> list[Output]:
        """As `LLM.generate`."""
        requests = await asyncio.to_thread(self.llm.requests, prompts, params, context)
        async with self.submitted(requests, streams=False) as (readers, news):
            unfinished = set(readers)
            while unfinished:
                reader = await news.get()
                reader.read()
                if reader.done:
                    unfinished.discard(reader)
            return [self.llm.output_of(reader) for reader in readers]

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
    ) -> Output:
        """As `LLM.chat`."""
        prompt = await asyncio.to_thread(
            self.llm.encode_chat,
            messages,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            continue_final_message=continue_final_message,
        )
        (output,) = await self.generate([prompt], params)
        return output

    async def stream(
        self, prompt: Any, params: SamplingParams | None = None, *, context: CompressedContext | None = None
    ) -> AsyncIterator[Chunk]:
        """As `LLM.stream`."""
        if isinstance(params, SamplingParams) and params.n > 1:
            raise BadRequest(f"n is {params.n}, but a stream is one answer", "generate gives several")
        requests = await asyncio.to_thread(self.llm.requests, [prompt], params, context)
        async with self.submitted(requests, streams=True) as ((reader,), news):
            while not reader.done:
                chunk = (await news.get()).read()
                if chunk is not None:
                    yield chunk

    @contextlib.asynccontextmanager
    async def submitted(
        self,
        requests: Sequence[Request],
        streams: bool,
        reading: Callable[[Request], TokenReading] | None = None,
    ) -> AsyncIterator[tuple[list[Reader], "asyncio.Queue[Reader]"]]:
        """Readers of requests of `llm.inputs`, and a queue of those with news; what is not done at the end is cancelled.

        `reading` and errors are as those of `LLM.submit`."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue()
        post = self._posts.setdefault(loop, _Post(loop))
        readers = self.llm.submit(requests, lambda reader: post.send(news, reader), streams, reading)
        try:
            yield readers, news
        finally:
            self.llm.cancel(readers)

    async def close(self) -> None:
        """As `LLM.close`."""
        await asyncio.to_thread(self.llm.close)


class _Post:
    """Brings readers from the engine's thread to queues of an event loop, which is woken once for all that have news."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = weakref.ref(loop)
        self._unsorted: deque[tuple[asyncio.Queue[Reader], Reader]] = deque()
        self._called = False

    def send(self, news: asyncio.Queue[Reader], reader: Reader) -> None:
        """From any thread."""
        self._unsorted.append((news, reader))
        if self._called:  # the loop has not begun to sort: it finds this one, too
            return
        self._called = True
        loop = self._loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # of a loop that has ended: nobody waits any more
                loop.call_soon_threadsafe(self._sort)

    def _sort(self) -> None:
        self._called = False  # before it looks: what comes meanwhile calls again
        while self._unsorted:
            news, reader = self._unsorted.popleft()
            news.put_nowait(reader)
