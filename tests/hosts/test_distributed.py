"""Facts and numbers that processes share over their links, and how they start; in one process, without JAX's own service."""

import os
import socket
import threading

import jax
import pytest

from mla_jax.base.errors import BadRequest, ProcessLost
from mla_jax.hosts import distributed
from mla_jax.hosts.channel import Link
from mla_jax.hosts.distributed import Processes, proxy


def in_all(links: list[Link], ask) -> list:
    """The results of `ask` in each of the processes, at the same time; an error is a result, too."""
    found: list = [None] * len(links)

    def run(i: int) -> None:
        try:
            found[i] = ask(Processes(i, len(links), links[i]))
        except Exception as e:
            found[i] = e

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return found


def test_all_have_the_least_number_and_the_value_of_process_0(linked):
    links, _ = linked(3)
    assert in_all(links, lambda own: own.least(10 - own.process)) == [8, 8, 8]
    assert in_all(links, lambda own: own.same([own.process, 0.1])) == [[0, 0.1]] * 3


def test_a_process_with_other_facts_is_named_to_all(linked):
    links, _ = linked(3)
    assert in_all(links, lambda own: own.agree({"batch": "1", "jax": "0.10"})) == [None] * 3
    for error in in_all(links, lambda own: own.agree({"batch": str(own.process // 2), "jax": "0.10"})):
        assert isinstance(error, BadRequest)
        assert error.args[1] == "process 2: batch is 1 there, 0 in process 0"


def test_a_fact_that_a_process_lacks_is_named(linked):
    links, _ = linked(2)
    for error in in_all(links, lambda own: own.agree({"a": "1", "b": "2"} if own.leads else {"c": "3"})):
        *_, words, _ = error.args
        assert words == (
            "process 1: a is not known there, 1 in process 0; b is not known there, 2 in process 0; "
            "c is 3 there, not known in process 0"
        )


def test_a_connection_of_the_proxy_stays_open_when_its_other_end_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(("127.0.0.1", proxy(*server.getsockname())))
        near.sendall(b"ping")
        far, _ = server.accept()
    assert far.recv(4) == b"ping"
    far.sendall(b"pong")
    assert near.recv(4) == b"pong"
    far.close()
    near.settimeout(0.3)
    for _ in range(3):
        near.sendall(b"more")
        with pytest.raises(TimeoutError):
            near.recv(1)
    near.close()


@pytest.mark.parametrize("words", ["no such file", "no such file: caf\udce9", "\ud800"])
def test_a_lost_process_ends_this_one_with_one_line_whatever_the_words(monkeypatch, words):
    said, codes = [], []
    monkeypatch.setattr(os, "write", lambda _, data: said.append(data))
    monkeypatch.setattr(os, "_exit", codes.append)
    distributed._say_and_exit(ProcessLost(words))
    assert codes == [5]
    assert said == [f"error: {words}\n".encode(errors="backslashreplace")]


BAD_PORTS = ["node", "node:", "node:port", "node:70000", "node:-1", "node:" + "1" * 5000]
BAD_HOSTS = ["", ":80", "[]:80", "a..b:80", "a" * 64 + ":80", "a\0:80", "a\n:80", "\ud800:80", "a b:80"]


@pytest.mark.parametrize("coordinator", [*BAD_PORTS, *BAD_HOSTS])
def test_a_coordinator_without_host_or_port_is_refused(coordinator):
    with pytest.raises(BadRequest, match="coordinator is"):
        distributed._address(coordinator)


def test_a_coordinator_may_be_an_address_of_ipv6():
    assert distributed._address("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize("asked", [None, "1"])
def test_nccl_takes_memory_with_which_processes_connect_unless_the_user_says_otherwise(monkeypatch, asked):
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if asked:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", asked)
    seen = []
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **__: seen.append(os.environ["NCCL_CUMEM_ENABLE"]))
    distributed._initialize("127.0.0.1", 1, 2, 0)
    assert seen == [asked or "0"]
