"""Between the pool on the device and pages in the host's memory: pages that the prefix index forgets are copied out, and those
that a prompt begins with are copied in.

Both are only queued at first. `settle` sends them before the next program that may write to the pool. The device runs programs
in the order in which they are sent; nothing else keeps them apart. A thread waits for copies to the host. The engine waits only
where a prompt begins with such a page, and where many copies are under way, which fill the device."""

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from mla_jax.cache.paged import COPIED, COPIES, NOWHERE, Pool
from mla_jax.decode.loop import Programs
from mla_jax.decode.packing import of_shards
from mla_jax.engine.core.host_pages import HostPages, Kind
from mla_jax.engine.core.stats import EngineStats


class Note(NamedTuple):
    """Contents, and the page of a data shard's pool that they leave or enter."""

    digest: bytes
    page: int
    shard: int


class Write(NamedTuple):
    """Contents on their way to the host."""

    digests: frozenset[bytes]
    done: Future[None]


@dataclass(frozen=True)
class ShardTier:
    """The tier as the pages of one data shard see it. Contents are shared: a page that left one shard may enter another."""

    tier: "HostTier"
    shard: int

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.tier.store

    def forget(self, digest: bytes, page: int) -> None:
        self.tier.forget(digest, page, self.shard)

    def ask(self, digest: bytes, page: int) -> None:
        self.tier.ask(digest, page, self.shard)


class HostTier:
    """`count` pages in the host's memory, behind the pools of these programs; figures go to `stats`. On a mesh a page has a part
    for each device of its data shard that holds other numbers."""

    def __init__(self, programs: Programs, count: int, stats: EngineStats):
        self.programs, self.spread, self.stats = programs, programs.spread, stats
        layout = self.spread.layout
        self._parts = layout.context * (1 if programs.model.dispatch.shares_cache else layout.tensor)
        kinds = {
            name: Kind((self._parts, *one.shape), np.dtype(one.dtype)) for name, one in programs.page.items()
        }
        self.store = HostPages(count, kinds)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="host pages")
        self._forgotten: list[Note] = []
        self._asked: list[Note] = []
        self._writes: deque[Write] = deque()  # the newest ones; they are done in this order
        stats.pages_hosted = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.store

    def of(self, shard: int) -> ShardTier:
        return ShardTier(self, shard)

    def forget(self, digest: bytes, page: int, shard: int = 0) -> None:
        """Notes that the index no longer has a page, whose contents stay until the next program writes to the pool."""
        self._forgotten.append(Note(digest, page, shard))

    def ask(self, digest: bytes, page: int, shard: int = 0) -> None:
        """Queues a copy from the host into a page, before the next program reads it."""
        self.store.hold(digest)
        self._asked.append(Note(digest, page, shard))

    def settle(self, pool: Pool) -> Pool:
        """Sends the queued copies; returns the pool with the copied-in pages."""
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
        for some in self._blocks(list(slots)):
            while len(self._writes) >= COPIES:
                self._wait(self._writes.popleft().done.result)
            pool, contents = self.programs.copy_out(pool, _places(some))
            for array in contents.values():
                array.copy_to_host_async()
            done = self._writer.submit(
                self._write, [[slots[note] for note in mine] for mine in some], contents
            )
            self._writes.append(Write(frozenset(note.digest for mine in some for note in mine), done))
            del contents  # the writer's alone, so that the device has its memory again once they are out
        self.stats.pages_out += len(slots)
        self.stats.bytes_out += len(slots) * self.store.page_bytes
        return pool

    def _send_in(self, pool: Pool, asked: Sequence[Note]) -> Pool:
        sent: deque[Any] = deque()
        for some in self._blocks(asked):
            digests = [[note.digest for note in mine] for mine in some]
            self._await([digest for mine in digests for digest in mine])
            if len(sent) == COPIES:
                self._wait(functools.partial(jax.block_until_ready, sent.popleft()))
            contents = self._read(digests)
            pool, contents = self.programs.copy_in(pool, contents, _places(some))
            sent.append(contents)
        for note in reversed(asked):  # so that of a prompt's pages the first is forgotten last
            self.store.drop(note.digest)
        self.stats.pages_in += len(asked)
        self.stats.bytes_in += len(asked) * self.store.page_bytes
        return pool

    def _blocks(self, notes: Sequence[Note]) -> Iterator[list[Sequence[Note]]]:
        """Notes by data shard, as many as one program takes of each at a time."""
        of_shards = [[note for note in notes if note.shard == shard] for shard in range(self.spread.shards)]
        for first in range(0, max(map(len, of_shards)), COPIED):
            yield [mine[first : first + COPIED] for mine in of_shards]

    def _write(self, slots: Sequence[Sequence[int]], contents: Mapping[str, jax.Array]) -> None:
        """Stores the pages that left each shard."""
        fetched = {name: self.spread.fetch(array, self._parts) for name, array in contents.items()}
        for shard, mine in enumerate(slots):
            self.store.write(mine, {name: arrays[shard] for name, arrays in fetched.items()})

    def _read(self, digests: Sequence[Sequence[bytes]]) -> dict[str, jax.Array]:
        """The contents of pages that enter each shard, on its devices."""
        pages = [self.store.read(mine, COPIED) for mine in digests]
        return {name: self.spread.put([mine[name] for mine in pages]) for name in self.store.kinds}

    def _await(self, digests: Sequence[bytes]) -> None:
        """Waits until none of these contents is on its way."""
        while any(not write.digests.isdisjoint(digests) for write in self._writes):
            self._wait(self._writes.popleft().done.result)

    def _wait(self, result: Callable[[], Any]) -> None:
        """Raises what went wrong on the device."""
        start = time.perf_counter()
        result()
        self.stats.waited_seconds += time.perf_counter() - start


def _places(notes: Sequence[Sequence[Note]]) -> np.ndarray:
    """Their pages of the pool, by data shard; those beyond are none."""
    places = [np.full(COPIED, NOWHERE, np.int32) for _ in notes]
    for at, mine in zip(places, notes, strict=True):
        at[: len(mine)] = [note.page for note in mine]
    return of_shards(places)
