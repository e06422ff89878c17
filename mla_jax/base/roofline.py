"""FLOPs and bytes of the forms of attention, what devices reach, and the choice of a form that follows. No JAX here.

`rows` of a batch bring `new` tokens each, which attend to `attended` tokens, held ones and themselves."""

import math
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mla_jax.base.config import Config


class Device(NamedTuple):
    """What a device reaches in practice: dense bf16 FLOP/s and bytes/s of memory reads (float32 on a CPU), if `measured` here.

    `between` are seconds a layer of a decode step that go beside its bytes: on an H200 benchmarks/decode.py has 48 us at batch 1,
    66 at 8 and 95 at 64. With what is taken here each of these steps is predicted within 10 %."""

    name: str
    platform: str
    flops: float
    bandwidth: float
    between: float = 56e-6
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


FEW = 8  # new tokens per row up to which the kernel over latents is taken


SOME = 32  # tokens of an expert: from so many on its time on a CPU is a line


class Host(NamedTuple):
    """What a CPU reaches with a layer's experts in one number format, and what calls of them take beside.

    Bytes/s of the weights of few tokens, FLOP/s with many; seconds. `call` is what every call takes of the CPU, however soon it
    follows another; `latency` what one takes in all that a device waits for alone: the way there, threads that sleep by then, and
    the way back, too. `link` is bytes/s from the CPU's memory to the device's. `exposed` times the bytes' time adds to that of
    arithmetic: three quarters of it in bf16 with AVX-512 on Zen 4, more than all where codes take time to be converted."""

    name: str
    bandwidth: float
    flops: float
    call: float
    latency: float
    link: float
    exposed: float = 1.0


class Part(NamedTuple):
    """What one call computes: its `share` of the choices that are the host's, and the chance that there are `any`."""

    share: float
    any: float


class Routed(NamedTuple):
    """Experts of layers on the host, `[L X]`: how likely a token is to choose each, and which of them the device holds, too."""

    chosen: np.ndarray
    held: np.ndarray

    @classmethod
    def evenly(cls, config: Config) -> "Routed":
        """All of a layer on the host, each as likely as any other."""
        experts = config.n_routed_experts or 1
        return cls(np.full((1, experts), (config.num_experts_per_tok or 0) / experts), np.zeros((1, experts), bool))

    def touched(self, tokens: int, share: float = 1.0) -> tuple[float, float]:
        """Experts of a layer that such a share of `tokens`' choices touches on the host and on the device, on the average of the
        layers."""
        each = 1 - (1 - share * np.minimum(self.chosen, 1)) ** tokens
        return float(each[~self.held].sum()) / len(each), float(each[self.held].sum()) / len(each)

    @property
    def left(self) -> float:
        """The share of the tokens' choices that the host gets."""
        return float(self.chosen[~self.held].sum() / self.chosen.sum())

    def parts(self, tokens: int, choices: int, defer: int) -> tuple[Part, Part]:
        """What the host computes of a layer now, and what later: the last `defer` of a token's `choices` that are its own.

        As if each choice were the host's by itself, so likely as on the average of the layers."""
        chances = [math.comb(choices, n) * self.left**n * (1 - self.left) ** (choices - n) for n in range(choices + 1)]
        later = sum(chance * min(n, defer) for n, chance in enumerate(chances)) / (choices * self.left or 1)
        idle = [sum(chances[: defer + 1]) ** tokens, (chances[0] if defer else 1.0) ** tokens]
        return Part(1 - later, 1 - idle[0]), Part(later, 1 - idle[1])


class Cost(NamedTuple):
    flops: float
    bytes: float

    def plus(self, bytes: float) -> "Cost":
        return Cost(self.flops, self.bytes + bytes)

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

    The kernels write no scores: `kernel_latents` computes as `move_elided` does, `kernel_heads` as `compressed`."""
    heads, rank, rope = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
    nope, value = config.qk_nope_head_dim, config.v_head_dim
    weights = heads * rank * (nope + value)
    latents, expanded = rows * attended * (rank + rope), rows * attended * heads * (nope + rope + value)
    scores = 2 * 4 * rows * heads * new * attended  # written once, read once
    over_heads = 2 * rows * heads * new * attended * (nope + rope + value)
    over_latents = 2 * rows * heads * new * attended * (2 * rank + rope) + 2 * rows * new * weights
    if form == "naive":
        return Cost(over_heads + 2 * rows * new * weights, itemsize * (expanded + weights) + scores)
    rebuilding = Cost(over_heads + 2 * rows * attended * weights, itemsize * (latents + 2 * expanded + weights))
    over = Cost(over_latents, itemsize * (latents + weights))
    copies = 2 * rows * attended * heads * (rank + rope)
    return {
        "compressed": rebuilding.plus(bytes=scores),
        "kernel_heads": rebuilding,
        "absorbed": over.plus(bytes=itemsize * copies + scores),
        "move_elided": over.plus(bytes=scores),
        "kernel_latents": over,
    }[form]


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


class Busy(NamedTuple):
    """Seconds of a layer's routed experts on a CPU: until what is needed `now` is there, if the CPU was idle, and of its own time
    for that call and for the one of what is added `later`."""

    alone: float
    now: float
    later: float


def host_calls(config: Config, on: Host, tokens: int, expert_bytes: float, defer: int = 0, routed: Routed | None = None) -> Busy:
    """The CPU's two calls for a layer, an expert being of `expert_bytes`; without `routed` all of them, equally likely.

    Each reads the experts that its own choices touch: those that some tokens need now and others later are read twice."""
    weights, choices = 3 * config.hidden_size * (config.moe_intermediate_size or 0), config.num_experts_per_tok or 0
    routed = routed or Routed.evenly(config)
    now, later = routed.parts(tokens, choices, min(defer, choices - 1))

    def work(part: Part) -> float:
        experts, rows = routed.touched(tokens, part.share)[0], tokens * choices * routed.left * part.share
        return experts and experts * _expert_seconds(on, rows / experts, expert_bytes, weights)

    alone = now.any * on.latency + work(now)
    return Busy(alone, now.any * on.call + work(now), later.any * on.call + work(later))


def _expert_seconds(on: Host, rows: float, expert_bytes: float, weights: int) -> float:
    """Of one that so many tokens chose: from its bytes' time with the first evenly to what SOME take."""
    read, row = expert_bytes / on.bandwidth, 2 * weights / on.flops
    some, more = (max(read, on.exposed * read + n * row) for n in (SOME - 1, rows - 1))
    return more if rows > SOME else read + max(rows - 1, 0) / (SOME - 1) * (some - read)


def host_seconds(config: Config, on: Host, tokens: int, expert_bytes: float, routed: Routed | None = None) -> float:
    """Until a device has the answer of a CPU that was idle, of all of a layer's routed experts that are not the device's."""
    return host_calls(config, on, tokens, expert_bytes, routed=routed).alone


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

    From `stream` tokens on, 0 for never, they are brought to the device; else it computes those that `routed` says it holds, and
    its shared ones, while it waits for the others."""
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
    here, left = (0.0, 1.0) if routed is None else (routed.touched(new)[1], routed.left)
    hot, beside = on_device((1 - left) * chosen * one, here * one), on_device(shared, shared)
    return seconds + layers * max(host_seconds(config, host, new, expert_bytes, routed) - beside, hot)


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
    there. The CPU computes one call after the other: what is deferred has the next layer's time, too; the last layer has none."""
    itemsize = on.itemsize
    one = 3 * config.hidden_size * (config.moe_intermediate_size or 0) * itemsize
    here = 0.0 if routed is None else routed.touched(rows)[1]
    on_device = decode_bytes(config, rows, held, itemsize) - layers * (experts_touched(config, rows) - here) * one
    seconds = on_device / on.bandwidth + config.num_hidden_layers * on.between
    if not layers or host is None:
        return seconds
    each, beside = seconds / config.num_hidden_layers, ((config.n_shared_experts or 0) + here) * one / on.bandwidth
    theirs = host_calls(config, host, rows, expert_bytes, defer, routed)
    waits = max(theirs.alone - beside, theirs.now + theirs.later - each, 0.0)
    return seconds + (layers - 1) * waits + max(theirs.alone + theirs.later - beside, 0.0)


WORTH = 0.03  # of a step: predictions are no better than that, so less is nothing to defer experts for


def best_defer(
    config: Config, on: Device, rows: int, held: int, host: Host, layers: int, expert_bytes: float, routed: Routed | None = None
) -> int:
    """The fewest experts a token to defer with which such a step is within WORTH of the fastest."""
    chosen = config.num_experts_per_tok or 1
    times = [decode_seconds(config, on, rows, held, host, layers, expert_bytes, defer, routed) for defer in range(chosen)]
    return next(defer for defer, seconds in enumerate(times) if seconds <= (1 + WORTH) * min(times))


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
    other = "compressed" if form in ("move_elided", "absorbed", "kernel_latents") else "move_elided"

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
