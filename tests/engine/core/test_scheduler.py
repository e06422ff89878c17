"""Every rule of the policy by example, then whole lives of requests on a pretended device."""

import dataclasses
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.engine.core.pages import Held, Pages
from mla_jax.engine.core.scheduler import Limits, Plan, Running, Waiting, plan

pytestmark = pytest.mark.once  # plain Python

LIMITS = Limits(rows=8, page_size=16, lines=(16, 64, 256, 1024))
EMPTY = Plan((), (), (), None, (), 0)


def waits(id: int, tokens: int = 10, **other) -> Waiting:
    return replace(Waiting(id, priority=0, arrival=id, tokens=tokens, shared=0, taken=0, left=100), **other)


def runs(id: int, held: int = 10, **other) -> Running:
    pages = -(-(held + other.get("unread", 0)) // 16)
    return replace(Running(id, priority=0, arrival=id, unread=0, held=held, pages=pages, own=pages, left=100), **other)


def unread(id: int, tokens: int, **other) -> Running:
    return runs(id, 0, unread=tokens, **other)


def test_nothing_to_do_is_an_empty_plan():
    assert plan([], [], 9, LIMITS) == EMPTY


def test_a_short_prompt_is_admitted_and_read_in_one_plan_then_decoded():
    assert plan([waits(7)], [], 9, LIMITS) == ((), (7,), ((7, 10),), 16, (), 0)
    assert plan([], [runs(7, 10)], 9, LIMITS) == ((), (), (), None, (7,), 32)


def test_rows_that_have_read_their_prompts_decode_one_step_in_the_pass_that_reads_others():
    found = plan([waits(7)], [runs(1), runs(2), unread(3, 90)], 99, LIMITS)
    assert (found.admit, found.read, found.decode, found.steps) == ((7,), ((3, 90), (7, 10)), (1, 2), 1)


def test_who_reads_along_waits_for_a_short_line_at_most():
    limits = dataclasses.replace(LIMITS, streamed_line=20)
    rows = [unread(3, 90), runs(1), runs(2)]
    assert plan([], rows, 99, limits).line == 256
    assert plan([], [*rows, runs(4, streams=True)], 99, limits).line == 16
    assert plan([], [*rows, runs(4, streams=True)], 99, dataclasses.replace(limits, streamed_line=3)).line == 16
    assert plan([], [*rows, runs(4, left=0, streams=True)], 99, limits).line == 256


def test_where_more_wait_for_their_first_token_than_read_along_lines_are_long():
    limits = dataclasses.replace(LIMITS, streamed_line=20)
    readers = [runs(number, streams=True) for number in range(2)]
    for behind, line in ((1, 16), (2, 16), (3, 256)):
        rows = [*readers, *(unread(5 + number, 90) for number in range(behind))]
        assert plan([], rows, 99, limits).line == line


def test_requests_start_by_priority_then_by_arrival_in_whatever_order_they_are_given():
    requests = [waits(1, priority=1), waits(3), waits(2), waits(4, priority=-1)]
    for order in (requests, requests[::-1]):
        assert plan(order, [], 99, LIMITS).admit == (4, 2, 3, 1)


def test_no_more_start_than_there_are_rows():
    assert plan([waits(8), waits(9)], [runs(i) for i in range(7)], 99, LIMITS).admit == (8,)


def test_one_that_does_not_fit_lets_nobody_pass():
    assert plan([waits(1, 100), waits(2)], [], 6, LIMITS).admit == ()
    assert plan([waits(1, 100), waits(2)], [], 8, LIMITS).admit == (1, 2)


def test_one_that_waits_for_pages_of_another_is_passed():
    assert plan([waits(1, blocked=True), waits(2)], [], 9, LIMITS).admit == (2,)


def test_pages_that_others_hold_already_cost_nothing_and_idle_ones_do():
    held_by_others = waits(1, 100, shared=6, taken=6)
    assert plan([held_by_others], [], 1, LIMITS)[1:3] == ((1,), ((1, 4),))
    assert plan([held_by_others], [], 0, LIMITS).admit == ()
    idle = replace(held_by_others, taken=0)
    assert plan([idle], [], 6, LIMITS).admit == ()
    assert plan([idle], [], 7, LIMITS)[1:3] == ((1,), ((1, 4),))


def test_a_prompt_that_fills_its_pages_needs_one_more_for_its_first_token_if_it_is_to_be_decoded():
    assert plan([waits(1, 32)], [], 2, LIMITS).admit == ()
    assert plan([waits(1, 32)], [], 3, LIMITS).admit == (1,)
    assert plan([waits(1, 32, left=1)], [], 2, LIMITS) == ((), (1,), ((1, 32),), 64, (), 0)


def test_pages_for_what_running_rows_decode_next_are_set_aside():
    assert plan([waits(9)], [runs(1, 16), runs(2, 10)], 4, LIMITS).admit == ()  # 2 pages each for 32 steps
    assert plan([waits(9)], [runs(1, 16), runs(2, 10)], 5, LIMITS).admit == (9,)
    assert plan([waits(9)], [unread(1, 16)], 2, LIMITS).admit == ()  # and once it is read
    assert plan([waits(9)], [runs(1, 16), runs(2, left=0, streams=True)], 2, LIMITS).admit == ()


def test_several_short_prompts_are_read_together_in_one_line():
    found = plan([], [unread(i, 12) for i in range(7)], 99, LIMITS)
    assert (found.read, found.line) == (tuple((i, 12) for i in range(7)), 256)
    cheap = replace(LIMITS, dispatch=8)  # 64 of 84 tokens now, and the rest in a line of its own
    found = plan([], [unread(i, 12) for i in range(7)], 99, cheap)
    assert (found.read, found.line) == (((0, 12), (1, 12), (2, 12), (3, 12), (4, 12), (5, 4)), 64)
    assert plan([], [unread(1, 65)], 99, LIMITS).line == 256  # 512 in all, two lines of 64 and 16 would cost 592


def test_a_long_prompt_takes_the_longest_line():
    found = plan([], [unread(1, 5000), unread(2, 12)], 999, LIMITS)
    assert (found.read, found.line, found.decode) == (((1, 1024),), 1024, ())


def test_the_rest_of_a_prompt_takes_a_short_line_unless_others_fill_a_longer_one():
    assert plan([], [runs(1, 1024, unread=3)], 999, LIMITS).line == 16
    found = plan([], [runs(1, 1024, unread=3), unread(2, 2000)], 999, LIMITS)
    assert (found.read, found.line) == (((1, 3), (2, 1021)), 1024)


def test_a_line_has_room_for_so_many_pieces():
    found = plan([], [unread(i, 12) for i in range(7)], 99, replace(LIMITS, pieces=3))
    assert found.read == ((0, 12), (1, 12), (2, 12))


def test_prompts_share_a_line_if_together_they_hold_no_more_than_it_reaches():
    near = replace(LIMITS, reach=100)
    assert plan([], [runs(1, 48, unread=16), runs(2, 20, unread=16)], 99, near).read == ((1, 16), (2, 16))
    assert plan([], [runs(1, 48, unread=16), runs(2, 21, unread=16)], 99, near).read == ((1, 16),)
    assert plan([], [runs(1, 480, unread=16), runs(2, 10, unread=6)], 99, near).read == ((1, 16),)  # alone it may be longer


def test_rows_that_are_not_read_to_the_end_do_not_decode():
    assert plan([], [runs(1), runs(2, 16, unread=5000), runs(3, left=0)], 999, LIMITS).decode == (1,)


def test_who_waits_for_a_row_shortens_a_dispatch_in_which_one_is_freed():
    rows = [runs(1, left=3), runs(2, left=20)]
    assert plan([], rows, 99, LIMITS).steps == 20
    assert plan([], rows, 99, LIMITS, queued=True).steps == LIMITS.fewest_steps
    assert plan([], [runs(1, left=12), runs(2, left=20)], 99, LIMITS, queued=True).steps == 12


def test_steps_are_few_while_somebody_streams_and_never_more_than_anybody_needs():
    assert plan([], [runs(1), runs(2)], 99, LIMITS).steps == 32
    assert plan([], [runs(1), runs(2, streams=True)], 99, LIMITS).steps == 8
    assert plan([], [runs(1), runs(2, streams=True, left=0)], 99, LIMITS).steps == 32
    assert plan([], [runs(1, left=5), runs(2, left=9)], 99, LIMITS).steps == 9


def test_while_others_wait_a_row_that_ends_is_soon_replaced():
    rows = [runs(i) for i in range(7)]
    assert plan([waits(9), waits(10)], [*rows, runs(8, left=20)], 999, LIMITS).steps == 20
    assert plan([waits(9), waits(10)], [*rows, runs(8, left=2)], 999, LIMITS).steps == 8
    assert plan([], [*rows, runs(8, left=2)], 999, LIMITS).steps == 32
    assert plan([], [runs(1, left=2), runs(2), unread(3, 5000)], 999, LIMITS).steps == 1


def test_short_of_pages_the_steps_are_fewer():
    assert plan([], [runs(1, 10), runs(2, 10)], 2, LIMITS) == ((), (), (), None, (1, 2), 22)
    assert plan([waits(3)], [runs(1, 10), runs(2, 10)], 0, LIMITS) == ((), (), (), None, (1, 2), 6)


def test_without_a_page_for_one_step_the_last_give_theirs_back_until_the_others_fit():
    rows = [runs(1, 32), runs(2, 160), runs(3, 16), runs(4, 10)]  # all but the last need a page now
    assert plan([waits(9)], rows, 3, LIMITS) == ((), (), (), None, (1, 2, 3, 4), 6)
    assert plan([waits(9)], rows, 2, LIMITS) == ((4,), (), (), None, (1, 2, 3), 16)
    assert plan([waits(9)], rows, 1, LIMITS) == ((4, 3), (), (), None, (1, 2), 16)


def test_the_first_is_never_preempted_and_only_pages_that_a_row_alone_holds_count():
    rows = [runs(1, 32), runs(2, 160, own=0), runs(3, 16, own=0)]
    assert plan([], rows, 0, LIMITS) == ((3, 2), (), (), None, (), 0)
    rows = [runs(1, 32), runs(2, 10), runs(3, 10, own=0)]
    assert plan([], rows, 0, LIMITS) == ((3, 2), (), (), None, (1,), 16)
    assert plan([], [runs(1, 32)], 1, LIMITS).decode == (1,)


def test_a_prompt_that_is_being_read_is_preempted_like_any_other():
    assert plan([], [runs(1, 32), unread(2, 50)], 0, LIMITS) == ((2,), (), (), None, (1,), 32)


def test_where_a_row_ends_nobody_is_preempted_and_the_last_sit_out():
    rows = [runs(1, 32), runs(2, 160, left=0), runs(3, 16), runs(4, 10)]
    assert plan([], rows, 1, LIMITS) == ((), (), (), None, (1, 4), 6)
    assert plan([], rows[:3], 0, LIMITS) == EMPTY


def test_who_was_read_just_now_sits_out_if_there_is_no_page_for_it():
    found = plan([], [runs(1, 32), unread(2, 16)], 1, LIMITS)
    assert (found.preempt, found.read, found.decode) == ((), ((2, 16),), (1,))


SIZE = 4
SMALL = Limits(
    rows=4,
    page_size=SIZE,
    lines=(4, 16, 32),
    pieces=3,
    reach=40,
    steps=8,
    streamed_steps=3,
    fewest_steps=2,
    dispatch=8,
)


@dataclass(frozen=True)
class Spec:
    prompt: list[int]
    most: int  # tokens that it may generate
    priority: int = 0
    streams: bool = False
    arrives: int = 0  # before this plan
    ends: int | None = None  # after so many tokens it ends by itself, which is known one plan later
    cancelled: int | None = None  # before this plan


@dataclass(eq=False)
class Job:
    id: int
    spec: Spec
    text: list[int]  # prompt and what was generated, known or not
    held: Held = field(default_factory=lambda: Held([], [], 0, False, 0))
    written: int = 0
    target: int = 0  # length of the text that is read in chunks: the prompt, and what was generated before it was preempted
    known: int = 0  # length of the text that the host has seen
    dispatched: int = 0

    @property
    def left(self) -> int:
        return self.spec.most - (len(self.text) - len(self.spec.prompt))

    @property
    def answer(self) -> list[int]:
        """Up to its end, as far as the host has seen it."""
        return self.text[len(self.spec.prompt) : self.known][: self.spec.ends]

    @property
    def over(self) -> bool:
        return len(self.answer) == min(self.spec.most, self.spec.ends or self.spec.most)


def next_token(text: list[int]) -> int:
    """A pretended model: the next token depends on the whole text."""
    return (sum(text) * 31 + len(text)) % 7 % 2


def alone(spec: Spec) -> list[int]:
    text = list(spec.prompt)
    for _ in range(min(spec.most, spec.ends or spec.most)):
        text.append(next_token(text))
    return text[len(spec.prompt) :]


@dataclass
class Device:
    """Carries out plans with real Pages on pretended memory; every plan is held against the policy."""

    pages: Pages
    limits: Limits
    waiting: dict[int, Job] = field(default_factory=dict)
    running: dict[int, Job] = field(default_factory=dict)
    answers: dict[int, list[int]] = field(default_factory=dict)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)
    seen: Counter = field(default_factory=Counter)

    def submit(self, id: int, spec: Spec) -> None:
        self.waiting[id] = Job(id, spec, list(spec.prompt))

    def cancel(self, id: int) -> None:
        self.waiting.pop(id, None)
        if job := self.running.pop(id, None):
            self.pages.release(job.held)
            self.seen["cancelled"] += 1

    def step(self) -> None:
        self.results()
        waiting, running = [self.as_waiting(job) for job in self.waiting.values()], [*map(self.as_running, self.running.values())]
        found = plan(waiting, running, self.pages.free, self.limits)
        assert found == plan(waiting[::-1], running[::-1], self.pages.free, self.limits)
        check(found, waiting, running, self.limits)
        for id in found.preempt:
            self.preempt(id)
        for id in found.admit:
            self.admit(id)
        for id, tokens in found.read:
            if id in self.running:
                self.read(self.running[id], tokens)
        for id in found.decode:
            if id in self.running and self.running[id].written >= self.running[id].target:
                self.decode(self.running[id], found.steps)
        self.check_pages()

    def results(self) -> None:
        """The results dispatched before the last plan are known now: their full pages go to the index."""
        for job in list(self.running.values()):
            job.known, job.dispatched = max(job.known, job.dispatched), len(job.text)
            self.pages.wrote(job.held, job.text[: min(job.written, max(job.known, job.target))])
            if job.over:
                self.finish(job)

    def finish(self, job: Job) -> None:
        self.answers[job.id] = job.answer
        self.pages.release(self.running.pop(job.id).held)

    def as_waiting(self, job: Job) -> Waiting:
        spec, match = job.spec, self.pages.match(job.text)
        blocked, shared = match.blocked, len(match.pages)
        return Waiting(
            job.id, spec.priority, job.id, len(job.text), shared, match.taken, job.left, streams=spec.streams, blocked=blocked
        )

    def as_running(self, job: Job) -> Running:
        unread, pages = max(0, job.target - job.written), len(job.held.pages)
        own, spec = self.pages.own(job.held), job.spec
        return Running(job.id, spec.priority, job.id, unread, job.written, pages, own, job.left, streams=spec.streams)

    def preempt(self, id: int) -> None:
        """Its last results are waited for."""
        job = self.running[id]
        job.known = len(job.text)
        if job.over:
            self.finish(job)
            return
        self.pages.release(job.held)
        self.waiting[id] = self.running.pop(id)
        self.seen["preempted"] += 1

    def admit(self, id: int) -> None:
        """One that was admitted just before may be about to write what this one needs."""
        job = self.waiting[id]
        if self.pages.match(job.text).blocked:
            self.seen["blocked"] += 1
            return
        job.held = self.pages.admit(job.text)
        job.written, job.target = job.held.shared * SIZE, len(job.text)
        self.seen["shared"] += job.held.shared > 0
        self.running[id] = self.waiting.pop(id)

    def read(self, job: Job, tokens: int) -> None:
        self.write(job, min(tokens, job.target - job.written))
        self.pages.wrote(job.held, job.text[: job.written])

    def decode(self, job: Job, steps: int) -> None:
        steps = min(steps, job.left)
        assert self.pages.extend(job.held, job.written + min(steps, job.left - 1))
        for _ in range(steps):
            job.text.append(next_token(job.text))
            if job.left:  # the last token is not read any more
                self.write(job, 1)

    def write(self, job: Job, tokens: int) -> None:
        """A dispatch reads what the row holds, which must be its text, and writes what nobody else may see."""
        held = [self.memory[job.held.pages[at // SIZE], at % SIZE] for at in range(job.written)]
        assert held == job.text[: job.written]
        for at in range(job.written, job.written + tokens):
            page = job.held.pages[at // SIZE]
            assert sum(page in other.held.pages for other in self.running.values()) == 1
            self.memory[page, at % SIZE] = job.text[at]
        job.written += tokens

    def check_pages(self) -> None:
        held = {page for job in self.running.values() for page in job.held.pages}
        assert self.pages.free == self.pages.count - len(held)


def check(found: Plan, waiting: list[Waiting], running: list[Running], limits: Limits) -> None:
    """The invariants of any plan, checked without the planner's own functions."""
    asked = {request.id: request for request in (*waiting, *running)}
    first_to_last = sorted(asked, key=lambda id: (asked[id].priority, asked[id].arrival))
    turn = {id: at for at, id in enumerate(first_to_last)}
    stay = [row for row in running if row.id not in found.preempt]
    check_started(found, waiting, running, turn, limits)
    if found.preempt:
        assert max(turn[row.id] for row in stay) < min(turn[id] for id in found.preempt)
    check_read(found, asked, turn, limits)
    reading = dict(found.read)
    for id in found.decode:
        request = asked[id]
        missing = request.unread if isinstance(request, Running) else request.tokens - request.shared * limits.page_size
        assert reading.get(id, 0) == missing
        assert request.left > 0
    most = limits.streamed_steps if any(asked[id].streams for id in found.decode) else limits.steps
    assert (1 <= found.steps <= most) if found.decode else found.steps == 0
    assert found != EMPTY or not asked or any(not row.unread and not row.left for row in running)


def check_started(found: Plan, waiting: list[Waiting], running: list[Running], turn: dict[int, int], limits: Limits) -> None:
    free_rows = limits.rows - len(running)
    ready = sorted((request.id for request in waiting if not request.blocked), key=lambda id: turn[id])
    assert list(found.admit) == ready[: len(found.admit)]
    assert len(found.admit) <= free_rows
    assert not (found.admit and found.preempt)


def check_read(found: Plan, asked: dict, turn: dict[int, int], limits: Limits) -> None:
    started = [asked[id] for id in asked if isinstance(asked[id], Running) and id not in found.preempt]
    pending = {row.id: row.unread for row in started if row.unread}
    pending |= {id: asked[id].tokens - asked[id].shared * limits.page_size for id in found.admit}
    assert [id for id, _ in found.read] == sorted(pending, key=lambda id: turn[id])[: len(found.read)]
    assert bool(found.read) == bool(pending) == (found.line is not None)
    if found.line:
        assert found.line in limits.lines
        assert sum(tokens for _, tokens in found.read) <= found.line
        assert all(0 < tokens <= pending[id] for id, tokens in found.read)
        assert all(tokens == pending[id] for id, tokens in found.read[:-1])  # only the last one is cut
        assert len(found.read) <= limits.pieces


def simulate(specs: list[Spec], count: int, limits: Limits = SMALL) -> Device:
    """Serves all requests; each must get the tokens it gets alone, and leave nothing behind."""
    device, work = Device(Pages(count, SIZE), limits), 0
    for turn in range(max(spec.arrives for spec in specs) + 20 * sum(len(spec.prompt) + spec.most for spec in specs)):
        for id, spec in enumerate(specs):
            if spec.arrives == turn:
                device.submit(id, spec)
            if spec.cancelled == turn:
                device.cancel(id)
        if turn > max(spec.arrives for spec in specs) and not (device.waiting or device.running):
            break
        device.step()
        work = turn
    device.seen["plans"] = work
    assert {**device.waiting, **device.running} == {}, "a request never ended"
    assert (device.pages.free, device.pages.shared) == (count, 0)
    for id, spec in enumerate(specs):
        answer = device.answers.get(id)
        assert answer == alone(spec) or (answer is None and spec.cancelled)
    return device


def random_specs(choose: random.Random, count: int, longest: int) -> list[Spec]:
    """Prompts of two tokens, many of which begin alike; none needs more than `longest` tokens."""
    found = []
    for _ in range(choose.randint(1, count)):
        length, most = choose.randint(1, longest - 1), choose.randint(1, longest)
        prompt = [choose.randrange(2) if at % SIZE == 0 else 1 for at in range(length)]
        arrives, most = choose.randrange(20), min(most, longest - length + 1)
        spec = Spec(prompt, most, choose.randrange(-1, 2), choose.random() < 0.2, arrives)
        ends = choose.randint(1, most) if choose.random() < 0.3 else None
        found.append(replace(spec, ends=ends, cancelled=arrives + choose.randint(1, 20) if choose.random() < 0.2 else None))
    return found


@pytest.mark.deep
def test_random_requests_say_what_they_say_alone_and_leave_no_page_behind():
    choose, seen = random.Random(0), Counter()
    for _ in range(50):
        pool = choose.randint(6, 30)
        seen += simulate(random_specs(choose, 14, pool * SIZE), pool).seen
    assert seen["plans"] > 1200
    assert all(seen[kind] > 4 for kind in ("preempted", "shared", "cancelled", "blocked")), seen


@st.composite
def specs(draw) -> list[Spec]:
    prompts = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=24)
    one = st.builds(
        Spec,
        prompt=prompts,
        most=st.integers(1, 17),
        priority=st.integers(-1, 1),
        streams=st.booleans(),
        arrives=st.integers(0, 6),
        ends=st.none() | st.integers(1, 17),
        cancelled=st.none() | st.integers(1, 12),
    )
    return [replace(spec, ends=spec.ends and min(spec.ends, spec.most)) for spec in draw(st.lists(one, min_size=1, max_size=7))]


@settings(max_examples=50, deadline=None)
@given(specs(), st.integers(10, 20))
def test_any_requests_say_what_they_say_alone(requests, count):
    simulate(requests, count)


def test_a_large_request_starts_while_small_ones_keep_arriving():
    small = [Spec([at % 2, 1, 0, at % 3 % 2], 6, arrives=at) for at in range(200)]
    device, large = Device(Pages(12, SIZE), SMALL), 5
    for turn, spec in enumerate(small):
        device.submit(turn, Spec([1] * 40, 6) if turn == large else spec)
        device.step()
        if large in device.running:
            assert turn < large + 20
            return
    pytest.fail("it never started")


def test_one_of_low_priority_starts_once_those_before_it_are_served():
    specs = [Spec([1] * 9, 9, priority=1), *(Spec([0] * at, 9, arrives=at) for at in range(1, 30))]
    assert simulate(specs, 12).answers[0] == alone(specs[0])


# pages that can be had in parts


def test_parts_are_for_rows_that_run_and_whole_pages_for_those_who_start():
    limits = Limits(rows=4, page_size=4, lines=(16,), parts=3)
    runs = Running(id=0, priority=0, arrival=0, unread=0, held=4, pages=3, own=3, left=9)
    starts = Waiting(id=1, priority=0, arrival=1, tokens=4, shared=0, taken=0, left=1)
    assert plan([starts], [runs], 20, limits, whole=9).admit == (1,)  # six are set aside for the row that runs
    assert plan([starts], [runs], 20, limits, whole=8).admit == ()
    assert plan([], [runs], 3, limits, whole=0).decode == (0,)
    assert plan([], [runs], 2, limits, whole=0).decode == ()


def test_a_row_chooses_no_token_beyond_where_it_must_wait():
    limits = Limits(rows=4, page_size=4, lines=(16,))
    rows = [
        Running(id=i, priority=0, arrival=i, unread=0, held=8, pages=9, own=9, left=20, until=until)
        for i, until in ((0, 5), (1, 0))
    ]
    found = plan([], rows, 4, limits)
    assert (found.decode, found.steps, found.preempt) == ((0,), 5, ())
    starts = Waiting(id=2, priority=0, arrival=2, tokens=3, shared=0, taken=0, left=9, until=0, extra=2)
    assert plan([starts], [], 2, limits).admit == ()  # one for its tokens, two more for a while
    found = plan([starts], [], 3, limits)
    assert (found.admit, found.read, found.decode) == ((2,), ((2, 3),), ())
