"""How packed matrices are stored in safetensors, as data: a row for each quantiser, with its tensors and its way to the parts of
a QTensor.

Nothing is rounded on the way: `pack` gives the file's bytes back. Knows arrays only; hf.py reads the files."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import ml_dtypes
import numpy as np

from mla_jax.base.qtensor import FP4_GROUP, Shape, abstract, format_of, fp8_format
from mla_jax.base.quantization import LEAST_GROUP, OF_MATRIX, OF_ROW, Scheme
from mla_jax.weights.boxes import Box, box_shape, fitted, whole_box

Arrays = tuple[np.ndarray, ...]
_Block = tuple[int, int]
UNPACKING_COPIES = 3  # the file's tensors, and two of what is made of them
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


class Field(NamedTuple):
    """A tensor of a packed matrix `[N K]`: each entry is for a number of `rows` and `columns` of values, 0 for all."""

    name: str
    dtypes: tuple[str, ...]
    rows: int = 1
    columns: int = 1
    transposed: bool = False

    def shape(self, of: Shape) -> Shape:
        return box_shape(self.box(whole_box(of)))

    def box(self, box: Box) -> Box:
        """The entries for a box of values, which begins and ends between them."""
        sizes = zip(box, (self.rows, self.columns), strict=True)
        found = tuple((start // n, -(-end // n)) if n else (0, 1) for (start, end), n in sizes)
        return found[::-1] if self.transposed else found


class FileLayout(NamedTuple):
    """The `fields` of a matrix, its codes first, and what makes the parts of a tensor in `format` of them.

    `unpack` and its inverse `pack` have arrays whose rows are those of the matrix. `sound` says whether parts are such as the
    quantiser makes. `sizes` names a tensor with N and K, if there is one. `copies` of a matrix are in memory at most besides its
    parts while codes change their order. The number of columns is a `multiple`."""

    format: str
    fields: tuple[Field, ...]
    unpack: Callable[[Arrays, Shape], Arrays]
    pack: Callable[[Arrays, Shape], Arrays]
    sound: Callable[[Arrays], bool] = lambda parts: True
    sizes: str | None = None
    copies: int = 0
    multiple: int = 1


@cache
def layout_of(scheme: Scheme) -> FileLayout:
    return LAYOUTS[scheme.layout](scheme.block)


# ---- FP8


def _fp8(name: str, block: _Block) -> FileLayout:
    fields = Field("weight", ("F8_E4M3",)), Field(name, SCALE_DTYPES, *block)
    format, spread, gathered = _FP8.get(block) or (fp8_format(block), _same, _same)

    def unpack(arrays: Arrays, shape: Shape) -> Arrays:
        return arrays[0], spread(arrays[1].astype(np.float32), shape)

    def pack(parts: Arrays, shape: Shape) -> Arrays:
        return parts[0], gathered(parts[1], shape)

    return FileLayout(format, fields, unpack, pack, partial(_scales_are_sound, format))


def _same(scale: np.ndarray, shape: Shape) -> np.ndarray:
    return scale


def _in_blocks(scale: np.ndarray, shape: Shape) -> np.ndarray:
    """The scale of a matrix as that of each block, for which there are kernels."""
    return np.full(abstract("fp8_block", shape).parts[1].shape, scale[0, 0])


_FP8 = {
    OF_MATRIX: ("fp8_block", _in_blocks, lambda scale, shape: scale[:1, :1]),
    OF_ROW: ("fp8_row", lambda scale, shape: scale[:, 0], lambda scale, shape: scale[:, None]),
}


def _scales_are_sound(format: str, parts: Arrays) -> bool:
    """Positive and finite; only zeros may have the scale 0."""
    weight, scale = parts
    if not (np.isfinite(scale) & (scale >= 0)).all():
        return False
    if scale.all():
        return True
    rows, columns = (
        np.arange(n) // (b or n) for n, b in zip(weight.shape, format_of(format).block, strict=True)
    )
    return not weight[(scale.reshape(len(scale), -1) == 0)[rows[:, None], columns]].any()


# ---- codes of four bits


NATURAL = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the places in a word of eight neighbours


def _codes(words: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """Codes `[.. 8W]` of words `[.. W]`, in which they are stored in this order, the lowest bits first."""
    low_high = np.ascontiguousarray(words)[..., None].view(np.uint8)
    codes = np.stack([low_high & 15, low_high >> 4], axis=-1).reshape(*words.shape, 8)
    return codes[..., order].reshape(*words.shape[:-1], -1)


def _words(codes: np.ndarray, order: tuple[int, ...]) -> np.ndarray:
    """The inverse of `_codes`."""
    codes = codes.reshape(*codes.shape[:-1], -1, 8)[..., np.argsort(order)]
    return np.ascontiguousarray(codes[..., ::2] | codes[..., 1::2] << 4).view(np.int32)[..., 0]


def _halves(pairs: np.ndarray, group: int) -> np.ndarray:
    """Bytes `[N K/2]` of two neighbours as those of the library, `[N groups group/2]`: a half of a group in the low nibbles."""
    groups = -(-2 * pairs.shape[1] // group)
    pairs = fitted(pairs, (len(pairs), groups * group // 2)).reshape(len(pairs), groups, group // 2)
    low, high = pairs[..., : group // 4], pairs[..., group // 4 :]
    found = np.empty_like(pairs)
    found[..., ::2] = low & 15 | high << 4
    found[..., 1::2] = low >> 4 | high & 0xF0
    return found


def _pairs(halves: np.ndarray, columns: int) -> np.ndarray:
    """The inverse of `_halves`, for this number of columns."""
    even, odd = halves[..., ::2], halves[..., 1::2]
    pairs = np.concatenate([even & 15 | odd << 4, even >> 4 | odd & 0xF0], axis=-1)
    return pairs.reshape(len(pairs), -1)[:, : columns // 2]


def _along_rows(words: np.ndarray) -> np.ndarray:
    """Words `[N K/8]` of eight neighbours in a row, as pairs."""
    return np.ascontiguousarray(words).view(np.uint8)


LOW, HIGH = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)  # nibbles of a word's bytes
# The places of eight rows in the bytes of low nibbles, then of high ones
AWQ_BYTES = (0, 2, 4, 6, 1, 3, 5, 7)
TILE = 32  # words that are turned at a time, which a core's cache holds


def _along_columns(words: np.ndarray) -> np.ndarray:
    """AWQ's words `[N/8 K]`, as pairs; by words, because numpy takes seven times as long for codes."""
    even, odd = (words.T[i::2].view(np.uint32) for i in (0, 1))
    joined = [even & LOW | (odd & LOW) << 4, even >> 4 & LOW | odd & HIGH]
    pairs = np.stack(joined, axis=-1).view(np.uint8).reshape(len(even), -1, 8)
    found = np.empty((len(words), 8, len(even)), np.uint8)
    for start in range(0, len(words), TILE):
        found[start : start + TILE] = pairs[:, start : start + TILE].transpose(1, 2, 0)[:, AWQ_BYTES]
    return found.reshape(-1, len(even))


def _awq_words(pairs: np.ndarray) -> np.ndarray:
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)
    return _words(codes.T, AWQ).T


class _Zeros(NamedTuple):
    """Zero points `[N/8 groups]`: the order of eight rows in a word, and what is stored less of each."""

    field: Field
    order: tuple[int, ...] = NATURAL
    less: int = 0

    def read(self, words: np.ndarray, rows: int) -> np.ndarray:
        return _codes(words.T, self.order).T[:rows] + np.uint8(self.less)

    def written(self, zero: np.ndarray) -> np.ndarray:
        full = fitted(zero - np.uint8(self.less) & 15, (-(-len(zero) // 8) * 8, zero.shape[1]))
        return _words(full.T, self.order).T


class _Groups(NamedTuple):
    """Codes with a scale for each group of a row, of all `size` (0: of the row); without zero points these are 8.

    Long groups are several of the library's, which have `ours` values, with one scale. BF16 scales without zero points are kept
    as they are, in a format that has `exact` scales. `pairs` makes pairs of the file's words, and `words` the way back."""

    size: int
    ours: int
    exact: bool
    zeros: _Zeros | None
    pairs: Callable[[np.ndarray], np.ndarray]
    words: Callable[[np.ndarray], np.ndarray]

    def spread(self, numbers: np.ndarray, columns: int) -> np.ndarray:
        """A number of each group, for each of the library's."""
        groups = -(-columns // self.ours)
        return np.repeat(numbers, self.size // self.ours or groups, axis=1)[:, :groups]

    def gathered(self, numbers: np.ndarray) -> np.ndarray:
        """The inverse of `spread`."""
        return numbers[:, :: self.size // self.ours or numbers.shape[1]]

    def unpack(self, arrays: Arrays, shape: Shape) -> Arrays:
        rows, columns = shape
        packed = _halves(self.pairs(arrays[0]), self.ours)[:, : -(-columns // self.ours)]
        scale = self.spread(arrays[1], columns)
        if self.exact:
            return packed, scale
        zero = np.full_like(arrays[1], 8, np.uint8)
        if self.zeros is not None:
            zero = self.zeros.read(arrays[2], rows)
        return packed, scale.astype(np.float32), self.spread(zero, columns)

    def pack(self, parts: Arrays, shape: Shape) -> Arrays:
        pairs = _pairs(parts[0], -(-shape[1] // 8) * 8)
        found = self.words(np.ascontiguousarray(pairs)), self.gathered(parts[1])
        if self.zeros is None:
            return found
        return *found, self.zeros.written(self.gathered(parts[2]))


def _grouped(
    block: _Block,
    codes: Field,
    scales: Field,
    zeros: _Zeros | None = None,
    pairs: Callable[[np.ndarray], np.ndarray] = _along_rows,
    words: Callable[[np.ndarray], np.ndarray] = lambda pairs: pairs.view(np.int32),
    sizes: str | None = None,
) -> FileLayout:
    """The layout of such codes."""
    ours = 128 if block[1] % 128 == 0 else LEAST_GROUP
    groups = _Groups(block[1], ours, scales.dtypes == ("BF16",) and zeros is None, zeros, pairs, words)
    return FileLayout(
        f"int4_g{ours}" if groups.exact else f"uint4_g{ours}",
        (codes, scales) if zeros is None else (codes, scales, zeros.field),
        groups.unpack,
        groups.pack,
        sizes=sizes,
        copies=UNPACKING_COPIES,
        multiple=block[1] or (2 if sizes is None else 1),
    )


def _pack_quantized(dtypes: tuple[str, ...], has_zeros: bool, block: _Block) -> FileLayout:
    """compressed-tensors: words along rows, which are filled up to whole ones; zero points along columns."""
    zeros = _Zeros(Field("weight_zero_point", ("I32",), 8, block[1])) if has_zeros else None
    codes, scales = Field("weight_packed", ("I32",), 1, 8), Field("weight_scale", dtypes, *block)
    return _grouped(block, codes, scales, zeros, sizes="weight_shape")


def _gptq(less: int, block: _Block) -> FileLayout:
    """Words along columns of the transposed matrix, `less` stored of each zero point."""
    codes, scales = Field("qweight", ("I32",), 1, 8, True), Field("scales", SCALE_DTYPES, *block, True)
    return _grouped(block, codes, scales, _Zeros(Field("qzeros", ("I32",), 8, block[1], True), NATURAL, less))


def _awq(block: _Block) -> FileLayout:
    """Words along rows of the transposed matrix, in an order of their own."""
    codes, scales = Field("qweight", ("I32",), 8, 1, True), Field("scales", SCALE_DTYPES, *block, True)
    zeros = _Zeros(Field("qzeros", ("I32",), 8, block[1], True), AWQ)
    return _grouped(block, codes, scales, zeros, _along_columns, _awq_words)


# ---- FP4


def _nvfp4(format: str, codes: str, number: str, block: _Block) -> FileLayout:
    """E2M1 with an E4M3 scale per group, and a number for the matrix: a factor, or a divisor."""
    scales = Field("weight_scale", ("F8_E4M3",), *block)
    fields = Field(codes, ("U8",), 1, 2), scales, Field(number, ("F32",), *OF_MATRIX)

    def unpack(arrays: Arrays, shape: Shape) -> Arrays:
        return arrays[0], _without_nan(arrays[1], arrays[0]), np.full(shape[0], arrays[2][0, 0])

    def pack(parts: Arrays, shape: Shape) -> Arrays:
        return *parts[:2], parts[2][:1, None]

    return FileLayout(format, fields, unpack, pack, multiple=block[1])


def _without_nan(scale: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Scales of groups of zeros, some of which were released as NaN, are 0 instead."""
    is_nan = scale.view(np.uint8) & 0x7F == 0x7F
    if not is_nan.any():
        return scale
    is_zero = ~(pairs.reshape(*scale.shape, FP4_GROUP // 2) & 0x77).any(axis=-1)
    return np.where(is_nan & is_zero, ml_dtypes.float8_e4m3fn(0), scale)


def _mxfp4(block: _Block) -> FileLayout:
    """E2M1 with a power of two per group, which is GGUF's MXFP4 in another order."""

    def unpack(arrays: Arrays, shape: Shape) -> Arrays:
        return (np.concatenate([arrays[1][..., None], _halves(arrays[0], block[1])], axis=-1),)

    def pack(parts: Arrays, shape: Shape) -> Arrays:
        return _pairs(parts[0][..., 1:], shape[1]), parts[0][..., 0]

    fields = Field("weight_packed", ("U8",), 1, 2), Field("weight_scale", ("U8",), *block)
    return FileLayout("MXFP4", fields, unpack, pack, copies=UNPACKING_COPIES, multiple=block[1])


LAYOUTS: dict[str, Callable[[_Block], FileLayout]] = {
    "fp8": partial(_fp8, "weight_scale_inv"),
    "deepseek": partial(_fp8, "scale"),  # DeepSeek's own parts
    "float-quantized": partial(_fp8, "weight_scale"),
    "pack-quantized": partial(_pack_quantized, ("BF16",), False),
    "pack-quantized f16": partial(_pack_quantized, ("F16", "F32"), False),
    "pack-quantized asymmetric": partial(_pack_quantized, ("BF16", "F16", "F32"), True),
    "awq": _awq,
    "gptq": partial(_gptq, 1),
    "gptq_v2": partial(_gptq, 0),
    "nvfp4": partial(_nvfp4, "fp4_g16", "weight", "weight_scale_2"),
    "nvfp4-pack-quantized": partial(_nvfp4, "fp4_g16_divided", "weight_packed", "weight_global_scale"),
    "mxfp4-pack-quantized": _mxfp4,
}
