"""Experts that lie on the host, computed on the device: with many tokens, bringing their weights over the link is faster.

They come packed as they lie, in groups whose unpacked weights take little of the device's memory; a layer is a
`cpu_experts.Experts`. A group is copied, then computed: overlapping both would gain only what the computing takes, which is
little where the link is what bounds."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base import qtensor
from mla_jax.base.config import Config
from mla_jax.base.qtensor import QTensor, dequantize

GROUP = 512 << 20  # bytes of unpacked weights, unless one expert has more
CHUNK = 8192  # tokens that are worth bringing all experts for, where nothing else bounds a step

FORMATS = {  # ours, by the library's names
    "fp8_block": "fp8_block",
    "int8": "int8",
    "int4_g32": "int4_g32",
    "int4_g128": "int4_g128",
    "q8_0": "Q8_0",
    "q4_k": "Q4_K",
    "q6_k": "Q6_K",
}


def groups_of(experts: int, each: int) -> tuple[int, int]:
    """How many groups `experts` of so many bytes are computed in, and how many experts a group has."""
    groups = -(-experts // max(1, GROUP // each))
    return groups, -(-experts // groups)


def held_bytes(config: Config, itemsize: int, tokens: int) -> int:
    """What a step takes on the device for it, about: a group as it comes and unpacked, and its experts' rows."""
    each = 3 * config.hidden_size * (config.moe_intermediate_size or 0) * itemsize
    rows = 3 * tokens * (config.num_experts_per_tok or 0) * config.hidden_size * itemsize
    return 2 * each * groups_of(config.n_routed_experts or 1, each)[1] + rows


def streamed(
    layer: Any, x: Float[Array, "n D"], topk_ids: Int[Array, "n K"], topk_weights: Float[Array, "n K"], backend: Callable
) -> Float[Array, "n D"]:
    """The chosen experts' sum, group by group by a `backend` of moe.py."""
    experts = layer.experts
    groups, size = groups_of(experts, 3 * layer.model * layer.width * x.dtype.itemsize)
    if groups == 1:
        return backend(x, topk_ids, topk_weights, stacks(layer, 0, size, x.dtype))

    def add(i: Array, total: Array) -> Array:
        first = jnp.minimum(i * size, experts - size)  # the last group shares some with the one before
        mine = (topk_ids >= i * size) & (topk_ids < jnp.minimum((i + 1) * size, experts))
        ids, weights = jnp.where(mine, topk_ids - first, size), jnp.where(mine, topk_weights, 0)
        return total + backend(x, ids, weights, stacks(layer, first, size, x.dtype)).astype(jnp.float32)

    # A loop, not one group after the other: there is one program to compile, and XLA cannot fetch several groups at once.
    return jax.lax.fori_loop(0, groups, add, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def stacks(layer: Any, first: Array | int, count: int, dtype: jnp.dtype) -> tuple[Array | QTensor, ...]:
    """gate and up `[X F D]` and down `[X D F]` of `count` experts, quantised if they are; floats in `dtype`."""
    from cpu_experts import ffi

    return unpacked(Kind.of(layer), ffi.fetch(layer, first, count), dtype)


class Kind(NamedTuple):
    """What says how a layer of `cpu_experts` is packed; it stands for the layer where that is not to be held on to."""

    model: int
    width: int
    precision: str
    down_precision: str

    @staticmethod
    def of(layer: Any) -> "Kind":
        return Kind(*(getattr(layer, name) for name in Kind._fields))

    def matrices(self, count: int) -> list[tuple[str, tuple[int, ...]]]:
        """The precision and the shape of gate, up and down of `count` experts."""
        rows = (self.precision, (count, self.width, self.model))
        return [rows, rows, (self.down_precision, (count, self.model, self.width))]


def unpacked(kind: Kind, sections: Sequence[Array], dtype: jnp.dtype) -> tuple[Array | QTensor, ...]:
    """The stacks of some experts' packed bytes, gate and up as one, and down."""
    from cpu_experts.unpack import unpack_layer

    matrices = kind.matrices(len(sections[0]))
    parts = unpack_layer(kind, *sections)  # pyright: ignore[reportArgumentType]  (of the layer it reads these fields)
    return tuple(_stack(part, *matrix, dtype) for part, matrix in zip(parts, matrices, strict=True))


def abstract(kind: Kind, count: int, dtype: jnp.dtype) -> tuple[jax.ShapeDtypeStruct | QTensor, ...]:
    """What `unpacked` gives, without memory."""

    def stack(precision: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct | QTensor:
        plain = precision == "bf16" or _ragged(precision, shape)
        return jax.ShapeDtypeStruct(shape, dtype) if plain else qtensor.abstract(FORMATS[precision], shape)

    return tuple(stack(*matrix) for matrix in kind.matrices(count))


def _ragged(precision: str, shape: tuple[int, ...]) -> bool:
    """Whether GGUF has no such rows."""
    return precision == "q8_0" and shape[-1] % 32 > 0


def _stack(parts: tuple[Array, ...], precision: str, shape: tuple[int, ...], dtype: jnp.dtype) -> Array | QTensor:
    if precision == "bf16":
        return parts[0].astype(dtype)
    if _ragged(precision, shape):
        whole = QTensor("Q8_0", parts, (*shape[:-1], 32 * parts[0].shape[-2]))
        return dequantize(whole, dtype)[..., : shape[-1]]
    return QTensor(FORMATS[precision], parts, shape)
