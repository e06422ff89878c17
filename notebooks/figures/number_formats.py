"""Figures of number formats: the values that a format has for a group of weights, its errors and its bytes."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from figures.drawing import COLORS, INK, WORDS, finished, new_axes, si, title

# Marker, size, colour, label
OURS = ("s", 9, COLORS[0], "our formats")
GGUF = ("o", 6, COLORS[1], "GGUF types")
# Of a name beside its marker: how it is aligned, and its offset in points
PLACES = [
    ("left", "center", 8, 0),
    ("right", "center", -8, 0),
    ("center", "bottom", 0, 7),
    ("center", "top", 0, -7),
    ("left", "bottom", 7, 5),
    ("right", "bottom", -7, 5),
    ("left", "top", 7, -5),
    ("right", "top", -7, -5),
]


def rounded(weights: np.ndarray, formats: Mapping[str, np.ndarray]) -> Figure:
    """Weights on the axis of numbers: a line of marks for the weights themselves, and for what each format makes of them.

    `formats` maps names to values of the shape of `weights`. Next to each line are the number of values that differ, and their
    error."""
    (plot,) = new_axes((8, 4.2))
    _draw_values(plot, 0, weights, INK, "")
    for row, values in enumerate(formats.values(), 1):
        error = float(np.linalg.norm(values - weights) / np.linalg.norm(weights))
        _draw_values(plot, row, values, COLORS[(row - 1) % len(COLORS)], f"\nerror {_percent(error)}")
    plot.set_yticks(range(len(formats) + 1), ["float32", *formats])
    plot.invert_yaxis()
    plot.set(xlabel=f"the values of {weights.size} adjacent weights")
    plot.tick_params(axis="y", length=0)
    plot.spines["left"].set_visible(False)
    kept = {name: len(np.unique(values)) for name, values in formats.items()}
    fewest = min(kept, key=kept.__getitem__)
    title(plot, f"Of {len(np.unique(weights))} different weights {fewest} keeps {kept[fewest]} apart")
    return finished(plot)


def errors(rows: Sequence[Mapping[str, float | str]]) -> Figure:
    """Weights' relative error and logits' KL divergence over bits a weight, a marker for each row.

    Rows have `format`, `bits`, `error` (a fraction) and `kl` (bits a token); zeros, which log scales lack, are left out."""
    left, right = new_axes((9, 3.8), 2)
    weights, logits = _points(rows, "error"), _points(rows, "kl")
    _mark(left, weights)
    _mark(right, logits)
    left.set(ylabel="relative error of the weights")
    right.set(ylabel="KL, bits a token")
    left.yaxis.set_major_formatter(lambda value, _: _percent(value))
    left.legend(loc="upper right", frameon=False)
    title(left, _fall(weights))
    worst = max(logits, key=lambda name: logits[name][1])
    title(right, f"{worst} moves the next token's\ndistribution most: {logits[worst][1]:.2g} bits")
    _name_markers(left, weights)
    _name_markers(right, logits)
    return finished(left, right)


def sizes(parts: Mapping[str, Mapping[str, int]]) -> Figure:
    """Bytes of a model in several formats, one bar a format, cut into the parts that `parts` names: {format: {part: bytes}}."""
    (plot,) = new_axes((8, 3.2))
    left = np.zeros(len(parts))
    for color, name in zip(itertools.cycle(COLORS), _largest_first(parts.values()), strict=False):
        widths = np.array([found.get(name, 0) for found in parts.values()], float)
        plot.barh(range(len(parts)), widths, left=left, height=0.65, color=color, label=name)
        left += widths
    totals = {name: sum(found.values()) for name, found in parts.items()}
    for row, total in enumerate(totals.values()):
        plot.annotate(si(total, "B"), (total, row), (5, 0), **WORDS, va="center")
    plot.set_yticks(range(len(parts)), list(parts))
    plot.invert_yaxis()
    plot.set(xlim=(0, max(totals.values()) * 1.15), xlabel="bytes of the weights")
    plot.xaxis.set_major_formatter(lambda value, _: si(value, "B"))
    plot.legend(loc="lower right", frameon=False)
    least, most = min(totals, key=totals.__getitem__), max(totals, key=totals.__getitem__)
    title(plot, f"{least} takes {totals[most] / totals[least]:.2g} times fewer bytes than {most}")
    return finished(plot)


def _draw_values(plot: Axes, row: int, values: np.ndarray, color: str, detail: str) -> None:
    """A mark at every value, and their number at the end of the line."""
    different = np.unique(values)
    plot.vlines(different, row - 0.32, row + 0.32, color=color, lw=1)
    place = {"xycoords": ("axes fraction", "data"), "va": "center", "annotation_clip": False}
    plot.annotate(f"{len(different)} values{detail}", (1, row), (8, 0), **place, **WORDS)


def _points(rows: Iterable[Mapping[str, float | str]], field: str) -> dict[str, tuple[float, float]]:
    """(bits, value) by format, without zeros."""
    return {str(row["format"]): (float(row["bits"]), float(row[field])) for row in rows if float(row[field]) > 0}


def _largest_first(parts: Iterable[Mapping[str, int]]) -> list[str]:
    """The names of the parts, by their bytes in all formats."""
    held: dict[str, int] = {}
    for found in parts:
        for name, size in found.items():
            held[name] = held.get(name, 0) + size
    return sorted(held, key=held.__getitem__, reverse=True)


def _name_markers(plot: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    """Names each point at the first place around it where its name touches no other name, no marker and no edge."""
    plot.figure.draw_without_rendering()
    centres = plot.transData.transform([*points.values()])
    taken = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in centres]
    for name, point in points.items():
        taken.append(_name_marker(plot, name, point, taken).padded(2))


def _name_marker(plot: Axes, name: str, point: tuple[float, float], taken: Sequence[Bbox]) -> Bbox:
    """Returns the place of the name, which is the last one that was tried if none is free."""
    within = plot.get_window_extent()
    for place in PLACES:
        label = _written(plot, name, point, place)
        box = label.get_window_extent()
        if within.x0 < box.x0 and box.x1 < within.x1 and not box.count_overlaps(taken):
            return box
        label.remove()
    return _written(plot, name, point, PLACES[-1]).get_window_extent()


def _written(plot: Axes, name: str, point: tuple[float, float], place: tuple) -> Annotation:
    ha, va, x, y = place
    return plot.annotate(name, point, (x, y), ha=ha, va=va, in_layout=False, **WORDS)


def _mark(plot: Axes, points: Mapping[str, tuple[float, float]]) -> None:
    bits, values = zip(*points.values(), strict=True)
    plot.set(yscale="log", xlabel="bits a weight, scales included")
    plot.set(ylim=(min(values) / 2.5, max(values) * 2.5), xlim=(min(bits) - 2, max(bits) + 1))
    for is_ours, (marker, size, color, label) in ((True, OURS), (False, GGUF)):
        if found := [point for name, point in points.items() if name[0].islower() == is_ours]:
            plot.plot(*zip(*found, strict=True), marker, color=color, ms=size, mec="white", label=label)


def _fall(points: Mapping[str, tuple[float, float]]) -> str:
    """How the error falls with bits, from the format of fewest to that of most."""
    (few, coarse), *_, (many, fine) = sorted(points.values())
    return f"{many - few:.1f} bits more a weight:\n{coarse / fine:.0f} times less error"


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %"
