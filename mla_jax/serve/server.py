"""Loads a model, and serves it until a signal ends that."""

import logging
import sys
import threading
from pathlib import Path

import uvicorn

from mla_jax.base.errors import BadRequest, MlaJaxError, Unsupported
from mla_jax.base.options import Options, SamplingParams
from mla_jax.engine.llm import LLM
from mla_jax.engine.opening.opened import Opened, open_model
from mla_jax.serve.app import Served, make_app
from mla_jax.serve.gate import read_keys
from mla_jax.serve.options import MAX_WAITING, ServeOptions

KEEP_ALIVE = 75  # seconds of a connection between two requests: longer than proxies keep theirs
log = logging.getLogger("mla_jax.serve")


class Server(uvicorn.Server):
    """uvicorn's server, with the model that is loaded beside it. `error` is what ended it, if anything did."""

    def __init__(self, config: uvicorn.Config, served: Served, opened: Opened):
        super().__init__(config)
        self.served, self.opened = served, opened
        self.llm: LLM | None = None
        self.error: MlaJaxError | None = None

    def load(self) -> None:
        """Loads the model and compiles what a first request needs. An error ends the server."""
        try:
            self.llm = LLM(self.opened)
            self.served.take(self.llm)
            if self.served.options.warm_up:
                self.llm.warm_up()
            else:
                self.llm.generate([[0]], SamplingParams(max_tokens=2, temperature=0, ignore_eos=True))
            self.served.is_ready = True
            log.info("ready: %s", self.llm)
        except MlaJaxError as error:
            self.error = error
            self.should_exit = True

    def handle_exit(self, sig: int, frame) -> None:
        """At the first signal no more requests are taken, and those that run go on for a while."""
        self.served.is_ready = False
        super().handle_exit(sig, frame)

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        if self.started:
            address = self.servers[0].sockets[0].getsockname()
            log.info("listening on http://%s:%d", *address[:2])
            threading.Thread(target=self.load, name="mla_jax load", daemon=True).start()


def serve(options: ServeOptions, model: Options) -> int:
    """The exit code. Raises for bad options or files before anything is loaded."""
    _log_to_stderr()
    server = make_server(options, model)
    server.run()
    return _ended(server)


def make_server(options: ServeOptions, model: Options) -> Server:
    """A server whose model is opened, and loaded once it runs. Raises for bad options or files."""
    keys = [] if options.api_key_file is None else read_keys(Path(options.api_key_file))
    if model.processes.several:
        raise Unsupported("a server of several processes cannot be had", "take one process")
    if model.memory.max_waiting is None:
        model = model.replace(max_waiting=MAX_WAITING)
    opened = open_model(model)
    opened.plan.refuse()
    names = list(options.served_model_name) or [opened.name]
    served = Served(names, options)
    return Server(_config(options, served, keys), served, opened)


def _config(options: ServeOptions, served: Served, keys: list[bytes]) -> uvicorn.Config:
    return uvicorn.Config(
        make_app(served, keys),
        host=options.host,
        port=options.port,
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
    if not server.started:
        raise BadRequest(
            f"the server cannot listen on {server.config.host}:{server.config.port}",
            "is the port in use? give another with --port",
        )
    if server.llm is not None:
        server.llm.close()
    return 0


def _log_to_stderr() -> None:
    """A line per request, with the time."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
