"""Figures of a decode step: the experts that its tokens touch, and the tokens/s that its bytes allow."""

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.drawing import BESIDE, COLORS, INK, dtype_name, finished, new_axes, powers_of_two, si, span, title, whole_numbers
from mla_jax.base import roofline
from mla_jax.base.config import Config
from mla_jax.base.roofline import Device
from mla_jax.mesh.cost import MeshCost, Pass
from mla_jax.model.parts import cost_of, released


def experts_touched(configs: Mapping[str, Config], itemsize: int = 2, octaves: int = 10) -> Figure:
    """The share of a layer's experts that 1 to 2 to the `octaves` tokens touch, and the weights read for it, a token.

    Every one of `configs` must have experts."""
    share, read = new_axes((9, 3.3), 2)
    tokens = whole_numbers(octaves)
    for color, (name, config) in zip(itertools.cycle(COLORS), configs.items(), strict=False):
        experts = config.n_routed_experts or 0
        shares = [100 * roofline.experts_touched(config, n) / experts for n in tokens]
        share.plot(tokens, shares, color=color)
        label = f"{name}\n{config.num_experts_per_tok} of {experts}"
        read.plot(tokens, [_bytes_a_token(config, n, itemsize) for n in tokens], color=color, label=label)
    for one in (share, read):
        powers_of_two(one.xaxis, octaves)
        one.set(xlim=(1, 2**octaves), xlabel="tokens in the step")
    share.set(ylim=(0, 105), ylabel="experts touched, %")
    read.set(yscale="log", ylabel=f"expert weights read per\ntoken and layer ({dtype_name(itemsize)})")
    read.yaxis.set_major_formatter(lambda value, _: si(value, "B"))
    read.legend(**BESIDE)
    title(share, f"{span([*map(_tokens_of_half, configs.values())])} tokens touch\nhalf of the experts")
    falls = [_bytes_a_token(one, 1, itemsize) / _bytes_a_token(one, 2**octaves, itemsize) for one in configs.values()]
    title(read, f"Each of {2**octaves:,} tokens reads\n{span(falls)} times less than a lone one")
    return finished(share, read)


def decode_floor(
    config: Config,
    device: Device,
    held: Sequence[int],
    measured: Mapping[int, float] | None = None,
    octaves: int = 9,
) -> Figure:
    """The tokens/s that no decoding passes, by bytes alone, for 1 to 2 to the `octaves` rows.

    There is a line for each count in `held`, the tokens that every row holds. `measured` maps rows to tokens/s over the first
    of them."""
    (plot,) = new_axes((7, 4))
    rows, cost = whole_numbers(octaves), cost_of(released(config, device, packed=False))
    for color, length in zip(itertools.cycle(COLORS), held, strict=False):
        plot.loglog(rows, _ceilings(cost, rows, length), color=color, label=f"{length:,} held")
    plot.loglog(rows, _ceilings(cost, rows, 0), color=INK, lw=0.8, ls=":", label="weights alone")
    if measured:
        _draw_measured(plot, measured, _ceilings(cost, [*measured], held[0]), held[0])
    _scale(plot, octaves, room=4 if measured else 1.5)
    plot.legend(loc="upper left", frameon=False)
    one, many = _ceilings(cost, [1, 2**octaves], held[0])
    detail = f"bytes that a step must read at {si(device.bandwidth, 'B/s')}, {dtype_name(device.itemsize)}"
    title(plot, f"{device.name}: at most {one:,.0f} tokens/s for one row, {many:,.0f} for {2**octaves:,}", detail)
    return finished(plot)


def _scale(plot: Axes, octaves: int, room: float) -> None:
    """Axes for up to 2**octaves rows, with so many times less than the least rate at the foot."""
    plot.set(xlim=(0.9, 2**octaves * 1.1), xlabel="rows (sequences in the batch)", ylabel="tokens/s at most")
    plot.set_ylim(plot.get_ylim()[0] / room)
    powers_of_two(plot.xaxis, octaves)
    plot.yaxis.set_major_formatter("{x:,.0f}")


def _draw_measured(plot: Axes, rates: Mapping[int, float], ceilings: Sequence[float], held: int) -> None:
    label = f"measured over {held:,} (share of its line)"
    plot.plot([*rates], [*rates.values()], "X", color=INK, ms=9, mec="white", label=label)
    for (rows, rate), ceiling in zip(rates.items(), ceilings, strict=True):
        _name_rate(plot, rows, rate, f"{rate:,.0f} ({rate / ceiling:.0%})")


def _bytes_a_token(config: Config, tokens: int, itemsize: int) -> float:
    """Of a layer's experts, in a step of `tokens`."""
    expert = 3 * config.hidden_size * (config.moe_intermediate_size or 0) * itemsize
    return expert * roofline.experts_touched(config, tokens) / tokens


def _tokens_of_half(config: Config) -> int:
    """The fewest tokens that touch half of the experts."""
    experts = config.n_routed_experts or 0
    return next(n for n in itertools.count(1) if 2 * roofline.experts_touched(config, n) >= experts)


def _name_rate(plot: Axes, rows: int, rate: float, said: str) -> None:
    """Writes `said` at the foot of the figure, below all curves, with a thin line up to the point."""
    place = {"xytext": (rows, 0.03), "textcoords": ("data", "axes fraction"), "ha": "left" if rows == 1 else "center"}
    line = {"arrowstyle": "-", "color": INK, "lw": 0.6}
    plot.annotate(said, (rows, rate), **place, fontsize=9, color=INK, arrowprops=line)


def _ceilings(cost: MeshCost, rows: Sequence[int], held: int) -> list[float]:
    """Tokens/s of a decode step that does nothing but read, for each count of rows."""
    return [n * cost.device.bandwidth / cost.read_bytes(Pass(n, 1, held)) for n in rows]
