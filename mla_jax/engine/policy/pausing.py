"""The engine for rows that pause: a program is asked something of a row, and the answer changes the row's pages.

Where a row pauses follows from its number of tokens alone, so a request that was preempted and is read again pauses in the same
places. A row waits from a question to its answer; the others go on."""

import dataclasses
import time
from typing import Any, ClassVar

import jax

from mla_jax.decode.loop import Sizes
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.scheduler import Running, Waiting
from mla_jax.engine.core.shard import Shard, by_shard


class PausingEngine(Engine):
    """`questions` are the rows of which each kind is asked at a time, by the names of Sizes."""

    questions: ClassVar[dict[str, int]]

    def _point(self, job: Job) -> int:
        """Tokens that a job has when it pauses next."""
        raise NotImplementedError

    def _ask(self, job: Job) -> Any:
        """Sends the program that is asked, and returns the arrays that it answers with."""
        raise NotImplementedError

    def _answered(self, job: Job, answer: Any) -> bool:
        """Changes a job's pages; False if too few are free."""
        raise NotImplementedError

    @property
    def _text(self) -> int:
        return self.size.context

    def _as_waiting(self, job: Job, shard: Shard) -> Waiting:
        return dataclasses.replace(super()._as_waiting(job, shard), until=0)

    def _as_running(self, job: Job) -> Running:
        row, point = super()._as_running(job), self._point(job)
        until = max(0, point - (job.known if job.unread else row.held))
        return dataclasses.replace(row, unread=min(row.unread, max(point - job.read, 0)), until=until)

    def _compile(self, counts: Any, lines: Any, scored: int = 0) -> None:
        if not self._compiled_rows:
            pool, rows = self._state()
            self.programs.prepare(
                pool, rows, Sizes(self.size.width, self.size.pieces)._replace(**self.questions)
            )
        super()._compile(counts, lines, scored)

    def _score(self) -> None:
        super()._score()
        for job in self.running:
            at_point = job.read + job.steps == self._point(job)
            if at_point and job.left > 0 and not job.is_paused and not (job.scores and job.unread):
                job.is_paused = True
                self._flying.send_question(job, self._ask(job))

    def _alone(self, job: Job) -> list[list[Job]]:
        """A job of its shard, and none of the others."""
        return by_shard([job], len(self.shards))

    def _land(self) -> None:
        if self._flying.oldest.answer is None:
            super()._land()
            return
        flight, start = self._flying.popleft(), time.perf_counter()
        jax.block_until_ready(flight.answer)
        self.stats.waited_seconds += time.perf_counter() - start
        self.programs.check()
        (job,) = flight.jobs
        if job.row is None or job.starts != flight.start:
            return
        job.pauses, job.is_paused = job.pauses + 1, False
        if not self._answered(job, flight.answer):
            self._preempt(job)
