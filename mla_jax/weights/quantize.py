"""Quantising on the host, in numpy: the parts of a QTensor of each of our own formats. Knows no files and no devices.

Dequantising belongs to the QTensor's format. Of GGUF's types Q4_K alone is written."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Float

from mla_jax.base.errors import BadFile, Unsupported, printable
from mla_jax.base.qtensor import BY_COLUMN, QTensor, format_of, validated
from mla_jax.base.quantization import Quantization
from mla_jax.offload.pack import gguf_blocks_of

E4M3_MAX = 448.0

Matrices = Float[np.ndarray, "*X N K"]


def fp8_blocks(
    w: Matrices, block: tuple[int, int] = (128, 128), ue8m0: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 weights `[*X N K]` and a float32 scale per block, `[*X ceil(N/128) ceil(K/128)]`: their product approximates `w`.

    `ue8m0` rounds scales up to powers of two. A block of zeros has the scale 1; the last blocks may be smaller.
    Raises BadFile if a weight is not finite."""
    w = np.asarray(w, np.float32)
    scale = _scale(_block_amax(w, block), E4M3_MAX)
    if ue8m0:
        scale = _power_of_two_above(scale)
    scaled = w / _spread(scale, block, w.shape)
    # Beyond 448 the cast gives NaN
    return np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn), scale


def _scale(extreme: np.ndarray, code: float) -> np.ndarray:
    """`extreme / code`, but 1 for zeros, and never denormal: XLA flushes denormals to zero."""
    if not np.isfinite(extreme).all():
        raise BadFile(
            "weights that are not finite cannot be quantised", "found NaN or an infinity among them"
        )
    scale = extreme / np.float32(code)
    tiny = np.finfo(np.float32).tiny
    normal = np.where(np.abs(scale) < tiny, np.copysign(tiny, scale), scale)
    return np.where(scale == 0, np.float32(1), normal)


def _block_amax(w: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    rows = np.maximum.reduceat(np.abs(w), np.arange(0, w.shape[-2], block[0]), axis=-2)
    return np.maximum.reduceat(rows, np.arange(0, w.shape[-1], block[1]), axis=-1)


def _spread(scale: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """Each block's scale, repeated for every element of the block."""
    wide = np.repeat(np.repeat(scale, block[0], axis=-2), block[1], axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def _power_of_two_above(scale: np.ndarray) -> np.ndarray:
    mantissa, exponent = np.frexp(scale)  # exact, unlike a logarithm
    return np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).astype(np.float32)


def fp8_rows(w: Matrices) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 weights `[*X N K]` and a float32 scale per row, `[*X N]`; raises BadFile if a weight is not finite."""
    codes, scale = fp8_blocks(w, (1, w.shape[-1]))
    return codes, scale[..., 0]


def fp8_columns(w: Matrices, columns: int, ue8m0: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 weights `[*X N K]` and a float32 scale per column, `[*X K]`, the same for as many `columns` as a block has.

    Raises BadFile if a weight is not finite."""
    codes, scale = fp8_blocks(w, (w.shape[-2], columns), ue8m0)
    return codes, np.repeat(scale[..., 0, :], columns, axis=-1)[..., : w.shape[-1]]


def int8_rows(w: Matrices) -> tuple[np.ndarray, np.ndarray]:
    """Signed bytes `[*X N K]`, -127 to 127, and a float32 scale per row, `[*X N]`; raises BadFile if a weight is not finite."""
    w = np.asarray(w, np.float32)
    scale = _scale(np.abs(w).max(axis=-1), 127)
    return np.clip(np.rint(w / scale[..., None]), -127, 127).astype(np.int8), scale


def int4_groups(w: Matrices, group: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of two codes `[*X N groups group/2]` and a bfloat16 scale per group, `[*X N groups]`.

    Each group takes the scale with the smaller squared error of two: codes -7 to 7, or -8 to 7 with the extreme at -8. Raises
    BadFile if a weight is not finite."""
    w = np.asarray(w, np.float32)
    filler = np.zeros((*w.shape[:-1], -w.shape[-1] % group), np.float32)
    w = np.concatenate([w, filler], axis=-1).reshape(*w.shape[:-1], -1, group)
    extreme = np.take_along_axis(w, np.abs(w).argmax(axis=-1, keepdims=True), axis=-1)[..., 0]
    codes7, scale7, error7 = _int4(w, _scale(np.abs(extreme), 7))
    codes8, scale8, error8 = _int4(w, _scale(extreme, -8))
    better = error8 < error7
    codes = np.where(better[..., None], codes8, codes7)
    scale = np.where(better, scale8, scale7)
    return codes[..., : group // 2] | codes[..., group // 2 :] << 4, scale


def _int4(w: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes plus 8, the scale as bfloat16, and the squared error of each group."""
    scale = scale.astype(ml_dtypes.bfloat16)
    ratio = w / scale.astype(np.float32)[..., None]
    codes = np.clip(np.rint(ratio), -8, 7)
    error = np.square(codes - ratio).sum(axis=-1) * np.square(scale.astype(np.float64))
    return (codes + 8).astype(np.uint8), scale, error


def q4_k_blocks(w: Matrices) -> tuple[np.ndarray]:
    """GGUF's blocks `[*X N K/256 144]`. Raises BadFile if a weight is not finite, or K no multiple of 256."""
    try:
        return (gguf_blocks_of(w, "q4_k"),)
    except ValueError as e:
        raise BadFile("weights cannot be quantised", str(e)) from e


QUANTIZERS = {
    "fp8_block": fp8_blocks,
    "int8": int8_rows,
    "int4_g32": partial(int4_groups, group=32),
    "int4_g128": partial(int4_groups, group=128),
}
QUANTIZERS_OF_BLOCKS = {"Q4_K": q4_k_blocks}  # of rows in whole blocks
Quantizer = Callable[[Matrices], tuple[np.ndarray, ...]]


def quantizer_of(format: str, quantization: Quantization | None = None) -> Quantizer:
    """Makes the parts of a QTensor of `format`; in FP8 as a checkpoint with this `quantization` has them.

    Raises Unsupported for formats that are only read."""
    known = QUANTIZERS | QUANTIZERS_OF_BLOCKS
    found = quantization or Quantization()
    ue8m0 = found.scale_fmt == "ue8m0"
    if format.startswith("fp8_block"):
        return partial(fp8_blocks, block=format_of(format).block, ue8m0=ue8m0)
    if format == "fp8_row":
        return fp8_rows
    if format == BY_COLUMN:
        return partial(fp8_columns, columns=block_columns(quantization), ue8m0=ue8m0)
    if format not in known:
        raise Unsupported(
            f"quantising to {printable(format)} is not supported",
            "known: " + ", ".join((*known, "fp8_row", BY_COLUMN)),
        )
    return known[format]


def block_columns(quantization: Quantization | None) -> int:
    """Columns that share a scale in blocks of FP8, such as kv_b_proj has."""
    schemes = (quantization or Quantization()).schemes
    blocks = (scheme.block for scheme in schemes if all(scheme.block))
    return next(blocks, Quantization().schemes[0].block)[1]


def quantize(w: Matrices, format: str) -> QTensor:
    """`w` as a QTensor on the default device; raises Unsupported for formats that are only read."""
    parts = tuple(jnp.asarray(part) for part in quantizer_of(format)(w))
    return validated(QTensor(format, parts, tuple(w.shape)))
