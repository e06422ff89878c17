"""Figures of number formats, in the manner of `plots`: the values that a format has for a group of weights, and what it costs."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mla_jax.ui.plots import INK, _axes, _figure, _title
from mla_jax.ui.plots_decode import COLORS

if TYPE_CHECKING:
    from collections.abc import Iterable

    import matplotlib.axes
    import matplotlib.figure

# Marker, size, colour, label
OURS = ("s", 9, COLORS[0], "our formats")
GGUF = ("o", 6, COLORS[1], "GGUF types")
NEAR = [
    ("left", "center", 8, 0),
    ("right", "center", -8, 0),
    ("center", "bottom", 0, 7),
    ("center", "top", 0, -7),
]
FAR = [("left", "bottom", 7, 5), ("right", "bottom", -7, 5), ("left", "top", 7, -5), ("right", "top", -7, -5)]


def rounded(
    weights: np.ndarray,
    formats: Mapping[str, np.ndarray],
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (8, 4.2),
) -> "matplotlib.figure.Figure":
    """Weights on the axis of numbers: a line of marks for the weights themselves, and for what each format makes of them.

    `formats` maps names to values of the shape of `weights`. Next to each line are the number of values that differ, and their
    error."""
    (plot,) = _axes(ax, size)
    for row, values in enumerate((weights, *formats.values())):
        color = INK if row == 0 else COLORS[(row - 1) % len(COLORS)]
        plot.vlines(np.unique(values), row - 0.32, row + 0.32, color=color, lw=1)
        error = float(np.linalg.norm(values - weights) / np.linalg.norm(weights))
        said = f"{len(np.unique(values))} values" + (f"\nerror {_percent(error)}" if row else "")
        plot.annotate(
            said,
            (1, row),
            (8, 0),
            xycoords=("axes fraction", "data"),
            **_WORDS,
            va="center",
            annotation_clip=False,
        )
    plot.set_yticks(range(len(formats) + 1), ["float32", *formats])
    plot.invert_yaxis()
    plot.set(xlabel=f"the values of {weights.size} adjacent weights")
    plot.tick_params(axis="y", length=0)
    plot.spines["left"].set_visible(False)
    kept = {name: len(np.unique(values)) for name, values in formats.items()}
    fewest = min(kept, key=kept.__getitem__)
    _title(plot, f"Of {len(np.unique(weights))} different weights {fewest} keeps {kept[fewest]} apart")
    return _figure(plot)


def errors(
    rows: Sequence[Mapping[str, float | str]],
    *,
    ax: "Iterable[matplotlib.axes.Axes] | None" = None,
    size: tuple[float, float] = (9, 3.8),
) -> "matplotlib.figure.Figure":
    """Weights' relative error and logits' KL divergence over bits a weight, a marker for each row.

    Rows have `format`, `bits`, `error` (a fraction) and `kl` (bits a token); zeros, which log scales lack, are left out."""
    panels, points = _axes(ax, size, 2), []
    for plot, field in zip(panels, ("error", "kl"), strict=True):
        points.append(
            {
                str(row["format"]): (float(row["bits"]), float(row[field]))
                for row in rows
                if float(row[field]) > 0
            }
        )
        _mark(plot, points[-1])
    panels[0].set(ylabel="relative error of the weights")
    panels[1].set(ylabel="KL, bits a token")
    panels[0].yaxis.set_major_formatter(lambda value, _: _percent(value))
    panels[0].legend(loc="upper right", frameon=False)
    worst = max(rows, key=lambda row: float(row["kl"]))
    _title(panels[0], _fall(points[0]))
    _title(
        panels[1],
        f"{worst['format']} moves the next token's\ndistribution most: {float(worst['kl']):.2g} bits",
    )
    for plot, found in zip(panels, points, strict=True):
        _name_markers(plot, found)
    return _figure(*panels)


def sizes(
    parts: Mapping[str, Mapping[str, int]],
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (8, 3.2),
) -> "matplotlib.figure.Figure":
    """Bytes of a model in several formats, one bar a format, cut into the parts that `parts` names: {format: {part: bytes}}."""
    (plot,) = _axes(ax, size)
    held = {
        name: sum(found.get(name, 0) for found in parts.values())
        for found in parts.values()
        for name in found
    }
    names = sorted(held, key=held.__getitem__, reverse=True)
    totals = [sum(found.values()) for found in parts.values()]
    left = np.zeros(len(parts))
    for color, name in zip(COLORS * len(names), names, strict=False):
        widths = np.array([found.get(name, 0) for found in parts.values()], float)
        plot.barh(range(len(parts)), widths, left=left, height=0.65, color=color, label=name)
        left += widths
    for row, total in enumerate(totals):
        plot.annotate(_bytes(total), (total, row), (5, 0), **_WORDS, va="center")
    plot.set_yticks(range(len(parts)), list(parts))
    plot.invert_yaxis()
    plot.set(xlim=(0, max(totals) * 1.15), xlabel="bytes of the weights")
    plot.xaxis.set_major_formatter(lambda value, _: _bytes(value))
    plot.legend(loc="lower right", frameon=False)
    first = next(iter(parts))
    last = list(parts)[totals.index(min(totals))]
    _title(plot, f"{last} takes {max(totals) / min(totals):.2g} times fewer bytes than {first}")
    return _figure(plot)


_WORDS = {"textcoords": "offset points", "fontsize": 9, "color": INK}


def _name_markers(plot, points: Mapping[str, tuple[float, float]]):
    """Names each point at the first place around it where its name touches no other name, no marker and no edge."""
    from matplotlib.transforms import Bbox

    plot.figure.draw_without_rendering()
    within = plot.get_window_extent()
    centres = plot.transData.transform([*points.values()])
    taken = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in centres]
    for name, point in points.items():
        for left, (ha, va, x, y) in zip(range(len(NEAR + FAR))[::-1], NEAR + FAR, strict=True):
            label = plot.annotate(name, point, (x, y), ha=ha, va=va, in_layout=False, **_WORDS)
            box = label.get_window_extent()
            if not left or (within.x0 < box.x0 and box.x1 < within.x1 and not box.count_overlaps(taken)):
                break
            label.remove()
        taken.append(box.padded(2))


def _mark(plot, points: Mapping[str, tuple[float, float]]):
    bits, values = zip(*points.values(), strict=True)
    plot.set(yscale="log", xlabel="bits a weight, scales included")
    plot.set(ylim=(min(values) / 2.5, max(values) * 2.5), xlim=(min(bits) - 2, max(bits) + 1))
    for ours, (marker, size, color, what) in ((True, OURS), (False, GGUF)):
        if found := [point for name, point in points.items() if name[0].islower() == ours]:
            plot.plot(*zip(*found, strict=True), marker, color=color, ms=size, mec="white", label=what)


def _fall(points: Mapping[str, tuple[float, float]]) -> str:
    """How the error falls with bits, from the format of fewest to that of most."""
    (few, coarse), *_, (many, fine) = sorted(points.values())
    return f"{many - few:.1f} bits more a weight:\n{coarse / fine:.0f} times less error"


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"


def _bytes(value: float) -> str:
    power = max(0, min(4, (len(str(int(value))) - 1) // 3))
    return f"{value / 1000.0**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
