"""Pages are free, held or idle, one writer each; the index knows their contents exactly."""

import itertools
import random
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mla_jax.base.errors import DoesNotFit
from mla_jax.engine.core.host_pages import START, chained
from mla_jax.engine.core.pages import Held, Node, OutOfPages, Pages

pytestmark = pytest.mark.once  # plain Python

SIZE = 4


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


def admitted(pages: Pages, prompt: list[int]) -> Held:
    """A request whose prompt is written."""
    held = pages.admit(prompt)
    pages.wrote(held, prompt)
    return held


def test_a_request_gets_pages_for_all_its_tokens_and_gives_them_back():
    pages = Pages(8, SIZE)
    held = pages.admit(tokens(9))
    assert len(set(held.pages)) == 3
    assert pages.free == 5
    pages.release(held)
    pages.release(held)
    assert pages.free == 8


def test_a_second_request_shares_the_full_pages_of_the_first():
    pages = Pages(8, SIZE)
    first = admitted(pages, tokens(10))
    second = pages.admit([*tokens(8), 98, 99])
    assert second.pages[:2] == first.pages[:2]
    assert second.shared == 2
    assert second.pages[2] != first.pages[2]
    assert (pages.shared, pages.cached, pages.free) == (2, 2, 4)
    assert pages.own(first) == pages.own(second) == 1
    pages.release(first)
    assert pages.own(second) == 3
    assert (pages.shared, pages.free) == (0, 5)


def test_the_last_token_is_never_taken_from_the_index():
    pages = Pages(8, SIZE)
    first = admitted(pages, tokens(8))
    assert pages.match(tokens(8)).pages == tuple(first.pages[:1])
    assert pages.match(tokens(9)).pages == tuple(first.pages)
    assert pages.match([]).pages == ()


def test_a_page_that_is_about_to_be_written_blocks_and_is_not_matched():
    pages = Pages(8, SIZE)
    first = pages.admit(tokens(10))
    assert pages.match(tokens(10)) == ((), True, 0, 0)
    assert not pages.match(tokens(4)).blocked  # its one page would be computed anew anyway
    pages.wrote(first, tokens(7))
    assert pages.match(tokens(10)) == (tuple(first.pages[:1]), True, 1, 0)
    pages.wrote(first, tokens(8))
    assert pages.match(tokens(10)) == (tuple(first.pages[:2]), False, 2, 0)


def test_a_request_that_leaves_takes_its_promises_with_it():
    pages = Pages(8, SIZE)
    first = pages.admit(tokens(12))
    pages.wrote(first, tokens(4))
    page = first.pages[0]
    pages.release(first)
    assert pages.match(tokens(12)) == ((page,), False, 0, 0)
    assert (pages.free, pages.cached) == (8, 1)


def test_who_does_not_wait_for_a_promised_page_keeps_its_own_to_itself():
    pages = Pages(8, SIZE)
    first = pages.admit(tokens(10))
    second = pages.admit(tokens(10))
    assert not set(first.pages) & set(second.pages)
    pages.wrote(second, tokens(10))
    assert pages.match(tokens(10)) == ((), True, 0, 0)
    pages.wrote(first, tokens(10))
    assert pages.match(tokens(10)).pages == tuple(first.pages[:2])
    pages.release(second)
    assert pages.free == 5


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation():
    pages = Pages(8, SIZE)
    held = admitted(pages, tokens(6))
    assert pages.extend(held, 13)
    pages.wrote(held, tokens(13))
    pages.wrote(held, tokens(13))
    kept = tuple(held.pages[:3])
    pages.release(held)
    assert pages.match(tokens(20)) == (kept, False, 0, 0)


def test_a_page_computed_anew_takes_the_place_of_its_idle_equal():
    """A prompt that is cached to its last token computes its last page again; what follows is found all the same."""
    pages = Pages(8, SIZE)
    first = admitted(pages, tokens(8))
    pages.release(first)
    second = admitted(pages, tokens(8))
    assert (second.shared, pages.cached, pages.free) == (1, 2, 6)
    pages.extend(second, 12)
    pages.wrote(second, tokens(12))
    assert pages.match(tokens(13)).pages == tuple(second.pages)


def test_a_page_computed_anew_stays_private_while_its_equal_is_held():
    pages = Pages(8, SIZE)
    first, second = admitted(pages, tokens(8)), admitted(pages, tokens(8))
    assert first.pages[1] != second.pages[1]
    pages.extend(second, 12)
    pages.wrote(second, tokens(12))
    assert pages.match(tokens(13)).pages == tuple(first.pages)
    pages.release(second)
    assert pages.free == 6


def test_forks_share_all_full_pages():
    pages = Pages(8, SIZE)
    forks = [admitted(pages, tokens(10)) for _ in range(3)]
    assert len({tuple(fork.pages[:2]) for fork in forks}) == 1
    assert len({fork.pages[2] for fork in forks}) == 3
    assert (pages.free, pages.shared) == (3, 2)


def test_the_least_recently_used_is_forgotten_first_and_ends_before_beginnings():
    pages = Pages(6, SIZE)
    old, new = admitted(pages, tokens(12)), admitted(pages, tokens(12, 50))
    pages.release(old)
    pages.release(new)
    pages.release(pages.admit(tokens(5)))  # the oldest beginning is used again
    pages.admit(tokens(12, 100))
    assert len(pages.match(tokens(13)).pages) == 1
    assert len(pages.match(tokens(13, 50)).pages) == 2


def test_too_many_pages_are_refused_before_anything_changes():
    pages = Pages(4, SIZE)
    pages.release(admitted(pages, tokens(8)))
    held = pages.admit(tokens(8, 50))
    before = pages.match(tokens(9))
    with pytest.raises(OutOfPages, match=r"2 pages of 4 tokens are needed, 1 of 4 are free"):
        pages.admit([*tokens(5), *tokens(7, 70)])
    assert not pages.extend(held, 17)
    assert issubclass(OutOfPages, DoesNotFit)
    assert (pages.match(tokens(9)), pages.free, len(held.pages)) == (before, 2, 2)
    assert pages.extend(held, 16)
    assert (pages.free, pages.cached) == (0, 0)


def test_a_request_may_keep_out_of_the_index():
    pages = Pages(8, SIZE)
    first = pages.admit(tokens(10), use_index=False)
    pages.wrote(first, tokens(10))
    assert pages.match(tokens(10)) == ((), False, 0, 0)
    second = admitted(pages, tokens(10))
    assert pages.match(tokens(10), use_index=False).pages == ()
    assert pages.match(tokens(10)).pages == tuple(second.pages[:2])


def test_without_an_index_nothing_is_shared():
    pages = Pages(8, SIZE, index=False)
    first, second = admitted(pages, tokens(9)), admitted(pages, tokens(9))
    assert not set(first.pages) & set(second.pages)
    assert pages.cached == pages.shared == 0


def test_tokens_other_than_those_promised_are_a_fault():
    pages = Pages(8, SIZE)
    held = pages.admit(tokens(9))
    with pytest.raises(AssertionError, match="promised"):
        pages.wrote(held, tokens(9, 1))


def test_a_reused_page_is_not_taken_for_what_it_was():
    """The child of a forgotten page must not be found behind the page's next content."""
    pages = Pages(2, 1)
    pages.release(admitted(pages, [1, 2]))
    other = admitted(pages, [3])
    assert pages.match([3, 2, 9]).pages == tuple(other.pages)


def test_a_page_is_known_together_with_the_token_that_it_looks_ahead_to():
    pages = Pages(8, SIZE, ahead=1)
    first = admitted(pages, [*tokens(4), 50, 51])
    assert pages.match([*tokens(4), 60, 51]) == ((), False, 0, 0)
    assert pages.match([*tokens(4), 50, 61]).pages == (first.pages[0],)
    second = admitted(pages, [*tokens(4), 60, 51])
    assert second.pages[0] != first.pages[0]
    assert (second.shared, pages.cached, pages.shared) == (0, 2, 0)
    assert pages.match([*tokens(4), 60, 61]).pages == (second.pages[0],)
    pages.release(first)
    pages.release(second)
    assert (pages.free, pages.cached) == (8, 2)


def test_pages_that_look_ahead_differ_from_the_first_that_another_token_comes_after():
    pages = Pages(8, SIZE, ahead=1)
    first = admitted(pages, tokens(13))
    second = admitted(pages, [*tokens(8), 50, *tokens(4, 9)])
    assert second.pages[0] == first.pages[0]
    assert not set(second.pages[1:]) & set(first.pages)
    assert (second.shared, pages.shared, pages.cached) == (1, 1, 5)


def test_a_page_is_not_written_before_the_token_that_it_looks_ahead_to():
    pages = Pages(8, SIZE, ahead=1)
    first = pages.admit(tokens(9))
    pages.wrote(first, tokens(4))
    assert (pages.match(tokens(9)), pages.cached) == (((), True, 0, 0), 0)
    pages.wrote(first, tokens(5))
    assert (pages.match(tokens(9)), pages.cached) == (((first.pages[0],), True, 1, 0), 1)
    pages.wrote(first, tokens(8))
    assert pages.match(tokens(9)) == ((first.pages[0],), True, 1, 0)
    pages.wrote(first, tokens(9))
    assert (pages.match(tokens(9)), pages.cached) == ((tuple(first.pages[:2]), False, 2, 0), 2)


def test_a_page_at_whose_end_a_prompt_ends_is_promised_to_nobody_and_known_once_a_token_follows():
    pages = Pages(8, SIZE, ahead=1)
    first = admitted(pages, tokens(8))
    assert pages.match([*tokens(8), 50, 51]) == ((first.pages[0],), False, 1, 0)  # nobody waits for the second page
    assert pages.cached == 1
    pages.extend(first, 9)
    pages.wrote(first, tokens(9))
    assert pages.match([*tokens(8), 50, 51]).pages == (first.pages[0],)
    assert pages.match(tokens(10)) == (tuple(first.pages[:2]), False, 2, 0)
    assert pages.match(tokens(8)).pages == (first.pages[0],)  # what comes after its last token is not known yet


def test_requests_that_go_on_in_two_ways_behind_equal_prompts_keep_a_page_each():
    pages = Pages(8, SIZE, ahead=1)
    one, other = admitted(pages, tokens(8)), admitted(pages, tokens(8))
    assert (other.shared, pages.shared) == (1, 1)
    for held, token in ((one, 50), (other, 60)):
        pages.extend(held, 9)
        pages.wrote(held, [*tokens(8), token])
    assert pages.match([*tokens(8), 50, 1]).pages == tuple(one.pages[:2])
    assert pages.match([*tokens(8), 60, 1]).pages == tuple(other.pages[:2])
    assert pages.cached == 3


def test_a_token_other_than_the_one_that_a_page_was_promised_with_is_a_fault():
    pages = Pages(8, SIZE, ahead=1)
    held = pages.admit(tokens(9))
    with pytest.raises(AssertionError, match="promised"):
        pages.wrote(held, [*tokens(4), 50])


def test_what_the_index_forgets_comes_back_from_the_tier_behind_what_it_has():
    shelf = Shelf(8)
    pages = Pages(4, SIZE, tier=shelf)
    pages.release(admitted(pages, tokens(13)))
    other = admitted(pages, tokens(8, 100))  # takes the unused page, and the last of those that are known
    assert len(shelf.forgotten) == 1
    shelf.settle({(page, slot): [page, slot] for page in range(4) for slot in range(SIZE)})
    pages.release(other)
    first, second = pages.match(tokens(13)).pages
    assert pages.match(tokens(13)) == ((first, second), False, 0, 1)
    held = pages.admit(tokens(13))
    assert (held.pages[:2], held.shared, len(shelf.asked)) == ([first, second], 3, 1)
    assert shelf.asked[0][1] == held.pages[2]
    assert pages.match(tokens(13)) == (tuple(held.pages[:3]), False, 3, 0)  # at once: its contents come before it is read
    assert pages.free == 0


def test_a_request_that_keeps_out_of_the_index_takes_nothing_from_the_tier():
    shelf = Shelf(8)
    pages = Pages(3, SIZE, tier=shelf)
    pages.release(admitted(pages, tokens(9)))
    pages.release(admitted(pages, tokens(9, 100)))
    shelf.settle({(page, slot): [page, slot] for page in range(3) for slot in range(SIZE)})
    assert pages.match(tokens(9)).hosted == 2
    assert pages.match(tokens(9), use_index=False) == ((), False, 0, 0)
    assert pages.admit(tokens(9), use_index=False).shared == 0
    assert not shelf.asked


@pytest.mark.deep
def test_work_goes_with_the_request_not_with_the_pool():
    def seconds(count: int) -> float:
        pages, best = Pages(count, SIZE), float("inf")
        for first in range(count // 64):  # all idle
            pages.release(admitted(pages, tokens(64 * SIZE, 1000 * first)))
        for turn in range(5):
            start = time.process_time()
            for first in range(20):
                pages.release(admitted(pages, tokens(64, -1000 * (20 * turn + first + 1))))
            best = min(best, time.process_time() - start)
        return best

    assert seconds(32768) < 8 * seconds(512)


class Shelf:
    """A tier of `count` pages as a dictionary. Contents leave and enter pages once the operation on `pages` is over."""

    def __init__(self, count: int):
        self.count = count
        self.kept: OrderedDict[bytes, list[list[int]]] = OrderedDict()
        self.forgotten: list[tuple[bytes, int]] = []
        self.asked: list[tuple[bytes, int]] = []

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.kept

    def forget(self, digest: bytes, page: int) -> None:
        self.forgotten.append((digest, page))

    def ask(self, digest: bytes, page: int) -> None:
        self.asked.append((digest, page))

    def settle(self, content: dict[tuple[int, int], list[int]]) -> None:
        coming = [(page, self.kept[digest]) for digest, page in self.asked]
        for digest, page in self.forgotten:
            found = [content[page, slot] for slot in range(SIZE)]
            assert self.kept.setdefault(digest, found) == found
            self.kept.move_to_end(digest)
        while len(self.kept) > self.count:
            self.kept.popitem(last=False)
        for page, found in coming:
            content.update({(page, slot): tokens for slot, tokens in enumerate(found)})
        self.forgotten, self.asked = [], []


@dataclass(eq=False)
class Request:
    held: Held
    text: list[int]  # promised by its prompt, then generated
    indexed: bool
    written: int = 0
    full: int = 0  # pages that were looked at once full
    private: bool = False  # one of them was not taken into the index, so none after it is


@dataclass
class Entry:
    page: int
    writer: Request
    written: bool = False
    used: int = 0


@dataclass
class Model:
    """Does all that Pages does and checks it against a dictionary from whole beginnings to pages.

    A token's written content includes the tokens before it, on which it depends."""

    pages: Pages
    shelf: Shelf = field(default_factory=lambda: Shelf(0))  # the pages' tier, if they have one
    requests: list[Request] = field(default_factory=list)
    index: dict[tuple[int, ...], Entry] = field(default_factory=dict)
    content: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # what was written last: (page, slot) -> tokens
    clock: itertools.count = field(default_factory=itertools.count)
    seen: Counter = field(default_factory=Counter)
    matched: dict[tuple[int, ...], list[Node]] = field(default_factory=dict)  # of earlier matches, by text

    @property
    def ahead(self) -> int:
        return self.pages.ahead

    def holders(self) -> Counter:
        return Counter(page for request in self.requests for page in request.held.pages)

    def beginnings(self, text: list[int]) -> list[tuple[int, ...]]:
        return [tuple(text[: end + self.ahead]) for end in range(SIZE, len(text) - self.ahead + 1, SIZE)]

    def digest(self, beginning: tuple[int, ...]) -> bytes:
        digest = START
        for first in range(0, len(beginning) - self.ahead, SIZE):
            digest = chained(digest, beginning[first : first + SIZE + self.ahead])
        return digest

    def hosted(self, text: list[int], first: int) -> int:
        """Pages behind the first ones that are on the shelf."""
        ends = range((first + 1) * SIZE, len(text), SIZE)
        kept = (self.digest(tuple(text[: end + self.ahead])) in self.shelf for end in ends)
        return len(list(itertools.takewhile(bool, kept)))

    def expected(self, text: list[int]) -> tuple[tuple[int, ...], bool]:
        found = []
        for end in range(SIZE, len(text), SIZE):
            beginning = tuple(text[: end + self.ahead])
            entry = self.index.get(beginning)
            if entry is None or not entry.written:
                return tuple(found), entry is not None
            found.append(entry.page)
        return tuple(found), False

    def admit(self, text: list[int], indexed: bool) -> None:
        found, blocked = self.expected(text) if indexed else ((), False)
        holders = self.holders()
        hosted = self.hosted(text, len(found)) if indexed and not blocked else 0
        match = self.pages.match(text, indexed)
        earlier = self.matched.setdefault(tuple(text), [])
        assert self.pages.match(text, indexed, earlier) == match, "what is remembered differs from what is found anew"
        assert match == (found, blocked, sum(page in holders for page in found), hosted)
        self.reads(text, match.pages)
        new, idle = -(-len(text) // SIZE) - len(found), self.idle() - set(found)
        if new > len(idle) + len(self.unused()):
            with pytest.raises(OutOfPages):
                self.pages.admit(text, indexed)
            self.seen["refused"] += 1
            return
        unused = self.unused()
        held = self.pages.admit(text, indexed)
        known = len(found) + hosted
        assert (held.pages[: len(found)], held.shared) == (list(found), known)
        self.given(held.pages[len(found) :], idle, unused)
        self.reads(text, held.pages[:known])
        request = Request(held, list(text), indexed, written=known * SIZE, full=known)
        self.requests.append(request)
        self.seen["shared" if found else "blocked" if blocked else "new"] += 1
        self.seen["hosted"] += hosted
        for at, (beginning, page) in enumerate(zip(self.beginnings(text), held.pages, strict=False)):
            if not indexed or (beginning in self.index and page != self.index[beginning].page):
                break
            entry = self.index.setdefault(beginning, Entry(page, request))
            entry.written |= at < known

    def reads(self, text: list[int], pages: Sequence[int]) -> None:
        """The first pages of a prompt hold its tokens."""
        for at, page in enumerate(pages):
            wanted = [text[place : place + 1 + self.ahead] for place in range(at * SIZE, (at + 1) * SIZE)]
            assert [self.content[page, slot] for slot in range(SIZE)] == wanted

    def idle(self) -> set[int]:
        holders = self.holders()
        return {entry.page for entry in self.index.values() if entry.page not in holders}

    def unused(self) -> set[int]:
        return set(range(self.pages.count)) - set(self.holders()) - self.idle()

    def given(self, new: list[int], idle: set[int], unused: set[int]) -> None:
        """New pages come from those that nobody holds, unused ones first, then the least recently used."""
        assert len(new) == len(set(new))
        assert set(new) <= idle | unused
        forgotten = set(new) & idle
        if self.pages.tier is not None:
            beginnings = {entry.page: beginning for beginning, entry in self.index.items()}
            assert {(self.digest(beginnings[page]), page) for page in forgotten} == set(self.shelf.forgotten)
            self.shelf.settle(self.content)
        if not forgotten:
            return
        assert unused <= set(new)
        uses = {entry.page: entry.used for entry in self.index.values()}
        assert max(uses[page] for page in forgotten) <= min((uses[page] for page in idle - forgotten), default=1 << 60)
        self.index = {beginning: entry for beginning, entry in self.index.items() if entry.page not in forgotten}
        for beginning in self.index:
            is_first = len(beginning) == SIZE + self.ahead
            assert is_first or beginning[:-SIZE] in self.index, "a page was forgotten before those after it"
        self.seen["forgotten"] += len(forgotten)

    def extend(self, request: Request, text: list[int]) -> None:
        idle, unused, before = self.idle(), self.unused(), list(request.held.pages)
        fits = -(-len(request.text + text) // SIZE) - len(before) <= len(idle) + len(unused)
        assert self.pages.extend(request.held, len(request.text + text)) == fits
        assert request.held.pages[: len(before)] == before
        self.given(request.held.pages[len(before) :], idle, unused)
        if fits:
            request.text += text

    def write(self, request: Request, count: int) -> None:
        """The device writes the next tokens of a request; only it may see these pages."""
        end, holders = min(len(request.text), request.written + count), self.holders()
        cached = {entry.page for entry in self.index.values() if entry.written}
        for at in range(max(request.written - self.ahead, request.held.shared * SIZE), end):
            page = request.held.pages[at // SIZE]
            assert holders[page] == 1
            assert page not in cached
            self.content[page, at % SIZE] = request.text[at : min(at + 1 + self.ahead, end)]
        request.written = end
        self.pages.wrote(request.held, request.text[:end])
        if request.indexed:
            self.wrote(request, holders)

    def wrote(self, request: Request, holders: Counter) -> None:
        for at, beginning in enumerate(self.beginnings(request.text[: request.written])):
            if at < request.full or request.private:
                continue
            request.full, page = at + 1, request.held.pages[at]
            entry = self.index.setdefault(beginning, Entry(page, request))
            if entry.page != page and (not entry.written or holders[entry.page]):
                request.private = True
                self.seen["private"] += 1
                return
            self.seen["replaced"] += entry.page != page
            entry.page, entry.written = page, True

    def release(self, request: Request) -> None:
        """Pages that fall idle count as just used, ends before beginnings; promised pages are unknown again."""
        pages = set(request.held.pages)
        self.pages.release(request.held)
        self.requests.remove(request)
        holders = self.holders()
        for beginning in reversed(self.beginnings(request.text)):
            entry = self.index.get(beginning)
            if entry and not entry.written and entry.writer is request:
                del self.index[beginning]
            elif entry and entry.page in pages and entry.page not in holders:
                entry.used = next(self.clock)

    def check(self) -> None:
        """Every page is free, held or idle, and the counts say so."""
        holders = self.holders()
        assert self.pages.free == self.pages.count - len(holders)
        assert self.pages.cached == sum(entry.written for entry in self.index.values())
        assert self.pages.shared == sum(count > 1 for count in holders.values())
        assert len({entry.page for entry in self.index.values()}) == len(self.index)
        assert all(entry.written or holders[entry.page] == 1 for entry in self.index.values())
        for request in self.requests[-1:]:
            assert self.pages.own(request.held) == sum(holders[page] == 1 for page in request.held.pages)


def random_text(choose: random.Random, longest: int) -> list[int]:
    """Of two pages' contents, so that many begin alike."""
    return [choose.randrange(2) if at % SIZE == 0 else 7 for at in range(choose.randint(1, longest))]


def random_step(model: Model, choose: random.Random) -> None:
    action = choose.random()
    if action < 0.2 or not model.requests:
        model.admit(random_text(choose, 6 * SIZE), indexed=choose.random() < 0.9)
        return
    request = choose.choice(model.requests)
    if action < 0.6:
        model.write(request, choose.randint(1, 2 * SIZE))
    elif action < 0.85 and request.written == len(request.text):
        model.extend(request, random_text(choose, 2 * SIZE))
    elif action > 0.87:
        model.release(request)


def with_shelf(count: int, kept: int, ahead: int = 0) -> Model:
    """Pages with a tier."""
    shelf = Shelf(kept)
    return Model(Pages(count, SIZE, ahead=ahead, tier=shelf), shelf)


KINDS = {"new", "shared", "refused", "forgotten", "private", "replaced"}


def walk(model: Model, steps: int, least: int, rare: str = "blocked") -> None:
    """Random steps, in which everything that may happen happens so often at least."""
    choose, pages = random.Random(0), model.pages
    for _ in range(steps):
        random_step(model, choose)
        model.check()
    for request in list(model.requests):
        model.release(request)
    model.check()
    assert pages.free == pages.count
    assert all(model.seen[kind] >= least for kind in KINDS | {rare}), model.seen


@pytest.mark.deep
def test_a_hundred_thousand_random_steps_agree_with_a_dictionary():
    walk(Model(Pages(20, SIZE)), 100_000, least=100)


def test_random_steps_agree_with_a_dictionary_where_pages_look_ahead():
    walk(Model(Pages(20, SIZE, ahead=1)), 5_000, least=3)


@pytest.mark.deep
@pytest.mark.parametrize(("kept", "ahead"), [(3, 0), (12, 1), (1000, 0)])
def test_random_steps_agree_with_a_dictionary_where_a_tier_keeps_what_is_forgotten(kept, ahead):
    walk(with_shelf(20, kept, ahead), 5_000, least=3, rare="hosted")


class Machine(RuleBasedStateMachine):
    """The same steps as hypothesis chooses them: what fails is told in few steps."""

    texts = st.lists(st.sampled_from([[0, 7, 7, 7], [1, 7, 7, 7]]), max_size=4).map(lambda pages: list(itertools.chain(*pages)))
    ends = st.lists(st.just(7), max_size=3)
    ahead, kept = 0, 0

    def __init__(self):
        super().__init__()
        self.model = with_shelf(8, self.kept, self.ahead) if self.kept else Model(Pages(8, SIZE, ahead=self.ahead))

    def request(self, which: int) -> Request:
        return self.model.requests[which % len(self.model.requests)]

    @rule(text=texts, end=ends, indexed=st.booleans() | st.just(True))
    def admit(self, text, end, indexed):
        self.model.admit(text + end, indexed)

    @precondition(lambda self: self.model.requests)
    @rule(which=st.integers(0, 7), count=st.integers(1, 12))
    def write(self, which, count):
        self.model.write(self.request(which), count)

    @precondition(lambda self: self.model.requests)
    @rule(which=st.integers(0, 7), text=texts)
    def extend(self, which, text):
        if self.request(which).written == len(self.request(which).text):
            self.model.extend(self.request(which), text)

    @precondition(lambda self: self.model.requests)
    @rule(which=st.integers(0, 7))
    def release(self, which):
        self.model.release(self.request(which))

    @invariant()
    def the_counts_agree(self):
        self.model.check()


class LooksAhead(Machine):
    ahead = 1


class HasTier(Machine):
    kept = 5


TestMachine, TestLooksAhead, TestHasTier = Machine.TestCase, LooksAhead.TestCase, HasTier.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLooksAhead.settings = TestHasTier.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
