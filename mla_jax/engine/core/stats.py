"""Figures of one request and of the engine, with compiling told apart from running."""

import resource
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from mla_jax.base.options import MOST_DRAFTS
from mla_jax.decode.programs import Waits
from mla_jax.engine.core.pages import Pages

SAMPLES = 4096  # of the pool over time, that are kept


@dataclass(frozen=True)
class Stats:
    """Seconds and tokens of one request."""

    prompt_tokens: int
    generated_tokens: int
    first_token_seconds: float  # since it was submitted, without compiling
    decode_seconds: float  # after the first token, without compiling
    # Spent waiting for programs to be traced, compiled, or read from where they are stored
    compile_seconds: float
    seed: int
    first_tokens: int = 1  # that came at once with the first
    # The share of the device's bandwidth, by the least bytes its steps had to read; None where that is not known
    bandwidth_share: float | None = None
    peak_bytes: int | None = None  # of device memory; of the process on a CPU

    @property
    def tokens_per_second(self) -> float:
        later = self.generated_tokens - self.first_tokens
        return later / self.decode_seconds if self.decode_seconds > 0 and later > 0 else 0.0


def peak_bytes() -> int | None:
    """The most memory used so far: the first device's, or on a CPU the process's. None where the device does not say."""
    first = jax.local_devices()[0]
    if first.platform == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return (first.memory_stats() or {}).get("peak_bytes_in_use") or None


@dataclass
class Times:
    """When a request was submitted, got its first token and its last, by `time.perf_counter`."""

    submitted: float
    first: float | None = None
    last: float | None = None
    first_tokens: int = 0  # that came at once with the first
    least_bytes: int = 0  # that decode steps have read between the first token and the last
    _start_bytes: int = 0

    def note(self, now: float, tokens: int, least_bytes: int) -> None:
        """Some tokens came; `least_bytes` is the engine's count."""
        if self.first is None and tokens:
            self.first, self.first_tokens, self._start_bytes = now, tokens, least_bytes
        self.last, self.least_bytes = now, least_bytes - self._start_bytes


def between(waits: Waits, start: float, end: float) -> tuple[float, float]:
    """(running, compiling) seconds of a span of time."""
    compiling = sum(max(min(stop, end) - max(begin, start), 0.0) for begin, stop in waits.spans)
    return max(end - start - compiling, 0.0), compiling


def stats_of(
    times: Times, prompt: int, generated: int, seed: int, waits: Waits, bandwidth: float | None
) -> Stats:
    """The figures of a request so far: its tokens of `prompt` and `generated`. `bandwidth` of the device in bytes per second,
    None where it means nothing."""
    now = time.perf_counter() if times.last is None else times.last
    first, compiling = between(waits, times.submitted, now if times.first is None else times.first)
    decoding, later = between(waits, now if times.first is None else times.first, now)
    share = times.least_bytes / decoding / bandwidth if bandwidth and decoding > 0 else None
    return Stats(
        prompt_tokens=prompt,
        generated_tokens=generated,
        first_token_seconds=first,
        decode_seconds=decoding,
        compile_seconds=compiling + later,
        seed=seed,
        first_tokens=times.first_tokens,
        bandwidth_share=share,
        peak_bytes=peak_bytes(),
    )


class Sample(NamedTuple):
    """The pool at one time."""

    seconds: float  # since the engine began
    running: int
    waiting: int
    held: int  # pages that requests hold
    cached: int  # pages of the prefix index
    unused: int  # pages that hold nothing anybody knows
    generated: int  # tokens so far


@dataclass
class EngineStats:
    """Counters and states of an engine; `samples` are the pool over time, for a plot."""

    rows: int
    pages: int
    running: int = 0
    waiting: int = 0
    tokens_held: int = 0
    shard_tokens: list[int] = field(default_factory=lambda: [0])  # of these, each data shard's
    pages_free: int = 0  # or held by nobody
    pages_cached: int = 0  # in the prefix index
    pages_shared: int = 0  # by several requests
    finished: int = 0
    read: int = 0  # tokens of prompts that were computed
    hits: int = 0  # tokens of prompts that were found in the prefix index, or in the host's memory
    generated: int = 0
    preemptions: int = 0
    dispatches: int = 0
    host_seconds: float = 0.0  # between dispatches, not waiting for the device
    waited_seconds: float = 0.0  # for the device
    # Guesses in each place behind a token
    drafted: np.ndarray = field(default_factory=lambda: np.zeros(MOST_DRAFTS, int))
    # How many of these were what was drawn
    stood: np.ndarray = field(default_factory=lambda: np.zeros(MOST_DRAFTS, int))
    passes: int = 0  # of rows: tokens that were chosen without a guess
    dropped: int = 0  # tokens that were evicted, on average of layers and heads
    pages_hosted: int = 0  # in the host's memory now
    pages_out: int = 0  # that were copied there,
    pages_in: int = 0  # and from there to the device
    bytes_out: int = 0
    bytes_in: int = 0
    compiled: int = 0  # programs
    least_bytes: int = 0  # that decode steps had to read
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=SAMPLES), repr=False)
    began: float = field(default_factory=time.perf_counter, repr=False)

    def note(self, pages: Sequence[Pages], held: Sequence[int], running: int, waiting: int) -> None:
        """The state now: the pages and the tokens held of each shard, and the numbers of requests."""
        self.running, self.waiting = running, waiting
        self.shard_tokens, self.tokens_held = list(held), sum(held)
        self.pages_free = sum(one.free for one in pages)
        self.pages_cached = sum(one.cached for one in pages)
        self.pages_shared = sum(one.shared for one in pages)
        now = time.perf_counter() - self.began
        in_use = sum(one.count - one.free for one in pages)
        unused = sum(one.unused for one in pages)
        self.samples.append(
            Sample(now, self.running, self.waiting, in_use, self.pages_cached, unused, self.generated)
        )

    def seconds_for(self, requests: int) -> float:
        """About how long it takes until this number of requests more is finished, by those that were; at least a second."""
        rate = self.finished / (self.host_seconds + self.waited_seconds) if self.finished else 1.0
        return max(requests / rate, 1.0)

    @property
    def imbalance(self) -> float:
        """The tokens of the data shard that holds most, over those of the mean: 1 where all hold the same."""
        return max(self.shard_tokens) * len(self.shard_tokens) / self.tokens_held if self.tokens_held else 1.0

    @property
    def tokens_a_pass(self) -> float:
        """Tokens of a row for each time that the model read it."""
        return 1 + self.stood.sum() / self.passes if self.passes else 1.0

    def as_numbers(self) -> dict[str, Any]:
        """All figures but the samples."""
        numbers = {name: value for name, value in vars(self).items() if name not in ("samples", "began")}
        places = self.drafted > 0
        numbers["imbalance"] = round(self.imbalance, 3)
        return numbers | {"drafted": self.drafted[places].tolist(), "stood": self.stood[places].tolist()}
