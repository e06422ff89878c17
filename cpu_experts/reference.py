"""The specification of an MoE layer, in numpy: what every kernel must compute, and how far each precision may be from it.

Weights are what their codes and scales stand for. Rows are bfloat16 where weights are, int4 or fp8 too, and so is what SwiGLU
gives; for int8 weights both are int8 instead, with a scale a row. All sums are float64 here."""

import numpy as np

from cpu_experts.layout import Parts, dequantize, from_bf16, to_bf16

# How far a kernel's output may be from here, as norms. What differs are float32 sums in another
# order and a hidden value that rounds to its other neighbour; for many rows products of code and scale are bf16.
BOUNDS = {"bf16": 4e-3, "int8": 1e-2, "int4_g32": 1.2e-2, "int4_g128": 1.2e-2, "fp8_block": 1.2e-2, "q8_0": 1.2e-2}


def rounded(x: np.ndarray, format: str) -> np.ndarray:
    """Rows as the kernels take them, as the float64 values they stand for."""
    if format != "int8":
        return from_bf16(to_bf16(x)).astype(np.float64)
    amax = np.abs(x).max(axis=-1, keepdims=True).astype(np.float32)
    zeros = amax < 1e-36
    codes = np.rint(x * np.where(zeros, 0, np.float32(127) / np.where(zeros, 1, amax)).astype(np.float32))
    return codes.astype(np.float64) * (amax / np.float32(127))


def expert(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray, format: str) -> np.ndarray:
    """One expert on its rows `[n D]`: `down (silu(gate x) * up x)`."""
    x = rounded(x, format)
    g, u = x @ gate.T.astype(np.float64), x @ up.T.astype(np.float64)
    with np.errstate(over="ignore"):
        hidden = g / (1 + np.exp(-g)) * u
    return rounded(hidden.astype(np.float32), format) @ down.T.astype(np.float64)


def forward(
    x: np.ndarray, topk_ids: np.ndarray, topk_weights: np.ndarray, gate: Parts, up: Parts, down: Parts, format: str
) -> np.ndarray:
    """Rows `[n D]` through their chosen experts; the id X stands for none."""
    experts, model = gate[0].shape[0], x.shape[-1]
    width = gate[0].shape[1]
    out = np.zeros(x.shape, np.float64)
    for e in range(experts):
        token, k = np.nonzero(topk_ids == e)
        if len(token):
            one = [dequantize(tuple(p[e] for p in m), format, n) for m, n in ((gate, model), (up, model), (down, width))]
            np.add.at(out, token, topk_weights[token, k, None].astype(np.float64) * expert(x[token], *one, format))
    return out.astype(np.float32)
