"""The cost model of steps with some layers' routed experts on a CPU, from bytes and FLOPs. No JAX here.

The model is one line, `HostRates.seconds`: the slower of memory and arithmetic, plus the time of a call."""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mla_jax.base import roofline
from mla_jax.base.config import Config
from mla_jax.base.roofline import Cost, Device


class HostRates(NamedTuple):
    """A CPU's rates with experts of one number format: bytes/s of weights, FLOP/s with many tokens, seconds per call from a
    program of the device, and bytes/s of the link to the device."""

    name: str
    bandwidth: float
    flops: float
    call: float
    link: float

    def seconds(self, cost: Cost) -> float:
        """The time of one call."""
        return max(cost.bytes / self.bandwidth, cost.flops / self.flops) + self.call


class Routed(NamedTuple):
    """Experts of the layers on the host `[L X]`: how likely a token chooses each, and which have a replica on the device."""

    chosen: np.ndarray
    replicated: np.ndarray

    @classmethod
    def evenly(cls, config: Config) -> "Routed":
        """All experts are equally likely, and none is replicated."""
        experts = config.n_routed_experts or 1
        return cls(
            np.full((1, experts), (config.num_experts_per_tok or 0) / experts), np.zeros((1, experts), bool)
        )

    def touched(self, tokens: int) -> tuple[float, float]:
        """How many experts per layer `tokens` tokens choose on the host and among the replicas, on average."""
        each = 1 - (1 - np.minimum(self.chosen, 1)) ** tokens
        layers = len(each)
        return float(each[~self.replicated].sum()) / layers, float(each[self.replicated].sum()) / layers

    @property
    def host_share(self) -> float:
        """The share of the tokens' choices that the host computes."""
        return float(self.chosen[~self.replicated].sum() / self.chosen.sum())


class OnHost(NamedTuple):
    """The layers whose experts a CPU computes: how many, bytes of a packed expert, and how tokens choose."""

    rates: HostRates
    layers: int
    expert_bytes: float
    routed: Routed


def expert_weights(config: Config) -> int:
    """Numbers in the three matrices of one routed expert."""
    return 3 * config.hidden_size * (config.moe_intermediate_size or 0)


def host_seconds(
    config: Config, rates: HostRates, tokens: int, expert_bytes: float, routed: Routed | None = None
) -> float:
    """Seconds of one layer's routed experts on the CPU; without `routed` all experts, equally likely."""
    routed = routed or Routed.evenly(config)
    touched, _ = routed.touched(tokens)
    if not touched:
        return 0.0
    pairs = tokens * (config.num_experts_per_tok or 0) * routed.host_share
    return rates.seconds(Cost(2 * pairs * expert_weights(config), touched * expert_bytes))


def stream_seconds(
    config: Config, device: Device, rates: HostRates, tokens: int, expert_bytes: float
) -> float:
    """Seconds of one layer's routed experts when all are copied to the device, unpacked and computed there."""
    experts, weights = config.n_routed_experts or 0, expert_weights(config)
    packed, unpacked = experts * expert_bytes, experts * device.itemsize * weights
    computed = Cost(2 * tokens * (config.num_experts_per_tok or 0) * weights, unpacked)
    return packed / rates.link + (packed + unpacked) / device.bandwidth + computed.seconds(device)


def stream_tokens(
    config: Config,
    device: Device,
    rates: HostRates,
    expert_bytes: float,
    routed: Routed | None = None,
    most: int = 1 << 20,
) -> int:
    """The fewest tokens per step for which streaming is faster than the host; 0 if it is slower even with `most`."""

    def gains(tokens: int) -> bool:
        streamed = stream_seconds(config, device, rates, tokens, expert_bytes)
        return streamed < host_seconds(config, rates, tokens, expert_bytes, routed)

    return fewest(gains, most)


def fewest(gains: Callable[[int], bool], most: int) -> int:
    """The smallest number from 1 to `most` for which `gains` holds, and then for all larger ones; 0 if it never does."""
    powers = (1 << i for i in range(most.bit_length()))
    above = next((n for n in powers if gains(n)), 0)
    if not above:
        return 0
    below = above // 2 + 1
    return below + bisect_left(range(below, above), True, key=gains)


def prefill_seconds(
    config: Config, device: Device, new: int, on_host: OnHost | None = None, stream: int = 0
) -> float:
    """Seconds of a prompt of `new` tokens in one step; experts are streamed from `stream` tokens on, 0 for never."""
    layers = config.num_hidden_layers
    moe = sum(config.is_moe(i) for i in range(config.num_hidden_layers))
    moved = 0 if on_host is None else on_host.layers
    form = roofline.pick_form(config, device, 1, new, new)
    attention = roofline.step_cost(config, form, 1, new, new, device.itemsize).seconds(device)
    mlp = 3 * config.hidden_size * config.intermediate_size
    computed, read = config.num_experts_per_tok or 0, roofline.experts_touched(config, new)
    seconds = layers * attention + (layers - moe) * _matmuls(device, new, mlp, mlp)
    seconds += moe * _shared_seconds(config, device, new)
    seconds += (moe - moved) * _matmuls(
        device, new, computed * expert_weights(config), read * expert_weights(config)
    )
    if on_host is None or not moved:
        return seconds
    return seconds + moved * _moved_seconds(config, device, new, on_host, stream)


def _moved_seconds(config: Config, device: Device, new: int, on_host: OnHost, stream: int) -> float:
    """The seconds that a layer's experts on the host add: meanwhile the device computes replicas and shared experts."""
    if 0 < stream <= new:
        return stream_seconds(config, device, on_host.rates, new, on_host.expert_bytes)
    routed, weights = on_host.routed, expert_weights(config)
    host = host_seconds(config, on_host.rates, new, on_host.expert_bytes, routed)
    computed = (1 - routed.host_share) * (config.num_experts_per_tok or 0)
    read = routed.touched(new)[1]
    replicas = _matmuls(device, new, computed * weights, read * weights)
    return max(host - _shared_seconds(config, device, new), replicas)


def _shared_seconds(config: Config, device: Device, new: int) -> float:
    shared = (config.n_shared_experts or 0) * expert_weights(config)
    return _matmuls(device, new, shared, shared)


def _matmuls(device: Device, new: int, computed: float, read: float) -> float:
    """Seconds of matmuls of `new` tokens with `computed` weights each, of which `read` are read in all."""
    return Cost(2 * new * computed, device.itemsize * read).seconds(device)


def decode_seconds(
    config: Config, device: Device, rows: int, held: int, on_host: OnHost | None = None
) -> float:
    """Seconds of a decode step of `rows` sequences with `held` cached tokens each, without deferred experts.

    A layer on the host waits for the CPU, except for the time of its shared experts and replicas on the device."""
    expert = expert_weights(config) * device.itemsize
    everything = roofline.decode_bytes(config, rows, held, device.itemsize)
    fixed = config.num_hidden_layers * device.between
    if on_host is None or not on_host.layers:
        return everything / device.bandwidth + fixed
    _, replicas = on_host.routed.touched(rows)
    moved = on_host.layers * (roofline.experts_touched(config, rows) - replicas) * expert
    concurrent = ((config.n_shared_experts or 0) + replicas) * expert / device.bandwidth
    host = host_seconds(config, on_host.rates, rows, on_host.expert_bytes, on_host.routed)
    return (everything - moved) / device.bandwidth + fixed + on_host.layers * max(host - concurrent, 0.0)
