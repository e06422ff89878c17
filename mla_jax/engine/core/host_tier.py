"""Between the pool on the device and pages in the host's memory: pages that the prefix index forgets are copied out, and those
that a prompt begins with are copied in.

Both are only noted at first. `settle` sends them before the next program that may write to the pool. The device runs programs in
the order in which they are sent; nothing else keeps them apart. A thread waits for what comes out. The engine does only where a
prompt begins with that, and where much is on its way, which fills the device."""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from mla_jax.cache.paged import COPIED, COPIES, NOWHERE, Pool
from mla_jax.decode.loop import Programs
from mla_jax.engine.core.host_pages import HostPages, Kind
from mla_jax.engine.core.stats import EngineStats


class Note(NamedTuple):
    """Contents, and the page of the pool that they leave or enter."""

    digest: bytes
    page: int


class Write(NamedTuple):
    """Contents on their way to the host."""

    digests: frozenset[bytes]
    done: Future[None]


class HostTier:
    """`count` pages in the host's memory, behind the pool of these programs; figures go to `stats`."""

    def __init__(self, programs: Programs, count: int, stats: EngineStats):
        self.programs, self.stats = programs, stats
        self.store = HostPages(
            count, {name: Kind(one.shape, np.dtype(one.dtype)) for name, one in programs.page.items()}
        )
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="host pages")
        self._forgotten: list[Note] = []
        self._asked: list[Note] = []
        self._writes: deque[Write] = deque()  # the newest ones; they are done in this order
        stats.pages_hosted = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.store

    def forget(self, digest: bytes, page: int) -> None:
        """Notes that the index no longer has a page, whose contents stay until the next program writes to the pool."""
        self._forgotten.append(Note(digest, page))

    def ask(self, digest: bytes, page: int) -> None:
        """Notes that contents that are here belong into a page before the next program reads it."""
        self.store.hold(digest)
        self._asked.append(Note(digest, page))

    def settle(self, pool: Pool) -> Pool:
        """The pool, once what was forgotten is on its way out and what was asked for is in its pages."""
        forgotten, asked = self._forgotten, self._asked
        if not forgotten and not asked:
            return pool
        self._forgotten, self._asked = [], []
        pool = self._send_out(pool, self._slots_of(forgotten))
        pool = self._send_in(pool, asked)
        self.stats.pages_hosted = len(self.store)
        return pool

    def finish(self) -> None:
        """Waits until nothing is on its way to the host."""
        while self._writes:
            self._wait(self._writes.popleft().done.result)

    def _slots_of(self, forgotten: Sequence[Note]) -> dict[Note, int]:
        """Slots for the newest of these that there is room for. Contents that are here already stay where they are."""
        room = self.store.room
        newest = forgotten[-room:] if room else []
        return {note: slot for note in newest if (slot := self.store.add(note.digest)) is not None}

    def _send_out(self, pool: Pool, slots: Mapping[Note, int]) -> Pool:
        for some in _blocks(list(slots)):
            while len(self._writes) >= COPIES:
                self._wait(self._writes.popleft().done.result)
            pool, contents = self.programs.copy_out(pool, _places(some))
            for array in contents.values():
                array.copy_to_host_async()
            done = self._writer.submit(self.store.write, [slots[note] for note in some], contents)
            self._writes.append(Write(frozenset(note.digest for note in some), done))
            del contents  # the writer's alone, so that the device has its memory again once they are out
        self.stats.pages_out += len(slots)
        self.stats.bytes_out += len(slots) * self.store.page_bytes
        return pool

    def _send_in(self, pool: Pool, asked: Sequence[Note]) -> Pool:
        sent: deque[Any] = deque()
        for some in _blocks(asked):
            digests = [note.digest for note in some]
            self._await(digests)
            if len(sent) == COPIES:
                self._wait(functools.partial(jax.block_until_ready, sent.popleft()))
            contents = jax.device_put(self.store.read(digests, COPIED))
            pool, contents = self.programs.copy_in(pool, contents, _places(some))
            sent.append(contents)
        for note in reversed(asked):  # so that of a prompt's pages the first is forgotten last
            self.store.drop(note.digest)
        self.stats.pages_in += len(asked)
        self.stats.bytes_in += len(asked) * self.store.page_bytes
        return pool

    def _await(self, digests: Sequence[bytes]) -> None:
        """Waits until none of these contents is on its way."""
        while any(not write.digests.isdisjoint(digests) for write in self._writes):
            self._wait(self._writes.popleft().done.result)

    def _wait(self, result: Callable[[], Any]) -> None:
        """Raises what went wrong on the device."""
        start = time.perf_counter()
        result()
        self.stats.waited_seconds += time.perf_counter() - start


def _blocks(notes: Sequence[Note]) -> Iterator[Sequence[Note]]:
    """As many as one program takes, at a time."""
    return (notes[first : first + COPIED] for first in range(0, len(notes), COPIED))


def _places(notes: Sequence[Note]) -> np.ndarray:
    """Their pages of the pool; those beyond are none."""
    places = np.full(COPIED, NOWHERE, np.int32)
    places[: len(notes)] = [note.page for note in notes]
    return places
