"""The cost model of a mesh: bytes of one device, messages between devices, predicted tokens a second. No JAX here.

A prediction, from shapes and the tables of roofline.py and links.py: each device takes the slower of its arithmetic and its
memory, and between them they send messages. Experts are taken as equally likely and rows as equally long."""

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from mla_jax.base import axes, roofline
from mla_jax.base.axes import CONTEXT, DATA, MESH_AXES, TENSOR
from mla_jax.base.config import Config
from mla_jax.base.link_rates import links_of
from mla_jax.base.roofline import Device
from mla_jax.mesh.comm_cost import NOTHING, Sizes, Speech, Traffic, along, exchange_messages, pick_exchange

GRAPHS = 1 << 30  # bytes that CUDA graphs and the workspaces of libraries take on a GPU
SLOTS = 64  # of a page
WITH_KERNELS = ("NVIDIA H100", "NVIDIA H200", "TPU v5e", "TPU v5p", "TPU v6e")  # for attention over prompts
# Of the FLOP/s of large matmuls, what prompts reach besides messages. On an H100 (benchmarks/meshes.py): 0.56 for V2-Lite, 0.49
# and 0.45 on two devices along `data` and `tensor`, and 0.57 for V3's layers in FP8.
READING = 0.6
PREDICTED_ROWS, HELD = (
    32,
    4096,
)  # rows of each data shard and the tokens that each holds, where nothing else is asked


class PackedWeights(NamedTuple):
    """How a checkpoint packs its weights: bytes of one, with its share of scales, and the block of them that is not cut."""

    bytes: float
    block: tuple[int, int] = (1, 1)


def packed(config: Config) -> PackedWeights | None:
    """As the model is released: FP8, or None for unpacked numbers."""
    found = config.quantization_config
    if found is None:
        return None
    rows, columns = found.weight_block_size
    return PackedWeights(1 + 4 / (rows * columns), (rows, columns))


class Weights(NamedTuple):
    """Of one device."""

    numbers: int
    bytes: float


class Parameter(NamedTuple):
    """The names of its axes, and whether it stays packed."""

    words: tuple[str, ...]
    packs: bool = True


def _mlp(width: str) -> list[Parameter]:
    return [Parameter((width, "model")), Parameter((width, "model")), Parameter(("model", width))]


QUERY = [Parameter(("heads*query", "model"))]
QUERY_BY_RANK = [
    Parameter(("q_rank", "model")),
    Parameter(("q_rank",), False),
    Parameter(("heads*query", "q_rank")),
]
ATTENTION_WEIGHTS = [  # besides the query, with the norms of its layer
    Parameter(("latent", "model")),
    Parameter(("kv_rank",), False),
    Parameter(("heads", "nope", "kv_rank"), False),
    Parameter(("heads", "value", "kv_rank"), False),
    Parameter(("model", "heads*value")),
    Parameter(("model",), False),
    Parameter(("model",), False),
]
ROUTER = [Parameter(("scores", "model"), False), Parameter(("scores",), False)]
EXPERT_WEIGHTS = [
    Parameter(("experts", "expert_mlp", "model")),
    Parameter(("experts", "expert_mlp", "model")),
    Parameter(("experts", "model", "expert_mlp")),
]
VOCABULARY = [Parameter(("vocab", "model"), False)]


class Work(NamedTuple):
    """A pass's work in each data shard: `rows` rows bring `new` tokens each, after which they hold `cached` tokens, and each
    row chooses one. Where shards have different numbers of rows, `every` is the number of all together."""

    form: str
    rows: int
    new: int
    cached: int
    every: int | None = None

    @property
    def tokens(self) -> int:
        return self.rows * self.new

    @property
    def attended(self) -> int:
        """Tokens that a new one attends to on average: of the new ones, half."""
        return self.cached - self.new // 2


class Predicted(NamedTuple):
    """A pass of all devices: its seconds, those of messages among them, and the tokens a second of all devices together.

    `floor` are the seconds to read or to compute what a device must, whichever takes longer, at the device's full rates."""

    seconds: float
    tokens: float
    messages: Traffic
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
    packed: PackedWeights | None = None
    latent: int | None = None

    def of(self, *names: str) -> int:
        """Devices along these axes."""
        return along(self.sizes, names)

    @cached_property
    def weights(self) -> dict[str, Weights]:
        """One device's part of each kind of weights, of all layers together."""
        config, moe = self.config, self.moe_layers
        query = QUERY if config.q_lora_rank is None else QUERY_BY_RANK
        kinds = {
            "attention": (config.num_hidden_layers, query + ATTENTION_WEIGHTS),
            "dense": (config.num_hidden_layers - moe, _mlp("mlp")),
            "shared": (moe if config.n_shared_experts else 0, _mlp("shared_mlp")),
            "router": (moe, ROUTER),
            "experts": (moe, EXPERT_WEIGHTS),
            "embedding": (0 if config.tie_word_embeddings else 1, VOCABULARY),
            "head": (1, VOCABULARY),
        }
        return {kind: self._all(layers, parameters) for kind, (layers, parameters) in kinds.items()}

    @property
    def moe_layers(self) -> int:
        """Layers with routed experts."""
        return sum(self.config.is_moe(i) for i in range(self.config.num_hidden_layers))

    def _all(self, layers: int, parameters: Sequence[Parameter]) -> Weights:
        """One device's parts of these in as many layers; without layers, the config need not have their sizes."""
        if not layers:
            return Weights(0, 0.0)
        parts = [self._part(parameter) for parameter in parameters]
        return Weights(
            layers * sum(part.numbers for part in parts), layers * sum(part.bytes for part in parts)
        )

    def _part(self, parameter: Parameter) -> Weights:
        """One device's part of a parameter, which is whole where it has no equal parts, or would be cut inside of a block."""
        words = parameter.words
        how = self.packed if self.packed and parameter.packs else PackedWeights(self.device.itemsize)
        blocks = (1, *how.block)[-len(words) :]  # rows and columns are the last axes
        numbers = 1
        for length, cut, block in zip(
            axes.shape(self.config, words), axes.partition(words), blocks, strict=True
        ):
            parts = along(self.sizes, cut)
            numbers *= length // parts if length % (parts * block) == 0 else length
        return Weights(numbers, numbers * how.bytes)

    @property
    def weight_bytes(self) -> int:
        """Of one device."""
        return math.ceil(sum(kind.bytes for kind in self.weights.values()))

    @property
    def token_bytes(self) -> float:
        """Cached bytes of a token on one device, in all layers; the devices of its data shard along `context` share it."""
        return self.config.num_hidden_layers * self._latent / self.of(CONTEXT)

    @property
    def _latent(self) -> int:
        return self.latent or roofline.held_bytes(self.config, "move_elided", self.device.itemsize)

    def working_bytes(self, rows: int = PREDICTED_ROWS) -> int:
        """About the bytes of a pass besides weights and cache: exchanged tokens, activations of experts, logits."""
        config, tokens = self.config, max(self.chunk, rows)
        every = tokens * self.of(DATA)  # by either exchange there is room for all
        pairs = every * (config.num_experts_per_tok or 0)
        exchanged = 2 * every * config.hidden_size if pairs and self.of(*MESH_AXES) > 1 else 0
        experts = pairs * (2 * config.hidden_size + 3 * (config.moe_intermediate_size or 0))
        dense = 3 * tokens * config.intermediate_size // self.of(TENSOR)
        logits = (4 * 4 + 2) * rows * config.vocab_size // self.of(TENSOR)
        graphs = GRAPHS if self.device.platform == "gpu" else 0
        return self.device.itemsize * (exchanged + max(experts, dense)) + logits + graphs

    @property
    def chunk(self) -> int:
        """New tokens of prompts that each data shard reads at a time."""
        return roofline.chunk(self.config, self.device, self.of(DATA) if self.config.n_routed_experts else 1)

    def tokens(self, available: float, rows: int = PREDICTED_ROWS) -> int:
        """Tokens of cache of one data shard that fit in `available` bytes of each of its devices, in whole pages."""
        free = available - self.weight_bytes - self.working_bytes(rows)
        return max(int(free / self.token_bytes), 0) // SLOTS * SLOTS

    def decode(self, rows: int = PREDICTED_ROWS, held: int = HELD, every: int | None = None) -> Predicted:
        """A step of `rows` rows of each data shard that hold `held` tokens each, or of `every` rows in all."""
        return self.predicted(Work("kernel_latents", rows, 1, held, every))

    def prompts(self, length: int = HELD) -> Predicted:
        """A pass over a chunk of prompts of `length` tokens in each data shard."""
        rows = max(self.chunk // length, 1)
        new = min(self.chunk, length)
        cached = (length + new) // 2  # after a chunk of the prompt, on average
        heads = "kernel_heads" if self.device.name in WITH_KERNELS else "compressed"
        form = roofline.pick_form(self._of_device, self.device, rows, new, cached, (heads, "move_elided"))
        return self.predicted(Work(form, rows, new, cached))

    @cached_property
    def _of_device(self) -> Config:
        """The config as one device's attention sees it, which has its own heads alone."""
        return dataclasses.replace(
            self.config, num_attention_heads=self.config.num_attention_heads // self.of(TENSOR)
        )

    def predicted(self, work: Work) -> Predicted:
        """Any pass."""
        reads_prompts = work.new > 1
        prefilled = work.rows * work.cached if reads_prompts else 0
        sent, exchange = self.messages(work.tokens, work.rows, prefilled)
        arithmetic = self._flops(work) / self.device.flops
        reading = self._read(work) / self.device.bandwidth
        computing = arithmetic / READING if reads_prompts else arithmetic
        between = self.config.num_hidden_layers * self.device.between
        seconds = max(computing, reading) + between + sent.seconds
        return Predicted(seconds, self._every_token(work) / seconds, sent, exchange, max(arithmetic, reading))

    def _every_token(self, work: Work) -> int:
        """New tokens of all shards."""
        return work.new * (work.every or work.rows * self.of(DATA))

    def _flops(self, work: Work) -> float:
        """Of one device."""
        config, weights = self.config, self.weights
        held = self._held(work)
        attention = roofline.step_cost(
            self._of_device, work.form, work.rows, work.new, held, self.device.itemsize
        )
        mlps = work.tokens * sum(weights[kind].numbers for kind in ("dense", "shared", "router"))
        head = work.rows * weights["head"].numbers
        pairs = self._every_token(work) * (config.num_experts_per_tok or 0)
        experts = pairs / (config.n_routed_experts or 1) * weights["experts"].numbers
        return config.num_hidden_layers * attention.flops + 2 * (mlps + head + experts)

    def _read(self, work: Work) -> float:
        """Bytes read on one device: weights, touched routed experts, and attended cache."""
        config, weights = self.config, self.weights
        whole = sum(weights[kind].bytes for kind in ("attention", "dense", "shared", "router", "head"))
        touched = roofline.experts_touched(config, self._every_token(work)) / (config.n_routed_experts or 1)
        experts = touched * weights["experts"].bytes
        attended = config.num_hidden_layers * self._read_by_attention(work)
        return whole + experts + attended

    def _read_by_attention(self, work: Work) -> float:
        """Bytes in a layer, without weights."""

        def with_weights(held: int) -> float:
            shape = work.rows, work.new, held
            return roofline.attention_cost(self._of_device, work.form, *shape, self.device.itemsize).bytes

        held = self._held(work)
        # How much narrower the cache is than was counted
        narrower = roofline.held_bytes(self.config, "move_elided", self.device.itemsize) - self._latent
        return with_weights(held) - with_weights(0) - work.rows * held * narrower

    def _held(self, work: Work) -> int:
        """Tokens of each row that one device attends to."""
        return math.ceil(work.attended / self.of(CONTEXT))

    def messages(self, tokens: int, unembedded: int, prefilled: int = 0) -> tuple[Traffic, str]:
        """Messages to one device in a pass over `tokens` tokens of each data shard, and the chosen exchange.

        `prefilled` are the tokens that prompts attend to, whose latents can be gathered instead of merging what is attended."""
        config, moe = self.config, self.moe_layers
        dense = config.num_hidden_layers - moe
        exchange = pick_exchange(config, self.sizes, tokens, self.device)
        routed = exchange_messages(exchange, config, self.sizes, tokens, self.device)
        activations = tokens * config.hidden_size * self.device.itemsize
        summed = self._speech.total(activations, (TENSOR,))  # after o_proj, an MLP and the embedding
        # XLA adds shared and routed experts before it sums them
        together = exchange == "gather" and self.of(CONTEXT) == 1
        shared = summed if config.n_shared_experts and not together else NOTHING
        attention = (summed + self._merging(tokens, prefilled)) * config.num_hidden_layers
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
        gathered = speech.gathered(prefilled * self._latent / self.of(CONTEXT), (CONTEXT,))
        return gathered if gathered.seconds < merged.seconds else merged


def even(config: Config, sizes: Sizes) -> bool:
    """Whether heads and routed experts have equal parts on this mesh; others are refused."""
    uneven_heads = config.num_attention_heads % along(sizes, (TENSOR,))
    uneven_experts = (config.n_routed_experts or 0) % along(sizes, MESH_AXES)
    return not uneven_heads and not uneven_experts


def meshes(config: Config, count: int) -> list[dict[str, int]]:
    """The meshes of `count` devices along `data` and `tensor` that are possible, with most of `data` first.

    That holds no latent twice, and has all devices' memory for different tokens."""
    shared = [tensor for tensor in range(1, count + 1) if count % tensor == 0]
    found = [{DATA: count // tensor, TENSOR: tensor} for tensor in shared]
    return [sizes for sizes in found if even(config, sizes)]


def preferred(
    config: Config,
    count: int,
    device: Device,
    available: float,
    rows: int = PREDICTED_ROWS,
    held: int = HELD,
    how: PackedWeights | None = None,
) -> MeshCost | None:
    """The first of `meshes` on which `rows` rows of each data shard fit with `held` tokens each; None if none does."""
    for sizes in meshes(config, count):
        cost = MeshCost(config, sizes, device, how)
        if cost.tokens(available, rows) >= rows * held:
            return cost
    return None


def about(count: float) -> str:
    """A count with two digits: a prediction is no better."""
    digits = len(str(int(count)))
    unit = 10 ** max(digits - 2, 0)
    return f"{round(count / unit) * unit:,}"
