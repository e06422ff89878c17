"""Pages of requests that have dropped tokens, in each layer others: single layers' pages, cut from whole ones.

A whole page of the pool is one page of every layer. What has been evicted takes pages singly: a page of any layer may hold tokens
of any other. A whole page that is cut is whole again once all its parts are free."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mla_jax.engine.pages import Held, Pages, Tier


@dataclass(slots=True, eq=False)
class Layered(Held):
    """What one request holds once it has dropped tokens; it has no pages that are the same in all layers."""

    parts: list[list[int]] = field(default_factory=list)  # pages of the pool, by layer
    dropped: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens, by layer


class LayeredPages(Pages):
    """Pages for requests of both kinds. `layers` of the model."""

    def __init__(self, count: int, size: int, layers: int, index: bool = True, ahead: int = 0, tier: Tier | None = None):
        super().__init__(count, size, index, ahead, tier)
        self.layers = layers
        self._parts: list[int] = []  # free ones of pages that are cut
        self._used: dict[int, int] = {}  # parts in use of each page that is cut

    def evict(self, held: Held, counts: Sequence[int], tokens: int, more: int) -> Layered | None:
        """Pages for `counts` of the `tokens` tokens that `held` has, by layer, and for `more` tokens behind them; None, and
        nothing changed, if too few are free. `held` stays as it is."""
        need = [self._pages(count + more) for count in counts]
        if not self._has_parts(sum(need)):
            return None
        parts = [self._take_parts(n) for n in need]
        dropped = tokens - np.asarray(counts, np.int32)
        return Layered([], [], 0, False, 0, parts, dropped.astype(np.int32))

    def extend(self, held: Held, tokens: int) -> bool:
        if not isinstance(held, Layered):
            return super().extend(held, tokens)
        lack = [
            max(0, self._pages(tokens - gone) - len(mine)) for gone, mine in zip(held.dropped.tolist(), held.parts, strict=True)
        ]
        if not self._has_parts(sum(lack)):
            return False
        for mine, new in zip(held.parts, lack, strict=True):
            mine += self._take_parts(new)
        return True

    def own(self, held: Held) -> int:
        """Parts that are free once `held` is released."""
        return sum(map(len, held.parts)) if isinstance(held, Layered) else self.layers * super().own(held)

    @property
    def free_parts(self) -> int:
        """Parts that can be had now."""
        return len(self._parts) + self.layers * self.free

    def release(self, held: Held) -> None:
        super().release(held)
        if isinstance(held, Layered):
            for parts in held.parts:
                self._give_parts(parts)
            held.parts = []

    def wrote(self, held: Held, tokens: Sequence[int]) -> None:
        if not isinstance(held, Layered):  # others may not have pages in which tokens are missing
            super().wrote(held, tokens)

    def room(self, held: Layered, tokens: int) -> int:
        """Tokens that every layer has room for behind the `tokens` that `held` has."""
        rooms = (len(mine) * self.size - (tokens - gone) for gone, mine in zip(held.dropped.tolist(), held.parts, strict=True))
        return int(min(rooms))

    def table(self, held: Held, width: int) -> np.ndarray:
        """`[layers width]`: the pages of each layer, counted from its first one."""
        table = np.zeros((self.layers, width), np.int32)
        if not isinstance(held, Layered):
            table[:, : len(held.pages)] = held.pages
            return table
        for number, mine in enumerate(held.parts):
            table[number, : len(mine)] = np.array(mine, np.int32) - number * self.count
        return table

    def _has_parts(self, count: int) -> bool:
        return count <= self.free_parts

    def _take_parts(self, count: int) -> list[int]:
        while len(self._parts) < count:
            page = self._take()
            self._used[page] = 0
            self._parts += [number * self.count + page for number in range(self.layers)]
        taken = [self._parts.pop() for _ in range(count)]
        for part in taken:
            self._used[part % self.count] += 1
        return taken

    def _give_parts(self, parts: Sequence[int]) -> None:
        for part in parts:
            self._parts.append(part)
            self._used[part % self.count] -= 1
        whole = {part % self.count for part in parts if not self._used[part % self.count]}
        if whole:
            self._parts = [part for part in self._parts if part % self.count not in whole]
            self._free += sorted(whole)
        for page in whole:
            del self._used[page]
