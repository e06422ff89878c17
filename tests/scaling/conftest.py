"""No network but this machine's own; a tiny random model."""

import socket
from pathlib import Path

import pytest
from models import FAMILIES, tensors, write
from pairs import pairs_tokenizer

HERE = ("127.0.0.1", "::1", "localhost")
CONNECT = socket.socket.connect


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def connect(own: socket.socket, address):
        if own.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in HERE:
            raise OSError("tests must not reach the network")
        return CONNECT(own, address)

    monkeypatch.setattr(socket.socket, "connect", connect)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The model's folder."""
    hf = {**FAMILIES["v3"], "num_hidden_layers": 1, "first_k_dense_replace": 0, "max_position_embeddings": 1024}
    path = write(tmp_path_factory.mktemp("model"), hf, tensors(hf))
    pairs_tokenizer().save(str(path / "tokenizer.json"))
    return path
