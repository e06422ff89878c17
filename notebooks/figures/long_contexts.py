"""Figures of long contexts: right answers, and the time of attention, with less of the cache than full attention reads.

The rows are those of `benchmarks/longcontext.py`, or of its kin."""

from collections.abc import Iterable, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.drawing import ABOVE_BESIDE, COLORS, INK, finished, new_axes, title

Row = Mapping[str, Any]
MARKS = {"fmt": "o-", "ms": 6, "mec": "white", "capsize": 3, "elinewidth": 0.8}


def quality(rows: Iterable[Row]) -> Figure:
    """The share of right answers by the share of the tokens that stays, a line for each policy and budget rule.

    A row has policy, budget, kept, all, low and high; the last two are an interval. Policy "none" is full attention."""
    (plot,) = new_axes((7.5, 3.8))
    full, lines = _lines(rows)
    for color, (name, found) in zip(COLORS * len(lines), lines.items(), strict=False):
        _draw_answers(plot, found, color, name)
    plot.axhline(100 * full, color=INK, lw=0.8, ls=":", zorder=0)
    place = {"textcoords": "offset points", "ha": "right"}
    plot.annotate("full attention", (1, 100 * full), (-2, 3), plot.get_yaxis_transform(), **place)
    plot.set(xlim=(0, None), ylim=(0, 109), xlabel="tokens that stay, %", ylabel="right answers, %")
    plot.legend(**ABOVE_BESIDE)
    best = max((row for found in lines.values() for row in found), key=lambda row: row["all"])
    finding = f"At best {best['all']:.0%} are right, where {best['kept']:.0%} of the tokens stay"
    title(plot, finding, f"{best['policy']}, {best['budget']}; bars are 95 % intervals")
    return finished(plot)


def attention_time(rows: Iterable[Row]) -> Figure:
    """The time of a decode step's attention by the tokens that each row holds, a line for each way to attend.

    A row has way, held and "attention ms". The title compares the longest rows with those of the way "full"."""
    (plot,) = new_axes((7.5, 3.8))
    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        lines.setdefault(row["way"], {})[row["held"]] = row["attention ms"]
    for color, (name, times) in zip(COLORS * len(lines), lines.items(), strict=False):
        plot.loglog([*times], [*times.values()], "o-", color=color, ms=6, mec="white", label=name)
    ticks = sorted({held for times in lines.values() for held in times})
    plot.set_xticks(ticks, [f"{held:,}" for held in ticks])
    plot.minorticks_off()
    plot.set(xlabel="tokens that a row holds", ylabel="attention, ms a step")
    plot.legend(**ABOVE_BESIDE)
    longest = {name: times[ticks[-1]] for name, times in lines.items() if ticks[-1] in times}
    least = min(longest, key=longest.__getitem__)
    share = longest[least] / longest["full"]
    title(plot, f"{share:.0%} of full attention's time at {ticks[-1]:,} tokens: {least}")
    return finished(plot)


def _lines(rows: Iterable[Row]) -> tuple[float, dict[str, list[Row]]]:
    """Full attention's share, and the rows of each policy and budget rule, fewest tokens first."""
    full, lines = 0.0, {}
    for row in sorted(rows, key=lambda row: row["kept"]):
        if row["policy"] == "none":
            full = row["all"]
        else:
            lines.setdefault(f"{row['policy']}, {row['budget']}", []).append(row)
    return full, lines


def _draw_answers(plot: Axes, rows: Iterable[Row], color: str, name: str) -> None:
    """A line of shares with their intervals."""
    kept, right, low, high = ([100 * row[key] for row in rows] for key in ("kept", "all", "low", "high"))
    below = [middle - end for middle, end in zip(right, low, strict=True)]
    above = [end - middle for middle, end in zip(right, high, strict=True)]
    plot.errorbar(kept, right, (below, above), color=color, label=name, **MARKS)
