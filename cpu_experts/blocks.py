"""GGUF blocks of Q4_K and Q6_K: their bytes as values, and floats as blocks. Knows numpy only.

    q4_k   144 bytes   d and dmin as float16; 12 bytes with eight scales and eight minima of six bits; 256 codes of four bits
    q6_k   210 bytes   the low four bits of 256 codes; their high two; 16 signed scales of a byte; d as float16

A block holds 256 values. In Q4_K a value is d * scale * code - dmin * minimum, with a scale and a minimum per 32 values. In Q6_K
it is d * scale * code, with a scale per 16 values."""

import numpy as np

VALUES = 256
BYTES = {"q4_k": 144, "q6_k": 210}


def split(blocks: np.ndarray, format: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[.. K]` of blocks `[.. K/256 bytes]`: 0 to 15 (Q4_K) or -32 to 31; and their other bytes, d (and dmin) first."""
    lead = blocks.shape[:-1]
    if format == "q4_k":
        codes = _fields(blocks[..., 16:].reshape(*lead, 4, 1, 32), 4)
        rest = blocks[..., :16]
    else:
        low = _fields(blocks[..., :128].reshape(*lead, 2, 1, 64), 4).reshape(*lead, 2, 4, 32)
        high = _fields(blocks[..., 128:192].reshape(*lead, 2, 1, 32), 2)
        codes = ((low | high << 4) - np.uint8(32)).view(np.int8)
        rest = np.concatenate([blocks[..., 208:], blocks[..., 192:208]], axis=-1)
    return codes.reshape(*lead[:-1], -1), rest


def values(blocks: np.ndarray, format: str) -> np.ndarray:
    """The float32 values `[.. K]` of blocks."""
    codes, rest = split(blocks, format)
    d = _half(rest[..., :2])
    if format == "q4_k":
        scales, minima = six_bits(rest[..., 4:])
        dmin = _half(rest[..., 2:4])
        groups = codes.reshape(*scales.shape, 32) * (d * scales)[..., None] - (dmin * minima)[..., None]
    else:
        scales = rest[..., 2:].view(np.int8)
        groups = codes.reshape(*scales.shape, 16) * (d * scales)[..., None]
    return groups.reshape(codes.shape)


def six_bits(twelve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight minima. Of the last four, the third four bytes have the low bits, the first eight the high bits."""
    first, second, third = (twelve[..., i : i + 4] for i in (0, 4, 8))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return scales, minima


def quantize(w: np.ndarray, format: str) -> np.ndarray:
    """Blocks `[.. K/256 bytes]` of floats `[.. K]`. Scales come from each group's extremes; llama.cpp searches better ones."""
    if w.shape[-1] % VALUES:
        raise ValueError(f"{format}: {w.shape[-1]} inputs, must be a multiple of {VALUES}")
    w = w.astype(np.float32)
    if not np.isfinite(w).all():
        raise ValueError("weights that are not finite cannot be quantised")
    if format == "q4_k":
        return _q4_k(w.reshape(*w.shape[:-1], -1, 8, 32))
    return _q6_k(w.reshape(*w.shape[:-1], -1, 16, 16))


def q8_0_parts(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[.. K]` and float16 scales `[.. K/32]` of Q8_0 blocks `[.. K/32 34]`."""
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8).reshape(*blocks.shape[:-2], -1)
    return codes, np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]


def _q4_k(groups: np.ndarray) -> np.ndarray:
    """Q4_K blocks of groups `[.. blocks 8 32]`."""
    least = np.minimum(groups.min(axis=-1), 0)
    most = groups.max(axis=-1).clip(0)
    d, scales = _scaled((most - least) / 15, 63)
    dmin, minima = _scaled(-least, 63)
    above = groups + (_half(dmin) * minima)[..., None]
    codes = _codes(above, _half(d) * scales).clip(0, 15).astype(np.uint8)
    low = codes[..., 0::2, :].reshape(*codes.shape[:-2], -1)
    high = codes[..., 1::2, :].reshape(*codes.shape[:-2], -1)
    return np.concatenate([d, dmin, _twelve(scales, minima), low | high << 4], axis=-1)


def _twelve(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """The inverse of `six_bits`."""
    first = scales[..., :4] | scales[..., 4:] >> 4 << 6
    second = minima[..., :4] | minima[..., 4:] >> 4 << 6
    third = scales[..., 4:] & 15 | minima[..., 4:] << 4
    return np.concatenate([first, second, third], axis=-1)


def _q6_k(groups: np.ndarray) -> np.ndarray:
    """Q6_K blocks of groups `[.. blocks 16 16]`."""
    d, scales = _scaled(np.abs(groups).max(axis=-1) / 31, 127)
    codes = (_codes(groups, _half(d) * scales).clip(-32, 31) + 32).astype(np.uint8)
    quarters = codes.reshape(*d.shape[:-1], 2, 4, 32)
    low = quarters[..., :2, :] & 15 | quarters[..., 2:, :] << 4
    high = np.bitwise_or.reduce(quarters >> 4 << np.array([[0], [2], [4], [6]], np.uint8), axis=-2)
    bits = [part.reshape(*d.shape[:-1], -1) for part in (low, high)]
    return np.concatenate([*bits, scales, d], axis=-1)


def _scaled(extremes: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """A float16 per block, as bytes, and an integer up to `most` per group: their product is nearest to the group's extreme."""
    half = np.minimum(extremes.max(axis=-1, keepdims=True) / most, 65504).astype(np.float16)
    integers = _codes(extremes[..., None], half.astype(np.float32))[..., 0].clip(0, most)
    return half.view(np.uint8), integers.astype(np.uint8)


def _codes(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """`[.. groups values]` divided by the scale of their group, rounded; 0 where the scale is 0."""
    return np.rint(x / np.where(scale == 0, np.inf, scale)[..., None])


def _fields(packed: np.ndarray, bits: int) -> np.ndarray:
    """The bit fields of bytes, lowest first, along the axis before the last, which has the size 1."""
    return packed >> np.arange(0, 8, bits, dtype=np.uint8)[:, None] & np.uint8((1 << bits) - 1)


def _half(two: np.ndarray) -> np.ndarray:
    """Pairs of bytes as float16 values, in float32."""
    return np.ascontiguousarray(two).view(np.float16).astype(np.float32)
