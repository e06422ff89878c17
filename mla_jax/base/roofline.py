"""FLOPs and bytes of the forms of attention, what devices reach, and the choice of a form that follows. No JAX here.

`rows` of a batch bring `new` tokens each, which attend to `attended` tokens, held ones and themselves."""

import math
from typing import NamedTuple

from mla_jax.base.config import Config


class Device(NamedTuple):
    """A device's rates in practice: dense bf16 FLOP/s and bytes/s of memory reads (float32 on a CPU), if `measured` here.

    `between` are seconds a layer in which its 40 to 45 kernels start and end, 1.2 us each: of DeepSeek-V3's 40 kernels at batch 1
    on an H200, 25 take less than 4 us, 36 us together. The tables have a device that is `known`."""

    name: str
    platform: str
    flops: float
    bandwidth: float
    between: float = 50e-6
    measured: bool = False
    known: bool = True

    @property
    def itemsize(self) -> int:
        """Bytes of a number: weights and caches are float32 on a CPU, bfloat16 elsewhere."""
        return 4 if self.platform == "cpu" else 2


# By the start of JAX's device_kind; H200, H100 and CPU (two cores) measured, the others 80 % of the vendor's figures
DEVICES = {
    "NVIDIA H200": Device("NVIDIA H200", "gpu", 811e12, 4.56e12),
    "NVIDIA H100": Device("NVIDIA H100", "gpu", 790e12, 3.0e12),
    "NVIDIA B200": Device("NVIDIA B200", "gpu", 1800e12, 6.4e12),
    "NVIDIA A100": Device("NVIDIA A100", "gpu", 250e12, 1.6e12),
    "TPU v5 lite": Device("TPU v5e", "tpu", 158e12, 0.65e12),
    "TPU v5": Device("TPU v5p", "tpu", 367e12, 2.2e12),
    "TPU v6 lite": Device("TPU v6e", "tpu", 734e12, 1.3e12),
    "cpu": Device("CPU", "cpu", 0.4e12, 0.05e12, 0.0),
}
# FLOP/s and bytes/s of a device that the table lacks, until they are measured: any card for servers has as much
UNKNOWN = 100e12, 0.6e12


def device(kind: str, platform: str) -> Device:
    """The figures of a device by JAX's `device_kind`; a careful guess of one that is not `known`. All CPUs have the same."""
    known = next((figures for start, figures in DEVICES.items() if kind.startswith(start)), None)
    if known is not None:
        return known
    if platform == "cpu":
        return DEVICES["cpu"]._replace(name=kind)
    return Device(kind, platform, *UNKNOWN, known=False)


# Tokens of a prompt's chunk whose experts come from the host's memory, where nothing else bounds it
STREAMED = 8192
FEW = 8  # new tokens per row up to which the kernel over latents is taken


class Cost(NamedTuple):
    flops: float
    bytes: float

    def plus(self, bytes: float) -> "Cost":
        return Cost(self.flops, self.bytes + bytes)

    def seconds(self, on: Device) -> float:
        """The time below which no program can go: the slower of arithmetic and memory."""
        return max(self.flops / on.flops, self.bytes / on.bandwidth)


OVER_HEADS = ("naive", "kernel_naive")  # forms that cache heads


def held_bytes(config: Config, form: str, itemsize: int = 2) -> int:
    """Cached bytes of one token in one layer."""
    rope = config.qk_rope_head_dim
    if form in OVER_HEADS:
        return itemsize * config.num_attention_heads * (config.qk_nope_head_dim + rope + config.v_head_dim)
    return itemsize * (config.kv_lora_rank + rope)


def chooses(config: Config, attended: int) -> bool:
    """Whether indexers choose among so many tokens: up to a number of them all are attended to."""
    return config.index_topk is not None and attended > config.index_topk


def read_tokens(config: Config, rows: int, new: int, attended: int) -> int:
    """Cached tokens that a layer's attention reads: those of each row, or of each new token those that it has chosen."""
    return rows * new * (config.index_topk or 0) if chooses(config, attended) else rows * attended


def choice_cost(config: Config, rows: int, new: int, attended: int, key: float) -> Cost:
    """FLOPs and bytes of one indexer without its projections, nothing where it does not choose.

    Keys of `key` bytes are read once, and the products of all its heads are written and read in float32."""
    if not chooses(config, attended):
        return Cost(0.0, 0.0)
    heads, width = config.index_n_heads or 0, config.index_head_dim or 0
    products = rows * new * attended * heads
    return Cost(2 * products * width, key * rows * attended + 2 * 4 * products)


def attention_cost(
    config: Config,
    form: str,
    rows: int,
    new: int,
    attended: int,
    itemsize: int = 2,
    held: float | None = None,
) -> Cost:
    """FLOPs and bytes of one layer's attention without its projections, causality not exploited, scores in float32.

    The kernels write no scores: `kernel_latents` and `kernel_chosen` compute as `move_elided` does, `kernel_heads` as
    `compressed`, `kernel_naive` as `naive`. Where tokens are chosen, each new token reads its own. A form that is not known here
    counts as `move_elided`. A token is cached in `held` bytes, by default in those of `held_bytes`."""
    if chooses(config, attended):
        rows, new, attended = rows * new, 1, config.index_topk or 0
    heads, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    weights = heads * rank * (nope + value)
    latents = rows * attended * (rank + rope)
    expanded = rows * attended * heads * (nope + rope + value)
    scores = 2 * 4 * rows * heads * new * attended  # written once, read once
    over_heads = 2 * rows * heads * new * attended * (nope + rope + value)
    over_latents = 2 * rows * heads * new * attended * (2 * rank + rope) + 2 * rows * new * weights
    plain = Cost(over_heads + 2 * rows * new * weights, itemsize * (expanded + weights))
    rebuilding = Cost(
        over_heads + 2 * rows * attended * weights, itemsize * (latents + 2 * expanded + weights)
    )
    over = Cost(over_latents, itemsize * (latents + weights))
    copies = 2 * rows * attended * heads * (rank + rope)
    moved = over.plus(bytes=scores)
    found = {
        "naive": plain.plus(bytes=scores),
        "kernel_naive": plain,
        "compressed": rebuilding.plus(bytes=scores),
        "kernel_heads": rebuilding,
        "absorbed": over.plus(bytes=itemsize * copies + scores),
        "move_elided": moved,
        "kernel_latents": over,
        "kernel_chosen": over,
    }.get(form, moved)
    other = 0 if held is None else held - held_bytes(config, form, itemsize)
    return found.plus(bytes=rows * attended * other)


def step_cost(config: Config, form: str, rows: int, new: int, attended: int, itemsize: int = 2) -> Cost:
    """`attention_cost` plus the projections around it: one attention layer as a whole."""
    query = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    q_rank, width = config.q_lora_rank, config.hidden_size
    weights = query * width if q_rank is None else q_rank * (width + query)
    weights += (
        width * (config.kv_lora_rank + config.qk_rope_head_dim)
        + width * config.num_attention_heads * config.v_head_dim
    )
    attention = attention_cost(config, form, rows, new, attended, itemsize)
    return Cost(attention.flops + 2 * rows * new * weights, attention.bytes + itemsize * weights)


def experts_touched(config: Config, tokens: int) -> float:
    """Routed experts of a layer that `tokens` touch on average, when each is as likely as any other."""
    experts, chosen = config.n_routed_experts or 0, config.routed_per_token
    return experts * (1 - (1 - chosen / experts) ** tokens) if experts else 0.0


def break_even(config: Config) -> float:
    """New tokens from which, on a long prefix, rebuilding the heads takes fewer FLOPs than attending over latents.

    n* = r(dn + dv) / (2r - dn - dv): 171 for DeepSeek and Kimi, 398 for GLM-4.7-Flash; infinite where absorbing always wins."""
    both = config.qk_nope_head_dim + config.v_head_dim
    saved = 2 * config.kv_lora_rank - both
    return config.kv_lora_rank * both / saved if saved > 0 else float("inf")


# On a CPU, XLA multiplies by a matrix of each head at this fraction of the rate at which all heads multiply by latents that they
# share: benchmarks/forms.py
RATE_OF_HEADS = {"cpu": 0.25}


def pick_form(
    config: Config,
    on: Device,
    rows: int,
    new: int,
    attended: int,
    forms: tuple[str, ...] = ("move_elided", "compressed"),
) -> str:
    """The fastest of these forms, which all hold latents and may take turns over one cache."""
    return min(forms, key=lambda form: attention_seconds(config, on, form, rows, new, attended))


def attention_seconds(
    config: Config, on: Device, form: str, rows: int, new: int, attended: int, held: float | None = None
) -> float:
    """About the time that a device takes for `attention_cost`."""
    cost = attention_cost(config, form, rows, new, attended, on.itemsize, held)
    rate = RATE_OF_HEADS.get(on.platform, 1.0) if form in ("naive", "compressed") else 1.0
    return cost._replace(flops=cost.flops / rate).seconds(on)


def why_form(
    config: Config, on: Device, form: str, rows: int, new: int, attended: int, held: float | None = None
) -> str:
    """One line on the cost of a form here, whose tokens are cached in `held` bytes, next to the alternative form's."""
    over_latents = ("move_elided", "absorbed", "kernel_latents", "kernel_chosen")
    other = "compressed" if form in over_latents else "move_elided"

    def said(name: str, held: float | None = None) -> str:
        cost = attention_cost(config, name, rows, new, attended, on.itemsize, held)
        seconds = attention_seconds(config, on, name, rows, new, attended, held)
        bound = "arithmetic" if seconds > cost.bytes / on.bandwidth else "memory"
        return f"{name} {cost.flops / 1e9:,.3g} GFLOP, {cost.bytes / 1e6:,.3g} MB, {seconds * 1e6:,.3g} us by {bound}"

    return f"{said(form, held)}; {said(other)}"


CHUNK_ON_A_CPU = 512
CHUNK = (4096, 16384)  # elsewhere: at least and at most
# On a mesh, at least: with fewer tokens a shard's whole weights take longer to read than to multiply with
CHUNK_OF_A_SHARD = 512

# Tokens, held and new, of prompts that share a line. XLA's forms compute the scores of all of a line's tokens with all of these,
# the kernel those of each row alone.
REACH, REACH_OF_KERNEL = 2048, 1 << 30


def chunk(config: Config, on: Device, shards: int = 1) -> int:
    """New tokens of prompts in one dispatch, a power of two: enough that experts compute for as long as they are read.

    On a mesh these are the tokens of each of its data shards, for an expert gets those of all."""
    if on.platform == "cpu":
        return CHUNK_ON_A_CPU
    tokens_of_an_expert = on.flops / on.bandwidth  # two operations a weight and token, two bytes a weight
    tokens = tokens_of_an_expert * (config.n_routed_experts or 0) / (config.routed_per_token or 1)
    least, most = CHUNK
    every = min(max(1 << math.ceil(math.log2(max(tokens, 1))), least), most)
    return every if shards == 1 else max(1 << int(math.log2(every / shards)), CHUNK_OF_A_SHARD)


# By platform: the most slots of a block, and the bytes that what is made of it stays below
BLOCK = {"cpu": (256, 8 << 20)}
BLOCK_ELSEWHERE = (4096, 512 << 20)


def block_slots(config: Config, platform: str, rows: int, new: int, itemsize: int) -> int:
    """Cached tokens per row that attention takes at a time: a power of two, 64 at least.

    Scores of `new` queries per row and rebuilt heads of a block stay below a bound. On a CPU the bound is the size of its
    caches."""
    most, budget = BLOCK.get(platform, BLOCK_ELSEWHERE)
    each = block_bytes(config, rows, new, 1, itemsize)
    return min(most, max(64, 1 << max(budget // each, 1).bit_length() - 1))


class ChoiceSizes(NamedTuple):
    """Of a step whose tokens choose those that they attend to."""

    slots: int  # of each line that are scored at a time
    choosing: int  # new tokens of each line that choose at a time
    attending: int | None  # new tokens of each line that attend at a time; None: all, by a kernel


def choice_sizes(
    config: Config, platform: str, form: str, lines: int, new: int, itemsize: int
) -> ChoiceSizes:
    """Powers of two, with which scores of an indexer, and what a form makes of the chosen tokens, stay below a bound.

    Few new tokens of a line choose among many slots at a time, for on a GPU each block takes forty kernels. With half the bound
    these take about as long as the block's bytes: where little is cached, the rest of a larger one is scored for nothing."""
    most, budget = BLOCK.get(platform, BLOCK_ELSEWHERE)
    topk = config.index_topk or 0
    of_slot = new * 4 * ((config.index_n_heads or 0) + SELECTING) + key_bytes(config, itemsize)
    slots = max(_power_below(budget // 2 // (lines * of_slot)), _power_below(max(most, topk)))
    choosing = _power_below(budget // (lines * scored_bytes(config, slots)))
    if form == "kernel_chosen":
        return ChoiceSizes(slots, choosing, None)
    read = topk * chosen_bytes(config, form, itemsize)
    return ChoiceSizes(slots, choosing, _power_below(budget // (lines * read)))


def _power_below(number: int) -> int:
    """The largest power of two that is not larger; 1 at least."""
    return 1 << max(number, 1).bit_length() - 1


# Of 4 bytes, for each candidate while the best are selected: bits, slots, places and their copies
SELECTING = 8


def scored_bytes(config: Config, slots: int) -> int:
    """Bytes for each new token that chooses among `slots` tokens and those that are best so far."""
    heads, topk = config.index_n_heads or 0, config.index_topk or 0
    return 4 * (slots * heads + (slots + topk) * SELECTING)


def key_bytes(config: Config, itemsize: int) -> int:
    """Bytes of an indexer's key as it is scored."""
    return itemsize * (config.index_head_dim or 0)


def chosen_bytes(config: Config, form: str, itemsize: int) -> int:
    """Bytes for each pair of a new token and one that it has chosen: copied latents, scores, and heads where they are rebuilt.

    A form that is not known here counts as `naive`."""
    heads, latent = config.num_attention_heads, config.kv_lora_rank + config.qk_rope_head_dim
    head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    made = {
        "naive": heads * head,
        "compressed": 2 * heads * head,
        "absorbed": heads * latent,
        "move_elided": latent,
    }
    return 2 * 4 * heads + itemsize * (latent + made.get(form, made["naive"]))


def block_bytes(config: Config, rows: int, new: int, slots: int, itemsize: int) -> int:
    """Scores, their weights, and the rebuilt heads of a block of `slots` slots per row."""
    head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return rows * config.num_attention_heads * slots * (2 * 4 * new + 2 * head * itemsize)
