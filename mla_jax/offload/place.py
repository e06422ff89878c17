"""Where routed experts are: on the device as long as they fit, then layer by layer on the host, from bytes and measured rates.

With statistics of what tokens choose, memory that is left on the device gets replicas of the host's most chosen experts."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from mla_jax.base import roofline
from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, DoesNotFit, Unsupported, printable
from mla_jax.base.limits import gib
from mla_jax.base.options import ExpertOptions
from mla_jax.base.roofline import Device
from mla_jax.mesh.cost import MeshCost
from mla_jax.mesh.host_cost import HostRates, OnHost, Routed, stream_tokens
from mla_jax.offload.forecast import Forecast, forecast_of
from mla_jax.offload.library import precisions
from mla_jax.offload.pack import packed_bytes
from mla_jax.offload.replicated import replica_bytes
from mla_jax.offload.routing import Routing
from mla_jax.offload.streaming import Packing, scratch_bytes

# The share of the device's memory that replicas leave free: for further rows' caches, and what a plan rounds off
SPARE = 1 / 16
WORTH = 0.99  # of a step's time: one more layer on the host must be so much faster


@dataclass(frozen=True)
class ExpertLayer:
    """The routed experts of layer `number`: bytes on the device, and how they are packed on the host."""

    number: int
    device_bytes: int
    packing: Packing

    @property
    def host_bytes(self) -> int:
        return self.packing.experts * packed_bytes(self.packing)


@dataclass(frozen=True)
class Figures:
    """The inputs of a placement. `cost`, and `needed` of `available` bytes of the device, are those with all experts there."""

    cost: MeshCost
    dtype: np.dtype  # that the model computes in
    layers: tuple[ExpertLayer, ...]  # with routed experts, MTP's after the model's
    needed: int
    available: int
    host_free: int
    context: int  # tokens per sequence that the plan holds
    held: int  # tokens per sequence that steps are predicted for
    batch: int  # sequences
    chunk: int  # tokens of a prompt that are read at once
    streamed_chunk: int  # the same where experts are streamed
    quantized: bool  # whether any weight is

    @property
    def config(self) -> Config:
        return self.cost.config

    @property
    def device(self) -> Device:
        return self.cost.device

    @property
    def separate(self) -> bool:
        """Whether the device has memory of its own."""
        return self.device.platform != "cpu"

    def decoded(self, layers: Iterable[ExpertLayer]) -> list[ExpertLayer]:
        """Those layers that decoding runs without drafts: without MTP's."""
        return [layer for layer in layers if layer.number < self.config.num_hidden_layers]


class Replicas(NamedTuple):
    """How many experts of the host's layers have a replica, of how many, the share of the tokens' choices that these get, and
    the tokens that were counted to choose them."""

    count: int
    experts: int
    share: float
    tokens: int

    def line(self) -> str:
        by = f"by {self.tokens:,} counted tokens" if self.tokens else "as if all were equally likely"
        what = f"{self.count:,} of {self.experts:,} experts of these layers are replicated on the device"
        return f"{what}: {self.share:.0%} of the tokens' choices, {by}"


@dataclass(frozen=True)
class Placement:
    """Where experts are. `host` are the layers whose routed experts the CPU holds, MTP's after the model's, in `precision`
    (None: as they are stored); `replicated` are expert ids with a replica on the device, by layer.

    The device computes experts of the host in steps of at least `stream` tokens, 0 for never."""

    host: tuple[int, ...] = ()
    precision: str | None = None
    replicated: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    stream: int = 0
    defer: int = 0
    why: str = ""
    replicas: Replicas | None = None
    forecast: Forecast | None = None

    def lines(self) -> list[str]:
        """Lines for the user on replicas and the forecast."""
        replicas = [] if self.replicas is None else [self.replicas.line()]
        return replicas + ([] if self.forecast is None else self.forecast.lines(self.stream))


class Split(NamedTuple):
    """Layers on the host, and how tokens choose the experts of those that are not MTP's; None: all equally, no replicas."""

    layers: tuple[ExpertLayer, ...]
    routed: Routed | None = None

    @property
    def replicated(self) -> dict[int, tuple[int, ...]]:
        if self.routed is None:
            return {}
        rows = zip(self.layers, self.routed.replicated, strict=False)  # MTP's layers, the last, have no row
        ids = {layer.number: tuple(np.flatnonzero(row).tolist()) for layer, row in rows}
        return {number: found for number, found in ids.items() if found}


def place(wanted: ExpertOptions, figures: Figures, rates_of: Callable[[str, str], HostRates]) -> Placement:
    """Decides, and measures the host with `rates_of` where some layers go there. Experts leave the device from the last layer on.

    Raises BadRequest, Unsupported, or DoesNotFit if the host has too little memory."""
    refuse_unplaceable(wanted, figures)
    routing = (
        None if wanted.routing_stats is None else Routing.open(Path(wanted.routing_stats), figures.config)
    )
    count, why = asked_layers(wanted, figures) if is_asked(wanted) else fewest_layers(wanted, figures)
    if not count:
        return Placement(why=why, forecast=_without_host(wanted, figures))
    split = Split(_last(figures, count))
    try:
        rates = rates_of(split.layers[0].packing.precision, split.layers[0].packing.down_precision)
    except Unsupported as e:
        if is_asked(wanted):
            raise
        return Placement(why=f"{why}; they stay on the device: {'; '.join(map(str, e.args))}")
    if wanted.host_folder is None:  # the system can give up mapped files and read them again
        _refuse_without_memory(split.layers, figures.host_free)
    counted = routing if routing is not None and routing.tokens else None
    if figures.decoded(split.layers) and (counted is not None or wanted.device_experts):
        split = best_split(splits(wanted, figures, count, counted), partial(_step_seconds, figures, rates))
    return _placement(wanted, figures, split, why, rates, counted)


def is_asked(wanted: ExpertOptions) -> bool:
    """Whether the user says where experts are."""
    return wanted.host_layers is not None or wanted.experts != "auto"


def asked_layers(wanted: ExpertOptions, figures: Figures) -> tuple[int, str]:
    """How many layers' experts the user wants on the host."""
    everything = len(figures.layers) if wanted.experts == "host" else 0
    return everything if wanted.host_layers is None else wanted.host_layers, "as asked"


def fewest_layers(wanted: ExpertOptions, figures: Figures) -> tuple[int, str]:
    """How many layers' experts must leave the device so that the rest fits with the cache and the replicas asked for, and why."""
    needed, available = gib(figures.needed), gib(figures.available)
    if not figures.separate:
        return 0, "there is no other memory"
    if figures.needed <= figures.available:
        return 0, f"all fits: {needed} of {available}"
    missing = _replicas_asked(wanted, figures) - _free(wanted, figures)
    sizes = accumulate(layer.device_bytes for layer in reversed(figures.layers))
    count = next((n for n, size in enumerate(sizes, 1) if size >= missing), len(figures.layers))
    return count, f"{needed} are needed for {figures.context:,} tokens, {available} are there"


def splits(wanted: ExpertOptions, figures: Figures, count: int, counted: Routing | None) -> Iterator[Split]:
    """`count` layers on the host, and more unless the user said how many, with replicas of what tokens choose most."""
    largest = max(layer.device_bytes for layer in figures.layers)
    most = count if is_asked(wanted) else len(figures.layers)
    for n in range(count, most + 1):
        layers = _last(figures, n)
        held = sum(layer.host_bytes for layer in layers)
        if n > count and wanted.host_folder is None and held + largest > figures.host_free:
            return
        decoded = figures.decoded(layers)
        numbers = [layer.number for layer in decoded]
        likely = equally_likely(figures.config, len(decoded)) if counted is None else counted.chosen(numbers)
        sizes = [replica_bytes(layer.packing, figures.dtype) for layer in decoded]
        budget = _replica_budget(wanted, figures, layers)
        yield Split(layers, Routed(likely, most_chosen(likely, sizes, budget, wanted.device_experts)))


def equally_likely(config: Config, layers: int) -> Float[np.ndarray, "L X"]:
    experts = config.n_routed_experts or 1
    return np.full((layers, experts), (config.routed_per_token or 1) / experts)


def most_chosen(
    chosen: Float[np.ndarray, "L X"], sizes: Sequence[int], budget: float, most: int | None = None
) -> Bool[np.ndarray, "L X"]:
    """The experts that are chosen most often for their bytes, `sizes` per layer: as many as `budget` bytes hold, or `most`.

    Of equally good ones those of different layers come first, so that without statistics all layers get as many."""
    each = np.broadcast_to(np.asarray(sizes, float)[:, None], chosen.shape)
    order = np.argsort(-(chosen / each).T.ravel(), kind="stable")
    count = int(np.searchsorted(np.cumsum(each.T.ravel()[order]), budget, side="right"))
    found = np.zeros(chosen.size, bool)
    found[order[: count if most is None else min(count, most)]] = True
    return found.reshape(chosen.T.shape).T


def best_split(found: Iterable[Split], seconds: Callable[[Split], float]) -> Split:
    """The split whose step is fastest; one with more layers on the host must be faster by WORTH than those before it."""
    best, least = None, float("inf")
    for split in found:
        if (taken := seconds(split)) < WORTH * least:
            best, least = split, taken
    assert best is not None
    return best


def refuse_unplaceable(wanted: ExpertOptions, figures: Figures) -> None:
    """Raises BadRequest for options that this model cannot have."""
    config, layers = figures.config, len(figures.layers)
    chosen, experts = config.num_experts_per_tok or 1, layers * (config.n_routed_experts or 0)
    if wanted.experts == "host" and not layers:
        raise BadRequest("this model has no routed experts for the host")
    if wanted.host_precision not in (None, *precisions()):
        known = ", ".join(precisions())
        raise BadRequest(
            f"host_precision {printable(str(wanted.host_precision))} is not known", f"known: {known}"
        )
    _refuse_above(
        "device_experts",
        wanted.device_experts,
        experts,
        f"the model has {experts:,} experts in {layers} layers",
    )
    _refuse_above("host_layers", wanted.host_layers, layers, f"the model has {layers} layers with experts")
    _refuse_above("defer", wanted.defer, chosen - 1, "one expert per token is never deferred")
    if not config.adds_experts_alone:
        _refuse_above(
            "defer", wanted.defer, 0, "this model changes the sum of a layer's experts, which must be whole"
        )


def _refuse_above(name: str, value: int | None, most: int, why: str) -> None:
    if value is not None and value > most:
        raise BadRequest(f"{name} is {value}, expected 0 to {most:,}", why)


def _placement(
    wanted: ExpertOptions, figures: Figures, split: Split, why: str, rates: HostRates, counted: Routing | None
) -> Placement:
    on_host, stream = _on_host(figures, rates, split), wanted.stream_tokens
    if stream is None:
        stream = _predicted_stream(figures, on_host)
    replicas = None if split.routed is None else _replicas(split.routed, counted)
    chunk = figures.streamed_chunk if stream else figures.chunk
    cost = replace(figures.cost, on_host=on_host, stream=stream)
    forecast = forecast_of(cost, figures.batch, figures.held, chunk)
    numbers = tuple(layer.number for layer in split.layers)
    return Placement(
        numbers, wanted.host_precision, split.replicated, stream, wanted.defer, why, replicas, forecast
    )


def _without_host(wanted: ExpertOptions, figures: Figures) -> Forecast | None:
    """Only on a GPU, where the time between layers was measured, and with weights in bf16: that of quantised ones depends on
    kernels."""
    as_measured = figures.device.platform == "gpu" and figures.dtype.itemsize == figures.device.itemsize
    if wanted.experts != "auto" or figures.quantized or not as_measured:
        return None
    return forecast_of(figures.cost, figures.batch, figures.held, figures.chunk)


def _last(figures: Figures, count: int) -> tuple[ExpertLayer, ...]:
    return figures.layers[len(figures.layers) - count :]


def _free(wanted: ExpertOptions, figures: Figures) -> int:
    """Bytes of the device that are free with all experts there, negative where they do not fit."""
    tokens = min(roofline.STREAMED, figures.batch * figures.context)
    streams = wanted.stream_tokens != 0 and bool(figures.layers)
    scratch = scratch_bytes(figures.config, figures.dtype.itemsize, tokens) if streams else 0
    return figures.available - figures.needed - scratch


def _replicas_asked(wanted: ExpertOptions, figures: Figures) -> int:
    """Bytes of the replicas that the user wants, of the largest there can be."""
    if not wanted.device_experts:
        return 0
    return wanted.device_experts * max(
        (replica_bytes(layer.packing, figures.dtype) for layer in figures.layers), default=0
    )


def _replica_budget(wanted: ExpertOptions, figures: Figures, layers: Iterable[ExpertLayer]) -> float:
    """Bytes that replicas may take once these layers' experts have left the device."""
    if wanted.device_experts is not None:
        return float("inf")
    if not figures.separate:
        return 0.0
    return _free(wanted, figures) + sum(layer.device_bytes for layer in layers) - SPARE * figures.available


def _on_host(figures: Figures, rates: HostRates, split: Split) -> OnHost:
    expert = packed_bytes(split.layers[0].packing)
    routed = split.routed or Routed.evenly(figures.config)
    return OnHost(rates, len(figures.decoded(split.layers)), expert, routed)


def _step_seconds(figures: Figures, rates: HostRates, split: Split) -> float:
    cost = replace(figures.cost, on_host=_on_host(figures, rates, split))
    return cost.decode(figures.batch, figures.held).seconds


def _predicted_stream(figures: Figures, on_host: OnHost) -> int:
    if not figures.separate:
        return 0
    return stream_tokens(figures.config, figures.device, on_host.rates, on_host.expert_bytes, on_host.routed)


def _replicas(routed: Routed, counted: Routing | None) -> Replicas:
    tokens = 0 if counted is None else counted.tokens
    return Replicas(int(routed.replicated.sum()), routed.replicated.size, 1 - routed.host_share, tokens)


def _refuse_without_memory(layers: Sequence[ExpertLayer], free: int) -> None:
    """Layers are packed one by one: the host holds all that is packed and one layer that is not yet."""
    held = sum(layer.host_bytes for layer in layers)
    largest = max(layer.device_bytes for layer in layers)
    if held + largest > free:
        raise DoesNotFit(
            "the experts do not fit the host's memory",
            f"{len(layers)} layers take {gib(held)} and {gib(largest)} while they are packed; {gib(free)} are free",
            "take a lower host_precision, or a machine with more memory",
        )
