"""Any number of requests, taken from an iterator only as far ahead as the engine needs them."""

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from mla_jax.base.errors import Overloaded
from mla_jax.engine.core.request import Request
from mla_jax.engine.reader import Reader

WAITING = 4  # requests that are submitted and not done, at most, as multiples of the engine's rows
# Groups that are taken, at most, also as multiples of the rows; done ones that wait for an earlier one count
TAKEN = 64
Submit = Callable[[Sequence[Request], Callable[[Reader], None]], list[Reader]]  # LLM.submit


class Served:
    """Groups of requests in their order: those that are taken and were not given back yet.

    The engine has `rows`, and `waiting` more requests may be in it; None: any number."""

    def __init__(
        self, submit: Submit, rows: int, groups: Iterable[Sequence[Request]], waiting: int | None = None
    ):
        self._submit, self._rows, self._source, self._ended = submit, rows, iter(groups), False
        self._most = WAITING * rows if waiting is None else min(WAITING * rows, rows + waiting)
        self._taken: deque[Sequence[Request]] = deque()  # and not submitted yet
        self._groups: deque[list[Reader]] = deque()
        self._given = 0
        self._news: queue.SimpleQueue[Reader] = queue.SimpleQueue()
        self.unfinished: set[Reader] = set()

    def fill(self) -> bool:
        """Submits as many requests as there is room for; whether any group is left to be returned.

        Raises Overloaded if the engine takes none, and none of these is in it."""
        self._take_groups()
        requests = [request for group in self._taken for request in group]
        try:
            readers = iter(self._submit(requests, self._news.put) if requests else [])
        except Overloaded:
            if not self.unfinished:
                raise
            return True
        new = [[next(readers) for _ in group] for group in self._taken]
        self._groups += new
        self.unfinished |= {reader for group in new for reader in group}
        self._taken.clear()
        return bool(self._groups)

    def _take_groups(self) -> None:
        taken = sum(map(len, self._taken))
        room = self._most - len(self.unfinished) - taken
        groups = TAKEN * self._rows - len(self._groups)
        while not self._ended and room > 0 and len(self._taken) < groups:
            group = next(self._source, None)
            if group is None:
                self._ended = True
            else:
                self._taken.append(group)
                room -= len(group)

    @property
    def ready(self) -> bool:
        """Whether the first group is done."""
        return bool(self._groups) and _is_done(self._groups[0])

    @property
    def done(self) -> int:
        """Groups that are done, given back or not."""
        return self._given + sum(map(_is_done, self._groups))

    def wait(self, seconds: float | None = None) -> None:
        """Until requests have news, which are read: they may have come to a stop text. Not longer than these seconds."""
        with contextlib.suppress(queue.Empty):
            news = {self._news.get(timeout=seconds)}
            while not self._news.empty():
                news.add(self._news.get_nowait())
            for reader in news:
                reader.read()
            self.unfinished -= {reader for reader in news if reader.done}

    def take(self) -> Iterator[list[Reader]]:
        """Gives back the first groups as far as they are done."""
        while self.ready:
            self._given += 1
            yield self._groups.popleft()


def _is_done(group: list[Reader]) -> bool:
    return all(reader.done for reader in group)
