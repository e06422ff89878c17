"""Figures of drafts: how often guesses stand, and how much time they are expected to save."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.drawing import ABOVE_BESIDE, COLORS, INK, finished, new_axes, powers_of_two, title
from mla_jax.engine.core.drafting import ASSUMED_HELD, Drafting
from mla_jax.engine.core.stats import EngineStats

GROUP = 0.8  # width of the bars of one place
IN_MARKER = {"ha": "center", "va": "center_baseline", "fontsize": 8, "color": "white", "fontweight": "bold"}


def acceptance(stats: Mapping[str, EngineStats]) -> Figure:
    """The share of guesses that stood in each place behind a chosen token, a colour for each of the named engines.

    A place is drawn where anything was guessed. In the legend: tokens a pass."""
    (plot,) = new_axes((7.5, 3.6))
    places = max(int((one.drafted > 0).sum()) for one in stats.values())
    width = GROUP / len(stats)
    for i, (color, (name, one)) in enumerate(zip(COLORS, stats.items(), strict=False)):
        asked = np.flatnonzero(one.drafted)
        shares = 100 * one.stood[asked] / one.drafted[asked]
        middle = asked + 1 + (i + 0.5) * width - GROUP / 2
        label = f"{name}: {one.tokens_a_pass:.2f} tokens a pass"
        bars = plot.bar(middle, shares, 0.92 * width, color=color, label=label)
        plot.bar_label(bars, [f"{share:.0f}" for share in shares], padding=2, fontsize=9, color=INK)
    plot.set(xticks=range(1, places + 1), xlabel="place behind the chosen token")
    plot.set(ylim=(0, 109), ylabel="guesses that stood, %")
    plot.legend(**ABOVE_BESIDE)
    best = max(stats, key=lambda name: stats[name].tokens_a_pass)
    finding = f"{stats[best].tokens_a_pass:.2f} tokens a pass: {best}"
    title(plot, finding, "of the guesses in a place that were compared: all before them stood")
    return finished(plot)


def expected_gain(
    drafting: Mapping[str, Drafting], shares: Sequence[float], held: int = ASSUMED_HELD, octaves: int = 8
) -> Figure:
    """How many times as fast as plain decoding the cost model expects drafts to be, by rows, with the number of guesses it takes.

    A line for each of the named models; `shares` are how often guesses in each place stand. A marker says how many guesses a pass
    are taken; 0 is plain decoding."""
    (plot,) = new_axes((7.5, 3.8))
    rows = [2**n for n in range(octaves + 1)]
    best = {name: [_best(one, count, held, shares) for count in rows] for name, one in drafting.items()}
    for color, (name, found) in zip(COLORS * len(best), best.items(), strict=False):
        _draw_gains(plot, rows, found, color, name)
    plot.axhline(1, color=INK, lw=0.8, ls=":", zorder=0)
    powers_of_two(plot.xaxis, octaves)
    plot.set(xlim=(0.85, 2**octaves * 1.18), xlabel="rows (sequences in the batch)", ylabel="tokens/s, times plain")
    gain, name, count = max(
        (gain, name, count) for name, found in best.items() for count, (gain, _) in zip(rows, found, strict=True)
    )
    plot.set_ylim(0.85, 1.08 * gain)
    plot.legend(**ABOVE_BESIDE)
    said = ", ".join(f"{share:.0%}" for share in shares)
    detail = f"expected where {said} of the guesses stand; numbers: guesses a pass"
    title(plot, f"At most {gain:.2g} times as fast as plain: {name}, {count:,} rows", detail)
    return finished(plot)


def _draw_gains(plot: Axes, rows: Sequence[int], found: Sequence[tuple[float, int]], color: str, name: str) -> None:
    """A line of gains, with the number of guesses in each marker."""
    gains = [gain for gain, _ in found]
    plot.plot(rows, gains, "o-", color=color, ms=13, mec="white", label=name, clip_on=False)
    for count, (gain, guesses) in zip(rows, found, strict=True):
        plot.text(count, gain, str(guesses), **IN_MARKER)


def _best(drafting: Drafting, rows: int, held: int, shares: Sequence[float]) -> tuple[float, int]:
    """(times as fast as plain, guesses a pass)."""
    tokens = 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(shares[: drafting.drafter.most]))])
    plain = drafting.seconds(rows, held, 0)
    return max((float(count * plain / drafting.seconds(rows, held, n)), n) for n, count in enumerate(tokens))
