"""The engine: requests go in, and each `step` sends the device the next work for all of them.

The scheduler decides the work, the allocator owns the pages, the cache policy gives a row's needs; here their answers become
dispatches. A dispatch is sent before the tokens of the one before are read, so the device does not wait for the host."""

import bisect
import dataclasses
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from mla_jax.base.errors import DoesNotFit, TooLong, Unsupported
from mla_jax.cache.paged import PAGE
from mla_jax.decode.loop import Programs, ProgramShape
from mla_jax.decode.outputs import Found
from mla_jax.engine.core.cache_policy import CachePolicy
from mla_jax.engine.core.dispatcher import Dispatcher, JobsByShard
from mla_jax.engine.core.drafting import ASSUMED_HELD, Drafting
from mla_jax.engine.core.guiding import Guiding
from mla_jax.engine.core.in_flight import Flights, Timed
from mla_jax.engine.core.job import Job, Shard, by_shard
from mla_jax.engine.core.processing import States, processor_of
from mla_jax.engine.core.program_choice import SCORED, ProgramChoice
from mla_jax.engine.core.request import FinishReason, Request
from mla_jax.engine.core.scheduler import Limits, Plan, Waiting, agreed, assigned, plan
from mla_jax.engine.core.size import Size
from mla_jax.engine.core.stats import EngineStats, between
from mla_jax.mesh.cost import MeshCost, Pass
from mla_jax.model.parts import cost_of
from mla_jax.text.grammar import Grammars

# Seconds, or decode passes if they take longer, that a pass may take while somebody reads along
READS_ALONG, PASSES = 0.02, 2.5


class Engine:
    """Serves any number of requests over one pool, or on a mesh over one of each data shard. One thread may use it."""

    def __init__(
        self,
        programs: Programs,
        size: Size,
        *,
        policy: CachePolicy | None = None,
        drafting: Drafting | None = None,
        compiles_ahead: bool = False,
        grammars: Grammars | None = None,
    ):
        """`size` is of each data shard. Without a policy everything is cached, without `drafting` as many tokens are drafted as
        pay, if the programs have a drafter. Without `grammars` no request may have one.

        Where it `compiles_ahead`, requests that run go on with the programs that are there, while those for more rows, longer
        lines and wider page tables are compiled in threads. What it decides depends on how long that takes."""
        self.programs, self.size = programs, size
        self.policy = policy or CachePolicy(programs, size)
        self.drafting = drafting or Drafting(cost_of(programs.model), programs.drafter)
        reach = programs.model.dispatch.reach(programs.model)
        streamed = _streamed_line(self.drafting.cost, size.lines())
        self.limits = dataclasses.replace(size.limits(reach, streamed), parts=self.policy.parts)
        self.stats = EngineStats(rows=self.rows, pages=programs.spread.shards * size.pages)
        keeps_text = self.policy.needs_text or programs.drafter.needs_text
        self.device = Dispatcher(programs, size, self.stats, self.policy.table, keeps_text)
        self.choice = ProgramChoice(self.device, self.drafting, self.policy.programs_between)
        self.guiding = Guiding(self.choice, self.policy, grammars)
        self._compiles_ahead = compiles_ahead
        self._serial = 0
        # Bytes that a step of some rows must read: of weights, and for each token that the rows hold
        self._least: dict[int, tuple[float, float]] = {}
        self.jobs: dict[int, Job] = {}  # that are not done, by id
        self.reset()

    def reset(self) -> None:
        """Forgets everything in the pool; requests that are not done are cancelled."""
        for job in self.jobs.values():
            job.finish(FinishReason.CANCELLED)
        self.jobs = {}
        self.waiting: list[Job] = []
        self._flying = Flights(self.programs, self.drafting, self.stats, self._least_bytes)
        self.device.reset()
        rows = list(range(self.size.rows))[::-1]
        tier = self.device.tier
        self.shards = [
            Shard(number, self.policy.new_pages(None if tier is None else tier.of(number)), rows[:])
            for number in range(self.programs.spread.shards)
        ]
        self._note()

    @property
    def rows(self) -> int:
        """Requests that run at a time."""
        return self.programs.spread.shards * self.size.rows

    @property
    def running(self) -> list[Job]:
        return [job for shard in self.shards for job in shard.running]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self._flying or any(shard.running for shard in self.shards))

    def submit(self, request: Request, *, priority: int = 0, streams: bool = False) -> Job:
        """Queues a request; a lower `priority` comes first. Raises BadRequest or DoesNotFit if it is too long for the
        context or the pool."""
        job = self.job_of(request, priority=priority, streams=streams)
        self.queue([job])
        return job

    def job_of(self, request: Request, *, priority: int = 0, streams: bool = False) -> Job:
        """A job for `queue`. Any thread may ask for it. Raises as `submit` does."""
        self._refuse_too_long(request)
        processor = processor_of(request.params.logits, self.programs.model.config.vocab_size)
        if processor is not None and self.programs.evicts is not None:
            raise Unsupported(
                "logits with evict",
                "rows that drop tokens choose some of them twice, and a state would count both",
            )
        return Job(request, priority, streams, self.guiding.matcher_of(request), processor)

    def queue(self, jobs: Sequence[Job]) -> None:
        """Takes jobs in."""
        for job in jobs:
            self._serial += 1
            job.id = self._serial
            if job.request.limit == 0 and not job.scores:
                job.finish(FinishReason.LENGTH)
                continue
            self.jobs[job.id] = job
            self._wait(job)
        self._note()

    def fail(self, error: BaseException) -> None:
        """Ends all jobs with an error, and begins anew."""
        jobs, self.jobs = list(self.jobs.values()), {}
        for job in jobs:
            job.fail(error)
        self.reset()

    def _refuse_too_long(self, request: Request) -> None:
        tokens, capacity = len(request.prompt) + request.limit, self.policy.capacity(request)
        if tokens > self.size.context:
            raise TooLong(
                f"a request of {tokens:,} tokens is longer than the context",
                f"it holds {self.size.context:,}",
                context=self.size.context,
            )
        if tokens > capacity:
            raise DoesNotFit(
                f"a request of {tokens:,} tokens does not fit the cache",
                f"the cache holds {capacity:,} tokens of all requests together",
                "lower max_tokens, or give more --cache-tokens",
            )

    def cancel(self, job: Job, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends a job that nobody wants any more, or whose time is up; its pages are free again."""
        if job.done:
            return
        job.finish(reason)
        if job.row is None:
            self.waiting.remove(job)
            del self.jobs[job.id]
        else:
            self._leave(job)
        self._note()

    def _wait(self, job: Job) -> None:
        bisect.insort(self.waiting, job, key=lambda job: (job.priority, job.id))

    def taken_times(self) -> list[Timed]:
        """Times of passes since the last call; nothing else that an engine decides by comes from a clock."""
        times, self._flying.times = self._flying.times, []
        return times

    def step(self, times: Sequence[Timed] | None = None) -> None:
        """Sends the next dispatches, then takes in what those of the step before have chosen.

        `times` are those that it goes by: measured by the engine of another process, which does the same; by default its own."""
        start, waited = time.perf_counter(), self.stats.waited_seconds
        own = self.taken_times()
        for one in own if times is None else times:
            self.drafting.note_time(*one)
        self._step()
        running, _ = between(self.programs.waits, start, time.perf_counter())
        self.stats.host_seconds += running - (self.stats.waited_seconds - waited)
        self._note()

    def _step(self) -> None:
        plans = self._decide()
        if self._flying and any(decision.preempt for decision in plans):  # what they have chosen is not lost
            self._land_all()
            plans = self._decide()
        for decision in plans:
            for job in self._of(decision.preempt):
                self._preempt(job)
        earlier = len(self._flying)
        self._compile_for(plans)
        self._admit([self._of(decision.admit) for decision in plans])
        self._score()
        self._ask()
        self._send(plans)
        for _ in range(earlier):
            self._land()

    def _note(self) -> None:
        """Brings the statistics up to date."""
        self.stats.compiled = self.programs.compiled
        held = [sum(job.held_tokens for job in shard.running) for shard in self.shards]
        self.stats.note([shard.pages for shard in self.shards], held, len(self.running), len(self.waiting))

    def take_load(self) -> np.ndarray:
        """How often each expert of each layer was chosen since this was last asked; for programs that count it."""
        return self.device.take_load()

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float32 logits `[B T W]` of tokens `[B T]`."""
        return self.programs.logits_of(tokens)

    def compile_early(self) -> None:
        """Begins to compile what a first short request needs. The model may have shapes only.

        What reads the prompt is traced before this returns: weights that are loaded at the same time would hold it up."""
        first, *others = self.choice.early()
        self.device.trace(first)
        self.device.start(others)

    def warm_up(self, grammars: bool = False) -> None:
        """Compiles every program that any request may need, so that nothing is compiled later, and makes the pool; those of
        requests with `grammars` only if that is asked for."""
        self.device.compile(self.choice.every(grammars))
        self.device.state()
        self._note()

    def _decide(self) -> list[Plan]:
        """The scheduler's plan for each shard. While others run, requests start for which the programs are there; what it would
        need to do more is compiled ahead."""
        wished = self._plans(self.limits)
        if not self._compiles_ahead:
            return wished
        if not self.running:
            return self._plans(self.choice.sooner(self.limits, self._needed(wished)))
        if self.choice.start_missing(self._needed(wished)):
            return wished
        fullest = max(len(shard.running) for shard in self.shards)
        limits, may_start = self.choice.possible(self.limits, self.running, self._first_waiting(), fullest)
        return self._plans(limits, may_start)

    def _plans(self, limits: Limits, may_start: Collection[Job] | None = None) -> list[Plan]:
        """Of the running requests and the first waiting ones; None: all of these may start."""
        policy, shards = self.policy, self.shards
        running = [[self.guiding.running(job) for job in shard.running] for shard in shards]
        limits = self.guiding.keeping_pace(limits, self.running)
        free = [policy.free(shard) for shard in shards]
        first = [self._waiting(job, may_start) for job in self._first_waiting()]
        waiting = assigned(first, running, [pages.running for pages in free], limits)
        queued = len(self.waiting) > sum(map(len, waiting))
        plans = [
            plan(new, rows, pages.running, limits, pages.new, queued)
            for new, rows, pages in zip(waiting, running, free, strict=True)
        ]
        return agreed(plans)

    def _first_waiting(self) -> list[Job]:
        """As many as may start, and as many again: some of them may wait for a prefix."""
        return self.waiting[: 2 * sum(len(shard.free_rows) for shard in self.shards)]

    def _waiting(self, job: Job, may_start: Collection[Job] | None) -> list[Waiting]:
        """The scheduler's view of a waiting job, in each shard."""
        views = [self.policy.waiting(job, shard) for shard in self.shards]
        if may_start is None or job in may_start:
            return views
        return [dataclasses.replace(view, blocked=True) for view in views]

    def _needed(self, plans: Sequence[Plan]) -> list[ProgramShape]:
        """Programs for a plan, and for what its jobs will need later."""
        new = [job for decision in plans for job in self._of(decision.admit)]
        pairs = zip(self.shards, plans, strict=True)
        most = max(len(shard.running) + len(decision.admit) for shard, decision in pairs)
        jobs = [*self.running, *new]
        return self.choice.needed(most, jobs, new, plans[0].line) if jobs else []

    def _of(self, ids: Sequence[int]) -> list[Job]:
        return [self.jobs[i] for i in ids]

    def _compile_for(self, plans: Sequence[Plan]) -> None:
        """Compiles what requests that start will need, unless others run already: then it is there."""
        starts = any(decision.admit for decision in plans)
        if starts and not (self._compiles_ahead and self.running):
            self.device.compile_missing(self._needed(plans))

    def _admit(self, jobs: Sequence[list[Job]]) -> None:
        """Gives each, by shard, a row and pages."""
        self.device.admit([self._started(shard, some) for shard, some in zip(self.shards, jobs, strict=True)])

    def _started(self, shard: Shard, jobs: list[Job]) -> list[Job]:
        """Those of these jobs that run from now on."""
        started = []
        for job in jobs:
            tokens = self.policy.prefilled(job)
            if shard.pages.match(
                tokens, job.shares, job.matched[shard.number]
            ).blocked:  # by one that was admitted just now
                continue
            self.waiting.remove(job)
            started.append(job)
            held = self.policy.admit(job, shard, self.device)
            job.start(shard, held, PAGE, self.policy.replayed(job))
            self.stats.hits += job.read
        return started

    def _preempt(self, job: Job) -> None:
        """Returns a job to the waiting ones; its generated tokens will be prefilled or replayed."""
        self._leave(job)
        self._wait(job)
        self.stats.preemptions += 1

    def _leave(self, job: Job) -> None:
        job.leave()
        if job.done:
            self.stats.finished += 1
            del self.jobs[job.id]

    def _send(self, plans: Sequence[Plan]) -> None:
        """Sends one pass that also reads prompts, or decode steps. Prompts that are scored are read apart."""
        counts = {number: tokens for decision in plans for number, tokens in decision.read}
        readers = [job for job in self._of(list(counts)) if job.row is not None and not job.scores]
        decode = [job for decision in plans for job in self._of(decision.decode)]
        decode = [job for job in decode if job.row is not None and not job.unread]
        if any(job.matcher for job in decode):  # a line has no masks: it is read in the next pass
            self._guided_step([job for job in decode if job.processor is None])
        elif any(job.processor for job in decode):
            self._processed_steps(decode, plans[0].steps)
        elif readers:
            assert plans[0].line is not None
            self._mixed_step({job: job.piece(counts[job.id]) for job in readers}, decode, plans[0].line)
        elif decode:
            self._decode(decode, plans[0].steps)

    def _mixed_step(self, pieces: dict[Job, list[int]], decode: list[Job], line: int) -> None:
        self._extend(decode, 1)
        mine = by_shard(decode, len(self.shards))
        pages = [self.policy.pages_with(job, job.read + len(piece)) for job, piece in pieces.items()]
        pages += [self.policy.pages_of(job) for job in decode]
        shape = self.choice.taken(self.choice.mixed(line, max(map(len, mine)), max(pages)))
        found = self.device.mixed_step(pieces, mine, shape)
        self._note_prefilled(pieces)
        if decode:
            self._sent(mine, shape.rows, found, 0)
        self._flying.sent_more = True

    def _extend(self, jobs: list[Job], steps: int) -> None:
        for job in jobs:
            extended = job.extend(steps)
            assert extended, "the scheduler has planned steps that there are no pages for"

    def _sent(
        self,
        mine: JobsByShard,
        rows: int,
        found: Found,
        drafts: int,
        guesses: Any = None,
        states: States | None = None,
    ) -> None:
        """Notes the jobs of each shard whose tokens come. `rows` are those of the program, of a shard."""
        places = {job: number * rows + i for number, some in enumerate(mine) for i, job in enumerate(some)}
        held = sum(job.held_tokens for job in places) // len(places)
        self._flying.send_tokens(places, found, drafts, held, guesses, states)
        self.stats.dispatches += 1

    def _score(self) -> None:
        """Sends a piece of the first prompt whose log-probabilities are asked for, if there is one."""
        job = next((job for job in self.running if job.scores and job.unread), None)
        if job is None:
            return
        piece = job.piece(SCORED)
        following = job.tokens[job.read + 1 : job.read + 1 + len(piece)]
        shape = self.choice.taken(self.choice.scoring(_pages(job.read + len(piece))))
        found = self.device.score(job, piece, shape, following)
        self._note_prefilled({job: piece})
        self._flying.send_scores(job, found, following)

    def _note_prefilled(self, pieces: dict[Job, list[int]]) -> None:
        self._flying.sent_more = True
        for job, piece in pieces.items():
            job.read += len(piece)
            self._wrote(job, job.read)
            self.stats.read += len(piece)

    def _wrote(self, job: Job, count: int) -> None:
        """Tells the allocator that a job's first `count` tokens are in its pages."""
        assert job.shard is not None
        assert job.held is not None
        job.shard.pages.wrote(job.held, job.tokens, count)

    def _ask(self) -> None:
        """Sends the questions of rows that have come to where their policy has them pause."""
        for job in self.running:
            if self._is_due(job):
                job.is_paused = True
                self._flying.send_question(job, self.policy.ask(job, self.device))

    def _is_due(self, job: Job) -> bool:
        if job.is_paused or job.sent or job.left <= 0 or (job.scores and job.unread):
            return False
        return job.held_tokens == self.policy.pauses_at(job)

    def _decode(self, jobs: list[Job], steps: int) -> None:
        """Sends decode steps."""
        steps = _first_steps(jobs, steps)
        self._extend(jobs, steps)
        mine = by_shard(jobs, len(self.shards))
        programs = self.choice.decoding(max(map(len, mine)), max(map(self.policy.pages_of, jobs)))
        drafts = self.choice.drafts(jobs, programs[-1], steps)
        shape = self.choice.taken(programs[-1] if drafts else programs[0])
        self._sent(mine, shape.rows, self.device.decode(mine, shape, steps, drafts), drafts)

    def _processed_steps(self, jobs: list[Job], steps: int) -> None:
        """Sends decode steps of jobs some of which have functions that change their logits."""
        steps = _first_steps(jobs, steps)
        self._extend(jobs, steps)
        mine = by_shard(jobs, len(self.shards))
        shape = self.choice.decoding(max(map(len, mine)), max(map(self.policy.pages_of, jobs)))[0]
        found, states = self.device.run_processed(mine, shape, steps)
        for job in jobs:
            job.sent = steps if job.processor is not None else 0
        self._sent(mine, shape.rows, found, 0, states=states)

    def _guided_step(self, jobs: list[Job]) -> None:
        """Sends one pass: a token for each job, and for those with grammars what stands of their drafts."""
        mine, shape = self.guiding.prepared(jobs)
        found, guesses = self.device.guided_step(mine, shape, self.guiding.guide(mine, shape))
        self._sent(mine, shape.rows, found, shape.places - 1, guesses)

    def _land_all(self) -> None:
        while self._flying:
            self._land()

    def _land(self) -> None:
        """Takes in the oldest dispatch's results."""
        if self._flying.oldest.answer is not None:
            self._land_answer()
            return
        for job in self._flying.land():
            self._wrote(job, self.policy.indexed(job))
            if job.done:
                self._leave(job)

    def _land_answer(self) -> None:
        """Lets a paused row go on with the pages that its policy gives it."""
        flight, start = self._flying.popleft(), time.perf_counter()
        jax.block_until_ready(flight.answer)
        self.stats.waited_seconds += time.perf_counter() - start
        self.programs.check()
        (job,) = flight.jobs
        if job.row is None or job.starts != flight.start:  # it has left since
            return
        job.pauses, job.is_paused = job.pauses + 1, False
        self._flying.sent_more = True
        if not self.policy.answered(job, flight.answer, self.device):
            self._preempt(job)
        elif job.done:
            self._leave(job)

    def _least_bytes(self, jobs: list[Job], steps: int) -> int:
        """Bytes that each device had to read in these steps of these rows: weights and latents."""
        held = sum(self.policy.attended(job.held_tokens) for job in jobs) // len(jobs)
        rows = len(jobs)
        if rows not in self._least:
            cost = self.drafting.cost
            none, one = (cost.read_bytes(cost.shared(rows, held=tokens)) for tokens in (0, PAGE))
            self._least[rows] = none, (one - none) / PAGE
        weights, token = self._least[rows]
        return int(steps * (weights + held * token))


def _first_steps(jobs: Sequence[Job], steps: int) -> int:
    """One step where a first token is waited for."""
    fresh = [job for job in jobs if not job.steps]
    return 1 if len(fresh) == len(jobs) or any(job.streams for job in fresh) else steps


def _pages(tokens: int) -> int:
    return -(-tokens // PAGE)


def _streamed_line(cost: MeshCost, lines: Sequence[int]) -> int:
    """The longest line that who reads along waits for, as far as can be predicted."""
    most = max(READS_ALONG, PASSES * cost.decode(rows=8, held=ASSUMED_HELD).seconds)
    short = [line for line in lines if cost.predicted(Pass(1, line, line)).seconds <= most]
    return max(short, default=min(lines))
