"""Dispatches to the devices: programs with the rows, page tables and tokens of jobs as arrays.

The pool and the table of rows live here. Every program is given them and returns them."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import numpy as np

from mla_jax.base.batch import Tables
from mla_jax.decode.guided import Guide
from mla_jax.decode.loop import Line, Programs, ProgramShape
from mla_jax.decode.outputs import Found, Likely
from mla_jax.decode.packing import of_shards
from mla_jax.decode.programs import THREADS
from mla_jax.decode.rows import ADMITTED
from mla_jax.engine.core.host_tier import HostTier
from mla_jax.engine.core.job import Job, by_shard
from mla_jax.engine.core.processing import States, processing_of, processors_of
from mla_jax.engine.core.sampling_arrays import entries
from mla_jax.engine.core.size import Size
from mla_jax.engine.core.stats import EngineStats

JobsByShard = Sequence[Sequence[Job]]


class Dispatcher:
    """`table(jobs, count, width)` are the page tables of jobs of one shard. Where `keeps_text`, the device keeps rows' tokens."""

    def __init__(
        self,
        programs: Programs,
        size: Size,
        stats: EngineStats,
        table: Callable[[Sequence[Job], int, int], np.ndarray | Tables],
        keeps_text: bool,
    ):
        self.programs, self.size, self.stats = programs, size, stats
        self._table = table
        self._text = size.context if keeps_text else 0  # tokens of a row that the device keeps
        self._started: dict[ProgramShape, Future] = {}
        self.failed: set[ProgramShape] = set()  # that could not be compiled when they were last tried
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

    @functools.cached_property
    def _shapes(self) -> tuple[Any, Any]:
        """Those of pool and table."""
        return self.programs.shapes_of_new(self.size.rows, self.size.pages, self._text)

    def keep(self, pool: Any, rows: Any) -> None:
        """Takes the pool and the table back from a program."""
        self._arrays = pool, rows

    def take_load(self) -> np.ndarray:
        """How often each expert of each layer was chosen since this was last asked; for programs that count it."""
        pool, rows = self.state()
        self.keep(pool, dataclasses.replace(rows, load=rows.load * 0))
        return self.programs.spread.added_up(rows.load)

    def start(self, shapes: Iterable[ProgramShape]) -> list[Future]:
        """Begins to compile programs, unless they are there. Returns those that are not there yet, or have failed."""
        wanted = list(shapes)
        new = [shape for shape in wanted if self._is_new(shape)]
        self._started |= {shape: self.programs.start(*self._shapes, shape) for shape in new}
        return [future for shape in wanted if not _is_there(future := self._started[shape])]

    def trace(self, shape: ProgramShape) -> None:
        """Begins to compile a program, and returns once it is traced."""
        self._started[shape] = self.programs.trace(*self._shapes, shape)

    def _is_new(self, shape: ProgramShape) -> bool:
        """Whether a program was not asked for yet, or could not be compiled then."""
        future = self._started.get(shape)
        return future is None or (future.done() and not _is_there(future))

    def start_ahead(self, shape: ProgramShape) -> None:
        """Begins to compile a program that nobody waits for yet, unless others are being compiled or this one has failed."""
        if not self.compiles and shape not in self.failed:
            self.start([shape])

    def compile_missing(self, shapes: Iterable[ProgramShape]) -> None:
        """Compiles those of these programs that no other can stand for, if there are any."""
        if missing := [shape for shape in shapes if self.ready_for(shape) is None]:
            self.compile(missing)

    def compile(self, shapes: Iterable[ProgramShape]) -> None:
        """Compiles programs, some at a time, and waits for them. Raises what goes wrong."""
        self.failed.clear()
        running: set[Future] = set()
        with self.programs.waits.record():
            for shape in shapes:
                running.update(self.start([shape]))
                # No more at a time: Python does not end before all that was asked for is compiled
                if len(running) == THREADS:
                    done, running = wait(running, return_when=FIRST_COMPLETED)
                    _raise_failed(done)
            _raise_failed(running)

    @property
    def compiles(self) -> bool:
        """Whether a program is being compiled."""
        return not all(future.done() for future in self._started.values())

    def ready(self, name: str, line: int = 0, places: int = 0) -> list[ProgramShape]:
        """The programs of this name that are there, for lines of this length, or masks of as many places."""
        failed = [shape for shape, future in self._started.items() if future.done() and not _is_there(future)]
        for shape in failed:
            del self._started[shape]
        self.failed.update(failed)
        there = [shape for shape, future in self._started.items() if _is_there(future)]
        return [shape for shape in there if (shape.name, shape.line, shape.places) == (name, line, places)]

    def ready_for(self, wanted: ProgramShape) -> ProgramShape | None:
        """The smallest program that is there and does what the wanted one does."""
        ready = self.ready(wanted.name, wanted.line, wanted.places)
        fitting = [shape for shape in ready if shape.rows >= wanted.rows and shape.width >= wanted.width]
        return min(fitting, default=None, key=lambda shape: (shape.rows, shape.width))

    def taken(self, wanted: ProgramShape) -> ProgramShape:
        """The program to take for the wanted one; it is compiled if there is none."""
        found = self.ready_for(wanted)
        if found is None:
            self.compile([wanted])
        return found or wanted

    def begun(self, name: str, rows: int, width: int) -> list[ProgramShape]:
        """Programs of this name, for as many rows and pages or more, that are there or are being compiled."""
        begun = [shape for shape in self._started if not self._is_new(shape)]
        return [one for one in begun if one.name == name and one.rows >= rows and one.width >= width]

    def most_rows(self, name: str, width: int, line: int = 0) -> int:
        """Rows that the programs of this name that are there take, with page tables of this width; 0 if there is none."""
        return max((shape.rows for shape in self.ready(name, line) if shape.width >= width), default=0)

    def admit(self, jobs: JobsByShard) -> None:
        """Tells the devices of jobs that have been given rows."""
        for first in range(0, max(map(len, jobs)), ADMITTED):
            some = [mine[first : first + ADMITTED] for mine in jobs]
            pool, rows = self.state()
            given = of_shards([entries(list(mine), ADMITTED) for mine in some])
            texts = [of_shards([self._texts(mine) for mine in some])] if self._text else []
            self.keep(pool, self.programs.admit(rows, self.rows_of(some, ADMITTED), given, *texts))

    def score(self, job: Job, piece: list[int], shape: ProgramShape, following: list[int]) -> Likely:
        """Reads a piece of a prompt; returns the log-probabilities of the tokens that follow each of its tokens."""
        line, (pool, rows) = self._line({job: piece}, shape), self.state()
        after = self.same(_padded(following, shape.line))
        pool, rows, found = self.programs.prefill(pool, rows, *line, after)
        self.keep(pool, rows)
        return found

    def mixed_step(self, pieces: dict[Job, list[int]], jobs: JobsByShard, shape: ProgramShape) -> Found:
        """Reads pieces of prompts in one line a shard, and has each of `jobs` choose a token."""
        line, (pool, rows) = self._line(pieces, shape), self.state()
        sent = line, self.rows_of(jobs, shape.rows), self.tables(jobs, shape.rows, shape.width)
        pool, rows, found = self.programs.mixed_step(pool, rows, *sent)
        self.keep(pool, rows)
        return found

    def _line(self, pieces: dict[Job, list[int]], shape: ProgramShape) -> Line:
        jobs, count = by_shard(list(pieces), self.shards), shape.pieces
        tokens = [
            _padded(itertools.chain.from_iterable(pieces[job] for job in mine), shape.line) for mine in jobs
        ]
        counts = [_padded((len(pieces[job]) for job in mine), count) for mine in jobs]
        tables = self.tables(jobs, count, shape.width)
        return Line(self.rows_of(jobs, count), of_shards(tokens), of_shards(counts), tables)

    def decode(self, jobs: JobsByShard, shape: ProgramShape, steps: int, drafts: int) -> Found:
        """Sends steps, with up to `drafts` drafted tokens a pass."""
        pool, rows = self.state()
        tables = self.tables(jobs, shape.rows, shape.width)
        sent = self.rows_of(jobs, shape.rows), tables, self.same(np.int32(steps))
        if drafts:
            pool, rows, found = self.programs.run_with_drafts(pool, rows, *sent, self.same(np.int32(drafts)))
        else:
            pool, rows, found = self.programs.run(pool, rows, *sent)
        self.keep(pool, rows)
        return found

    def guided_step(self, jobs: JobsByShard, shape: ProgramShape, guide: Guide) -> tuple[Found, Any]:
        """Sends one token for each job, and for those with drafts what stands of these; also guesses of what follows."""
        pool, rows = self.state()
        sent = self.rows_of(jobs, shape.rows), self.tables(jobs, shape.rows, shape.width), guide
        pool, rows, found, guesses = self.programs.guided_step(pool, rows, *sent)
        self.keep(pool, rows)
        return found, guesses

    def run_processed(self, jobs: JobsByShard, shape: ProgramShape, steps: int) -> tuple[Found, States]:
        """Sends steps of jobs some of which have functions that change their logits; also their states behind these."""
        kinds, (pool, rows) = processors_of(list(itertools.chain(*jobs))), self.state()
        given = of_shards([processing_of(mine, kinds, shape.rows, shape.width) for mine in jobs])
        functions = tuple(one.function for one in kinds.values())
        tables = self.tables(jobs, shape.rows, shape.width)
        sent = self.rows_of(jobs, shape.rows), tables, self.same(np.int32(steps)), given
        pool, rows, found, states = self.programs.run_processed(pool, rows, functions, *sent)
        self.keep(pool, rows)
        return found, States(tuple(kinds), states)

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

    def tables(self, jobs: JobsByShard, count: int, width: int) -> np.ndarray | Tables:
        """The page tables of jobs, by shard."""
        return of_shards([self._table(mine, count, width) for mine in jobs])

    def _texts(self, jobs: Sequence[Job]) -> np.ndarray:
        """The tokens of each job."""
        texts = np.zeros((ADMITTED, self._text), np.int32)
        for text, job in zip(texts, jobs, strict=False):
            text[: len(job.tokens)] = job.tokens
        return texts


def _padded(numbers: Iterable[int], length: int) -> np.ndarray:
    given = np.fromiter(numbers, np.int32)
    return np.pad(given, (0, length - given.size))


def _raise_failed(programs: Iterable[Future]) -> None:
    """Waits for programs, and raises what went wrong with the first of them."""
    for program in programs:
        program.result()


def _is_there(program: Future) -> bool:
    return program.done() and program.exception() is None
