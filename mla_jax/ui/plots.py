"""Figures of the cost model: what each form of MLA holds, computes and reads, and which one a device takes.

Every value comes from `base/roofline.py` and a Config. Each function draws on `ax`, or on a new figure of `size` inches, and
returns the figure; in a notebook `%matplotlib inline` shows it. matplotlib (extra `plot`) is imported when a figure is made."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mla_jax.base.config import Config
from mla_jax.base.errors import Unsupported
from mla_jax.base.roofline import Cost, Device, attention_cost, break_even, held_bytes, pick_form
from mla_jax.offload.cost import fewest

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

STYLES = {  # marker, and a colour of Okabe and Ito's palette, which colour-blind readers tell apart
    "naive": ("o", "#0072B2"),
    "compressed": ("s", "#E69F00"),
    "absorbed": ("^", "#CC79A7"),
    "move_elided": ("D", "#009E73"),
}
INK = "#444444"
NEAR = [(12, -12), (-12, 12), (12, 12), (-12, -12)]
# Offsets of a label from its marker, in points
LABEL_PLACES = [*NEAR, *((x * i, y * j) for i in (2, 5, 8) for j in (3, 6) for x, y in NEAR), (12, -12)]
OCTAVE = 8  # cells of the dispatch map a doubling


def roofline(
    config: Config,
    device: Device,
    rows: int,
    held: int,
    new: int = 1,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (7.5, 4.6),
) -> "matplotlib.figure.Figure":
    """Where each form stands under a device's roof: `rows` bring `new` tokens each and attend to `held`, themselves included."""
    (plot,) = _axes(ax, size)
    costs = _costs(config, rows, new, held, device.itemsize)
    ridge = device.flops / device.bandwidth
    intensity = {form: cost.flops / cost.bytes for form, cost in costs.items()}
    left = min(ridge, *intensity.values()) / 10
    right = max(ridge, *intensity.values()) * 20
    plot.loglog(
        [left, ridge, right],
        [left * device.bandwidth, device.flops, device.flops],
        color=INK,
        lw=1.5,
        label="roof",
    )
    for form, cost in costs.items():
        marker, color = STYLES[form]
        point = (intensity[form], cost.flops / cost.seconds(device))
        width = 12 if form == "naive" else 8  # absorbed often stands on it
        plot.plot(*point, marker, color=color, ms=width, mec="white", label=form, zorder=3)
    plot.set(xlim=(left, right), ylim=(left * device.bandwidth, device.flops * 4))
    plot.set(xlabel="arithmetic intensity (FLOP per byte)", ylabel="attainable FLOP/s")
    step = (
        f"{_count(rows, 'row')}, {_count(new, 'new token')} attending to {held:,}, {_dtype(device.itemsize)}"
    )
    _title(plot, _fastest(costs, device), f"one layer's attention, {step}")
    _name_points(
        plot,
        device,
        ridge,
        {form: f"{form}\n{_si(cost.seconds(device), 's')}" for form, cost in costs.items()},
    )
    return _figure(plot)


def cache_bytes(
    configs: Mapping[str, Config],
    itemsize: int = 2,
    *,
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (7.5, 3.8),
) -> "matplotlib.figure.Figure":
    """Bytes that one token leaves in one layer's cache, as heads and as latent, for each named config."""
    (plot,) = _axes(ax, size)
    held = {
        form: [held_bytes(config, form, itemsize) for config in configs.values()]
        for form in ("naive", "move_elided")
    }
    for offset, form, what in ((-0.2, "naive", "heads (naive)"), (0.2, "move_elided", "latent (all others)")):
        bars = plot.barh(
            [i + offset for i in range(len(configs))], held[form], 0.38, color=STYLES[form][1], label=what
        )
        plot.bar_label(bars, [f"{n:,}" for n in held[form]], padding=4, fontsize=9, color=INK)
    plot.set_yticks(
        range(len(configs)),
        [f"{name}\n{config.num_attention_heads} heads" for name, config in configs.items()],
    )
    plot.invert_yaxis()
    plot.set(xlim=(0, max(held["naive"]) * 1.15), xlabel=f"bytes per token and layer ({_dtype(itemsize)})")
    plot.xaxis.set_major_formatter("{x:,.0f}")
    plot.legend(loc="lower right", frameon=False)
    ratios = sorted(
        round(heads / latent) for heads, latent in zip(held["naive"], held["move_elided"], strict=True)
    )
    span = f"{ratios[0]}" if ratios[0] == ratios[-1] else f"{ratios[0]} to {ratios[-1]}"
    _title(plot, f"Remembering the latent takes {span} times fewer bytes than the heads")
    return _figure(plot)


def dispatch(
    config: Config,
    device: Device,
    rows: int = 1,
    *,
    octaves: tuple[int, int] = (12, 17),
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (7.5, 4.6),
) -> "matplotlib.figure.Figure":
    """The form picked for each count of new tokens and prefix length, up to 2 to the `octaves` of each; break-even as a line."""
    (plot,) = _axes(ax, size)
    _draw_map(plot, config, device, rows, octaves)
    for axis, n in zip((plot.xaxis, plot.yaxis), octaves, strict=True):
        _powers_of_two(axis, n)
    plot.set(xlabel="new tokens per row", ylabel="prefix length (held tokens)")
    _draw_break_even(plot, config)
    finding = _change(config, device, rows, 2 ** octaves[0], 2 ** octaves[1])
    _title(
        plot,
        finding,
        f"faster form by the cost model, one layer, {_count(rows, 'row')}, {_dtype(device.itemsize)}",
    )
    return _figure(plot)


def costs(
    config: Config,
    held: int,
    rows: int = 1,
    new: int = 1,
    itemsize: int = 2,
    *,
    ax: "Iterable[matplotlib.axes.Axes] | None" = None,
    size: tuple[float, float] = (8.5, 3.4),
) -> "matplotlib.figure.Figure":
    """FLOPs and bytes of each form as bars on log scales, on the two axes of `ax`; `held` tokens are attended to."""
    axes = _axes(ax, size, 2)
    found = _costs(config, rows, new, held, itemsize)
    step = f"one layer's attention, {_count(rows, 'row')}, {_count(new, 'new token')} attending to {held:,}, {_dtype(itemsize)}"
    for one, field, unit, label in zip(
        axes, ("flops", "bytes"), ("FLOP", "B"), ("FLOPs", "bytes read and written"), strict=True
    ):
        values = {form: getattr(cost, field) for form, cost in found.items()}
        bars = one.barh(
            list(values), list(values.values()), color=[STYLES[form][1] for form in values], height=0.7
        )
        one.bar_label(bars, [_si(value, unit) for value in values.values()], padding=4, fontsize=9, color=INK)
        least, most = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
        low, high = math.log10(values[least]), math.log10(values[most])
        one.set(
            xscale="log",
            xlim=(10 ** (low - 1), 10 ** (high + 0.35 * (high - low + 1))),
            xlabel=f"{label} (log scale)",
        )
        one.invert_yaxis()
        _title(
            one,
            f"{most} takes {values[most] / values[least]:,.0f} times\nthe {field.replace('flops', 'FLOPs')} of {least}",
        )
    axes[1].tick_params(labelleft=False)
    if ax is None:
        _figure(*axes).supxlabel(step, fontsize=9, color=INK)
    return _figure(*axes)


def step_times(
    config: Config,
    device: Device,
    rows: int,
    held: int,
    *,
    octaves: int = 12,
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (7, 3.8),
) -> "matplotlib.figure.Figure":
    """Time a new token of the two forms that take turns, for 1 to 2 to the `octaves` new tokens a row after `held` ones."""
    (plot,) = _axes(ax, size)
    news = _cells(octaves)
    for form, place in (("compressed", (10, 4)), ("move_elided", (4, 10))):
        found = [attention_cost(config, form, rows, new, held + new, device.itemsize) for new in news]
        times = [cost.seconds(device) / rows / new for cost, new in zip(found, news, strict=True)]
        busy = [
            t if c.flops / device.flops > c.bytes / device.bandwidth else math.nan
            for t, c in zip(times, found, strict=True)
        ]
        plot.loglog(news, times, color=STYLES[form][1], lw=1.5, ls="--", label=form)
        plot.loglog(news, busy, color=STYLES[form][1], lw=4, label=f"{form}, busy")
        plot.annotate(form, (news[0], times[0]), place, textcoords="offset points", fontsize=10, color=INK)
    low, high = plot.get_ylim()
    plot.set(
        xlim=(1, 2**octaves),
        ylim=(low / 2, high * 8),
        xlabel="new tokens per row",
        ylabel="time per new token",
    )
    _powers_of_two(plot.xaxis, octaves)
    plot.yaxis.set_major_formatter(lambda value, _: _si(value, "s"))
    _draw_break_even(plot, config)
    decides = {"arithmetic decides": {"lw": 4}, "memory decides": {"lw": 1.5, "ls": "--"}}
    plot.legend(
        handles=[plot.plot([], [], color=INK, label=what, **style)[0] for what, style in decides.items()],
        frameon=False,
    )
    detail = f"one layer's attention, {_count(rows, 'row')}, {held:,} tokens held before, {_dtype(device.itemsize)}"
    _title(plot, _change(config, device, rows, 2**octaves, held), detail)
    return _figure(plot)


def _axes(ax, size: tuple[float, float], columns: int = 1) -> list:
    """`ax` as a list, or the axes of a new figure, which is none of pyplot's: a notebook shows it once."""
    if ax is not None:
        return list(ax) if columns > 1 else [ax]
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise Unsupported(
            "figures need matplotlib, which is not installed", "pip install mla-jax[plot]"
        ) from e
    return list(Figure(figsize=size, dpi=110, layout="constrained").subplots(1, columns, squeeze=False)[0])


def _figure(*axes):
    """The figure around finished axes."""
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    return axes[0].figure


def _costs(config: Config, rows: int, new: int, held: int, itemsize: int) -> dict[str, Cost]:
    return {form: attention_cost(config, form, rows, new, held, itemsize) for form in STYLES}


def _draw_map(ax, config: Config, device: Device, rows: int, octaves: tuple[int, int]):
    """Cells in the colour of the picked form, and the forms' names amid their cells at two thirds of the height."""
    from matplotlib.colors import ListedColormap

    forms = {"move_elided": "attends over latents", "compressed": "rebuilds the heads"}
    news, prefixes = (_cells(n) for n in octaves)
    picked = [[pick_form(config, device, rows, new, prefix + new) for new in news] for prefix in prefixes]
    edges = [[2 ** (i / OCTAVE) for i in range(n * OCTAVE + 1)] for n in octaves]
    tints = {
        "cmap": ListedColormap([STYLES[form][1] for form in forms]),
        "vmin": 0,
        "vmax": 1,
        "alpha": 0.4,
        "lw": 0,
    }
    ax.pcolormesh(*edges, [[[*forms].index(form) for form in line] for line in picked], **tints)
    high = len(prefixes) * 2 // 3
    for form, what in forms.items():
        cells = [new for new, name in zip(news, picked[high], strict=True) if name == form]
        _name_region(ax, cells, prefixes[high], config, f"{form}\n{what}")


def _title(ax, finding: str, detail: str = ""):
    """The finding in bold, and under it what was looked at."""
    ax.set_title(finding, loc="left", fontsize=11, fontweight="bold", pad=22 if detail else 8)
    if detail:
        style = {"textcoords": "offset points", "fontsize": 9, "color": INK, "in_layout": False}
        ax.annotate(detail, (0, 1), (0, 6), xycoords="axes fraction", **style)


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


def _name_points(ax, device: Device, ridge: float, names: Mapping[str, str]):
    """Names the roof, and each marker at the first place around it that touches no text, no marker, no edge and no roof."""
    ax.axvline(ridge, color=INK, lw=0.8, ls=":", label="balance")
    style = {"textcoords": "offset points", "color": INK, "fontsize": 9, "in_layout": False}
    ax.annotate(
        f"arithmetic {_si(device.flops, 'FLOP/s')}",
        (ax.get_xlim()[1], device.flops),
        (-4, 5),
        ha="right",
        **style,
    )
    ax.annotate(f"balance\n{ridge:.3g} FLOP/byte", (ridge, ax.get_ylim()[0]), (5, 6), **style)
    ax.figure.draw_without_rendering()  # lays the axes out, so that places on the page are known
    markers = sorted(
        (line for line in ax.lines if line.get_label() in names), key=lambda line: -line.get_xdata()[0]
    )
    taken = [text.get_window_extent() for text in ax.texts] + [
        line.get_window_extent().padded(8) for line in markers
    ]
    for line in markers:
        point = line.get_xydata()[0]
        _label(ax, names[line.get_label()], [(point, offset) for offset in LABEL_PLACES], taken)
    slope = [ax.get_xlim()[0] * (ridge / ax.get_xlim()[0]) ** t for t in (0.5, 0.7, 0.3, 0.85, 0.15)]
    _label(
        ax,
        f"memory {_si(device.bandwidth, 'B/s')}",
        [((x, x * device.bandwidth), (-9, 9)) for x in slope],
        taken,
    )


def _label(ax, text: str, places: Sequence[tuple], taken: list):
    """Writes `text` at the first free one of `places`, each a point and the offset from it, and marks that as taken."""
    style = {"textcoords": "offset points", "color": INK, "fontsize": 9, "in_layout": False}
    for left, (point, offset) in zip(range(len(places))[::-1], places, strict=True):
        sides = {"ha": "left" if offset[0] > 0 else "right", "va": "top" if offset[1] < 0 else "bottom"}
        label = ax.annotate(
            text, point, offset, **sides, **style, bbox={"fc": "white", "ec": "none", "pad": 0.5}
        )
        box = label.get_window_extent()
        if not left or _is_free(ax, box, taken):
            break
        label.remove()
    taken.append(box)
    if max(map(abs, offset)) > 12:  # a line leads from afar to the point
        ax.annotate("", point, offset, arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.6}, **style)


def _is_free(ax, box, taken: Sequence) -> bool:
    within = ax.get_window_extent()
    roof = next(line for line in ax.lines if line.get_label() == "roof")
    inside = within.x0 < box.x0 and box.x1 < within.x1 and within.y0 < box.y0 and box.y1 < within.y1
    crossed = roof.get_transform().transform_path(roof.get_path()).intersects_bbox(box, filled=False)
    return bool(inside) and not crossed and box.count_overlaps(taken) == 0


def _name_region(ax, news: Sequence[int], prefix: int, config: Config, name: str):
    """`name` in the middle of the new tokens `news` at one prefix length, on the wider side of break-even."""
    tokens = break_even(config)
    side = max([n for n in news if n < tokens], [n for n in news if n > tokens], key=len)
    if side:
        ax.text(math.sqrt(side[0] * side[-1]), prefix, name, ha="center", va="center", fontsize=10)


def _draw_break_even(ax, config: Config):
    tokens = break_even(config)
    if tokens < ax.get_xlim()[1]:
        ax.axvline(tokens, color=INK, lw=1.5, ls="--", label="break-even")
        said = f"equal FLOPs on a long prefix:\nn* = {tokens:.0f}"
        at = {"xy": (tokens, ax.get_ylim()[1]), "xytext": (-5, -5), "textcoords": "offset points"}
        ax.annotate(said, **at, ha="right", va="top", fontsize=9, color=INK)


def _cells(octaves: int) -> list[int]:
    """The whole number in the middle of each cell of a map from 1 to 2**octaves."""
    return [round(2 ** ((i + 0.5) / OCTAVE)) for i in range(octaves * OCTAVE)]


def _powers_of_two(axis, octaves: int):
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    step = 2 if octaves <= 12 else 3
    ticks = [2**n for n in range(octaves % step, octaves + 1, step)]
    axis.set_ticks(ticks, [f"{n // 1024}K" if n >= 1024 else str(n) for n in ticks])
    axis.set_ticks([], minor=True)


def _dtype(itemsize: int) -> str:
    return {2: "bf16", 4: "float32"}.get(itemsize, f"{itemsize} bytes a number")


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"


def _si(value: float, unit: str) -> str:
    """Three digits and a prefix of the unit: 138 GFLOP."""
    value = float(f"{value:.3g}")
    thousands = max(-3, min(6, math.floor(math.log10(value) / 3)))
    return f"{value / 1000.0**thousands:.3g} {('n', 'µ', 'm', '', 'k', 'M', 'G', 'T', 'P', 'E')[thousands + 3]}{unit}"
