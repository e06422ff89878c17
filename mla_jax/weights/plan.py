"""What a model needs in memory, worked out from shapes alone, and whether it fits."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import jax

from mla_jax.base import roofline
from mla_jax.base.batch import bucket
from mla_jax.base.devices import Devices
from mla_jax.base.errors import DoesNotFit
from mla_jax.base.limits import free_memory, gib
from mla_jax.base.qtensor import QTensor
from mla_jax.cache.latent import slots_for
from mla_jax.model.transformer import Transformer
from mla_jax.offload.place import Placement
from mla_jax.offload.streaming import scratch_bytes
from mla_jax.weights.load import ON_DEVICE, Checkpoint

PROGRAMS, PROGRAMS_PER_LAYER = 300 << 20, 13 << 20  # bytes, measured with 3 to 27 layers on JAX 0.10.2


@dataclass(frozen=True)
class Plan:
    """Bytes on the device, for `batch` sequences of `context` tokens each."""

    weights: int
    host: int  # of experts in the host's memory; on a CPU a part of the weights
    cache: int  # of all the slots that are made for so many tokens
    temporaries: int
    scores: int  # what the attention scores of one chunk of a prompt stay below
    available: int
    context: int
    longest: int  # the largest context that fits
    batch: int = 1

    @property
    def needed(self) -> int:
        return self.weights + self.cache + self.temporaries

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    def lines(self) -> list[str]:
        """A table, and what to change when it does not fit."""
        rows = {
            "weights": self.weights,
            **({"experts on the host": self.host} if self.host else {}),
            f"cache of {f'{self.batch} x ' * (self.batch > 1)}{self.context:,} tokens": self.cache,
            "temporaries, about": self.temporaries,
            "needed": self.needed,
            "available": self.available,
        }
        verdict = f"largest context that fits: {self.longest:,} tokens" if self.longest else "not even a short context fits"
        return [
            *(f"{name:<28}{size:>12}" for name, size in zip(rows, map(gib, rows.values()), strict=True)),
            verdict,
            *self.advice(),
        ]

    def advice(self) -> list[str]:
        if self.fits:
            return []
        if self.longest:
            return [f"it does not fit: ask for --context {self.longest} or less, or free memory with a larger --memory-fraction"]
        return ["it does not fit: take --dtype bfloat16, a larger --memory-fraction, or a device with more memory"]

    def refuse(self) -> None:
        """Raises DoesNotFit unless at least a short context fits beside the weights."""
        if not self.longest:
            raise DoesNotFit("the model does not fit the device's memory", *self.lines())


def plan(checkpoint: Checkpoint, context: int | None = None, batch: int = 1, placement: Placement = ON_DEVICE) -> Plan:
    """The plan for the whole context that the model allows, or `context`, of each of `batch` sequences."""
    model, longest = checkpoint.model(placement), checkpoint.config.max_position_embeddings
    slot = slot_bytes(model, bucket(batch))
    free, host = available(), checkpoint.bytes(placement, host=True)
    weights = checkpoint.bytes(placement) + host * (checkpoint.device.platform == "cpu")
    scores = score_bytes(weights, model.dispatch.device.platform)
    chosen = context or longest
    quantized = [value.shape for value in checkpoint.parameters(placement).values() if isinstance(value, QTensor)]

    def fits(tokens: int) -> bool:
        return weights + slots_for(tokens) * slot + temporaries(model, quantized, tokens, scores, batch) <= free

    largest = largest_context(fits, lambda tokens: roofline.chunk_tokens(checkpoint.config, batch, tokens, scores), longest)
    largest = max(largest, chosen * fits(chosen))
    held, temporary = slots_for(chosen) * slot, temporaries(model, quantized, chosen, scores, batch)
    return Plan(weights, host, held, temporary, scores, free, chosen, largest, batch)


def slot_bytes(model: Transformer, rows: int) -> int:
    """What one more slot of each of so many rows takes in all layers."""
    (layer,) = jax.eval_shape(lambda: model.new_cache(rows, 1, layers=1))
    each = sum(a.size * a.dtype.itemsize for name, a in layer.items() if name != "length")
    return each * model.config.num_hidden_layers


def largest_context(fits: Callable[[int], bool], chunk: Callable[[int], int], most: int) -> int:
    """The largest of 1 to `most` tokens that fits, 0 if none does.

    What is needed grows with them, but for where prompts' chunks become shorter: from the last such part to the first."""
    while most and not fits(most):
        shortest = chunk(most)
        least = 1 + bisect_left(range(1, most), True, key=lambda tokens: chunk(tokens) <= shortest)
        if fits(least):
            return least + bisect_left(range(least + 1, most), True, key=lambda tokens: not fits(tokens))
        most = least - 1
    return most


def score_bytes(weights: int, platform: str) -> int:
    """What the attention scores of one chunk of a prompt may take.

    On a CPU no more than the weights, which every chunk reads again: scores that stay in its caches are 3 times as fast (8,192
    tokens of the demo model on two cores: 34 s with 1 GiB, 20 with 256 MiB, 12.8 with 128, 11.6 with 64, 15 with 32)."""
    return min(max(weights, 64 << 20), 1 << 30) if platform == "cpu" else 1 << 30


def temporaries(model: Transformer, quantized: Sequence[tuple[int, ...]], context: int, scores: int, batch: int = 1) -> int:
    """About the most that one step takes in addition to weights and cache; `quantized` are the shapes of packed weights.

    Scores, rebuilt heads, activations of experts, unpacked weights, experts copied from the host, logits; on a CPU also what
    tracing and compiling take."""
    config, itemsize = model.config, model.dtype.itemsize
    chunk = min(model.dispatch.chunk(model, batch, context, scores), context)
    tokens = batch * chunk
    copied = scratch_bytes(config, itemsize, tokens) if 0 < model.dispatch.stream <= tokens else 0
    logits = 4 * 4 * batch * config.vocab_size
    parts = (
        _scores(model, context, scores, batch),
        _rebuilt_heads(model, chunk, context, batch),
        _expert_activations(model, tokens),
        _unpacked(model, quantized, tokens),
        copied,
        logits,
        _programs(model),
    )
    return sum(parts)


def _scores(model: Transformer, context: int, scores: int, batch: int) -> int:
    scored = min(roofline.chunk_tokens(model.config, batch, context, scores), context)
    return 3 * 4 * batch * model.config.num_attention_heads * scored * context


def _rebuilt_heads(model: Transformer, chunk: int, context: int, batch: int) -> int:
    """Keys and values of all heads, in the forms that expand the latents."""
    config = model.config
    if model.dispatch.form_name(model, batch, chunk, context) not in ("compressed", "naive", "kernel_heads"):
        return 0
    head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return batch * context * config.num_attention_heads * head * model.dtype.itemsize


def _expert_activations(model: Transformer, tokens: int) -> int:
    config = model.config
    dense = model.dispatch.backend_name(model, tokens) == "dense"
    experts = (config.n_routed_experts or 0) if dense else 2 * (config.num_experts_per_tok or 0)
    width = max(experts * (config.moe_intermediate_size or 0), config.intermediate_size)
    return 3 * tokens * width * model.dtype.itemsize


def _unpacked(model: Transformer, quantized: Sequence[tuple[int, ...]], tokens: int) -> int:
    """The largest packed matrix as numbers; the backend "dense" unpacks the three stacks of a layer's experts."""
    sizes = [prod(shape[-2:]) for shape in quantized]
    if model.dispatch.backend_name(model, tokens) == "dense":
        sizes += [3 * prod(shape) for shape in quantized if len(shape) == 3]
    return model.dtype.itemsize * max(sizes, default=0)


def _programs(model: Transformer) -> int:
    """What tracing, XLA's compiler and its programs take where they share the memory with the model."""
    if model.dispatch.device.platform != "cpu":
        return 0
    return PROGRAMS + PROGRAMS_PER_LAYER * model.config.num_hidden_layers


def logits_bytes(model: Transformer, rows: int, tokens: int) -> int:
    """About the most that float32 logits of `rows` sequences of `tokens` tokens take, with the activations of one forward pass.

    Nothing is read in chunks there, and without a cache no kernel attends: attention scores are `[B N T T]`."""
    config, dispatch, itemsize = model.config, model.dispatch, model.dtype.itemsize
    heads, every = config.num_attention_heads, rows * tokens
    scores = 3 * 4 * rows * heads * tokens * tokens
    head = 2 * config.qk_nope_head_dim + 2 * config.qk_rope_head_dim + config.v_head_dim + config.kv_lora_rank
    dense = dispatch.backend_name(model, every) == "dense"
    chosen = (config.n_routed_experts or 0) if dense else 2 * (config.num_experts_per_tok or 0)
    widest = max(chosen * (config.moe_intermediate_size or 0), config.intermediate_size)
    activations = every * itemsize * (4 * config.hidden_size + max(heads * head, 3 * widest))
    return 4 * every * config.vocab_size + scores + activations


def available() -> int:
    """Bytes that may be taken: of the device, or of free memory on a CPU."""
    devices = Devices.default()
    return free_memory() if devices.platform == "cpu" else devices.free_bytes() or 0
