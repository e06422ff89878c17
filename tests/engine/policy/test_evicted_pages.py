"""Parts of pages, of requests that have dropped tokens: nobody else's, whole again once free, and no more than is needed."""

import copy
import itertools
import random
from collections import Counter, deque
from dataclasses import dataclass, field

import numpy as np
import pytest

from mla_jax.engine.core.pages import Held, OutOfPages
from mla_jax.engine.policy.evicted_pages import Evicted, EvictedPages

pytestmark = pytest.mark.once  # plain Python

SIZE, LAYERS = 4, 3


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def admitted(pages: EvictedPages, prompt: list[int]) -> Held:
    """A request whose prompt is written."""
    held = pages.admit(prompt)
    pages.wrote(held, prompt)
    return held


def evicted(pages: EvictedPages, held: Held, counts: list[int], tokens: int, more: int = 0) -> Evicted:
    """The pages of `held` after eviction; `held` is released."""
    layered = pages.evict(held, counts, tokens, more)
    assert layered is not None
    pages.release(held)
    return layered


def lists(layered: Evicted) -> list[list[int]]:
    """The parts of each layer and head."""
    return [mine[:count] for mine, count in zip(layered.parts.tolist(), layered.counts.tolist(), strict=True)]


def parts(layered: Evicted) -> list[int]:
    return [part for mine in lists(layered) for part in mine]


def whole(pages: EvictedPages, part: int) -> int:
    """The whole page that a part is of: lanes of a page come one after the other, then pages, then layers."""
    return part // pages.lanes % pages.count


def cut(pages: EvictedPages, *requests: Evicted) -> set[int]:
    """Whole pages of which the requests have parts."""
    return {whole(pages, part) for layered in requests for part in parts(layered)}


def free_parts(pages: EvictedPages, *requests: Evicted) -> int:
    """Parts that are free of pages that are cut, if the requests are all that have any."""
    return pages.parts * len(cut(pages, *requests)) - sum(len(parts(layered)) for layered in requests)


def told(pages: EvictedPages) -> tuple:
    """A copy's counts, and the number of parts it can give."""
    most, trial = 0, copy.deepcopy(pages)
    while trial.evict(trial.admit([]), [1] + [0] * (pages.parts - 1), 1, 0):
        most += 1
    return pages.free, pages.unused, pages.cached, pages.shared, most


def test_what_stays_takes_a_page_of_any_layer_and_gives_whole_ones_back():
    pages = EvictedPages(8, SIZE, LAYERS)
    held = admitted(pages, tokens(12))
    layered = pages.evict(held, [1, 4, 5], 12, 0)
    assert layered is not None
    assert [len(mine) for mine in lists(layered)] == [1, 1, 2]
    assert layered.dropped.tolist() == [11, 8, 7]
    assert layered.dropped.dtype == np.int32
    assert (len(held.pages), pages.free) == (3, 3)  # the old pages are held still
    pages.release(held)
    assert (pages.free, pages.own(layered), pages.free_parts) == (6, 4, 6 * LAYERS + 2)
    assert pages.parts * pages.count > max(parts(layered))
    pages.release(layered)
    pages.release(layered)
    assert pages.free == pages.count


def test_layers_of_all_requests_fill_what_is_cut_before_another_page_is():
    pages = EvictedPages(8, SIZE, LAYERS)
    requests = [evicted(pages, admitted(pages, tokens(8, 100 * i)), counts, 8) for i, counts in enumerate(([1, 4, 5], [8, 0, 4]))]
    every = [part for layered in requests for part in parts(layered)]
    assert len(set(every)) == len(every) == 7
    assert len(cut(pages, *requests)) == 3
    assert pages.free == 5
    more = evicted(pages, admitted(pages, tokens(4, 300)), [1, 1, 0], 4)
    assert len(cut(pages, *requests, more)) == 3
    assert free_parts(pages, *requests, more) == 0


def test_a_page_is_whole_again_once_the_last_of_its_parts_is_free_whoever_held_it():
    pages = EvictedPages(1, SIZE, LAYERS)
    requests = [pages.evict(pages.admit([]), counts, 4, 0) for counts in ([1, 0, 0], [0, 1, 0], [0, 0, 1])]
    assert (pages.free, free_parts(pages, *requests)) == (0, 0)
    for i, layered in enumerate(requests):
        assert pages.own(layered) == 1
        pages.release(layered)
        assert pages.free == (i == 2)
    assert len(admitted(pages, tokens(4)).pages) == 1


def test_where_too_few_are_free_nothing_changes():
    pages = EvictedPages(6, SIZE, LAYERS)
    pages.release(admitted(pages, tokens(4, 100)))  # idle: this page counts as free
    held = admitted(pages, tokens(12))
    one = evicted(pages, admitted(pages, tokens(4, 200)), [1, 0, 0], 4)
    before = told(pages), list(held.pages)
    assert before[0] == (2, 0, 5, 0, 8)
    assert pages.evict(held, [12, 12, 12], 12, 0) is None
    assert pages.evict(held, [12, 12, 5], 12, 1) is None
    assert not pages.extend(one, 4 * SIZE + 3)
    assert (told(pages), held.pages) == before
    assert [len(mine) for mine in lists(one)] == [1, 0, 0]
    assert pages.match(tokens(5, 100)).pages
    layered = pages.evict(held, [12, 12, 8], 12, 0)  # all there is, at the cost of what was known
    assert layered is not None
    assert (pages.free, free_parts(pages, one, layered)) == (0, 0)
    assert not pages.match(tokens(5, 100)).pages
    assert pages.match(tokens(13)).pages == tuple(held.pages)


def test_the_last_free_parts_and_pages_are_enough_for_just_as_many():
    for count in range(1, 40):
        pages = EvictedPages(4, SIZE, LAYERS)
        layered = pages.evict(pages.admit([]), [1, 1, 0], 1, 0)
        assert pages.extend(pages.admit([]), 4 * (count % 3))
        free = free_parts(pages, layered) + pages.parts * pages.free
        found = pages.evict(pages.admit([]), [SIZE * count, 0, 0], SIZE * count, 0)
        assert (found is not None) == (count <= free)


def test_each_layer_is_extended_by_what_it_lacks():
    pages = EvictedPages(8, SIZE, LAYERS)
    layered = evicted(pages, admitted(pages, tokens(12)), [3, 8, 12], 12)
    before = lists(layered)
    for all_tokens, counts in (
        (12, [1, 2, 3]),
        (13, [1, 3, 4]),
        (14, [2, 3, 4]),
        (16, [2, 3, 4]),
        (17, [2, 4, 5]),
        (3, [2, 4, 5]),
    ):
        assert pages.extend(layered, all_tokens)
        assert [len(mine) for mine in lists(layered)] == counts
    assert [mine[: len(old)] for mine, old in zip(lists(layered), before, strict=True)] == before
    assert len(set(parts(layered))) == 11
    assert layered.dropped.tolist() == [9, 4, 0]


def test_room_is_that_of_the_layer_that_has_least():
    pages = EvictedPages(16, SIZE, LAYERS)
    layered = evicted(pages, admitted(pages, tokens(12)), [3, 6, 9], 12)
    assert layered.room(SIZE, 12) == 1
    assert layered.room(SIZE, 13) == 0
    for held in range(12, 40):
        while layered.room(SIZE, held) < 0:
            assert pages.extend(layered, held)
        room, before = layered.room(SIZE, held), len(parts(layered))
        assert type(room) is int
        trial, mine = copy.deepcopy((pages, layered))
        assert trial.extend(mine, held + room)
        assert len(parts(mine)) == before
        assert trial.extend(mine, held + room + 1)
        assert len(parts(mine)) > before


@pytest.mark.parametrize("more", [0, 1, 4, 7])
def test_what_was_asked_for_behind_the_tokens_has_room(more):
    pages = EvictedPages(16, SIZE, LAYERS)
    layered = evicted(pages, admitted(pages, tokens(12)), [4, 1, 11], 12, more)
    assert [len(mine) for mine in lists(layered)] == [-(-(count + more) // SIZE) for count in (4, 1, 11)]
    assert layered.dropped.tolist() == [8, 11, 1]
    assert more <= layered.room(SIZE, 12) < more + SIZE


def test_tables_count_pages_from_each_layers_first():
    pages = EvictedPages(8, SIZE, LAYERS)
    plain = admitted(pages, tokens(10, 100))
    layered = evicted(pages, admitted(pages, tokens(12)), [3, 8, 12], 12)
    for held, width in ((plain, 3), (plain, 5), (layered, 3), (layered, 6)):
        table = pages.table(held, width)
        assert (table.shape, table.dtype) == ((LAYERS, 1, width), np.int32)
        for number, entries in enumerate(table[:, 0].tolist()):
            own = lists(layered)[number] if held is layered else [page + number * pages.count for page in plain.pages]
            assert [entry + number * pages.count for entry in entries[: len(own)]] == own
    assert (pages.table(pages.admit([]), 2) == 0).all()


def test_where_heads_have_lanes_their_parts_are_counted_from_the_layers_first():
    pages = EvictedPages(8, SIZE, 2, lanes=3)
    plain = admitted(pages, tokens(10, 100))
    for number, page in itertools.product(range(2), range(3)):
        expected = [3 * plain.pages[page] + lane for lane in range(3)]
        assert pages.table(plain, 5)[number, :, page].tolist() == expected
    held = admitted(pages, tokens(12))
    layered = evicted(pages, held, [3, 8, 12, 1, 0, 5], 12)
    assert pages.own(layered) == len(set(parts(layered))) == 1 + 2 + 3 + 1 + 2
    assert layered.dropped.tolist() == [9, 4, 0, 11, 12, 7]
    table = pages.table(layered, 3)
    for number, lane in np.ndindex(2, 3):
        mine = lists(layered)[3 * number + lane]
        assert (table[number, lane, : len(mine)] + number * 8 * 3).tolist() == mine
    assert len(cut(pages, layered)) == 2  # of six parts each
    pages.release(layered)
    assert pages.free == pages.count - 3


def test_what_has_dropped_tokens_is_nobodys_beginning():
    pages = EvictedPages(8, SIZE, LAYERS)
    layered = evicted(pages, pages.admit(tokens(12)), [4, 8, 12], 12)
    assert pages.extend(layered, 16)
    pages.wrote(layered, tokens(16))
    assert (pages.match(tokens(17)), pages.cached) == (((), False, 0, 0), 0)
    other = pages.admit(tokens(12))
    assert (other.shared, pages.match(tokens(12)).blocked) == (0, True)
    pages.wrote(layered, tokens(16))
    assert (pages.match(tokens(12)), pages.cached) == (((), True, 0, 0), 0)


def test_a_prompt_is_known_whose_request_has_dropped_some_of_it():
    pages = EvictedPages(8, SIZE, LAYERS)
    held = admitted(pages, tokens(10))
    known, whole = tuple(held.pages[:2]), set(held.pages)
    layered = pages.evict(held, [4, 4, 5], 10, 0)
    assert layered is not None
    assert not cut(pages, layered) & whole
    assert pages.match(tokens(10)) == (known, False, 2, 0)
    pages.release(held)
    assert pages.match(tokens(10)) == (known, False, 0, 0)
    assert (pages.cached, pages.free) == (2, 6)
    other = pages.admit(tokens(10))
    assert (tuple(other.pages[:2]), other.shared) == (known, 2)
    assert not cut(pages, layered) & set(other.pages)
    pages.release(layered)
    pages.release(other)
    assert pages.free == pages.count
    assert pages.match(tokens(10)).pages == known


def test_a_beginning_that_others_hold_stays_theirs():
    pages = EvictedPages(8, SIZE, LAYERS)
    first, second = admitted(pages, tokens(9)), admitted(pages, tokens(9))
    assert (second.shared, pages.free) == (2, 4)
    layered = evicted(pages, first, [9, 4, 1], 9)
    assert (pages.free, pages.own(second), pages.own(layered)) == (3, 3 * LAYERS, 5)
    assert not cut(pages, layered) & set(second.pages)
    again = evicted(pages, layered, [1, 1, 1], 9)
    assert pages.own(again) == LAYERS
    assert len(cut(pages, again)) == 5 - pages.free
    assert pages.match(tokens(9)).pages == tuple(second.pages[:2])


@dataclass(eq=False)
class Request:
    held: Held
    text: list[int]
    written: int
    kept: list[list[int]]  # by layer: of the tokens that are written, those not dropped

    @property
    def pages(self) -> list[list[int]]:
        """Of each layer, or once for all."""
        return lists(self.held) if isinstance(self.held, Evicted) else [self.held.pages]

    @property
    def dropped(self) -> list[int]:
        return self.held.dropped.tolist() if isinstance(self.held, Evicted) else [0]


@dataclass
class Model:
    """Does all that EvictedPages does, and writes to a pool as a device would: a dictionary from slots to tokens.

    Each request must find its own tokens there, and so must who takes a beginning from the index."""

    pages: EvictedPages
    requests: list[Request] = field(default_factory=list)
    slots: dict[tuple[int, int], int] = field(default_factory=dict)  # (page of the whole pool, slot) -> token
    texts: deque[list[int]] = field(default_factory=lambda: deque(maxlen=12))
    seen: Counter = field(default_factory=Counter)

    def holders(self) -> Counter:
        return Counter(page for request in self.requests for page in request.held.pages)

    def every_part(self) -> list[int]:
        return [part for request in self.requests if isinstance(request.held, Evicted) for part in parts(request.held)]

    def used(self) -> Counter:
        """Parts in use of each page that is cut."""
        return Counter(whole(self.pages, part) for part in self.every_part())

    def available(self) -> int:
        """Single pages that can be had."""
        used = self.used()
        return self.pages.parts * (self.pages.free + len(used)) - used.total()

    def own(self, held: Held, holders: Counter, used: Counter) -> int:
        if not isinstance(held, Evicted):
            return sum(holders[page] == 1 for page in held.pages)
        mine = Counter(whole(self.pages, part) for part in parts(held))
        return sum(used[page] == count for page, count in mine.items())

    def addresses(self, request: Request) -> list[list[tuple[int, int]]]:
        """The slots of each layer's kept tokens."""
        table = self.pages.table(request.held, max(map(len, request.pages))).tolist()
        tables = [(entries, first) for lanes, first in zip(table, self.firsts, strict=True) for entries in lanes]
        return [
            [(entries[at // SIZE] + first, at % SIZE) for at in range(len(kept))]
            for (entries, first), kept in zip(tables, request.kept, strict=True)
        ]

    @property
    def firsts(self) -> range:
        """The first part of each layer."""
        each = self.pages.count * self.pages.lanes
        return range(0, self.pages.layers * each, each)

    def put(self, request: Request, starts: list[int]) -> None:
        """Writes a request's kept tokens, from the place `starts` of each layer on."""
        for slots, kept, start in zip(self.addresses(request), request.kept, starts, strict=True):
            self.slots.update(zip(slots[start:], kept[start:], strict=True))

    def admit(self, text: list[int], use_index: bool) -> None:
        match, free = self.pages.match(text, use_index), self.pages.free
        new, idle = pages_for(len(text)) - len(match.pages), len(match.pages) - match.taken
        if new > free - idle:
            with pytest.raises(OutOfPages):
                self.pages.admit(text, use_index)
            self.seen["refused"] += 1
            return
        held = self.pages.admit(text, use_index)
        assert held.pages[: held.shared] == list(match.pages)
        assert self.pages.free == free - idle - new
        shared = held.shared * SIZE
        self.requests.append(Request(held, list(text), shared, [text[:shared] for _ in range(self.pages.parts)]))
        self.texts.append(self.requests[-1].text)
        self.seen["shared" if held.shared else "new"] += 1

    def write(self, request: Request, count: int) -> None:
        new = request.text[request.written : request.written + count]
        before, cached = [len(kept) for kept in request.kept], self.pages.cached
        request.kept = [kept + new for kept in request.kept]
        request.written += len(new)
        self.put(request, before)
        self.pages.wrote(request.held, request.text[: request.written])
        if isinstance(request.held, Evicted):
            assert self.pages.cached == cached
            self.seen["written where some are dropped"] += bool(new)

    def extend(self, request: Request, text: list[int]) -> None:
        before, available, free, all_tokens = copy.deepcopy(request.pages), self.available(), self.pages.free, request.text + text
        need = [pages_for(len(all_tokens) - gone) for gone in request.dropped]
        lack = [max(0, n - len(mine)) for n, mine in zip(need, before, strict=True)]
        is_layered = isinstance(request.held, Evicted)
        fits = sum(lack) <= (available if is_layered else free)
        assert self.pages.extend(request.held, len(all_tokens)) == fits
        assert [mine[: len(old)] for mine, old in zip(request.pages, before, strict=True)] == before
        assert [len(mine) - len(old) for mine, old in zip(request.pages, before, strict=True)] == [fits * n for n in lack]
        if fits:
            request.text += text
        else:
            assert (self.pages.free, self.available()) == (free, available)
        self.seen["extended" if fits else "not extended"] += is_layered

    def evict(self, request: Request, choose: random.Random) -> None:
        """Keeps some of each layer's tokens. The old pages are released at once, or go on as those of a request of their own."""
        kept = [sorted(choose.sample(range(len(mine)), choose.randint(0, len(mine)))) for mine in request.kept]
        before, available, free, more = (
            copy.deepcopy(request.pages),
            self.available(),
            self.pages.free,
            choose.choice([0, 0, 1, 5]),
        )
        need = [pages_for(len(mine) + more) for mine in kept]
        new = self.pages.evict(request.held, [len(mine) for mine in kept], request.written, more)
        assert request.pages == before
        assert (new is not None) == (sum(need) <= available)
        if new is None:
            assert (self.pages.free, self.available()) == (free, available)
            self.seen["not evicted"] += 1
            return
        moved = [[mine[at] for at in some] for mine, some in zip(request.kept, kept, strict=True)]
        assert new.dropped.tolist() == [request.written - len(mine) for mine in moved]
        assert [len(mine) for mine in lists(new)] == need
        assert new.room(SIZE, request.written) >= more
        self.requests.append(Request(new, request.text[: request.written], request.written, moved))
        self.put(self.requests[-1], [0] * self.pages.parts)
        self.seen["evicted again" if isinstance(request.held, Evicted) else "evicted"] += 1
        if choose.random() < 0.8:
            self.release(request)

    def release(self, request: Request) -> None:
        own, free = self.own(request.held, self.holders(), self.used()), self.pages.free
        for _ in range(2):
            self.pages.release(request.held)
            assert self.pages.free == free + own
        self.requests.remove(request)

    def check(self) -> None:
        holders, used, every = self.holders(), self.used(), self.every_part()
        assert len(set(every)) == len(every)
        assert set(every) <= set(range(self.pages.parts * self.pages.count))
        assert not holders.keys() & used.keys()
        assert self.pages.free == self.pages.count - len(holders) - len(used)
        assert self.pages.shared == sum(count > 1 for count in holders.values())
        for request in self.requests:
            whole = self.own(request.held, holders, used)
            parts_of = sum(map(len, request.pages)) if isinstance(request.held, Evicted) else self.pages.parts * whole
            assert self.pages.own(request.held) == parts_of
            assert [[self.slots[at] for at in slots] for slots in self.addresses(request)] == request.kept
            if isinstance(request.held, Evicted):
                rooms = [len(mine) * SIZE - len(kept) for mine, kept in zip(request.pages, request.kept, strict=True)]
                assert request.held.room(SIZE, request.written) == min(rooms)

    def check_index(self) -> None:
        """A text's match in the index holds that text in all layers, in whole pages, whoever holds them."""
        used = self.used()
        for text in self.texts:
            found = self.pages.match(text).pages
            assert not used.keys() & set(found)
            for first, lane in itertools.product(self.firsts, range(self.pages.lanes)):
                starts = [first + page * self.pages.lanes + lane for page in found]
                written = [self.slots[part, slot] for part in starts for slot in range(SIZE)]
                assert written == text[: len(written)]

    def check_own(self) -> None:
        """`own` is what becomes free: not counted but seen, in a copy."""
        helds = [request.held for request in self.requests]
        for at in range(len(helds)):
            pages, copied = copy.deepcopy((self.pages, helds))
            own, free = pages.own(copied[at]), pages.free_parts
            pages.release(copied[at])
            assert pages.free_parts == free + own


def pages_for(tokens: int) -> int:
    return -(-max(tokens, 0) // SIZE)


def random_text(choose: random.Random, longest: int) -> list[int]:
    """Of two pages' contents, so that many begin alike."""
    return [choose.randrange(2) if at % SIZE == 0 else 7 for at in range(choose.randint(1, longest))]


def random_step(model: Model, choose: random.Random) -> None:
    action = choose.random()
    if action < 0.2 or not model.requests:
        model.admit(random_text(choose, 5 * SIZE), use_index=choose.random() < 0.9)
        return
    request = choose.choice(model.requests)
    if action < 0.5:
        model.write(request, choose.randint(1, 3 * SIZE))
    elif action < 0.65 and request.written == len(request.text):
        model.extend(request, random_text(choose, 2 * SIZE))
    elif action < 0.85 and request.written:
        model.evict(request, choose)
    elif action > 0.88:
        model.release(request)


@pytest.mark.deep
@pytest.mark.parametrize(
    ("layers", "lanes", "steps", "count"), [(1, 1, 400, 10), (3, 1, 1500, 16), (7, 1, 500, 12), (2, 3, 600, 12)]
)
def test_random_steps_leave_every_request_its_tokens_and_the_index_its_beginnings(layers, lanes, steps, count):
    choose, model = random.Random(layers), Model(EvictedPages(count, SIZE, layers, lanes))
    for turn in range(steps):
        random_step(model, choose)
        model.check()
        if turn % 5 == 0:
            model.check_index()
        if turn % 100 == 0:
            model.check_own()
    anew = {"new", "shared", "refused"}
    kinds = {"evicted", "evicted again", "not evicted", "extended", "not extended", "written where some are dropped"}
    assert all(model.seen[kind] >= 3 for kind in anew | kinds), model.seen
    for request in list(model.requests):
        model.release(request)
    model.check()
    assert model.pages.free == count
    every = model.pages.evict(model.pages.admit([]), [SIZE * count] * layers * lanes, SIZE * count, 0)
    assert every is not None
    assert len(set(parts(every))) == layers * lanes * count  # no part is left of what was cut
