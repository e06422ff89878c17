"""Messages between devices of a mesh: bytes, seconds, and the exchange of tokens with experts that follows. No JAX here."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from mla_jax.base.axes import CONTEXT, DATA, MESH_AXES, TENSOR
from mla_jax.base.config import Config
from mla_jax.base.link_rates import Links, links_of
from mla_jax.base.roofline import Device

Sizes = Mapping[str, int]  # devices along each mesh axis; one that is left out has one
# What an all-to-all takes in a layer in addition to its messages: as long as memory takes to read as many times the rows for
# which there is room, to put them in order, and the seconds of the rest. A GPU's host learns then how many rows go where. On four
# H200s the rest is 50 us with 128 tokens of V2-Lite a shard and 130 with 1,024 (benchmarks/meshes.py, 2026-11-26).
ORDERING, ROUTING = 11, 100e-6


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that one device receives, and their seconds."""

    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(self.bytes + other.bytes, self.seconds + other.seconds)

    def __mul__(self, times: float) -> "Traffic":
        return Traffic(self.bytes * times, self.seconds * times)


NOTHING = Traffic()


def along(sizes: Sizes, axes: Sequence[str]) -> int:
    """Devices along these axes together."""
    return prod(sizes.get(axis, 1) for axis in axes)


class Speech(NamedTuple):
    """The collectives of a mesh. Bytes are those that a device has before, as mesh/across.py takes them."""

    sizes: Sizes
    links: Links

    def gathered(self, bytes: float, axes: Sequence[str]) -> Traffic:
        """Each device gets what all others have."""
        others = along(self.sizes, axes) - 1
        return self._by_ring(others * bytes, axes)

    def scattered(self, bytes: float, axes: Sequence[str]) -> Traffic:
        """Each device gets the sum of its own part."""
        parts = along(self.sizes, axes)
        return self._by_ring((parts - 1) / parts * bytes, axes)

    def total(self, bytes: float, axes: Sequence[str]) -> Traffic:
        """Each device gets the whole sum: its own part is summed, then all are gathered."""
        parts = along(self.sizes, axes)
        return self._by_ring(2 * (parts - 1) / parts * bytes, axes)

    def swapped(self, bytes: float, axes: Sequence[str]) -> Traffic:
        """Each device gets a part of what every other has."""
        parts = along(self.sizes, axes)
        return self._received((parts - 1) / parts * bytes, axes, self.links.to_all, self.links.far)

    def _by_ring(self, received: float, axes: Sequence[str]) -> Traffic:
        """Bytes from other islands are passed on within the island, so that all its cards share the network."""
        return self._received(received, axes, self.links.ring, self.links.far * self._near(axes))

    def _received(self, bytes: float, axes: Sequence[str], within: float, network: float) -> Traffic:
        """Equally many bytes of each other device, at these rates within an island and from afar."""
        parts = along(self.sizes, axes)
        if parts == 1:
            return NOTHING
        far = bytes * (parts - self._near(axes)) / (parts - 1)
        seconds = self.links.latency + (bytes - far) / within + far / network
        return Traffic(bytes, seconds)

    def _near(self, axes: Sequence[str]) -> int:
        """Devices along these axes that are on one island."""
        last = max(MESH_AXES.index(axis) for axis in axes)
        between = along(self.sizes, MESH_AXES[last + 1 :])  # the last axis runs fastest over the devices
        return min(along(self.sizes, axes), max(self.links.island // between, 1))


def _by_gathering(config: Config, speech: Speech, tokens: int, device: Device) -> Traffic:
    """All shards' tokens to every device, and back to each shard the sums of its own, which all its devices get."""
    own = tokens * config.hidden_size * device.itemsize
    every = own * along(speech.sizes, (DATA,))
    return (
        speech.gathered(own, (DATA,))
        + speech.scattered(every, (DATA,))
        + speech.total(own, (TENSOR, CONTEXT))
    )


def _by_all_to_all(config: Config, speech: Speech, tokens: int, device: Device) -> Traffic:
    """A device's part of its shard's tokens to the devices that have their experts, once to each, and their sums back; before
    that, how many these are, and after it the parts of all devices of the shard."""
    devices, of_shard = along(speech.sizes, MESH_AXES), along(speech.sizes, (TENSOR, CONTEXT))
    one = math.ceil(tokens / of_shard) * config.hidden_size * device.itemsize
    # The share of tokens with no expert on a device, if all experts are as likely
    passed_by = (1 - 1 / devices) ** (config.num_experts_per_tok or 0)
    sent = one * devices * (1 - passed_by)
    there_and_back = speech.swapped(4 * devices, MESH_AXES) + speech.swapped(sent, MESH_AXES) * 2
    ordered = Traffic(seconds=ROUTING + ORDERING * devices * one / device.bandwidth)
    return ordered + there_and_back + speech.gathered(one, (TENSOR, CONTEXT))


EXCHANGE_COSTS = {"gather": _by_gathering, "all_to_all": _by_all_to_all}


def exchange_messages(name: str, config: Config, sizes: Sizes, tokens: int, device: Device) -> Traffic:
    """The messages of a layer's exchange of `tokens` tokens of each data shard."""
    return EXCHANGE_COSTS[name](config, Speech(sizes, links_of(device)), tokens, device)


def pick_exchange(config: Config, sizes: Sizes, tokens: int, device: Device) -> str:
    """How `tokens` tokens of each data shard reach their experts, "gather" or "all_to_all": the one predicted to be faster.

    Equal for all devices of a mesh. Memory does not decide: an all-to-all reserves room for as many tokens as are gathered."""
    if not config.n_routed_experts:
        return "gather"
    return min(
        EXCHANGE_COSTS, key=lambda name: exchange_messages(name, config, sizes, tokens, device).seconds
    )
