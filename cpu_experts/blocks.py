"""GGUF's blocks: what the bytes of Q4_K and Q6_K mean, and floats as such blocks. Knows numpy only.

    q4_k   144 bytes   d and dmin as float16; 12 bytes with eight scales and eight minima of six bits; 256 codes of four bits
    q6_k   210 bytes   the low four bits of 256 codes; their high two; 16 signed scales of a byte; d as float16

They are of 256 values. A value is d * scale * code - dmin * minimum, of 32 values a scale and a minimum; or d * scale * code, of
16 values a scale."""

import numpy as np

VALUES = 256
BYTES = {"q4_k": 144, "q6_k": 210}


def split(blocks: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[.. K]` of blocks `[.. K/256 bytes]`, 0 to 15 or -32 to 31; and what else a block has, d (and dmin) first."""
    lead = blocks.shape[:-1]
    if format == "q4_k":
        codes = _fields(blocks[..., 16:].reshape(*lead, 4, 1, 32), 4)
        rest = blocks[..., :16]
    else:
        low = _fields(blocks[..., :128].reshape(*lead, 2, 1, 64), 4).reshape(*lead, 2, 4, 32)
        codes = ((low | _fields(blocks[..., 128:192].reshape(*lead, 2, 1, 32), 2) << 4) - np.uint8(32)).view(np.int8)
        rest = np.concatenate([blocks[..., 208:], blocks[..., 192:208]], axis=-1)
    return codes.reshape(*lead[:-1], -1), rest


def values(blocks: np.ndarray, format: str) -> np.ndarray:
    """Float32 `[.. K]`."""
    codes, rest = split(blocks, format)
    d = _half(rest[..., :2])
    if format == "q4_k":
        scales, minima = six_bits(rest[..., 4:])
        each = codes.reshape(*scales.shape, 32) * (d * scales)[..., None] - (_half(rest[..., 2:4]) * minima)[..., None]
    else:
        scales = rest[..., 2:].view(np.int8)
        each = codes.reshape(*scales.shape, 16) * (d * scales)[..., None]
    return each.reshape(codes.shape)


def six_bits(twelve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima: the last four have their low bits in the last bytes, the high ones above the first four."""
    first, second, third = (twelve[..., i : i + 4] for i in (0, 4, 8))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    return scales, np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)


def quantize(w: np.ndarray, format: str) -> np.ndarray:
    """Blocks `[.. K/256 bytes]` of floats `[.. K]`, to nearest between each group's extremes; llama.cpp's search finds better."""
    if w.shape[-1] % VALUES:
        raise ValueError(f"{format}: {w.shape[-1]} inputs, must be a multiple of {VALUES}")
    groups = w.astype(np.float32).reshape(*w.shape[:-1], -1, 8 if format == "q4_k" else 16, 32 if format == "q4_k" else 16)
    if not np.isfinite(groups).all():
        raise ValueError("weights that are not finite cannot be quantised")
    return (_q4_k if format == "q4_k" else _q6_k)(groups)


def q8_0_parts(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[.. K]` and float16 scales `[.. K/32]` of Q8_0's blocks `[.. K/32 34]`."""
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(*blocks.shape[:-2], -1)
    return codes, np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]


def _q4_k(groups: np.ndarray) -> np.ndarray:
    least = np.minimum(groups.min(axis=-1), 0)
    d, scales = _scaled((groups.max(axis=-1).clip(0) - least) / 15, 63)
    dmin, minima = _scaled(-least, 63)
    above = groups + (_half(dmin) * minima)[..., None]
    codes = _codes(above, _half(d) * scales).clip(0, 15).astype(np.uint8)
    low, high = (codes[..., i::2, :].reshape(*codes.shape[:-2], -1) for i in (0, 1))
    first, second = (n[..., :4] | n[..., 4:] >> 4 << 6 for n in (scales, minima))
    third = scales[..., 4:] & 15 | minima[..., 4:] << 4
    return np.concatenate([d, dmin, first, second, third, low | high << 4], axis=-1)


def _q6_k(groups: np.ndarray) -> np.ndarray:
    d, scales = _scaled(np.abs(groups).max(axis=-1) / 31, 127)
    codes = (_codes(groups, _half(d) * scales).clip(-32, 31) + 32).astype(np.uint8)
    quarters = codes.reshape(*d.shape[:-1], 2, 4, 32)
    low = quarters[..., :2, :] & 15 | quarters[..., 2:, :] << 4
    high = np.bitwise_or.reduce(quarters >> 4 << np.array([[0], [2], [4], [6]], np.uint8), axis=-2)
    return np.concatenate([*(part.reshape(*d.shape[:-1], -1) for part in (low, high)), scales, d], axis=-1)


def _scaled(extremes: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """A block's float16, as bytes, and of each group the integer up to `most` times which it is next to the extreme."""
    half = np.minimum(extremes.max(axis=-1, keepdims=True) / most, 65504).astype(np.float16)
    return half.view(np.uint8), _codes(extremes[..., None], half.astype(np.float32))[..., 0].clip(0, most).astype(np.uint8)


def _codes(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`[.. groups values]` in whole scales; 0 of nothing."""
    return np.rint(x / np.where(scale == 0, np.inf, scale)[..., None])


def _fields(packed: np.ndarray, bits: int) -> np.ndarray:
    """The fields of bytes along their axis of one, the lowest first."""
    return packed >> np.arange(0, 8, bits, dtype=np.uint8)[:, None] & np.uint8((1 << bits) - 1)


def _half(two: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(two).view(np.float16).astype(np.float32)
