"""The cost of routed experts on a CPU, and of copying them from there to the device, from bytes and FLOPs. No JAX here.

The model is one line, `HostRates.seconds`: the slower of memory and arithmetic, plus the time of a call."""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

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
        return cls(np.full((1, experts), config.routed_per_token / experts), np.zeros((1, experts), bool))

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
    pairs = tokens * config.routed_per_token * routed.host_share
    return rates.seconds(Cost(2 * pairs * expert_weights(config), touched * expert_bytes))


def stream_seconds(
    config: Config, device: Device, rates: HostRates, tokens: int, expert_bytes: float
) -> float:
    """Seconds of one layer's routed experts when all are copied to the device, unpacked and computed there."""
    experts, weights = config.n_routed_experts or 0, expert_weights(config)
    packed, unpacked = experts * expert_bytes, experts * device.itemsize * weights
    computed = Cost(2 * tokens * config.routed_per_token * weights, unpacked)
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
