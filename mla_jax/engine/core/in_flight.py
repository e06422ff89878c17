"""Dispatches under way: a FIFO of sent dispatches whose results nobody has read.

The device computes them in order, so the oldest is read first. Reading blocks until the result is ready, and gives it to its
jobs. It also shows when the device was done: two reads give the time of a pass."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mla_jax.decode.loop import Programs
from mla_jax.decode.outputs import Chosen, Found, Likely
from mla_jax.decode.packing import here, part_here
from mla_jax.engine.core.drafting import Drafting
from mla_jax.engine.core.job import Job, logprobs_of
from mla_jax.engine.core.request import FinishReason, Logprobs
from mla_jax.engine.core.stats import EngineStats

TIMED = 2  # passes of a dispatch from which their time is measured
Timed = tuple[int, int, int, float]  # what a pass took, as Drafting.note_time has it


class Flight(NamedTuple):
    """A dispatch under way. A job may have left its row since it was sent."""

    jobs: list[Job]
    found: Found | None  # in rows of which `places` are the jobs'
    likely: Likely | None  # of a piece of one prompt,
    following: list[int]  # for these tokens
    places: list[int] = []  # noqa: RUF012  (never changed)
    drafts: int = 0  # guesses of each pass
    held: int = 0  # tokens that a row held on average
    sent: float = 0.0
    is_next: bool = False  # nothing was sent between the tokens before and these
    guesses: Any = None  # of tokens that follow those found, by row, for rows with grammars
    states: Any = None  # of functions that change rows' logits, behind those found
    answer: Any = None  # what was asked of one job,
    start: int = 0  # which was admitted so often then


class Landed(NamedTuple):
    """The tokens that a dispatch has chosen for its jobs, one after the other, on the host."""

    chosen: Chosen
    likely: Likely | None  # where a job asks for log-probabilities
    guesses: np.ndarray | None  # `[jobs, K]`: of what follows, -1 for none
    states: Any = None  # of functions that change rows' logits,
    places: Sequence[int] = ()  # in rows of which these are the jobs'

    def guessed(self, i: int) -> list[int]:
        """Guesses of the tokens behind those of job `i`."""
        guesses = [] if self.guesses is None else self.guesses[i].tolist()
        return guesses[: guesses.index(-1)] if -1 in guesses else guesses


class Flights:
    """The queue. `least(jobs, steps)` are the bytes that decode steps of these rows have to read."""

    def __init__(
        self,
        programs: Programs,
        drafting: Drafting,
        stats: EngineStats,
        least: Callable[[list[Job], int], int],
    ):
        self._programs, self._drafting, self._stats, self._least = programs, drafting, stats, least
        self._queue: deque[Flight] = deque()
        self.times: list[Timed] = []  # measured, and not told to `drafting` yet
        self.sent_more = False  # than tokens, since tokens were sent last
        self._looked = 0.0  # when tokens were last looked at,
        self._saw_end = True  # and whether the host waited for them, and so knows when the device was done

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def oldest(self) -> Flight:
        return self._queue[0]

    def popleft(self) -> Flight:
        return self._queue.popleft()

    def send(self, flight: Flight) -> None:
        """Appends what computes anything but tokens."""
        self._queue.append(flight)
        self.sent_more = True

    def send_scores(self, job: Job, likely: Likely, following: list[int]) -> None:
        """Appends what computes log-probabilities of the tokens `following` a piece of a prompt."""
        self.send(Flight([job], None, likely, following))

    def send_question(self, job: Job, answer: Any) -> None:
        """Appends the answer that a paused job waits for."""
        self.send(Flight([job], None, None, [], answer=answer, start=job.starts))

    def send_tokens(
        self,
        places: dict[Job, int],
        found: Found,
        drafts: int,
        held: int,
        guesses: Any = None,
        states: Any = None,
    ) -> None:
        """Appends decode steps with up to `drafts` guesses a pass, of rows that hold `held` tokens on average. `places` say where
        among those found the row of each job is, and among `guesses` of what follows and `states`."""
        part_here(found.chosen).copy_to_host_async()
        jobs, rows, now = list(places), list(places.values()), time.perf_counter()
        is_next = not self.sent_more
        self._queue.append(Flight(jobs, found, None, [], rows, drafts, held, now, is_next, guesses, states))
        self.sent_more = False

    def land(self) -> list[Job]:
        """Gives the oldest dispatch's results to its jobs; returns those that have new tokens, or are done now."""
        flight, start = self._queue.popleft(), time.perf_counter()
        if flight.found is None:
            return self._land_scores(flight, start)
        waits = not flight.found.is_there
        chosen = Chosen(*(array[flight.places] for array in flight.found.tokens()))
        self._note_time(flight, _passes(chosen), waits)
        self._note_guesses(flight, chosen)
        asked = any(job.logprobs is not None for job in flight.jobs)
        likely = Likely(*(array[flight.places] for array in flight.found.logprobs())) if asked else None
        guesses = None if flight.guesses is None else here(flight.guesses)[flight.places]
        landed = Landed(chosen, likely, guesses, flight.states, flight.places)
        return self._land_tokens(flight.jobs, landed, start)

    def _land_scores(self, flight: Flight, start: float) -> list[Job]:
        (job,), likely = flight.jobs, flight.likely
        assert likely is not None
        found = Likely(*map(here, likely))
        self._checked(start)
        if job.done or job.shard is None:
            return []
        found = Likely(*(array[job.shard.number] for array in found))
        job.take_scores(flight.following, found)
        if job.scores or job.request.limit:  # pieces that were sent may not have landed yet
            return []
        job.finish(FinishReason.LENGTH)
        return [job]

    def _land_tokens(self, jobs: list[Job], tokens: "Landed", start: float) -> list[Job]:
        now, chosen = self._checked(start), tokens.chosen
        self._stats.generated += int(chosen.count.sum())
        self._stats.least_bytes += self._least(jobs, _passes(chosen))
        # Some have ended meanwhile: by a cancel, or by a stop text, which only the host sees
        going = [(i, job) for i, job in enumerate(jobs) if not job.done]
        for i, job in going:
            try:
                self._give(job, tokens, i, now)
            except (
                Exception
            ) as e:  # of its text or its log-probabilities: the other rows' tokens are not lost
                job.fail(e)
        return [job for _, job in going]

    def _give(self, job: Job, tokens: "Landed", i: int, now: float) -> None:
        """Gives a job its new tokens, those of row `i`."""
        chosen = tokens.chosen
        ids = chosen.tokens[i, : chosen.count[i]].tolist()
        if job.matcher is not None:
            job.take_guided(ids, tokens.guessed(i))
        if tokens.states is not None and job.processor is not None:
            job.sent = 0
            tokens.states.give(job, tokens.places[i])
        job.take(ids, _logprobs(job, tokens.likely, i, ids), bool(chosen.done[i]), bool(chosen.finite[i]))
        job.times.note(now, len(ids), self._stats.least_bytes)

    def _checked(self, start: float) -> float:
        """The time, when results are there that were waited for since `start`; raises what the host's experts raised."""
        now = time.perf_counter()
        self._stats.waited_seconds += now - start
        self._programs.check()
        return now

    def _note_time(self, flight: Flight, passes: int, waits: bool) -> None:
        """Records a pass's time, where the device did nothing else meanwhile and the host saw both ends of it: the host `waits`
        for the tokens, as it did for those before."""
        now = time.perf_counter()
        saw_start = flight.is_next and (self._saw_end or flight.sent > self._looked)
        if saw_start and waits and passes >= TIMED and self._drafting.drafter.most:
            seconds = now - max(self._looked, flight.sent)
            self.times.append((len(flight.jobs), flight.held, flight.drafts, seconds / passes))
        self._looked, self._saw_end = now, waits

    def _note_guesses(self, flight: Flight, chosen: Chosen) -> None:
        """How many guesses were read, and how many of them stood."""
        stats, stood = self._stats, chosen.stood.sum(0)
        stats.drafted = stats.drafted + chosen.drafted.sum(0)
        stats.stood = stats.stood + stood
        stats.passes += int(chosen.count.sum() - stood.sum())
        self._drafting.note((job.is_greedy for job in flight.jobs), chosen.drafted, chosen.stood)


def _passes(chosen: Chosen) -> int:
    """Of the row with most: each pass chooses one token, and those guesses that stand."""
    return int((chosen.count - chosen.stood.sum(1)).max())


def _logprobs(job: Job, likely: Likely | None, i: int, ids: list[int]) -> Logprobs | None:
    """Of the tokens in row `i`, if the job asks for any."""
    if job.logprobs is None or likely is None:
        return None
    return logprobs_of(ids, Likely(*(array[i] for array in likely)), job.request.params.logprobs or 0)
