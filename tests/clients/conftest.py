"""Servers for clients that are packages of their own. Where one of these is missing, nothing here is collected."""

import importlib.util
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import chat_templates
import jaxtyping
import pytest
from scripted import KIMI, write_scripted
from servers import Running, started

from mla_jax.weights.hub import DEMO

CLIENTS = ("langchain_openai", "litellm", "schemathesis")
INSTALLED = all(importlib.util.find_spec(name) for name in CLIENTS)
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
# litellm looks for prices and LangSmith for its server, where nothing forbids it
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}

HERE = ("127.0.0.1", "::1", "localhost")
CONNECT = socket.socket.connect
FORMATS = {"kimi": chat_templates.KIMI, "glm": chat_templates.GLM}  # calls as JSON, and in tags


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """No network but this machine's own."""

    def connect(own: socket.socket, address):
        if own.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in HERE:
            raise OSError("tests must not reach the network")
        return CONNECT(own, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture(scope="session", autouse=True)
def untyped() -> Iterator[None]:
    """JSON has ids of tokens as texts, and clients send any value: the server tells them, not the types of tests."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session", params=FORMATS)
def demo(request, tmp_path_factory) -> Iterator[Running]:
    """The demo model with a template that has tools. Their tags are plain text to it; a grammar lets it write them."""
    folder = shutil.copytree(DEMO, tmp_path_factory.mktemp("demo") / "folder")
    settings = json.loads((DEMO / "tokenizer_config.json").read_text())
    settings["chat_template"] = FORMATS[request.param]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    few = {"context": 1024, "max_rows": 4, "draft": "off"}  # so that there are few programs to compile
    yield from started(folder, model_name="demo", chat_template_kwargs='{"thinking": false}', **few)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory) -> Iterator[Running]:
    """A tiny model that answers at once, with a grammar's form, tools and reasoning."""
    folder = write_scripted(tmp_path_factory.mktemp("scripted"), KIMI)
    yield from started(folder, model_name="m", context=128, max_rows=8, warm_up=True)
