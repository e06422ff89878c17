"""A request while it is served."""

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mla_jax.decode.outputs import Likely
from mla_jax.engine.core.compressed import CompressedContext
from mla_jax.engine.core.pages import Held, Node, Pages
from mla_jax.engine.core.request import FinishReason, Logprobs, Request
from mla_jax.engine.core.stats import Times
from mla_jax.text.grammar import Matcher


@dataclass
class Processor:
    """A function that changes a job's logits, and its state behind the job's tokens."""

    function: Callable[[Any, Any, Any], tuple[Any, Any]]
    state: Any
    kind: (
        Hashable  # the function, and the shapes of its state: jobs of one kind share a function of a program
    )


class Job:
    """A handle on a submitted request. The engine's thread alone changes it.

    Others may read it meanwhile: of each new token the log-probabilities come first, then its id, and the reason comes last."""

    def __init__(
        self,
        request: Request,
        priority: int,
        streams: bool,
        matcher: Matcher | None = None,
        processor: Processor | None = None,
    ):
        self.request, self.priority, self.streams = request, priority, streams
        self.id = 0  # a number, once an engine has it
        self.ids: list[int] = []
        self.tokens = [*request.prompt]  # the prompt and the generated ones
        self.logprobs: Logprobs | None = None if request.params.logprobs is None else []
        self.prompt_logprobs: list[dict[int, float] | None] | None = (
            None if request.params.prompt_logprobs is None else [None]
        )
        self.compressed: CompressedContext | None = None  # where that is what was asked for
        self.reason: FinishReason | None = None
        self.error: BaseException | None = None  # raised where its results are read
        self.wake: Callable[[], None] = _nobody  # called when it has more tokens, or is done
        self.times = Times(time.perf_counter())
        self.deadline = time.monotonic() + (request.params.timeout or 0.0)  # if it has a time limit
        self.shard: "Shard | None" = None  # where it runs,
        self.row: int | None = None  # and which row of it is its own
        self.held: Held | None = None
        self.known = 0  # tokens when it was admitted, except those of its output that it generates again
        self.again = 0  # these, as far as they have not come yet
        self.read = 0  # known tokens that are in its pages once all dispatches are done
        self.steps = 0  # tokens that dispatches may have chosen since
        self.pauses = 0  # how often it was asked what its pages are to be, since it was admitted
        self.is_paused = False  # it waits for the answer
        self.matcher = matcher  # of its grammar: where its answer is in it
        self.processor = processor  # of its logits, with its state behind its tokens
        self.draft: list[int] = []  # guesses of its next tokens, which the grammar allows
        # Tokens that it may choose in the dispatch under way, where it has one at a time: with a grammar, or a processor
        self.sent = 0
        self.matched: dict[int, list[Node]] = {}  # nodes of its beginning that were found last, by shard
        self.starts = 0  # how often it was admitted
        self.cached = 0  # tokens of its prompt that need not be read, when it was admitted first

    @property
    def done(self) -> bool:
        return self.reason is not None

    @property
    def has_begun(self) -> bool:
        """Whether it was admitted once, even if it waits again, or goes on behind a context that was read before."""
        return self.starts > 0 or self.request.context is not None

    @property
    def unread(self) -> int:
        return self.known - self.read

    @property
    def held_tokens(self) -> int:
        """Tokens in its pages once all dispatches are done."""
        return self.read + self.steps

    @property
    def left(self) -> int:
        """Tokens that no dispatch was told to choose yet."""
        return self.request.limit - max(self.known - len(self.request.prompt), 0) - self.steps

    @property
    def is_greedy(self) -> bool:
        return self.request.params.temperature == 0

    @property
    def scores(self) -> bool:
        """Whether the log-probabilities of the prompt are asked for and not complete."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.request.prompt)

    @property
    def shares(self) -> bool:
        """Whether it may take pages from the prefix index: not where a penalty counts tokens as they are read, and not while its
        prompt is scored. Pages may hold output of its own once it was preempted."""
        params, penalises = self.request.params, self.request.params.repetition_penalty != 1
        counts_output = params.presence_penalty != 0 or params.frequency_penalty != 0
        return not (self.scores or penalises or (self.ids and counts_output))

    def start(self, shard: "Shard", held: Held, page: int, again: int = 0) -> None:
        """Takes a row of a shard, and pages of `page` tokens; what they hold already need not be read. The last `again` tokens
        that are known are not read but generated again."""
        self.shard, self.row, self.held = shard, shard.free_rows.pop(), held
        self.known, self.again = len(self.tokens) - again, again
        shard.running.append(self)
        self.read, self.steps, self.pauses = held.read(page), 0, 0
        self.sent, self.draft = 0, []
        self.cached = self.cached if self.starts else self.read
        self.starts, self.is_paused = self.starts + 1, False
        if self.scores:
            self.prompt_logprobs = [None]

    def leave(self) -> None:
        """Gives back its row and pages."""
        assert self.shard is not None
        assert self.held is not None
        assert self.row is not None
        self.shard.pages.release(self.held)
        self.shard.free_rows.append(self.row)
        self.shard.running.remove(self)
        self.shard = self.row = self.held = None

    def piece(self, most: int) -> list[int]:
        """The next tokens to read."""
        return self.tokens[self.read : min(self.read + most, self.known)]

    def extend(self, steps: int) -> bool:
        """Takes pages for as many more tokens, as far as its limit goes; false if there are none left."""
        assert self.shard is not None
        assert self.held is not None
        extended = self.shard.pages.extend(self.held, self.held_tokens + min(steps, self.left - 1))
        self.steps += min(steps, self.left)
        return extended

    def reserve(self, tokens: int) -> bool:
        """Takes pages for as many more tokens, as far as its limit goes, which no dispatch may have chosen yet; false and nothing
        if there are none left."""
        assert self.shard is not None
        assert self.held is not None
        return self.shard.pages.extend(self.held, self.held_tokens + min(tokens, self.left - 1))

    @property
    def waits_for_tokens(self) -> bool:
        """Whether it has one dispatch under way at a time: the next one depends on its tokens, or on its state."""
        return self.matcher is not None or self.processor is not None

    def take_guided(self, ids: list[int], guesses: list[int]) -> None:
        """Goes on in the grammar behind new tokens, and keeps the guesses that it allows for the next dispatch. Fewer tokens may
        have come than the dispatch had room for."""
        assert self.matcher is not None
        self.steps -= self.sent - len(ids)
        self.sent = 0
        self.matcher.follow(ids[min(self.again, len(ids)) :])
        allowed = guesses[: self.matcher.taken(guesses)]
        self.draft = max(allowed, self.matcher.forced(), key=len)

    def take(self, ids: list[int], logprobs: Logprobs | None, ended: bool, finite: bool) -> None:
        """Appends new tokens; tokens replayed after a preemption are not emitted again. `ended`: the device stopped the row."""
        old = min(self.again, len(ids))
        self.again -= old
        ids = ids[old:]
        logprobs = None if logprobs is None else logprobs[old:]
        if not ids and not ended:
            return
        if self.logprobs is not None:
            self.logprobs += logprobs or []
        self.ids += ids
        self.tokens += ids
        self._tell(_reason(self.ids, self.request, finite) if ended else None)

    def take_scores(self, tokens: list[int], likely: Likely) -> None:
        """Log-probabilities of the next tokens of the prompt."""
        assert self.prompt_logprobs is not None
        room = len(self.request.prompt) - len(self.prompt_logprobs)
        self.prompt_logprobs += logprobs_of(tokens[:room], likely, self.request.params.prompt_logprobs or 0)

    def finish(self, reason: FinishReason) -> None:
        """Ends it without further tokens."""
        self._tell(reason)

    def fail(self, error: BaseException) -> None:
        """Ends it alone: others are not touched by what went wrong with its own results."""
        self.error = error
        self.finish(FinishReason.ERROR)

    def _tell(self, reason: FinishReason | None) -> None:
        self.reason = reason
        self.wake()


@dataclass(eq=False)
class Shard:
    """One data shard of a mesh: pages and rows are numbers of its own pool and table. One device is one shard."""

    number: int
    pages: Pages
    free_rows: list[int]
    running: list[Job] = field(default_factory=list)


def _nobody() -> None:
    """Nobody waits."""


def by_shard(jobs: Sequence[Job], count: int) -> list[list[Job]]:
    """Running jobs by the number of their shard, of `count` shards."""
    found: list[list[Job]] = [[] for _ in range(count)]
    for job in jobs:
        assert job.shard is not None
        found[job.shard.number].append(job)
    return found


def _reason(ids: list[int], request: Request, finite: bool) -> FinishReason:
    if not finite:
        return FinishReason.ERROR
    if ids and ids[-1] in request.ends:
        return FinishReason.END
    return FinishReason.STOP if ids and ids[-1] in request.params.stop_token_ids else FinishReason.LENGTH


def logprobs_of(tokens: list[int], likely: Likely, asked: int) -> list[dict[int, float]]:
    """For each token its log-probability, then those of the `asked` likeliest, from arrays `[T]` and `[T J]` on the host."""
    found = []
    for i, token in enumerate(tokens):
        likeliest = zip(likely.top_ids[i, :asked].tolist(), likely.top[i, :asked].tolist(), strict=True)
        found.append(
            {token: float(likely.logprobs[i])} | {other: p for other, p in likeliest if other != token}
        )
    return found
