"""Figures for Prometheus, by vLLM's names where the meaning is equal."""

import time
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mla_jax.engine.core.request import Chunk
from mla_jax.engine.core.stats import EngineStats
from mla_jax.engine.llm import LLM
from mla_jax.engine.reader import Reader

LABELS = ("model_name",)
WAIT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
TOKEN_BUCKETS = tuple(4**n for n in range(11))


class Metrics:
    """Times that clients wait, and the counters of the engine as they are when they are read."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()
        self._model = model
        self._last: dict[Reader, float] = {}  # when a reader's newest tokens came
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "Until the first token", WAIT_BUCKETS
        )
        self._gap = self._histogram(
            "inter_token_latency_seconds", "Between tokens, as they come", GAP_BUCKETS
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Until an answer is done", WAIT_BUCKETS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt", TOKEN_BUCKETS)
        self._generated = self._histogram("request_generation_tokens", "Tokens of an answer", TOKEN_BUCKETS)
        names = (*LABELS, "finished_reason")
        self._finished = Counter(
            "vllm:request_success", "Answers, by how they ended", names, registry=self.registry
        )

    def _histogram(self, name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
        found = Histogram(f"vllm:{name}", about, LABELS, buckets=buckets, registry=self.registry)
        return found.labels(self._model)

    def watch(self, llm: LLM) -> None:
        """Adds the figures of an engine."""
        self.registry.register(_OfEngine(llm, self._model))

    def note(self, reader: Reader, chunk: Chunk) -> None:
        """A piece of an answer has come."""
        now, submitted = time.perf_counter(), reader.job.times.submitted
        if chunk.token_ids:
            self._note_tokens(reader, now, len(chunk.token_ids), submitted)
        if chunk.finish_reason is not None:
            self._whole.observe(now - submitted)
            self._prompt.observe(len(reader.job.request.prompt))
            self._generated.observe(len(reader.ids))
            self._finished.labels(self._model, chunk.finish_reason.value).inc()

    def forget(self, readers: Iterable[Reader]) -> None:
        """Nobody reads them any more."""
        for reader in readers:
            self._last.pop(reader, None)

    def _note_tokens(self, reader: Reader, now: float, tokens: int, submitted: float) -> None:
        last = self._last.get(reader)
        if last is None:
            self._first_token.observe(now - submitted)
        else:
            self._gap.observe((now - last) / tokens)
        self._last[reader] = now

    def text(self) -> bytes:
        """All figures in Prometheus's format."""
        return generate_latest(self.registry)


class _OfEngine(Collector):
    """The engine's counters."""

    def __init__(self, llm: LLM, model: str):
        self._llm, self._model = llm, model

    def collect(self) -> Iterator[Metric]:
        stats = self._llm.stats()
        for name, about, value in _gauges(stats):
            gauge = GaugeMetricFamily(name, about, labels=LABELS)
            gauge.add_metric([self._model], value)
            yield gauge
        for name, about, value in _counters(stats):
            counter = CounterMetricFamily(name, about, labels=LABELS)
            counter.add_metric([self._model], value)
            yield counter


def _gauges(stats: EngineStats) -> list[tuple[str, str, float]]:
    used = 1 - stats.pages_free / stats.pages if stats.pages else 0.0
    return [
        ("vllm:num_requests_running", "Requests that run", stats.running),
        ("vllm:num_requests_waiting", "Requests that wait for a row", stats.waiting),
        ("vllm:kv_cache_usage_perc", "Share of the cache that requests hold, 0 to 1", used),
        ("mla_jax:rows", "Requests that may run at a time", stats.rows),
        ("mla_jax:cache_pages", "Pages of the cache", stats.pages),
        ("mla_jax:programs", "Programs that were compiled", stats.compiled),
    ]


def _counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    return [
        ("vllm:prompt_tokens", "Tokens of prompts, cached ones included", stats.read + stats.hits),
        ("vllm:generation_tokens", "Tokens that were generated", stats.generated),
        ("vllm:num_preemptions", "Requests that gave up their pages for others", stats.preemptions),
        ("vllm:prefix_cache_queries", "Tokens of prompts that were looked up", stats.read + stats.hits),
        ("vllm:prefix_cache_hits", "Tokens of prompts that were found in the cache", stats.hits),
        ("vllm:spec_decode_num_draft_tokens", "Tokens that were drafted", float(stats.drafted.sum())),
        ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that stood", float(stats.stood.sum())),
        ("mla_jax:dispatches", "Programs that were sent to the device", stats.dispatches),
        ("mla_jax:host_seconds", "Seconds of the engine between dispatches", stats.host_seconds),
    ]
