"""Weights of 4 to 8 bits in the order in which a GPU kernel unpacks them: the formats, reordering and its exact inverse.

The matrix units take their left operand from registers: of 64 rows by 16 columns each of 128 threads holds four pairs of
neighbours, at the rows r and r + 8 and the columns c and c + 8, where r is 16 * (thread // 32) + thread % 32 // 4 and c is
2 * (thread % 4). A plane of codes is stored in that order: the words of a thread hold pair after pair, the left number of a
pair in the lower half of a word and the right one in the upper half, so that a shift and a mask give a pair. Codes of five or
six bits have a plane of the lower four bits and another of the upper ones. Scales are stored by rows r and r + 8.

Codes and scales are arrays of words `[.. steps tiles ...]`: a step is 128 columns, or 256 where a number is for as many; a tile
is 64 rows, the last one padded with zeros. Nothing is rounded: `restore` returns the file's bytes."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, COLUMNS = 64, 128  # of a tile, of a step
PART = 64  # columns that are unpacked at a time
PAIRS = 16  # of a thread in a part
DOWN = 2.0**-40  # unpacked weights are so much smaller, see `pairs`
BLOCK = 256  # the rows that a kernel takes at a time; scales per row are padded to them


@dataclass(frozen=True)
class Packed:
    """Weights `[.. F D]` in a format of KINDS; the arrays are planes of codes, then scales, and may have more leading axes."""

    format: str
    arrays: tuple[Any, ...]
    shape: tuple[int, ...]  # F D

    def __getitem__(self, index: Any) -> "Packed":
        """One matrix of a stack; with None a stack of one."""
        return Packed(self.format, tuple(array[index] for array in self.arrays), self.shape)


jax.tree_util.register_dataclass(Packed, data_fields=["arrays"], meta_fields=["format", "shape"])


class Extra(NamedTuple):
    """An array of scales: `count` numbers of `size` bytes for a row and `group` columns."""

    group: int
    size: int
    count: int = 1

    @property
    def period(self) -> int:
        """The columns whose numbers are stored together."""
        return max(self.group, PART)

    @property
    def words(self) -> int:
        """Of two rows in a period."""
        return self.count * 2 * self.size * (self.period // self.group) // 4


class Kind(NamedTuple):
    """How a format is stored. Its numbers `[.. F groups]` are unsigned integers, in the order of `extras`."""

    planes: tuple[int, ...]  # bits
    offset: int  # subtracted from the codes
    extras: tuple[Extra, ...]
    # A file's parts -> codes `[.. F D]`, numbers; and scales `[.. F]`, if they are per row
    split: Callable[..., tuple]
    join: Callable[..., tuple]  # the inverse
    scales: Callable[..., tuple]  # numbers -> float32 scales `[.. F groups]`, and minima or None
    factors: Callable[..., tuple]  # words of two rows -> what `pairs` takes of one group and row
    by_row: bool = False  # scales are float32, one for a row
    e4m3: bool = False  # codes are E4M3, not integers

    @property
    def up(self) -> float:
        """The factor that turns a code in its place, read as bfloat16, into its number times DOWN."""
        return 2.0 ** (133 - 8 + sum(self.planes)) * DOWN

    @property
    def below(self) -> float:
        """The addend for the offset."""
        return -self.offset * DOWN

    @property
    def columns(self) -> tuple[int, ...]:
        """Of a step of each array but scales per row."""
        return (COLUMNS,) * len(self.planes) + tuple(max(COLUMNS, extra.period) for extra in self.extras)


# ---- words


def _moved(x, first: int, order: Sequence[int]):
    """The axes from `first` on, in another order."""
    return x.transpose(*range(first), *(first + axis for axis in order))


def _padded(x):
    """With rows for whole tiles."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -x.shape[-2] % ROWS), (0, 0)])


def vector(bits: int) -> int:
    """The words of a plane that a thread loads together."""
    return min(bits, 4)


def _shifts(bits: int):
    """Where the codes of a word begin: `[pairs 1 2]`."""
    return jnp.asarray(bits * np.arange(PAIRS // bits)[:, None, None] + 16 * np.arange(2), jnp.uint32)


def _plane(codes, bits: int):
    """Codes `[.. F D]` as words `[.. D/128 F/64 2*bits 128]`."""
    codes = _padded(codes)
    *lead, F, D = codes.shape
    n, together = len(lead), vector(bits)
    # tile, warp, r or r + 8, row; step, part, block of 16 columns, c or c + 8, pair, left or right
    x = codes.reshape(*lead, F // ROWS, 4, 2, 8, D // COLUMNS, 2, 4, 2, 4, 2)
    x = _moved(x, n, (4, 0, 5, 6, 7, 2, 1, 3, 8, 9))
    x = x.reshape(*x.shape[: n + 3], bits, PAIRS // bits, 128, 2).astype(jnp.uint32)
    x = jnp.sum(x << _shifts(bits), axis=(-3, -1), dtype=jnp.uint32)
    x = x.reshape(*x.shape[:-2], bits // together, together, 128).swapaxes(-1, -2)
    return x.reshape(*x.shape[: n + 2], 2 * bits, 128)


def _codes(words, bits: int):
    """The inverse of `_plane`, with the padding."""
    *lead, steps, tiles, _, _ = words.shape
    n, together = len(lead), vector(bits)
    x = words.reshape(*lead, steps, tiles, 2, bits // together, 128, together).swapaxes(-1, -2)
    x = x.reshape(*lead, steps, tiles, 2, bits, 1, 128, 1) >> _shifts(bits) & jnp.uint32((1 << bits) - 1)
    x = x.astype(jnp.uint8).reshape(*lead, steps, tiles, 2, 4, 2, 2, 4, 8, 4, 2)
    x = _moved(x, n, (1, 6, 5, 7, 0, 2, 3, 4, 8, 9))
    return x.reshape(*lead, tiles * ROWS, steps * COLUMNS)


def _numbers_in_a_word(extra: Extra):
    return jnp.asarray(8 * extra.size * np.arange(4 // extra.size), jnp.uint32)


def _by_rows(extra: Extra, numbers):
    """Arrays of numbers `[.. F groups]` as words `[.. steps tiles n]`."""

    def one(x):
        x = _padded(x)
        *lead, F, G = x.shape
        groups = extra.period // extra.group
        x = x.reshape(*lead, F // ROWS, 4, 2, 8, G // groups, groups)
        x = _moved(x, len(lead), (4, 0, 1, 3, 5, 2))
        x = x.reshape(*x.shape[: len(lead) + 2], 32, -1, 4 // extra.size).astype(jnp.uint32)
        return jnp.sum(x << _numbers_in_a_word(extra), axis=-1, dtype=jnp.uint32)

    words = jnp.concatenate([one(x) for x in numbers], axis=-1)
    *lead, periods, tiles, _, n = words.shape
    parts = max(COLUMNS // extra.period, 1)
    words = words.reshape(*lead, periods // parts, parts, tiles, 32, n).swapaxes(-3, -4)
    return words.reshape(*lead, periods // parts, tiles, parts * 32 * n)


def _of_rows(extra: Extra, words):
    """The inverse of `_by_rows`, with the padding."""
    *lead, steps, tiles, _ = words.shape
    parts, groups = max(COLUMNS // extra.period, 1), extra.period // extra.group
    words = words.reshape(*lead, steps, tiles, parts, 32, extra.words).swapaxes(-3, -4)

    def one(x):
        x = x[..., None] >> _numbers_in_a_word(extra) & jnp.uint32((1 << 8 * extra.size) - 1)
        x = x.astype(f"uint{8 * extra.size}").reshape(*lead, steps * parts, tiles, 4, 8, groups, 2)
        x = _moved(x, len(lead), (1, 2, 5, 3, 0, 4))
        return x.reshape(*lead, tiles * ROWS, steps * parts * groups)

    words = words.reshape(*lead, steps * parts, tiles, 32, extra.words)
    return [one(x) for x in jnp.split(words, extra.count, axis=-1)]


# ---- the formats of files


def _bytes16(b):
    """Numbers of two bytes: `[.. 2 n]` -> `[.. n]`."""
    return lax.bitcast_convert_type(b.reshape(*b.shape[:-1], -1, 2), jnp.uint16)


def _to_bytes(x):
    return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)


def _float(x, dtype):
    return lax.bitcast_convert_type(x, dtype).astype(jnp.float32)


def _rows(x):
    """Blocks `[.. F blocks n]` as `[.. F blocks*n]`."""
    return x.reshape(*x.shape[:-2], -1)


def _blocks(x, n: int):
    return x.reshape(*x.shape[:-1], -1, n)


def _nibbles(b, n: int):
    """Of every `n` bytes all lower halves, then all upper ones."""
    b = _blocks(b, n)
    return _rows(jnp.concatenate([b & 15, b >> 4], axis=-1))


def _from_nibbles(codes, n: int):
    codes = _blocks(codes, 2 * n)
    return _rows(codes[..., :n] | codes[..., n:] << 4)


def _split_int4(group, packed, scale):
    return _nibbles(_rows(packed), group // 2), lax.bitcast_convert_type(scale, jnp.uint16)


def _join_int4(group, codes, scale):
    codes = _blocks(_from_nibbles(codes, group // 2), group // 2)
    return codes, lax.bitcast_convert_type(scale, jnp.bfloat16)


def _split_uint4(group, zeros, packed, scale, zero):
    codes = _nibbles(_rows(packed), group // 2)
    return codes, lax.bitcast_convert_type(scale, jnp.uint32), zero.astype(f"uint{8 * zeros.size}")


def _join_uint4(group, codes, scale, zero):
    codes = _blocks(_from_nibbles(codes, group // 2), group // 2)
    return codes, lax.bitcast_convert_type(scale, jnp.float32), zero.astype(jnp.uint8)


def _split_int8(codes, scale):
    return lax.bitcast_convert_type(codes, jnp.uint8) ^ 128, scale


def _join_int8(codes, scale):
    return lax.bitcast_convert_type(codes ^ 128, jnp.int8), scale


def _split_fp8(codes, scale):
    """Scales of 128 rows are stored for each of them."""
    scale = jnp.repeat(lax.bitcast_convert_type(scale, jnp.uint32), 128, axis=-2)
    return lax.bitcast_convert_type(codes, jnp.uint8), scale[..., : codes.shape[-2], :]


def _join_fp8(codes, scale):
    scale = lax.bitcast_convert_type(scale[..., ::128, :], jnp.float32)
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale


def _split_fp8_row(codes, scale):
    return lax.bitcast_convert_type(codes, jnp.uint8), scale


def _join_fp8_row(codes, scale):
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn), scale


def _split_q8_0(b):
    return _rows(b[..., 2:]) ^ 128, _rows(_bytes16(b[..., :2]))


def _join_q8_0(codes, d):
    return (jnp.concatenate([_to_bytes(_blocks(d, 1)), _blocks(codes ^ 128, 32)], axis=-1),)


def _split_q5_0(b):
    """Two bytes of a scale, four of the upper bits, 16 of the lower ones; Q5_1 has two more bytes, of a number to add."""
    bits = b[..., -20:-16, None] >> jnp.arange(8, dtype=jnp.uint8) & 1
    codes = _nibbles(_rows(b[..., -16:]), 16) | _rows(_rows(bits)) << 4
    return codes, *(_rows(_bytes16(b[..., i : i + 2])) for i in range(0, b.shape[-1] - 20, 2))


def _join_q5_0(codes, *numbers):
    bits = _blocks(_blocks(codes, 32) >> 4, 8) << jnp.arange(8, dtype=jnp.uint8)
    upper = jnp.sum(bits, axis=-1, dtype=jnp.uint8)
    lower = _blocks(_from_nibbles(codes & 15, 16), 16)
    return (jnp.concatenate([*(_to_bytes(_blocks(x, 1)) for x in numbers), upper, lower], axis=-1),)


def _split_scales(b):
    """Eight scales and eight minima of six bits from 12 bytes: the first four of either have the others' upper bits."""
    scale = b[..., :4]
    least = b[..., 4:8]
    rest = b[..., 8:12]
    scales = jnp.concatenate([scale & 63, rest & 15 | scale >> 6 << 4], axis=-1)
    return scales, jnp.concatenate([least & 63, rest >> 4 | least >> 6 << 4], axis=-1)


def _join_scales(scales, minima):
    (scale, later), (least, latest) = ((x[..., :4], x[..., 4:]) for x in (scales, minima))
    first = [scale | later >> 4 << 6, least | latest >> 4 << 6]
    return jnp.concatenate([*first, later & 15 | (latest & 15) << 4], axis=-1)


def _split_q4_k(b):
    scales, minima = _split_scales(b[..., 4:16])
    return (
        _nibbles(_rows(b[..., 16:]), 32),
        _rows(scales),
        _rows(minima),
        *(_rows(_bytes16(b[..., i : i + 2])) for i in (0, 2)),
    )


def _join_q4_k(codes, scales, minima, d, least):
    start = [_to_bytes(_blocks(x, 1)) for x in (d, least)]
    packed = _join_scales(_blocks(scales, 8), _blocks(minima, 8))
    return (jnp.concatenate([*start, packed, _blocks(_from_nibbles(codes, 32), 128)], axis=-1),)


def _split_q5_k(b):
    low, *numbers = _split_q4_k(jnp.concatenate([b[..., :16], b[..., 48:]], axis=-1))
    bits = b[..., None, 16:48] >> jnp.arange(8, dtype=jnp.uint8)[:, None] & 1  # group, column
    return low | _rows(_rows(bits)) << 4, *numbers


def _join_q5_k(codes, *numbers):
    (b,) = _join_q4_k(codes & 15, *numbers)
    bits = codes.reshape(*codes.shape[:-1], -1, 8, 32) >> 4
    high = jnp.sum(bits << jnp.arange(8, dtype=jnp.uint8)[:, None], axis=-2, dtype=jnp.uint8)
    return (jnp.concatenate([b[..., :16], high, b[..., 16:]], axis=-1),)


def _split_q6_k(b):
    """Scales are signed; 128 is added."""
    low = _nibbles(_rows(b[..., :128]), 64)
    high = (
        b[..., 128:192].reshape(*b.shape[:-1], 2, 1, 32) >> jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None] & 3
    )
    return low | high.reshape(low.shape) << 4, _rows(b[..., 192:208] ^ 128), _rows(_bytes16(b[..., 208:]))


def _join_q6_k(codes, scales, d):
    low = _blocks(_from_nibbles(codes & 15, 64), 128)
    pairs = (codes >> 4).reshape(*codes.shape[:-1], -1, 2, 4, 32)
    shifts = jnp.arange(0, 8, 2, dtype=jnp.uint8)[:, None]
    high = jnp.sum(pairs << shifts, axis=-2, dtype=jnp.uint8)
    high = high.reshape(*low.shape[:-1], 64)
    parts = [low, high, _blocks(scales, 16) ^ 128, _to_bytes(_blocks(d, 1))]
    return (jnp.concatenate(parts, -1),)


# ---- scales, of an array and in a thread's registers


def _times(numbers, d):
    """Small numbers times a float16 for several of them."""
    return numbers.astype(jnp.float32) * jnp.repeat(
        _float(d, jnp.float16), numbers.shape[-1] // d.shape[-1], axis=-1
    )


def _no_factors(lanes, kind, group, row):
    return lanes.constant(kind.up), lanes.constant(kind.below)


def _fp8_factors(lanes, kind, group, row, words):
    """Scales by 2**120, because codes read as bfloat16 are 2**-120 of their value as E4M3."""
    return lanes.pair(lanes.real(words[row]) * (2.0**120 * DOWN)), lanes.constant(0.0)


def _fp8_row_factors(lanes, kind, group, row):
    return lanes.constant(2.0**120 * DOWN), lanes.constant(0.0)


def _bf16_factors(lanes, kind, group, row, words):
    scale = lanes.both(words[group], row)
    return lanes.times(scale, lanes.constant(kind.up)), lanes.times(scale, lanes.constant(kind.below))


def _uint4_factors(zeros, lanes, kind, group, row, scales, points):
    """Words of a scale each, then a word of all zero points: of one byte, or of two where there is one group."""
    at = 2 * group + row
    scale = lanes.real(scales[at])
    least = lanes.times_byte(scale * -DOWN, points[0], at * zeros.size)
    return lanes.pair(scale * kind.up), lanes.pair(least)


def _f16_factors(lanes, kind, group, row, words):
    scale = lanes.half(words[group], row)
    return lanes.pair(scale * kind.up), lanes.pair(scale * kind.below)


def _q5_1_factors(lanes, kind, group, row, words):
    """Words of two scales, then of two numbers to add."""
    scale = lanes.pair(lanes.half(words[group], row) * kind.up)
    return scale, lanes.pair(lanes.half(words[2 + group], row) * DOWN)


def _q4_k_factors(lanes, kind, group, row, small, large):
    """Words of two scales of either row, of two minima; of factors of the scales, of the minima."""
    d = lanes.half(large[0], row) * kind.up, lanes.half(large[1], row) * -DOWN
    return tuple(
        lanes.pair(lanes.times_byte(x, word, 2 * group + row)) for x, word in zip(d, small, strict=True)
    )


def _q6_k_factors(lanes, kind, group, row, small, large):
    d = lanes.half(large[0], row)
    scale = lanes.times_byte(d, small[group // 2], 2 * (group % 2) + row) - d * 128.0
    return lanes.pair(scale * kind.up), lanes.pair(scale * kind.below)


def _int4(group):
    return Kind(
        (4,), 8, (Extra(group, 2),),
        functools.partial(_split_int4, group), functools.partial(_join_int4, group),
        lambda scale: (_float(scale, jnp.bfloat16), None), _bf16_factors,
    )  # fmt: skip


def _uint4(group):
    """Codes minus a zero point; two rows of a period fill a word with theirs."""
    zeros = Extra(group, 4 * group // (2 * max(group, PART)))

    def scales(scale, zero):
        scale = lax.bitcast_convert_type(scale, jnp.float32)
        return scale, scale * zero.astype(jnp.float32)

    return Kind(
        (4,), 0, (Extra(group, 4), zeros),
        functools.partial(_split_uint4, group, zeros), functools.partial(_join_uint4, group),
        scales, functools.partial(_uint4_factors, zeros),
    )  # fmt: skip


def _q4_5_k(planes, split, join):
    def scales(scales, minima, d, least):
        return _times(scales, d), _times(minima, least)

    return Kind(planes, 0, (Extra(32, 1, 2), Extra(256, 2, 2)), split, join, scales, _q4_k_factors)


def _float32(scale):
    return lax.bitcast_convert_type(scale, jnp.float32), None


KINDS = {
    "fp8_block": Kind((8,), 0, (Extra(128, 4),), _split_fp8, _join_fp8, _float32, _fp8_factors, e4m3=True),
    "fp8_row": Kind(
        (8,), 0, (), _split_fp8_row, _join_fp8_row, lambda: (None, None), _fp8_row_factors, by_row=True, e4m3=True
    ),
    "int8": Kind((8,), 128, (), _split_int8, _join_int8, lambda: (None, None), _no_factors, by_row=True),
    "int4_g32": _int4(32),
    "int4_g128": _int4(128),
    "uint4_g32": _uint4(32),
    "uint4_g128": _uint4(128),
    "Q8_0": Kind((8,), 128, (Extra(32, 2),), _split_q8_0, _join_q8_0, lambda d: (_float(d, jnp.float16), None), _f16_factors),
    "Q5_0": Kind((4, 1), 16, (Extra(32, 2),), _split_q5_0, _join_q5_0, lambda d: (_float(d, jnp.float16), None), _f16_factors),
    "Q5_1": Kind(
        (4, 1), 0, (Extra(32, 2, 2),), _split_q5_0, _join_q5_0,
        lambda d, more: (_float(d, jnp.float16), -_float(more, jnp.float16)), _q5_1_factors,
    ),
    "Q4_K": _q4_5_k((4,), _split_q4_k, _join_q4_k),
    "Q5_K": _q4_5_k((4, 1), _split_q5_k, _join_q5_k),
    "Q6_K": Kind(
        (4, 2), 32, (Extra(16, 1), Extra(256, 2)), _split_q6_k, _join_q6_k,
        lambda scales, d: (_times(scales.astype(jnp.int32) - 128, d), None), _q6_k_factors,
    ),
}  # fmt: skip


# ---- what others call


def why_not(format: str, shape: Sequence[int]) -> str | None:
    """Why weights of this format and shape `[.. F D]` cannot be reordered; None: they can."""
    if format not in KINDS:
        return f"it takes {', '.join(KINDS)}, not {format}"
    least = max(KINDS[format].columns)
    if len(shape) < 2 or shape[-1] % least:
        return f"it takes {format} of matrices with depths in multiples of {least}, not {list(shape)}"
    return None


def tile(format: str) -> tuple[int, int]:
    """The rows and columns of which every multiple, cut out of a matrix, is reordered to a part of its arrays."""
    kind = KINDS[format]
    return BLOCK if kind.by_row else ROWS, max(kind.columns)


@functools.partial(jax.jit, static_argnums=0)
def reorder(format: str, parts: tuple[jax.Array, ...]) -> Packed:
    """The parts of a file's tensor `[.. F D]`, as in mla_jax.base.qtensor, in the order of this module."""
    kind, arrays = KINDS[format], []
    codes, *numbers = kind.split(*parts)
    for at, bits in zip((0, *kind.planes), kind.planes, strict=False):
        arrays.append(_plane(codes >> at & (1 << bits) - 1, bits))
    for extra in kind.extras:
        arrays.append(_by_rows(extra, numbers[: extra.count]))
        numbers = numbers[extra.count :]
    if kind.by_row:
        arrays += [jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)]) for x in numbers]
    return Packed(format, tuple(arrays), codes.shape[-2:])


def _natural(w: Packed):
    """The codes `[.. F D]` and the numbers."""
    kind = KINDS[w.format]
    F = w.shape[0]
    count = len(KINDS[w.format].planes)
    planes = w.arrays[:count]
    scales = w.arrays[count : len(kind.columns)]
    by_row = w.arrays[len(kind.columns) :]
    codes = _codes(planes[0], kind.planes[0])
    for plane, bits in zip(planes[1:], kind.planes[1:], strict=True):
        codes = codes | _codes(plane, bits) << kind.planes[0]
    numbers = [
        x[..., :F, :]
        for extra, words in zip(kind.extras, scales, strict=True)
        for x in _of_rows(extra, words)
    ]
    return codes[..., :F, :], [*numbers, *(x[..., :F] for x in by_row)]


@jax.jit
def restore(w: Packed) -> tuple[jax.Array, ...]:
    """The parts of the file's tensor again."""
    codes, numbers = _natural(w)
    return KINDS[w.format].join(codes, *numbers)


def dequantize(w: Packed) -> jax.Array:
    """The weights `[.. F D]` in float32."""
    kind = KINDS[w.format]
    codes, numbers = _natural(w)
    codes = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn) if kind.e4m3 else codes
    codes = codes.astype(jnp.float32) - kind.offset
    if kind.by_row:
        return codes * numbers[0][..., None]
    scale, least = (
        None if x is None else jnp.repeat(x, codes.shape[-1] // x.shape[-1], -1)
        for x in kind.scales(*numbers)
    )
    return codes * scale if least is None else codes * scale - least


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_parts(format: str, shape: tuple[int, ...], seed: int = 0) -> tuple[jax.Array, ...]:
    """Random weights `[.. F D]` as the parts of a file, for tests and benchmarks: of mean zero, rows of about unit length."""
    kind, (*lead, F, D) = KINDS[format], shape
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    if kind.e4m3:
        codes = jnp.clip(100 * jax.random.normal(next(keys), shape), -448, 448).astype(jnp.float8_e4m3fn)
        scales = (*lead, F) if kind.by_row else (*lead, -(-F // 128), -(-D // 128))
        return codes, 0.01 * D**-0.5 * jax.random.uniform(next(keys), scales, minval=0.5, maxval=1.5)
    codes = jax.random.bits(next(keys), shape, jnp.uint8) >> 8 - sum(kind.planes)
    if format.startswith("uint4"):
        place = *lead, F, D // kind.extras[0].group
        scale = 0.25 * D**-0.5 * jax.random.uniform(next(keys), place, minval=0.5, maxval=1.5)
        scale = lax.bitcast_convert_type(scale.astype(jnp.float16).astype(jnp.float32), jnp.uint32)
        return kind.join(codes, scale, jax.random.bits(next(keys), place, jnp.uint8) >> 4)
    size = D**-0.5 * 2.0 ** (2 - sum(kind.planes))
    minimum = -0.5 * ((1 << sum(kind.planes)) - 1)  # with a scale, what makes the mean zero
    if any(extra.size == 1 for extra in kind.extras):
        size /= 32  # other scales of up to 63
        minimum = -minimum  # it is subtracted
    numbers = []
    for extra in kind.extras:
        for factor in (1.0, minimum)[: extra.count]:
            place = *lead, F, D // extra.group
            if extra.size == 1:
                numbers.append(
                    jax.random.bits(next(keys), place, jnp.uint8) >> 2 | (kind.planes == (4, 2)) << 7
                )
                continue
            x = size * factor * jax.random.uniform(next(keys), place, minval=0.5, maxval=1.5)
            x = x.astype(jnp.float16 if format[0] == "Q" else jnp.bfloat16)
            numbers.append(lax.bitcast_convert_type(x, jnp.uint16))
    if kind.by_row:
        numbers.append(size * jax.random.uniform(next(keys), (*lead, F), minval=0.5, maxval=1.5))
    return kind.join(codes, *numbers)


# ---- a thread's words as pairs of bfloat16


def pairs(format: str, lanes: Any, planes: Sequence[Sequence], extras: Sequence[Sequence]) -> list:
    """The PAIRS words of a thread for a part of 64 columns, in the order of the left operand, from its words of codes and scales.

    A number below 256 in the lowest bits of a bfloat16 is that number times 2**-133: the smallest numbers are evenly spaced, up
    to twice the first that is not subnormal. So no instruction converts a code, which is shifted to the highest of these bits,
    and one multiplies it by its scale and adds the offset or minus the minimum. The results are weights times DOWN: a scale times
    2**133 would be infinite. Codes are exact, scale, minimum and result are rounded.

    `lanes` computes: words have >>, <<, & and |, and pairs of bfloat16 are words."""
    kind = KINDS[format]
    factors = functools.cache(lambda group, row: kind.factors(lanes, kind, group, row, *extras))
    out = []
    for k in range(PAIRS):
        group = 0 if kind.by_row else 16 * (k // 4) // kind.extras[0].group
        code = _e4m3(planes[0], k) if kind.e4m3 else _code(kind, planes, k)
        out.append(lanes.number(code, *factors(group, k % 2)))
    return out


def _code(kind: Kind, planes, k: int):
    """Pair k of codes, in the highest of eight bits."""
    code, at = None, 8 - sum(kind.planes)
    for bits, words in zip(kind.planes, planes, strict=True):
        number, place = divmod(k, PAIRS // bits)
        shift = bits * place - at
        word = words[number] >> shift if shift > 0 else words[number] << -shift if shift else words[number]
        word = word & 0x00010001 * ((1 << bits) - 1 << at)
        code, at = word if code is None else word | code, at + bits
    return code


def _e4m3(words, k: int):
    """Pair k of E4M3 codes, their exponents as the lowest four bits of those of bfloat16. NaN becomes 480."""
    word, upper = words[k // 2], k % 2
    sign, rest = (word, word >> 4) if upper else (word << 8, word << 4)
    return sign & np.uint32(0x80008000) | rest & 0x07F007F0


class Lanes:
    """The arithmetic of `pairs` in jax.numpy, for words of all threads."""

    def constant(self, x: float):
        return self.pair(jnp.full(128, x, jnp.float32))

    def times(self, a, b):
        return self._words(self._floats(a) * self._floats(b))

    def number(self, code, scale, least):
        """Codes times scale, plus least. XLA would flush codes to zero, which are below 2**-111, and also join two constants."""
        bits = jnp.stack([code & jnp.uint32(0xFFFF), code >> 16], axis=-1)
        exponent, rest = bits >> 7 & 15, bits & 127
        whole = jnp.where(exponent > 0, (rest | 128) << jnp.maximum(exponent, 1) - 1, rest)
        whole = whole.astype(jnp.float32)
        smaller = lax.optimization_barrier(jnp.where(bits >> 15 > 0, -whole, whole) * 2.0**-33)
        return self._words(smaller * (self._floats(scale) * 2.0**-100) + self._floats(least))

    def _floats(self, word):
        return lax.bitcast_convert_type(word, jnp.bfloat16).astype(jnp.float32)

    def _words(self, x):
        return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint32)

    def both(self, word, half):
        """One half of a word as both."""
        x = word >> 16 * half & jnp.uint32(0xFFFF)
        return x | x << 16

    def half(self, word, half):
        """A float16, as float32."""
        return _float((word >> 16 * half).astype(jnp.uint16), jnp.float16)

    def real(self, word):
        """A word as float32."""
        return lax.bitcast_convert_type(word, jnp.float32)

    def times_byte(self, x, word, byte):
        return x * (word >> 8 * byte & jnp.uint32(255)).astype(jnp.float32)

    def pair(self, x):
        """A number, rounded, two times."""
        return self._words(jnp.stack([x, x], axis=-1))


def part(format: str, arrays: Sequence[jax.Array], number: int) -> jax.Array:
    """64 rows and the part `number` (0 or 1) of their columns as the kernel unpacks them: `[64 64]` bfloat16.

    `arrays` are those of a tile and a step, without leading axes."""
    kind = KINDS[format]
    planes = arrays[: len(kind.planes)]
    extras = arrays[len(kind.planes) :]
    words = []
    for bits, plane in zip(kind.planes, planes, strict=True):
        mine = plane.reshape(2, bits // vector(bits), 128, vector(bits))[number]
        words.append([mine[k // vector(bits), :, k % vector(bits)] for k in range(bits)])
    scales = []
    for extra, array in zip(kind.extras, extras, strict=False):
        mine = array.reshape(-1, 32, extra.words)[number if extra.period == PART else 0]
        scales.append([jnp.repeat(mine[:, k], 4) for k in range(extra.words)])
    x = jnp.stack(pairs(format, Lanes(), words, scales))
    # Block, c, r, warp, row, pair, left or right
    x = lax.bitcast_convert_type(x, jnp.bfloat16).reshape(4, 2, 2, 4, 8, 4, 2)
    return x.transpose(3, 2, 4, 0, 1, 5, 6).reshape(ROWS, PART)
