"""Unpacks fetched experts on a device: the inverse of layout.py in JAX, inside a program.

    gate, up, down = unpack_layer(layer, *ffi.fetch(layer, first, count))

It uses only reshapes, transposes and bit operations, which XLA fuses into few passes. A matrix is a tuple of parts `[X N ..]`,
bit for bit those that `Experts` packed. bf16 and E4M3 have their own dtypes; Q8_0, Q4_K and Q6_K are GGUF blocks. In cpu_experts
only this file and ffi.py import jax."""

from functools import reduce
from operator import or_

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from cpu_experts import Experts
from cpu_experts.layout import FORMATS, LINE, PANEL, TILE, panel_bytes

Parts = tuple[jax.Array, ...]


def unpack_layer(experts: Experts, gate_up: jax.Array, down: jax.Array) -> list[Parts]:
    """gate, up and down of the experts of a layer that were fetched."""
    model, width = experts.model, experts.width
    pair = unpack(gate_up, experts.precision, width, model, pair=True)
    return [*pair, *unpack(down, experts.down_precision, model, width, pair=False)]


def unpack(packed: jax.Array, precision: str, outputs: int, inputs: int, pair: bool) -> list[Parts]:
    """The matrices `[X N K]` of panels `[X panels bytes]`: two if `pair` (gate and up), else one.

    In int4 and Q8_0 a row's last group is complete, also if K ends within it: the values after K are as packed, or zeros."""
    steps, data, _ = panel_bytes(precision, inputs)
    parts = _PARTS[precision](packed[..., :data], packed[..., data:], steps)  # [X panels 2 16 ..]
    halves = [[part[:, :, i] for part in parts] for i in range(2)] if pair else [parts]
    tails = [part.shape[4:] for part in parts]
    found = []
    for half in halves:
        codes, *scales = (
            p.reshape(len(p), -1, *tail)[:, :outputs] for p, tail in zip(half, tails, strict=True)
        )
        if precision in ("bf16", "int8", "fp8_block"):
            codes = codes[..., :inputs]
        if precision == "fp8_block":  # 128 rows share a scale
            scales = [scale[:, ::128] for scale in scales]
        found.append((codes, *scales))
    return found


# One function per format: bytes `[X panels bytes]` of codes and of scales to the parts `[X panels 2 16 ..]`, by tile and output.


def _bf16(codes: jax.Array, _: jax.Array, steps: int) -> Parts:
    return (jax.lax.bitcast_convert_type(_by_output(_words(codes, np.uint16), steps, 2), jnp.bfloat16),)


def _int8(codes: jax.Array, scales: jax.Array, steps: int) -> Parts:
    scale = _floats(scales[..., : 4 * PANEL]).reshape(*codes.shape[:2], 2, TILE)
    return jax.lax.bitcast_convert_type(_by_output(codes, steps, 4), jnp.int8), scale


def _fp8(codes: jax.Array, scales: jax.Array, steps: int) -> Parts:
    groups = steps * FORMATS["fp8_block"].step // 128
    scale = _floats(scales[..., : 8 * groups]).reshape(*codes.shape[:2], groups, 2, 1)
    scale = scale.transpose(0, 1, 3, 4, 2)
    weight = _by_output(_from_lines(codes), steps, 2)
    values = jax.lax.bitcast_convert_type(weight, jnp.float8_e4m3fn)
    return values, jnp.broadcast_to(scale, (*weight.shape[:4], groups))


def _int4(codes: jax.Array, scales: jax.Array, steps: int, group: int) -> Parts:
    each = _by_output(_nibbles(codes), steps, 2)
    each = each.reshape(*each.shape[:4], -1, group)
    scale = _of_groups(_words(scales, np.uint16), each.shape[4], 1)[..., 0]
    bytes_ = each[..., : group // 2] | each[..., group // 2 :] << 4
    return bytes_, jax.lax.bitcast_convert_type(scale, jnp.bfloat16)


def _q8_0(codes: jax.Array, scales: jax.Array, steps: int) -> Parts:
    """Signs and magnitudes become int8 again, in bytes."""
    signed = jnp.where(codes > 128, np.uint8(128) - codes, codes)
    each = _by_output(_from_lines(signed), steps, 2)
    each = each.reshape(*each.shape[:4], -1, 32)
    return (jnp.concatenate([_of_groups(scales, each.shape[4], 2), each], axis=-1),)


def _q4_k(codes: jax.Array, scales: jax.Array, steps: int) -> Parts:
    each = _by_output(_nibbles(codes), steps, 2)
    quarters = each.reshape(*each.shape[:4], -1, 4, 2, 32)
    packed = quarters[..., 0, :] | quarters[..., 1, :] << 4
    d, rest = _of_blocks(scales, quarters.shape[4], 4, 12)
    return (jnp.concatenate([d, rest, packed.reshape(*packed.shape[:5], -1)], axis=-1),)


def _q6_k(codes: jax.Array, scales: jax.Array, steps: int) -> Parts:
    each = _by_output(_from_lines(_joined(codes)), steps, 2)
    halves = each.reshape(*each.shape[:4], -1, 2, 4, 32)
    lead = halves.shape[:5]
    wide = halves.reshape(*halves.shape[:6], 2, 64)
    low = (wide[..., 0, :] & 15 | wide[..., 1, :] << 4).reshape(*lead, -1)
    high = reduce(or_, (halves[..., i, :] >> 4 << np.uint8(2 * i) for i in range(4))).reshape(*lead, -1)
    d, rest = _of_blocks(scales, halves.shape[4], 2, 16)
    return (jnp.concatenate([low, high, rest, d], axis=-1),)


_PARTS = {
    "bf16": _bf16,
    "int8": _int8,
    "int4_g32": lambda *given: _int4(*given, group=32),
    "int4_g128": lambda *given: _int4(*given, group=128),
    "fp8_block": _fp8,
    "q8_0": _q8_0,
    "q4_k": _q4_k,
    "q6_k": _q6_k,
}


def _by_output(values: jax.Array, steps: int, together: int) -> jax.Array:
    """Codes in the order of their bytes, by output: `[X panels 2 16 K]`."""
    lead = values.shape[:2]
    rows = values.reshape(*lead, steps, 2, 16, TILE, together)
    return rows.transpose(0, 1, 3, 5, 2, 4, 6).reshape(*lead, 2, TILE, -1)


def _from_lines(codes: jax.Array) -> jax.Array:
    """The rows one after the other, of lines that interleave two rows, eight codes at a time."""
    return codes.reshape(*codes.shape[:2], -1, 4, 2, 8).swapaxes(-3, -2)


def _nibbles(codes: jax.Array) -> jax.Array:
    """The codes of 16-bit words: the lowest nibbles of a line of 32 words, then the next ones."""
    lines = _words(codes, np.uint16).reshape(*codes.shape[:2], -1, 1, 32)
    return (lines >> np.arange(0, 16, 4, dtype=np.uint16)[:, None] & np.uint16(15)).astype(jnp.uint8)


def _joined(codes: jax.Array) -> jax.Array:
    """Eight lines of six bits, of four lines of their low four bits and two lines of their high two."""
    lines = codes.reshape(*codes.shape[:2], -1, 6, LINE)
    low = lines[..., :4, None, :] >> np.array([[0], [4]], np.uint8) & np.uint8(15)
    high = lines[..., 4:, None, :] >> np.array([[0], [2], [4], [6]], np.uint8) & np.uint8(3)
    whole = *lines.shape[:-2], 8, LINE
    return low.reshape(whole) | high.reshape(whole) << 4


def _of_groups(scales: jax.Array, groups: int, size: int) -> jax.Array:
    """`size` values for each output in each group of inputs: `[X panels 2 16 groups size]`."""
    each = scales[..., : groups * PANEL * size].reshape(*scales.shape[:2], groups, 2, TILE, size)
    return each.transpose(0, 1, 3, 4, 2, 5)


def _of_blocks(scales: jax.Array, groups: int, halves: int, rest: int) -> Parts:
    """The bytes of GGUF blocks apart from their codes, `[X panels 2 16 blocks bytes]`: `halves` of float16, then the `rest`."""
    lead = *scales.shape[:2], groups
    each = scales[..., : groups * PANEL * (halves + rest)].reshape(*lead, -1)
    d = each[..., : PANEL * halves].reshape(*lead, halves // 2, 2, TILE, 2).transpose(0, 1, 4, 5, 2, 3, 6)
    others = each[..., PANEL * halves :].reshape(*lead, rest, 2, TILE).transpose(0, 1, 4, 5, 2, 3)
    return d.reshape(*others.shape[:5], halves), others


def _floats(raw: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(_words(raw, np.uint32), jnp.float32)


def _words(raw: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Little-endian integers of bytes, by arithmetic: XLA does not fuse a bitcast that changes the number of elements."""
    size = np.dtype(dtype).itemsize
    return reduce(or_, (raw[..., i::size].astype(dtype) << np.array(8 * i, dtype) for i in range(size)))
