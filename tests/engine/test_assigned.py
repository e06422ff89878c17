"""Which data shard a request goes to, and what shards that work in step agree on."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_jax.engine.core.scheduler import Limits, Plan, Running, Waiting, agreed, assigned, plan

pytestmark = pytest.mark.once  # plain Python

LIMITS = Limits(rows=4, page_size=16, lines=(16, 64, 256))
EMPTY = Plan((), (), (), None, (), 0)
ROOM = 1000  # pages


def waits(id: int, tokens: int = 10, shared: int = 0, **other) -> Waiting:
    request = Waiting(id, priority=0, arrival=id, tokens=tokens, shared=shared, taken=0, left=100)
    return replace(request, **other)


def runs(id: int, held: int = 10, unread: int = 0) -> Running:
    pages = -(-(held + unread) // 16)
    return Running(id, priority=0, arrival=id, unread=unread, held=held, pages=pages, own=pages, left=100)


def same(request: Waiting, shards: int = 2) -> list[Waiting]:
    """It would wait alike in each shard."""
    return [request] * shards


def ids(found: list[list[Waiting]]) -> list[list[int]]:
    return [[request.id for request in some] for some in found]


def test_requests_go_where_the_fewest_tokens_are_held():
    running = [[runs(1, 500)], [runs(2, 100), runs(3, 100)]]
    assert ids(assigned([same(waits(9))], running, [ROOM] * 2, LIMITS)) == [[], [9]]


def test_a_token_that_is_to_be_read_weighs_as_much_as_many_that_are_held():
    running = [[runs(1, 0, unread=100)], [runs(2, 1599)]]
    assert ids(assigned([same(waits(9))], running, [ROOM] * 2, LIMITS)) == [[], [9]]
    running[1] = [runs(2, 1601)]
    assert ids(assigned([same(waits(9))], running, [ROOM] * 2, LIMITS)) == [[9], []]


def test_equal_requests_are_dealt_out_and_the_first_shard_comes_first():
    requests = [same(waits(id), 3) for id in range(6)]
    assert ids(assigned(requests, [[], [], []], [ROOM] * 3, LIMITS)) == [[0, 3], [1, 4], [2, 5]]


def test_what_was_assigned_before_counts_as_work():
    requests = [same(waits(0, 100)), *(same(waits(id, 30)) for id in (1, 2, 3))]
    assert ids(assigned(requests, [[], []], [ROOM] * 2, LIMITS)) == [[0], [1, 2, 3]]


def test_a_prefix_that_a_shard_knows_attracts_unless_the_shard_has_far_more_to_do():
    request = [waits(9, 100), waits(9, 100, shared=6)]
    assert ids(assigned([request], [[], [runs(1, 1000)]], [ROOM] * 2, LIMITS)) == [[], [9]]  # to read 96 less: 1,440
    assert ids(assigned([request], [[], [runs(1, 1500)]], [ROOM] * 2, LIMITS)) == [[9], []]


def test_the_request_is_returned_as_it_would_wait_in_its_shard():
    request = [waits(9, 100), waits(9, 100, shared=6)]
    assert assigned([request], [[], []], [ROOM] * 2, LIMITS) == [[], [request[1]]]


def test_a_shard_whose_rows_are_taken_is_not_chosen():
    full = [runs(id, 1) for id in range(4)]
    assert ids(assigned([same(waits(9))], [full, [runs(5, 5000)]], [ROOM] * 2, LIMITS)) == [[], [9]]
    assert ids(assigned([same(waits(9))], [full, full], [ROOM] * 2, LIMITS)) == [[], []]


def test_a_shard_without_enough_pages_is_chosen_only_where_no_other_has_them():
    request = same(waits(9, 100))  # 7 pages
    running = [[], [runs(1, 5000)]]
    assert ids(assigned([request], running, [6, 7], LIMITS)) == [[], [9]]
    assert ids(assigned([request], running, [7, 7], LIMITS)) == [[9], []]
    assert ids(assigned([request], running, [6, 6], LIMITS)) == [[9], []]  # where it waits for pages


def test_pages_of_those_assigned_before_are_gone():
    requests = [same(waits(0, 100)), same(waits(1, 100))]
    assert ids(assigned(requests, [[], [runs(2, 9000)]], [13, 7], LIMITS)) == [[0], [1]]


def test_one_that_waits_for_a_page_that_another_writes_takes_no_row_and_no_page():
    blocked = [same(waits(id, blocked=True), 1) for id in range(6)]
    assert ids(assigned([*blocked, same(waits(9), 1)], [[runs(7), runs(8), runs(6)]], [1], LIMITS)) == [[0, 1, 2, 3, 4, 5, 9]]


def test_with_one_shard_the_plan_is_that_of_all_who_wait():
    requests = [waits(id, 20 * id + 1, priority=-id % 3) for id in range(1, 8)]
    running = [runs(20, 30), runs(21, 0, unread=40)]
    for free in (0, 5, 20, 500):
        (mine,) = assigned([[request] for request in requests], [running], [free], LIMITS)
        assert mine == requests[: LIMITS.rows - len(running)]
        in_turn = sorted(requests, key=lambda request: (request.priority, request.arrival))
        (first,) = assigned([[request] for request in in_turn], [running], [free], LIMITS)
        assert plan(first, running, free, LIMITS).admit == plan(requests, running, free, LIMITS).admit


def test_shards_agree_on_the_longest_line_and_on_the_fewest_steps_of_those_that_decode():
    plans = [
        Plan((), (), ((1, 10),), 16, (2, 3), 8),
        Plan((), (4,), ((4, 60),), 64, (), 0),
        EMPTY._replace(decode=(5,), steps=3),
        EMPTY,
    ]
    found = agreed(plans)
    assert {(one.line, one.steps) for one in found} == {(64, 1)}
    assert {one.steps for one in agreed([one._replace(line=None) for one in plans])} == {3}
    assert [one._replace(line=None, steps=0) for one in found] == [one._replace(line=None, steps=0) for one in plans]


def test_shards_with_nothing_to_do_agree_on_nothing_and_one_agrees_with_itself():
    assert agreed([EMPTY, EMPTY]) == [EMPTY, EMPTY]
    alone = Plan((9,), (1,), ((1, 10),), 16, (1, 2), 1)
    assert agreed([alone]) == [alone]


def drawn_with(count: int) -> st.SearchStrategy:
    """Of so many shards: the tokens of the rows that run, held and unread, and free pages; of requests: tokens, whether they are
    blocked, and the pages that each shard knows."""
    rows = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=LIMITS.rows)
    known = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    requests = st.lists(st.tuples(st.integers(1, 200), st.booleans(), known), max_size=24)
    shards = st.lists(rows, min_size=count, max_size=count)
    return st.tuples(shards, st.lists(st.integers(0, 40), min_size=count, max_size=count), requests)


@given(st.integers(1, 5).flatmap(drawn_with))
def test_every_request_goes_to_one_shard_at_most_and_no_shard_gets_more_than_it_has_rows(drawn):
    held, free, asked = drawn
    running = [[runs(100 * n + i, *tokens) for i, tokens in enumerate(rows)] for n, rows in enumerate(held)]
    requests = [
        [waits(id, tokens, min(known, (tokens - 1) // 16), blocked=blocked) for known in each]
        for id, (tokens, blocked, each) in enumerate(asked)
    ]
    found = assigned(requests, running, free, LIMITS)
    every = sorted(id for some in ids(found) for id in some)
    assert every == list(range(len(every))), "one was passed by, or is in two shards"
    for number, some in enumerate(found):
        assert ids([some])[0] == sorted(ids([some])[0]), "the order has changed"
        assert all(request is requests[request.id][number] for request in some)
        assert sum(not request.blocked for request in some) <= LIMITS.rows - len(running[number])
    open_rows = sum(LIMITS.rows - len(rows) for rows in running)
    if len(every) < len(requests):
        assert sum(not request.blocked for some in found for request in some) == open_rows, "somebody waits though there is a row"
