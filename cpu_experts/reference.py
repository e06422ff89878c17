"""The specification of an MoE layer in numpy, and the error bound of each precision.

Weights are the values of their codes and scales. Rows (activations) are rounded to bfloat16. For int8 weights they are quantised
to int8 instead, with a scale per row. The output of SwiGLU is rounded to bfloat16, also before it is quantised to int8. All sums
are float64 here."""

import numpy as np

from cpu_experts.layout import Parts, dequantize, from_bf16, to_bf16

# The most that a kernel's output may differ: the norm of the difference, relative to the norm of the output. Its causes are
# - float32 sums in another order, and hidden values that round to the other neighbour;
# - for many rows: the product of code and scale, rounded to bf16;
# - for four bits and few rows (AVX-512, AMX): rows as int8 with a scale per 32 values, 1 %;
# - for four bits and many rows: codes converted to int8, and rows as int8 except for outliers, ten times as large as the others.
#   This adds 2 to 4 %, where four bits alone cost 14 to 17 %. If the weights of one input are 30 to 100 times as large as the
#   others, it adds 10 to 27 %, and four bits alone cost 13 to 34 %.
FOUR_BITS = ("int4_g32", "int4_g128", "q4_k")
FEW = dict.fromkeys(("fp8_block", "q8_0", "q6_k"), 1.2e-2) | dict.fromkeys(FOUR_BITS, 2e-2)
BOUNDS = {"bf16": 4e-3, "int8": 1e-2} | FEW | dict.fromkeys(FOUR_BITS, 5e-2)


def rounded(x: np.ndarray, format: str) -> np.ndarray:
    """The float64 values of rows after the rounding or quantisation that the kernels apply to them."""
    if format != "int8":
        return from_bf16(to_bf16(x)).astype(np.float64)
    amax = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32)
    zeros = amax < 1e-36
    codes = np.rint(x * np.where(zeros, 0, np.float32(127) / np.where(zeros, 1, amax)).astype(np.float32))
    return codes.astype(np.float64) * (amax / np.float32(127))


def expert(
    x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, formats: tuple[str, str]
) -> np.ndarray:
    """One expert's output for its rows `[n D]`: `down (silu(gate x) * up x)`; `formats` of gate and up, and of down."""
    x = rounded(x, formats[0])
    g = x @ gate.T.astype(np.float64)
    u = x @ up.T.astype(np.float64)
    with np.errstate(over="ignore"):
        hidden = g / (1 + np.exp(-g)) * u
    hidden = from_bf16(to_bf16(hidden.astype(np.float32)))
    return rounded(hidden, formats[1]) @ down.T.astype(np.float64)


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
    """The output `[n D]` of an MoE layer for the chosen experts of each row; the id X means no expert."""
    experts, width, model = *gate[0].shape[:2], x.shape[-1]
    formats = (format, down_format or format)
    matrices = ((gate, format, model), (up, format, model), (down, formats[1], width))
    out = np.zeros(x.shape, np.float64)
    for e in range(experts):
        token, k = np.nonzero(topk_ids == e)
        if len(token):
            dense = [dequantize(tuple(part[e] for part in parts), f, inputs) for parts, f, inputs in matrices]
            rows = expert(x[token], dense[0], dense[1], dense[2], formats)
            np.add.at(out, token, topk_weights[token, k, None].astype(np.float64) * rows)
    return out.astype(np.float32)
