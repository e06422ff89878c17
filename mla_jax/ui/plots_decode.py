"""Figures of a decode step, in the manner of `plots`: the experts its tokens touch, and the tokens/s its bytes allow."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from mla_jax.base import roofline
from mla_jax.base.config import Config
from mla_jax.base.roofline import Device, decode_bytes
from mla_jax.ui.plots import INK, _axes, _dtype, _figure, _powers_of_two, _si, _title

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure

# Of the palette of `plots.STYLES`, for what is no form
COLORS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]


def experts_touched(
    configs: Mapping[str, Config],
    itemsize: int = 2,
    *,
    octaves: int = 10,
    ax: "Iterable[matplotlib.axes.Axes] | None" = None,
    size: tuple[float, float] = (9, 3.3),
) -> "matplotlib.figure.Figure":
    """The share of a layer's experts that 1 to 2 to the `octaves` tokens touch, and the weights read for it, a token.

    Every one of `configs` must have experts."""
    share, read = _axes(ax, size, 2)
    tokens, halves, falls = _whole(octaves), [], []
    for color, (name, config) in zip(itertools.cycle(COLORS), configs.items(), strict=False):
        experts, chosen = config.n_routed_experts or 0, config.num_experts_per_tok or 0
        touched = [roofline.experts_touched(config, n) for n in tokens]
        expert = 3 * config.hidden_size * (config.moe_intermediate_size or 0) * itemsize
        weights = [expert * t / n for t, n in zip(touched, tokens, strict=True)]
        share.plot(tokens, [100 * t / experts for t in touched], color=color)
        read.plot(tokens, weights, color=color, label=f"{name}\n{chosen} of {experts}")
        halves.append(
            next(n for n in itertools.count(1) if 2 * roofline.experts_touched(config, n) >= experts)
        )
        falls.append(weights[0] / weights[-1])
    for one in (share, read):
        _powers_of_two(one.xaxis, octaves)
        one.set(xlim=(1, 2**octaves), xlabel="tokens in the step")
    share.set(ylim=(0, 105), ylabel="experts touched, %")
    read.set(yscale="log", ylabel=f"expert weights read per\ntoken and layer ({_dtype(itemsize)})")
    read.yaxis.set_major_formatter(lambda value, _: _si(value, "B"))
    read.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=9)
    _title(share, f"{_span(halves)} tokens touch\nhalf of the experts")
    _title(read, f"Each of {2**octaves:,} tokens reads\n{_span(falls)} times less than a lone one")
    return _figure(share, read)


def decode_floor(
    config: Config,
    device: Device,
    held: Sequence[int],
    measured: Mapping[int, float] | None = None,
    *,
    octaves: int = 9,
    ax: "matplotlib.axes.Axes | None" = None,
    size: tuple[float, float] = (7, 4),
) -> "matplotlib.figure.Figure":
    """The tokens/s that no decoding passes, by bytes alone, for 1 to 2 to the `octaves` rows.

    There is a line for each count in `held`, the tokens that every row holds. `measured` maps rows to tokens/s over the first
    of them."""
    (plot,) = _axes(ax, size)
    rows = _whole(octaves)
    for color, length in zip(itertools.cycle(COLORS), held, strict=False):
        plot.loglog(
            rows, [_ceiling(config, device, n, length) for n in rows], color=color, label=f"{length:,} held"
        )
    plot.loglog(
        rows, [_ceiling(config, device, n, 0) for n in rows], color=INK, lw=0.8, ls=":", label="weights alone"
    )
    if measured:
        label = f"measured over {held[0]:,} (share of its line)"
        plot.plot([*measured], [*measured.values()], "X", color=INK, ms=9, mec="white", label=label)
    plot.set(xlim=(0.9, 2**octaves * 1.1), xlabel="rows (sequences in the batch)", ylabel="tokens/s at most")
    plot.set_ylim(plot.get_ylim()[0] / (4 if measured else 1.5))
    for n, rate in (measured or {}).items():
        _name_rate(plot, n, rate, f"{rate:,.0f} ({rate / _ceiling(config, device, n, held[0]):.0%})")
    _powers_of_two(plot.xaxis, octaves)
    plot.yaxis.set_major_formatter("{x:,.0f}")
    plot.legend(loc="upper left", frameon=False)
    one, many = (_ceiling(config, device, n, held[0]) for n in (1, 2**octaves))
    detail = f"bytes that a step must read at {_si(device.bandwidth, 'B/s')}, {_dtype(device.itemsize)}"
    _title(
        plot,
        f"{device.name}: at most {one:,.0f} tokens/s for one row, {many:,.0f} for {2**octaves:,}",
        detail,
    )
    return _figure(plot)


def _name_rate(plot, rows: int, rate: float, said: str):
    """Writes `said` at the foot of the figure, below all curves, with a thin line up to the point."""
    place = {
        "xytext": (rows, 0.03),
        "textcoords": ("data", "axes fraction"),
        "ha": "left" if rows == 1 else "center",
    }
    plot.annotate(
        said,
        (rows, rate),
        **place,
        fontsize=9,
        color=INK,
        arrowprops={"arrowstyle": "-", "color": INK, "lw": 0.6},
    )


def _whole(octaves: int) -> list[int]:
    """Whole numbers from 1 to 2**octaves, about evenly apart on a log scale."""
    return sorted({round(2 ** (i / 8)) for i in range(octaves * 8 + 1)})


def _ceiling(config: Config, device: Device, rows: int, held: int) -> float:
    """Tokens/s of a decode step that does nothing but read."""
    return rows * device.bandwidth / decode_bytes(config, rows, held, device.itemsize)


def _span(values: Sequence[float]) -> str:
    low = f"{min(values):,.0f}"
    high = f"{max(values):,.0f}"
    return low if low == high else f"{low} to {high}"
