"""QTensor, a quantised tensor that stays packed in memory, and the table of its formats, which JAX dequantises inside jit.

Knows arrays only: mla_jax/weights reads files, and mla_jax/weights/quantize.py quantises to our own formats."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from math import lcm, prod
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

from mla_jax.base import gguf_blocks
from mla_jax.base.errors import BadFile, Unsupported, printable
from pallas_kernels import packed

Shape = tuple[int, ...]
Specs = tuple[jax.ShapeDtypeStruct, ...]
BY_COLUMN = "fp8_column"  # the format of the halves of kv_b_proj in FP8
REORDERED = " reordered"  # ends the name of a format whose parts are in the order of a GPU's kernel


@dataclass(frozen=True)
class QTensor:
    """A tensor of `shape` in a `format` of FORMATS; `parts` are arrays, or ShapeDtypeStructs and other leaves of a pytree.

    A stack of matrices is one QTensor. Under vmap or scan the parts lose leading axes and `shape` does not: only its last two
    axes are read, so `dequantize` follows the parts."""

    format: str
    parts: tuple[Any, ...]
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Bytes of the parts; also of an abstract tensor."""
        return sum(_bytes(part) for part in self.parts)

    @property
    def reordered(self) -> bool:
        """Whether the parts are in the order of a GPU's kernel, not of a file."""
        return self.format.endswith(REORDERED)

    def __getitem__(self, index: Any) -> "QTensor":
        """Itself for `...`, with which a module reads its parameters; else as `one`."""
        return self if index is ... else self.one(index)

    def one(self, index: Any) -> "QTensor":
        """One tensor of a stack; `index` may be traced."""
        return QTensor(self.format, tuple(part[index] for part in self.parts), self.shape[1:])


jax.tree_util.register_dataclass(QTensor, data_fields=["parts"], meta_fields=["format", "shape"])


class Format(NamedTuple):
    """`block`: the rows and columns that share a scale, 0 for all; `unpack` takes the parts and the tensor's shape.

    `parts` gives the shapes and dtypes of the parts, and raises BadFile for a shape that the format cannot hold. `finite` is
    False somewhere if a value is NaN or infinite; it reads scales and codes, without dequantising."""

    block: tuple[int, int]
    parts: Callable[[Shape], Specs]
    unpack: Callable[[tuple[Array, ...], Shape], Float[Array, "..."]]
    finite: Callable[[tuple[Array, ...]], Array]


def dequantize(q: QTensor, dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """The values of `q`, computed in float32 and rounded once to `dtype`."""
    return format_of(q.format).unpack(q.parts, q.shape).astype(dtype)


def factors(q: QTensor, dtype: Any) -> tuple[Float[Array, "... N K"], Float[Array, "... K"]]:
    """The codes of a tensor in `fp8_column` as numbers, which `dtype` holds exactly, and the float32 scale of each column."""
    codes, scale = q.parts
    return _e4m3(codes, dtype), scale


def unsound(format: str, parts: tuple[Array, ...]) -> Int[Array, ""]:
    """The number of values, blocks or scales of a tensor that are not finite."""
    return jnp.sum(~format_of(format).finite(parts))


def abstract(format: str, shape: Shape) -> QTensor:
    """A QTensor without memory: its parts are ShapeDtypeStructs. Raises BadFile if the format cannot hold that shape."""
    return QTensor(format, format_of(format).parts(shape), shape)


def reorder(q: QTensor) -> QTensor:
    """`q` in the order of a GPU's kernel; of a stack one matrix after the other, for which there is memory."""

    def one(parts: tuple[Array, ...]) -> tuple[Array, ...]:
        return packed.reorder(q.format, parts).arrays

    matrix = abstract(q.format, q.shape[-2:])
    stacked = q.parts[0].ndim > len(matrix.parts[0].shape)
    return QTensor(q.format + REORDERED, jax.lax.map(one, q.parts) if stacked else one(q.parts), q.shape)


def is_reorderable(format: str) -> bool:
    """Whether there is an order for a GPU's kernel at all."""
    return format in packed.KINDS


def restore(q: QTensor) -> QTensor:
    """`q` as it was before `reorder`, to the bit; itself if it is in the order of a file."""
    if not q.reordered:
        return q
    return QTensor(q.format.removesuffix(REORDERED), packed.restore(as_packed(q)), q.shape)


def unit(format: str) -> tuple[int, int]:
    """Rows and columns that no part of a tensor of this format splits: those that share a scale, or are reordered together."""
    rows, columns = (size or 1 for size in format_of(format).block)
    if not format.endswith(REORDERED):
        return rows, columns
    tile = packed.tile(format.removesuffix(REORDERED))
    return lcm(rows, tile[0]), lcm(columns, tile[1])


def as_packed(q: QTensor) -> packed.Packed:
    """A reordered tensor as pallas_kernels takes it."""
    return packed.Packed(q.format.removesuffix(REORDERED), q.parts, q.shape[-2:])


def nbytes(format: str, shape: Shape) -> int:
    """Bytes of a tensor of this format and shape; allocates nothing. Raises BadFile as `abstract` does."""
    return abstract(format, shape).nbytes


def validated(q: QTensor, where: str = "a tensor") -> QTensor:
    """`q` itself if its parts fit its format and shape; else raises BadFile, whose text begins with `where`."""
    found = [_shown(part) for part in q.parts]
    expected = [_shown(part) for part in abstract(q.format, q.shape).parts]
    if found != expected:
        raise BadFile(
            f"{where} is not a {q.format} tensor of shape {list(q.shape)}",
            f"found parts {', '.join(found) or 'none at all'}",
            f"expected {', '.join(expected)}",
        )
    return q


def _shown(part: Any) -> str:
    return f"{np.dtype(part.dtype).name}{list(part.shape)}"


def _bytes(part: Any) -> int:
    return prod(part.shape) * np.dtype(part.dtype).itemsize


def _spec(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _refuse(name: str, shape: Shape, expected: str) -> NoReturn:
    raise BadFile(f"no {name} tensor has the shape {list(shape)}", expected)


def _gguf_parts(name: str, values: int, size: int, shape: Shape) -> Specs:
    if not shape or shape[-1] % values:
        _refuse(
            name, shape, f"expected a last axis that is a multiple of {values}: a block does not cross rows"
        )
    return (_spec(jnp.uint8, *shape[:-1], shape[-1] // values, size),)


def _gguf(name: str) -> Format:
    kind = gguf_blocks.TYPES[name]

    def unpack(parts: tuple[Array, ...], _: Shape) -> Float[Array, "..."]:
        values = kind.unpack(parts[0])
        return values.reshape(*values.shape[:-2], -1)

    parts_of = partial(_gguf_parts, name, kind.values, kind.bytes)
    return Format((1, kind.values), parts_of, unpack, lambda parts: kind.finite(parts[0]))


E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _e4m3(weight: Array, dtype: Any = jnp.float32) -> Float[Array, "..."]:
    """To numbers of `dtype`, exactly. GPUs and TPUs convert in hardware; XLA's CPU code is slow, a table is 8 times as fast."""

    def by_table(w: Array) -> Array:
        return gguf_blocks.looked_up(E4M3, jax.lax.bitcast_convert_type(w, jnp.uint8)).astype(dtype)

    return jax.lax.platform_dependent(weight, cpu=by_table, default=lambda w: w.astype(dtype))


def _fp8_parts(rows: int, columns: int, shape: Shape) -> Specs:
    if len(shape) < 2:
        _refuse("fp8_block", shape, "expected at least two axes")
    scales = _spec(jnp.float32, *shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // columns))
    return _spec(jnp.float8_e4m3fn, *shape), scales


def _fp8(rows: int, columns: int) -> Format:
    """E4M3 `[.. N K]` times a float32 scale for each block of `rows` by `columns`; the last blocks may be smaller."""

    def unpack(parts: tuple[Array, ...], _: Shape) -> Float[Array, "..."]:
        weight, scale = parts
        wide = jnp.repeat(scale, columns, axis=-1)[..., : weight.shape[-1]]
        spread = jnp.repeat(wide, rows, axis=-2)[..., : weight.shape[-2], :]
        return _e4m3(weight) * spread

    return Format((rows, columns), partial(_fp8_parts, rows, columns), unpack, _fp8_finite)


def _fp8_finite(parts: tuple[Array, ...]) -> Array:
    codes = jax.lax.bitcast_convert_type(parts[0], jnp.uint8) & 0x7F != 0x7F
    return codes & jnp.isfinite(448 * parts[1]).all()


def _fp8_row_parts(shape: Shape) -> Specs:
    if not shape:
        _refuse("fp8_row", shape, "expected at least one axis")
    return _spec(jnp.float8_e4m3fn, *shape), _spec(jnp.float32, *shape[:-1])


def _fp8_row() -> Format:
    """E4M3 `[.. N K]` times a float32 scale per row."""
    unpack = lambda parts, _: _e4m3(parts[0]) * parts[1][..., None]  # noqa: E731
    return Format((1, 0), _fp8_row_parts, unpack, _fp8_finite)


def _fp8_column_parts(shape: Shape) -> Specs:
    if len(shape) < 2:
        _refuse(BY_COLUMN, shape, "expected at least two axes")
    return _spec(jnp.float8_e4m3fn, *shape), _spec(jnp.float32, *shape[:-2], shape[-1])


def _fp8_column() -> Format:
    """E4M3 `[.. N K]` times a float32 scale per column."""
    unpack = lambda parts, _: _e4m3(parts[0]) * parts[1][..., None, :]  # noqa: E731
    return Format((0, 1), _fp8_column_parts, unpack, _fp8_finite)


def _int8_parts(shape: Shape) -> Specs:
    if not shape:
        _refuse("int8", shape, "expected at least one axis")
    return _spec(jnp.int8, *shape), _spec(jnp.float32, *shape[:-1])


def _int8() -> Format:
    """Signed bytes `[.. N K]` times a float32 scale per row."""
    unpack = lambda parts, _: parts[0].astype(jnp.float32) * parts[1][..., None]  # noqa: E731
    return Format((1, 0), _int8_parts, unpack, lambda parts: jnp.isfinite(127 * parts[1]))


def _grouped_parts(name: str, group: int, numbers: tuple[Any, ...], shape: Shape) -> Specs:
    """Codes of four bits, and one of each of the numbers, by dtype, for a group."""
    if not shape:
        _refuse(name, shape, "expected at least one axis")
    groups = *shape[:-1], -(-shape[-1] // group)
    return _spec(jnp.uint8, *groups, group // 2), *(_spec(dtype, *groups) for dtype in numbers)


def _codes(pairs: Array) -> Float[Array, "..."]:
    """Codes 0 to 15 of groups `[.. groups group/2]`: the low nibbles are the first half of a group."""
    return jnp.concatenate([pairs & 15, pairs >> 4], axis=-1).astype(jnp.float32)


def _int4(group: int) -> Format:
    """Four-bit codes minus 8, times a bfloat16 scale per `group` of a row: bytes `[.. groups group/2]`.

    The low nibbles are the first half of a group, the high nibbles the second half; the last group is padded with zeros."""

    def unpack(parts: tuple[Array, ...], shape: Shape) -> Float[Array, "..."]:
        pairs, scale = parts
        values = (_codes(pairs) - 8) * scale.astype(jnp.float32)[..., None]
        return values.reshape(*scale.shape[:-1], -1)[..., : shape[-1]]

    finite = lambda parts: jnp.isfinite(8 * parts[1].astype(jnp.float32))  # noqa: E731
    return Format(
        (1, group), partial(_grouped_parts, f"int4_g{group}", group, (jnp.bfloat16,)), unpack, finite
    )


def _uint4(group: int) -> Format:
    """The same bytes, of codes minus a zero point, times a float32 scale, both per `group` of a row."""

    def unpack(parts: tuple[Array, ...], shape: Shape) -> Float[Array, "..."]:
        pairs, scale, zero = parts
        values = (_codes(pairs) - zero.astype(jnp.float32)[..., None]) * scale[..., None]
        return values.reshape(*scale.shape[:-1], -1)[..., : shape[-1]]

    numbers = (jnp.float32, jnp.uint8)
    finite = lambda parts: jnp.isfinite(255 * parts[1])  # noqa: E731
    return Format((1, group), partial(_grouped_parts, f"uint4_g{group}", group, numbers), unpack, finite)


FP4 = np.array(
    [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32
)  # E2M1, by code
FP4_GROUP = 16  # values that share a scale


def _fp4_parts(name: str, shape: Shape) -> Specs:
    if not shape or shape[-1] % FP4_GROUP:
        _refuse(name, shape, f"expected rows, whose length is a multiple of {FP4_GROUP}")
    rows, groups = shape[:-1], shape[-1] // FP4_GROUP
    codes = _spec(jnp.uint8, *rows, shape[-1] // 2)
    return codes, _spec(jnp.float8_e4m3fn, *rows, groups), _spec(jnp.float32, *rows)


def _divided(scale: Array, number: Array) -> Array:
    """The quotient, rounded once: XLA would multiply by the inverse of what it knows to be the same for many."""
    return scale / jax.lax.optimization_barrier(jnp.broadcast_to(number, scale.shape))


def _fp4(name: str, scaled: Callable[[Array, Array], Array]) -> Format:
    """E2M1 `[.. N K/2]`, the first of a pair in the low nibble, times an E4M3 scale per group, `scaled` by a number per row.

    The number is the same for a whole matrix; files of one quantiser divide by theirs, which rounds otherwise."""

    def unpack(parts: tuple[Array, ...], shape: Shape) -> Float[Array, "..."]:
        pairs, scale, number = parts
        codes = jnp.stack([pairs & 15, pairs >> 4], axis=-1).reshape(*scale.shape, FP4_GROUP)
        values = gguf_blocks.looked_up(FP4, codes) * scaled(_e4m3(scale), number[..., None])[..., None]
        return values.reshape(*scale.shape[:-1], -1)

    def finite(parts: tuple[Array, ...]) -> Array:
        _, scale, number = parts
        return jnp.isfinite(6 * scaled(_e4m3(scale), number[..., None]))

    return Format((1, FP4_GROUP), partial(_fp4_parts, name), unpack, finite)


def _reordered(name: str) -> Format:
    """The format `name` in the order of pallas_kernels/packed.py."""
    stored = format_of(name)

    @cache
    def parts(shape: Shape) -> Specs:
        if reason := packed.why_not(name, shape):
            _refuse(name + REORDERED, shape, reason)
        return jax.eval_shape(partial(packed.reorder, name), stored.parts(shape)).arrays

    def unpack(parts: tuple[Array, ...], shape: Shape) -> Float[Array, "..."]:
        return packed.dequantize(packed.Packed(name, parts, shape[-2:]))

    def finite(parts: tuple[Array, ...]) -> Array:
        steps, tiles = parts[0].shape[-4:-2]
        with_padding = (tiles * packed.ROWS, steps * packed.COLUMNS)
        return stored.finite(packed.restore(packed.Packed(name, parts, with_padding)))

    return Format(stored.block, parts, unpack, finite)


def fp8_format(block: tuple[int, int]) -> str:
    """The name of FP8 with a scale per `block` of (rows, columns)."""
    return "fp8_block" if tuple(block) == (128, 128) else f"fp8_block_{block[0]}x{block[1]}"


FORMATS: dict[str, Format] = {
    "fp8_block": _fp8(128, 128),
    "int8": _int8(),
    "fp8_row": _fp8_row(),
    BY_COLUMN: _fp8_column(),
    "int4_g32": _int4(32),
    "int4_g128": _int4(128),
    "uint4_g32": _uint4(32),
    "uint4_g128": _uint4(128),
    "fp4_g16": _fp4("fp4_g16", jnp.multiply),
    "fp4_g16_divided": _fp4("fp4_g16_divided", _divided),
    **{name: _gguf(name) for name in gguf_blocks.TYPES},
}


@lru_cache(maxsize=64)
def format_of(name: str) -> Format:
    """A format by its name; `fp8_block_64x32` has blocks of 64 rows by 32 columns, and `Q4_K reordered` is Q4_K in another order.

    Raises Unsupported for unknown names."""
    if name in FORMATS:
        return FORMATS[name]
    if (stored := name.removesuffix(REORDERED)) in packed.KINDS and stored != name:
        return _reordered(stored)
    if sizes := re.fullmatch(r"fp8_block_([1-9]\d{0,5})x([1-9]\d{0,5})", name):
        return _fp8(int(sizes[1]), int(sizes[2]))
    raise Unsupported(f"there is no quantised format {printable(name)}", "known: " + ", ".join(FORMATS))
