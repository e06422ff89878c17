"""The tools of benchmarks/engine.py: an engine over a model with random weights, and the same programs without one."""

import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import report  # noqa: F401  (it puts this folder last)
from random_models import random_model

from mla_jax import Config, SamplingParams
from mla_jax.cache.paged import PAGE
from mla_jax.decode.loop import Programs
from mla_jax.decode.outputs import STEPS
from mla_jax.decode.rows import ADMITTED
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import Request
from mla_jax.engine.core.sampling_arrays import entries
from mla_jax.engine.core.size import Size

# Median, and standard deviation of the logarithm, of tokens; clipped to 4 .. 1,024. A rough fit to what 1,000 requests of
# ShareGPT come to in vLLM's benchmark: 230 tokens of prompt and 203 of output on average (vllm-project/vllm#18566). These come
# to 228 and 202.
LENGTHS = {"prompt": (120, 1.3), "output": (120, 1.1)}
SHORTEST = 4


class Scale(NamedTuple):
    """How large a run is."""

    model: Config
    deep: Config  # for the calls
    size: Size
    held: int  # tokens, a
    rounds: int  # dispatches of STEPS tokens that are timed, a, b and e
    requests: int  # b
    longest: int  # prompt and output, b and c
    seconds: float  # of arrivals, c
    prefix: int  # tokens, d
    sharing: int  # requests, d
    unshared: int  # requests when nothing is shared, d
    grown: tuple[int, ...]  # tokens held, e
    calls: int
    peer: tuple[int, int, int]  # requests, tokens of their prompts, and of output


def request(prompt: list[int], limit: int) -> Request:
    """Greedy, and not ended before its limit."""
    greedy = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, max_tokens=limit, ignore_eos=True, seed=0)
    return Request(prompt, greedy, ends=())


class Served(NamedTuple):
    """The outcome of requests that were submitted at once."""

    seconds: float
    host: float  # share of the time that the engine spent on the host
    prompts: np.ndarray  # tokens of each
    outputs: np.ndarray

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.outputs) / self.seconds

    @property
    def tokens(self) -> int:
        return int(self.prompts.sum() + self.outputs.sum())

    @property
    def held(self) -> int:
        """Tokens that a decoding row holds on average."""
        return int((self.outputs * (self.prompts + self.outputs / 2)).sum() / self.outputs.sum())


class Bench:
    """A model with random weights, its programs, and an engine over them."""

    def __init__(self, scale: Scale, format: str = "bf16"):
        self.scale, self.size, self.rng = scale, scale.size, np.random.default_rng(0)
        self.programs = Programs(random_model(scale.model, format))
        self.engine = Engine(self.programs, scale.size)
        self.deep = functools.cache(lambda: Programs(random_model(scale.deep)))

    @property
    def long(self) -> Size:
        """For one request that grows."""
        tokens = self.scale.grown[-1] + (self.scale.rounds + 1) * STEPS + PAGE
        return Size(rows=1, pages=-(-tokens // PAGE), context=tokens, chunk=self.size.chunk)

    @property
    def few(self) -> Size:
        """Enough pages for calls, which write nothing."""
        return dataclasses.replace(self.size, pages=self.size.rows)

    def compile(self, parts: Sequence[str]) -> None:
        """Every program that these parts need, all at the same time."""
        started: list[Future] = []
        if "calls" in parts:
            started.append(start_run(self.deep(), self.few, self.few.rows))
        if "e" in parts:
            started.append(start_run(self.programs, self.long, 1))
        if set(parts) - {"e", "calls"}:
            self.engine.warm_up()
        elif "calls" in parts:
            started.append(start_run(self.programs, self.size, self.size.rows))
        for future in started:
            future.result()

    def prompt(self, tokens: int) -> list[int]:
        return self.rng.integers(0, self.scale.model.vocab_size, tokens).tolist()

    def lengths(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of prompts and outputs."""
        drawn = (self.rng.lognormal(np.log(median), spread, count) for median, spread in LENGTHS.values())
        prompts, outputs = (
            np.clip(tokens.round().astype(int), SHORTEST, self.scale.longest) for tokens in drawn
        )
        return prompts, outputs

    def submit(self, prompt: list[int], limit: int, streams: bool = False) -> Job:
        return self.engine.submit(request(prompt, limit), streams=streams)

    def finish(self) -> None:
        while self.engine.busy:
            self.engine.step()

    def serve(self, prompts: list[list[int]], outputs: Sequence[int]) -> float:
        """Seconds from the first request to the last token, when all come at once."""
        start = time.perf_counter()
        for prompt, limit in zip(prompts, outputs, strict=True):
            self.submit(prompt, int(limit))
        self.finish()
        return time.perf_counter() - start

    @functools.cached_property
    def at_once(self) -> Served:
        """The measurement of b, from which c takes its rates."""
        self.engine.reset()
        prompts, outputs = self.lengths(self.scale.requests)
        before = self.engine.stats.host_seconds
        seconds = self.serve([self.prompt(n) for n in prompts], outputs.tolist())
        return Served(seconds, (self.engine.stats.host_seconds - before) / seconds, prompts, outputs)


def start_run(programs: Programs, size: Size, count: int) -> Future:
    """Begins to compile `run` for `count` of the rows."""
    arrays = programs.new(size.rows, size.pages)
    integers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((count,), (count, size.width), ()))
    return programs.run.start(*arrays, *integers)


class Bare:
    """The programs without an engine: some requests in rows of their own, read and continued by hand."""

    def __init__(self, programs: Programs, size: Size, prompts: list[list[int]], limit: int, held: int = 0):
        """Each request may come with `held` tokens in its pages; what these contain is not said."""
        self.programs, self.size, self.prompts = programs, size, prompts
        self.pool, self.rows = programs.new(size.rows, size.pages)
        count, each = len(prompts), -(-(held + max(map(len, prompts)) + limit) // PAGE)
        assert count * each <= size.pages, "the requests do not fit the pool"
        self.at = np.arange(count, dtype=np.int32)
        self.table = np.zeros((count, size.width), np.int32)
        self.table[:, :each] = np.arange(count * each).reshape(count, each)
        jobs = [Job(request(prompt, limit), 0, False) for prompt in prompts]
        for job in jobs:
            job.read = held
        for first in range(0, count, ADMITTED):
            at = np.full(ADMITTED, size.rows, np.int32)
            at[: count - first] = self.at[first : first + ADMITTED]
            self.rows = programs.admit(self.rows, at, entries(jobs[first : first + ADMITTED], ADMITTED))

    def read(self) -> float:
        """Seconds for reading all prompts, one after the other in lines that are full."""
        jax.block_until_ready(self.rows)
        start = time.perf_counter()
        for pieces in self.lines():
            self.read_line(pieces)
        jax.block_until_ready(self.rows)
        return time.perf_counter() - start

    def lines(self) -> list[dict[int, list[int]]]:
        """Pieces of prompts, by their row."""
        found: list[dict[int, list[int]]] = [{}]
        room = self.size.chunk
        for row, prompt in enumerate(self.prompts):
            while prompt:
                if not room or len(found[-1]) == self.size.pieces:
                    found.append({})
                    room = self.size.chunk
                found[-1][row], prompt = prompt[:room], prompt[room:]
                room -= len(found[-1][row])
        return found

    def read_line(self, pieces: dict[int, list[int]], line: int | None = None) -> None:
        """Sends one line."""
        count, at = self.size.pieces, np.full(self.size.pieces, self.size.rows, np.int32)
        counts, table = np.zeros(count, np.int32), np.zeros((count, self.size.width), np.int32)
        tokens = np.zeros(line or self.size.chunk, np.int32)
        given = np.concatenate([np.int32(piece) for piece in pieces.values()])
        tokens[: given.size] = given
        for i, (row, piece) in enumerate(pieces.items()):
            at[i], counts[i], table[i] = self.at[row], len(piece), self.table[row]
        self.pool, self.rows, _ = self.programs.prefill(self.pool, self.rows, at, tokens, counts, table, None)

    def run(self, dispatches: int, steps: int = STEPS) -> tuple[float, float]:
        """Seconds until so many dispatches were sent, and until they were done."""
        jax.block_until_ready(self.rows)
        start = time.perf_counter()
        for _ in range(dispatches):
            self.pool, self.rows, _ = self.programs.run(
                self.pool, self.rows, self.at, self.table, np.int32(steps)
            )
        sent = time.perf_counter() - start
        jax.block_until_ready(self.rows)
        return sent, time.perf_counter() - start


class Seen:
    """A request that somebody reads along: when it came, and when how many of its tokens did."""

    def __init__(self, job: Job, due: float):
        self.job, self.due = job, due
        self.pieces: list[tuple[float, int]] = []

    def look(self, now: float) -> None:
        if tokens := len(self.job.ids) - sum(count for _, count in self.pieces):
            self.pieces.append((now, tokens))

    @property
    def first(self) -> float:
        return self.pieces[0][0] - self.due

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """(seconds since the piece before, tokens) of each piece but the first."""
        return [(after[0] - before[0], after[1]) for before, after in itertools.pairwise(self.pieces)]


def open_loop(bench: Bench, rate: float) -> tuple[list[Seen], int]:
    """Requests that come at random, `rate` a second on average; and how many had no row yet when the last one came."""
    count = max(2, int(rate * bench.scale.seconds))
    prompts, outputs = bench.lengths(count)
    due = np.cumsum(bench.rng.exponential(1 / rate, count)).tolist()
    coming = deque(zip(due, [bench.prompt(n) for n in prompts], outputs.tolist(), strict=True))
    bench.engine.reset()
    seen: list[Seen] = []
    open_ones: list[Seen] = []
    waiting, start = 0, time.perf_counter()
    while coming or bench.engine.busy:
        while coming and start + coming[0][0] <= time.perf_counter():
            after, prompt, limit = coming.popleft()
            open_ones.append(Seen(bench.submit(prompt, limit, streams=True), start + after))
            seen.append(open_ones[-1])
            waiting = len(bench.engine.waiting)
        if not bench.engine.busy:
            time.sleep(max(0.0, start + coming[0][0] - time.perf_counter()))
            continue
        bench.engine.step()
        now = time.perf_counter()
        for one in open_ones:
            one.look(now)
        open_ones = [one for one in open_ones if not one.job.done]
    return seen, waiting
