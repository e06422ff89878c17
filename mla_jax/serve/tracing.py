"""A span of OpenTelemetry for each request, by vLLM's names. It has figures and settings, never a text or a token.

The packages of the extra "telemetry" are imported here, so nobody imports this module unless spans are wanted."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mla_jax.engine.core.request import FinishReason
from mla_jax.serve.answering import FINISHES, Answering

OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}  # by route
SPAN = "llm_request"
LEAST_SLEEP, SHARE_ASLEEP = 0.002, 0.05  # seconds between two looks at the queue, and their share of the wait
Attributes = dict[str, Any]


def sending_tracer(endpoint: str) -> Tracer:
    """Its spans go to a collector, by OTLP over HTTP; the last ones as Python ends.

    The environment's variables OTEL_* name the service, and say what is sampled and how it is sent."""
    named = {SERVICE_NAME: "mla-jax", **OTELResourceDetector().detect().attributes}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider.get_tracer("mla_jax.serve")


class Traced:
    """Makes a span of each request for an answer, until the last byte is sent, below the span that its headers name."""

    def __init__(self, app: ASGIApp, tracer: Tracer):
        self.app, self.tracer = app, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope.get("path", ""))
        if scope["type"] != "http" or operation is None:
            await self.app(scope, receive, send)
            return
        parent = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)))
        span = self.tracer.start_span(SPAN, parent, SpanKind.SERVER)
        began, status, state = time.perf_counter(), 500, scope.setdefault("state", {})

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        starting = asyncio.ensure_future(_start_of(state))
        try:
            await self.app(scope, receive, noting)
        finally:
            starting.cancel()
            answering, start = state.get("answering"), starting.result() if starting.done() else None
            span.set_attribute("gen_ai.operation.name", operation)
            span.set_attribute("http.response.status_code", status)
            span.set_attributes({} if answering is None else _attributes(answering, began, start))
            if status >= 500 or _has_failed(answering):
                span.set_status(StatusCode.ERROR)
            span.end()


async def _start_of(state: Mapping[str, Any]) -> float:
    """The time when the first job of a request got a row. The engine does not tell, so it is looked for now and then."""
    began = time.perf_counter()
    while not any(reader.job.starts for reader in _readers(state.get("answering"))):
        await asyncio.sleep(max(LEAST_SLEEP, SHARE_ASLEEP * (time.perf_counter() - began)))
    return time.perf_counter()


def _readers(answering: Answering | None):
    return [] if answering is None else answering.readers


def _has_failed(answering: Answering | None) -> bool:
    return any(reader.reason is FinishReason.ERROR for reader in _readers(answering))


def _attributes(answering: Answering, began: float, start: float | None) -> Attributes:
    """All that is known of a request that began at a time, and whose first job got a row at `start`."""
    asked, usage = answering.asked, answering.usage()
    params = asked.requests[0].params
    found = {
        "gen_ai.request.id": answering.id,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": asked.n,
        "gen_ai.response.model": asked.model,
        "gen_ai.response.finish_reasons": [_finish(reader.reason) for reader in answering.readers],
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "gen_ai.usage.num_sequences": len(asked.requests),
        "gen_ai.latency.e2e": time.perf_counter() - began,
        **_latencies(answering, began, start),
    }
    return {name: value for name, value in found.items() if value is not None}


def _latencies(answering: Answering, began: float, start: float | None) -> Attributes:
    """Seconds in the queue, and until the first token of any of its answers, as far as it came to that."""
    times = [reader.job.times for reader in answering.readers]
    firsts = [one.first for one in times if one.first is not None]
    known = [one for one in (start, *firsts) if one is not None]
    found = {}
    if known:
        found["gen_ai.latency.time_in_queue"] = min(known) - min(one.submitted for one in times)
    if firsts:
        found["gen_ai.latency.time_to_first_token"] = min(firsts) - began
    return found


def _finish(reason: FinishReason | None) -> str:
    """OpenAI's word for it; an answer without an end was cancelled."""
    reason = reason or FinishReason.CANCELLED
    return FINISHES.get(reason, reason.value)
