"""Loads a model, and serves it until a signal ends that."""

import contextlib
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI

from mla_jax.base.errors import BadRequest, Unsupported, printable
from mla_jax.base.options import Options, SamplingParams
from mla_jax.engine.llm import LLM
from mla_jax.engine.opening.opened import Opened, open_model
from mla_jax.serve import log
from mla_jax.serve.app import ServedModel, make_app
from mla_jax.serve.gate import read_keys
from mla_jax.serve.options import MAX_WAITING, ServeOptions

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

BACKLOG = 2048  # connections that wait to be taken
# A thread that waits for Python's lock gets it after these. By default, 5 ms, a busy event loop holds up each step of the engine
SWITCH_SECONDS = 5e-4
KEEP_ALIVE = 75  # seconds of a connection between two requests: longer than proxies keep theirs


class Server(uvicorn.Server):
    """uvicorn's server, with the model that is loaded concurrently. `error` is what ended it, if anything did."""

    def __init__(self, config: uvicorn.Config, served: ServedModel, opened: Opened, listening: socket.socket):
        super().__init__(config)
        self.served, self.opened, self.listening = served, opened, listening
        self.llm: LLM | None = None
        self.error: BaseException | None = None
        self.loading = threading.Thread(target=self.load, name="mla_jax load", daemon=True)

    @property
    def url(self) -> str:
        host, port = self.listening.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until a signal, or an error of loading, ends that."""
        sys.setswitchinterval(SWITCH_SECONDS)
        super().run(sockets or [self.listening])

    def load(self) -> None:
        """Loads the model and compiles what a first request needs. An error ends the server."""
        try:
            self.llm = LLM(self.opened)
            self.served.take(self.llm)
            if self.served.options.warm_up:
                self.llm.warm_up(grammars=True)
            else:
                self.llm.generate([[0]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
            self.served.is_ready = True
            log.info("ready: %s", self.llm)
        except BaseException as error:  # raised on the main thread
            self.error = error
            self.should_exit = True

    def handle_exit(self, sig: int, frame) -> None:
        """At the first signal no more requests are taken, and those that run go on for a while. A second one ends them, too."""
        self.served.is_ready = False
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.started:
            log.info("listening on %s", self.url)
            self.loading.start()


def serve(options: ServeOptions, model: Options) -> int:
    """The exit code. Raises for bad options or files before anything is loaded."""
    with _logged():
        server = make_server(options, model)
        server.run()
        return _ended(server)


def make_server(options: ServeOptions, model: Options) -> Server:
    """A server whose model is opened, and loaded once it runs. Raises for bad options or files."""
    keys = [] if options.api_key_file is None else read_keys(Path(options.api_key_file))
    tracer = None if options.otlp_traces_endpoint is None else _tracer(options.otlp_traces_endpoint)
    if model.processes.several:
        raise Unsupported("a server of several processes cannot be had", "take one process")
    if model.memory.max_waiting is None:
        model = model.replace(max_waiting=MAX_WAITING)
    opened = open_model(model)
    opened.plan.refuse()
    listening = _listen(options.host, options.port)
    names = list(options.model_name) or [opened.name]
    served = ServedModel(names, options)
    return Server(_config(options, make_app(served, keys, tracer)), served, opened, listening)


def _tracer(endpoint: str) -> "Tracer":
    """Raises Unsupported without the packages of OpenTelemetry."""
    try:
        from mla_jax.serve.tracing import sending_tracer
    except ImportError as error:
        hint = 'install the extra "telemetry", as in: pip install -e ".[serve,telemetry]"'
        missing = f"--otlp-traces-endpoint needs the package {error.name}, which is not installed"
        raise Unsupported(missing, hint) from error
    return sending_tracer(endpoint)


def _listen(host: str, port: int) -> socket.socket:
    """The socket, before weights are read; raises BadRequest if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as e:
        hint = "is the port in use? give another with --port"
        raise BadRequest(f"the server cannot listen on {host}:{port}", printable(str(e)), hint) from e


def _config(options: ServeOptions, app: FastAPI) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(options.drain_seconds),
        server_header=False,
    )


def _ended(server: Server) -> int:
    if server.error is not None:
        raise server.error
    if server.loading.is_alive():  # the compiler cannot be interrupted, and Python must not end meanwhile
        os._exit(0)
    if server.llm is not None:
        server.llm.close()
    return 0


@contextlib.contextmanager
def _logged() -> Iterator[None]:
    """A line per request on stderr, with the time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.propagate = True
