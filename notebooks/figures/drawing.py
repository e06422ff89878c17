"""Drawing that all figures share: new axes, titles, colours, axes by powers of two, numbers with their units."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

INK = "#444444"
# Okabe and Ito's palette, which colour-blind readers tell apart
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
PREFIXES = ("n", "µ", "m", "", "k", "M", "G", "T", "P", "E")
WORDS = {"textcoords": "offset points", "fontsize": 9, "color": INK}
BESIDE = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "frameon": False, "fontsize": 9}
ABOVE_BESIDE = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "frameon": False, "fontsize": 9}


def new_axes(size: tuple[float, float], columns: int = 1) -> list[Axes]:
    """Axes side by side on a new figure of `size` inches, which is none of pyplot's: a notebook shows it once."""
    return list(Figure(figsize=size, dpi=110, layout="constrained").subplots(1, columns, squeeze=False)[0])


def finished(*axes: Axes) -> Figure:
    """The figure around axes that are drawn."""
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure = axes[0].figure
    assert isinstance(figure, Figure)
    return figure


def title(ax: Axes, finding: str, detail: str = "") -> None:
    """The finding in bold, and under it the case that is drawn."""
    ax.set_title(finding, loc="left", fontsize=11, fontweight="bold", pad=22 if detail else 8)
    if detail:
        ax.annotate(detail, (0, 1), (0, 6), xycoords="axes fraction", in_layout=False, **WORDS)


def powers_of_two(axis: Axis, octaves: int) -> None:
    """A log scale with ticks at every second or third power of two up to 2**octaves."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    step = 2 if octaves <= 12 else 3
    ticks = [2**n for n in range(octaves % step, octaves + 1, step)]
    axis.set_ticks(ticks, [f"{n // 1024}K" if n >= 1024 else str(n) for n in ticks])
    axis.set_ticks([], minor=True)


def whole_numbers(octaves: int) -> list[int]:
    """Whole numbers from 1 to 2**octaves, about evenly apart on a log scale."""
    return sorted({round(2 ** (i / 8)) for i in range(octaves * 8 + 1)})


def dtype_name(itemsize: int) -> str:
    return {2: "bf16", 4: "float32"}.get(itemsize, f"{itemsize} bytes a number")


def counted(n: int, thing: str) -> str:
    """1 row, 2 rows."""
    return f"{n:,} {thing}{'' if n == 1 else 's'}"


def span(values: Sequence[float]) -> str:
    """From the least to the most, or one number where they are alike."""
    low = f"{min(values):,.0f}"
    high = f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"


def si(value: float, unit: str) -> str:
    """Three digits and a prefix of the unit: 138 GFLOP."""
    value = float(f"{value:.3g}")
    thousands = max(-3, min(6, math.floor(math.log10(value) / 3))) if value else 0
    return f"{value / 1000.0**thousands:.3g} {PREFIXES[thousands + 3]}{unit}"


def in_seconds(axis: Axis) -> None:
    """Ticks as times: 9.31 µs."""
    axis.set_major_formatter(lambda value, _: si(value, "s"))
