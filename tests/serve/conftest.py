"""A server of a tiny random model, with a tokenizer and a chat template."""

import json
from collections.abc import Iterator

import pytest
from loopback import no_network  # noqa: F401
from models import FAMILIES, tensors, write
from pairs import pairs_tokenizer
from scripted import DEEPSEEK, GLM, KIMI, write_scripted
from servers import Running, started

from mla_jax.serve.answering import Answering
from mla_jax.serve.asked import read_chat

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 1, "first_k_dense_replace": 0, "max_position_embeddings": 512}
    path = write(tmp_path_factory.mktemp("served"), hf, tensors(hf))
    pairs_tokenizer().save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "add_bos_token": True, "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.fixture(scope="session")
def running(chat_folder) -> Iterator[Running]:
    yield from started(chat_folder, model_name=("tiny", "alias"), max_body=0.25)


@pytest.fixture(scope="session")
def deepseek(tmp_path_factory) -> Iterator[Running]:
    yield from started(write_scripted(tmp_path_factory.mktemp("deepseek"), DEEPSEEK), model_name="m")


@pytest.fixture(scope="session")
def kimi(tmp_path_factory) -> Iterator[Running]:
    yield from started(write_scripted(tmp_path_factory.mktemp("kimi"), KIMI), model_name="m")


@pytest.fixture(scope="session")
def glm(tmp_path_factory) -> Iterator[Running]:
    yield from started(write_scripted(tmp_path_factory.mktemp("glm"), GLM), model_name="m")


@pytest.fixture
def read(monkeypatch) -> list[dict]:
    """The chats that requests of other interfaces have become."""
    chats = []

    def noting(body, *given, **more):
        chats.append(body.given())
        return read_chat(body, *given, **more)

    for module in ("messages", "responses"):
        monkeypatch.setattr(f"mla_jax.serve.{module}.read_chat", noting)
    return chats


@pytest.fixture(params=["as they come", "late"])
def pace(request, monkeypatch) -> str:
    """Answers are read as their tokens come, or once all of them are there, in one piece."""
    begin = Answering.begin

    async def begin_late(self: Answering) -> None:
        await begin(self)
        while not all(reader.job.done for reader in self.readers):
            await self._news.get()
        for reader in self.readers:
            self._news.put_nowait(reader)

    if request.param == "late":
        monkeypatch.setattr(Answering, "begin", begin_late)
    return request.param
