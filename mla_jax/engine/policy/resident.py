"""Pages of rows whose contents are in the host's memory, of which some are on the device as well: those are in the page table."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import cast

from mla_jax.engine.core.host_tier import HostTier
from mla_jax.engine.core.pages import Held, Pages


@dataclass(slots=True, eq=False)
class Resident(Held):
    """What one request holds, once its full pages are kept on the host. `pages` are those on the device."""

    numbers: list[int]  # which pages of the row these are, ascending
    known: int  # of its pages, the first ones, which the index knows
    # Of the full pages that the host keeps for it, from the first on
    digests: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, held: Held) -> "Resident":
        """The same pages, of which none is on the host yet."""
        return cls(
            held.pages,
            held.nodes,
            held.shared,
            False,
            held.full,
            list(range(len(held.pages))),
            len(held.nodes),
        )

    def left_out(self, size: int) -> int:
        """Tokens of the row that are not on the device, in pages of `size`."""
        return (self.numbers[-1] + 1 - len(self.numbers)) * size


class ResidentPages(Pages):
    """Pages over a tier that keeps what rows leave there."""

    def keep(self, held: Resident, full: int, name: bytes) -> dict[int, int]:
        """Has the tier keep the first `full` pages of `held`: the slots of those that it did not keep before, by their numbers.

        These must be on the device. `name` tells the request's own pages from all others'."""
        here, slots = dict(zip(held.numbers, held.pages, strict=True)), {}
        for number in range(len(held.digests), full):
            digest = _digest(held, number, name)
            slots[number] = self._host.keep(digest, here[number])
            held.digests.append(digest)
        return slots

    def slots(self, held: Resident) -> list[int]:
        """Where on the host its full pages are."""
        return [self._host.slot(digest) for digest in held.digests]

    def choose(self, held: Resident, numbers: Sequence[int]) -> bool:
        """Gives `held` the pages `numbers`, with what the host has of them; False, and nothing changed, if too few are free.

        Those that are on the device and its own stay where they are; those that are in the index are left to it."""
        shared = len(held.nodes)
        own = dict(zip(held.numbers[shared:], held.pages[shared:], strict=True))
        wanted = set(numbers)
        leave = [number for number in own if number not in wanted]
        come = [number for number in numbers if number not in own]
        if len(come) > self.free + self.own(held) - (len(own) - len(leave)):
            return False
        for node in reversed(held.nodes):
            self._drop(node)
        self._free += [own.pop(number) for number in leave]
        for number in come:
            own[number] = self._take()
            self._host.ask(held.digests[number], own[number])
        held.pages = [own[number] for number in numbers]
        held.nodes = []
        held.numbers = list(numbers)
        return True

    def extend(self, held: Held, tokens: int) -> bool:
        if not isinstance(held, Resident):
            return super().extend(held, tokens)
        before, first = len(held.pages), held.numbers[-1] + 1
        if not super().extend(held, tokens - held.left_out(self.size)):
            return False
        held.numbers += range(first, first + len(held.pages) - before)
        return True

    def wrote(self, held: Held, tokens: Sequence[int]) -> None:
        # Nothing is shared once pages are left out: others may not have what was written after that
        if not isinstance(held, Resident):
            super().wrote(held, tokens)

    def release(self, held: Held) -> None:
        super().release(held)
        if isinstance(held, Resident):
            for number, digest in reversed(list(enumerate(held.digests))):
                # What only this request has is forgotten: no other can ask for it
                self._host.drop(digest, forgets=number >= held.known)
            held.digests, held.numbers = [], []

    @property
    def _host(self) -> HostTier:
        return cast(HostTier, self.tier)


def _digest(held: Resident, number: int, name: bytes) -> bytes:
    """What the index knows a page by, or what no other page has."""
    if number < held.known:
        return held.nodes[number].digest
    return sha256(b"%b %d" % (name, number)).digest()
