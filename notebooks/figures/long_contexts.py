"""Figures of long contexts: where attention goes, the tokens that are kept of it, and the loss and the time of that."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.drawing import ABOVE_BESIDE, COLORS, INK, finished, new_axes, title

Row = Mapping[str, Any]
MARKS = {"fmt": "o-", "ms": 6, "mec": "white", "capsize": 3, "elinewidth": 0.8}


def concentration(needed: np.ndarray) -> Figure:
    """The share of the tokens that has 95 % of a head's attention, `[layers heads]`."""
    (plot,) = new_axes((6.5, 3.6))
    image = plot.imshow(100 * needed, cmap="viridis", aspect="auto", origin="lower", vmin=0)
    _numbers(plot, 100 * needed, "{:.0f}")
    plot.figure.colorbar(image, ax=plot, label="tokens with 95 % of the attention, %")
    plot.set(xlabel="head", ylabel="layer", xticks=range(needed.shape[1]), yticks=range(needed.shape[0]))
    finding = f"95 % of the attention is on {needed.min():.0%} to {needed.max():.0%} of the tokens"
    title(plot, finding, "by head")
    return finished(plot)


def counts(of_heads: np.ndarray, of_layers: np.ndarray, average: int) -> Figure:
    """The tokens that Ada-KV keeps: of each head of each layer `[layers heads]`, and of each layer of latents `[layers]`."""
    left, right = new_axes((9, 3.6), columns=2)
    image = left.imshow(of_heads, cmap="viridis", aspect="auto", origin="lower", vmin=0)
    _numbers(left, of_heads, "{:.0f}")
    left.figure.colorbar(image, ax=left)
    left.set(xlabel="head", ylabel="layer", xticks=range(of_heads.shape[1]), yticks=range(len(of_heads)))
    title(left, "Cached heads: shared out in a layer")
    right.barh(range(len(of_layers)), of_layers, color=COLORS[0])
    right.axvline(average, color=INK, lw=0.8, ls=":")
    right.set(xlabel=f"tokens kept, {average:,} on average", ylabel="layer", yticks=range(len(of_layers)))
    title(right, "Latents: shared out over layers")
    return finished(left, right)


def bound_and_change(found: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """For each budget the bound of theorem 3.1 and the real change of a layer's output, of each layer and query."""
    (plot,) = new_axes((6.5, 3.8))
    for color, (name, (bound, change)) in zip(COLORS, found.items(), strict=False):
        plot.loglog(bound, change, "o", color=color, ms=4, alpha=0.6, mec="none", label=name)
    ends = [min(bound.min() for bound, _ in found.values()), max(bound.max() for bound, _ in found.values())]
    plot.loglog(ends, ends, color=INK, lw=0.8, ls=":")
    plot.set(xlabel="bound, as a share of the largest value", ylabel="change of the output")
    plot.legend(**ABOVE_BESIDE)
    means = {name: float(change.mean()) for name, (_, change) in found.items()}
    title(plot, "No change is above its bound", ", ".join(f"{name}: {mean:.3f} on average" for name, mean in means.items()))
    return finished(plot)


def divergence(rows: Iterable[Row]) -> Figure:
    """The divergence from the full cache by the share of the tokens that stays, a line for each name.

    A row has name, kept, kl, low and high; the last two are an interval."""
    (plot,) = new_axes((7.5, 3.8))
    lines: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["kept"]):
        lines.setdefault(row["name"], []).append(row)
    for color, (name, found) in zip(COLORS * len(lines), lines.items(), strict=False):
        kept, kl, low, high = (np.array([row[key] for row in found]) for key in ("kept", "kl", "low", "high"))
        plot.errorbar(100 * kept, kl, (kl - low, high - kl), color=color, label=name, **MARKS)
    plot.set(xlim=(0, None), ylim=(0, None), xlabel="tokens that stay, %", ylabel="divergence, nats a token")
    plot.legend(**ABOVE_BESIDE)
    fewest = min(row["kept"] for found in lines.values() for row in found)
    at = {name: row["kl"] for name, found in lines.items() for row in found if row["kept"] == fewest}
    title(plot, f"Closest to the full cache with {fewest:.0%}: {min(at, key=at.__getitem__)}", "bars are 95 % intervals")
    return finished(plot)


def needles(right: np.ndarray, lengths: Sequence[int], depths: Sequence[float], detail: str) -> Figure:
    """The share of needles found `[lengths depths]`."""
    (plot,) = new_axes((6.5, 3.6))
    image = plot.imshow(100 * right.T, cmap="viridis", aspect="auto", vmin=0, vmax=100)
    plot.figure.colorbar(image, ax=plot, label="found, %")
    plot.set(xlabel="tokens of the text", ylabel="where the needle stands, %")
    plot.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45)
    plot.set_yticks(range(len(depths)), [f"{100 * depth:.0f}" for depth in depths])
    title(plot, f"{right.mean():.0%} of the needles are found", detail)
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


def _numbers(plot: Axes, values: np.ndarray, form: str) -> None:
    """The numbers of an image in its cells."""
    middle = (values.min() + values.max()) / 2
    for (row, column), value in np.ndenumerate(values):
        color = "white" if value < middle else "black"
        plot.text(column, row, form.format(value), ha="center", va="center", fontsize=8, color=color)
