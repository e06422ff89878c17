"""Contents of pages in the host's memory: room for a fixed number, of which the least recently used make place for new ones.

A page is known by a digest: of all tokens up to its end, and of those behind it that it depends on. A page that somebody holds
stays. Plain NumPy: a page is bytes, and where they come from and go to is the business of others."""

import struct
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from math import prod
from typing import Any, NamedTuple

import numpy as np

START = bytes(sha256().digest_size)  # the digest before the first page


def chained(before: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a page from its tokens and the digest of the page before it."""
    return sha256(before + struct.pack(f"{len(tokens)}q", *tokens)).digest()


class Kind(NamedTuple):
    """One array of a page."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class HostPages:
    """Room for `count` pages, at least one, of arrays of these kinds. The system gives the memory as it is written."""

    def __init__(self, count: int, kinds: Mapping[str, Kind]):
        self.count, self.kinds = count, dict(kinds)
        self._bytes = {name: np.empty((count, kind.bytes), np.uint8) for name, kind in kinds.items()}
        self._free = list(range(count - 1, -1, -1))
        self._slots: dict[bytes, int] = {}  # by digest
        # Those that nobody holds, the least recently used first
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._holders: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._slots

    @property
    def page_bytes(self) -> int:
        return sum(kind.bytes for kind in self.kinds.values())

    @property
    def room(self) -> int:
        """Pages that can be added now, those that nobody holds being forgotten if need be."""
        return len(self._free) + len(self._idle)

    def slot(self, digest: bytes) -> int:
        """Where a page is."""
        return self._slots[digest]

    def add(self, digest: bytes) -> int | None:
        """The slot to which a page's contents are to be written; None if the page is here: then it is used now."""
        if digest in self._slots:
            self._use(digest)
            return None
        slot = self._free.pop() if self._free else self._slots.pop(self._idle.popitem(last=False)[0])
        self._slots[digest], self._idle[digest] = slot, None
        return slot

    def hold(self, digest: bytes) -> None:
        """Keeps a page that is here, until it is dropped as often."""
        self._holders[digest] += 1
        self._idle.pop(digest, None)

    def drop(self, digest: bytes) -> None:
        """One less holds it. Once nobody does it counts as used now."""
        self._holders[digest] -= 1
        if not self._holders[digest]:
            del self._holders[digest]
            self._idle[digest] = None

    def _use(self, digest: bytes) -> None:
        if digest in self._idle:
            self._idle.move_to_end(digest)

    def write(self, slots: Sequence[int], contents: Mapping[str, Any]) -> None:
        """Takes in the first pages of arrays `[pages ..]`. It may run while others use other slots."""
        for name, kept in self._bytes.items():
            pages = np.ascontiguousarray(contents[name])
            pages = pages.reshape(len(pages), -1).view(np.uint8)
            for slot, page in zip(slots, pages, strict=False):
                kept[slot] = page

    def read(self, digests: Sequence[bytes], count: int) -> dict[str, np.ndarray]:
        """A copy of these pages as arrays `[count ..]`, with zeros after the last one."""
        slots = [self._slots[digest] for digest in digests]
        found = {}
        for name, kind in self.kinds.items():
            pages = np.zeros((count, kind.bytes), np.uint8)
            for page, slot in zip(pages, slots, strict=False):
                page[:] = self._bytes[name][slot]
            found[name] = pages.view(kind.dtype).reshape(count, *kind.shape)
        return found
