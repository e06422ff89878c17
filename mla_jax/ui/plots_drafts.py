"""Figures of drafts, in the manner of `plots`: how often guesses stand, and how much time they are expected to save."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mla_jax.engine.core.drafting import HELD, Drafting
from mla_jax.engine.core.stats import EngineStats
from mla_jax.ui.plots import INK, _axes, _figure, _powers_of_two, _title
from mla_jax.ui.plots_decode import COLORS

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

GROUP = 0.8  # width of the bars of one place


def acceptance(
    stats: Mapping[str, EngineStats],
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (7.5, 3.6),
) -> "matplotlib.figure.Figure":
    """The share of guesses that stood in each place behind a chosen token, a colour for each of the named engines.

    A place is drawn where anything was guessed. In the legend: tokens a pass."""
    (plot,) = _axes(ax, size)
    places = max(int((one.drafted > 0).sum()) for one in stats.values())
    width = GROUP / len(stats)
    for i, (color, (name, one)) in enumerate(zip(COLORS, stats.items(), strict=False)):
        asked = np.flatnonzero(one.drafted)
        shares = 100 * one.stood[asked] / one.drafted[asked]
        middle = asked + 1 + (i + 0.5) * width - GROUP / 2
        label = f"{name}: {one.tokens_a_pass:.2f} tokens a pass"
        bars = plot.bar(middle, shares, 0.92 * width, color=color, label=label)
        plot.bar_label(bars, [f"{share:.0f}" for share in shares], padding=2, fontsize=9, color=INK)
    plot.set(
        xticks=range(1, places + 1),
        xlabel="place behind the chosen token",
        ylabel="guesses that stood, %",
        ylim=(0, 109),
    )
    plot.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    best = max(stats, key=lambda name: stats[name].tokens_a_pass)
    title = f"{stats[best].tokens_a_pass:.2f} tokens a pass: {best}"
    _title(plot, title, "of the guesses in a place that were compared: all before them stood")
    return _figure(plot)


def expected_gain(
    drafting: Mapping[str, Drafting],
    shares: Sequence[float],
    *,
    held: int = HELD,
    octaves: int = 8,
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (7.5, 3.8),
) -> "matplotlib.figure.Figure":
    """How many times as fast as plain decoding the cost model expects drafts to be, by rows, with the number of guesses it takes.

    A line for each of the named models; `shares` are how often guesses in each place stand. A marker says how many guesses a pass
    are taken; 0 is plain decoding."""
    (plot,) = _axes(ax, size)
    rows, gains = [2**n for n in range(octaves + 1)], {}
    for color, (name, one) in zip(COLORS * len(drafting), drafting.items(), strict=False):
        best = [_best(one, count, held, shares) for count in rows]
        gains[name] = [gain for gain, _ in best]
        plot.plot(rows, gains[name], "o-", color=color, ms=13, mec="white", label=name, clip_on=False)
        for count, (gain, guesses) in zip(rows, best, strict=True):
            style = {
                "ha": "center",
                "va": "center_baseline",
                "fontsize": 8,
                "color": "white",
                "fontweight": "bold",
            }
            plot.text(count, gain, str(guesses), **style)
    plot.axhline(1, color=INK, lw=0.8, ls=":", zorder=0)
    _powers_of_two(plot.xaxis, octaves)
    plot.set(
        xlim=(0.85, 2**octaves * 1.18), xlabel="rows (sequences in the batch)", ylabel="tokens/s, times plain"
    )
    plot.set_ylim(0.85, 1.08 * max(max(found) for found in gains.values()))
    plot.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    most = max(gains, key=lambda name: max(gains[name]))
    where = rows[int(np.argmax(gains[most]))]
    said = ", ".join(f"{share:.0%}" for share in shares)
    detail = f"expected where {said} of the guesses stand; numbers: guesses a pass"
    _title(plot, f"At most {max(gains[most]):.2g} times as fast as plain: {most}, {where:,} rows", detail)
    return _figure(plot)


def _best(drafting: Drafting, rows: int, held: int, shares: Sequence[float]) -> tuple[float, int]:
    """(times as fast as plain, guesses a pass)."""
    tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(shares[: drafting.drafter.most]))])
    plain = drafting.seconds(rows, held, 0)
    return max((float(count * plain / drafting.seconds(rows, held, n)), n) for n, count in enumerate(tokens))
