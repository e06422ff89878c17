"""Pages of requests that have dropped tokens, in each layer others, or in each head: parts, cut from whole pages.

A whole page of the pool is one page of every layer, and where heads are cached, a page has a lane for each. A part is one lane
of one layer's page. Evicted requests take parts singly: a part of any layer and lane may hold tokens of any other. A
whole page that is cut is whole again once all its parts are free."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mla_jax.engine.core.compressed import CompressedContext
from mla_jax.engine.core.pages import Held, Pages, Tier


@dataclass(slots=True, eq=False)
class Evicted(Held):
    """One request's parts once it has dropped tokens; it has no pages that are the same in all layers."""

    parts: np.ndarray = field(
        default_factory=lambda: np.zeros((0, 0), np.int32)
    )  # `[K P]`, by layer and head,
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # of entries that each has
    dropped: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens, by layer and head
    root: "Root | None" = None  # the context that it begins with

    @property
    def first(self) -> np.ndarray:
        """The number of its first entries, by layer and head, that are its root's."""
        return np.zeros_like(self.counts) if self.root is None else self.root.full

    def read(self, size: int) -> int:
        return 0 if self.root is None else self.root.tokens

    def room(self, size: int, tokens: int) -> int:
        """Tokens that every layer and head has room for behind the `tokens` of the request, with parts of `size` tokens."""
        return int((self.counts * size - (tokens - self.dropped)).min())

    def append(self, lacks: np.ndarray, parts: list[int]) -> None:
        """Gives each layer and head as many of these parts as it lacks."""
        counts = self.counts + lacks
        more = int(counts.max()) - self.parts.shape[1]
        if more > 0:
            further = np.zeros((len(lacks), more + self.parts.shape[1] // 2), np.int32)
            self.parts = np.concatenate([self.parts, further], axis=1)
        place = np.arange(self.parts.shape[1])
        self.parts[(place >= self.counts[:, None]) & (place < counts[:, None])] = parts
        self.counts = counts

    def own_parts(self) -> list[int]:
        place = np.arange(self.parts.shape[1])
        return self.parts[(place >= self.first[:, None]) & (place < self.counts[:, None])].tolist()


@dataclass(slots=True, eq=False)
class Root:
    """A compressed context that requests begin with. They share its full parts, and copy those that are not full."""

    held: Evicted
    tokens: int  # of the context, those that were dropped included
    full: np.ndarray  # the number of its full parts, by layer and head
    holders: int = 0


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
        self.roots: dict[CompressedContext, Root] = {}  # of contexts that requests hold

    def evict(self, held: Held, counts: Sequence[int], tokens: int, more: int) -> Evicted | None:
        """Parts for `counts` of the `tokens` tokens that `held` has, by layer and head, and for `more` tokens behind them.

        None, and nothing changed, if too few are free. `held` stays as it is."""
        need = -(-(np.asarray(counts, np.int32) + more) // self.size)
        if need.sum() > self.free_parts:
            return None
        evicted = Evicted([], [], 0, False, 0, dropped=(tokens - np.asarray(counts)).astype(np.int32))
        evicted.parts, evicted.counts = np.zeros((len(need), 0), np.int32), 0 * need
        evicted.append(need, self._take_parts(int(need.sum())))
        return evicted

    def plant(self, context: CompressedContext) -> Root:
        """Parts for a compressed context, which nobody holds yet. There is room for them."""
        tokens, counts = len(context.tokens), context.counts.ravel()
        held = self.evict(Held([], [], 0, False, 0), counts.tolist(), tokens, 0)
        assert held is not None
        root = self.roots[context] = Root(held, tokens, counts // self.size)
        return root

    def grow(self, root: Root, more: int) -> Evicted:
        """A request's parts: the full ones of its root, and its own for what else is there and for `more` tokens behind it. There
        is room for them."""
        need = self.parts_behind(root.tokens - root.held.dropped, more)
        parts, counts = root.held.parts[:, : int(root.full.max())], root.full
        grown = Evicted(
            [], [], 0, False, 0, parts=parts.copy(), counts=counts, dropped=root.held.dropped, root=root
        )
        grown.append(need, self._take_parts(int(need.sum())))
        root.holders += 1
        return grown

    def parts_behind(self, kept: np.ndarray, more: int) -> np.ndarray:
        """Parts, by layer and head, for what is in no full part of `kept` tokens, and for `more` tokens behind these."""
        return -(-(kept + more) // self.size) - kept // self.size

    def extend(self, held: Held, tokens: int) -> bool:
        if not isinstance(held, Evicted):
            return super().extend(held, tokens)
        lacks = np.maximum(-(-(tokens - held.dropped) // self.size) - held.counts, 0)
        if lacks.sum() > self.free_parts:
            return False
        if lacks.any():
            held.append(lacks, self._take_parts(int(lacks.sum())))
        return True

    def own(self, held: Held) -> int:
        """Parts that are free once `held` is released."""
        return (
            int((held.counts - held.first).sum())
            if isinstance(held, Evicted)
            else self.parts * super().own(held)
        )

    @property
    def free_parts(self) -> int:
        """Parts that can be had now."""
        return len(self._parts) + self.parts * self.free

    def release(self, held: Held) -> None:
        super().release(held)
        if not isinstance(held, Evicted):
            return
        self._give_parts(held.own_parts())
        root, held.counts, held.root = held.root, 0 * held.counts, None
        if root is not None:
            root.holders -= 1
            self._pull_out(root)

    def _pull_out(self, root: Root) -> None:
        """Gives back the parts of a context that nobody holds any more."""
        if root.holders:
            return
        self.roots = {context: other for context, other in self.roots.items() if other is not root}
        self._give_parts(root.held.own_parts())

    def wrote(self, held: Held, tokens: Sequence[int], count: int | None = None) -> None:
        if not isinstance(held, Evicted):  # others may not have pages in which tokens are missing
            super().wrote(held, tokens, count)

    def table(self, held: Held, width: int) -> np.ndarray:
        """`[layers lanes width]`: the parts of each layer and head, counted from the layer's first one."""
        if isinstance(held, Evicted):
            return self.entries(held, np.zeros_like(held.counts), width)
        table = np.zeros((self.layers, self.lanes, width), np.int32)
        pages = held.array()[:width]
        table[..., : len(pages)] = pages * self.lanes + np.arange(self.lanes, dtype=np.int32)[:, None]
        return table

    def entries(self, held: Evicted, start: np.ndarray, width: int) -> np.ndarray:
        """`[layers lanes width]`: the same from entry `start` of each layer and head on; 0 for what is not held."""
        place = start[:, None] + np.arange(width)
        known = np.minimum(place, max(held.parts.shape[1] - 1, 0))
        found = np.take_along_axis(held.parts, known, axis=1) if held.parts.size else np.zeros_like(place)
        of_layer = self._part(1, 0) * np.arange(self.layers, dtype=np.int32).repeat(self.lanes)
        own = np.where(place < held.counts[:, None], found - of_layer[:, None], 0)
        return own.reshape(self.layers, self.lanes, width).astype(np.int32)

    def _part(self, layer: int, page: int, lane: int = 0) -> int:
        """The number of a part of the pool."""
        return (layer * self.count + page) * self.lanes + lane

    def _page(self, part: int) -> int:
        """The whole page that a part is of."""
        return part // self.lanes % self.count

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
