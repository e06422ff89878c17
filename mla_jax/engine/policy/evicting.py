"""The cache policy by which requests drop tokens.

What stays in each layer, or in each head that is cached, is found on the device, then moved to pages of the row's own. Its old
pages are free, or stay in the prefix index as they were."""

import dataclasses
from collections.abc import Sequence
from typing import cast

import numpy as np

from mla_jax.base.batch import Tables
from mla_jax.base.options import EVERY, EvictOptions
from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES
from mla_jax.cache.paged import PAGE
from mla_jax.decode.evict_programs import Kept, Selection
from mla_jax.decode.loop import Programs, ProgramShape
from mla_jax.decode.packing import here, part_here
from mla_jax.engine.core.cache_policy import CachePolicy, Free
from mla_jax.engine.core.dispatcher import Dispatcher
from mla_jax.engine.core.job import Job, Shard
from mla_jax.engine.core.pages import Tier
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.scheduler import Running, Waiting
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.evicted_pages import Evicted, EvictedPages


@dataclasses.dataclass(frozen=True)
class Eviction:
    """How many of a request's tokens stay, and when it drops some."""

    evicts: Selection
    keep: float  # the share that stays in each layer and head, on average; above 1 the number
    every: int = EVERY

    @classmethod
    def of(cls, options: EvictOptions) -> "Eviction | None":
        """As asked for; None if nothing is dropped."""
        if options.evict == "off":
            return None
        policy, budget = options.evict, options.evict_budget
        policy = EVICTION_POLICIES[policy] if isinstance(policy, str) else policy
        budget = BUDGET_RULES[budget] if isinstance(budget, str) else budget
        return cls(Selection(policy, budget, options.evict_sinks, options.evict_recent), options.evict_keep)

    def point(self, job: Job) -> int:
        """Tokens that a request has when it drops some next."""
        return len(job.request.prompt) + job.pauses * self.every

    def count(self, tokens: int) -> int:
        """The number of these tokens that stay."""
        return max(1, round(self.keep * tokens)) if self.keep <= 1 else min(int(self.keep), tokens)

    def pages(self, tokens: int) -> int:
        """Pages for what stays of these tokens: those that are not full add up to one more at most."""
        return -(-self.count(tokens) // PAGE) + 1


class Evicting(CachePolicy):
    """A row drops tokens once its prompt is prefilled, and then every few hundred tokens; it waits meanwhile, others go on."""

    needs_text = True

    def __init__(self, programs: Programs, size: Size, eviction: Eviction):
        super().__init__(programs, size)
        self.eviction = eviction
        self.layers, self.lanes = programs.model.config.num_hidden_layers, programs.model.lanes
        self.parts = self.layers * self.lanes

    def new_pages(self, tier: Tier | None) -> EvictedPages:
        ahead = self.programs.drafter.ahead
        return EvictedPages(self.size.pages, PAGE, self.layers, self.lanes, ahead=ahead, tier=tier)

    def capacity(self, request: Request) -> int:
        return super().capacity(request) - PAGE * self.eviction.pages(len(request.prompt) + request.limit)

    def prefilled(self, job: Job) -> list[int]:
        """The prompt: generated tokens have attended to its kept tokens alone, so they are replayed."""
        return job.request.prompt

    def waiting(self, job: Job, shard: Shard) -> Waiting:
        waiting = super().waiting(job, shard)
        extra = self.parts * self.eviction.pages(waiting.tokens)
        return dataclasses.replace(waiting, taken=self.parts * waiting.taken, extra=extra, until=0)

    def running(self, job: Job) -> Running:
        """Of a row that has dropped tokens, all parts count as the fullest."""
        row, point = super().running(job), self.eviction.point(job)
        until = max(0, point - (job.known if job.unread else row.held))
        unread = min(row.unread, max(point - job.read, 0))
        pages, held = row.pages, row.held
        if isinstance(job.held, Evicted):
            pages = self.size.width + 1
            held = pages * PAGE - job.held.room(PAGE, row.held)
        return dataclasses.replace(row, unread=unread, until=until, pages=self.parts * pages, held=held)

    def free(self, shard: Shard) -> Free:
        """In parts. Those for what stays of requests that are about to drop tokens are set aside."""
        aside = self.parts * sum(self.eviction.pages(self.eviction.point(job)) for job in shard.running)
        pages = cast(EvictedPages, shard.pages)
        running = max(pages.free_parts - aside, 0)
        return Free(running, min(running, self.parts * pages.free))

    def pauses_at(self, job: Job) -> int:
        return self.eviction.point(job)

    def programs_between(self, widths: Sequence[int]) -> list[ProgramShape]:
        return [ProgramShape(name, width, rows=1) for name in ("observe", "move") for width in widths]

    def _width(self, job: Job) -> int:
        """Of the page tables by which a job drops tokens: those of the output that are read again need room, too."""
        return self.size.width_for(-(-max(job.held_tokens, job.known) // PAGE) + 1)

    def ask(self, job: Job, device: Dispatcher) -> Kept:
        """Which of a job's tokens stay."""
        alone, count = device.alone(job), np.array([self.eviction.count(job.held_tokens)], np.int32)
        pool, rows = device.state()
        sent = device.rows_of(alone, 1), device.tables(alone, 1, self._width(job)), device.same(count)
        pool, rows, kept = self.programs.observe(pool, rows, *sent)
        device.keep(pool, rows)
        part_here(kept.told).copy_to_host_async()
        return kept

    def answered(self, job: Job, answer: Kept, device: Dispatcher) -> bool:
        """Moves what stays to pages of its own."""
        assert job.held is not None
        assert job.shard is not None
        pages, held = cast(EvictedPages, job.shard.pages), job.held_tokens
        counts = here(answer.told)[job.shard.number, :, :, 0].ravel().tolist()
        # Tokens of the output that are prefilled once more
        again = max(0, min(job.known, self.eviction.point(job)) - held)
        new = pages.evict(job.held, counts, held, again)
        if new is None:
            return False
        alone, width = device.alone(job), self._width(job)
        before, old = job.held, device.tables(alone, 1, width)
        job.held = new
        pool, rows = device.state()
        pool, _ = self.programs.move(pool, answer, old, device.tables(alone, 1, width))
        device.keep(pool, rows)
        pages.release(before)
        device.stats.dropped += int(new.dropped.mean())
        return True

    def pages_of(self, job: Job) -> int:
        return int(job.held.counts.max()) if isinstance(job.held, Evicted) else super().pages_of(job)

    def table(self, jobs: Sequence[Job], count: int, width: int) -> Tables:
        """The parts of each layer and head, and how many tokens of a row it has dropped."""
        each = self.layers, self.lanes
        tables = Tables(np.zeros((*each, count, width), np.int32), np.zeros((*each, count), np.int32))
        for i, job in enumerate(jobs):
            assert job.held is not None
            assert job.shard is not None
            tables.pages[:, :, i] = cast(EvictedPages, job.shard.pages).table(job.held, width)
            if isinstance(job.held, Evicted):
                tables.dropped[:, :, i] = job.held.dropped.reshape(each)
        return tables
