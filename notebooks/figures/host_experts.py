"""Figures of experts on the CPU: the time of each part of a layer where it can be computed, and of measured calls."""

import itertools
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.drawing import BESIDE, COLORS, INK, counted, finished, in_seconds, new_axes, powers_of_two, title, whole_numbers
from mla_jax.base import roofline
from mla_jax.base.config import Config
from mla_jax.base.roofline import Cost, Device
from mla_jax.mesh.host_cost import HostRates, expert_weights, fewest, host_seconds

MARKERS = "osD^vP"


def parts_of_a_layer(
    config: Config, device: Device, host: HostRates, expert_bytes: float, tokens: int, held: int = 4096
) -> dict[str, float]:
    """Seconds that the parts of a layer take where they can be computed, when one row brings `tokens` new ones after `held`."""
    weights = expert_weights(config)
    touched, chosen = roofline.experts_touched(config, tokens), config.num_experts_per_tok or 0
    form = roofline.pick_form(config, device, 1, tokens, held + tokens)
    shared = (config.n_shared_experts or 0) * weights
    routed = Cost(2 * tokens * chosen * weights, touched * expert_bytes)
    attention = roofline.step_cost(config, form, 1, tokens, held + tokens, device.itemsize)
    return {
        "attention": attention.seconds(device),
        "shared experts": Cost(2 * tokens * shared, device.itemsize * shared).seconds(device),
        "routed, from the device's memory": routed.seconds(device),
        "routed, copied over the link": routed.seconds(device._replace(bandwidth=host.link)),
        "routed, computed on the CPU": host_seconds(config, host, tokens, expert_bytes),
    }


def where(
    config: Config,
    device: Device,
    host: HostRates,
    expert_bytes: float,
    held: int = 4096,
    octaves: int = 13,
) -> Figure:
    """Time of each part of a layer for 1 to 2 to the `octaves` new tokens of one row, an expert being of `expert_bytes`."""
    (plot,) = new_axes((8.5, 4.2))
    tokens = whole_numbers(octaves)
    found = [parts_of_a_layer(config, device, host, expert_bytes, n, held) for n in tokens]
    for color, name in zip(COLORS, found[0], strict=False):
        bold = {"lw": 2.5} if "CPU" in name else {"lw": 1.5, "ls": "-" if "routed" in name else "--"}
        plot.loglog(tokens, [parts[name] for parts in found], color=color, label=name, **bold)
    powers_of_two(plot.xaxis, octaves)
    plot.set(xlim=(1, 2**octaves), xlabel="new tokens in the step", ylabel="time of one layer, at least")
    in_seconds(plot.yaxis)
    plot.legend(**BESIDE)
    crossing = crossover(config, device, host, expert_bytes)
    if crossing <= 2**octaves:
        plot.axvline(crossing, color=INK, lw=0.8, ls=":", label="crossing")
    pays = f"from {crossing:,} tokens" if crossing <= 2**octaves else f"not up to {2**octaves:,} tokens"
    title(plot, f"Copying experts to the device pays {pays}", f"{device.name}; {host.name}")
    return finished(plot)


def crossover(config: Config, device: Device, host: HostRates, expert_bytes: float, most: int = 1 << 20) -> int:
    """New tokens from which copying a layer's touched experts to the device is faster than the CPU; beyond `most` if never."""

    def copying_is_faster(n: int) -> bool:
        parts = parts_of_a_layer(config, device, host, expert_bytes, n, 0)
        return parts["routed, copied over the link"] < parts["routed, computed on the CPU"]

    return fewest(copying_is_faster, most) or most + 1


def calls(
    config: Config,
    seconds: Mapping[str, Mapping[int, float]],
    rates: Mapping[str, HostRates],
    expert_bytes: Mapping[str, float],
) -> Figure:
    """Measured times of a layer's routed experts as marks, over lines of what the cost model expects from `rates`.

    `seconds` maps precisions to times by tokens; `rates` and `expert_bytes` have the same precisions."""
    (plot,) = new_axes((7.5, 4.2))
    octaves = (max(max(times) for times in seconds.values()) - 1).bit_length()
    tokens, marks = whole_numbers(octaves), []
    looks = zip(itertools.cycle(COLORS), itertools.cycle(MARKERS), seconds.items(), strict=False)
    for color, marker, (name, times) in looks:
        expected = [host_seconds(config, rates[name], n, expert_bytes[name]) for n in tokens]
        plot.loglog(tokens, expected, color=color, lw=1.5, label=f"{name}, expected")
        marks += plot.plot([*times], [*times.values()], marker, color=color, ms=8, mec="white", label=name)
    powers_of_two(plot.xaxis, octaves)
    plot.set(xlim=(0.9, 2**octaves * 1.1), xlabel="tokens in the call", ylabel="time of a call")
    _time_ticks(plot)
    plot.legend(handles=marks, loc="best", frameon=False)
    source = next(iter(rates.values())).name.partition(",")[0]
    title(plot, _gain(seconds), f"marks: measured; lines: expected from {source}")
    return finished(plot)


def _time_ticks(plot: Axes) -> None:
    """Three ticks a decade: the times of calls may not span one."""
    low, high = plot.get_ylim()
    ticks = [n * 10.0**power for power in range(-7, 2) for n in (1, 2, 5)]
    plot.set_yticks([tick for tick in ticks if low <= tick <= high])
    plot.set_yticks([], minor=True)
    in_seconds(plot.yaxis)


def _gain(seconds: Mapping[str, Mapping[int, float]]) -> str:
    """The fastest precision against the slowest, each in its smallest call."""
    first = {name: times[min(times)] for name, times in seconds.items()}
    least, most = min(first, key=first.__getitem__), max(first, key=first.__getitem__)
    tokens = counted(min(seconds[least]), "token")
    return f"{tokens}: {least} takes {first[most] / first[least]:.2g} times less than {most}"
