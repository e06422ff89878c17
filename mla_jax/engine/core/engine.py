"""The engine: requests go in, and each `step` sends the device what comes next for all of them.

What to do is the scheduler's decision, which page is whose the allocator's; here both become dispatches. A dispatch is sent
before the tokens of the one before are read, so the device does not wait for the host."""

import bisect
import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mla_jax.base import roofline
from mla_jax.base.batch import Tables, bucket
from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, DoesNotFit
from mla_jax.cache.paged import COPIED, PAGE
from mla_jax.decode.loop import Programs, Sizes
from mla_jax.decode.outputs import Found, Likely
from mla_jax.decode.packing import of_shards
from mla_jax.decode.rows import ADMITTED
from mla_jax.engine.core.drafting import Drafting
from mla_jax.engine.core.host_tier import HostTier
from mla_jax.engine.core.in_flight import Flights, Timed
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.pages import Pages
from mla_jax.engine.core.request import FinishReason, Request
from mla_jax.engine.core.sampling_arrays import entries
from mla_jax.engine.core.scheduler import (
    Plan,
    Running,
    Waiting,
    agreed,
    assigned,
    few_read,
    plan,
    without_reading,
)
from mla_jax.engine.core.shard import Shard, by_shard
from mla_jax.engine.core.size import Size
from mla_jax.engine.core.stats import EngineStats, between
from mla_jax.text.tokenizer import Tokenizer

SCORED = 64  # tokens of one prompt whose log-probabilities one dispatch computes


class Engine:
    """Serves any number of requests over one pool, or on a mesh over one of each data shard. Not for several threads at once."""

    def __init__(
        self,
        programs: Programs,
        config: Config,
        tokenizer: Tokenizer | None,
        size: Size,
        drafts: int | None = None,
    ):
        """`size` is of each data shard. `drafts` are the guesses of every pass, if the programs have a drafter; None: as many as
        pay."""
        self.programs, self.config, self.tokenizer, self.size = programs, config, tokenizer, size
        self.drafter = programs.drafter
        self.drafting = Drafting(config, programs.device, self.drafter, drafts)
        self.limits = size.limits(programs.model.dispatch.reach(programs.model))
        self.stats = EngineStats(rows=self.rows, pages=programs.spread.shards * size.pages)
        self._serial = 0
        self.jobs: dict[int, Job] = {}  # that are not done, by id
        self._compiled_rows: set[int] = set()
        self._compiled_drafted: set[int] = set()
        self._compiled_lines: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Forgets everything in the pool; requests that are not done are cancelled."""
        for job in self.jobs.values():
            job.finish(FinishReason.CANCELLED)
        self.jobs = {}
        self.waiting: list[Job] = []
        self._flying = Flights(self.programs, self.drafting, self.stats, self._least_bytes)
        self._tier = HostTier(self.programs, self.size.hosted, self.stats) if self.size.hosted else None
        rows, count = self.size.rows, self.programs.spread.shards
        self.shards = [Shard(number, self._new_pages(), list(range(rows))[::-1]) for number in range(count)]
        self._has_waited = False  # with reading prompts, at the last decision
        self._arrays: tuple[Any, Any] | None = None  # pool and table, made when the first request comes

    def _new_pages(self) -> Pages:
        return Pages(self.size.pages, PAGE, ahead=self.drafter.ahead, tier=self._tier)

    @property
    def rows(self) -> int:
        """Requests that run at a time."""
        return self.programs.spread.shards * self.size.rows

    @property
    def running(self) -> list[Job]:
        return [job for shard in self.shards for job in shard.running]

    def submit(self, request: Request, *, priority: int = 0, streams: bool = False) -> Job:
        """Queues a request; a lower `priority` comes first. Raises BadRequest or DoesNotFit if it is too long for the
        context or the pool."""
        tokens = len(request.prompt) + request.limit
        if tokens > self.size.context:
            raise BadRequest(
                f"a request of {tokens:,} tokens is longer than the context",
                f"it holds {self.size.context:,}",
            )
        if tokens > self._room(request):
            raise DoesNotFit(
                f"a request of {tokens:,} tokens does not fit the cache",
                f"the cache holds {self._room(request):,} tokens of all requests together",
                "lower max_tokens, or give more --cache-tokens",
            )
        self._serial += 1
        job = Job(request, self.tokenizer, self._serial, priority, streams)
        if request.limit == 0 and not job.scores:
            job.finish(FinishReason.LENGTH)
            return job
        self.jobs[job.id] = job
        self._wait(job)
        return job

    def _room(self, request: Request) -> int:
        """Tokens that a request can have if there is no other."""
        return self.size.pages * PAGE  # of one shard

    def cancel(self, job: Job) -> None:
        """Ends a job that nobody wants any more; its pages are free again."""
        if job.done:
            return
        job.finish(FinishReason.CANCELLED)
        if job.row is None:
            self.waiting.remove(job)
            del self.jobs[job.id]
        else:
            self._leave(job)

    def _wait(self, job: Job) -> None:
        bisect.insort(self.waiting, job, key=lambda job: (job.priority, job.id))

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._flying or any(shard.running for shard in self.shards))

    def taken_times(self) -> list[Timed]:
        """What passes took since this was last asked; nothing else that an engine decides by comes from a clock."""
        times, self._flying.times = self._flying.times, []
        return times

    def step(self, times: Sequence[Timed] | None = None) -> None:
        """Sends the next dispatches, then takes in what those of the step before have chosen.

        `times` are those that it goes by: measured by the engine of another process, which does the same; by default its own."""
        start, waited = time.perf_counter(), self.stats.waited_seconds
        own = self.taken_times()
        for one in own if times is None else times:
            self.drafting.note_time(*one)
        plans = self._decide()
        if self._flying and any(decision.preempt for decision in plans):  # what they have chosen is not lost
            self._land_all()
            plans = self._decide()
        for decision in plans:
            for job in self._of(decision.preempt):
                self._preempt(job)
        earlier = len(self._flying)
        self._prepare(plans)
        self._admit([self._of(decision.admit) for decision in plans])
        self._score()
        self._read(plans)
        self._decode([job for decision in plans for job in self._of(decision.decode)], plans[0].steps)
        for _ in range(earlier):
            self._land()
        running, _ = between(self.programs.waits, start, time.perf_counter())
        seconds = running - (self.stats.waited_seconds - waited)
        self.stats.note(self.shards, self.waiting, self.programs.compiled, seconds)

    def take_load(self) -> np.ndarray:
        """How often each expert of each layer was chosen since this was last asked; for programs that count it."""
        pool, rows = self._state()
        self._arrays = pool, dataclasses.replace(rows, load=rows.load * 0)
        return self.programs.spread.added_up(rows.load)

    def warm_up(self) -> None:
        """Compiles every program that any request may need, so that nothing is compiled later."""
        self._compile(self._row_counts(), self.limits.lines, SCORED)

    def _row_counts(self) -> list[int]:
        """Rows of the programs that decode."""
        return [1 << i for i in range(bucket(self.size.rows).bit_length())]

    def _state(self) -> tuple[Any, Any]:
        """The pool and the table of rows. A program that is sent now finds in its pages what belongs there."""
        pool, rows = self._arrays or self.programs.new(self.size.rows, self.size.pages, self._text)
        if self._tier is not None:
            pool = self._tier.settle(pool)
        self._arrays = pool, rows
        return pool, rows

    @property
    def _text(self) -> int:
        """Tokens of each row that are kept on the device."""
        return self.size.context if self.drafter.needs_text else 0

    def _decide(self) -> list[Plan]:
        """What the scheduler says for each shard, of the requests that run and the first of those that wait."""
        running = [[self._as_running(job) for job in shard.running] for shard in self.shards]
        most = 2 * sum(len(shard.free_rows) for shard in self.shards)  # some of them may wait for a prefix
        first = [[self._as_waiting(job, shard) for shard in self.shards] for job in self.waiting[:most]]
        waiting = assigned(first, running, [self._free(shard) for shard in self.shards], self.limits)
        return self._read_together(
            agreed([self._plan(*each) for each in zip(self.shards, waiting, running, strict=True)])
        )

    def _read_together(self, plans: list[Plan]) -> list[Plan]:
        """Prompts that few shards have wait for one dispatch of decode steps, but not twice: then others have some as well."""
        decoding = {job.id for job in self.running if not job.unread and job.left > 0}
        self._has_waited = few_read(plans) and bool(decoding) and not self._has_waited
        return without_reading(plans, decoding) if self._has_waited else plans

    def _plan(self, shard: Shard, waiting: list[Waiting], running: list[Running]) -> Plan:
        return plan(waiting, running, self._free(shard), self.limits)

    def _free(self, shard: Shard) -> int:
        """Pages that requests of a shard can have."""
        return shard.pages.free

    def _as_waiting(self, job: Job, shard: Shard) -> Waiting:
        """How it would wait for this shard."""
        first = self._first_tokens(job)
        match = shard.pages.match(first, job.shares)
        left = job.request.limit - len(job.ids) + self._again(job)
        return Waiting(
            id=job.id,
            priority=job.priority,
            arrival=job.id,
            tokens=len(first),
            shared=len(match.pages) + match.hosted,
            taken=match.taken,
            left=left,
            streams=job.streams,
            blocked=match.blocked,
        )

    def _first_tokens(self, job: Job) -> list[int]:
        """What a job reads by itself once it is admitted."""
        return job.tokens

    def _again(self, job: Job) -> int:
        """Tokens of its output that a job generates again once it is admitted."""
        return 0

    def _written(self, job: Job) -> list[int]:
        """The tokens in a job's pages that the prefix index may learn of."""
        return job.tokens[:-1] if job.done else job.tokens  # the last one was not read any more

    def _as_running(self, job: Job) -> Running:
        assert job.held is not None
        assert job.shard is not None
        scoring = job.scores and job.unread > 0  # its prompt is read by dispatches of its own
        return Running(
            id=job.id,
            priority=job.priority,
            arrival=job.id,
            unread=0 if scoring else job.unread,
            held=job.read + job.steps,
            pages=len(job.held.pages),
            own=job.shard.pages.own(job.held),
            left=0 if scoring else job.left,
            streams=job.streams,
        )

    def _of(self, ids: Sequence[int]) -> list[Job]:
        return [self.jobs[i] for i in ids]

    def _prepare(self, plans: Sequence[Plan]) -> None:
        """Compiles what the plans need, all at once, unless it is there."""
        admits, line = any(decision.admit for decision in plans), plans[0].line
        most = max(len(shard.running) + len(one.admit) for shard, one in zip(self.shards, plans, strict=True))
        counts = [bucket(most)] if admits and bucket(most) not in self._compiled_rows else []
        lines = [line] if line and line not in self._compiled_lines else []
        if counts or lines:
            self._compile(counts, lines)

    def _compile(self, counts: Sequence[int], lines: Sequence[int], scored: int = 0) -> None:
        pool, rows = self._state()
        drafted = [n for n in counts if self.drafting.pays(n)]
        copied = COPIED if self.size.hosted else 0
        sizes = Sizes(self.size.width, self.size.pieces, counts, drafted, lines, scored, copied=copied)
        self.programs.prepare(pool, rows, sizes)
        self._compiled_rows |= set(counts)
        self._compiled_drafted |= set(drafted)
        self._compiled_lines |= set(lines)

    def _admit(self, jobs: Sequence[list[Job]]) -> None:
        """Gives each, by shard, a row and pages."""
        admitted = [self._started(shard, some) for shard, some in zip(self.shards, jobs, strict=True)]
        for first in range(0, max(map(len, admitted)), ADMITTED):
            some = [mine[first : first + ADMITTED] for mine in admitted]
            pool, rows = self._state()
            at = self._padded_rows(some, ADMITTED)
            given = of_shards([entries(mine, ADMITTED) for mine in some])
            texts = [of_shards([self._texts(mine) for mine in some])] if self._text else []
            self._arrays = pool, self.programs.admit(rows, at, given, *texts)

    def _started(self, shard: Shard, jobs: list[Job]) -> list[Job]:
        """Those of these jobs that run from now on."""
        started = []
        for job in jobs:
            first = self._first_tokens(job)
            if shard.pages.match(first, job.shares).blocked:  # by one that was admitted just now
                continue
            self.waiting.remove(job)
            started.append(job)
            job.start(shard, shard.pages.admit(first, job.shares), PAGE, self._again(job))
            self.stats.hits += job.read
        return started

    def _texts(self, jobs: list[Job]) -> np.ndarray:
        """What is known of each job, where that is kept on the device."""
        texts = np.zeros((ADMITTED, self._text), np.int32)
        for text, job in zip(texts, jobs, strict=False):
            text[: len(job.tokens)] = job.tokens
        return texts

    def _preempt(self, job: Job) -> None:
        """Back to those that wait; what it has generated will be read again."""
        self._leave(job)
        self._wait(job)
        self.stats.preemptions += 1

    def _leave(self, job: Job) -> None:
        job.leave()
        if job.done:
            self.stats.finished += 1
            del self.jobs[job.id]

    def _read(self, plans: Sequence[Plan]) -> None:
        """Sends pieces of prompts in one line a shard, except of those whose log-probabilities are asked for."""
        counts = {number: tokens for decision in plans for number, tokens in decision.read}
        jobs = [job for job in self._of(list(counts)) if job.row is not None and not job.scores]
        if jobs:
            assert plans[0].line is not None
            self._dispatch_prefill({job: job.piece(counts[job.id]) for job in jobs}, plans[0].line, None)

    def _score(self) -> None:
        """Sends a piece of the first prompt whose log-probabilities are asked for, if there is one."""
        job = next((job for job in self.running if job.scores and job.unread), None)
        if job is None:
            return
        piece = job.piece(SCORED)
        following = job.tokens[job.read + 1 : job.read + 1 + len(piece)]
        found = self._dispatch_prefill({job: piece}, SCORED, following)
        assert found is not None
        self._flying.send_scores(job, found, following)

    def _dispatch_prefill(
        self, pieces: dict[Job, list[int]], line: int, following: list[int] | None
    ) -> Likely | None:
        """`following` are the tokens after those of a single piece, if their log-probabilities are asked for."""
        jobs, count = by_shard(list(pieces), len(self.shards)), self.size.pieces
        tokens = of_shards(
            [_padded(itertools.chain.from_iterable(pieces[job] for job in mine), line) for mine in jobs]
        )
        after = None if following is None else of_shards([_padded(following, line)] * len(jobs))
        read = of_shards([_padded((len(pieces[job]) for job in mine), count) for mine in jobs])
        at, table = self._padded_rows(jobs, count), self._page_tables(jobs, count)
        pool, rows = self._state()
        pool, rows, found = self.programs.prefill(pool, rows, at, tokens, read, table, after)
        self._arrays, self._flying.sent_more = (pool, rows), True
        for job, piece in pieces.items():
            job.read += len(piece)
            self._wrote(job, job.tokens[: job.read])
            self.stats.read += len(piece)
        return found

    def _wrote(self, job: Job, tokens: list[int]) -> None:
        assert job.shard is not None
        assert job.held is not None
        job.shard.pages.wrote(job.held, tokens)

    def _decode(self, jobs: list[Job], steps: int) -> None:
        """Sends decode steps of those rows that have read their prompts."""
        jobs = [job for job in jobs if job.row is not None and not job.unread]
        if not jobs:
            return
        fresh = [job for job in jobs if not job.steps]
        if len(fresh) == len(jobs) or any(job.streams for job in fresh):
            steps = 1  # a first token is waited for
        for job in jobs:
            extended = job.extend(steps)
            assert extended, "the scheduler has planned steps that there are no pages for"
        mine = by_shard(jobs, len(self.shards))
        count = min(n for n in self._compiled_rows if n >= max(map(len, mine)))
        held = sum(job.read + job.steps for job in jobs) // len(jobs)
        drafts = self._drafts(jobs, count, steps, held)
        found = self._run(mine, count, steps, drafts)
        places = {job: number * count + i for number, some in enumerate(mine) for i, job in enumerate(some)}
        self._flying.send_tokens(places, found, drafts, held)
        self.stats.dispatches += 1

    def _run(self, jobs: Sequence[Sequence[Job]], count: int, steps: int, drafts: int) -> Found:
        """Sends steps of jobs, by shard, to the program for `count` rows, with up to `drafts` guesses a pass."""
        pool, rows = self._state()
        at, table = self._padded_rows(jobs, count), self._page_tables(jobs, count)
        sent = at, table, self._same(np.int32(steps))
        if drafts:
            pool, rows, found = self.programs.run_with_drafts(pool, rows, *sent, self._same(np.int32(drafts)))
        else:
            pool, rows, found = self.programs.run(pool, rows, *sent)
        self._arrays = pool, rows
        return found

    def _drafts(self, jobs: list[Job], count: int, steps: int, held: int) -> int:
        """Guesses of each pass; a single step has no room for any."""
        if count not in self._compiled_drafted or steps == 1:
            return 0
        return self.drafting.count((job.is_greedy for job in jobs), held)

    def _same(self, value: Any) -> Any:
        """What is sent to all shards."""
        return of_shards([value] * len(self.shards))

    def _padded_rows(self, jobs: Sequence[Sequence[Job]], count: int) -> np.ndarray:
        """The rows of jobs, by shard; padding is past the table."""

        def rows(mine: Sequence[Job]) -> np.ndarray:
            at = np.full(count, self.size.rows, np.int32)
            at[: len(mine)] = np.array([job.row for job in mine], np.int32)
            return at

        return of_shards([rows(mine) for mine in jobs])

    def _page_tables(self, jobs: Sequence[Sequence[Job]], count: int) -> np.ndarray | Tables:
        """Those of jobs, by shard."""
        return of_shards([self._page_table(mine, count) for mine in jobs])

    def _page_table(self, jobs: Sequence[Job], count: int) -> np.ndarray | Tables:
        """Those of jobs of one shard."""
        table = np.zeros((count, self.size.width), np.int32)
        for i, job in enumerate(jobs):
            assert job.held is not None
            table[i, : len(job.held.pages)] = job.held.pages
        return table

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def _land(self) -> None:
        """Takes in the oldest dispatch's results."""
        for job in self._flying.land():
            self._wrote(job, self._written(job))
            if job.done:
                self._leave(job)

    def _least_bytes(self, jobs: list[Job], steps: int) -> int:
        """What these steps of these rows had to read: weights, and latents."""
        held = sum(self._attended(job.read + job.steps) for job in jobs) // len(jobs)
        return int(
            steps * roofline.decode_bytes(self.config, len(jobs), held, self.programs.model.dtype.itemsize)
        )

    def _attended(self, held: int) -> int:
        """Tokens that a decode step reads of the `held` ones of a row, on average over layers."""
        return held


def _padded(numbers: Iterable[int], length: int) -> np.ndarray:
    given = np.fromiter(numbers, np.int32)
    return np.pad(given, (0, length - given.size))
