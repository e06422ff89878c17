"""The control channel between processes of one run: JSON over TCP between process 0 and each of the others.

Process 0 gives orders, the others answer. Both ends send a heartbeat every second. A process that closes its connection without
a message, or is silent for `SILENCE` seconds, is lost. Then, or when one reports a failure, `ended` is called in all others. A
message is JSON behind its length. It holds no code, and peers without the token are refused."""

import contextlib
import hmac
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mla_jax.base.errors import BadRequest, ProcessLost, Unsupported, printable

BEAT = 1.0  # seconds between two beats
SILENCE = 15.0  # seconds without a beat after which a process is lost
PATIENCE = 300.0  # seconds in which all processes must have come
LONGEST = 1 << 28  # bytes of a message
LONGEST_GREETING = 1 << 12  # the same of somebody who is not known yet
LENGTH = struct.Struct("!I")
LOCAL = ("localhost", "127.0.0.1", "::1")

Message = dict[str, Any]
Ended = Callable[[ProcessLost], None]


class Hello(NamedTuple):
    """Who a process says that it is."""

    process: int
    host: str


@dataclass
class Peer:
    """Another process and the connection to it."""

    hello: Hello
    socket: socket.socket
    count: int  # of all processes
    sending: threading.Lock = field(default_factory=threading.Lock)
    heard: float = field(default_factory=time.monotonic)
    answers: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)

    @property
    def name(self) -> str:
        return f"process {self.hello.process} of {self.count}, on {printable(self.hello.host)},"

    def send(self, message: Message, patience: float = -1) -> None:
        """Raises OSError where the connection is gone, or nothing can be sent for `patience` seconds."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > LONGEST:
            raise BadRequest(f"a request of {len(data):,} bytes is too long to be sent to other processes")
        if not self.sending.acquire(timeout=patience):
            raise TimeoutError
        try:
            self.socket.sendall(LENGTH.pack(len(data)) + data)
        finally:
            self.sending.release()


class Link:
    """One process's end. `ended` is called once, by a thread of its own, when the run cannot go on."""

    def __init__(self, process: int, peers: Sequence[Peer], ended: Ended):
        self.process, self.peers, self._ended = process, list(peers), ended
        # What processes other than 0 are told to do; None: there are no more orders
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.over = threading.Event()  # nothing is wrong if a connection ends now
        self._told = threading.Lock()
        for peer in self.peers:
            self._start(self._listen, peer)
            self._start(self._beat, peer)
        self._start(self._watch)

    def tell(self, order: Any) -> None:
        """Gives all others an order. That one of them is gone is told by `ended`."""
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.send({"order": order})

    def answer(self, value: Any) -> None:
        """Tells process 0."""
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.send({"answer": value})

    def answers(self) -> dict[int, Any]:
        """The next answer of each of the others, by process."""
        return {peer.hello.process: peer.answers.get() for peer in self.peers}

    def close(self) -> None:
        """All is done: the others need not go on."""
        self.over.set()
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.send({"done": True}, patience=1)

    def fail(self, words: str) -> None:
        """Tells the others why this process ends, and so all do."""
        self.over.set()
        self._pass_on(words, self.peers)

    def _start(self, work: Callable, *given: Any) -> None:
        threading.Thread(target=work, args=given, name="link", daemon=True).start()

    def _listen(self, peer: Peer) -> None:
        try:
            while True:
                self._take(peer, receive(peer.socket, LONGEST))
                peer.heard = time.monotonic()
        except (OSError, ValueError) as e:
            how = (
                "sent what is no message"
                if isinstance(e, ValueError)
                else "closed its connection without a word"
            )
            self._end(_lost(peer, f"was lost at {_now()}: it {how}"), peer)

    def _take(self, peer: Peer, message: Message) -> None:
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
                peer.send({})
                time.sleep(BEAT)

    def _watch(self) -> None:
        """Looks who is silent; not after this process itself was stopped, until the others had time to be heard."""
        looked = time.monotonic()
        while not self.over.is_set():
            time.sleep(BEAT)
            now = time.monotonic()
            if now - looked > 3 * BEAT:
                for peer in self.peers:
                    peer.heard = now
            looked = now
            for peer in self.peers:
                if now - peer.heard > SILENCE:
                    found = f"was lost at {_now()}: it has not been heard of for {SILENCE:.0f} seconds"
                    self._end(_lost(peer, found), peer)

    def _end(self, error: ProcessLost, of: Peer) -> None:
        """The run is over because of one process: tells the rest, and this one."""
        if self.over.is_set() or not self._told.acquire(blocking=False):
            return
        self.over.set()
        self._pass_on(str(error.args[0]), [peer for peer in self.peers if peer is not of])
        self._ended(error)

    def _pass_on(self, words: str, peers: Sequence[Peer]) -> None:
        for peer in peers:
            with contextlib.suppress(OSError):
                peer.send({"failed": words}, patience=1)


EACH_HAS_A_PART = "each process has a part of the model, so all of them end; start all of them again"


def _lost(peer: Peer, how: str) -> ProcessLost:
    return ProcessLost(f"{peer.name} {how}", "see what it said, and whether its host is up", EACH_HAS_A_PART)


def listen(host: str) -> socket.socket:
    """A socket for `accept`, on a free port: of this machine alone where `host` is."""
    if host in LOCAL:
        return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, dualstack_ipv6=dual
    )


def accept(server: socket.socket, count: int, token: str, ended: Ended, patience: float = PATIENCE) -> Link:
    """Process 0's end of a link of `count` processes, once all have come; raises Unsupported if some have not."""
    found: dict[int, Peer] = {}
    until = time.monotonic() + patience
    with server:
        while missing := [i for i in range(1, count) if i not in found]:
            server.settimeout(max(until - time.monotonic(), 0.001))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                late = f"not all {count} processes have come within {patience:.0f} seconds"
                raise Unsupported(late, f"missing: process {', '.join(map(str, missing))}") from None
            hello = _greeted(connection, token)
            if hello is not None and hello.process in missing:
                found[hello.process] = _peer(hello, connection, count)
            else:
                connection.close()
    for peer in found.values():
        peer.send({"host": socket.gethostname()})
    return Link(0, [found[i] for i in sorted(found)], ended)


def connect(address: tuple[str, int], process: int, count: int, token: str, ended: Ended) -> Link:
    """The end of another process than 0; raises Unsupported if process 0 cannot be reached."""
    try:
        connection = socket.create_connection(address, timeout=PATIENCE)
        send_greeting(connection, {"token": token, "process": process, "host": socket.gethostname()})
        found = receive(connection, LONGEST_GREETING)
    except (OSError, ValueError) as e:
        where = f"{address[0]}:{address[1]}"
        raise Unsupported(
            f"process 0 does not answer at {where}", str(e), "may this host connect to all ports of that one?"
        ) from e
    return Link(process, [_peer(Hello(0, str(found.get("host", address[0]))), connection, count)], ended)


def send_greeting(connection: socket.socket, message: Message) -> None:
    data = json.dumps(message).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def _greeted(connection: socket.socket, token: str) -> Hello | None:
    """Who has connected; None for somebody who does not know the token."""
    connection.settimeout(5)
    try:
        said: Mapping[str, Any] = receive(connection, LONGEST_GREETING)
    except (OSError, ValueError):
        return None
    given, process, host = (said.get(name) for name in ("token", "process", "host"))
    if not isinstance(given, str) or not hmac.compare_digest(given.encode(), token.encode()):
        return None
    return Hello(process, host[:100]) if type(process) is int and isinstance(host, str) else None


def _peer(hello: Hello, connection: socket.socket, count: int) -> Peer:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Peer(hello, connection, count)


def receive(connection: socket.socket, longest: int) -> Message:
    """The next message; raises OSError at the end of the connection, ValueError for anything but a message."""
    (size,) = LENGTH.unpack(_bytes(connection, LENGTH.size))
    if size > longest:
        raise ValueError(f"a message of {size:,} bytes")
    try:
        found = json.loads(_bytes(connection, size))
    except RecursionError as e:
        raise ValueError("a message of too many levels") from e
    if not isinstance(found, dict):
        raise ValueError("a message that is no object")
    return found


def _bytes(connection: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = connection.recv(min(count - len(found), 1 << 20))
        if not piece:
            raise ConnectionError("closed")
        found += piece
    return bytes(found)


def _now() -> str:
    return time.strftime("%H:%M:%S")
