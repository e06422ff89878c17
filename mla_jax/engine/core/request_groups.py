"""Any number of requests, taken from an iterator only as far ahead as the engine needs them."""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from mla_jax.engine.core.interface import EngineInterface
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import Request

WAITING = 4  # requests that are submitted and not done, at most, as multiples of the engine's rows
# Groups that are taken, at most, also as multiples of the rows; done ones that wait for an earlier one count
TAKEN = 64


class Served:
    """Groups of requests in their order: those that are taken and were not given back yet."""

    def __init__(self, engine: EngineInterface, groups: Iterable[Sequence[Request]]):
        self._engine, self._source, self._ended = engine, iter(groups), False
        self._groups: deque[list[Job]] = deque()
        self._given = 0
        self.unfinished: list[Job] = []

    def fill(self) -> bool:
        """Submits as many requests as there is room for; whether any group is left to be returned."""
        rows = self._engine.rows
        self.unfinished = [job for job in self.unfinished if not job.done]
        while not self._ended and len(self.unfinished) < WAITING * rows and len(self._groups) < TAKEN * rows:
            group = next(self._source, None)
            if group is None:
                self._ended = True
            else:
                self._submit(group)
        return bool(self._groups)

    @property
    def ready(self) -> bool:
        """Whether the first group is done."""
        return bool(self._groups) and _is_done(self._groups[0])

    @property
    def done(self) -> int:
        """Groups that are done, given back or not."""
        return self._given + sum(map(_is_done, self._groups))

    def take(self) -> Iterator[list[Job]]:
        """Gives back the first groups as far as they are done."""
        while self.ready:
            self._given += 1
            yield self._groups.popleft()

    def _submit(self, group: Sequence[Request]) -> None:
        self._groups.append([])
        for request in group:
            job = self._engine.submit(request)
            self._groups[-1].append(job)
            self.unfinished.append(job)


def _is_done(group: list[Job]) -> bool:
    return all(job.done for job in group)
