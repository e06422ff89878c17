"""The control channel between processes of one run: JSON over TCP between process 0 and each of the others.

Process 0 gives orders, the others answer. `multiprocessing.connection` frames the messages, and checks by HMAC that both ends
know the token; its `send` and `recv`, which pickle, are not used. Both ends send a heartbeat every second. A process that closes
its connection without a message, or is silent for `SILENCE` seconds, is lost. Then, or when one reports a failure, `ended` is
called in all others."""

import contextlib
import json
import os
import queue
import socket
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

from mla_jax.base.errors import BadRequest, ProcessLost, Unsupported, printable

BEAT = 1.0  # seconds between two beats
SILENCE = 15.0  # seconds without a beat after which a process is lost
PATIENCE = 300.0  # seconds in which all processes must have come
LOOK = 0.1  # seconds between two looks at who was let in
STRANGERS = 64  # connections that have not shown the token, at most
LONGEST = 1 << 28  # bytes of a message
LONGEST_HELLO = 1 << 12  # bytes of the first one
LOCAL = ("localhost", "127.0.0.1", "::1")
EACH_HAS_A_PART = "each process has a part of the model, so all of them end; start all of them again"

ChannelMessage = dict[str, Any]
Ended = Callable[[ProcessLost], None]


@dataclass
class Peer:
    """Another process, and the connection to it."""

    process: int
    host: str
    count: int  # of all processes
    connection: Connection
    sending: threading.Lock = field(default_factory=threading.Lock)
    answers: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)

    @property
    def name(self) -> str:
        return f"process {self.process} of {self.count}, on {printable(self.host)},"

    def send(self, data: bytes, patience: float) -> None:
        """Raises OSError if the connection is gone, or is still in use after `patience` seconds (-1: forever)."""
        if not self.sending.acquire(timeout=patience):
            raise TimeoutError
        try:
            self.connection.send_bytes(data)
        finally:
            self.sending.release()


class Link:
    """One process's end. A thread calls `ended` once, when the run cannot go on."""

    def __init__(self, process: int, peers: Sequence[Peer], ended: Ended):
        self.process, self.peers, self._ended = process, list(peers), ended
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()  # of process 0; None after the last
        self.over = threading.Event()  # connections may end now
        self._told = threading.Lock()
        for peer in self.peers:
            _wait_at_most(SILENCE, peer.connection)
            _thread(self._listen, peer)
            _thread(self._beat, peer)

    def tell(self, order: Any) -> None:
        """Gives all others an order. If one of them is gone, `ended` is called."""
        self._send({"order": order})

    def answer(self, value: Any) -> None:
        """Tells process 0."""
        self._send({"answer": value})

    def answers(self) -> dict[int, Any]:
        """The next answer of each of the others, by process."""
        return {peer.process: peer.answers.get() for peer in self.peers}

    def close(self) -> None:
        """All is done: the others need not go on."""
        self.over.set()
        self._send({"done": True}, patience=1)

    def fail(self, words: str) -> None:
        """Tells the others why this process ends, and so all do."""
        self.over.set()
        self._send({"failed": words}, patience=1)

    def _send(self, message: ChannelMessage, *, but: Peer | None = None, patience: float = -1) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > LONGEST:
            raise BadRequest(f"a request of {len(data):,} bytes is too long to be sent to other processes")
        for peer in self.peers:
            with contextlib.suppress(OSError):
                if peer is not but:
                    peer.send(data, patience)

    def _listen(self, peer: Peer) -> None:
        try:
            while True:
                self._take(peer, json.loads(peer.connection.recv_bytes(LONGEST)))
        except BlockingIOError:
            self._lose(peer, f"it has not been heard of for {SILENCE:.0f} seconds")
        except (EOFError, ConnectionError):
            self._lose(peer, "it closed its connection without a word")
        except (OSError, ValueError, RecursionError) as e:
            self._lose(peer, f"its connection broke: {e}")

    def _take(self, peer: Peer, message: Any) -> None:
        match message:
            case {"order": order}:
                self.orders.put(order)
            case {"answer": value}:
                peer.answers.put(value)
            case {"failed": str(words)}:
                self._end(ProcessLost(words, EACH_HAS_A_PART), peer)
            case {"done": True}:
                self.over.set()
                self.orders.put(None)

    def _beat(self, peer: Peer) -> None:
        with contextlib.suppress(OSError):
            while True:
                peer.send(b"{}", -1)
                time.sleep(BEAT)

    def _lose(self, peer: Peer, how: str) -> None:
        found = f"{peer.name} was lost at {time.strftime('%H:%M:%S')}: {how}"
        self._end(ProcessLost(found, "see what it said, and whether its host is up", EACH_HAS_A_PART), peer)

    def _end(self, error: ProcessLost, of: Peer) -> None:
        """The run is over because of one process: tells the rest, and this one."""
        if self.over.is_set() or not self._told.acquire(blocking=False):
            return
        self.over.set()
        self._send({"failed": str(error.args[0])}, but=of, patience=1)
        self._ended(error)


def listen(host: str) -> socket.socket:
    """A socket for `accept`, on a free port; on a local `host`, for this machine alone."""
    if host in LOCAL:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual)


def accept(server: socket.socket, count: int, token: str, ended: Ended, patience: float = PATIENCE) -> Link:
    """Process 0's end of a link of `count` processes, once all have come; raises Unsupported if some have not."""
    door = _Door(count, token.encode())
    with server, contextlib.closing(door):
        door.let_all_in(server, patience)
    peers = [door.found[i] for i in range(1, count)]
    for peer in peers:
        with contextlib.suppress(OSError):  # the link will notice
            peer.connection.send_bytes(_hello(0))
    return Link(0, peers, ended)


class _Door:
    """Lets in who knows the token. Each connection has a thread, so that nobody who is silent or slow holds others up; of too
    many, the first is turned away."""

    def __init__(self, count: int, token: bytes):
        self._count, self._token = count, token
        self._strangers: OrderedDict[socket.socket, bool] = OrderedDict()
        self.found: dict[int, Peer] = {}  # by process

    def let_all_in(self, server: socket.socket, patience: float) -> None:
        until = time.monotonic() + patience
        server.settimeout(LOOK)
        while missing := [str(i) for i in range(1, self._count) if i not in self.found]:
            if time.monotonic() > until:
                late = f"not all {self._count} processes have come within {patience:.0f} seconds"
                raise Unsupported(late, f"missing: process {', '.join(missing)}")
            with contextlib.suppress(OSError):  # nobody has come, or is gone again
                self._greet(server.accept()[0])

    def _greet(self, stranger: socket.socket) -> None:
        self._strangers[stranger] = True
        _thread(self._ask, stranger)
        self._turn_away(STRANGERS)

    def close(self) -> None:
        self._turn_away(0)

    def _ask(self, stranger: socket.socket) -> None:
        # Whatever a stranger sends, and the handshake makes of it, they are not let in
        with stranger, contextlib.suppress(Exception), Connection(os.dup(stranger.fileno())) as connection:
            deliver_challenge(connection, self._token)
            answer_challenge(connection, self._token)
            hello = json.loads(connection.recv_bytes(LONGEST_HELLO))
            process, host = hello["process"], str(hello["host"])
            if self._strangers.pop(stranger) and process in range(1, self._count):
                self.found.setdefault(process, _peer(process, host, self._count, stranger.dup()))
        self._strangers.pop(stranger, None)

    def _turn_away(self, most: int) -> None:
        """All but `most`."""
        with contextlib.suppress(KeyError):  # the last one has gone just now
            while len(self._strangers) > most:
                stranger, _ = self._strangers.popitem(last=False)
                with contextlib.suppress(OSError):
                    stranger.shutdown(socket.SHUT_RDWR)  # its thread ends


def connect(address: tuple[str, int], process: int, count: int, token: str, ended: Ended) -> Link:
    """The end of another process than 0; raises Unsupported if process 0 cannot be reached."""
    try:
        peer = _peer(0, "", count, socket.create_connection(address, timeout=PATIENCE))
        peer.host = _introduced(process, peer.connection, token.encode())
    except Exception as e:  # any program may listen there, and answer anything
        where, why = f"{address[0]}:{address[1]}", str(e) or "it ended the connection"
        advice = "may this host connect to all ports of that one?"
        raise Unsupported(f"process 0 does not answer at {where}", why, advice) from e
    return Link(process, [peer], ended)


def _introduced(process: int, connection: Connection, token: bytes) -> str:
    """Shows process 0 the token, and which process this is; returns its host, once all have come."""
    _wait_at_most(PATIENCE, connection)
    answer_challenge(connection, token)
    deliver_challenge(connection, token)
    connection.send_bytes(_hello(process))
    return str(json.loads(connection.recv_bytes(LONGEST_HELLO))["host"])


def _wait_at_most(seconds: float, connection: Connection) -> None:
    """Makes it a BlockingIOError if nothing arrives for so long. A wait in which this process was stopped begins anew."""
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.fromfd(connection.fileno(), socket.AF_INET, socket.SOCK_STREAM) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


def _peer(process: int, host: str, count: int, own: socket.socket) -> Peer:
    own.settimeout(None)
    own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Peer(process, host, count, Connection(own.detach()))


def _hello(process: int) -> bytes:
    return json.dumps({"process": process, "host": socket.gethostname()}).encode()


def _thread(work: Callable[..., None], *given: Any) -> None:
    threading.Thread(target=work, args=given, name="link", daemon=True).start()
