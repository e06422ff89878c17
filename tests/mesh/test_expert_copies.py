"""Copies of experts that are chosen often."""

import numpy as np
import pytest
from hypothesis import given, strategies

from mla_jax.mesh.expert_copies import expert_slots, imbalance, placed


def test_without_copies_experts_are_shared_out():
    """The two that are chosen most are on different devices."""
    assert placed([5, 4, 1, 1], devices=2, copies=0) == [0, 3, 1, 2]


def test_the_experts_that_are_chosen_most_are_copied():
    """Expert 0 has a slot on each of the two devices; the other copy is of the next."""
    assert sorted(placed([90, 10, 20, 5], devices=2, copies=1)) == [0, 0, 1, 2, 2, 3]


def test_copies_even_out_what_devices_do():
    counts = (1000 / np.arange(1, 65)).round()  # as by Zipf
    as_they_are, shared_out, copied = range(64), placed(counts, 8, 0), placed(counts, 8, 2)
    assert imbalance(counts, as_they_are, 8) > 4
    assert 1.5 < imbalance(counts, shared_out, 8) < 2  # the first expert alone has more to do than a device should
    assert imbalance(counts, copied, 8) < 1.05


@given(
    devices=strategies.integers(1, 5),
    each=strategies.integers(1, 4),
    copies=strategies.integers(0, 4),
    seed=strategies.integers(0, 99),
)
def test_each_device_has_its_part_and_as_many_copies(devices, each, copies, seed):
    counts = np.random.default_rng(seed).integers(0, 50, devices * each)
    found = placed(counts, devices, copies)
    assert set(found) == set(range(len(counts)))
    assert len(found) == devices * (each + copies)
    if copies == 0:
        assert len(set(found)) == len(found)
    if len(found) <= devices * len(counts):
        assert max(found.count(expert) for expert in found) <= devices


def test_tokens_take_turns_among_the_slots_of_an_expert():
    assert expert_slots([0, 1, 2, 2, 3, 0], 4).tolist() == [[0, 5], [1, 1], [2, 3], [4, 4]]


@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [1, 1, 1, 1]])
def test_nothing_chosen_or_all_equally_is_balanced(counts):
    assert imbalance(counts, placed(counts, 2, 0), 2) == 1.0
