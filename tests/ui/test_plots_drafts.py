"""The figures of drafts show the engine's counts and the cost model's values, with nothing in the way of anything."""

import functools
import io

import numpy as np
import pytest
from figures import assert_readable

from mla_jax.base.config import Config
from mla_jax.base.options import MOST_DRAFTS
from mla_jax.base.roofline import DEVICES
from mla_jax.decode.speculative import Lookup, Mtp
from mla_jax.engine.core.drafting import HELD, Drafting
from mla_jax.engine.core.stats import EngineStats
from mla_jax.ui import plots_drafts

LITE, V3 = Config.preset("v2_lite"), Config.preset("v3")
SHARES = (0.8, 0.7, 0.6)


def counts(*places: int) -> np.ndarray:
    return np.array([*places, *[0] * (MOST_DRAFTS - len(places))])


STATS = {
    "mtp": EngineStats(8, 64, drafted=counts(100, 80, 60), stood=counts(80, 60, 45), passes=100),
    "lookup": EngineStats(8, 64, drafted=counts(40, 20), stood=counts(20, 19), passes=100),
}
DRAFTING = {
    "DeepSeek-V2-Lite": Drafting(LITE, DEVICES["NVIDIA H200"], Mtp()),
    "DeepSeek-V3": Drafting(V3, DEVICES["NVIDIA H200"], Mtp()),
    "DeepSeek-V2-Lite on a CPU": Drafting(LITE, DEVICES["cpu"], Mtp()),
}
FIGURES = {
    "acceptance": lambda: plots_drafts.acceptance(STATS),
    "acceptance of one": lambda: plots_drafts.acceptance({"mtp": STATS["mtp"]}),
    "expected gain": lambda: plots_drafts.expected_gain(DRAFTING, SHARES),
}


@functools.cache
def drawn(name: str):
    figure = FIGURES[name]()
    figure.savefig(io.BytesIO(), format="png")
    return figure


@pytest.mark.parametrize("name", FIGURES)
def test_every_word_is_on_the_page_and_touches_no_other(name):
    assert_readable(drawn(name), lambda one, other: one.isdecimal() and other.isdecimal())  # markers of lines that meet


def test_bars_are_the_share_that_stood_of_what_was_guessed_in_each_place():
    ax = plots_drafts.acceptance(STATS).axes[0]
    heights = [[bar.get_height() for bar in bars] for bars in ax.containers]
    assert heights == [pytest.approx([80, 75, 75]), pytest.approx([50, 95])]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "mtp: 2.85 tokens a pass",
        "lookup: 1.39 tokens a pass",
    ]
    assert ax.get_title(loc="left") == "2.85 tokens a pass: mtp"
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in (bars[0] for bars in ax.containers)] == [1, 1]


def test_the_gain_is_that_of_the_number_of_guesses_that_the_engine_would_take():
    ax = plots_drafts.expected_gain(DRAFTING, SHARES, octaves=5).axes[0]
    said = iter(int(text.get_text()) for text in ax.texts if text.get_text().isdecimal())
    for line, (name, one) in zip(ax.lines, DRAFTING.items(), strict=False):
        assert line.get_label() == name
        for rows, gain in zip(line.get_xdata(), line.get_ydata(), strict=True):
            guesses = one._best(int(rows), HELD, np.array(SHARES))
            assert next(said) == guesses
            tokens = 1 + sum(np.prod(SHARES[:n]) for n in range(1, guesses + 1))
            assert gain == pytest.approx(tokens * one.seconds(int(rows), HELD, 0) / one.seconds(int(rows), HELD, guesses))


def test_where_drafts_do_not_pay_the_line_stays_at_plain_decoding():
    never = Drafting(LITE, DEVICES["cpu"], Lookup())
    ax = plots_drafts.expected_gain({"a CPU": never}, (0.02, 0.02, 0.02)).axes[0]
    assert set(ax.lines[0].get_ydata()) == {1.0}
    assert {text.get_text() for text in ax.texts if text.get_text().isdecimal()} == {"0"}


def test_figures_of_drafts_can_be_drawn_on_axes_that_are_given():
    from matplotlib.figure import Figure

    one, two = Figure().subplots(1, 2)
    assert plots_drafts.acceptance(STATS, ax=one) is one.figure
    assert plots_drafts.expected_gain(DRAFTING, SHARES, ax=two) is one.figure
    assert one.containers
    assert two.lines
