"""Programs for a dispatch: which there are, which one it takes, and which are compiled next.

Each is compiled for a number of rows, a width of page tables and a line's tokens, and serves whatever is not larger. A request
that starts waits for its own. Where programs are compiled ahead, those who run go on with what is there meanwhile."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mla_jax.cache.paged import COPIED, PAGE
from mla_jax.decode.loop import ProgramShape
from mla_jax.decode.rows import ADMITTED
from mla_jax.engine.core.dispatcher import Dispatcher
from mla_jax.engine.core.drafting import Drafting
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.scheduler import Limits

LOOSE = 2  # times as many rows as there are requests, that a program may have
SCORED = 64  # tokens of one prompt whose log-probabilities one dispatch computes


class Room(NamedTuple):
    """Limits of what can be done with the programs that are there."""

    limits: Limits  # of the scheduler
    rows: dict[int, int]  # of a shard, by the width of page tables


class ProgramChoice:
    """Of the programs of a device; `drafting` says for how many rows drafts may pay."""

    def __init__(self, device: Dispatcher, drafting: Drafting):
        self.device, self.size, self.drafting = device, device.size, drafting

    def decoding(self, rows: int, pages: int) -> list[ProgramShape]:
        """For this number of rows of a shard and of pages of a row: without drafts, and with drafts if they may pay."""
        rows, width = _least(self.size.row_counts, rows), self.size.width_for(pages)
        names = ["run"]
        if self.drafting.pays(rows * self.device.shards):
            names.append("run_with_drafts")
        return [ProgramShape(name, width, rows) for name in names]

    def mixed(self, line: int, rows: int, pages: int) -> ProgramShape:
        """It reads a line while this number of rows of a shard decodes."""
        rows, width = _least(self.size.mixed_counts, rows), self.size.width_for(pages)
        return ProgramShape("mixed_step", width, rows, line, self.size.pieces)

    def scoring(self, pages: int) -> ProgramShape:
        """It reads a piece of one prompt and tells log-probabilities."""
        width, pieces = self.size.width_for(pages), self.size.pieces
        return ProgramShape("prefill", width, line=SCORED, pieces=pieces, scores=True)

    def taken(self, wanted: ProgramShape) -> ProgramShape:
        """The program to take; it is compiled if there is none."""
        found = self.device.ready_for(wanted)
        if found is None:
            self.device.compile([wanted])
        return found or wanted

    def every(self, between: Iterable[ProgramShape]) -> list[ProgramShape]:
        """All that any request may need, and those `between` dispatches."""
        size, shapes = self.size, [*self._always(), *between]
        for width in size.widths:
            for rows in size.row_counts:
                shapes += self.decoding(rows, width)
            for rows in size.mixed_counts:
                shapes += [self.mixed(line, rows, width) for line in size.lines()]
            shapes.append(self.scoring(width))
        return shapes

    def compile_for(self, rows: int, jobs: Sequence[Job], line: int | None) -> None:
        """Compiles, all at once, what these jobs lack that start. `rows` are those of the fullest shard with them."""
        shapes = [*self._needed(rows, jobs, line), *self._always()]
        if missing := [shape for shape in shapes if self.device.ready_for(shape) is None]:
            self.device.compile(missing)

    def compile_ahead(self, rows: int, jobs: Sequence[Job], line: int | None) -> None:
        """Begins to compile programs for all these jobs if none fits them, unless some are being compiled."""
        if self.device.compiles:
            return
        for shape in self._needed(rows, jobs, line):
            if not self._fits(self.device.ready_for(shape), shape):
                self.device.start_ahead(shape)

    def room(self, limits: Limits, running: Sequence[Job], rows: int) -> Room:
        """For these running jobs, of which the fullest shard has `rows`, and for others to join them. `limits` are those with all
        programs."""
        most = {width: self.device.most_rows("run", width) for width in self.size.widths}
        width = self.width(running)
        of_lines = {line: self.device.most_rows("mixed_step", width, line) for line in limits.lines}
        lines = tuple(line for line, count in of_lines.items() if count)
        fewest = min([most[width], *(of_lines[line] for line in lines)])
        return Room(dataclasses.replace(limits, rows=max(fewest, rows), lines=lines or limits.lines), most)

    def all_room(self, limits: Limits) -> Room:
        """With all programs."""
        return Room(limits, dict.fromkeys(self.size.widths, self.size.rows))

    def width(self, jobs: Sequence[Job]) -> int:
        """Of the page tables that jobs will need."""
        return self.size.width_for(
            -(-max(len(job.request.prompt) + job.request.limit for job in jobs) // PAGE)
        )

    def _always(self) -> list[ProgramShape]:
        """Programs that any request needs."""
        copied = COPIED if self.size.hosted else 0
        copies = [ProgramShape(name, rows=copied) for name in ("copy_out", "copy_in") if copied]
        return [ProgramShape("admit", rows=ADMITTED), *copies]

    def _needed(self, rows: int, jobs: Sequence[Job], line: int | None) -> list[ProgramShape]:
        width = self.width(jobs)
        # What takes longest to compile first
        mixed = [] if line is None else [self.mixed(line, rows, width)]
        return [*mixed, *self.decoding(rows, width)]

    def _fits(self, found: ProgramShape | None, wanted: ProgramShape) -> bool:
        """Whether a program that is there will do. On a CPU to compile costs more than rows that are nobody's."""
        if found is None or self.device.programs.device.platform == "cpu":
            return found is not None
        return found.rows <= LOOSE * wanted.rows


def _least(counts: Sequence[int], count: int) -> int:
    """The least of some counts that is enough."""
    return next(one for one in counts if one >= count)
