"""Spans of requests, as a collector on this machine gets them by OTLP."""

import http.server
import queue
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from servers import Running, started, until
from starlette.testclient import TestClient

from mla_jax.serve.__main__ import main
from mla_jax.serve.app import ServedModel, make_app
from mla_jax.serve.options import ServeOptions

pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

pytestmark = [pytest.mark.once, pytest.mark.xdist_group("serve")]

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ASKED = {"model": "tiny", "prompt": "a1b2", "temperature": 0, "max_tokens": 5, "ignore_eos": True}
SAID = {"model": "tiny", "messages": [{"role": "user", "content": "a1b2c3"}], "temperature": 0, "max_tokens": 5}
SERVER, IS_ERROR = 2, 2  # the kind of a span, and its state, as OTLP numbers them


class Collector(http.server.ThreadingHTTPServer):
    """Takes spans. `bodies` are what was sent."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Collecting)
        self.spans: queue.Queue[Any] = queue.Queue()
        self.services: set[str] = set()
        self.bodies: list[bytes] = []

    def next(self) -> Any:
        """The next span, with its attributes as a dict."""
        span = self.spans.get(timeout=60)
        found = {one.key: plain(one.value) for one in span.attributes}
        return SimpleNamespace(span=span, named=found)


class Collecting(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.bodies.append(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.services |= {one.value.string_value for one in resource.resource.attributes if one.key == "service.name"}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.server.spans.put(span)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_) -> None:
        """Nothing is written."""


def plain(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [plain(one) for one in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def traced(chat_folder, collector) -> Iterator[Running]:
    address = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")  # milliseconds
        yield from started(chat_folder, model_name="tiny", otlp_traces_endpoint=address)


@pytest.mark.deep
def test_a_request_is_a_span_with_its_settings_tokens_and_times(traced, collector):
    answer = traced.post("/v1/completions", {**ASKED, "n": 2, "temperature": 0.5, "top_p": 0.9}).json()
    found = collector.next()
    assert (found.span.name, found.span.kind) == ("llm_request", SERVER)
    assert not found.span.parent_span_id
    assert collector.services == {"mla-jax"}
    times = {name: found.named.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_to_first_token", "e2e")}
    assert 0 < times["time_in_queue"] <= times["time_to_first_token"] <= times["e2e"]
    assert times["e2e"] <= (found.span.end_time_unix_nano - found.span.start_time_unix_nano) / 1e9 + 0.001
    assert found.named == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.id": answer["id"],
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.prompt_tokens": answer["usage"]["prompt_tokens"],
        "gen_ai.usage.completion_tokens": 10,
        "gen_ai.usage.num_sequences": 2,
        "http.response.status_code": 200,
    }


def test_a_stream_is_a_span_below_the_one_that_its_headers_name(traced, collector):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    traced.post("/v1/chat/completions", {**SAID, "stream": True}, headers=headers)
    found = collector.next()
    assert (found.span.trace_id.hex(), found.span.parent_span_id.hex()) == (TRACE, PARENT)
    assert found.named["gen_ai.operation.name"] == "chat"
    assert found.named["gen_ai.usage.completion_tokens"] >= 1


def test_a_request_that_its_parent_does_not_want_traced_has_no_span(traced, collector):
    traced.post("/v1/completions", ASKED, headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
    answer = traced.post("/v1/completions", ASKED).json()
    assert collector.next().named["gen_ai.request.id"] == answer["id"]


@pytest.mark.deep
def test_a_refused_request_has_its_status_and_no_tokens(traced, collector):
    assert traced.post("/v1/completions", {**ASKED, "max_tokens": "many"}).status_code == 400
    found = collector.next()
    assert found.named == {"gen_ai.operation.name": "text_completion", "http.response.status_code": 400}
    assert found.span.status.code != IS_ERROR


def test_a_client_that_goes_away_leaves_a_span_of_what_it_got(traced, collector):
    body = {**ASKED, "max_tokens": 480, "stream": True}
    for _ in range(5):  # on a busy machine an answer may be whole before its client is gone
        with httpx.stream("POST", f"{traced.url}/v1/completions", json=body, timeout=60) as stream:
            next(stream.iter_lines())
        found = collector.next()
        if found.named["gen_ai.response.finish_reasons"] == ["cancelled"]:
            break
    assert found.named["gen_ai.response.finish_reasons"] == ["cancelled"]
    assert 1 <= found.named["gen_ai.usage.completion_tokens"] < 480


def test_texts_are_in_no_span(traced, collector):
    secret = "d1e2c3b4a5i6"
    collector.bodies.clear()
    answer = traced.post("/v1/chat/completions", {**SAID, "messages": [{"role": "user", "content": secret}]}).json()
    collector.next()
    (text,) = [choice["message"]["content"] for choice in answer["choices"]]
    sent = b"".join(collector.bodies)
    assert answer["id"].encode() in sent
    assert secret.encode() not in sent
    assert len(text) >= 4
    assert text.encode() not in sent


def test_a_failure_is_marked_and_who_has_no_key_leaves_no_span():
    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    app = make_app(ServedModel(["m"], ServeOptions()), [b"k"], provider.get_tracer("test"))
    client = TestClient(app)
    assert client.post("/v1/completions", json=ASKED).status_code == 401
    assert client.get("/health").status_code == 503
    assert client.post("/v1/completions", json=ASKED, headers={"Authorization": "Bearer k"}).status_code == 503
    until(kept.get_finished_spans)
    (span,) = kept.get_finished_spans()
    assert span.attributes["http.response.status_code"] == 503
    assert not span.status.is_ok


def test_packages_that_are_missing_are_named_with_the_extra(monkeypatch, capfd):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.delitem(sys.modules, "mla_jax.serve.tracing", raising=False)
    assert main(["--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"]) == 3
    error = capfd.readouterr().err
    assert "--otlp-traces-endpoint needs the package opentelemetry.sdk.trace, which is not installed" in error
    assert "telemetry" in error.splitlines()[1]


@pytest.mark.parametrize("address", ["127.0.0.1:4318", "grpc://collector:4317", "http://", "http://[::1"])
def test_an_address_that_is_none_of_http_is_refused(address, capfd):
    assert main(["--otlp-traces-endpoint", address]) == 2
    assert "otlp_traces_endpoint is" in capfd.readouterr().err
