"""The figures of long contexts show every row, its interval, and full attention beside them."""

import pytest

from mla_jax.ui import plots_long

pytest.importorskip("matplotlib")

QUALITY = [
    {"policy": "snapkv", "budget": "ada", "kept": 0.5, "all": 0.75, "low": 0.5, "high": 0.9},
    {"policy": "none", "budget": "", "kept": 1.0, "all": 0.9, "low": 0.7, "high": 1.0},
    {"policy": "snapkv", "budget": "ada", "kept": 0.1, "all": 0.25, "low": 0.1, "high": 0.5},
    {"policy": "random", "budget": "uniform", "kept": 0.1, "all": 0.0, "low": 0.0, "high": 0.2},
]
TIMES = [
    {"way": "full", "held": 8192, "attention ms": 1.0},
    {"way": "full", "held": 32768, "attention ms": 4.0},
    {"way": "quest", "held": 8192, "attention ms": 2.0},
    {"way": "quest", "held": 32768, "attention ms": 3.0},
    {"way": "a short one", "held": 8192, "attention ms": 0.5},
]


@pytest.fixture
def bars():
    """The drawn line and intervals of each policy."""
    found = {one.get_label(): one.lines for one in plots_long.quality(QUALITY).axes[0].containers}
    return {name: (line, intervals) for name, (line, _, (intervals,)) in found.items()}


def test_a_line_has_the_shares_of_one_policy_by_what_stays(bars):
    assert set(bars) == {"snapkv, ada", "random, uniform"}
    line, _ = bars["snapkv, ada"]
    assert line.get_xdata().tolist() == [10, 50]
    assert line.get_ydata().tolist() == [25, 75]


def test_intervals_reach_from_low_to_high(bars):
    _, intervals = bars["snapkv, ada"]
    ends = [(low[1], high[1]) for low, high in intervals.get_segments()]
    assert ends == [pytest.approx((10, 50)), pytest.approx((50, 90))]


def test_full_attention_is_a_line_and_the_best_row_the_title():
    ax = plots_long.quality(QUALITY).axes[0]
    assert [line.get_ydata()[0] for line in ax.lines if line.get_linestyle() == ":"] == [90]
    assert "75%" in ax.get_title(loc="left")


def test_every_way_has_its_times_and_the_title_compares_the_longest_rows():
    ax = plots_long.attention_time(TIMES).axes[0]
    found = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}
    assert found["quest"] == ([8192, 32768], [2.0, 3.0])
    assert found["full"] == ([8192, 32768], [1.0, 4.0])
    assert "75%" in ax.get_title(loc="left")
    assert "quest" in ax.get_title(loc="left")
