"""The cost of a pass on a device of a mesh: operations, bytes, messages and seconds. One device is a mesh of one. No JAX here.

The dry run, the placement of experts, drafts and statistics all read this. A device's part of the model is counted once, from the
abstract model (model/parts.py). A pass is the sum of its parts, each of which takes the slower of arithmetic and memory.
Experts are taken as equally likely and rows as equally long."""

import dataclasses
import math
from collections.abc import Mapping
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

from mla_jax.base import roofline
from mla_jax.base.axes import CONTEXT, DATA, MESH_AXES, TENSOR
from mla_jax.base.config import Config
from mla_jax.base.link_rates import links_of
from mla_jax.base.roofline import Cost, Device
from mla_jax.mesh.comm_cost import NOTHING, Sizes, Speech, Traffic, along, exchange_messages, pick_exchange
from mla_jax.mesh.host_cost import OnHost, expert_weights, host_seconds, stream_seconds

# Of the rates of large matmuls and of plain reading, the shares that a step's kernels reach. On an H200, attention has 590 of 811
# TFLOP/s over latents and 640 to 700 over heads, experts 660; weights are read at 3.1 to 4.0 of 4.56 TB/s, latents at 4.0
# (benchmarks/meshes.md, "Where a step of DeepSeek-V3 goes", and the tables of benchmarks/kernels.md).
ARITHMETIC, MEMORY = 0.75, 0.85
# How often a layer writes or reads a token's activations: numbers of the model's width around attention and experts, and for each
# pair of a token and an expert numbers of the model's and of the expert's width.
BY_TOKEN, BY_PAIR, BY_PAIR_WIDTH = 24, 8, 6
# Seconds a step in which the host of several devices asks whether any row goes on: 0.1 to 0.3 ms on H200s (ibid.)
GOES_ON = 0.2e-3
# Rows of each data shard, and the tokens that each holds, where nothing else is asked
PREDICTED_ROWS, HELD = 32, 4096


class Pass(NamedTuple):
    """A pass over `rows` rows of each data shard that bring `new` tokens each and attend to `held` ones, their own among them.

    Where not all shards have as many rows, `every` are those of all together. Of the new tokens of a row `choosing` choose
    experts, by default all: guesses that are not there choose none."""

    rows: int
    new: int = 1
    held: int = HELD
    every: int | None = None
    choosing: int | None = None

    @property
    def tokens(self) -> int:
        return self.rows * self.new

    @property
    def reads_prompts(self) -> bool:
        return self.new > roofline.FEW

    @property
    def attended(self) -> int:
        """Tokens that a new one attends to on average: of a prompt's new ones, half."""
        return self.held - self.new // 2 if self.reads_prompts else self.held


class WeightSize(NamedTuple):
    """Of one kind, in all layers that one device runs: numbers, and the bytes that hold them."""

    numbers: float = 0
    bytes: float = 0


@dataclasses.dataclass(frozen=True)
class Parts:
    """One device's part of a model on a mesh of these `sizes`.

    `weights` are of the kinds "attention", "heads" (in and out of the latents' space), "dense", "shared", "router", "experts",
    "embedding" and "head"; where that is tied it is both. A token leaves `latent` bytes in a layer's cache. Passes over few and
    over many tokens a row pick among `forms` of attention. `guess` is a layer for drafts, with the head."""

    config: Config
    sizes: Sizes
    weights: Mapping[str, WeightSize]
    layers: int
    moe_layers: int
    itemsize: int  # of what is computed
    latent: float
    chunk: int  # tokens of prompts that a data shard reads at a time
    forms: tuple[tuple[str, ...], tuple[str, ...]]
    exchange: str = "auto"  # of tokens with experts
    indexers: int = 0  # layers that choose tokens
    index_key: float = 0.0  # bytes that a token leaves for each of them
    guess: "Parts | None" = None

    @property
    def weight_bytes(self) -> int:
        return math.ceil(sum(kind.bytes for kind in self.weights.values()))


class Predicted(NamedTuple):
    """A pass of all devices: its seconds, those of messages among them, and the tokens a second of all devices together.

    `floor` are the seconds to read or to compute what a device must, whichever takes longer, at the device's full rates; `host`
    those of the CPU's experts, which the device waits for in part."""

    seconds: float
    tokens: float
    messages: Traffic
    exchange: str
    floor: float
    host: float = 0.0

    @property
    def share(self) -> float:
        """Of the seconds, those of messages."""
        return self.messages.seconds / self.seconds


@dataclasses.dataclass(frozen=True)
class MeshCost:
    """A model whose `parts` are on each device of a mesh, all of which reach what `device` says.

    A CPU computes the routed experts of those layers that are `on_host`; with at least `stream` tokens, 0 for never, they are
    copied to the device."""

    parts: Parts
    device: Device
    on_host: OnHost | None = None
    stream: int = 0

    @property
    def config(self) -> Config:
        return self.parts.config

    @property
    def sizes(self) -> Sizes:
        return self.parts.sizes

    def of(self, *names: str) -> int:
        """Devices along these axes."""
        return along(self.sizes, names)

    def shared(self, rows: int, new: int = 1, held: int = HELD, choosing: int | None = None) -> Pass:
        """A pass over `rows` rows of all data shards together, which share them evenly."""
        return Pass(-(-rows // self.of(DATA)), new, held, rows, choosing)

    def decode(self, rows: int = PREDICTED_ROWS, held: int = HELD, every: int | None = None) -> Predicted:
        """A step of `rows` rows of each data shard that hold `held` tokens each, or of `every` rows in all."""
        return self.predicted(Pass(rows, 1, held, every))

    def prompts(self, length: int = HELD) -> Predicted:
        """A pass over a chunk of prompts of `length` tokens in each data shard."""
        new = min(self.parts.chunk, length)
        # After a chunk of the prompt, on average
        return self.predicted(Pass(max(self.parts.chunk // length, 1), new, (length + new) // 2))

    def guess_seconds(self, rows: int, held: int) -> float:
        """One guess of the layer for drafts, of `rows` rows; two layers' time between, for what is joined and chosen."""
        assert self.parts.guess is not None
        return MeshCost(self.parts.guess, self.device).decode(rows, held).seconds + self.device.between

    def predicted(self, work: Pass) -> Predicted:
        """Any pass."""
        costs, (sent, exchange) = self.costs(work), self._messages(work)
        total = Cost(sum(cost.flops for cost in costs.values()), sum(cost.bytes for cost in costs.values()))
        further = Cost(0, self._activations(work) + self._uneven(work))
        computing = sum(map(self._seconds, (*costs.values(), further)))
        host, waited = self._on_host(work, costs)
        between = self.parts.layers * self.device.between + (GOES_ON if self.of(*MESH_AXES) > 1 else 0)
        seconds = computing + waited + between + sent.seconds
        return Predicted(
            seconds, self._every(work) * work.new / seconds, sent, exchange, total.seconds(self.device), host
        )

    def read_bytes(self, work: Pass) -> float:
        """The least that one device must read: weights, of routed experts those that are touched, and attended cache."""
        kinds = ("attention", "heads", "dense", "shared", "router", "head")
        weights = sum(self.parts.weights[kind].bytes for kind in kinds)
        held = math.ceil(work.attended / self.of(CONTEXT))
        cached = roofline.read_tokens(self.config, work.rows, work.new, held) * self.parts.latent
        indexed = work.rows * held * self.parts.index_key if roofline.chooses(self.config, held) else 0
        layers, indexers = self.parts.layers, self.parts.indexers
        return weights + self._experts(work).bytes + layers * cached + indexers * indexed

    def costs(self, work: Pass) -> dict[str, Cost]:
        """Operations and bytes of the parts of a pass on one device, in all layers together."""
        kinds, tokens = self.parts.weights, work.tokens
        found = {
            kind: Cost(2 * tokens * kinds[kind].numbers, kinds[kind].bytes)
            for kind in ("attention", "dense", "shared", "router")
        }
        chosen = work.rows if work.reads_prompts else tokens
        head = Cost(2 * chosen * kinds["head"].numbers, kinds["head"].bytes)
        held = {"held": self._attending(work), "choice": self._choice(work)}
        return found | held | {"experts": self._experts(work), "head": head}

    def _choice(self, work: Pass) -> Cost:
        """Indexers, which every device along `tensor` computes."""
        parts = self.parts
        one = roofline.choice_cost(self.config, work.rows, work.new, work.attended, parts.index_key)
        return Cost(parts.indexers * one.flops, parts.indexers * one.bytes)

    def _attending(self, work: Pass) -> Cost:
        """Attention to cached tokens, in and out of their space."""
        parts, held = self.parts, math.ceil(work.attended / self.of(CONTEXT))
        form = self.form(work.rows, work.new, held)
        whole, weights = (
            roofline.attention_cost(
                self._of_device, form, work.rows, work.new, n, parts.itemsize, parts.latent
            )
            for n in (held, 0)
        )
        read = whole.bytes - weights.bytes
        return Cost(parts.layers * whole.flops, parts.layers * read + parts.weights["heads"].bytes)

    def form(self, rows: int, new: int, attended: int) -> str:
        """The form of attention that a pass takes, as `Dispatch.form_name` chooses it."""
        forms = self.parts.forms[new > roofline.FEW]
        return roofline.pick_form(self._of_device, self.device, rows, new, attended, forms)

    @cached_property
    def _of_device(self) -> Config:
        """The config as one device's attention sees it, which has its own heads alone."""
        return dataclasses.replace(
            self.config, num_attention_heads=self.config.num_attention_heads // self.of(TENSOR)
        )

    def _every(self, work: Pass) -> int:
        """Rows of all shards."""
        return work.every or work.rows * self.of(DATA)

    def _pairs(self, work: Pass) -> float:
        """Of a token and one of its experts, on one device, in a layer."""
        return self._every(work) * work.new * self.config.routed_per_token / self.of(*MESH_AXES)

    def _experts(self, work: Pass) -> Cost:
        """Routed experts of the layers that the device computes, and replicas of the others."""
        each, tokens, touched = self._expert, self._choosing_tokens(work), self._touched(work)
        pairs, moved = self._pairs(work), 0 if self.on_host is None else self.on_host.layers
        layers = self.parts.moe_layers - moved
        found = Cost(2 * layers * pairs * each.numbers, layers * touched * each.bytes)
        if self.on_host is None or self._streams(work):
            return found
        share, replicas = 1 - self.on_host.routed.host_share, self.on_host.routed.touched(tokens)[1]
        computed = 2 * moved * share * pairs * each.numbers
        return Cost(found.flops + computed, found.bytes + moved * replicas * each.bytes)

    @property
    def _expert(self) -> WeightSize:
        """Of one expert."""
        count = self.parts.moe_layers * self._own_experts
        return WeightSize(*(part / count if count else 0 for part in self.parts.weights["experts"]))

    @property
    def _own_experts(self) -> float:
        return (self.config.n_routed_experts or 0) / self.of(*MESH_AXES)

    def _choosing_tokens(self, work: Pass) -> int:
        return self._every(work) * (work.new if work.choosing is None else work.choosing)

    def _touched(self, work: Pass) -> float:
        """Experts of a layer that a device reads on average."""
        return roofline.experts_touched(self.config, self._choosing_tokens(work)) / self.of(*MESH_AXES)

    def _uneven(self, work: Pass) -> float:
        """Bytes of experts that the device with most of them reads beyond the average: the others wait for it in each layer."""
        if not self._own_experts:
            return 0.0
        touched, devices = self._touched(work), self.of(*MESH_AXES)
        deviation = math.sqrt(touched * (1 - touched / self._own_experts))
        # Of as many normal numbers, by Blom
        most = NormalDist().inv_cdf((devices - 3 / 8) / (devices + 1 / 4))
        return self.parts.moe_layers * deviation * most * self._expert.bytes

    def _streams(self, work: Pass) -> bool:
        return 0 < self.stream <= work.tokens

    def _on_host(self, work: Pass, costs: Mapping[str, Cost]) -> tuple[float, float]:
        """The CPU's seconds and those that the device waits: it computes shared experts and replicas meanwhile."""
        host = self.on_host
        if host is None or not host.layers:
            return 0.0, 0.0
        if self._streams(work):
            each = stream_seconds(self.config, self.device, host.rates, work.tokens, host.expert_bytes)
            return 0.0, host.layers * each
        each = host_seconds(self.config, host.rates, work.tokens, host.expert_bytes, host.routed)
        shared = self._seconds(costs["shared"]) / self.parts.moe_layers
        replicas = host.routed.touched(work.tokens)[1] * expert_weights(self.config) * self.parts.itemsize
        meanwhile = shared + self._seconds(Cost(0, replicas))
        return host.layers * each, host.layers * max(each - meanwhile, 0.0)

    def _seconds(self, cost: Cost) -> float:
        """By kernels as they are."""
        return max(
            cost.flops / (ARITHMETIC * self.device.flops), cost.bytes / (MEMORY * self.device.bandwidth)
        )

    def _activations(self, work: Pass) -> float:
        """Bytes that are written and read between matmuls."""
        config, moe = self.config, self.parts.moe_layers
        wide = self.parts.layers * work.tokens * BY_TOKEN * config.hidden_size
        pair = BY_PAIR * config.hidden_size + BY_PAIR_WIDTH * (config.moe_intermediate_size or 0)
        return self.parts.itemsize * (wide + moe * self._pairs(work) * pair)

    def _messages(self, work: Pass) -> tuple[Traffic, str]:
        prefilled = work.rows * work.held if work.reads_prompts else 0
        return self.messages(work.tokens, work.rows, prefilled)

    def messages(self, tokens: int, unembedded: int, prefilled: int = 0) -> tuple[Traffic, str]:
        """Messages to one device in a pass over `tokens` tokens of each data shard, and the chosen exchange.

        `prefilled` are the tokens that prompts attend to, whose latents can be gathered instead of merging what is attended."""
        config, moe = self.config, self.parts.moe_layers
        dense = self.parts.layers - moe
        exchange = self.parts.exchange
        if exchange == "auto":
            exchange = pick_exchange(config, self.sizes, tokens, self.device)
        routed = exchange_messages(exchange, config, self.sizes, tokens, self.device)
        activations = tokens * config.hidden_size * self.parts.itemsize
        summed = self._speech.total(activations, (TENSOR,))  # after o_proj, an MLP and the embedding
        # XLA adds shared and routed experts before it sums them
        together = exchange == "gather" and self.of(CONTEXT) == 1
        is_apart = config.shortcut_moe or (config.n_shared_experts and not together)
        shared = summed if is_apart else NOTHING
        attention = (summed + self._merging(tokens, prefilled)) * self.parts.layers
        mlps = summed * dense + (routed + shared) * moe
        return summed + attention + mlps + self._choosing(unembedded), exchange

    @property
    def _speech(self) -> Speech:
        return Speech(self.sizes, links_of(self.device))

    def _choosing(self, rows: int) -> Traffic:
        """Logits of some rows to each device along `tensor`, the tokens that these choose to all, and whether any row goes on."""
        speech, mine = self._speech, rows / self.of(TENSOR)
        logits = speech.swapped(4 * mine * self.config.vocab_size, (TENSOR,))
        chosen = speech.gathered(4 * mine, (TENSOR,)) + speech.gathered(mine, (TENSOR,))
        return logits + chosen + speech.total(4, MESH_AXES)

    def _merging(self, tokens: int, prefilled: int) -> Traffic:
        """A layer's messages between devices that share a row's pages: float32 sums over their tokens, with the largest score."""
        speech, sums = self._speech, 4 * tokens * self._of_device.num_attention_heads
        scores = speech.total(sums, (CONTEXT,))  # of which the largest is taken
        merged = scores + speech.total(sums * (self.config.kv_lora_rank + 1), (CONTEXT,))
        if not prefilled:
            return merged
        gathered = speech.gathered(prefilled * self.parts.latent / self.of(CONTEXT), (CONTEXT,))
        return gathered if gathered.seconds < merged.seconds else merged


def about(count: float) -> str:
    """A count with two digits: a prediction is no better."""
    digits = len(str(int(count)))
    unit = 10 ** max(digits - 2, 0)
    return f"{round(count / unit) * unit:,}"
