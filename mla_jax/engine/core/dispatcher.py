"""Dispatches to the devices: programs with the rows, page tables and tokens of jobs as arrays.

The pool and the table of rows live here. Every program is given them and returns them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mla_jax.base.batch import Tables
from mla_jax.cache.paged import COPIED
from mla_jax.decode.loop import Programs, ProgramSizes
from mla_jax.decode.outputs import Found, Likely
from mla_jax.decode.packing import of_shards
from mla_jax.decode.rows import ADMITTED
from mla_jax.engine.core.host_tier import HostTier
from mla_jax.engine.core.job import Job, by_shard
from mla_jax.engine.core.sampling_arrays import entries
from mla_jax.engine.core.size import Size
from mla_jax.engine.core.stats import EngineStats

JobsByShard = Sequence[Sequence[Job]]


class Dispatcher:
    """`table(jobs, count)` are the page tables of jobs of one shard. Where `keeps_text`, the device keeps rows' tokens; `evicted`
    is as in Sizes."""

    def __init__(
        self,
        programs: Programs,
        size: Size,
        stats: EngineStats,
        table: Callable[[Sequence[Job], int], np.ndarray | Tables],
        keeps_text: bool,
        evicted: int,
    ):
        self.programs, self.size, self.stats = programs, size, stats
        self._table, self._evicted = table, evicted
        self._text = size.context if keeps_text else 0  # tokens of a row that the device keeps
        self.compiled_rows: set[int] = set()
        self.compiled_drafted: set[int] = set()
        self.compiled_lines: set[int] = set()
        self.reset()

    def reset(self) -> None:
        """Clears the pool, the rows and the host's pages."""
        hosted = self.shards * self.size.hosted
        self.tier = HostTier(self.programs, hosted, self.stats) if hosted else None
        self._arrays: tuple[Any, Any] | None = None  # pool and table, made when the first request comes

    @property
    def shards(self) -> int:
        return self.programs.spread.shards

    def state(self) -> tuple[Any, Any]:
        """The pool and the table of rows. A program that is sent now finds in its pages what belongs there."""
        pool, rows = self._arrays or self.programs.new(self.size.rows, self.size.pages, self._text)
        if self.tier is not None:
            pool = self.tier.settle(pool)
        self._arrays = pool, rows
        return pool, rows

    def keep(self, pool: Any, rows: Any) -> None:
        """Takes the pool and the table back from a program."""
        self._arrays = pool, rows

    def take_load(self) -> np.ndarray:
        """How often each expert of each layer was chosen since this was last asked; for programs that count it."""
        pool, rows = self.state()
        self.keep(pool, dataclasses.replace(rows, load=rows.load * 0))
        return self.programs.spread.added_up(rows.load)

    def compile(
        self, counts: Sequence[int], drafted: Sequence[int], lines: Sequence[int], scored: int = 0
    ) -> None:
        """Compiles the programs for these numbers of rows and tokens, all at once."""
        pool, rows = self.state()
        evicted = 0 if self.compiled_rows else self._evicted
        copied = COPIED if self.size.hosted else 0
        sizes = ProgramSizes(
            self.size.width, self.size.pieces, counts, drafted, lines, scored, evicted, copied
        )
        self.programs.prepare(pool, rows, sizes)
        self.compiled_rows |= set(counts)
        self.compiled_drafted |= set(drafted)
        self.compiled_lines |= set(lines)

    def admit(self, jobs: JobsByShard) -> None:
        """Tells the devices of jobs that have been given rows."""
        for first in range(0, max(map(len, jobs)), ADMITTED):
            some = [mine[first : first + ADMITTED] for mine in jobs]
            pool, rows = self.state()
            given = of_shards([entries(list(mine), ADMITTED) for mine in some])
            texts = [of_shards([self._texts(mine) for mine in some])] if self._text else []
            self.keep(pool, self.programs.admit(rows, self.rows_of(some, ADMITTED), given, *texts))

    def prefill(self, pieces: dict[Job, list[int]], line: int, following: list[int] | None) -> Likely | None:
        """Sends pieces of prompts in one line a shard. `following` are the tokens after those of a single piece, if their
        log-probabilities are asked for."""
        jobs, count = by_shard(list(pieces), self.shards), self.size.pieces
        tokens = of_shards(
            [_padded(itertools.chain.from_iterable(pieces[job] for job in mine), line) for mine in jobs]
        )
        after = None if following is None else of_shards([_padded(following, line)] * len(jobs))
        read = of_shards([_padded((len(pieces[job]) for job in mine), count) for mine in jobs])
        pool, rows = self.state()
        sent = self.rows_of(jobs, count), tokens, read, self.tables(jobs, count), after
        pool, rows, found = self.programs.prefill(pool, rows, *sent)
        self.keep(pool, rows)
        return found

    def decode(self, jobs: JobsByShard, count: int, steps: int, drafts: int) -> Found:
        """Sends steps to the program for `count` rows, with up to `drafts` drafted tokens a pass."""
        pool, rows = self.state()
        sent = self.rows_of(jobs, count), self.tables(jobs, count), self.same(np.int32(steps))
        if drafts:
            pool, rows, found = self.programs.run_with_drafts(pool, rows, *sent, self.same(np.int32(drafts)))
        else:
            pool, rows, found = self.programs.run(pool, rows, *sent)
        self.keep(pool, rows)
        return found

    def alone(self, job: Job) -> JobsByShard:
        """A job in its shard, and no other."""
        return by_shard([job], self.shards)

    def same(self, value: Any) -> Any:
        """A value for all shards."""
        return of_shards([value] * self.shards)

    def rows_of(self, jobs: JobsByShard, count: int) -> np.ndarray:
        """The rows of jobs, by shard; padding is past the table."""

        def rows(mine: Sequence[Job]) -> np.ndarray:
            at = np.full(count, self.size.rows, np.int32)
            at[: len(mine)] = np.array([job.row for job in mine], np.int32)
            return at

        return of_shards([rows(mine) for mine in jobs])

    def tables(self, jobs: JobsByShard, count: int) -> np.ndarray | Tables:
        """The page tables of jobs, by shard."""
        return of_shards([self._table(mine, count) for mine in jobs])

    def _texts(self, jobs: Sequence[Job]) -> np.ndarray:
        """The tokens of each job."""
        texts = np.zeros((ADMITTED, self._text), np.int32)
        for text, job in zip(texts, jobs, strict=False):
            text[: len(job.tokens)] = job.tokens
        return texts


def _padded(numbers: Iterable[int], length: int) -> np.ndarray:
    given = np.fromiter(numbers, np.int32)
    return np.pad(given, (0, length - given.size))
