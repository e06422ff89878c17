"""The store of page contents on the host: no more than it has room for, least recently used out first, bytes as they were."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.engine.core.host_pages import START, HostPages, Kind, chained

pytestmark = pytest.mark.once  # plain NumPy

KINDS = {
    "c_kv": Kind((2, 4, 8), np.dtype(ml_dtypes.bfloat16)),
    "codes": Kind((2, 4, 3), np.dtype(ml_dtypes.float8_e4m3fn)),
    "k_pe": Kind((2, 4, 5), np.dtype(np.float32)),
}
NAMES = [bytes([i]) for i in range(8)]
tokens = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)


def contents(seed: int, pages: int) -> dict[str, np.ndarray]:
    """Any bytes, NaN among them."""
    rng = np.random.default_rng(seed)
    raw = {name: rng.integers(0, 256, (pages, kind.bytes), np.uint8) for name, kind in KINDS.items()}
    return {name: array.view(KINDS[name].dtype).reshape(pages, *KINDS[name].shape) for name, array in raw.items()}


def raw(arrays: dict[str, np.ndarray], page: int) -> dict[str, bytes]:
    return {name: array[page].tobytes() for name, array in arrays.items()}


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 5), actions=st.lists(st.tuples(st.booleans(), st.sampled_from(NAMES)), max_size=60))
def test_it_keeps_those_that_were_used_last(count, actions):
    """Against a list of names, the least recently used first."""
    store, expected, written = HostPages(count, KINDS), [], {}
    for serial, (adds, name) in enumerate(actions):
        if adds:
            slot = store.add(name)
            assert (slot is None) == (name in expected)
            if slot is not None:
                store.write([slot], contents(serial, 1))
                written[name] = raw(contents(serial, 1), 0)
        elif name in expected:
            assert store.add(name) is None
        if adds or name in expected:
            expected = [*(other for other in expected if other != name), name][-count:]
        assert len(store) == len(expected) <= count
        assert {name for name in NAMES if name in store} == set(expected)
        found = store.read(expected, count)
        assert [raw(found, i) for i in range(len(expected))] == [written[name] for name in expected]


def test_what_is_held_stays_and_what_is_forgotten_makes_room():
    store = HostPages(2, KINDS)
    first = store.add(NAMES[0])
    store.hold(NAMES[0])
    store.hold(NAMES[0])
    store.add(NAMES[1])
    store.add(NAMES[2])  # in place of the second: the first is held
    assert {name for name in NAMES if name in store} == {NAMES[0], NAMES[2]}
    assert (store.slot(NAMES[0]), store.room) == (first, 1)
    store.drop(NAMES[0])
    assert (NAMES[0] in store, store.room) == (True, 1)  # somebody else holds it
    store.drop(NAMES[0])
    assert (NAMES[0] in store, store.room, len(store)) == (True, 2, 2)
    store.hold(NAMES[2])
    store.drop(NAMES[2])
    assert (NAMES[2] in store, store.room) == (True, 2)


def test_a_block_is_written_to_its_slots_and_read_in_any_order_with_zeros_behind():
    store, block = HostPages(5, KINDS), contents(0, 4)
    slots = [store.add(name) for name in NAMES[:3]]
    store.write(slots, block)  # the fourth page is nobody's
    found = store.read([NAMES[2], NAMES[0]], 4)
    assert [raw(found, 0), raw(found, 1)] == [raw(block, 2), raw(block, 0)]
    assert all(not array[2:].view(np.uint8).any() for array in found.values())
    assert {name: (array.dtype, array.shape[1:]) for name, array in found.items()} == {
        name: (kind.dtype, kind.shape) for name, kind in KINDS.items()
    }


def test_what_was_read_does_not_change_with_the_store():
    store = HostPages(1, KINDS)
    store.write([store.add(NAMES[0])], contents(0, 1))
    found = store.read(NAMES[:1], 1)
    store.write([store.add(NAMES[1])], contents(1, 1))
    assert raw(found, 0) == raw(contents(0, 1), 0)


def test_a_page_is_as_large_as_its_arrays():
    assert HostPages(1, KINDS).page_bytes == 2 * 4 * (2 * 8 + 3 + 4 * 5)


@given(first=st.lists(tokens, max_size=3), second=st.lists(tokens, max_size=3))
def test_digests_are_equal_exactly_where_all_pages_so_far_are(first, second):
    """The same tokens behind another beginning, or cut elsewhere, are another page."""

    def digest(pages: list[list[int]]) -> bytes:
        return list(itertools.accumulate(pages, chained, initial=START))[-1]

    assert (digest(first) == digest(second)) == (first == second)


@given(pages=st.lists(tokens, min_size=1, max_size=3), at=st.integers(0, 100), by=st.integers(1, 2**31))
def test_a_digest_changes_with_each_token_before_it(pages, at, by):
    changed = [list(page) for page in pages]
    page = changed[at % len(pages)]
    page[at % len(page)] += by
    same, other = (list(itertools.accumulate(some, chained, initial=START)) for some in (pages, changed))
    first = at % len(pages)
    assert same[: first + 1] == other[: first + 1]
    assert not set(same[first + 1 :]) & set(other[first + 1 :])
