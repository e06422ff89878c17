"""Figures of the cost model: the bytes, the arithmetic and the time of each form of MLA, and the form that a device takes.

All values come from `mla_jax/base/roofline.py` and a Config. Each function returns a new figure, which a notebook with
`%matplotlib inline` shows."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from figures.drawing import (
    INK,
    WORDS,
    counted,
    dtype_name,
    finished,
    in_seconds,
    new_axes,
    powers_of_two,
    si,
    span,
    title,
)
from mla_jax.base.config import Config
from mla_jax.base.roofline import Cost, Device, attention_cost, break_even, held_bytes, pick_form
from mla_jax.mesh.host_cost import fewest

STYLES = {  # marker and colour
    "naive": ("o", "#0072B2"),
    "compressed": ("s", "#E69F00"),
    "absorbed": ("^", "#CC79A7"),
    "move_elided": ("D", "#009E73"),
}
ALTERNATE = {"move_elided": "attends over latents", "compressed": "rebuilds the heads"}  # the forms that `auto` switches between
NEAR = [(12, -12), (-12, 12), (12, 12), (-12, -12)]
# Offsets of a label from its marker, in points
LABEL_PLACES = [*NEAR, *((x * i, y * j) for i in (2, 5, 8) for j in (3, 6) for x, y in NEAR), (12, -12)]
OCTAVE = 8  # cells of the dispatch map a doubling


def roofline(config: Config, device: Device, rows: int, held: int, new: int = 1) -> Figure:
    """Where each form stands under a device's roof: `rows` bring `new` tokens each and attend to `held`, themselves included."""
    (plot,) = new_axes((7.5, 4.6))
    costs = _costs(config, rows, new, held, device.itemsize)
    _draw_roof(plot, device, [cost.flops / cost.bytes for cost in costs.values()])
    for form, cost in costs.items():
        marker, color = STYLES[form]
        width = 12 if form == "naive" else 8  # absorbed often stands on it
        style = {"color": color, "ms": width, "mec": "white", "label": form, "zorder": 3}
        plot.plot(cost.flops / cost.bytes, cost.flops / cost.seconds(device), marker, **style)
    plot.set(xlabel="arithmetic intensity (FLOP per byte)", ylabel="attainable FLOP/s")
    title(plot, _fastest(costs, device), _case(rows, new, held, device.itemsize))
    _name_roof(plot, device)
    _name_points(plot, device, {form: f"{form}\n{si(cost.seconds(device), 's')}" for form, cost in costs.items()})
    return finished(plot)


def cache_bytes(configs: Mapping[str, Config], itemsize: int = 2) -> Figure:
    """Bytes that one token leaves in one layer's cache, as heads and as latent, for each named config."""
    (plot,) = new_axes((7.5, 3.8))
    heads, latents = ([held_bytes(one, form, itemsize) for one in configs.values()] for form in ("naive", "move_elided"))
    _draw_bars(plot, heads, -0.2, STYLES["naive"][1], "heads (naive)")
    _draw_bars(plot, latents, 0.2, STYLES["move_elided"][1], "latent (all others)")
    names = [f"{name}\n{config.num_attention_heads} heads" for name, config in configs.items()]
    plot.set_yticks(range(len(configs)), names)
    plot.invert_yaxis()
    plot.set(xlim=(0, max(heads) * 1.15), xlabel=f"bytes per token and layer ({dtype_name(itemsize)})")
    plot.xaxis.set_major_formatter("{x:,.0f}")
    plot.legend(loc="lower right", frameon=False)
    times = span([a / b for a, b in zip(heads, latents, strict=True)])
    title(plot, f"Remembering the latent takes {times} times fewer bytes than the heads")
    return finished(plot)


def dispatch(config: Config, device: Device, rows: int = 1, octaves: tuple[int, int] = (12, 17)) -> Figure:
    """The form picked for each count of new tokens and prefix length, up to 2 to the `octaves` of each; break-even as a line."""
    (plot,) = new_axes((7.5, 4.6))
    _draw_map(plot, config, device, rows, octaves)
    for axis, n in zip((plot.xaxis, plot.yaxis), octaves, strict=True):
        powers_of_two(axis, n)
    plot.set(xlabel="new tokens per row", ylabel="prefix length (held tokens)")
    _draw_break_even(plot, config)
    case = f"faster form by the cost model, one layer, {counted(rows, 'row')}, {dtype_name(device.itemsize)}"
    title(plot, _change(config, device, rows, 2 ** octaves[0], 2 ** octaves[1]), case)
    return finished(plot)


def costs(config: Config, held: int, rows: int = 1, new: int = 1, itemsize: int = 2) -> Figure:
    """FLOPs and bytes of each form as bars on log scales, where `rows` bring `new` tokens each and attend to `held`."""
    left, right = new_axes((8.5, 3.4), 2)
    found = _costs(config, rows, new, held, itemsize)
    _compare(left, {form: cost.flops for form, cost in found.items()}, "FLOPs", "FLOP")
    _compare(right, {form: cost.bytes for form, cost in found.items()}, "bytes", "B", " read and written")
    right.tick_params(labelleft=False)
    figure = finished(left, right)
    figure.supxlabel(_case(rows, new, held, itemsize), fontsize=9, color=INK)
    return figure


def step_times(config: Config, device: Device, rows: int, held: int, octaves: int = 12) -> Figure:
    """Time a new token of the two forms that take turns, for 1 to 2 to the `octaves` new tokens a row after `held` ones."""
    (plot,) = new_axes((7, 3.8))
    news = _cells(octaves)
    for form, place in (("compressed", (10, 4)), ("move_elided", (4, 10))):
        found = [attention_cost(config, form, rows, new, held + new, device.itemsize) for new in news]
        _draw_times(plot, form, news, found, device, rows)
        first = found[0].seconds(device) / rows / news[0]
        plot.annotate(form, (news[0], first), place, **WORDS | {"fontsize": 10})
    low, high = plot.get_ylim()
    plot.set(xlim=(1, 2**octaves), ylim=(low / 2, high * 8), xlabel="new tokens per row", ylabel="time per new token")
    powers_of_two(plot.xaxis, octaves)
    in_seconds(plot.yaxis)
    _draw_break_even(plot, config)
    _explain_lines(plot)
    case = f"one layer's attention, {counted(rows, 'row')}, {held:,} tokens held before, {dtype_name(device.itemsize)}"
    title(plot, _change(config, device, rows, 2**octaves, held), case)
    return finished(plot)


def _costs(config: Config, rows: int, new: int, held: int, itemsize: int) -> dict[str, Cost]:
    return {form: attention_cost(config, form, rows, new, held, itemsize) for form in STYLES}


def _case(rows: int, new: int, held: int, itemsize: int) -> str:
    step = f"{counted(rows, 'row')}, {counted(new, 'new token')} attending to {held:,}"
    return f"one layer's attention, {step}, {dtype_name(itemsize)}"


def _draw_roof(ax: Axes, device: Device, intensities: Sequence[float]) -> None:
    """The roof and the balance of a device, wide enough for all `intensities`."""
    ridge = device.flops / device.bandwidth
    left, right = min(ridge, *intensities) / 10, max(ridge, *intensities) * 20
    heights = [left * device.bandwidth, device.flops, device.flops]
    ax.loglog([left, ridge, right], heights, color=INK, lw=1.5, label="roof")
    ax.axvline(ridge, color=INK, lw=0.8, ls=":", label="balance")
    ax.set(xlim=(left, right), ylim=(heights[0], device.flops * 4))


def _draw_bars(ax: Axes, values: Sequence[float], offset: float, color: str, label: str) -> None:
    bars = ax.barh([i + offset for i in range(len(values))], values, 0.38, color=color, label=label)
    ax.bar_label(bars, [f"{n:,}" for n in values], padding=4, fontsize=9, color=INK)


def _compare(ax: Axes, values: Mapping[str, float], quantity: str, unit: str, detail: str = "") -> None:
    """A bar for each form on a log scale, and in the title how many times the most costly takes of the least."""
    bars = ax.barh(list(values), list(values.values()), color=[STYLES[form][1] for form in values], height=0.7)
    ax.bar_label(bars, [si(value, unit) for value in values.values()], padding=4, fontsize=9, color=INK)
    least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    low, high = math.log10(values[least]), math.log10(values[most])
    right = high + 0.35 * (high - low + 1)
    ax.set(xscale="log", xlim=(10 ** (low - 1), 10**right), xlabel=f"{quantity}{detail} (log scale)")
    ax.invert_yaxis()
    title(ax, f"{most} takes {values[most] / values[least]:,.0f} times\nthe {quantity} of {least}")


def _draw_times(ax: Axes, form: str, news: Sequence[int], found: Sequence[Cost], device: Device, rows: int) -> None:
    """A form's time a token, dashed, and thick where arithmetic takes longer than memory."""
    color = STYLES[form][1]
    times = [cost.seconds(device) / rows / new for cost, new in zip(found, news, strict=True)]
    busy = [cost.flops / device.flops > cost.bytes / device.bandwidth for cost in found]
    ax.loglog(news, times, color=color, lw=1.5, ls="--", label=form)
    thick = [time if is_busy else math.nan for time, is_busy in zip(times, busy, strict=True)]
    ax.loglog(news, thick, color=color, lw=4, label=f"{form}, busy")


def _explain_lines(ax: Axes) -> None:
    thick = ax.plot([], [], color=INK, lw=4, label="arithmetic decides")
    thin = ax.plot([], [], color=INK, lw=1.5, ls="--", label="memory decides")
    ax.legend(handles=[*thick, *thin], frameon=False)


def _draw_map(ax: Axes, config: Config, device: Device, rows: int, octaves: tuple[int, int]) -> None:
    """Cells in the colour of the picked form, and the forms' names amid their cells at two thirds of the height."""
    news, prefixes = (_cells(n) for n in octaves)
    picked = [[pick_form(config, device, rows, new, prefix + new) for new in news] for prefix in prefixes]
    edges = [[2 ** (i / OCTAVE) for i in range(n * OCTAVE + 1)] for n in octaves]
    numbers = [[[*ALTERNATE].index(form) for form in line] for line in picked]
    colors = ListedColormap([STYLES[form][1] for form in ALTERNATE])
    ax.pcolormesh(*edges, numbers, cmap=colors, vmin=0, vmax=1, alpha=0.4, lw=0)
    high = len(prefixes) * 2 // 3
    for form, does in ALTERNATE.items():
        cells = [new for new, name in zip(news, picked[high], strict=True) if name == form]
        _name_region(ax, cells, prefixes[high], config, f"{form}\n{does}")


def _fastest(costs: Mapping[str, Cost], device: Device) -> str:
    first, second = sorted(costs, key=lambda form: costs[form].seconds(device))[:2]
    ahead = costs[second].seconds(device) / costs[first].seconds(device)
    if ahead < 1.05:
        return f"{device.name}: {first} and {second} need the same time"
    return f"{device.name}: {first} needs least time, {ahead:.2g} times less than {second}"


def _change(config: Config, device: Device, rows: int, most: int, prefix: int) -> str:
    """From how many new tokens the picked form changes on the longest prefix drawn."""
    new = fewest(lambda new: pick_form(config, device, rows, new, prefix + new) == "compressed", most)
    if not new:
        return f"{device.name}: rebuilding does not pay up to {most:,} new tokens"
    return f"{device.name}: rebuilding pays from {new:,} new tokens on a long prefix"


def _name_roof(ax: Axes, device: Device) -> None:
    """Names the level part of the roof and the balance; `_name_points` finds a place for the name of the slope."""
    ridge = device.flops / device.bandwidth
    level = (ax.get_xlim()[1], device.flops)
    ax.annotate(f"arithmetic {si(device.flops, 'FLOP/s')}", level, (-4, 5), ha="right", in_layout=False, **WORDS)
    ax.annotate(f"balance\n{ridge:.3g} FLOP/byte", (ridge, ax.get_ylim()[0]), (5, 6), in_layout=False, **WORDS)


def _name_points(ax: Axes, device: Device, names: Mapping[str, str]) -> None:
    """Names each marker and the slope at the first place around it that touches no text, no marker, no edge and no roof."""
    ax.figure.draw_without_rendering()  # lays the axes out, so that places on the page are known
    markers = [line for line in ax.lines if line.get_label() in names]
    markers.sort(key=lambda line: -line.get_xdata()[0])
    taken = [text.get_window_extent() for text in ax.texts]
    taken += [line.get_window_extent().padded(8) for line in markers]
    for line in markers:
        point = line.get_xydata()[0]
        _label(ax, names[line.get_label()], [(point, offset) for offset in LABEL_PLACES], taken)
    left, ridge = ax.get_xlim()[0], device.flops / device.bandwidth
    slope = [left * (ridge / left) ** t for t in (0.5, 0.7, 0.3, 0.85, 0.15)]
    places = [((x, x * device.bandwidth), (-9, 9)) for x in slope]
    _label(ax, f"memory {si(device.bandwidth, 'B/s')}", places, taken)


def _label(ax: Axes, text: str, places: Sequence[tuple], taken: list) -> None:
    """Writes `text` at the first free one of `places`, each a point and the offset from it, and marks that as taken."""
    for point, offset in places:
        label = _written(ax, text, point, offset)
        if _is_free(ax, label.get_window_extent(), taken):
            break
        label.remove()
    else:
        label = _written(ax, text, point, offset)
    taken.append(label.get_window_extent())
    if max(map(abs, offset)) > 12:  # a line leads from afar to the point
        arrow = {"arrowstyle": "-", "color": INK, "lw": 0.6}
        ax.annotate("", point, offset, arrowprops=arrow, in_layout=False, **WORDS)


def _written(ax: Axes, text: str, point: tuple, offset: tuple[float, float]) -> Annotation:
    sides = {"ha": "left" if offset[0] > 0 else "right", "va": "top" if offset[1] < 0 else "bottom"}
    return ax.annotate(text, point, offset, bbox={"fc": "white", "ec": "none", "pad": 0.5}, in_layout=False, **sides, **WORDS)


def _is_free(ax: Axes, box, taken: Sequence) -> bool:
    within = ax.get_window_extent()
    roof = next(line for line in ax.lines if line.get_label() == "roof")
    inside = within.x0 < box.x0 and box.x1 < within.x1 and within.y0 < box.y0 and box.y1 < within.y1
    crossed = roof.get_transform().transform_path(roof.get_path()).intersects_bbox(box, filled=False)
    return bool(inside) and not crossed and box.count_overlaps(taken) == 0


def _name_region(ax: Axes, news: Sequence[int], prefix: int, config: Config, name: str) -> None:
    """`name` in the middle of the new tokens `news` at one prefix length, on the wider side of break-even."""
    tokens = break_even(config)
    side = max([n for n in news if n < tokens], [n for n in news if n > tokens], key=len)
    if side:
        ax.text(math.sqrt(side[0] * side[-1]), prefix, name, ha="center", va="center", fontsize=10)


def _draw_break_even(ax: Axes, config: Config) -> None:
    tokens = break_even(config)
    if tokens < ax.get_xlim()[1]:
        ax.axvline(tokens, color=INK, lw=1.5, ls="--", label="break-even")
        said = f"equal FLOPs on a long prefix:\nn* = {tokens:.0f}"
        ax.annotate(said, (tokens, ax.get_ylim()[1]), (-5, -5), ha="right", va="top", **WORDS)


def _cells(octaves: int) -> list[int]:
    """The whole number in the middle of each cell of a map from 1 to 2**octaves."""
    return [round(2 ** ((i + 0.5) / OCTAVE)) for i in range(octaves * OCTAVE)]
