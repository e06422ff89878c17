"""A network of this machine alone, for tests of servers: `no_network` takes the place of the one that refuses everything."""

import socket

import pytest

HERE = ("127.0.0.1", "::1", "localhost")
CONNECT = socket.socket.connect


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def connect(own: socket.socket, address):
        if own.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in HERE:
            raise OSError("tests must not reach the network")
        return CONNECT(own, address)

    monkeypatch.setattr(socket.socket, "connect", connect)
