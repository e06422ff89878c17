"""The block types of GGUF: the values and bytes of a block, and its dequantisation in JAX.

Layouts are ggml's block structs, numbers are little-endian. Knows no files and no tensors, only blocks `[.. bytes]`. Every
product is exact in float32 (at most 23 significant bits) and at most one sum is rounded, so a fused multiply-add cannot change
a bit. No value is denormal, which XLA would flush to zero, except with MXFP4's smallest scales."""

from collections.abc import Callable, Iterable
from functools import cache, reduce
from importlib import resources
from itertools import accumulate
from operator import or_
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8

Bytes = UInt8[Array, "..."]
Values = Float[Array, "..."]
Codes = Shaped[Array, "..."]  # integers


class BlockType(NamedTuple):
    """`id` is the type's number in files; `unpack` maps blocks `[.. bytes]` to float32 `[.. values]`.

    `halves` are the byte offsets of the f16 scales, if only these can make a value infinite or NaN; else empty."""

    id: int
    values: int
    bytes: int
    unpack: Callable[[Bytes], Values]
    halves: tuple[int, ...] = ()

    def finite(self, b: Bytes) -> Shaped[Array, "..."]:
        """Whether all values of a block are finite, for each block."""
        if self.halves:
            return jnp.stack([b[..., at + 1] & 0x7C != 0x7C for at in self.halves]).all(0)
        return jnp.isfinite(self.unpack(b)).all(-1)


# Types without blocks: id and dtype
PLAIN_TYPES = {"F32": (0, "float32"), "F16": (1, "float16"), "BF16": (30, "bfloat16")}


def _shape(x: Array, *last: int) -> Array:
    """`x` with its last axis reshaped to the axes `last`."""
    return x.reshape(*x.shape[:-1], *last)


def _fields(x: Codes, bits: int, count: int, axis: int = -2) -> Codes:
    """The lowest `count` fields of `bits` bits of every integer: `[.. count n]`, or `[.. n count]` for axis -1."""
    shifts = jnp.arange(0, bits * count, bits, dtype=x.dtype)
    moved = jnp.expand_dims(x, axis) >> (shifts[:, None] if axis == -2 else shifts)
    return moved & x.dtype.type((1 << bits) - 1)


def _words(b: Bytes, dtype: type) -> Codes:
    """Little-endian integers by shifts: XLA does not fuse a bitcast that changes the number of elements."""
    size = np.dtype(dtype).itemsize
    return reduce(or_, (b[..., i::size].astype(dtype) << dtype(8 * i) for i in range(size)))


def _half(b: Bytes) -> Values:
    """The f16 in two bytes as float32 `[.. 1]`; its denormals are normal in float32."""
    return jax.lax.bitcast_convert_type(_words(b, np.uint16), jnp.float16).astype(jnp.float32)


def _scaled(scales: Values, values: Array, minima: Values | None = None) -> Values:
    """`values`, in equal groups, each times its scale of `scales [.. groups]`, less its minimum: `[.. values]`."""
    found = scales[..., None] * values.reshape(*scales.shape, -1).astype(jnp.float32)
    return _joined(found if minima is None else found - minima[..., None], 2)


def _joined(x: Array, axes: int) -> Array:
    """Joins the last `axes` axes."""
    return x.reshape(*x.shape[: x.ndim - axes], -1)


def _nibbles(b: Bytes) -> Codes:
    """All low nibbles, then all high ones."""
    return _joined(_fields(b, 4, 2), 2)


def _in_turn(x: Codes, bits: int, count: int) -> Codes:
    """The fields of the first integer, then those of the second, and so on."""
    return _joined(_fields(x, bits, count, axis=-1), 2)


def _materialised(x: Codes) -> Codes:
    """`x`; on a CPU materialised first. Fused with its consumer, XLA would recompute it for every value."""
    return jax.lax.platform_dependent(x, cpu=jax.lax.optimization_barrier, default=lambda x: x)


def _bit_fields(*parts: tuple[Bytes, int, int]) -> Codes:
    """The bit fields `[.. m*count*n]` of parts `(x [.. m n], bits, count)`; a later part gives higher bits.

    On a CPU: in rows of 32 with constant shifts, which XLA vectorises, and materialised. Q6_K takes a tenth of the time so."""
    shifts = [0, *accumulate(bits for _, bits, _ in parts[:-1])]
    sizes = [(bits, count) for _, bits, count in parts]

    def combined(fields: Iterable[Codes]) -> Codes:
        return reduce(or_, (x << np.uint8(shift) for x, shift in zip(fields, shifts, strict=True)))

    def by_shifts(*arrays: Bytes) -> Codes:
        return combined(_joined(_fields(x, *size), 3) for x, size in zip(arrays, sizes, strict=True))

    def by_rows(*arrays: Bytes) -> Codes:
        first, (_, count) = arrays[0], sizes[0]
        total = first.shape[-2] * count * first.shape[-1]
        width = min(32, *(x.shape[-1] for x in arrays))

        def row(at: int) -> Codes:
            return combined(_row(x, *size, at, width) for x, size in zip(arrays, sizes, strict=True))

        rows = [row(at) for at in range(0, total, width)]
        return jax.lax.optimization_barrier(_joined(jnp.stack(rows, axis=-2), 2))

    return jax.lax.platform_dependent(*(x for x, _, _ in parts), cpu=by_rows, default=by_shifts)


def _row(x: Bytes, bits: int, count: int, at: int, width: int) -> Codes:
    """`width` fields of `x [.. m n]`, from position `at` of `[.. m*count*n]`."""
    m, rest = divmod(at, count * x.shape[-1])
    field, start = divmod(rest, x.shape[-1])
    return x[..., m, start : start + width] >> np.uint8(bits * field) & np.uint8((1 << bits) - 1)


def _q4_0(b: Bytes) -> Values:
    return _half(b[..., :2]) * (_bit_fields((b[..., None, 2:], 4, 2)).astype(jnp.float32) - 8)


def _q4_1(b: Bytes) -> Values:
    return _half(b[..., :2]) * _bit_fields((b[..., None, 4:], 4, 2)).astype(jnp.float32) + _half(b[..., 2:4])


def _with_fifth_bit(high: Bytes, low: Bytes) -> Values:
    """Five-bit values as `[.. 2 2 8]`: the last axis has the high bits of one byte."""
    bits = _fields(_shape(high, 2, 2), 1, 8, axis=-1)
    return (_shape(_fields(low, 4, 2), 2, 8) | bits << np.uint8(4)).astype(jnp.float32)


def _q5_0(b: Bytes) -> Values:
    return _scaled(_half(b[..., :2]), _with_fifth_bit(b[..., 2:6], b[..., 6:]) - 16)


def _q5_1(b: Bytes) -> Values:
    return _scaled(_half(b[..., :2]), _with_fifth_bit(b[..., 4:8], b[..., 8:])) + _half(b[..., 2:4])


def _signed(b: Bytes) -> Values:
    return jax.lax.bitcast_convert_type(b, jnp.int8).astype(jnp.float32)


def _q8_0(b: Bytes) -> Values:
    return _half(b[..., :2]) * _signed(_materialised(b[..., 2:]))


def _q2_k(b: Bytes) -> Values:
    codes = b[..., :16]
    scales = _materialised(_half(b[..., 80:82]) * (codes & 15).astype(jnp.float32))
    minima = _materialised(_half(b[..., 82:]) * (codes >> 4).astype(jnp.float32))
    return _scaled(scales, _bit_fields((_shape(b[..., 16:80], 2, 32), 2, 4)), minima)


def _q3_k(b: Bytes) -> Values:
    # Where the high bit is set, it makes up for the 4 that is subtracted below
    q = _bit_fields((_shape(b[..., 32:96], 2, 32), 2, 4), (b[..., None, :32], 1, 8))
    scales = _nibbles(b[..., 96:104]) | _joined(_fields(b[..., 104:108], 2, 4), 2) << np.uint8(4)
    scales = _materialised(_half(b[..., 108:]) * (scales.astype(jnp.float32) - 32))
    return _scaled(scales, q.astype(jnp.float32) - 4)


def _k_scales(b: Bytes) -> tuple[Values, Values]:
    """Eight scales and eight minima of six bits each, from the first 16 bytes of Q4_K and Q5_K.

    The bytes of the first four also hold the high bits of the last four. `where` takes a third of the time of a concatenation."""
    first, second, rest = (b[..., None, i : i + 4] for i in (4, 8, 12))
    late = jnp.array([[False], [True]])
    scales = _joined(jnp.where(late, rest & 15 | first >> 2 & 48, first & 63), 2).astype(jnp.float32)
    minima = _joined(jnp.where(late, rest >> 4 | second >> 2 & 48, second & 63), 2).astype(jnp.float32)
    return _materialised(_half(b[..., :2]) * scales), _materialised(_half(b[..., 2:4]) * minima)


def _q4_k(b: Bytes) -> Values:
    scales, minima = _k_scales(b)
    return _scaled(scales, _bit_fields((_shape(b[..., 16:], 4, 32), 4, 2)), minima)


def _q5_k(b: Bytes) -> Values:
    scales, minima = _k_scales(b)
    return _scaled(
        scales, _bit_fields((_shape(b[..., 48:], 4, 32), 4, 2), (b[..., None, 16:48], 1, 8)), minima
    )


def _q6_k(b: Bytes) -> Values:
    low, high = (_shape(b[..., :128], 2, 64), 4, 2), (_shape(b[..., 128:192], 2, 32), 2, 4)
    scales = _materialised(_half(b[..., 208:]) * _signed(b[..., 192:208]))
    return _scaled(scales, _bit_fields(low, high).astype(jnp.float32) - 32)


def _q2_0(b: Bytes) -> Values:
    return _half(b[..., :2]) * (_in_turn(b[..., 2:], 2, 4).astype(jnp.float32) - 1)


def _trits(b: Bytes, digits: int) -> list[Codes]:
    """Base-three digits, highest first. A byte is a fraction of 256; times a power of three (mod 256) its third is the digit."""
    shifted = [b * np.uint8(power) for power in (1, 3, 9, 27, 81)[:digits]]
    return [(x >= np.uint8(86)).astype(jnp.uint8) + (x >= np.uint8(171)).astype(jnp.uint8) for x in shifted]


def _tq1_0(b: Bytes) -> Values:
    parts = [*_trits(b[..., :32], 5), *_trits(b[..., 32:48], 5), *_trits(b[..., 48:52], 4)]
    return _half(b[..., 52:]) * (_materialised(jnp.concatenate(parts, axis=-1)).astype(jnp.float32) - 1)


def _tq2_0(b: Bytes) -> Values:
    return _half(b[..., 64:]) * (_bit_fields((_shape(b[..., :64], 2, 32), 2, 4)).astype(jnp.float32) - 1)


E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled; zero has no sign
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def looked_up(table: np.ndarray, code: Codes) -> Values:
    """`table[code]`. XLA vectorises the lookup in a table this small; shifts or selects are slower."""
    return jnp.asarray(table).at[code.astype(jnp.int32)].get(mode="promise_in_bounds")


@cache
def _mxfp4_values() -> np.ndarray:
    """Every value by scale and code, as a table: some are denormals, which a product would flush to zero."""
    values = np.ldexp(np.array(E2M1, np.float64), np.arange(256)[:, None] - 128)
    with np.errstate(over="ignore"):
        return values.astype(np.float32).reshape(-1)


def _mxfp4(b: Bytes) -> Values:
    code = _fields(b[..., 1:], 4, 2).astype(jnp.int32)
    return _joined(looked_up(_mxfp4_values(), b[..., :1, None].astype(jnp.int32) << 4 | code), 2)


def _nvfp4(b: Bytes) -> Values:
    """Sixteen values per scale, which is an E4M3 without sign; a scale of 127 means zero."""
    scale = b[..., :4].astype(jnp.int32)
    exponent, mantissa = scale >> 3 & 15, scale & 7
    size = jnp.where(exponent > 0, mantissa + 8 << jnp.maximum(exponent - 1, 0), mantissa)
    scales = jnp.where(scale == 127, 0, size).astype(jnp.float32) * 2.0**-10
    return _scaled(scales, looked_up(np.array(E2M1, np.float32), _fields(_shape(b[..., 4:], 4, 8), 4, 2)))


@cache
def _grid(name: str) -> np.ndarray:
    """A codebook of uint16 entries: eight fields of two bits or four of four bits; tools/gguf_grids.py makes the file."""
    with (
        resources.files("mla_jax.base").joinpath("gguf_grids.npz").open("rb") as file,
        np.load(file) as grids,
    ):
        return grids[name]


def _entries(name: str, index: Codes) -> Codes:
    """The fields of the codebook entries at `index [.. n]`, as `[.. n fields]`."""
    entry = jnp.asarray(_grid(name)).at[index.astype(jnp.int32)].get(mode="promise_in_bounds")
    return _fields(entry, 4, 4, axis=-1) if name.startswith("IQ3") else _fields(entry, 2, 8, axis=-1)


def _with_signs(values: Codes, signs: Codes) -> Values:
    """`values`, eight for each of `signs [.. n]`, negative where a bit of it is set: `[.. n 8]`."""
    flip = _fields(signs.astype(jnp.uint8), 1, 8, axis=-1)
    return values.reshape(flip.shape).astype(jnp.float32) * (1 - 2 * flip.astype(jnp.float32))


def _even(seven: Codes) -> Codes:
    """Seven sign bits and an eighth bit of even parity."""
    return seven | (jax.lax.population_count(seven) & 1) << 7


def _with_high(low: Codes, high: Codes) -> Codes:
    return low.astype(jnp.uint16) | high.astype(jnp.uint16) << 8


def _odd(codes: Codes) -> Values:
    """Scales of 1, 3, 5 and so on."""
    return 2 * codes.astype(jnp.float32) + 1


def _iq2(b: Bytes, scales: Codes, name: str, index: Codes, signs: Codes) -> Values:
    code = _entries(name, index)
    values = 8 + 17 * code + (code >> 1)  # 8, 25, 43
    return _scaled(
        _half(b[..., :2]) * ((scales.astype(jnp.float32) + 0.5) * 0.25), _with_signs(values, signs)
    )


def _iq2_xxs(b: Bytes) -> Values:
    quads = _shape(b[..., 2:], 8, 8)
    rest = _words(quads[..., 4:], np.uint32)[..., 0]
    return _iq2(b, rest >> 28, "IQ2_XXS", quads[..., :4], _even(_fields(rest, 7, 4, axis=-1)))


def _iq2_xs(b: Bytes) -> Values:
    codes = _words(b[..., 2:66], np.uint16)
    return _iq2(b, _in_turn(b[..., 66:], 4, 2), "IQ2_XS", codes & 511, _even(codes >> 9))


def _iq2_s(b: Bytes) -> Values:
    index = _with_high(b[..., 2:34], _in_turn(b[..., 66:74], 2, 4))
    return _iq2(b, _in_turn(b[..., 74:], 4, 2), "IQ2_S", index, b[..., 34:66])


def _iq3_xxs(b: Bytes) -> Values:
    rest, code = _words(b[..., 66:], np.uint32), _entries("IQ3_XXS", b[..., 2:66])
    values = 4 + 8 * code + (code + 1 >> 3 << 1)  # 4, 12 .. 52, 62
    scales = _half(b[..., :2]) * ((rest >> 28).astype(jnp.float32) + 0.5) * 0.5
    return _scaled(scales, _with_signs(values, _even(_fields(rest, 7, 4, axis=-1))))


def _iq3_s(b: Bytes) -> Values:
    values = 2 * _entries("IQ3_S", _with_high(b[..., 2:66], _in_turn(b[..., 66:74], 1, 8))) + 1
    scales = _half(b[..., :2]) * _odd(_in_turn(b[..., 106:], 4, 2))
    return _scaled(scales, _with_signs(values, b[..., 74:106]))


def _iq1_values(index: Codes, down: Codes) -> Values:
    """A codebook's -1, 0 and 1 plus an eighth, or minus an eighth where `down [.. n]` is set."""
    trit = _entries("IQ1_S", index).astype(jnp.float32) - 1
    return trit + (0.125 - 0.25 * down[..., None].astype(jnp.float32))


def _iq1_s(b: Bytes) -> Values:
    extra = _words(b[..., 34:], np.uint16)
    index = _with_high(b[..., 2:34], _in_turn(extra, 3, 4))
    values = _iq1_values(index, jnp.repeat(extra >> 15, 4, axis=-1))
    return _scaled(_half(b[..., :2]) * _odd(extra >> 12 & 7), values)


def _iq1_m(b: Bytes) -> Values:
    words = _words(b[..., 48:], np.uint16)
    nibbles = words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)  # of the single f16 scale
    # By a sum, which is computed once per block; `|` would be computed for each value
    d = jnp.sum(nibbles, axis=-1, dtype=jnp.uint16)
    d = jax.lax.bitcast_convert_type(d, jnp.float16).astype(jnp.float32)[..., None]
    extra = _in_turn(b[..., 32:48], 4, 2)
    return _scaled(
        d * _odd(_in_turn(words, 3, 4)), _iq1_values(_with_high(b[..., :32], extra & 7), extra >> 3)
    )


def _iq4_nl(b: Bytes) -> Values:
    return _scaled(_half(b[..., :2]), looked_up(np.array(IQ4, np.float32), _fields(b[..., 2:], 4, 2)))


def _iq4_xs(b: Bytes) -> Values:
    high = _fields(_words(b[..., 2:4], np.uint16)[..., 0], 2, 8, axis=-1).astype(jnp.uint8)
    low = _in_turn(b[..., 4:8], 4, 2)
    scales = _half(b[..., :2]) * ((low | high << np.uint8(4)).astype(jnp.float32) - 32)
    return _scaled(scales, looked_up(np.array(IQ4, np.float32), _fields(_shape(b[..., 8:], 8, 16), 4, 2)))


TYPES = {
    "Q4_0": BlockType(2, 32, 18, _q4_0, (0,)),
    "Q4_1": BlockType(3, 32, 20, _q4_1, (0, 2)),
    "Q5_0": BlockType(6, 32, 22, _q5_0, (0,)),
    "Q5_1": BlockType(7, 32, 24, _q5_1, (0, 2)),
    "Q8_0": BlockType(8, 32, 34, _q8_0, (0,)),
    "Q2_K": BlockType(10, 256, 84, _q2_k, (80, 82)),
    "Q3_K": BlockType(11, 256, 110, _q3_k, (108,)),
    "Q4_K": BlockType(12, 256, 144, _q4_k, (0, 2)),
    "Q5_K": BlockType(13, 256, 176, _q5_k, (0, 2)),
    "Q6_K": BlockType(14, 256, 210, _q6_k, (208,)),
    "IQ2_XXS": BlockType(16, 256, 66, _iq2_xxs, (0,)),
    "IQ2_XS": BlockType(17, 256, 74, _iq2_xs, (0,)),
    "IQ3_XXS": BlockType(18, 256, 98, _iq3_xxs, (0,)),
    "IQ1_S": BlockType(19, 256, 50, _iq1_s, (0,)),
    "IQ4_NL": BlockType(20, 32, 18, _iq4_nl, (0,)),
    "IQ3_S": BlockType(21, 256, 110, _iq3_s, (0,)),
    "IQ2_S": BlockType(22, 256, 82, _iq2_s, (0,)),
    "IQ4_XS": BlockType(23, 256, 136, _iq4_xs, (0,)),
    "IQ1_M": BlockType(29, 256, 56, _iq1_m),
    "TQ1_0": BlockType(34, 256, 54, _tq1_0, (52,)),
    "TQ2_0": BlockType(35, 256, 66, _tq2_0, (64,)),
    "MXFP4": BlockType(39, 32, 17, _mxfp4),
    "NVFP4": BlockType(40, 64, 36, _nvfp4),
    "Q2_0": BlockType(42, 64, 18, _q2_0, (0,)),
}
