"""A cache policy: which pages a request needs, which page table its row has, and when a row waits for its pages to change.

The engine asks its policy wherever the answer depends on how the cache is used. `CachePolicy` caches everything and reads all of
it; the policies of engine/policy override some of its answers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mla_jax.base.batch import Tables
from mla_jax.cache.paged import PAGE
from mla_jax.decode.loop import Programs, ProgramShape
from mla_jax.engine.core.dispatcher import Dispatcher
from mla_jax.engine.core.job import Job, Shard
from mla_jax.engine.core.pages import Held, Pages, Tier
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.scheduler import Running, Waiting
from mla_jax.engine.core.size import Size


class Free(NamedTuple):
    """Pages of a shard that can be had now, in parts of pages as the policy counts them."""

    running: int  # for rows that run
    new: int  # of these, for requests that start


class CachePolicy:
    """Everything is cached, and every token attends to all of it."""

    needs_text = False  # whether the device keeps the tokens of each row
    parts = 1  # of a page that can be had singly: pages are counted in these

    def __init__(self, programs: Programs, size: Size):
        self.programs, self.size = programs, size

    def new_pages(self, tier: Tier | None) -> Pages:
        """The allocator of one shard."""
        return Pages(self.size.pages, PAGE, ahead=self.programs.drafter.ahead, tier=tier)

    def capacity(self, request: Request) -> int:
        """Tokens that a request can have if no other runs on its shard."""
        return self.size.pages * PAGE

    def prefilled(self, job: Job) -> list[int]:
        """The tokens that a job prefills by itself once it is admitted; generated tokens behind them are replayed or prefilled
        later."""
        return job.tokens

    def replayed(self, job: Job) -> int:
        """Tokens of its output that a job decodes again once it is admitted."""
        return 0

    def admit(self, job: Job, shard: Shard, device: Dispatcher) -> Held:
        """Pages for what a job prefills by itself. There is room for them."""
        return shard.pages.admit(self.prefilled(job), job.shares)

    def indexed(self, job: Job) -> int:
        """The number of a job's first tokens that the prefix index may learn of."""
        return len(job.tokens) - job.done  # the last one was not read any more

    def waiting(self, job: Job, shard: Shard) -> Waiting:
        """The scheduler's view of a waiting job, if it were to run on this shard."""
        tokens = self.prefilled(job)
        match = shard.pages.match(tokens, job.shares, job.matched.setdefault(shard.number, []))
        return Waiting(
            id=job.id,
            priority=job.priority,
            arrival=job.id,
            tokens=len(tokens),
            shared=len(match.pages) + match.hosted,
            taken=match.taken,
            left=job.request.limit - len(job.ids) + self.replayed(job),
            streams=job.streams,
            blocked=match.blocked,
        )

    def running(self, job: Job) -> Running:
        """The scheduler's view of a running job."""
        assert job.held is not None
        assert job.shard is not None
        scoring = job.scores and job.unread > 0  # its prompt is prefilled by dispatches of its own
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

    def free(self, shard: Shard) -> Free:
        return Free(shard.pages.free, shard.pages.free)

    def pages_of(self, job: Job) -> int:
        """Pages that a job's row reads."""
        assert job.held is not None
        return len(job.held.pages)

    def pages_with(self, job: Job, tokens: int) -> int:
        """Pages that a job's row reads once it has these tokens of its prompt."""
        return -(-tokens // PAGE)

    def table(self, jobs: Sequence[Job], count: int, width: int) -> np.ndarray | Tables:
        """The page tables of jobs of one shard, padded to `count` rows; `width` pages of each are read."""
        table = np.zeros((count, width), np.int32)
        for row, job in zip(table, jobs, strict=False):
            assert job.held is not None
            pages = job.held.array()[:width]
            row[: len(pages)] = pages
        return table

    def most_pages(self, request: Request) -> int:
        """Pages that a request's row reads at most, as far as is known before it runs."""
        return -(-(len(request.prompt) + request.limit) // PAGE)

    def attended(self, held: int) -> int:
        """Tokens that a decode step reads of the `held` ones of a row, on average over layers."""
        return held

    def programs_between(self, widths: Sequence[int]) -> list[ProgramShape]:
        """The further programs that rows need, with page tables of these widths."""
        return []

    def programs_of(self, request: Request) -> list[ProgramShape]:
        """Those of them that a request's row needs."""
        return []

    def pauses_at(self, job: Job) -> int | None:
        """Tokens that a job holds when its row pauses next; None: it never does. It follows from numbers of tokens alone, so a
        job that was preempted pauses in the same places."""
        return None

    def ask(self, job: Job, device: Dispatcher) -> Any:
        """Sends the program that a paused row waits for, and returns the arrays that it answers with."""
        raise NotImplementedError

    def answered(self, job: Job, answer: Any, device: Dispatcher) -> bool:
        """Changes the pages of a paused row; False, and nothing changed, if too few are free."""
        raise NotImplementedError
