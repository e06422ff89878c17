"""A job's results as text, made on the thread of whoever reads them.

Nothing is queued for a reader: it takes what its job has beyond what it has read. So a slow one gets larger pieces, holds up
nobody, and needs no more memory than its answer."""

from collections.abc import Callable

from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import Chunk, FinishReason, Logprobs, Output
from mla_jax.engine.core.stats import Stats
from mla_jax.text.answers import AnswerStream, Content, Part
from mla_jax.text.stream import TextStream

TokenReading = TextStream | AnswerStream | None  # None without a tokenizer


class Reader:
    """Reads a job by `stream`. `cancel` ends a job whose text has come to a stop text, which only the reader sees.

    `parts` are those of an answer that is read in a format, and `text` is its content."""

    def __init__(self, job: Job, stream: TokenReading, cancel: Callable[[list[Job]], None]):
        self.job, self._stream, self._cancel = job, stream, cancel
        self.ids: list[int] = []
        self.text = ""
        self.parts: list[Part] = []
        self.reason: FinishReason | None = None

    @property
    def done(self) -> bool:
        return self.reason is not None

    @property
    def reasoning_tokens(self) -> int:
        return self._stream.reasoning_tokens if isinstance(self._stream, AnswerStream) else 0

    def read(self) -> Chunk | None:
        """Takes in all that has come since it was read last; None: nothing. Raises what ended the job, if anything did."""
        seen, reason = len(self.ids), self.job.reason  # where there is a reason, all else is there
        if self.job.error is not None:
            self.reason = FinishReason.ERROR
            raise self.job.error
        ids = self.job.ids[seen:]
        if self.done or not (ids or reason):
            return None
        self.ids += ids
        text, parts = self._text_of(ids, reason)
        if self._stream is not None and self._stream.stopped:
            reason = FinishReason.STOP
            self._stop(self._stream.used)
        self.text, self.reason = self.text + text, reason
        self.parts += parts
        scores = None if seen else self.job.prompt_logprobs
        return Chunk(text, self.ids[seen:], reason, self._logprobs(seen, len(self.ids)), scores, tuple(parts))

    def output(self, stats: Stats) -> Output:
        """The whole answer, once it is done."""
        assert self.reason is not None
        text = None if self._stream is None else self.text
        logprobs, scores = self._logprobs(0, len(self.ids)), self.job.prompt_logprobs
        return Output(text, self.ids, self.job.request.prompt, self.reason, logprobs, stats, scores)

    def _text_of(self, ids: list[int], reason: FinishReason | None) -> tuple[str, list[Part]]:
        """The text of new tokens, and its parts in a format; an end token has none."""
        at_end = bool(self.ids) and self.ids[-1] in self.job.request.all_ends
        ids = ids[:-1] if at_end and ids else ids
        match self._stream:
            case None:
                return "", []
            case TextStream() as stream:
                text = stream.push(ids)
                return (text if reason is None else text + stream.finish()), []
            case AnswerStream() as stream:
                parts = stream.push(ids)
                parts += [] if reason is None else stream.finish()
                return "".join(part.text for part in parts if isinstance(part, Content)), parts

    def _logprobs(self, start: int, stop: int) -> Logprobs | None:
        return None if self.job.logprobs is None else self.job.logprobs[start:stop]

    def _stop(self, used: int) -> None:
        """Drops the tokens behind the `used` ones of the text, and the rest of the job."""
        del self.ids[used:]
        self._cancel([self.job])
