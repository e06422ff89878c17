"""The control channel: messages between processes, and who is let in; in one process, over loopback."""

import contextlib
import json
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import pytest
from linked import Ends, cut

from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.hosts import channel
from mla_jax.hosts.channel import Peer


def framed(data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + data


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


STOPPED = """
import sys, threading
from multiprocessing.connection import Connection
from mla_jax.hosts import channel
channel.SILENCE, done = 1.0, threading.Event()
lost = lambda error: (print(error, flush=True), done.set())
link = channel.Link(1, [channel.Peer(0, "host0", 2, Connection(int(sys.argv[1])))], lost)
print("up", flush=True)
done.wait(20)
"""


def test_a_process_that_was_stopped_gives_the_others_time_to_be_heard():
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-c", STOPPED, str(theirs.fileno())]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, pass_fds=[theirs.fileno()])
    beat = framed(b"{}")
    with child, ours, theirs:
        assert child.stdout.readline() == "up\n"
        ours.sendall(beat)
        child.send_signal(signal.SIGSTOP)
        time.sleep(2)
        child.send_signal(signal.SIGCONT)
        for _ in range(3):
            time.sleep(0.5)
            ours.sendall(beat)
        assert select.select([child.stdout], [], [], 0)[0] == []
        assert "it has not been heard of for 1 seconds" in child.stdout.readline()
        child.kill()


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


TOO_LONG = (channel.LONGEST + 1).to_bytes(4, "big")


@pytest.mark.parametrize("sent", [b"\xff" * 100, TOO_LONG, b"\0\0\0\2{]", b"\0\0\x7f\xff" + b"[" * 0x7FFF])
def test_bytes_that_are_no_message_end_the_run(linked, sent):
    (_, one, _), ends = linked(3)
    with socket.fromfd(one.peers[0].connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as own:
        own.sendall(sent)
    assert "process 1 of 3, on host1, was lost" in str(ends[0].soon())


def test_a_request_that_is_too_long_for_a_message_is_refused(linked, monkeypatch):
    monkeypatch.setattr(channel, "LONGEST", 100)
    (first, _), _ = linked(2)
    with pytest.raises(BadRequest, match="is too long to be sent to other processes"):
        first.tell("a" * 100)


# who is let in


@pytest.fixture
def door():
    """`door(count)` is where process 0 of `count` listens, with the token "right"; `door.found()` its link, or its error."""
    threads = []

    class Door:
        def __call__(self, count: int, patience: float = 20) -> tuple[str, int]:
            server, self._found = channel.listen("127.0.0.1"), []
            threads.append(threading.Thread(target=self._accept, args=(server, count, patience), daemon=True))
            threads[-1].start()
            return server.getsockname()

        def _accept(self, *asked) -> None:
            server, count, patience = asked
            try:
                self._found.append(channel.accept(server, count, "right", print, patience))
            except Exception as e:
                self._found.append(e)

        def found(self, seconds: float = 10):
            threads[-1].join(seconds)
            (found,) = self._found
            return found

    return Door()


def comes(address, number: int = 1, count: int = 2, token: str = "right"):
    return channel.connect(address, number, count, token, Ends().append)


@contextlib.contextmanager
def strangers(address, count: int = 1):
    """Connections of somebody who does not know the token."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


HALF_A_SURROGATE = json.dumps({"token": "\ud800", "process": 1, "host": "\ud800"}).encode()
STRANGE = [
    b"",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\0\1\0\0" + b"x" * 70000,
    b"\xff" * 20,
    framed(b""),
    framed(b"#WELCOME#"),
    framed(b"#CHALLENGE#"),
    framed(b"#CHALLENGE#{nothing}" + b"x" * 20),
    framed(b"{sha256}" + b"x" * 32),
    framed(b"{\xff\xfe}" + b"x" * 32),
    framed(b"[" * 4000),
    framed(HALF_A_SURROGATE),
]


@pytest.mark.parametrize("said", STRANGE)
@pytest.mark.parametrize("leaves", [True, False])
def test_a_stranger_is_not_let_in_whatever_they_say_and_the_next_process_is(door, said, leaves):
    address = door(2)
    with strangers(address) as (stranger,):
        with contextlib.suppress(OSError):
            stranger.sendall(said)
        if leaves:
            stranger.close()
        other = comes(address)
        first = door.found()
    first.tell("hello")
    assert other.orders.get(timeout=5) == "hello"
    other.close()
    first.close()


@pytest.mark.parametrize(("number", "token"), [(1, "wrong"), (1, ""), (2, "right"), (0, "right"), (-1, "right")])
def test_a_process_with_another_token_or_number_is_told_so(door, number, token):
    address = door(2)
    with pytest.raises(Unsupported, match="process 0 does not answer"):
        comes(address, number, 2, token)
    comes(address).close()
    door.found().close()


@pytest.mark.parametrize("hello", [b"[]", b"3", b"{", b'{"process": "1", "host": "a"}', b'{"process": 1}', b"[" * 4000])
def test_a_process_that_does_not_say_who_it_is_is_not_let_in(door, hello):
    address = door(2)
    connection = Connection(socket.create_connection(address).detach())
    answer_challenge(connection, b"right")
    deliver_challenge(connection, b"right")
    connection.send_bytes(hello)
    comes(address).close()
    door.found().close()
    with pytest.raises((EOFError, OSError)):
        connection.recv_bytes()


def test_silent_strangers_hold_nobody_up(door):
    address = door(2)
    with strangers(address, 200):
        start = time.monotonic()
        comes(address).close()
        door.found().close()
        assert time.monotonic() - start < 4


def test_a_stranger_of_one_byte_at_a_time_holds_nobody_up(door):
    address, stop = door(2), threading.Event()

    def drip(stranger) -> None:
        with contextlib.suppress(OSError):
            for byte in framed(b"x" * 200):
                stranger.sendall(bytes([byte]))
                if stop.wait(0.2):
                    return

    with strangers(address) as (stranger,):
        thread = threading.Thread(target=drip, args=(stranger,))
        thread.start()
        start = time.monotonic()
        comes(address).close()
        door.found().close()
        assert time.monotonic() - start < 4
        stop.set()
        thread.join()


def test_strangers_do_not_move_the_deadline(door):
    address = door(2, patience=1)
    with strangers(address, 10):
        start = time.monotonic()
        assert isinstance(door.found(), Unsupported)
        assert time.monotonic() - start < 3


def test_threads_of_strangers_end_once_all_processes_are_there(door):
    before, address = threading.active_count(), door(2)
    with strangers(address, 30):
        other = comes(address)
        first = door.found()
        until = time.monotonic() + 5
        while threading.active_count() > before + 6 and time.monotonic() < until:
            time.sleep(0.01)
        assert threading.active_count() <= before + 6, "three of each link"
    other.close()
    first.close()


def test_processes_that_do_not_come_are_named(door):
    address = door(4, patience=1)

    def come() -> None:
        with contextlib.suppress(Unsupported):
            comes(address, 2, 4)

    threading.Thread(target=come, daemon=True).start()
    assert door.found().args == ("not all 4 processes have come within 1 seconds", "missing: process 1, 3")


def test_a_process_0_that_does_not_answer_is_not_waited_for_forever(monkeypatch):
    monkeypatch.setattr(channel, "PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(Unsupported, match="process 0 does not answer"):
        comes(server.getsockname())


def test_the_name_of_a_process_is_printable():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        peer = Peer(1, "\ud800\x1b[2J", 2, Connection(ours.detach()))
    assert peer.name == "process 1 of 2, on \\ud800\\x1b[2J,"
