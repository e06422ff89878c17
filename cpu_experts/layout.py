"""How weights lie in memory for the kernels: the packed layouts, stated once; `pack` and its inverse `unpack`.

A matrix of N outputs and K inputs is cut into panels of 32 outputs: two tiles of 16. In gate and up, packed as one, a panel is 16
outputs of gate and the same 16 of up. A panel holds all of K, step by step; a step is two tiles, one after the other, and a tile
of a step 16 rows of 16 outputs times what one multiplication takes of each:

    bf16   K in steps of 32   row r, output n: inputs 2r and 2r + 1
    int8   K in steps of 64   row r, output n: inputs 4r to 4r + 3
    int4   K in steps of 32   as bf16, codes plus 8, in words of 16 bits: of the word of row group z, nibble q is row 4z + q
    fp8    K in steps of 32   as bf16, E4M3 codes; two rows to a line of 64, eight codes of one and eight of the other in turn
    q8_0   K in steps of 32   as fp8, a sign and seven bits; the negative zero is -128
    q4_k   K in steps of 32   as int4, codes as they are
    q6_k   K in steps of 32   as fp8, codes plus 32: a line of the low four bits of two of its lines, for each two of them; then
                              a line of the high two bits of four, for each four

The scales follow, padded to 64 bytes: of int8 a float an output, then the sum of each output's codes times 128 as int32 (rows are
stored plus 128, and take it back so); of int4 a bfloat16 an output in each group, of q8_0 a float16; of fp8 a float a tile in
each 128 inputs; of q4_k and q6_k in each 256 inputs what blocks.py says a block has beside its codes, not a bit more: d of all 32
outputs, dmin of all, then each byte of scales of all. All padding is zeros.

Rows are bfloat16 for all of them but int8, whose rows are int8 too, to the largest of each row; and for int4 and q4_k on AVX-512
and AMX: few rows of an expert are int8 there with a scale for every 32 numbers, many as int8's, and its codes become int8 on the
way (reference.py says how far that is from what they say).

Knows numpy only."""

import contextlib
import mmap
from typing import NamedTuple

import numpy as np

from cpu_experts import blocks

TILE, PANEL, LINE = 16, 32, 64
E4M3_MAX = 448.0


class Format(NamedTuple):
    """`id` is the library's number; K is padded to `group`, whose values share scales (0: the whole output's do)."""

    id: int
    step: int
    group: int
    tile_bytes: int
    scale_bytes: int  # of a panel in each group


FORMATS = {
    "bf16": Format(0, 32, 0, 1024, 0),
    "int8": Format(1, 64, 0, 1024, 256),
    "int4_g32": Format(2, 32, 32, 256, 64),
    "int4_g128": Format(3, 32, 128, 256, 64),
    "fp8_block": Format(4, 32, 128, 512, 8),
    "q8_0": Format(5, 32, 32, 512, 64),
    "q4_k": Format(6, 32, 32, 256, 512 // 8),
    "q6_k": Format(7, 32, 32, 384, 576 // 8),
}

_BYTES, _NIBBLES = ("fp8_block", "q8_0", "q6_k"), ("int4_g32", "int4_g128", "q4_k")

Parts = tuple[np.ndarray, ...]


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of bfloat16 nearest to float32 values, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def e4m3_values() -> np.ndarray:
    """All 256 values; two are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    size[code & 127 == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


def quantize(w: np.ndarray, format: str) -> Parts:
    """Codes and scales `[.. N K]` of float weights, by the largest of each row, group or block; bf16 has bits alone."""
    if format == "bf16":
        return (w.view(np.uint16) if w.dtype.name == "bfloat16" else w if w.dtype == np.uint16 else to_bf16(w),)
    w = from_bf16(w.view(np.uint16)) if w.dtype.name == "bfloat16" else np.asarray(w, np.float32)
    if format in blocks.BYTES:
        return (blocks.quantize(w, format),)
    if format == "int8":
        scale = _scale(np.abs(w).max(axis=-1), 127)
        return np.clip(np.rint(w / scale[..., None]), -127, 127).astype(np.int8), scale
    group = FORMATS[format].group
    if format == "fp8_block":
        rows, columns = w.shape[-2:]
        amax = np.maximum.reduceat(np.abs(w), np.arange(0, rows, group), axis=-2)
        scale = _scale(np.maximum.reduceat(amax, np.arange(0, columns, group), axis=-1), E4M3_MAX)
        wide = np.repeat(np.repeat(scale, group, axis=-2), group, axis=-1)[..., :rows, :columns]
        sizes = e4m3_values()[:127]
        ratio = np.minimum(np.abs(w / wide), E4M3_MAX)
        return (np.searchsorted((sizes[1:] + sizes[:-1]) / 2, ratio) | np.signbit(w) * 128).astype(np.uint8), scale
    inputs = w.shape[-1]
    w = _padded(w, -1, group).reshape(*w.shape[:-1], -1, group)
    if format == "q8_0":
        half = np.maximum(_scale(np.abs(w).max(axis=-1), 127).astype(np.float16), np.float16(6e-8))
        codes = np.clip(np.rint(w / half.astype(np.float32)[..., None]), -127, 127).astype(np.int8)
        return codes.reshape(*w.shape[:-2], -1)[..., :inputs], half
    bits = to_bf16(_scale(np.abs(w).max(axis=-1), 7))
    codes = (np.clip(np.rint(w / from_bf16(bits)[..., None]), -8, 7) + 8).astype(np.uint8)
    return codes[..., : group // 2] | codes[..., group // 2 :] << 4, bits


def dequantize(parts: Parts, format: str, inputs: int) -> np.ndarray:
    """Float32 `[.. N K]`, the values that the parts stand for."""
    if format == "bf16":
        return from_bf16(parts[0])
    if format in blocks.BYTES:
        return blocks.values(parts[0], format)
    codes, scale = parts
    if format == "int8":
        return codes.astype(np.float32) * scale[..., None]
    if format == "fp8_block":
        wide = np.repeat(np.repeat(scale, 128, axis=-2), 128, axis=-1)
        return e4m3_values()[codes] * wide[..., : codes.shape[-2], : codes.shape[-1]]
    if format == "q8_0":
        return codes * np.repeat(scale.astype(np.float32), 32, axis=-1)[..., :inputs]
    values = (int4_codes(codes) - np.float32(8)) * from_bf16(scale)[..., None]
    return values.reshape(*codes.shape[:-2], -1)[..., :inputs]


def part_shapes(format: str, n: int, k: int) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of every part of a matrix `[n k]`; raises ValueError where the format has none of that size."""
    if format == "bf16":
        return [("uint16", (n, k))]
    if format == "int8":
        return [("int8", (n, k)), ("float32", (n,))]
    if format == "fp8_block":
        return [("uint8", (n, k)), ("float32", (-(-n // 128), -(-k // 128)))]
    if format == "q8_0":
        return [("int8", (n, k)), ("float16", (n, -(-k // 32)))]
    if format in blocks.BYTES:
        if k % blocks.VALUES:
            raise ValueError(f"{format}: {k} inputs, must be a multiple of {blocks.VALUES}")
        return [("uint8", (n, k // blocks.VALUES, blocks.BYTES[format]))]
    group = FORMATS[format].group
    return [("uint8", (n, -(-k // group), group // 2)), ("uint16", (n, -(-k // group)))]


def int4_codes(packed: np.ndarray) -> np.ndarray:
    """Codes 0 to 15 `[.. groups group]`: a group's first half are its bytes' low nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def panel_bytes(format: str, inputs: int) -> tuple[int, int, int]:
    """Steps of K in a panel, bytes of its codes, and bytes in all."""
    f = FORMATS[format]
    padded = -(-inputs // max(f.group, f.step)) * max(f.group, f.step)
    data = padded // f.step * 2 * f.tile_bytes
    scales = (padded // f.group if f.group else 1) * f.scale_bytes
    return padded // f.step, data, data + -(-scales // LINE) * LINE


def pack_experts(matrices: list[Parts], format: str, inputs: int) -> np.ndarray:
    """The panels of all experts, bytes `[X panels panel_bytes]` aligned to pages: of `[gate, up]`, or of `[down]`."""
    experts, outputs = matrices[0][0].shape[:2]
    count = -(-outputs // TILE) if len(matrices) == 2 else -(-outputs // PANEL)
    size = panel_bytes(format, inputs)[2]
    packed = _pages(experts * count * size).reshape(experts, count, size)
    one = all(part.strides[0] == 0 for matrix in matrices for part in matrix)  # repeated by np.broadcast_to
    for e in range(min(experts, 1) if one else experts):
        pack([tuple(part[e] for part in matrix) for matrix in matrices], format, inputs, packed[e])
    if one:
        packed[1:] = packed[:1]
    return packed


def pack(matrices: list[Parts], format: str, inputs: int, out: np.ndarray) -> None:
    """One expert's `[N K]` matrix, or gate and up, into bytes `[panels panel_bytes]`."""
    steps, data, _ = panel_bytes(format, inputs)
    panels = out.shape[0]
    if format in blocks.BYTES:
        matrices = [blocks.split(m[0], format) for m in matrices]

    def tiles(part: int) -> np.ndarray:  # [panels 2 16 ...]
        if len(matrices) == 2:
            return np.stack([_padded(m[part], 0, TILE).reshape(panels, TILE, *m[part].shape[1:]) for m in matrices], axis=1)
        return _padded(matrices[0][part], 0, PANEL).reshape(panels, 2, TILE, *matrices[0][part].shape[1:])

    f = FORMATS[format]
    codes = tiles(0) if format not in ("int4_g32", "int4_g128") else int4_codes(tiles(0)).reshape(panels, 2, TILE, -1)
    codes = _padded(codes, -1, f.step * steps)
    if format == "int8":
        rows = codes.reshape(panels, 2, TILE, steps, 16, 4).transpose(0, 3, 1, 4, 2, 5)
    else:
        rows = codes.reshape(panels, 2, TILE, steps, 16, 2).transpose(0, 3, 1, 4, 2, 5)
    out[:, :data].reshape(panels, -1)[...] = _coded(rows, format).reshape(panels, -1).view(np.uint8)
    if format != "bf16":
        scales = _scales(matrices, tiles, codes, format, panels)
        out[:, data : data + scales.shape[1]] = scales
        out[:, data + scales.shape[1] :] = 0


def unpack(packed: np.ndarray, format: str, outputs: int, inputs: int, pair: bool) -> list[np.ndarray]:
    """Of one expert the codes `[N K]` of each matrix: two of a pair (gate and up), else one. Of four bits they are 0 to 15."""
    steps, data, _ = panel_bytes(format, inputs)
    panels, raw = len(packed), np.ascontiguousarray(packed[:, :data])
    if format == "int8":
        rows = raw.view(np.int8).reshape(panels, steps, 2, 16, TILE, 4)
    elif format == "bf16":
        rows = raw.view(np.uint16).reshape(panels, steps, 2, 16, TILE, 2)
    elif format in _BYTES:
        lines = _joined(raw.reshape(panels, steps, 2, 6, LINE)) if format == "q6_k" else raw
        rows = lines.reshape(panels, steps, 2, 8, 4, 2, 8).transpose(0, 1, 2, 3, 5, 4, 6)
        if format == "q8_0":
            size = np.where(rows == 128, 128, rows & 127).astype(np.int16)
            rows = np.where(rows >= 128, -size, size).astype(np.int8)
        elif format == "q6_k":
            rows = (rows - np.uint8(32)).view(np.int8)
    else:
        words = raw.view(np.uint16).reshape(panels, steps, 2, 4, 1, 32)
        rows = words >> np.arange(0, 16, 4, dtype=np.uint16)[:, None] & np.uint16(15)
    rows = rows.reshape(panels, steps, 2, 16, TILE, -1).transpose(0, 2, 4, 1, 3, 5).reshape(panels, 2, TILE, -1)
    split = [rows[:, 0], rows[:, 1]] if pair else [rows]
    return [m.reshape(-1, m.shape[-1])[:outputs, :inputs] for m in split]


def _coded(rows: np.ndarray, format: str) -> np.ndarray:
    """`[panels steps 2 16 16 values]` in the order of the bytes."""
    lead = rows.shape[:3]
    if format == "q8_0":
        rows = np.abs(rows.astype(np.int16)).astype(np.uint8) | (rows < 0).astype(np.uint8) << 7
    elif format == "q6_k":
        rows = rows.view(np.uint8) + np.uint8(32)
    if format in _BYTES:
        lines = np.ascontiguousarray(rows.reshape(*lead, 8, 2, 4, 8).swapaxes(-3, -2))
        return _parted(lines.reshape(*lead, 8, LINE)) if format == "q6_k" else lines
    if format in _NIBBLES:
        nibbles = rows.reshape(*lead, 4, 4, 32).astype(np.uint16)
        return nibbles[..., 0, :] | nibbles[..., 1, :] << 4 | nibbles[..., 2, :] << 8 | nibbles[..., 3, :] << 12
    return np.ascontiguousarray(rows)


def _parted(lines: np.ndarray) -> np.ndarray:
    """Eight lines of six bits as four of the low four bits and two of the high two."""
    high = (lines >> 4).reshape(*lines.shape[:-2], 2, 4, LINE) << np.array([[0], [2], [4], [6]], np.uint8)
    low = lines[..., 0::2, :] & 15 | lines[..., 1::2, :] << 4
    return np.concatenate([low, np.bitwise_or.reduce(high, axis=-2)], axis=-2)


def _joined(lines: np.ndarray) -> np.ndarray:
    """The inverse of `_parted`."""
    low = lines[..., :4, None, :] >> np.array([[0], [4]], np.uint8) & np.uint8(15)
    high = lines[..., 4:, None, :] >> np.array([[0], [2], [4], [6]], np.uint8) & np.uint8(3)
    whole = *lines.shape[:-2], 8, LINE
    return low.reshape(whole) | high.reshape(whole) << 4


def _scales(matrices: list[Parts], tiles, codes: np.ndarray, format: str, panels: int) -> np.ndarray:
    """A panel's second section, as bytes `[panels bytes]`."""
    if format == "int8":
        sums = codes.astype(np.int32).sum(axis=-1, dtype=np.int32) * np.int32(128)
        sections = [tiles(1).reshape(panels, PANEL).astype(np.float32).view(np.uint8), sums.reshape(panels, PANEL).view(np.uint8)]
        return np.concatenate(sections, axis=1)
    if format == "fp8_block":  # a tile lies in one block of 128 outputs
        tall = [np.repeat(m[1], 128 // TILE, axis=0)[: -(-m[0].shape[0] // TILE)] for m in matrices]
        each = np.stack(tall, axis=1) if len(tall) == 2 else _padded(tall[0], 0, 2).reshape(panels, 2, -1)
        return np.ascontiguousarray(each.transpose(0, 2, 1), np.float32).reshape(panels, -1).view(np.uint8)
    if format in blocks.BYTES:
        each, halves = tiles(1).reshape(panels, PANEL, codes.shape[-1] // blocks.VALUES, -1), 4 if format == "q4_k" else 2
        d = each[..., :halves].reshape(*each.shape[:3], -1, 2).transpose(0, 2, 3, 1, 4)
        sections = [d, each[..., halves:].transpose(0, 2, 3, 1)]
        return np.concatenate([s.reshape(panels, each.shape[2], -1) for s in sections], axis=-1).reshape(panels, -1)
    each = tiles(1).view(np.uint16)  # [panels 2 16 groups]
    return np.ascontiguousarray(each.transpose(0, 3, 1, 2)).reshape(panels, -1).view(np.uint8)


def _padded(x: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    fill = [(0, 0)] * x.ndim
    fill[axis] = (0, missing)
    return np.pad(x, fill)


def _pages(size: int) -> np.ndarray:
    """Zeroed memory in huge pages where the system has them: the kernels' streams end at a page.

    Private, for what is shared is a file to Linux, whose pages are small unless the system is told otherwise."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, max(size, 1), **private)
    except OSError as error:
        raise MemoryError(f"{size:,} bytes of packed weights: {error.strerror}") from None
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, size)


def _scale(extreme: np.ndarray, code: float) -> np.ndarray:
    if not np.isfinite(extreme).all():
        raise ValueError("weights that are not finite cannot be quantised")
    return np.where(extreme == 0, 1, extreme / np.float32(code)).astype(np.float32)
