"""The engine for requests that drop tokens: a row pauses once its prompt is read, and then every few hundred tokens.

What stays in each layer, or in each head that is cached, is found on the device, then moved to pages of the row's own. Its old
pages are free, or stay in the prefix index as they were."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, cast

import numpy as np

from mla_jax.base.batch import Tables
from mla_jax.base.config import Config
from mla_jax.base.options import EVERY, EvictOptions
from mla_jax.cache.evict import POLICIES
from mla_jax.cache.paged import PAGE
from mla_jax.decode.evict_programs import Kept, Selection
from mla_jax.decode.loop import Programs
from mla_jax.decode.packing import here, part_here
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.pages import Pages
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.scheduler import Plan, Running, Waiting, plan
from mla_jax.engine.core.shard import Shard
from mla_jax.engine.core.size import Size
from mla_jax.engine.policy.evicted_pages import Layered, LayeredPages
from mla_jax.engine.policy.pausing import PausingEngine
from mla_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Eviction:
    """What stays of a request's tokens, and when it drops some."""

    evicts: Selection
    keep: float  # the share that stays in each layer and head, on average
    every: int = EVERY

    @classmethod
    def of(cls, options: EvictOptions) -> "Eviction | None":
        """As asked for; None if nothing is dropped."""
        if options.evict == "off":
            return None
        policy = POLICIES[options.evict] if isinstance(options.evict, str) else options.evict
        return cls(Selection(policy, options.evict_budget), options.evict_keep)

    def point(self, job: Job) -> int:
        """Tokens that a request has when it drops some next."""
        return len(job.request.prompt) + job.pauses * self.every

    def count(self, tokens: int) -> int:
        """The number of these tokens that stay."""
        return max(1, round(self.keep * tokens))

    def pages(self, tokens: int) -> int:
        """Pages for what stays of these tokens: those that are not full add up to one more at most."""
        return -(-self.count(tokens) // PAGE) + 1


class EvictingEngine(PausingEngine):
    """An engine over programs that evict."""

    questions: ClassVar = {"evicted": 1}

    def __init__(
        self,
        programs: Programs,
        config: Config,
        tokenizer: Tokenizer | None,
        size: Size,
        drafts: int | None,
        eviction: Eviction,
    ):
        self.eviction = eviction
        super().__init__(programs, config, tokenizer, size, drafts)
        self.limits = dataclasses.replace(self.limits, parts=self._layered(self.shards[0]).parts)

    def _new_pages(self) -> Pages:
        layers, lanes = self.config.num_hidden_layers, self.programs.model.lanes
        return LayeredPages(self.size.pages, PAGE, layers, lanes, ahead=self.drafter.ahead, tier=self._tier)

    def _layered(self, shard: Shard | None) -> LayeredPages:
        assert shard is not None
        return cast(LayeredPages, shard.pages)

    def _room(self, request: Request) -> int:
        return super()._room(request) - PAGE * self.eviction.pages(len(request.prompt) + request.limit)

    def _plan(self, shard: Shard, waiting: list[Waiting], running: list[Running]) -> Plan:
        return plan(waiting, running, self._free(shard), self.limits, self.limits.parts * shard.pages.free)

    def _free(self, shard: Shard) -> int:
        """In parts. Those for what stays of requests that are about to drop tokens are set aside."""
        aside = self.limits.parts * sum(self.eviction.pages(self._point(job)) for job in shard.running)
        return max(self._layered(shard).free_parts - aside, 0)

    def _first_tokens(self, job: Job) -> list[int]:
        """The prompt: what was generated behind it has seen what stayed of it."""
        return job.request.prompt

    def _as_waiting(self, job: Job, shard: Shard) -> Waiting:
        waiting, parts = super()._as_waiting(job, shard), self.limits.parts
        extra = parts * self.eviction.pages(waiting.tokens)
        return dataclasses.replace(waiting, taken=parts * waiting.taken, extra=extra)

    def _as_running(self, job: Job) -> Running:
        """Of a row that has dropped tokens, all parts count as the fullest."""
        row, parts = super()._as_running(job), self.limits.parts
        if not isinstance(job.held, Layered):
            return dataclasses.replace(row, pages=parts * row.pages)
        pages = self.size.width + 1
        held = pages * PAGE - self._layered(job.shard).room(job.held, row.held)
        return dataclasses.replace(row, pages=parts * pages, held=held)

    def _point(self, job: Job) -> int:
        return self.eviction.point(job)

    def _ask(self, job: Job) -> Kept:
        """What stays of a job's tokens."""
        pool, rows = self._state()
        at = self._padded_rows(self._alone(job), 1)
        count = np.array([self.eviction.count(job.read + job.steps)], np.int32)
        pool, rows, kept = self.programs.observe(
            pool, rows, at, self._page_tables(self._alone(job), 1), self._same(count)
        )
        self._arrays = pool, rows
        part_here(kept.told).copy_to_host_async()
        return kept

    def _answered(self, job: Job, answer: Kept) -> bool:
        """Moves what stays to pages of its own."""
        assert job.held is not None
        assert job.shard is not None
        counts = here(answer.told)[job.shard.number, :, :, 0].ravel().tolist()
        held = job.read + job.steps
        # Tokens of the output that are read once more
        again = max(0, min(job.known, self._point(job)) - held)
        new = self._layered(job.shard).evict(job.held, counts, held, again)
        if new is None:
            return False
        before, old = job.held, self._page_tables(self._alone(job), 1)
        job.held = new
        pool, rows = self._state()
        pool, _ = self.programs.move(pool, answer, old, self._page_tables(self._alone(job), 1))
        self._arrays, self._flying.sent_more = (pool, rows), True
        job.shard.pages.release(before)
        self.stats.dropped += int(new.dropped.mean())
        return True

    def _page_table(self, jobs: Sequence[Job], count: int) -> Tables:
        """The parts of each layer and head, and how many tokens of a row it has dropped."""
        layered = self._layered(self.shards[0])
        each, width = (layered.layers, layered.lanes), self.size.width
        tables = Tables(np.zeros((*each, count, width), np.int32), np.zeros((*each, count), np.int32))
        for i, job in enumerate(jobs):
            assert job.held is not None
            tables.pages[:, :, i] = layered.table(job.held, width)
            if isinstance(job.held, Layered):
                tables.dropped[:, :, i] = job.held.dropped.reshape(each)
        return tables
