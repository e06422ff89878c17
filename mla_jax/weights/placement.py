"""Where routed experts lie: on the device as long as they fit, then layer by layer on the host; from bytes and measured rates.

With statistics of what tokens choose, the hottest of those on the host lie on the device, too, in the memory that is left."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np

from mla_jax.base import roofline
from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, DoesNotFit, Unsupported, printable
from mla_jax.base.options import ExpertOptions
from mla_jax.base.qtensor import QTensor
from mla_jax.model.stream import CHUNK, held_bytes
from mla_jax.weights import host, measure
from mla_jax.weights.hottest import best_split, hottest
from mla_jax.weights.limits import free_memory
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.plan import Plan, gib, plan, score_bytes
from mla_jax.weights.routing import Routing

PREDICTED = -1  # experts to defer
HELD, ROWS = 1024, (1, 8)  # tokens that a row holds, if the user does not say how many, and rows that rates are predicted for
ROOM = 8192  # tokens for whose cache experts leave the device, if the user does not say how many
SPARE = 1 / 16  # of the device's memory, that hot experts leave free: for further rows' caches, and what a plan rounds off


@dataclass(frozen=True)
class Placement:
    """`host` are the layers whose routed experts the CPU computes, MTP's after the model's; `why` and `lines` are words."""

    host: tuple[int, ...]
    why: str
    lines: tuple[str, ...] = ()


def place(checkpoint: Checkpoint, wanted: ExpertOptions, context: int | None = None, batch: int = 1) -> Placement:
    """Decides for `batch` sequences side by side, and tells the checkpoint. Experts leave the device from the last layer on.

    Raises BadRequest, Unsupported, or DoesNotFit if the host has too little memory."""
    movable = checkpoint.layers_with_experts
    _check(wanted, len(movable), checkpoint.config)
    routing = None if wanted.routing_stats is None else Routing.open(Path(wanted.routing_stats), checkpoint.config)
    asked = wanted.host_layers is not None or wanted.experts != "auto"
    device = _Room.of(checkpoint, context, batch, movable, streams=wanted.stream_tokens != 0)
    if asked:
        most = len(movable) if wanted.experts == "host" else 0
        count, why = most if wanted.host_layers is None else wanted.host_layers, "as asked"
    else:
        count, why = device.fewest(wanted.device_experts or 0)
    chosen = tuple(movable[len(movable) - count :])
    checkpoint.defer = max(wanted.defer, 0)
    held = context or min(HELD, checkpoint.config.max_position_embeddings)
    if not chosen:
        return Placement(chosen, why, tuple(_predicted_on_device(checkpoint, batch, held)) if wanted.experts == "auto" else ())
    try:
        host.refuse_without_library()
    except Unsupported as e:
        if asked:
            raise
        return Placement((), f"{why}; they stay on the device, for {'; '.join(map(str, e.args))}")
    checkpoint.place(chosen, wanted.host_precision)
    if wanted.host_folder is None:  # what is mapped from files the system can give up and read again
        _refuse_without_memory(checkpoint)
    rates = measure.host(*checkpoint.precisions_on_host(min(chosen)))
    routed, counted = None, routing if routing is not None and routing.tokens else None
    if _layers(checkpoint) and (counted is not None or wanted.device_experts):
        most = count if asked else len(movable)
        splits = _splits(checkpoint, wanted, range(count, most + 1), movable, counted, device)
        count, routed = best_split(splits, partial(_step, checkpoint, rates, _packed_bytes(checkpoint), batch, held))
        chosen = tuple(movable[len(movable) - count :])
        both = (tuple(np.flatnonzero(row).tolist()) for row in routed.held)
        hot = {layer: ids for layer, ids in zip(chosen, both, strict=False) if ids}  # MTP's layers, the last, have none
        checkpoint.place(chosen, wanted.host_precision, hot)
    checkpoint.stream = _stream_tokens(checkpoint, rates, routed) if wanted.stream_tokens is None else wanted.stream_tokens
    if wanted.defer == PREDICTED:
        checkpoint.defer = _defer(checkpoint, rates, routed, batch, held)
    return Placement(chosen, why, (*_said(routed, counted), *_predicted(checkpoint, rates, routed, batch, held)))


@dataclass(frozen=True)
class _Room:
    """Bytes of the device: what is `free` there with all experts on it, less than nothing where they do not fit, and what each
    layer's experts take, the last one's first. `free` is None where the host has no other memory than the device."""

    free: int | None
    plan: Plan
    sizes: tuple[int, ...]
    room: int  # for experts that are brought to the device
    hot: int  # of an expert that lies on both

    @classmethod
    def of(cls, checkpoint: Checkpoint, context: int | None, batch: int, movable: list[int], streams: bool) -> "_Room":
        whole = plan(checkpoint, context or min(ROOM, checkpoint.config.max_position_embeddings), batch)
        tokens = min(CHUNK, batch * whole.context)
        room = held_bytes(checkpoint.config, checkpoint.dtype.itemsize, tokens) if streams and movable else 0
        sizes = tuple(checkpoint.expert_bytes(layer) for layer in reversed(movable))
        hot = max((checkpoint.hot_bytes(layer) for layer in movable), default=0)
        free = None if checkpoint.target.platform == "cpu" else whole.available - whole.needed - room
        return cls(free, whole, sizes, room, hot)

    def fewest(self, hot: int) -> tuple[int, str]:
        """How many layers' experts must leave a device, so that the rest fits beside the cache and so many hot ones, and why."""
        if self.free is None:
            return 0, "there is no other memory"
        if self.plan.fits:
            return 0, f"all fits: {gib(self.plan.needed)} of {gib(self.plan.available)}"
        over = hot * self.hot - self.free
        count = next((n for n, size in enumerate(accumulate(self.sizes), 1) if size >= over), len(self.sizes))
        needed, there = gib(self.plan.needed), gib(self.plan.available)
        return count, f"{needed} are needed for {self.plan.context:,} tokens, {there} are there"

    def left(self, count: int) -> float:
        """What hot experts may take once so many layers' have left."""
        return 0.0 if self.free is None else self.free + sum(self.sizes[:count]) - SPARE * self.plan.available


def _splits(
    checkpoint: Checkpoint,
    wanted: ExpertOptions,
    counts: Iterable[int],
    movable: list[int],
    counted: Routing | None,
    device: _Room,
) -> Iterator[tuple[int, roofline.Routed]]:
    """For numbers of layers on the host, the first of which is possible, the experts that the device then holds, too."""
    config, first = checkpoint.config, True
    for count in counts:
        chosen = movable[len(movable) - count :]
        if not first and wanted.host_folder is None and _host_needs(checkpoint, chosen) + max(device.sizes) > free_memory():
            return
        layers, first = [layer for layer in chosen if layer < config.num_hidden_layers], False
        experts = config.n_routed_experts or 1
        even = np.full((len(layers), experts), (config.num_experts_per_tok or 1) / experts)
        likely = even if counted is None else counted.chosen(layers)
        budget = device.left(count) if wanted.device_experts is None else float("inf")
        sizes = [checkpoint.hot_bytes(layer) for layer in layers]
        yield count, roofline.Routed(likely, hottest(likely, sizes, budget, wanted.device_experts))


def _step(
    checkpoint: Checkpoint, rates: roofline.Host, expert: int, batch: int, held: int, _: int, routed: roofline.Routed
) -> float:
    """Seconds of a decode step."""
    config, layers, defer = checkpoint.config, len(routed.chosen), checkpoint.defer
    return roofline.decode_seconds(config, checkpoint.device, batch, held, rates, layers, expert, defer, routed)


def _said(routed: roofline.Routed | None, counted: Routing | None) -> Iterator[str]:
    if routed is not None:
        by = "as if all were equally likely" if counted is None else f"by {counted.tokens:,} tokens that were counted"
        share = f"{100 * (1 - routed.left):.0f} % of the tokens, {by}"
        yield f"{routed.held.sum():,} of {routed.held.size:,} experts of these layers lie on the device, too, which get {share}"


def _check(wanted: ExpertOptions, layers: int, config: Config) -> None:
    from cpu_experts.layout import FORMATS

    chosen, experts = config.num_experts_per_tok or 1, layers * (config.n_routed_experts or 0)
    if wanted.device_experts is not None and not 0 <= wanted.device_experts <= experts:
        raise BadRequest(f"device_experts is {wanted.device_experts}", f"the model has {experts:,} experts in {layers} layers")
    if wanted.host_layers is not None and not 0 <= wanted.host_layers <= layers:
        raise BadRequest(f"host_layers is {wanted.host_layers}", f"the model has {layers} layers with experts")
    if wanted.experts == "host" and not layers:
        raise BadRequest("this model has no routed experts to lie on the host")
    if wanted.host_precision is not None and wanted.host_precision not in FORMATS:
        raise BadRequest(f"host_precision {printable(wanted.host_precision)} is not known", "known: " + ", ".join(FORMATS))
    if not PREDICTED <= wanted.defer < chosen:
        left = f"a token has one more expert, which stays; {PREDICTED} stands for as many as are predicted to gain"
        raise BadRequest(f"defer is {wanted.defer}, expected 0 to {chosen - 1}", left)
    if wanted.stream_tokens is not None and wanted.stream_tokens < 0:
        raise BadRequest(f"stream_tokens is {wanted.stream_tokens}, expected 0 or more", "0 stands for never")


def _refuse_without_memory(checkpoint: Checkpoint) -> None:
    """Stacks are packed layer by layer: the host holds all that is packed and one layer not yet."""
    largest = max(checkpoint.expert_bytes(layer) for layer in checkpoint.host)
    held = _host_needs(checkpoint, checkpoint.host)
    if held + largest > (free := free_memory()):
        raise DoesNotFit(
            "the experts do not fit the host's memory",
            f"{len(checkpoint.host)} layers take {gib(held)} and {gib(largest)} while they are packed; {gib(free)} are free",
            "take a lower host_precision, or a machine with more memory",
        )


def _host_needs(checkpoint: Checkpoint, layers: Iterable[int]) -> int:
    """Bytes of these layers' packed experts."""
    each = (host.packed_bytes(checkpoint.config, *checkpoint.precisions_on_host(layer)) for layer in layers)
    return (checkpoint.config.n_routed_experts or 0) * sum(each)


def _stream_tokens(checkpoint: Checkpoint, rates: roofline.Host, routed: roofline.Routed | None) -> int:
    """Predicted; never where the device is the host."""
    if checkpoint.device.platform == "cpu":
        return 0
    return roofline.stream_tokens(checkpoint.config, checkpoint.device, rates, _packed_bytes(checkpoint), routed)


def _packed_bytes(checkpoint: Checkpoint) -> int:
    """Of an expert in the first layer on the host."""
    return host.packed_bytes(checkpoint.config, *checkpoint.precisions_on_host(min(checkpoint.host)))


def _defer(checkpoint: Checkpoint, rates: roofline.Host, routed: roofline.Routed | None, batch: int, held: int) -> int:
    """As many as are predicted to gain; none where the device is the host."""
    config, device, layers = checkpoint.config, checkpoint.device, _layers(checkpoint)
    if device.platform == "cpu":
        return 0
    return roofline.best_defer(config, device, batch, held, rates, layers, _packed_bytes(checkpoint), routed)


def _layers(checkpoint: Checkpoint) -> int:
    """Layers of the model, MTP's apart, whose experts lie on the host."""
    return sum(layer < checkpoint.config.num_hidden_layers for layer in checkpoint.host)


def _predicted_on_device(checkpoint: Checkpoint, batch: int, held: int) -> Iterator[str]:
    """The rates of decoding with all experts there: on a GPU, where what a step takes beside its bytes was measured, and with
    weights in bf16, for what a step takes of packed ones depends on kernels."""
    config, device = checkpoint.config, checkpoint.device
    packed = any(isinstance(slot.get_value(), QTensor) for slot in checkpoint.slots.values())
    if device.platform != "gpu" or packed or checkpoint.dtype.itemsize != device.itemsize:
        return
    for rows in sorted({*ROWS, batch}):
        step = roofline.decode_seconds(config, device, rows, held)
        yield _rate(rows, held, step)


def _rate(rows: int, held: int, step: float) -> str:
    by = f"{rows} row{'s' * (rows > 1)} with {held:,} token{'s' * (held > 1)} held{' each' * (rows > 1)}"
    return f"predicted for {by}: {rows / step:,.1f} tok/s, a step {step * 1e3:,.1f} ms"


def _predicted(
    checkpoint: Checkpoint, rates: roofline.Host, routed: roofline.Routed | None, batch: int, held: int
) -> Iterator[str]:
    """What the host reaches, and the rates of decoding and of reading a prompt that follow."""
    config, device, expert = checkpoint.config, checkpoint.device, _packed_bytes(checkpoint)
    layers = _layers(checkpoint)
    reached = f"{rates.bandwidth / 1e9:.1f} GB/s of experts, {rates.flops / 1e12:.2f} TFLOP/s"
    yield f"{rates.name}: {reached}, {rates.call * 1e6:.0f} us a call, {rates.latency * 1e6:.0f} for one that is waited for alone"
    if device.platform == "cpu":
        yield "tok/s are not predicted on a CPU, where what else a step takes is not known"
        return
    for rows in sorted({*ROWS, batch}):
        step = roofline.decode_seconds(config, device, rows, held, rates, layers, expert, checkpoint.defer, routed)
        calls = roofline.host_calls(config, rates, rows, expert, checkpoint.defer, routed)
        yield f"{_rate(rows, held, step)}, of which the CPU is busy {layers * (calls.now + calls.later) * 1e3:,.1f} ms"
    prompt, stream = min(CHUNK, config.max_position_embeddings), checkpoint.stream
    model, scores = checkpoint.abstract, score_bytes(checkpoint.bytes(), device.platform)
    chunk = min(model.dispatch.chunk(model, 1, prompt, scores), prompt)
    streamed = f"with {stream:,} tokens or more over the link, {rates.link / 1e9:.1f} GB/s" if stream else "never over the link"
    rate = chunk / roofline.prefill_seconds(config, device, chunk, rates, layers, expert, stream, routed)
    yield f"predicted for a prompt in chunks of {chunk:,} tokens: {rate:,.0f} tok/s; experts come to the device {streamed}"
