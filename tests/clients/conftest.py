"""Servers for clients that are packages of their own. Where one of these is missing, nothing here is collected."""

import importlib.util
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import chat_templates
import jaxtyping
import pytest
from loopback import no_network  # noqa: F401
from scripted import KIMI, write_scripted
from servers import Running, started

from mla_jax.text import chat
from mla_jax.weights.hub import DEMO

CLIENTS = ("langchain_openai", "litellm", "schemathesis")
INSTALLED = all(importlib.util.find_spec(name) for name in CLIENTS)
collect_ignore_glob = [] if INSTALLED else ["test_*.py"]
# litellm looks for prices and LangSmith for its server, where nothing forbids it
os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clients)


@pytest.fixture(scope="session", autouse=True)
def as_served() -> Iterator[None]:
    """Types of tests refuse ids of tokens as texts, which JSON has. A template may take long on cores that others use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        patch.setattr(chat, "WALL_SECONDS", 200)
        yield


@pytest.fixture(scope="session")
def demo(tmp_path_factory) -> Iterator[Running]:
    """The demo model with a template that has tools, whose arguments are JSON.

    Tags of calls are plain text to it; a grammar lets it write them."""
    yield from with_template(tmp_path_factory.mktemp("demo"), chat_templates.KIMI)


@pytest.fixture(scope="session")
def demo_tags(tmp_path_factory) -> Iterator[Running]:
    """The same with arguments in tags."""
    yield from with_template(tmp_path_factory.mktemp("demo_tags"), chat_templates.GLM)


def with_template(folder: Path, template: str) -> Iterator[Running]:
    shutil.copytree(DEMO, folder, dirs_exist_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    few = {"context": 1024, "max_rows": 4, "draft": "off"}  # so that there are few programs to compile
    yield from started(folder, model_name="demo", chat_template_kwargs='{"thinking": false}', **few)


@pytest.fixture(scope="session")
def scripted(tmp_path_factory) -> Iterator[Running]:
    """A tiny model that answers at once, with a grammar's form, tools and reasoning."""
    folder = write_scripted(tmp_path_factory.mktemp("scripted"), KIMI)
    yield from started(folder, model_name="m", context=128, max_rows=8, warm_up=True)
