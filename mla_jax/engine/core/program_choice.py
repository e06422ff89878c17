"""Programs for a dispatch: which there are, which one it takes, and which are compiled next.

Each is compiled for a number of rows, a width of page tables and a line's tokens, and serves whatever is not larger. A request
that starts waits for its own. Where programs are compiled ahead, those who run go on with what is there meanwhile."""

import dataclasses
from collections.abc import Sequence

from mla_jax.cache.paged import COPIED
from mla_jax.decode.loop import ProgramShape
from mla_jax.decode.rows import ADMITTED
from mla_jax.engine.core.cache_policy import CachePolicy
from mla_jax.engine.core.dispatcher import Dispatcher
from mla_jax.engine.core.drafting import Drafting
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.scheduler import Limits

LOOSE = 2  # times as many rows as there are requests, that a program may have
SCORED = 64  # tokens of one prompt whose log-probabilities one dispatch computes


class ProgramChoice:
    """Of the programs of a device. `drafting` says for how many rows drafts may pay, `policy` how many pages a row reads, and the
    programs that rows need between dispatches."""

    def __init__(self, device: Dispatcher, drafting: Drafting, policy: CachePolicy):
        self.device, self.size, self.drafting, self._policy = device, device.size, drafting, policy

    def decoding(self, rows: int, pages: int) -> list[ProgramShape]:
        """For this number of rows of a shard and of pages of a row: without drafts, and with drafts if they may pay."""
        rows, width = _least(self.size.row_counts, rows), self.size.width_for(pages)
        names = ["run"]
        if self.drafting.pays(rows * self.device.shards):
            names.append("run_with_drafts")
        return [ProgramShape(name, width, rows) for name in names]

    def drafts(self, jobs: Sequence[Job], program: ProgramShape, steps: int) -> int:
        """Drafted tokens of each pass that a program makes now; a single step has no room for any."""
        if program.name == "run" or steps == 1 or self.device.ready_for(program) is None:
            return 0
        held = sum(job.held_tokens for job in jobs) // len(jobs)
        return self.drafting.count((job.is_greedy for job in jobs), held)

    def guided(self, rows: int, pages: int) -> list[ProgramShape]:
        """The same where some rows have grammars, in one pass: without drafts, and with drafts if they may pay."""
        places = [1]
        if self.drafting.pays(rows * self.device.shards):
            places.append(1 + self.drafting.drafter.most)
        rows, width = _least(self.size.row_counts, rows), self.size.width_for(pages)
        return [ProgramShape("guided_step", width, rows, places=count) for count in places]

    def guided_by_now(self, wanted: ProgramShape) -> ProgramShape:
        """The program to take for rows with grammars: if need be one for fewer rows, and the others wait for their turn."""
        ready = self.device.ready(wanted.name, places=wanted.places)
        wide = [shape for shape in ready if shape.width >= wanted.width]
        if self.device.ready_for(wanted) is None and wide:
            return max(wide, key=lambda shape: shape.rows)
        return self.device.taken(wanted)

    def mixed(self, line: int, rows: int, pages: int) -> ProgramShape:
        """It reads a line while this number of rows of a shard decodes."""
        rows, width = _least(self.size.mixed_counts, rows), self.size.width_for(pages)
        return ProgramShape("mixed_step", width, rows, line, self.size.pieces)

    def scoring(self, pages: int) -> ProgramShape:
        """It reads a piece of one prompt and tells log-probabilities."""
        width, pieces = self.size.width_for(pages), self.size.pieces
        return ProgramShape("prefill", width, line=SCORED, pieces=pieces, scores=True)

    def every(self, grammars: bool = False) -> list[ProgramShape]:
        """All that any request may need; without `grammars`, any request that has none."""
        size, shapes = self.size, [*self._always(), *self._policy.programs_between(self.size.widths)]
        for width in size.widths:
            for rows in size.row_counts:
                shapes += self.decoding(rows, width)
                shapes += self.guided(rows, width) if grammars else []
            for rows in size.mixed_counts:
                shapes += [self.mixed(line, rows, width) for line in size.lines()]
            shapes.append(self.scoring(width))
        return shapes

    def needed(
        self, rows: int, jobs: Sequence[Job], new: Sequence[Job], line: int | None
    ) -> list[ProgramShape]:
        """For jobs of which the fullest shard has `rows`, to be read in this line, and for the `new` ones among them."""
        width = self.width(jobs)
        # What takes longest to compile first
        mixed = [] if line is None else [self.mixed(line, rows, width)]
        guided = self.guided(rows, width) if any(job.matcher for job in jobs) else []
        further = [shape for job in new for shape in self._further(job)]
        return list(dict.fromkeys([*mixed, *self.decoding(rows, width), *guided, *further, *self._always()]))

    def start_missing(self, needed: Sequence[ProgramShape]) -> bool:
        """Whether none is missing. Begins to compile one that is, or that there is only for far more rows; one at a time."""
        found = {shape: self.device.ready_for(shape) for shape in needed}
        for shape, ready in found.items():
            if not self._fits(ready, shape):
                self.device.start_ahead(shape)
        return None not in found.values()

    def early(self) -> list[ProgramShape]:
        """The programs of a first short request. A line of the middle length also reads a shorter prompt."""
        lines = self.size.lines()
        return [self.mixed(lines[len(lines) // 2], 1, 1), *self.decoding(1, 1), *self._always()]

    def sooner(self, limits: Limits, needed: Sequence[ProgramShape]) -> Limits:
        """Limits with the lines of programs that are there, or soon, and do in the place of a needed one that is neither."""
        mixed = next((shape for shape in needed if shape.name == "mixed_step"), None)
        if mixed is None:
            return limits
        begun = {shape.line for shape in self.device.begun("mixed_step", mixed.rows, mixed.width)}
        lines = tuple(line for line in limits.lines if line in begun)
        if mixed.line in lines or max(lines, default=0) < mixed.line:
            return limits
        return dataclasses.replace(limits, lines=lines)

    def possible(
        self, limits: Limits, running: Sequence[Job], waiting: Sequence[Job], fullest: int
    ) -> tuple[Limits, set[Job]]:
        """Limits of the scheduler, and the waiting jobs that may start, with the programs that are there.

        `limits` are those with all programs; the fullest shard runs `fullest` jobs. Where a program could not be compiled, nobody
        passes who waits for one: once nobody runs, it is tried again, and they get the error."""
        width, may_start, shards = self.width(running), [], self.device.shards
        for job in waiting:
            wider, rows = max(width, self.width([job])), fullest + len(may_start) // shards + 1
            has_others = all(self.device.ready_for(shape) for shape in self._further(job))
            if has_others and self._most_rows(wider, limits.lines) >= rows:
                width = wider
                may_start.append(job)
            elif self.device.failed:
                break
        rows = fullest + -(-len(may_start) // shards)
        lines = [line for line in limits.lines if self.device.most_rows("mixed_step", width, line) >= rows]
        return dataclasses.replace(limits, rows=rows, lines=tuple(lines) or limits.lines), set(may_start)

    def _most_rows(self, width: int, lines: Sequence[int]) -> int:
        """Rows of a shard that can both decode and be read in some line, with page tables of this width."""
        of_lines = [self.device.most_rows("mixed_step", width, line) for line in lines]
        return min(self.device.most_rows("run", width), max(of_lines))

    def _further(self, job: Job) -> list[ProgramShape]:
        """Programs that a job needs besides those that read and decode."""
        pages = self._policy.most_pages(job.request)
        scoring = [self.scoring(pages)] if job.scores else []
        guided = self.guided(1, pages)[:1] if job.matcher else []
        return [*scoring, *guided, *self._policy.programs_of(job.request)]

    def width(self, jobs: Sequence[Job]) -> int:
        """Of the page tables that jobs will need."""
        return self.size.width_for(max(self._policy.most_pages(job.request) for job in jobs))

    def _always(self) -> list[ProgramShape]:
        """Programs that any request needs."""
        copied = COPIED if self.size.hosted else 0
        copies = [ProgramShape(name, rows=copied) for name in ("copy_out", "copy_in") if copied]
        return [ProgramShape("admit", rows=ADMITTED), *copies]

    def _fits(self, found: ProgramShape | None, wanted: ProgramShape) -> bool:
        """Whether a program that is there will do. On a CPU to compile costs more than rows that are nobody's."""
        if found is None or self.device.programs.device.platform == "cpu":
            return found is not None
        return found.rows <= LOOSE * wanted.rows


def _least(counts: Sequence[int], count: int) -> int:
    """The least of some counts that is enough."""
    return next(one for one in counts if one >= count)
