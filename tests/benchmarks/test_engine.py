"""The benchmark of the engine gives sane rows for a tiny model."""

import math

import engine
import pytest
from drive import Bench

UNITS = {"tokens/s", "% of the time", "1/s", "ms", "ms a token", "requests", "s"}
BARS = {"all": 0, "a": 3, "b": 1, "c": 0, "d": 1, "e": 0, "calls": 2, "peer": 0}  # rows that are held to one


@pytest.fixture(scope="module")
def bench():
    return Bench(engine.SMALL)


@pytest.fixture(scope="module")
def rows(bench):
    return list(engine.measured(bench, [*engine.PARTS], {"a peer": 100.0, "one that failed": float("nan")}))


@pytest.mark.deep
def test_every_part_gives_rows_with_sane_figures(rows):
    assert {row["part"] for row in rows} == {"all", *engine.PARTS, "peer"}
    for row in rows:
        assert row["unit"] in UNITS
        assert math.isfinite(row["figure"])
        assert row["figure"] > 0 or row["unit"] == "requests"
    assert all(row["figure"] <= 100 for row in rows if row["unit"].startswith("%"))


@pytest.mark.deep
def test_rows_with_a_bar_have_the_ratio_or_the_figure_it_is_for(rows):
    assert {part: sum(bool(row["bar"]) for row in rows if row["part"] == part) for part in BARS} == BARS
    assert all(row["ratio"] > 0 for row in rows if row["bar"].startswith(">="))


@pytest.mark.deep
def test_nothing_is_compiled_while_the_engine_is_measured(bench, rows):
    compiled = bench.programs.compiled
    again = [*engine.decoding(bench), *engine.many(bench), *engine.arrivals(bench), *engine.prefixes(bench)]
    assert [row["what"] for row in again if row["part"] == "d"] == [row["what"] for row in rows if row["part"] == "d"]
    assert bench.programs.compiled == compiled


def test_lengths_are_within_their_limits(bench):
    for tokens in bench.lengths(50):
        assert 4 <= tokens.min() <= tokens.max() <= engine.SMALL.longest
