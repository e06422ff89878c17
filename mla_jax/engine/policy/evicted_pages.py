"""Pages of requests that have dropped tokens, in each layer others, or in each head: parts, cut from whole pages.

A whole page of the pool is one page of every layer, and where heads are cached, a page has a lane for each. A part is one lane
of one layer's page. Evicted requests take parts singly: a part of any layer and lane may hold tokens of any other. A
whole page that is cut is whole again once all its parts are free."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mla_jax.engine.core.pages import Held, Pages, Tier


@dataclass(slots=True, eq=False)
class Evicted(Held):
    """One request's parts once it has dropped tokens; it has no pages that are the same in all layers."""

    parts: list[list[int]] = field(default_factory=list)  # of the pool, by layer and head
    dropped: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens, by layer and head

    def room(self, size: int, tokens: int) -> int:
        """Tokens that every layer and head has room for behind the `tokens` of the request, with parts of `size` tokens."""
        dropped = zip(self.dropped.tolist(), self.parts, strict=True)
        return int(min(len(mine) * size - (tokens - gone) for gone, mine in dropped))


class EvictedPages(Pages):
    """Pages for requests of both kinds, of a model with `layers` layers, and `lanes` lanes of a layer's page."""

    def __init__(
        self,
        count: int,
        size: int,
        layers: int,
        lanes: int = 1,
        index: bool = True,
        ahead: int = 0,
        tier: Tier | None = None,
    ):
        super().__init__(count, size, index, ahead, tier)
        self.layers, self.lanes = layers, lanes
        self.parts = layers * lanes  # of a whole page
        self._parts: list[int] = []  # free ones of pages that are cut
        self._used: dict[int, int] = {}  # parts in use of each page that is cut

    def evict(self, held: Held, counts: Sequence[int], tokens: int, more: int) -> Evicted | None:
        """Parts for `counts` of the `tokens` tokens that `held` has, by layer and head, and for `more` tokens behind them.

        None, and nothing changed, if too few are free. `held` stays as it is."""
        need = [self._pages(count + more) for count in counts]
        if not self._has_parts(sum(need)):
            return None
        parts = [self._take_parts(n) for n in need]
        dropped = tokens - np.asarray(counts, np.int32)
        return Evicted([], [], 0, False, 0, parts, dropped.astype(np.int32))

    def extend(self, held: Held, tokens: int) -> bool:
        if not isinstance(held, Evicted):
            return super().extend(held, tokens)
        lack = [
            max(0, self._pages(tokens - gone) - len(mine))
            for gone, mine in zip(held.dropped.tolist(), held.parts, strict=True)
        ]
        if not self._has_parts(sum(lack)):
            return False
        for mine, new in zip(held.parts, lack, strict=True):
            mine += self._take_parts(new)
        return True

    def own(self, held: Held) -> int:
        """Parts that are free once `held` is released."""
        return sum(map(len, held.parts)) if isinstance(held, Evicted) else self.parts * super().own(held)

    @property
    def free_parts(self) -> int:
        """Parts that can be had now."""
        return len(self._parts) + self.parts * self.free

    def release(self, held: Held) -> None:
        super().release(held)
        if isinstance(held, Evicted):
            for parts in held.parts:
                self._give_parts(parts)
            held.parts = []

    def wrote(self, held: Held, tokens: Sequence[int], count: int | None = None) -> None:
        if not isinstance(held, Evicted):  # others may not have pages in which tokens are missing
            super().wrote(held, tokens, count)

    def table(self, held: Held, width: int) -> np.ndarray:
        """`[layers lanes width]`: the parts of each layer and head, counted from the layer's first one."""
        table = np.zeros((self.layers, self.lanes, width), np.int32)
        if not isinstance(held, Evicted):
            lane = np.arange(self.lanes)[:, None]
            table[:, :, : len(held.pages)] = np.array(held.pages, np.int32) * self.lanes + lane
            return table
        for number, mine in enumerate(held.parts):
            layer, lane = divmod(number, self.lanes)
            table[layer, lane, : len(mine)] = np.array(mine, np.int32) - self._part(layer, 0)
        return table

    def _part(self, layer: int, page: int, lane: int = 0) -> int:
        """The number of a part of the pool."""
        return (layer * self.count + page) * self.lanes + lane

    def _page(self, part: int) -> int:
        """The whole page that a part is of."""
        return part // self.lanes % self.count

    def _has_parts(self, count: int) -> bool:
        return count <= self.free_parts

    def _take_parts(self, count: int) -> list[int]:
        while len(self._parts) < count:
            page = self._take()
            self._used[page] = 0
            self._parts += [
                self._part(layer, page, lane) for layer in range(self.layers) for lane in range(self.lanes)
            ]
        taken = [self._parts.pop() for _ in range(count)]
        for part in taken:
            self._used[self._page(part)] += 1
        return taken

    def _give_parts(self, parts: Sequence[int]) -> None:
        for part in parts:
            self._parts.append(part)
            self._used[self._page(part)] -= 1
        whole = {page for page in map(self._page, parts) if not self._used[page]}
        if whole:
            self._parts = [part for part in self._parts if self._page(part) not in whole]
            self._free += sorted(whole)
        for page in whole:
            del self._used[page]
