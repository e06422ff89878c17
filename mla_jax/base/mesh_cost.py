"""What a mesh would take and reach: bytes of one device, messages between devices, predicted tokens a second. No JAX here.

A prediction, from shapes and the tables of roofline.py and links.py: each device takes the slower of its arithmetic and its
memory, and between them they send messages. Experts are taken as equally likely and rows as equally long."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

from mla_jax.base import axes, roofline
from mla_jax.base.axes import CONTEXT, DATA, MESH_AXES, TENSOR
from mla_jax.base.config import Config
from mla_jax.base.links import Links, links_of
from mla_jax.base.roofline import Device

Sizes = Mapping[str, int]  # devices along each mesh axis; one that is left out has one
# Seconds a layer that an all-to-all takes besides its messages, about: tokens find their places and, on a GPU, the host learns
# how many go where before they are sent. A guess, not measured; it keeps decode steps of few rows with gathering.
ROUTING = 50e-6
GRAPHS = 1 << 30  # bytes that CUDA graphs and the workspaces of libraries take on a GPU
SLOTS = 64  # of a page
# Of the FLOP/s of large matmuls, what prompts reach besides messages. On an H100 (benchmarks/meshes.py): 0.56 for V2-Lite, 0.49
# and 0.45 on two devices along `data` and `tensor`, and 0.57 for V3's layers in FP8.
READING = 0.6
ROWS, HELD = 32, 4096  # rows of each data shard and the tokens that each holds, where nothing else is asked


@dataclasses.dataclass(frozen=True)
class Messages:
    """What one device receives of others, and how long that takes."""

    bytes: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: "Messages") -> "Messages":
        return Messages(self.bytes + other.bytes, self.seconds + other.seconds)

    def __mul__(self, times: float) -> "Messages":
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
    """A device's part of its shard's tokens to the devices that have their experts, once to each, and their sums back; before
    that, how many these are, and after it the parts of all devices of the shard."""
    devices = along(speech.sizes, MESH_AXES)
    one = math.ceil(tokens / along(speech.sizes, (TENSOR, CONTEXT))) * config.hidden_size * itemsize
    sent = one * devices * (1 - (1 - 1 / devices) ** (config.num_experts_per_tok or 0))  # where any expert is as likely
    there_and_back = speech.swapped(4 * devices, MESH_AXES) + speech.swapped(sent, MESH_AXES) * 2
    return Messages(seconds=ROUTING) + there_and_back + speech.gathered(one, (TENSOR, CONTEXT))


EXCHANGES = {"gather": _by_gathering, "all_to_all": _by_all_to_all}


def exchange_messages(name: str, config: Config, sizes: Sizes, tokens: int, device: Device) -> Messages:
    """What a layer's exchange of `tokens` tokens of each data shard sends."""
    return EXCHANGES[name](config, Speech(sizes, links_of(device)), tokens, device.itemsize)


def pick_exchange(config: Config, sizes: Sizes, tokens: int, device: Device) -> str:
    """How `tokens` tokens of each data shard reach their experts, "gather" or "all_to_all": the faster by the table of links.

    Equal for all devices of a mesh."""
    if not config.n_routed_experts or along(sizes, MESH_AXES) == 1:
        return "gather"
    return min(EXCHANGES, key=lambda name: exchange_messages(name, config, sizes, tokens, device).seconds)


class Packed(NamedTuple):
    """How a checkpoint packs its weights: bytes of one, with its share of scales, and the block of them that is not cut."""

    bytes: float
    block: tuple[int, int] = (1, 1)


def packed(config: Config) -> Packed | None:
    """As the model is released: FP8, or None for unpacked numbers."""
    found = config.quantization_config
    if found is None:
        return None
    rows, columns = found.weight_block_size
    return Packed(1 + 4 / (rows * columns), (rows, columns))


@dataclasses.dataclass(frozen=True)
class Weights:
    """Of one device."""

    numbers: int = 0
    bytes: float = 0.0

    def __add__(self, other: "Weights") -> "Weights":
        return Weights(self.numbers + other.numbers, self.bytes + other.bytes)


Parameter = tuple[tuple[str, ...], bool]  # the names of its axes, and whether it stays packed


def _mlp(width: str) -> list[Parameter]:
    return [((width, "model"), True), ((width, "model"), True), (("model", width), True)]


def _attention(config: Config) -> list[Parameter]:
    """With the norms of its layer."""
    query: list[Parameter] = [(("heads*query", "model"), True)]
    if config.q_lora_rank is not None:
        query = [(("q_rank", "model"), True), (("q_rank",), False), (("heads*query", "q_rank"), True)]
    up: list[Parameter] = [(("heads", "nope", "kv_rank"), False), (("heads", "value", "kv_rank"), False)]
    latent: list[Parameter] = [(("latent", "model"), True), (("kv_rank",), False)]
    return [*query, *latent, *up, (("model", "heads*value"), True), *[(("model",), False)] * 2]


EXPERTS: list[Parameter] = [
    (("experts", "expert_mlp", "model"), True),
    (("experts", "expert_mlp", "model"), True),
    (("experts", "model", "expert_mlp"), True),
]


class Predicted(NamedTuple):
    """A pass of all devices: its seconds, those of messages among them, and the tokens a second of all devices together.

    `floor` are the seconds to read or to compute what a device must, whichever takes longer, at the device's full rates."""

    seconds: float
    tokens: float
    messages: Messages
    exchange: str
    floor: float

    @property
    def share(self) -> float:
        """Of the seconds, what messages take."""
        return self.messages.seconds / self.seconds


@dataclasses.dataclass(frozen=True)
class MeshCost:
    """A model on a mesh of these sizes, each of whose devices reaches what `device` says.

    `latent` are the bytes that a token leaves in one layer's cache, if they are other than the device's numbers."""

    config: Config
    sizes: Sizes
    device: Device
    packed: Packed | None = None
    latent: int | None = None

    def of(self, *names: str) -> int:
        """Devices along these axes."""
        return along(self.sizes, names)

    @cached_property
    def weights(self) -> dict[str, Weights]:
        """What one device has of each kind of weights, of all layers together."""
        config = self.config
        moe = sum(config.is_moe(i) for i in range(config.num_hidden_layers))
        shared = _mlp("shared_mlp") if config.n_shared_experts else []
        kinds = {
            "attention": (config.num_hidden_layers, _attention(config)),
            "dense": (config.num_hidden_layers - moe, _mlp("mlp")),
            "shared": (moe, shared),
            "router": (moe, [(("scores", "model"), False), (("scores",), False)]),
            "experts": (moe, EXPERTS),
            "embedding": (0 if config.tie_word_embeddings else 1, [(("vocab", "model"), False)]),
            "head": (1, [(("vocab", "model"), False)]),
        }
        return {kind: self._all(layers, parameters) for kind, (layers, parameters) in kinds.items()}

    def _all(self, layers: int, parameters: Sequence[Parameter]) -> Weights:
        if not layers:
            return Weights()
        one = sum((self._part(*parameter) for parameter in parameters), Weights())
        return Weights(layers * one.numbers, layers * one.bytes)

    def _part(self, words: tuple[str, ...], packs: bool) -> Weights:
        """One device's part of a parameter, which is whole where it has no equal parts, or would be cut inside of a block."""
        how = self.packed if packs else None
        blocks = (1,) * (len(words) - 2) + (how.block if how else (1, 1))
        numbers = 1
        for length, cut, block in zip(axes.shape(self.config, words), axes.partition(words), blocks[-len(words) :], strict=True):
            parts = along(self.sizes, cut)
            numbers *= length // parts if length % (parts * block) == 0 else length
        return Weights(numbers, numbers * (how.bytes if how else self.device.itemsize))

    @property
    def weight_bytes(self) -> int:
        """Of one device."""
        return math.ceil(sum(kind.bytes for kind in self.weights.values()))

    @property
    def token_bytes(self) -> float:
        """What a token of cache takes of one device, in all layers; the devices of its data shard along `context` share it."""
        return self.config.num_hidden_layers * self._latent / self.of(CONTEXT)

    @property
    def _latent(self) -> int:
        return self.latent or roofline.held_bytes(self.config, "move_elided", self.device.itemsize)

    def working_bytes(self, rows: int = ROWS) -> int:
        """About what a pass takes besides weights and cache: exchanged tokens, activations of experts, logits."""
        config, itemsize, tokens = self.config, self.device.itemsize, max(self.chunk, rows)
        every, chosen = tokens * self.of(DATA), config.num_experts_per_tok or 0  # by either exchange there is room for all
        exchanged = 2 * every * config.hidden_size if self.of(*MESH_AXES) > 1 and chosen else 0
        pairs = every * chosen * (2 * config.hidden_size + 3 * (config.moe_intermediate_size or 0))
        dense = 3 * tokens * config.intermediate_size // self.of(TENSOR)
        logits = (4 * 4 + 2) * rows * config.vocab_size // self.of(TENSOR)
        return itemsize * (exchanged + max(pairs, dense)) + logits + (GRAPHS if self.device.platform == "gpu" else 0)

    @property
    def chunk(self) -> int:
        """New tokens of prompts that each data shard reads at a time."""
        return roofline.chunk(self.config, self.device, self.of(DATA) if self.config.n_routed_experts else 1)

    def tokens(self, available: float, rows: int = ROWS) -> int:
        """Tokens of cache of one data shard that fit in `available` bytes of each of its devices, in whole pages."""
        free = available - self.weight_bytes - self.working_bytes(rows)
        return max(int(free / self.token_bytes), 0) // SLOTS * SLOTS

    def decode(self, rows: int = ROWS, held: int = HELD) -> Predicted:
        """A step of `rows` rows of each data shard that hold `held` tokens each."""
        return self._pass("kernel_latents", rows, 1, held, rows)

    def prompts(self, length: int = HELD) -> Predicted:
        """A pass over a chunk of prompts of `length` tokens in each data shard."""
        rows, new = max(self.chunk // length, 1), min(self.chunk, length)
        cached = (length + new) // 2  # after a chunk of the prompt, on average
        heads = "kernel_heads" if self.device.name in WITH_KERNELS else "compressed"
        form = roofline.pick_form(self._of_device, self.device, rows, new, cached, (heads, "move_elided"))
        return self._pass(form, rows, new, cached, rows)

    @cached_property
    def _of_device(self) -> Config:
        """The config as one device's attention sees it, which has its own heads alone."""
        return dataclasses.replace(self.config, num_attention_heads=self.config.num_attention_heads // self.of(TENSOR))

    def _pass(self, form: str, rows: int, new: int, cached: int, unembedded: int) -> Predicted:
        """`cached` are the tokens of a row once its `new` ones are, of which the mean of these attends to half."""
        config, device, tokens, layers = self.config, self.device, rows * new, self.config.num_hidden_layers
        every, parts = tokens * self.of(DATA), {kind: found for kind, found in self.weights.items() if kind != "embedding"}
        experts, head = parts.pop("experts"), parts.pop("head")
        held = math.ceil((cached - new // 2) / self.of(CONTEXT))
        attention, of_weights = (roofline.attention_cost(self._of_device, form, rows, new, n, device.itemsize) for n in (held, 0))
        own = roofline.step_cost(self._of_device, form, rows, new, held, device.itemsize)
        numbers = sum(found.numbers for kind, found in parts.items() if kind != "attention")
        of_expert = every * (config.num_experts_per_tok or 0) / (config.n_routed_experts or 1)  # tokens of each
        flops = layers * own.flops + 2 * (tokens * numbers + unembedded * head.numbers + of_expert * experts.numbers)
        touched = roofline.experts_touched(config, every) / (config.n_routed_experts or 1)
        read = sum(found.bytes for found in parts.values()) + head.bytes + touched * experts.bytes
        narrower = roofline.held_bytes(config, "move_elided", device.itemsize) - self._latent
        read += layers * (attention.bytes - of_weights.bytes - rows * held * narrower)
        sent, exchange = self.messages(tokens, unembedded, rows * cached if new > 1 else 0)
        computing, reading = flops / device.flops, read / device.bandwidth
        busy = max(computing / (READING if new > 1 else 1), reading)
        seconds = busy + layers * device.between + sent.seconds
        return Predicted(seconds, every / seconds, sent, exchange, max(computing, reading))

    def messages(self, tokens: int, unembedded: int, prefilled: int = 0) -> tuple[Messages, str]:
        """What one device receives in a pass over `tokens` tokens of each data shard, and the exchange that is taken.

        `prefilled` are the tokens that prompts attend to, whose latents can be gathered instead of merging what is attended."""
        config, itemsize, speech = self.config, self.device.itemsize, Speech(self.sizes, links_of(self.device))
        layers, moe = config.num_hidden_layers, sum(config.is_moe(i) for i in range(config.num_hidden_layers))
        summed = speech.total(tokens * config.hidden_size * itemsize, (TENSOR,))  # after o_proj, an MLP and the embedding
        exchange = pick_exchange(config, self.sizes, tokens, self.device)
        routed = exchange_messages(exchange, config, self.sizes, tokens, self.device)
        together = exchange == "gather" and self.of(CONTEXT) == 1  # XLA adds shared and routed experts before it sums them
        shared = summed if config.n_shared_experts and not together else NOTHING
        all_layers = (summed + self._merging(speech, tokens, prefilled)) * layers
        mlps = summed * (layers - moe) + (routed + shared) * moe
        return summed + all_layers + mlps + self._choosing(speech, unembedded), exchange

    def _choosing(self, speech: Speech, rows: int) -> Messages:
        """Logits of some rows to each device along `tensor`, the tokens that these choose to all, and whether any row goes on."""
        mine = rows / self.of(TENSOR)
        logits = speech.swapped(4 * mine * self.config.vocab_size, (TENSOR,))
        chosen = speech.gathered(4 * mine, (TENSOR,)) + speech.gathered(mine, (TENSOR,))
        return logits + chosen + speech.total(4, MESH_AXES)

    def _merging(self, speech: Speech, tokens: int, prefilled: int) -> Messages:
        """What devices that share a row's pages say in a layer: sums over their tokens, in float32, with the largest score."""
        heads = self._of_device.num_attention_heads
        scores = speech.total(4 * tokens * heads, (CONTEXT,))  # of which the largest is taken
        merged = scores + speech.total(4 * tokens * heads * (self.config.kv_lora_rank + 1), (CONTEXT,))
        if not prefilled:
            return merged
        return min(merged, speech.gathered(prefilled * self._latent / self.of(CONTEXT), (CONTEXT,)), key=lambda m: m.seconds)


WITH_KERNELS = ("NVIDIA H100", "NVIDIA H200", "TPU v5e", "TPU v5p", "TPU v6e")  # for attention over prompts


def even(config: Config, sizes: Sizes) -> bool:
    """Whether heads and routed experts have equal parts on this mesh; others are refused."""
    experts = config.n_routed_experts or 0
    return config.num_attention_heads % along(sizes, (TENSOR,)) == 0 and experts % along(sizes, MESH_AXES) == 0


def meshes(config: Config, count: int) -> list[dict[str, int]]:
    """The meshes of `count` devices along `data` and `tensor` that are possible, with most of `data` first.

    That holds no latent twice, and has all devices' memory for different tokens."""
    shared = [tensor for tensor in range(1, count + 1) if count % tensor == 0]
    found = [{DATA: count // tensor, TENSOR: tensor} for tensor in shared]
    return [sizes for sizes in found if even(config, sizes)]


def preferred(
    config: Config, count: int, device: Device, available: float, rows: int = ROWS, held: int = HELD, how: Packed | None = None
) -> MeshCost | None:
    """The first of `meshes` on which `rows` rows of each data shard fit with `held` tokens each; None if none does."""
    found = (MeshCost(config, sizes, device, how) for sizes in meshes(config, count))
    return next((cost for cost in found if cost.tokens(available, rows) >= rows * held), None)


def about(count: float) -> str:
    """A count with two digits: a prediction is no better."""
    unit = 10 ** max(len(str(int(count))) - 2, 0)
    return f"{round(count / unit) * unit:,}"
