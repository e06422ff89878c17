"""The packed layouts of weights, which the kernels read: `pack`, and its inverse `unpack`.

A matrix of N outputs and K inputs is cut into panels of 32 outputs: two tiles of 16. Gate and up are packed together: a panel
has 16 outputs of gate and the same 16 outputs of up. A panel holds all of K in steps, and a step is two tiles, one after the
other. In one step a tile has 16 rows. A row has for each of the 16 outputs the inputs that one multiply instruction takes:

    bf16   K in steps of 32   row r, output n: inputs 2r and 2r + 1
    int8   K in steps of 64   row r, output n: inputs 4r to 4r + 3
    int4   K in steps of 32   order as bf16; code + 8, in 16-bit words: nibble q of a word of row group z is row 4z + q
    fp8    K in steps of 32   order as bf16; E4M3 codes; a line of 64 bytes interleaves two rows, eight codes at a time
    q8_0   K in steps of 32   order as fp8; a sign bit and seven bits of magnitude; the negative zero is -128
    q4_k   K in steps of 32   order as int4; codes unchanged
    q6_k   K in steps of 32   order as fp8; code + 32; the low four bits of two lines share a line, then the high two bits of
                              four lines share one

The scales follow, padded to 64 bytes:

    int8         a float per output; then per output the sum of its codes times 128 as int32 (kernels add 128 to the codes of
                 rows, and subtract this sum)
    int4         a bfloat16 per output and group
    q8_0         a float16 per output and group
    fp8          a float per tile and 128 inputs
    q4_k, q6_k   per 256 inputs the rest of a block (blocks.py), bit for bit: d of all 32 outputs, dmin of all 32 outputs, then
                 each byte of the scales, of all 32 outputs

All padding is zeros.

Kernels convert rows (activations) to bfloat16. int8 weights meet int8 rows, with a scale per row from its largest value. int4 and
q4_k on AVX-512 and AMX also meet int8 rows: an expert with few rows takes a scale per 32 values; an expert with many rows takes
rows as int8 does, and its codes are converted to int8. reference.py states the error bounds.

Knows numpy only."""

import contextlib
import mmap
from typing import NamedTuple

import numpy as np

from cpu_experts import blocks

TILE, PANEL, LINE = 16, 32, 64
E4M3_MAX = 448.0


class Format(NamedTuple):
    """`id` is the library's number. K is padded to a multiple of `group`, whose values share a scale; 0: one scale per output."""

    id: int
    step: int
    group: int
    tile_bytes: int
    scale_bytes: int  # per panel and group


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

_INT4 = ("int4_g32", "int4_g128")
_BYTES, _NIBBLES = ("fp8_block", "q8_0", "q6_k"), (*_INT4, "q4_k")  # bytes or nibbles per code, in lines
_BLOCK = 128  # rows and columns of an FP8 block

Parts = tuple[np.ndarray, ...]


def to_bf16(x: np.ndarray) -> np.ndarray:
    """The bits of the nearest bfloat16 values; ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def e4m3_values() -> np.ndarray:
    """The value of each of the 256 codes; two are NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    size = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    size[code & 127 == 127] = np.nan
    return np.where(code < 128, size, -size).astype(np.float32)


def quantize(w: np.ndarray, format: str) -> Parts:
    """Codes and scales `[.. N K]` of float weights; the largest value of a row, group or block gives its scale."""
    if format == "bf16":
        return (_bf16_bits(w),)
    w = _float32(w)
    if format in blocks.BYTES:
        return (blocks.quantize(w, format),)
    if format == "int8":
        return _quantize_int8(w)
    if format == "fp8_block":
        return _quantize_fp8(w)
    if format == "q8_0":
        return _quantize_q8_0(w)
    return _quantize_int4(w, FORMATS[format].group)


def _bf16_bits(w: np.ndarray) -> np.ndarray:
    if w.dtype.name == "bfloat16" or w.dtype == np.uint16:
        return w.view(np.uint16)
    return to_bf16(w)


def _float32(w: np.ndarray) -> np.ndarray:
    if w.dtype.name == "bfloat16":
        return from_bf16(w.view(np.uint16))
    return np.asarray(w, np.float32)


def _quantize_int8(w: np.ndarray) -> Parts:
    scale = _scale(np.abs(w).max(axis=-1), 127)
    codes = np.clip(np.rint(w / scale[..., None]), -127, 127)
    return codes.astype(np.int8), scale


def _quantize_fp8(w: np.ndarray) -> Parts:
    rows, columns = w.shape[-2:]
    largest = np.maximum.reduceat(np.abs(w), np.arange(0, rows, _BLOCK), axis=-2)
    largest = np.maximum.reduceat(largest, np.arange(0, columns, _BLOCK), axis=-1)
    scale = _scale(largest, E4M3_MAX)
    return _e4m3_codes(w / _per_value(scale, rows, columns)), scale


def _e4m3_codes(x: np.ndarray) -> np.ndarray:
    """The codes of the nearest E4M3 values; larger magnitudes become 448."""
    sizes = e4m3_values()[:127]  # the finite ones that are not negative, ascending
    midpoints = (sizes[1:] + sizes[:-1]) / 2
    codes = np.searchsorted(midpoints, np.minimum(np.abs(x), E4M3_MAX))
    return (codes | np.signbit(x) * 128).astype(np.uint8)


def _per_value(scale: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The scales of FP8 blocks, repeated for each value of a block."""
    wide = np.repeat(np.repeat(scale, _BLOCK, axis=-2), _BLOCK, axis=-1)
    return wide[..., :rows, :columns]


def _quantize_q8_0(w: np.ndarray) -> Parts:
    groups = _groups(w, FORMATS["q8_0"].group)
    smallest = np.float16(6e-8)  # a float16 scale must not round to 0
    scale = np.maximum(_scale(np.abs(groups).max(axis=-1), 127).astype(np.float16), smallest)
    codes = np.clip(np.rint(groups / scale.astype(np.float32)[..., None]), -127, 127).astype(np.int8)
    return codes.reshape(*w.shape[:-1], -1)[..., : w.shape[-1]], scale


def _quantize_int4(w: np.ndarray, group: int) -> Parts:
    groups = _groups(w, group)
    scale = to_bf16(_scale(np.abs(groups).max(axis=-1), 7))
    codes = np.clip(np.rint(groups / from_bf16(scale)[..., None]), -8, 7)
    codes = (codes + 8).astype(np.uint8)
    return codes[..., : group // 2] | codes[..., group // 2 :] << 4, scale


def _groups(w: np.ndarray, group: int) -> np.ndarray:
    """`[.. K]` as `[.. groups group]`, padded with zeros."""
    return _padded(w, -1, group).reshape(*w.shape[:-1], -1, group)


def dequantize(parts: Parts, format: str, inputs: int) -> np.ndarray:
    """The float32 values `[.. N K]` that codes and scales represent."""
    if format == "bf16":
        return from_bf16(parts[0])
    if format in blocks.BYTES:
        return blocks.values(parts[0], format)
    codes, scale = parts
    if format == "int8":
        return codes.astype(np.float32) * scale[..., None]
    if format == "fp8_block":
        return e4m3_values()[codes] * _per_value(scale, *codes.shape[-2:])
    if format == "q8_0":
        return codes * np.repeat(scale.astype(np.float32), 32, axis=-1)[..., :inputs]
    values = (int4_codes(codes) - np.float32(8)) * from_bf16(scale)[..., None]
    return values.reshape(*codes.shape[:-2], -1)[..., :inputs]


def part_shapes(format: str, n: int, k: int) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each part of a matrix `[n k]`; raises ValueError if the format cannot have k inputs."""
    if format == "bf16":
        return [("uint16", (n, k))]
    if format == "int8":
        return [("int8", (n, k)), ("float32", (n,))]
    if format == "fp8_block":
        return [("uint8", (n, k)), ("float32", (-(-n // _BLOCK), -(-k // _BLOCK)))]
    if format in blocks.BYTES:
        if k % blocks.VALUES:
            raise ValueError(f"{format}: {k} inputs, must be a multiple of {blocks.VALUES}")
        return [("uint8", (n, k // blocks.VALUES, blocks.BYTES[format]))]
    group = FORMATS[format].group
    groups = -(-k // group)
    if format == "q8_0":
        return [("int8", (n, k)), ("float16", (n, groups))]
    return [("uint8", (n, groups, group // 2)), ("uint16", (n, groups))]


def int4_codes(packed: np.ndarray) -> np.ndarray:
    """Codes 0 to 15 `[.. groups group]`. The low nibbles are a group's first half, the high nibbles its second."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def panel_bytes(format: str, inputs: int) -> tuple[int, int, int]:
    """The steps of K in a panel, the bytes of its codes, and the bytes of the whole panel."""
    f = FORMATS[format]
    padded = _round_up(inputs, max(f.group, f.step))
    steps = padded // f.step
    data = steps * 2 * f.tile_bytes
    groups = padded // f.group if f.group else 1
    return steps, data, data + _round_up(groups * f.scale_bytes, LINE)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pack_experts(matrices: list[Parts], format: str, inputs: int) -> np.ndarray:
    """The panels of all experts, of `[gate, up]` or of `[down]`: bytes `[X panels panel_bytes]`, aligned to pages."""
    experts, outputs = matrices[0][0].shape[:2]
    panels = -(-outputs // (TILE if len(matrices) == 2 else PANEL))
    size = panel_bytes(format, inputs)[2]
    packed = _pages(experts * panels * size).reshape(experts, panels, size)
    # Whether all experts are one, repeated by np.broadcast_to
    repeated = all(part.strides[0] == 0 for parts in matrices for part in parts)
    for e in range(min(experts, 1) if repeated else experts):
        pack([tuple(part[e] for part in parts) for parts in matrices], format, inputs, packed[e])
    if repeated:
        packed[1:] = packed[:1]
    return packed


def pack(matrices: list[Parts], format: str, inputs: int, out: np.ndarray) -> None:
    """Writes one expert's `[N K]` matrix, or its gate and up, to `out`: bytes `[panels panel_bytes]`."""
    steps, data, _ = panel_bytes(format, inputs)
    panels = len(out)
    if format in blocks.BYTES:
        matrices = [blocks.split(parts[0], format) for parts in matrices]
    codes = _in_tiles([parts[0] for parts in matrices], panels)
    if format in _INT4:
        codes = int4_codes(codes).reshape(panels, 2, TILE, -1)
    codes = _padded(codes, -1, FORMATS[format].step * steps)
    rows = codes.reshape(panels, 2, TILE, steps, 16, -1).transpose(0, 3, 1, 4, 2, 5)
    out[:, :data] = _encoded(rows, format).reshape(panels, -1).view(np.uint8)
    if format == "bf16":
        return
    scales = _scale_section(matrices, codes, format)
    end = data + scales.shape[1]
    out[:, data:end] = scales
    out[:, end:] = 0


def _in_tiles(matrices: list[np.ndarray], panels: int) -> np.ndarray:
    """`[N ..]` of one matrix, or of gate and up, as `[panels 2 16 ..]`."""
    rest = matrices[0].shape[1:]
    if len(matrices) == 1:
        return _padded(matrices[0], 0, PANEL).reshape(panels, 2, TILE, *rest)
    return np.stack([_padded(m, 0, TILE).reshape(panels, TILE, *rest) for m in matrices], axis=1)


def unpack(packed: np.ndarray, format: str, outputs: int, inputs: int, pair: bool) -> list[np.ndarray]:
    """One expert's codes `[N K]`: of two matrices if `pair` (gate and up), else of one. Codes of four bits are 0 to 15."""
    steps, data, _ = panel_bytes(format, inputs)
    panels = len(packed)
    rows = _decoded(np.ascontiguousarray(packed[:, :data]), format, (panels, steps, 2))
    rows = rows.reshape(panels, steps, 2, 16, TILE, -1)
    codes = rows.transpose(0, 2, 4, 1, 3, 5).reshape(panels, 2, TILE, -1)
    matrices = [codes[:, 0], codes[:, 1]] if pair else [codes]
    return [m.reshape(-1, m.shape[-1])[:outputs, :inputs] for m in matrices]


def _encoded(rows: np.ndarray, format: str) -> np.ndarray:
    """Codes `[panels steps 2 16 16 values]` in the form and order in which they are stored."""
    lead = rows.shape[:3]
    if format in _NIBBLES:
        nibbles = rows.reshape(*lead, 4, 4, 32).astype(np.uint16)
        return (
            nibbles[..., 0, :] | nibbles[..., 1, :] << 4 | nibbles[..., 2, :] << 8 | nibbles[..., 3, :] << 12
        )
    if format not in _BYTES:
        return np.ascontiguousarray(rows)
    if format == "q8_0":
        rows = _sign_and_magnitude(rows)
    elif format == "q6_k":
        rows = rows.view(np.uint8) + np.uint8(32)
    lines = np.ascontiguousarray(rows.reshape(*lead, 8, 2, 4, 8).swapaxes(-3, -2)).reshape(*lead, 8, LINE)
    return _split_six_bits(lines) if format == "q6_k" else lines


def _decoded(raw: np.ndarray, format: str, lead: tuple[int, int, int]) -> np.ndarray:
    """The inverse of `_encoded`, of any shape that begins with `lead`: panels, steps, tiles."""
    if format == "int8":
        return raw.view(np.int8)
    if format == "bf16":
        return raw.view(np.uint16)
    if format in _NIBBLES:
        words = raw.view(np.uint16).reshape(*lead, 4, 1, 32)
        return words >> np.arange(0, 16, 4, dtype=np.uint16)[:, None] & np.uint16(15)
    lines = _joined_six_bits(raw.reshape(*lead, 6, LINE)) if format == "q6_k" else raw
    rows = lines.reshape(*lead, 8, 4, 2, 8).swapaxes(-3, -2)
    if format == "q8_0":
        return _signed(rows)
    if format == "q6_k":
        return (rows - np.uint8(32)).view(np.int8)
    return rows


def _sign_and_magnitude(codes: np.ndarray) -> np.ndarray:
    """Bytes of int8 codes; -128 is the negative zero."""
    sizes = np.abs(codes.astype(np.int16)).astype(np.uint8)
    return sizes | (codes < 0).astype(np.uint8) << 7


def _signed(bytes_: np.ndarray) -> np.ndarray:
    """The inverse of `_sign_and_magnitude`."""
    sizes = np.where(bytes_ == 128, 128, bytes_ & 127).astype(np.int16)
    return np.where(bytes_ >= 128, -sizes, sizes).astype(np.int8)


def _split_six_bits(lines: np.ndarray) -> np.ndarray:
    """Eight lines of six bits as four lines of their low four bits and two lines of their high two."""
    high = (lines >> 4).reshape(*lines.shape[:-2], 2, 4, LINE) << np.array([[0], [2], [4], [6]], np.uint8)
    low = lines[..., 0::2, :] & 15 | lines[..., 1::2, :] << 4
    return np.concatenate([low, np.bitwise_or.reduce(high, axis=-2)], axis=-2)


def _joined_six_bits(lines: np.ndarray) -> np.ndarray:
    """The inverse of `_split_six_bits`."""
    low = lines[..., :4, None, :] >> np.array([[0], [4]], np.uint8) & np.uint8(15)
    high = lines[..., 4:, None, :] >> np.array([[0], [2], [4], [6]], np.uint8) & np.uint8(3)
    whole = *lines.shape[:-2], 8, LINE
    return low.reshape(whole) | high.reshape(whole) << 4


def _scale_section(matrices: list[Parts], codes: np.ndarray, format: str) -> np.ndarray:
    """The scales of each panel, as bytes `[panels bytes]`; `codes` are `[panels 2 16 K]`."""
    panels = len(codes)
    if format == "fp8_block":
        return _fp8_scales(matrices, panels)
    scales = _in_tiles([parts[1] for parts in matrices], panels)
    if format == "int8":
        return _int8_scales(scales, codes)
    if format in blocks.BYTES:
        return _block_scales(scales.reshape(panels, PANEL, codes.shape[-1] // blocks.VALUES, -1), format)
    by_group = np.ascontiguousarray(scales.view(np.uint16).transpose(0, 3, 1, 2))
    return by_group.reshape(panels, -1).view(np.uint8)


def _int8_scales(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """A scale per output, then 128 times the sum of its codes."""
    panels = len(codes)
    sums = codes.astype(np.int32).sum(axis=-1, dtype=np.int32) * np.int32(128)
    sections = scales.reshape(panels, PANEL).astype(np.float32), sums.reshape(panels, PANEL)
    return np.concatenate([section.view(np.uint8) for section in sections], axis=1)


def _fp8_scales(matrices: list[Parts], panels: int) -> np.ndarray:
    """A scale per tile and 128 inputs: all 16 outputs of a tile are in one block of 128."""
    by_tile = []
    for codes, scale in matrices:
        tiles = -(-len(codes) // TILE)
        by_tile.append(np.repeat(scale, _BLOCK // TILE, axis=0)[:tiles])
    if len(by_tile) == 2:
        each = np.stack(by_tile, axis=1)
    else:
        each = _padded(by_tile[0], 0, 2).reshape(panels, 2, -1)
    return np.ascontiguousarray(each.transpose(0, 2, 1), np.float32).reshape(panels, -1).view(np.uint8)


def _block_scales(rest: np.ndarray, format: str) -> np.ndarray:
    """The bytes of GGUF blocks without their codes, `[panels 32 blocks bytes]`, by block: d (and dmin), then the other bytes."""
    panels, _, count, _ = rest.shape
    halves = 4 if format == "q4_k" else 2  # bytes of d, or of d and dmin
    d = rest[..., :halves].reshape(panels, PANEL, count, -1, 2).transpose(0, 2, 3, 1, 4)
    others = rest[..., halves:].transpose(0, 2, 3, 1)
    sections = [section.reshape(panels, count, -1) for section in (d, others)]
    return np.concatenate(sections, axis=-1).reshape(panels, -1)


def _padded(x: np.ndarray, axis: int, multiple: int) -> np.ndarray:
    missing = -x.shape[axis] % multiple
    if not missing:
        return x
    fill = [(0, 0)] * x.ndim
    fill[axis] = (0, missing)
    return np.pad(x, fill)


def _pages(size: int) -> np.ndarray:
    """Zeroed memory, in huge pages where the system has them: the kernels' prefetching stops at the end of a page.

    The mapping is private: Linux treats a shared one as a file, which gets huge pages only if the system is configured so."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        memory = mmap.mmap(-1, max(size, 1), **private)
    except OSError as error:
        raise MemoryError(f"{size:,} bytes of packed weights: {error.strerror}") from None
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, size)


def _scale(extreme: np.ndarray, code: float) -> np.ndarray:
    """The scale by which `extreme` gets the code `code`; 1 for zeros."""
    if not np.isfinite(extreme).all():
        raise ValueError("weights that are not finite cannot be quantised")
    return np.where(extreme == 0, 1, extreme / np.float32(code)).astype(np.float32)
