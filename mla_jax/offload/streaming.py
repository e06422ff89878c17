"""Experts in the host's memory, computed on the device: for many tokens, copying the weights over the link is faster.

Experts are copied packed, in groups whose unpacked weights take little of the device's memory, and each group is computed before
the next is copied: overlapping both would gain only the computing, which is short where the link is the bound."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base import qtensor
from mla_jax.base.config import Config
from mla_jax.base.qtensor import QTensor, dequantize
from mla_jax.model.ops import plain

GROUP = 512 << 20  # bytes of unpacked weights per group, unless one expert has more

KERNEL_FORMATS = {  # our names, by the names of cpu_experts
    "fp8_block": "fp8_block",
    "int8": "int8",
    "int4_g32": "int4_g32",
    "int4_g128": "int4_g128",
    "q8_0": "Q8_0",
    "q4_k": "Q4_K",
    "q6_k": "Q6_K",
}


class Packing(NamedTuple):
    """Sizes and number formats of a layer of `cpu_experts`; it stands for the layer where there are no weights."""

    experts: int
    model: int
    width: int
    precision: str
    down_precision: str

    @staticmethod
    def of(layer: Any) -> "Packing":
        return Packing(*(getattr(layer, name) for name in Packing._fields))

    @staticmethod
    def for_config(config: Config, precision: str, down: str | None = None) -> "Packing":
        """A layer of a model, down in a number format of its own if given."""
        sizes = config.n_routed_experts or 0, config.hidden_size, config.moe_intermediate_size or 0
        return Packing(*sizes, precision, down or precision)

    def matrices(self, count: int) -> list[tuple[str, tuple[int, ...]]]:
        """The number format and the shape of gate, up and down of `count` experts."""
        rows = (self.precision, (count, self.width, self.model))
        return [rows, rows, (self.down_precision, (count, self.model, self.width))]


def groups_of(experts: int, each: int) -> tuple[int, int]:
    """How many groups `experts` of `each` bytes are computed in, and how many experts a group has."""
    groups = -(-experts // max(1, GROUP // each))
    return groups, -(-experts // groups)


def scratch_bytes(config: Config, itemsize: int, tokens: int) -> int:
    """About the bytes of a streamed step on the device: a group, packed and unpacked, and its experts' rows."""
    each = 3 * config.hidden_size * (config.moe_intermediate_size or 0) * itemsize
    rows = 3 * tokens * (config.num_experts_per_tok or 0) * config.hidden_size * itemsize
    return 2 * each * groups_of(config.n_routed_experts or 1, each)[1] + rows


def streamed(
    layer: Any,
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n K"],
    topk_weights: Float[Array, "n K"],
    backend: Callable,
) -> Float[Array, "n D"]:
    """The chosen experts' sum, group by group, by a `backend` of mla_jax.model.moe."""
    experts = layer.experts
    groups, size = groups_of(experts, 3 * layer.model * layer.width * x.dtype.itemsize)
    if groups == 1:
        return backend(x, topk_ids, topk_weights, stacks(layer, 0, size, x.dtype))

    def add(i: Array, total: Array) -> Array:
        first = jnp.minimum(i * size, experts - size)  # the last group overlaps the one before
        mine = (topk_ids >= i * size) & (topk_ids < jnp.minimum((i + 1) * size, experts))
        ids = jnp.where(mine, topk_ids - first, size)
        weights = jnp.where(mine, topk_weights, 0)
        return total + backend(x, ids, weights, stacks(layer, first, size, x.dtype)).astype(jnp.float32)

    # A loop, not an unrolled sequence: there is one program to compile, and XLA cannot copy several groups at once.
    return jax.lax.fori_loop(0, groups, add, jnp.zeros(x.shape, jnp.float32)).astype(x.dtype)


def stacks(layer: Any, first: Array | int, count: int, dtype: jnp.dtype) -> tuple[Array | QTensor, ...]:
    """gate and up `[X F D]` and down `[X D F]` of `count` experts from `first` on, on the device; floats in `dtype`."""
    from cpu_experts import ffi

    return unpacked(Packing.of(layer), ffi.fetch(layer, first, count), dtype)


def unpacked(packing: Packing, sections: Sequence[Array], dtype: jnp.dtype) -> tuple[Array | QTensor, ...]:
    """The stacks of some experts from their packed bytes: of gate and up as one, and of down."""
    from cpu_experts.unpack import unpack_layer

    matrices = packing.matrices(len(sections[0]))
    parts = unpack_layer(packing, *sections)  # pyright: ignore[reportArgumentType]  (it reads only the fields of Packing)
    return tuple(_stack(part, *matrix, dtype) for part, matrix in zip(parts, matrices, strict=True))


def for_kernels(stacks: Sequence[Any], dtype: jnp.dtype) -> tuple[Any, ...]:
    """FP8 blocks, which kernels take, as they are; all else as numbers.

    Unpacking at every step is slow: an H200, V2-Lite's shape, int8, 8 rows: 204 ms per step, and 33 on the host."""
    return tuple(w if isinstance(w, QTensor) and w.format == "fp8_block" else plain(w, dtype) for w in stacks)


def abstract_for_kernels(packing: Packing, count: int, dtype: jnp.dtype) -> tuple[Any, ...]:
    """The shapes of `for_kernels(unpacked(...))` for `count` experts."""
    packed = tuple(_abstract(precision, shape, dtype) for precision, shape in packing.matrices(count))
    return jax.eval_shape(partial(for_kernels, dtype=dtype), packed)


def _abstract(precision: str, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.ShapeDtypeStruct | QTensor:
    if precision == "bf16" or _ragged(precision, shape):
        return jax.ShapeDtypeStruct(shape, dtype)
    return qtensor.abstract(KERNEL_FORMATS[precision], shape)


def _ragged(precision: str, shape: tuple[int, ...]) -> bool:
    """Whether rows are no multiple of a block, which GGUF does not have."""
    return precision == "q8_0" and shape[-1] % 32 > 0


def _stack(
    parts: tuple[Array, ...], precision: str, shape: tuple[int, ...], dtype: jnp.dtype
) -> Array | QTensor:
    if precision == "bf16":
        return parts[0].astype(dtype)
    if _ragged(precision, shape):
        padded = QTensor("Q8_0", parts, (*shape[:-1], 32 * parts[0].shape[-2]))
        return dequantize(padded, dtype)[..., : shape[-1]]
    return QTensor(KERNEL_FORMATS[precision], parts, shape)
