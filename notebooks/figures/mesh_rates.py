"""A figure of meshes: the tokens/s that each is predicted to reach, by the rows of all its devices."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from figures.drawing import COLORS, finished, new_axes, powers_of_two, title
from mla_jax.base.axes import DATA, shown_mesh
from mla_jax.mesh.cost import HELD, about
from mla_jax.model.parts import cost_of
from mla_jax.model.transformer import Transformer
from mla_jax.weights.temporaries import tokens_that_fit


def decode_rates(
    meshes: Sequence[Transformer],
    available: float,
    held: int = HELD,
    octaves: int = 12,
) -> Figure:
    """Tokens/s of all devices together, by the rows of all of them that hold `held` tokens each: a line for each mesh, of one
    device's part of the model there.

    A line begins with one row in each data shard. It ends where twice as many rows take more than the `available` bytes of a
    device, or are more than 2 to the `octaves`."""
    (plot,) = new_axes((7.5, 4))
    found = {shown_mesh(model.dispatch.layout.sizes): _rates(model, available, held, 2**octaves) for model in meshes}
    for i, (color, (name, rates)) in enumerate(zip(COLORS, found.items(), strict=False)):
        _draw_line(plot, rates, name, color, i)
    points = [point for rates in found.values() for point in rates.items()] or [(1, 1.0)]
    most = max(rows for rows, _ in points)
    _scale(plot, most, [rate for _, rate in points])
    plot.legend(loc="upper left", frameon=False)
    ends = "; lines end where the memory is full" if 2 * most <= 2**octaves else ""
    title(plot, _most(found), f"predicted, {meshes[0].dispatch.device.name}, {held:,} tokens held by each row{ends}")
    return finished(plot)


def _draw_line(plot: Axes, rates: Mapping[int, float], name: str, color: str, number: int) -> None:
    """A mesh's line, with its last rate; the first is the thickest, so that all show where they meet."""
    nested = {"lw": max(4 - number, 1), "ms": max(12 - 3 * number, 3), "mec": "white"}
    label = name if rates else f"{name}: does not fit"
    plot.plot([*rates], [*rates.values()], "o-", color=color, label=label, **nested)
    if rates:
        last = max(rates)
        above = number == 0  # for lines may end close to each other
        style = {"textcoords": "offset points", "ha": "left", "fontsize": 9, "color": color}
        place = {"xytext": (6, 4 if above else -4), "va": "bottom" if above else "top"}
        plot.annotate(about(rates[last]), (last, rates[last]), **place, **style)


def _scale(plot: Axes, most: int, every: Sequence[float]) -> None:
    """Axes for up to `most` rows, and these rates."""
    powers_of_two(plot.xaxis, most.bit_length() // 2 * 2)  # even, so that the first tick is 1
    plot.set(xlim=(0.85, most * 1.9), xlabel="rows of all devices (sequences in the batch)")
    plot.set(yscale="log", ylim=(min(every) / 1.5, max(every) * 1.6), ylabel="tokens/s of all devices")
    plot.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    plot.yaxis.set_major_formatter("{x:,.0f}")
    plot.yaxis.set_minor_formatter("")


def _rates(model: Transformer, available: float, held: int, most: int) -> dict[int, float]:
    """Tokens/s by rows of all devices, as far as they fit."""
    cost = cost_of(model)
    rates, rows, shards = {}, 1, cost.of(DATA)
    while rows * shards <= most and tokens_that_fit(model, available, rows) >= rows * held:
        rates[rows * shards] = cost.decode(rows, held).tokens
        rows *= 2
    return rates


def _most(found: Mapping[str, Mapping[int, float]]) -> str:
    """Which mesh gives most tokens/s, and from how many rows on."""
    tops = {name: max(rates, key=rates.__getitem__) for name, rates in found.items() if rates}
    if not tops:
        return "None of these meshes has the memory"
    best = max(tops, key=lambda name: found[name][tops[name]])
    most = f"{best}: {about(found[best][tops[best]])} tokens/s with {tops[best]:,} rows"
    first = _ahead(found[best], [rates for name, rates in found.items() if name != best and rates])
    return most if first is None else f"{most}, ahead from {first:,} rows on"


def _ahead(best: Mapping[int, float], others: Sequence[Mapping[int, float]]) -> int | None:
    """The fewest rows from which none of the others has more tokens/s; None if there are no others, or with most rows one has."""
    first = None
    for rows in sorted(best, reverse=True) if others else ():
        if any(rates.get(rows, 0) > best[rows] for rates in others):
            break
        first = rows
    return first
