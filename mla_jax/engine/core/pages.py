"""Who holds which page of the latent pool, and which pages hold a beginning that is known already.

Plain integers: the arrays, and the contents of pages, belong to others. Whoever holds a page in the index holds all
pages before it too, so along a chain of nodes the number of holders never rises, and pages fall idle from the end."""

import itertools
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from mla_jax.base.errors import DoesNotFit
from mla_jax.engine.core.host_pages import START, chained

# The node before (0: none), and the tokens of this page, with those behind that it depends on
Key = tuple[int, tuple[int, ...]]
ROOT = 0


class OutOfPages(DoesNotFit):
    """More pages are needed now than are free; nothing was changed."""


@runtime_checkable
class Tier(Protocol):
    """Where the contents of pages are that the index has forgotten, by digests as `host_pages` has them."""

    def __contains__(self, digest: bytes, /) -> bool: ...

    def forget(self, digest: bytes, page: int, /) -> None:
        """A page is taken for something else, which is not written yet."""

    def ask(self, digest: bytes, page: int, /) -> None:
        """The contents, which are there, belong into this page before it is read."""


@dataclass(slots=True, eq=False)
class Node:
    """A page in the index. Its id is never used again, so a reused page cannot be mistaken for its former self."""

    id: int
    key: Key
    page: int
    digest: bytes  # of all tokens up to the page's end, where there is a tier
    holders: int = 1
    written: bool = False


@dataclass(slots=True, eq=False)
class Held:
    """One request's pages, in the order of its tokens, of which the first ones may be in the index."""

    pages: list[int]
    nodes: list[Node]  # of its first pages; pages beyond these are its own
    shared: int  # the number of its first pages that came from the index or the tier
    indexed: bool
    full: int  # the number of its first pages that are written to the end
    _array: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    _known: int = 0  # of the pages, the first ones, that the array has

    def read(self, size: int) -> int:
        """Tokens that its pages of `size` tokens held when it was given them."""
        return self.shared * size

    def array(self) -> np.ndarray:
        """The pages as int32. Only those that came since are converted."""
        if len(self.pages) > len(self._array):
            self._array = np.pad(self._array, (0, 2 * len(self.pages) - len(self._array)))
        self._array[self._known : len(self.pages)] = self.pages[self._known :]
        self._known = len(self.pages)
        return self._array[: self._known]


class Match(NamedTuple):
    """The indexed pages of a prompt. While `blocked`, another request is about to write the page after these."""

    pages: tuple[int, ...]
    blocked: bool
    taken: int  # the number of `pages`, the first ones, that somebody holds; the others still count as free
    hosted: int  # pages behind these that the tier has; each takes a new page


class Pages:
    """Pages 0 to count - 1 of `size` tokens each: free, held, or idle (in the index, written, held by nobody).

    A page's contents may depend on `ahead` tokens behind its own: it is in the index together with these, and it is not written
    before them. A `tier` keeps the pages that the index evicts."""

    def __init__(self, count: int, size: int, index: bool = True, ahead: int = 0, tier: Tier | None = None):
        self.count = count
        self.size = size
        self.index = index
        self.ahead = ahead
        self.tier = tier
        self.cached = 0  # pages in the index that are written, held or not
        self.shared = 0  # pages that more than one request holds
        self._free = list(range(count - 1, -1, -1))
        self._nodes: dict[Key, Node] = {}
        # Those that nobody holds, the least recently used first: a page comes before the ones it follows in a text
        self._idle: OrderedDict[int, Node] = OrderedDict()
        self._ids = itertools.count(ROOT + 1)

    @property
    def free(self) -> int:
        """Pages that can be had now, if need be by evicting their contents."""
        return len(self._free) + len(self._idle)

    @property
    def unused(self) -> int:
        """Pages that hold nothing anybody knows."""
        return len(self._free)

    def match(self, tokens: Sequence[int], use_index: bool = True, known: list[Node] | None = None) -> Match:
        """The longest written beginning of a prompt, in full pages and without its last token; changes nothing.

        `known` are the nodes of an earlier match of this prompt, or of a shorter one, and become those of this one: what is still
        in the index is not searched again."""
        nodes, blocked, hosted = self._find(tokens, use_index, [] if known is None else known)
        return Match(tuple(node.page for node in nodes), blocked, _holders_reach(nodes, 1), len(hosted))

    def admit(self, tokens: Sequence[int], use_index: bool = True) -> Held:
        """Pages for all of `tokens`: those that `match` finds, then new ones, the full ones promised to the index.

        Without `use_index` the request takes nothing from the index and gives it nothing. Raises OutOfPages."""
        nodes, _, hosted = self._find(tokens, use_index, [])
        new = self._pages(len(tokens)) - len(nodes)
        room = self.free - (len(nodes) - _holders_reach(nodes, 1))
        if new > room:
            raise OutOfPages(
                f"{new:,} pages of {self.size} tokens are needed, {room:,} of {self.count:,} are free"
            )
        for node in nodes:
            self._hold(node)
        held = Held([node.page for node in nodes], nodes, len(nodes), self.index and use_index, len(nodes))
        held.pages += [self._take() for _ in range(new)]
        for digest in hosted:
            self._bring(held, digest, tokens)
        self._promise(held, tokens)
        return held

    def extend(self, held: Held, tokens: int) -> bool:
        """Gives `held` the pages that `tokens` tokens need in all; False, and nothing changed, if too few are free."""
        new = self._pages(tokens) - len(held.pages)
        if new > self.free:
            return False
        held.pages += [self._take() for _ in range(new)]
        return True

    def wrote(self, held: Held, tokens: Sequence[int], count: int | None = None) -> None:
        """Tells that the first `count` of these tokens, or all, are in the first slots of `held`, by dispatches that come before
        any to follow."""
        full = self._full(len(tokens) if count is None else count)
        assert full <= len(held.pages), "tokens were written where their request holds no page"
        if not held.indexed:
            return
        while held.full < full:
            self._wrote_page(held, tokens)
            held.full += 1

    def own(self, held: Held) -> int:
        """The number of pages that `held` alone holds: these are free once it is released."""
        return len(held.pages) - _holders_reach(held.nodes, 2)

    def release(self, held: Held) -> None:
        """Takes all pages back; once more does nothing. Written ones stay known, promises are withdrawn."""
        self._free += reversed(held.pages[len(held.nodes) :])
        for node in reversed(held.nodes):
            self._drop(node)
        held.pages, held.nodes = [], []

    def _full(self, tokens: int) -> int:
        """Pages that this number of tokens fills to the end."""
        return max(tokens - self.ahead, 0) // self.size

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def _find(
        self, tokens: Sequence[int], use_index: bool, nodes: list[Node]
    ) -> tuple[list[Node], bool, list[bytes]]:
        """The written nodes of a prompt's beginning, whether the next one is promised by another request, and if the index does
        not have that, the digests of those that the tier has. The first nodes may be known."""
        if not (self.index and use_index):
            return [], False, []
        while (
            nodes and self._nodes.get(nodes[-1].key) is not nodes[-1]
        ):  # a page leaves the index after those behind it
            nodes.pop()
        for at in range(len(nodes), self._most(tokens)):
            node = self._nodes.get(self._key(nodes, at, tokens))
            if node is None:
                return nodes, False, self._hosted(nodes, tokens)
            if not node.written:
                return nodes, True, []
            nodes.append(node)
        return nodes, False, []

    def _hosted(self, nodes: list[Node], tokens: Sequence[int]) -> list[bytes]:
        """The digests of pages behind `nodes` that the tier has of a prompt."""
        found: list[bytes] = []
        if self.tier is None:
            return found
        digest = nodes[-1].digest if nodes else START
        for at in range(len(nodes), self._most(tokens)):
            digest = chained(digest, self._tokens(at, tokens))
            if digest not in self.tier:
                break
            found.append(digest)
        return found

    def _most(self, tokens: Sequence[int]) -> int:
        """Pages that a prompt may find written: its last token is read in any case."""
        return max(len(tokens) - 1, 0) // self.size

    def _key(self, nodes: list[Node], at: int, tokens: Sequence[int]) -> Key:
        return nodes[at - 1].id if at else ROOT, self._tokens(at, tokens)

    def _tokens(self, at: int, tokens: Sequence[int]) -> tuple[int, ...]:
        """Of one page, with those behind that it depends on."""
        return tuple(tokens[at * self.size : (at + 1) * self.size + self.ahead])

    def _bring(self, held: Held, digest: bytes, tokens: Sequence[int]) -> None:
        """The next page of `held` is known and gets its contents from the tier."""
        assert self.tier is not None
        node = self._add(held, self._key(held.nodes, len(held.nodes), tokens))
        assert node.digest == digest, "the tier has other tokens"
        self.tier.ask(digest, node.page)
        node.written = True
        self.cached += 1
        held.shared, held.full = held.shared + 1, held.full + 1

    def _promise(self, held: Held, tokens: Sequence[int]) -> None:
        while held.indexed and len(held.nodes) < self._full(len(tokens)):
            key = self._key(held.nodes, len(held.nodes), tokens)
            if key in self._nodes:
                return
            self._add(held, key)

    def _add(self, held: Held, key: Key) -> Node:
        before = held.nodes[-1].digest if held.nodes else START
        digest = before if self.tier is None else chained(before, key[1])
        node = Node(next(self._ids), key, held.pages[len(held.nodes)], digest)
        self._nodes[key] = node
        held.nodes.append(node)
        return node

    def _wrote_page(self, held: Held, tokens: Sequence[int]) -> None:
        """The next page of `held` is full: the index has it from now on, if it has all pages before it from `held`."""
        at = held.full
        if at > len(held.nodes):
            return
        key = self._key(held.nodes, at, tokens)
        if at == len(held.nodes):
            if other := self._nodes.get(key):
                self._replace(other, held)
                return
            self._add(held, key)
        node = held.nodes[at]
        assert node.key == key, "other tokens were written than those promised"
        node.written = True
        self.cached += 1

    def _replace(self, node: Node, held: Held) -> None:
        """The index keeps one page of those that are equal: this one if nobody holds the other, which becomes free."""
        if node.holders:
            return
        self._hold(node)
        self._free.append(node.page)
        node.page = held.pages[len(held.nodes)]
        held.nodes.append(node)

    def _take(self) -> int:
        if self._free:
            return self._free.pop()
        _, node = self._idle.popitem(last=False)
        del self._nodes[node.key]
        self.cached -= 1
        if self.tier is not None:
            self.tier.forget(node.digest, node.page)
        return node.page

    def _hold(self, node: Node) -> None:
        node.holders += 1
        self._idle.pop(node.id, None)
        self.shared += node.holders == 2

    def _drop(self, node: Node) -> None:
        node.holders -= 1
        self.shared -= node.holders == 1
        if node.holders:
            return
        if node.written:
            self._idle[node.id] = node
        else:
            del self._nodes[node.key]
            self._free.append(node.page)


def _holders_reach(nodes: list[Node], holders: int) -> int:
    """How many of a chain, its first ones, have at least `holders` holders."""
    return bisect_left(nodes, True, key=lambda node: node.holders < holders)
