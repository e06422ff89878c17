"""Links of several processes within one, over socket pairs."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

from mla_jax.base.errors import ProcessLost
from mla_jax.hosts.channel import Link, Peer


class Ends(list):
    """The errors that a link has ended with."""

    def soon(self, seconds: float = 5) -> ProcessLost:
        until = time.monotonic() + seconds
        while not self and time.monotonic() < until:
            time.sleep(0.01)
        (error,) = self
        return error


def cut(link: Link) -> None:
    """As the system does when a process is killed."""
    for peer in link.peers:
        with contextlib.suppress(OSError), socket.fromfd(peer.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as one:
            one.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def links() -> Iterator[Callable[[int], tuple[list[Link], list[Ends]]]]:
    """`made(count)` are the links of `count` processes, and the errors that each has ended with."""
    all_links = []

    def made(count: int) -> tuple[list[Link], list[Ends]]:
        ends = [Ends() for _ in range(count)]
        pairs = [tuple(Connection(one.detach()) for one in socket.socketpair()) for _ in range(1, count)]
        first = Link(0, [Peer(i, f"host{i}", count, pair[0]) for i, pair in enumerate(pairs, 1)], ends[0].append)
        others = [Link(i, [Peer(0, "host0", count, pair[1])], ends[i].append) for i, pair in enumerate(pairs, 1)]
        all_links.extend([first, *others])
        return [first, *others], ends

    yield made
    for link in all_links:
        link.over.set()
        cut(link)
