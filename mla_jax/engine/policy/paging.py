"""The engine for requests whose pages are in the host's memory, and on the device as far as retrieval asks for them.

A prompt is read with all its pages on the device. Then, and whenever a row has filled a page, its full pages go to the host, and
those that its newest token asks for stay or come back. In between, a step chooses among those on the device."""

import dataclasses
import itertools
from typing import Any, ClassVar, cast

import numpy as np

from mla_jax.cache.paged import NOWHERE, PAGE
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.pages import Pages
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.scheduler import Plan, Running, Waiting, plan
from mla_jax.engine.core.shard import Shard
from mla_jax.engine.policy.pausing import PausingEngine
from mla_jax.engine.policy.resident import Resident, ResidentPages
from mla_jax.engine.policy.retrieving import RetrievingEngine


class PagingEngine(PausingEngine, RetrievingEngine):
    """An engine over programs of a model that retrieves, and pages in the host's memory."""

    questions: ClassVar = {"ranked": 1}

    @property
    def _most(self) -> int:
        """Pages of a row that are on the device once its prompt is read, and the one that it writes."""
        retrieval = self.programs.model.dispatch.retrieval
        assert retrieval is not None
        return min(retrieval.resident_pages(PAGE), self.size.width) + 1

    def _new_pages(self) -> Pages:
        return ResidentPages(self.size.pages, PAGE, tier=self._tier)

    @property
    def _summed(self) -> int:
        return self.size.hosted

    @property
    def _resident(self) -> ResidentPages:
        return cast(ResidentPages, self.shards[0].pages)  # the host's memory is one shard's

    def _room(self, request: Request) -> int:
        """The prompt must fit the device, all of it the host."""
        on_device = (self.size.pages - self._most) * PAGE
        return on_device if len(request.prompt) > on_device else self.size.hosted * PAGE

    def _free(self, shard: Shard) -> int:
        """Without those for rows that are about to leave pages to others that hold them, too."""
        whole = [
            job.held for job in shard.running if job.held is not None and not isinstance(job.held, Resident)
        ]
        aside = sum(max(self._most - shard.pages.own(held), 0) for held in whole)
        return max(shard.pages.free - aside, 0)

    def _plan(self, shard: Shard, waiting: list[Waiting], running: list[Running]) -> Plan:
        """The host must have room for all that a request may come to."""
        taken = sum(self._hosted(job) for job in shard.running)
        sums = itertools.accumulate((self._hosted(self.jobs[one.id]) for one in waiting), initial=taken)
        fit = sum(total <= self.size.hosted for total in sums) - 1
        return plan(waiting[: max(fit, 0)], running, self._free(shard), self.limits)

    def _hosted(self, job: Job) -> int:
        """Pages that a request may fill."""
        return (len(job.request.prompt) + job.request.limit) // PAGE

    def _as_waiting(self, job: Job, shard: Shard) -> Waiting:
        waiting = super()._as_waiting(job, shard)
        return dataclasses.replace(waiting, extra=min(self._most, waiting.taken))

    def _as_running(self, job: Job) -> Running:
        row, held = super()._as_running(job), job.held
        left_out = held.left_out(PAGE) if isinstance(held, Resident) else 0
        return dataclasses.replace(row, held=row.held - left_out)

    def _point(self, job: Job) -> int:
        """At the end of its prompt, then at each page's end."""
        prompt = len(job.request.prompt)
        return (prompt // PAGE + job.pauses) * PAGE if job.pauses else prompt

    def _ask(self, job: Job) -> Any:
        """Has the host keep a job's full pages, and asks which of them it needs on the device."""
        assert job.held is not None
        job.held = held = job.held if isinstance(job.held, Resident) else Resident.of(job.held)
        new = self._resident.keep(held, (job.read + job.steps) // PAGE, b"%d of %d" % (job.starts, job.id))
        to, slots = (np.full((1, self.size.width), NOWHERE, np.int32) for _ in range(2))
        to[0, : len(held.numbers)] = [new.get(number, NOWHERE) for number in held.numbers]
        slots[0, : len(held.digests)] = self._resident.slots(held)
        pool, rows = self._state()
        at = self._padded_rows([[job]], 1)
        pool, rows, places = self.programs.rank(pool, rows, at, self._page_table([job], 1), to, slots)
        self._arrays = pool, rows
        places.copy_to_host_async()
        return places

    def _answered(self, job: Job, answer: Any) -> bool:
        """Gives a job the pages that it needs."""
        held, tokens = job.held, job.read + job.steps
        assert isinstance(held, Resident)
        pages = -(-tokens // PAGE)
        if not self._resident.choose(held, np.asarray(answer)[0, :pages].tolist()):
            return False
        pool, rows = self._state()
        left = np.array([tokens - held.left_out(PAGE)], np.int32)
        self._arrays = pool, self.programs.hold(rows, self._padded_rows([[job]], 1), left)
        return True

    def _attended(self, held: int) -> int:
        return super()._attended(min(held, self._most * PAGE))
