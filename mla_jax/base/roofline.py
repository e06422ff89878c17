"""FLOPs and bytes of the forms of attention, what devices reach, and the choice of a form that follows. No JAX here.

`rows` of a batch bring `new` tokens each, which attend to `attended` tokens, held ones and themselves."""

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mla_jax.base.config import Config


class Device(NamedTuple):
    """What a device reaches in practice: dense bf16 FLOP/s and bytes/s of memory reads (float32 on a CPU), if `measured` here.

    `between` are seconds a layer of a decode step that go beside its bytes: on an H200 benchmarks/decode.py has 68 us at batch 1,
    100 at 8 and 121 at 64."""

    name: str
    platform: str
    flops: float
    bandwidth: float
    between: float = 85e-6
    measured: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of a number: weights and caches are float32 on a CPU, bfloat16 elsewhere."""
        return 4 if self.platform == "cpu" else 2


DEVICES = {  # by the start of JAX's device_kind; H200 and CPU (two cores) measured, the others 80 % of the vendor's figures
    "NVIDIA H200": Device("NVIDIA H200", "gpu", 811e12, 4.56e12),
    "NVIDIA H100": Device("NVIDIA H100", "gpu", 790e12, 2.7e12),
    "NVIDIA A100": Device("NVIDIA A100", "gpu", 250e12, 1.6e12),
    "TPU v5 lite": Device("TPU v5e", "tpu", 158e12, 0.65e12),
    "TPU v5": Device("TPU v5p", "tpu", 367e12, 2.2e12),
    "TPU v6 lite": Device("TPU v6e", "tpu", 734e12, 1.3e12),
    "cpu": Device("CPU", "cpu", 0.4e12, 0.05e12, 0.0),
}


def device(kind: str, platform: str) -> Device:
    """The figures of a device by JAX's `device_kind`; an unknown one takes the H200's balance on a GPU, v5e's on a TPU."""
    known = next((figures for start, figures in DEVICES.items() if kind.startswith(start)), None)
    fallback = {"cpu": "cpu", "tpu": "TPU v5 lite"}.get(platform, "NVIDIA H200")
    return known or DEVICES[fallback]._replace(name=kind)


FEW = 8  # new tokens a row up to which the form "fused" attends over latents


class Host(NamedTuple):
    """What a CPU reaches with a layer's experts in one number format, and what a call of them adds on its device.

    Bytes/s of the weights of few tokens, FLOP/s with many, seconds; `link` is bytes/s from its memory to the device's."""

    name: str
    bandwidth: float
    flops: float
    call: float
    link: float


class Routed(NamedTuple):
    """Experts of layers on the host, `[L X]`: how likely a token is to choose each, and which of them the device holds, too."""

    chosen: np.ndarray
    held: np.ndarray

    def touched(self, tokens: int) -> tuple[float, float]:
        """Experts of a layer that `tokens` touch on the host and on the device, on the average of the layers."""
        each = 1 - (1 - np.minimum(self.chosen, 1)) ** tokens
        return float(each[~self.held].sum()) / len(each), float(each[self.held].sum()) / len(each)

    @property
    def left(self) -> float:
        """The share of the tokens' choices that the host gets."""
        return float(self.chosen[~self.held].sum() / self.chosen.sum())


class Cost(NamedTuple):
    flops: float
    bytes: float

    def seconds(self, on: Device) -> float:
        """The time below which no program can go: the slower of arithmetic and memory."""
        return max(self.flops / on.flops, self.bytes / on.bandwidth)


def held_bytes(config: Config, form: str, itemsize: int = 2) -> int:
    """What one token leaves in one layer's cache."""
    rope = config.qk_rope_head_dim
    if form == "naive":
        return itemsize * config.num_attention_heads * (config.qk_nope_head_dim + rope + config.v_head_dim)
    return itemsize * (config.kv_lora_rank + rope)


def attention_cost(config: Config, form: str, rows: int, new: int, attended: int, itemsize: int = 2) -> Cost:
    """FLOPs and bytes of one layer's attention without its projections, causality not exploited, scores in float32.

    "fused" writes no scores; with many new tokens it rebuilds the heads."""
    heads, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    weights = heads * rank * (nope + value)
    latents, expanded = rows * attended * (rank + rope), rows * attended * heads * (nope + rope + value)
    scores = 2 * 4 * rows * heads * new * attended  # written once, read once
    over_heads = 2 * rows * heads * new * attended * (nope + rope + value)
    over_latents = 2 * rows * heads * new * attended * (2 * rank + rope) + 2 * rows * new * weights
    if form == "naive":
        return Cost(over_heads + 2 * rows * new * weights, itemsize * (expanded + weights) + scores)
    if form == "compressed" or (form == "fused" and new > FEW):
        written = scores * (form != "fused")
        return Cost(over_heads + 2 * rows * attended * weights, itemsize * (latents + 2 * expanded + weights) + written)
    copies = 2 * rows * attended * heads * (rank + rope) if form == "absorbed" else 0
    return Cost(over_latents, itemsize * (latents + weights + copies) + scores * (form != "fused"))


def step_cost(config: Config, form: str, rows: int, new: int, attended: int, itemsize: int = 2) -> Cost:
    """`attention_cost` plus the projections around it: one attention layer as a whole."""
    query = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    q_rank, width = config.q_lora_rank, config.hidden_size
    weights = query * width if q_rank is None else q_rank * (width + query)
    weights += width * (config.kv_lora_rank + config.qk_rope_head_dim) + width * config.num_attention_heads * config.v_head_dim
    attention = attention_cost(config, form, rows, new, attended, itemsize)
    return Cost(attention.flops + 2 * rows * new * weights, attention.bytes + itemsize * weights)


def experts_touched(config: Config, tokens: int) -> float:
    """Routed experts of a layer that `tokens` touch on average, when each is as likely as any other."""
    experts, chosen = config.n_routed_experts or 0, config.num_experts_per_tok or 0
    return experts * (1 - (1 - chosen / experts) ** tokens) if experts else 0.0


def decode_bytes(config: Config, rows: int, held: int, itemsize: int = 2) -> float:
    """The least a decode step must read: its weights, with the experts that `rows` tokens touch on average, and the latents."""
    mlp, expert = 3 * config.hidden_size * config.intermediate_size, 3 * config.hidden_size * (config.moe_intermediate_size or 0)
    router = (config.n_routed_experts or 0) * config.hidden_size
    moe = expert * (experts_touched(config, rows) + (config.n_shared_experts or 0)) + router
    layers = sum(moe if config.is_moe(i) else mlp for i in range(config.num_hidden_layers))
    attention = step_cost(config, "move_elided", rows, 1, 0).bytes / 2 * config.num_hidden_layers
    latents = rows * held * (config.kv_lora_rank + config.qk_rope_head_dim) * config.num_hidden_layers
    return itemsize * (layers + attention + latents + config.vocab_size * config.hidden_size)


def host_seconds(config: Config, on: Host, tokens: int, expert_bytes: float, routed: Routed | None = None) -> float:
    """A layer's routed experts on a CPU, an expert being of `expert_bytes`; without `routed` all of them, equally likely."""
    weights = 3 * config.hidden_size * (config.moe_intermediate_size or 0)
    touched, left = (experts_touched(config, tokens), 1.0) if routed is None else (routed.touched(tokens)[0], routed.left)
    flops = 2 * tokens * left * (config.num_experts_per_tok or 0) * weights
    return on.call + max(touched * expert_bytes / on.bandwidth, flops / on.flops)


def stream_seconds(config: Config, on: Device, host: Host, tokens: int, expert_bytes: float) -> float:
    """A layer's routed experts brought from the host to a device, all of them, unpacked there and computed."""
    experts, weights = config.n_routed_experts or 0, 3 * config.hidden_size * (config.moe_intermediate_size or 0)
    unpacked = experts * on.itemsize * weights
    computed = Cost(2 * tokens * (config.num_experts_per_tok or 0) * weights, unpacked).seconds(on)
    return experts * expert_bytes / host.link + (experts * expert_bytes + unpacked) / on.bandwidth + computed


def stream_tokens(
    config: Config, on: Device, host: Host, expert_bytes: float, routed: Routed | None = None, most: int = 1 << 20
) -> int:
    """The fewest tokens with which that takes less than computing them on the host; 0 if it takes more with `most`."""

    def gains(tokens: int) -> bool:
        computed = host_seconds(config, host, tokens, expert_bytes, routed)
        return stream_seconds(config, on, host, tokens, expert_bytes) < computed

    return fewest(gains, most)


def fewest(gains: Callable[[int], bool], most: int) -> int:
    """The fewest tokens up to `most` with which something gains, and then with more, too; 0 if it never does."""
    above = next((n for n in (1 << i for i in range(most.bit_length())) if gains(n)), 0)
    below = above // 2 + 1
    return above and below + bisect_left(range(below, above), True, key=gains)


def prefill_seconds(
    config: Config,
    on: Device,
    new: int,
    host: Host | None = None,
    layers: int = 0,
    expert_bytes: float = 0,
    stream: int = 0,
    routed: Routed | None = None,
) -> float:
    """A prompt of `new` tokens at once, if the routed experts of so many `layers` lie on the `host`.

    From `stream` tokens on, 0 for never, they are brought to the device."""
    one, chosen = 3 * config.hidden_size * (config.moe_intermediate_size or 0), config.num_experts_per_tok or 0
    moe = sum(config.is_moe(i) for i in range(config.num_hidden_layers))

    def on_device(computed: float, read: float) -> float:
        return Cost(2 * new * computed, on.itemsize * read).seconds(on)

    attention = step_cost(config, pick_form(config, on, 1, new, new), 1, new, new, on.itemsize).seconds(on)
    dense, shared = 3 * config.hidden_size * config.intermediate_size, (config.n_shared_experts or 0) * one
    seconds = config.num_hidden_layers * attention + (config.num_hidden_layers - moe) * on_device(dense, dense)
    seconds += moe * on_device(shared, shared) + (moe - layers) * on_device(chosen * one, experts_touched(config, new) * one)
    if not layers or host is None:
        return seconds
    if 0 < stream <= new:
        return seconds + layers * stream_seconds(config, on, host, new, expert_bytes)
    return seconds + layers * host_seconds(config, host, new, expert_bytes, routed)


def decode_seconds(
    config: Config,
    on: Device,
    rows: int,
    held: int,
    host: Host | None = None,
    layers: int = 0,
    expert_bytes: float = 0,
    defer: int = 0,
    routed: Routed | None = None,
) -> float:
    """A decode step, of which the CPU `host` computes the routed experts of so many `layers`, `defer` of a token a layer later.

    A layer waits for its experts but for the time that its shared ones, and those that `routed` says the device holds, take
    there; what is deferred has the time of the next layer, too."""
    itemsize, chosen = on.itemsize, config.num_experts_per_tok or 1
    one = 3 * config.hidden_size * (config.moe_intermediate_size or 0) * itemsize
    here, left = (0.0, 1.0) if routed is None else (routed.touched(rows)[1], routed.left)
    on_device = decode_bytes(config, rows, held, itemsize) - layers * (experts_touched(config, rows) - here) * one
    seconds = on_device / on.bandwidth + config.num_hidden_layers * on.between
    if not layers or host is None:
        return seconds
    each, beside = seconds / config.num_hidden_layers, ((config.n_shared_experts or 0) + here) * one / on.bandwidth
    theirs, count = host_seconds(config, host, rows, expert_bytes, routed), chosen * left
    now = theirs * max(count - min(defer, chosen - 1), 0.0) / count if count else theirs
    return seconds + layers * max(now - beside, theirs - each, 0.0)


def best_defer(
    config: Config, on: Device, rows: int, held: int, host: Host, layers: int, expert_bytes: float, routed: Routed | None = None
) -> int:
    """The fewest experts a token to defer with which such a step is within 1 % of the fastest."""
    chosen = config.num_experts_per_tok or 1
    times = [decode_seconds(config, on, rows, held, host, layers, expert_bytes, defer, routed) for defer in range(chosen)]
    return next(defer for defer, seconds in enumerate(times) if seconds <= 1.01 * min(times))


def break_even(config: Config) -> float:
    """New tokens from which, on a long prefix, rebuilding the heads takes fewer FLOPs than attending over latents.

    n* = r(dn + dv) / (2r - dn - dv): 171 for DeepSeek and Kimi, 398 for GLM-4.7-Flash; infinite where absorbing always wins."""
    both = config.qk_nope_head_dim + config.v_head_dim
    saved = 2 * config.kv_lora_rank - both
    return config.kv_lora_rank * both / saved if saved > 0 else float("inf")


def pick_form(config: Config, on: Device, rows: int, new: int, attended: int) -> str:
    """The faster form of those that hold latents, which may take turns over one cache."""
    return min(
        ("move_elided", "compressed"), key=lambda form: attention_cost(config, form, rows, new, attended, on.itemsize).seconds(on)
    )


def why_form(config: Config, on: Device, form: str, rows: int, new: int, attended: int) -> str:
    """One line that says what a form costs here, next to the other that could have been taken."""
    over_latents = form in ("move_elided", "absorbed") or (form == "fused" and new <= FEW)
    other = "compressed" if over_latents else "move_elided"

    def said(name: str) -> str:
        cost = attention_cost(config, name, rows, new, attended, on.itemsize)
        bound = "arithmetic" if cost.flops / on.flops > cost.bytes / on.bandwidth else "memory"
        return f"{name} {cost.flops / 1e9:,.3g} GFLOP, {cost.bytes / 1e6:,.3g} MB, {cost.seconds(on) * 1e6:,.3g} us by {bound}"

    return f"{said(form)}; {said(other)}"


def chunk_tokens(config: Config, rows: int, slots: int, budget: int) -> int:
    """The longest power of two of new tokens whose scores over `slots` stay within `budget` bytes, 16 at least."""
    chunk = 16
    while chunk < 4096 and 3 * 4 * rows * config.num_attention_heads * 2 * chunk * slots <= budget:
        chunk *= 2
    return chunk
