"""Servers on free ports of this machine, for tests."""

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from openai import OpenAI

from mla_jax import LLM, Options
from mla_jax.serve.options import ServeOptions
from mla_jax.serve.server import Server, make_server


@dataclass
class Running:
    server: Server
    url: str

    @property
    def llm(self) -> LLM:
        assert self.server.llm is not None
        return self.server.llm

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: object = None, **more) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **more)

    def get(self, path: str, **more) -> httpx.Response:
        return httpx.get(self.url + path, timeout=120, **more)


def started(folder, **settings) -> Iterator[Running]:
    """A server that is ready, until it is no longer wanted."""
    own = {name: settings.pop(name) for name in list(settings) if name in ServeOptions.__dataclass_fields__}
    server = make_server(ServeOptions(port=0, **own), Options.of(model=folder, **settings))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.served.is_ready or not thread.is_alive())
        yield Running(server, server.url)
    finally:
        server.should_exit = True
        thread.join()
        if server.llm is not None:
            server.llm.close()


def until(condition, seconds: float = 120) -> None:
    """Waits for a condition that must come true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.01)
