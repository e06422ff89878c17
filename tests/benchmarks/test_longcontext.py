"""The benchmark of long contexts: its intervals, its pairs, and its rows."""

import json
import sys

import longcontext
import pytest

from mla_jax.cache.evict import BUDGET_RULES, EVICTION_POLICIES


def test_every_policy_and_every_rule_is_measured():
    assert {policy for policy, _ in longcontext.PAIRS} == EVICTION_POLICIES.keys()
    assert {rule for _, rule in longcontext.PAIRS} == BUDGET_RULES.keys()
    assert len(set(longcontext.PAIRS)) == len(longcontext.PAIRS)


@pytest.mark.parametrize(
    ("right", "count", "interval"),
    [(0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (5, 10, (0.2366, 0.7634)), (81, 263, (0.2553, 0.3662))],
)
def test_the_interval_is_that_of_newcombes_tables(right, count, interval):
    """Newcombe 1998 has 81 of 263; the others by hand."""
    assert longcontext.wilson(right, count) == pytest.approx(interval, abs=1e-4)


@pytest.mark.deep
@pytest.mark.slow
def test_there_is_a_row_for_the_full_cache_and_for_each_share(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", ["longcontext.py", "--small", "--out", str(tmp_path / "found.json")])
    longcontext.main()
    found = json.loads((tmp_path / "found.json").read_text())
    full, half, some = found["rows"]
    assert (full["policy"], full["kept"]) == ("none", 1.0)
    assert (half["policy"], half["budget"], half["kept"]) == ("snapkv", "uniform", 0.5)
    assert (some["policy"], some["budget"], some["kept"]) == ("quest", 256, 1.0)
    assert full["all"] == 1.0
    for row in found["rows"]:
        assert 0 <= row["low"] <= row["all"] <= row["high"] <= 1
        assert row["all"] == pytest.approx(sum(row[task] for task in longcontext.TASKS) / 4)
