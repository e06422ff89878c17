"""Rows with grammars: when they choose, and the masks and drafts that a pass gets for them.

A mask depends on all tokens before it, so such a row takes one pass at a time: until its tokens are here it waits, and the others
go on for a pass. Then all rows take one pass together."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from mla_jax.base.errors import BadRequest
from mla_jax.base.grammar import mask_words
from mla_jax.cache.paged import PAGE
from mla_jax.decode.guided import Guide
from mla_jax.decode.loop import ProgramShape
from mla_jax.decode.packing import of_shards
from mla_jax.engine.core.cache_policy import CachePolicy
from mla_jax.engine.core.dispatcher import JobsByShard
from mla_jax.engine.core.job import Job, by_shard
from mla_jax.engine.core.program_choice import ProgramChoice
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.scheduler import Limits, Running
from mla_jax.text.grammar import ALLOWED, Grammars, Masked, Matcher


class Guiding:
    """Without `grammars` no request may have one."""

    def __init__(self, choice: ProgramChoice, policy: CachePolicy, grammars: Grammars | None):
        self.choice, self.policy, self.grammars = choice, policy, grammars
        self.shards, self.drafting = choice.device.shards, choice.drafting
        self.words = mask_words(choice.device.programs.model.config.vocab_size)

    def matcher_of(self, request: Request) -> Matcher | None:
        """A matcher at the beginning of an answer. Raises BadRequest for a grammar that cannot be had."""
        grammar = request.params.grammar
        if grammar is None:
            return None
        if self.grammars is None:
            raise BadRequest("this engine has no grammars", "it was made without a tokenizer")
        return self.grammars.matcher(grammar)

    def running(self, job: Job) -> Running:
        """The scheduler's view of a running job. One with a grammar or a processor chooses in one dispatch at a time, one with a
        grammar from one mask at first."""
        row = self.policy.running(job)
        if not job.waits_for_tokens or job.unread:
            return row
        if job.sent:
            return dataclasses.replace(row, until=0, waits=True)
        return row if job.matcher is None else dataclasses.replace(row, until=min(row.until, 1))

    def keeping_pace(self, limits: Limits, running: Sequence[Job]) -> Limits:
        """Where rows wait for their masks, the others go on for one pass meanwhile: with drafts, if these may pay."""
        if not any(job.sent for job in running):
            return limits
        drafts = self.drafting.drafter.most if self.drafting.pays(len(running)) else 0
        return dataclasses.replace(limits, waited_steps=1 + drafts)

    def prepared(self, jobs: list[Job]) -> tuple[JobsByShard, ProgramShape]:
        """The jobs of one pass, by shard, and its program. Each has pages for a token, those with grammars for what stands of
        their drafts; who does not fit the program waits for its turn."""
        places = self._places(jobs)
        for job in jobs:
            reserved = job.reserve(2 * places if job.matcher and places > 1 else 1)
            assert reserved, "the scheduler has planned steps that there are no pages for"
        shape = self._shape(jobs, places)
        mine = self._fitting(jobs, shape)
        for job in itertools.chain(*mine):
            self._begin(job, shape.places)
        return mine, shape

    def guide(self, jobs: JobsByShard, shape: ProgramShape) -> Guide:
        """Masks and drafts of prepared jobs."""
        return of_shards([self._guide(mine, shape) for mine in jobs])

    def _places(self, jobs: list[Job]) -> int:
        """Tokens that a pass may give a row with a grammar. Where it drafts, it caches what it guesses behind them, too."""
        program = self.choice.guided(self._most(jobs), self._pages(jobs))[-1]
        if not self.choice.drafts(jobs, program, program.places):
            return 1
        free = min(job.shard.pages.free for job in jobs if job.shard is not None)
        needed = len(jobs) * (1 + -(-2 * program.places // PAGE))
        return program.places if free >= needed else 1

    def _shape(self, jobs: list[Job], places: int) -> ProgramShape:
        programs = self.choice.guided(self._most(jobs), self._pages(jobs))
        (wanted,) = (program for program in programs if program.places == places)
        return self.choice.guided_by_now(wanted)

    def _fitting(self, jobs: list[Job], shape: ProgramShape) -> JobsByShard:
        """Those with grammars first."""
        first = sorted(jobs, key=lambda job: job.matcher is None)
        fitting = [job for job in first if self.policy.pages_of(job) <= shape.width]
        return [mine[: shape.rows] for mine in by_shard(fitting, self.shards)]

    def _begin(self, job: Job, places: int) -> None:
        """Cuts a job's draft to what it may choose now, and counts that as chosen."""
        until = self.policy.running(job).until
        job.draft = job.draft[: min(places, until, job.left)] if places > 1 else []
        job.extend(max(len(job.draft), 1))
        job.sent = max(len(job.draft), 1) if job.matcher else 0

    def _guide(self, jobs: Sequence[Job], shape: ProgramShape) -> Guide:
        masks = np.full((shape.rows, shape.places, self.words), ALLOWED)
        draft, counts = np.zeros((shape.rows, shape.places), np.int32), np.zeros(shape.rows, np.int32)
        for row, job, _ in _masked(jobs):
            draft[row, : len(job.draft)] = job.draft
            counts[row] = len(job.draft)
        self._fill(masks, jobs)
        return Guide(masks, draft, counts)

    def _fill(self, masks: np.ndarray, jobs: Sequence[Job]) -> None:
        places = masks.shape[1]
        masked = [Masked(row, matcher, job.draft[: places - 1]) for row, job, matcher in _masked(jobs)]
        if masked:
            assert self.grammars is not None
            self.grammars.fill(masked, masks)

    def _most(self, jobs: list[Job]) -> int:
        return max(map(len, by_shard(jobs, self.shards)))

    def _pages(self, jobs: list[Job]) -> int:
        return max(map(self.policy.pages_of, jobs))


def _masked(jobs: Sequence[Job]) -> Iterator[tuple[int, Job, Matcher]]:
    """Jobs that need masks, with their places; a token that comes again needs none."""
    for row, job in enumerate(jobs):
        if job.matcher is not None and not job.again:
            yield row, job, job.matcher
