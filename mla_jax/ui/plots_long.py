"""Figures of long contexts, in the manner of `plots`: what is left of the right answers, and of the time, with less of the cache.

The rows are those of `benchmarks/longcontext.py`, or of its kin."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mla_jax.ui.plots import INK, _axes, _figure, _title
from mla_jax.ui.plots_decode import COLORS

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

Row = Mapping[str, Any]


def quality(
    rows: Iterable[Row],
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (7.5, 3.8),
) -> "matplotlib.figure.Figure":
    """The share of right answers by the share of the tokens that stays, a line for each policy and budget rule.

    A row has policy, budget, kept, all, low and high; the last two are an interval. Policy "none" is full attention."""
    (plot,) = _axes(ax, size)
    full, lines = _lines(rows)
    for color, (name, found) in zip(COLORS * len(lines), lines.items(), strict=False):
        kept = [100 * row["kept"] for row in found]
        right = [100 * row["all"] for row in found]
        below, above = ([100 * abs(row["all"] - row[end]) for row in found] for end in ("low", "high"))
        plot.errorbar(
            kept,
            right,
            (below, above),
            fmt="o-",
            color=color,
            ms=6,
            mec="white",
            capsize=3,
            elinewidth=0.8,
            label=name,
        )
    plot.axhline(100 * full, color=INK, lw=0.8, ls=":", zorder=0)
    plot.annotate(
        "full attention",
        (1, 100 * full),
        (-2, 3),
        plot.get_yaxis_transform(),
        textcoords="offset points",
        ha="right",
    )
    plot.set(xlim=(0, None), ylim=(0, 109), xlabel="tokens that stay, %", ylabel="right answers, %")
    plot.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    best = max((row for found in lines.values() for row in found), key=lambda row: row["all"])
    title = f"At best {best['all']:.0%} are right, where {best['kept']:.0%} of the tokens stay"
    _title(plot, title, f"{best['policy']}, {best['budget']}; bars are 95 % intervals")
    return _figure(plot)


def _lines(rows: Iterable[Row]) -> tuple[float, dict[str, list[Row]]]:
    """Full attention's share, and the rows of each policy and budget rule, fewest tokens first."""
    full, lines = 0.0, {}
    for row in sorted(rows, key=lambda row: row["kept"]):
        if row["policy"] == "none":
            full = row["all"]
        else:
            lines.setdefault(f"{row['policy']}, {row['budget']}", []).append(row)
    return full, lines


def attention_time(
    rows: Iterable[Row],
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (7.5, 3.8),
) -> "matplotlib.figure.Figure":
    """The time of a decode step's attention by the tokens that each row holds, a line for each way to attend.

    A row has way, held and "attention ms". The title compares the longest rows with those of the way "full"."""
    (plot,) = _axes(ax, size)
    lines: dict[str, list[Row]] = {}
    for row in rows:
        lines.setdefault(row["way"], []).append(row)
    for color, (name, found) in zip(COLORS * len(lines), lines.items(), strict=False):
        held, ms = [row["held"] for row in found], [row["attention ms"] for row in found]
        plot.loglog(held, ms, "o-", color=color, ms=6, mec="white", label=name)
    ticks = sorted({row["held"] for found in lines.values() for row in found})
    plot.set_xticks(ticks, [f"{held:,}" for held in ticks])
    plot.minorticks_off()
    plot.set(xlabel="tokens that a row holds", ylabel="attention, ms a step")
    plot.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, fontsize=9)
    longest = {
        name: found[-1]["attention ms"] for name, found in lines.items() if found[-1]["held"] == ticks[-1]
    }
    least = min(longest, key=lambda name: longest[name])
    _title(
        plot,
        f"{longest[least] / longest['full']:.0%} of full attention's time at {ticks[-1]:,} tokens: {least}",
    )
    return _figure(plot)
