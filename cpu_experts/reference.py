"""The specification of an MoE layer, in numpy: what every kernel must compute, and how far each precision may be from it.

Weights are what their codes and scales stand for. Rows are bfloat16; where they meet int8 weights they are int8 instead, with a
scale a row. What SwiGLU gives is bfloat16, before it becomes int8, too. All sums are float64 here."""

import numpy as np

from cpu_experts.layout import Parts, dequantize, from_bf16, to_bf16

# How far a kernel's output may be from here, as norms. What differs are float32 sums in another order, a hidden value that rounds
# to its other neighbour, and for many rows products of code and scale as bf16. Codes of four bits meet few rows as int8 with a
# scale for every 32 numbers (1 %; AVX-512 and AMX), and become int8 themselves for many, whose rows are int8, too, but for a few
# numbers ten times as large as the others. That is 2 to 4 % where four bits themselves cost 14 to 17; with weights of an input 30
# to 100 times as large as those of the others 10 to 27 %, four bits 13 to 34.
FOUR_BITS = ("int4_g32", "int4_g128", "q4_k")
FEW = dict.fromkeys(("fp8_block", "q8_0", "q6_k"), 1.2e-2) | dict.fromkeys(FOUR_BITS, 2e-2)
BOUNDS = {"bf16": 4e-3, "int8": 1e-2} | FEW | dict.fromkeys(FOUR_BITS, 5e-2)


def rounded(x: np.ndarray, format: str) -> np.ndarray:
    """Rows as the kernels take them, as the float64 values they stand for."""
    if format != "int8":
        return from_bf16(to_bf16(x)).astype(np.float64)
    amax = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32)
    zeros = amax < 1e-36
    codes = np.rint(x * np.where(zeros, 0, np.float32(127) / np.where(zeros, 1, amax)).astype(np.float32))
    return codes.astype(np.float64) * (amax / np.float32(127))


def expert(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, formats: tuple[str, str]) -> np.ndarray:
    """One expert on its rows `[n D]`: `down (silu(gate x) * up x)`; the formats are of gate and up, and of down."""
    x = rounded(x, formats[0])
    g, u = x @ gate.T.astype(np.float64), x @ up.T.astype(np.float64)
    with np.errstate(over="ignore"):
        hidden = g / (1 + np.exp(-g)) * u
    return rounded(from_bf16(to_bf16(hidden.astype(np.float32))), formats[1]) @ down.T.astype(np.float64)


def forward(
    x: np.ndarray,
    topk_ids: np.ndarray,
    topk_weights: np.ndarray,
    gate: Parts,
    up: Parts,
    down: Parts,
    format: str,
    down_format: str | None = None,
) -> np.ndarray:
    """Rows `[n D]` through their chosen experts; the id X stands for none."""
    experts, width, model = *gate[0].shape[:2], x.shape[-1]
    formats = (format, down_format or format)
    matrices = ((gate, format, model), (up, format, model), (down, formats[1], width))
    out = np.zeros(x.shape, np.float64)
    for e in range(experts):
        token, k = np.nonzero(topk_ids == e)
        if len(token):
            one = [dequantize(tuple(part[e] for part in parts), f, inputs) for parts, f, inputs in matrices]
            each = expert(x[token], one[0], one[1], one[2], formats)
            np.add.at(out, token, topk_weights[token, k, None].astype(np.float64) * each)
    return out.astype(np.float32)
