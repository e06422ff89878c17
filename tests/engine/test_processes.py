"""The channel between processes, and one engine following another: in one process, over loopback and without JAX's own."""

import contextlib
import json
import os
import signal
import socket
import threading
import time

import jax
import numpy as np
import pytest

from mla_jax.base.errors import BadRequest, ProcessLost, Unsupported
from mla_jax.base.options import Options, SamplingParams
from mla_jax.decode.loop import Programs
from mla_jax.engine import processes as led
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.request import Request
from mla_jax.engine.processes import LedEngine, follow
from mla_jax.hosts import channel, distributed
from mla_jax.hosts.channel import Hello, Link, Peer
from mla_jax.hosts.distributed import Held, Processes


@pytest.fixture(autouse=True)
def no_network():
    """This machine may be reached."""


class Ends(list):
    """The errors with which links ended."""

    def soon(self, seconds: float = 5) -> ProcessLost:
        until = time.monotonic() + seconds
        while not self and time.monotonic() < until:
            time.sleep(0.01)
        (error,) = self
        return error


@pytest.fixture
def linked():
    """`linked(count)` returns the links of `count` processes, and the errors with which each ended."""
    sockets = []

    def links(count: int) -> tuple[list[Link], list[Ends]]:
        ends = [Ends() for _ in range(count)]
        pairs = {i: socket.socketpair() for i in range(1, count)}
        sockets.extend(one for pair in pairs.values() for one in pair)
        first = Link(0, [Peer(Hello(i, f"host{i}"), pair[0], count) for i, pair in pairs.items()], ends[0].append)
        others = [Link(i, [Peer(Hello(0, "host0"), pair[1], count)], ends[i].append) for i, pair in pairs.items()]
        return [first, *others], ends

    yield links
    for one in sockets:
        one.close()


def cut(link: Link) -> None:
    """As the system does when a process is killed."""
    for peer in link.peers:
        peer.socket.shutdown(socket.SHUT_RDWR)


# the link


def test_orders_come_to_all_in_their_order_and_answers_by_process(linked):
    (first, *others), _ = linked(3)
    for order in ("one", {"two": [2.5, None]}, 3):
        first.tell(order)
    assert [[one.orders.get(timeout=5) for _ in range(3)] for one in others] == [["one", {"two": [2.5, None]}, 3]] * 2
    for one in others:
        one.answer(f"I am {one.process}")
    assert first.answers() == {1: "I am 1", 2: "I am 2"}


def test_a_process_that_is_gone_is_named_to_all_that_are_left(linked):
    (_, one, _), ends = linked(3)
    cut(one)
    for left in (0, 2):
        finding, *advice = ends[left].soon().args
        assert finding.startswith("process 1 of 3, on host1, was lost at ")
        assert finding.endswith("it closed its connection without a word")
        assert "start all of them again" in advice[-1]


def test_a_process_that_is_silent_is_lost_and_one_that_beats_is_not(linked, monkeypatch):
    monkeypatch.setattr(channel, "BEAT", 0.05)
    monkeypatch.setattr(channel, "SILENCE", 0.5)
    (_, one, two), ends = linked(3)
    time.sleep(1)
    assert not any(ends)
    for peer in one.peers:
        peer.sending.acquire()  # it hangs: nothing is sent any more
    assert "process 1 of 3, on host1, was lost" in str(ends[0].soon())
    assert "it has not been heard of for" in str(ends[2].soon())
    assert two.over.is_set()


def test_a_process_that_fails_ends_all_with_its_words(linked):
    (_, one, _), ends = linked(3)
    one.fail("process 1 has ended: no such file")
    assert str(ends[0].soon()).startswith("process 1 has ended: no such file\n")
    assert str(ends[2].soon()).startswith("process 1 has ended: no such file\n")
    assert ends[1] == []


def test_where_all_is_done_nobody_is_lost(linked):
    (first, *others), ends = linked(3)
    first.tell("last")
    first.close()
    assert [[one.orders.get(timeout=5) for _ in range(2)] for one in others] == [["last", None]] * 2
    cut(first)
    time.sleep(0.2)
    assert not any(ends)


def test_what_is_no_message_ends_the_run(linked):
    (_, one, _), ends = linked(3)
    one.peers[0].socket.sendall(b"\xff" * 100)
    assert "sent what is no message" in str(ends[0].soon())


def test_a_stranger_who_does_not_know_the_token_is_not_listened_to():
    server, ends, found = channel.listen("127.0.0.1"), Ends(), []
    address = server.getsockname()
    thread = threading.Thread(target=lambda: found.append(channel.accept(server, 2, "right", ends.append)))
    thread.start()
    for said in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0\1\0\0" + b"x" * 70000, channel.LENGTH.pack(4000) + b"[" * 4000):
        with socket.create_connection(address) as stranger, contextlib.suppress(OSError):
            stranger.sendall(said)
    with pytest.raises(Unsupported, match="process 0 does not answer"):
        channel.connect(address, 1, 2, "wrong", ends.append)
    with pytest.raises(Unsupported, match="process 0 does not answer"):
        channel.connect(address, 2, 2, "right", ends.append)  # there is no process 2 of 2
    other = channel.connect(address, 1, 2, "right", ends.append)
    thread.join(10)
    found[0].tell("hello")
    assert other.orders.get(timeout=5) == "hello"
    other.close()
    found[0].close()


def test_processes_that_do_not_come_are_named():
    with pytest.raises(Unsupported) as caught:
        channel.accept(channel.listen("127.0.0.1"), 3, "token", print, patience=0.1)
    assert caught.value.args == ("not all 3 processes have come within 0 seconds", "missing: process 1, 2")


def test_a_held_connection_stays_open_when_its_other_end_is_gone():
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(("127.0.0.1", Held(*server.getsockname()).port))
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


# what all agree on


def in_all(links: list[Link], ask) -> list:
    """The result of `ask` in each of the processes, at the same time; an error counts as a result."""
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


@pytest.mark.parametrize("coordinator", ["", "node", "node:", ":80", "node:port", "node:70000", "node:-1"])
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"processes": 2}, "coordinator is not given"),
        ({"coordinator": "a:1", "process_id": 0}, "processes is not given"),
        ({"coordinator": "a:1", "processes": 2, "process_id": 2}, "process_id is 2"),
        ({"coordinator": "a:1", "processes": 0, "process_id": 0}, "processes is 0"),
    ],
)
def test_half_of_what_several_processes_need_is_refused(given, words):
    with pytest.raises(BadRequest, match=words):
        Options.of(**given)


# one engine behind another


class FakeJob(Job):
    done = False

    def __init__(self, number: int):
        self.id = number


class FakeEngine(Engine):
    """Records its calls."""

    def __init__(self):
        self.asked, self.count, self.while_it_steps = [], 0, lambda: None

    def submit(self, request, *, priority=0, streams=False):
        if len(request.prompt) > 100:
            raise BadRequest("too long")
        self.asked.append(("submit", request, priority, streams))
        self.count += 1
        return FakeJob(self.count)

    def cancel(self, job):
        self.asked.append(("cancel", job.id))
        job.done = True

    def taken_times(self):
        return [(2, 100, 0, 0.1 + 0.2)]

    def step(self, times):
        self.while_it_steps()
        self.asked.append(("step", times))

    def reset(self):
        self.asked.append(("reset",))

    def take_load(self):
        self.asked.append(("take_load",))
        return np.array([3])


PARAMS = SamplingParams(
    temperature=0.7, top_k=3, top_p=0.9, seed=2**63, stop=("a", "\u2603"), stop_token_ids=(4,), logit_bias={5: -1.5}, logprobs=2
)


def test_a_request_is_the_same_at_the_other_end():
    request = Request([1, 2, 3], PARAMS, (1, 7))
    assert led._from_json(json.loads(json.dumps(led._as_json(request)))) == request


@pytest.fixture
def engines(linked):
    """An engine that leads, one that follows it, and what its follower ends with."""
    links, ends = linked(2)
    own, other, found = FakeEngine(), FakeEngine(), []

    def run() -> None:
        try:
            follow(other, object.__new__(Programs), Processes(1, 2, links[1]))
        except Exception as e:
            found.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    leads = LedEngine(own, Processes(0, 2, links[0]))
    leads.end = lambda: (links[0].close(), thread.join(10))
    leads.other, leads.found, leads.ends = other, found, ends
    yield leads
    links[0].close()
    thread.join(10)


def test_the_other_engine_is_asked_the_same_in_the_same_order(engines):
    request = Request([1, 2, 3], PARAMS, (1,))
    job = engines.submit(request, streams=True)
    engines.submit(Request([4], SamplingParams(), ()), priority=3)
    engines.step()
    with pytest.raises(BadRequest):
        engines.submit(Request([1] * 200, SamplingParams(), ()))
    assert engines.take_load().tolist() == [3]
    engines.cancel(job)
    engines.cancel(job)  # which is done
    engines.reset()
    engines.end()
    assert engines.other.asked == engines._engine.asked
    assert [one[0] for one in engines.other.asked] == ["submit", "submit", "step", "take_load", "cancel", "reset"]
    assert engines.found == []


def test_what_is_cancelled_in_the_middle_of_a_step_is_cancelled_behind_it(engines):
    job = engines.submit(Request([1], PARAMS, ()))
    engines._engine.while_it_steps = lambda: engines.cancel(job)
    engines.step()
    engines.end()
    assert [one[0] for one in engines._engine.asked] == ["submit", "step", "cancel"]
    assert engines.other.asked == engines._engine.asked


def test_ctrl_c_in_a_step_counts_behind_it(engines):
    engines._engine.while_it_steps = lambda: os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engines.step()
    engines.end()
    assert [one[0] for one in engines._engine.asked] == ["step"]
    assert engines.other.asked == engines._engine.asked
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_engine_that_breaks_ends_all_with_its_words(engines):
    def breaks() -> None:
        raise RuntimeError("no such page")

    engines.other.while_it_steps = breaks
    engines.step()
    assert "has ended: RuntimeError: no such page" in str(engines.ends[0].soon())
    assert str(engines.found[0]) == "no such page"


def test_an_engine_that_has_failed_is_not_asked_again(engines):
    def breaks() -> None:
        raise RuntimeError("no such page")

    engines._engine.while_it_steps = breaks
    with pytest.raises(RuntimeError, match="no such page"):
        engines.step()
    assert "process 0 of 2, on " in str(engines.ends[1].soon())
    with pytest.raises(ProcessLost, match="this process has failed"):
        engines.step()


def test_the_engine_that_leads_has_all_that_an_engine_has(engines):
    engines.submit(Request([1], PARAMS, ()))
    assert engines.count == 1
