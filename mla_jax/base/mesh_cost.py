"""What a mesh would take and reach: bytes of one device, messages between devices, predicted tokens a second. No JAX here.

A prediction, from shapes and the tables of roofline.py and links.py: each device takes the slower of its arithmetic and its
memory, and between them they send messages. Experts are taken as equally likely and rows as equally long."""

import math
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from mla_jax.base.axes import CONTEXT, DATA, MESH_AXES, TENSOR
from mla_jax.base.config import Config
from mla_jax.base.links import Links, links_of
from mla_jax.base.roofline import Device

Sizes = Mapping[str, int]  # devices along each mesh axis; one that is left out has one
GATHERED = 1 << 30  # bytes of all shards' tokens that an exchange may gather on a device, in and out


class Messages(NamedTuple):
    """What one device receives of others, and how long that takes."""

    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Messages") -> "Messages":  # type: ignore[override]
        return Messages(self.bytes + other.bytes, self.seconds + other.seconds)

    def __mul__(self, times: float) -> "Messages":  # type: ignore[override]
        return Messages(self.bytes * times, self.seconds * times)


NOTHING = Messages()


def along(sizes: Sizes, axes: Sequence[str]) -> int:
    """Devices along these axes together."""
    return prod(sizes.get(axis, 1) for axis in axes)


class Speech(NamedTuple):
    """The collectives of a mesh. Bytes are those that a device has before, as base/across.py takes them."""

    sizes: Sizes
    links: Links

    def gathered(self, bytes: float, axes: Sequence[str]) -> Messages:
        """Each device gets what all others have."""
        return self._collective((along(self.sizes, axes) - 1) * bytes, axes)

    def scattered(self, bytes: float, axes: Sequence[str]) -> Messages:
        """Each device gets the sum of its own part."""
        parts = along(self.sizes, axes)
        return self._collective((parts - 1) / parts * bytes, axes)

    def total(self, bytes: float, axes: Sequence[str]) -> Messages:
        """Each device gets the whole sum: its own part is summed, then all are gathered."""
        parts = along(self.sizes, axes)
        return self._collective(2 * (parts - 1) / parts * bytes, axes)

    def swapped(self, bytes: float, axes: Sequence[str]) -> Messages:
        """Each device gets a part of what every other has."""
        parts = along(self.sizes, axes)
        return self._collective((parts - 1) / parts * bytes, axes, to_all=True)

    def _collective(self, received: float, axes: Sequence[str], to_all: bool = False) -> Messages:
        parts = along(self.sizes, axes)
        if parts == 1:
            return NOTHING
        inner = MESH_AXES[1 + max(MESH_AXES.index(axis) for axis in axes) :]  # the last axis runs fastest over the devices
        near = min(parts, max(self.links.island // along(self.sizes, inner), 1))
        far = received * (parts - near) / (parts - 1)
        # a ring passes what comes from afar on within the island, so that all its cards share the way
        network = self.links.far * (1 if to_all else near)
        rate = self.links.to_all if to_all else self.links.ring
        return Messages(received, self.links.latency + (received - far) / rate + far / network)


def _by_gathering(config: Config, speech: Speech, tokens: int, itemsize: int) -> Messages:
    """All shards' tokens to every device, and back to each shard the sums of its own, which all its devices get."""
    own = tokens * config.hidden_size * itemsize
    every = own * along(speech.sizes, (DATA,))
    return speech.gathered(own, (DATA,)) + speech.scattered(every, (DATA,)) + speech.total(own, (TENSOR, CONTEXT))


def _by_all_to_all(config: Config, speech: Speech, tokens: int, itemsize: int) -> Messages:
    """A device's part of its shard's tokens to the devices of their experts, one copy for each expert, and back; first how many
    these are. Then the shard's devices get all parts."""
    part = math.ceil(tokens / along(speech.sizes, (TENSOR, CONTEXT)))
    one = part * config.hidden_size * itemsize
    sent = one * (config.num_experts_per_tok or 0)
    counts = 4 * (config.n_routed_experts or 0)
    there_and_back = speech.swapped(counts, MESH_AXES) + speech.swapped(sent, MESH_AXES) * 2
    return there_and_back + speech.gathered(one, (TENSOR, CONTEXT))


EXCHANGES = {"gather": _by_gathering, "all_to_all": _by_all_to_all}


def exchange_messages(name: str, config: Config, sizes: Sizes, tokens: int, device: Device) -> Messages:
    """What a layer's exchange of `tokens` tokens of each data shard sends."""
    return EXCHANGES[name](config, Speech(sizes, links_of(device)), tokens, device.itemsize)


def pick_exchange(config: Config, sizes: Sizes, tokens: int, device: Device) -> str:
    """How `tokens` tokens of each data shard reach their experts, "gather" or "all_to_all": the faster by the table of links.

    Tokens are gathered only where those of all shards, in and out, stay within GATHERED. Equal for all devices of a mesh."""
    shards = sizes.get(DATA, 1)
    if not config.n_routed_experts or along(sizes, MESH_AXES) == 1:
        return "gather"
    if shards > 1 and 2 * tokens * shards * config.hidden_size * device.itemsize > GATHERED:
        return "all_to_all"
    return min(EXCHANGES, key=lambda name: exchange_messages(name, config, sizes, tokens, device).seconds)
