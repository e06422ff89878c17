"""MoE layers of other libraries on the CPU, of the same weights as ours and called alike.

A peer is a module with `about()`, which says what it is or raises why it is not here; `METHODS`, by our precisions the ways in
which it computes with such weights, and `named(method)`; and `Layer(method, parts, formats, threads)` with gate, up and down as
`layout.quantize` made them in these formats, which is called with a Batch and gives its rows' outputs: floats, or the bits of
bfloat16."""

import importlib
from types import ModuleType
from typing import NamedTuple

import numpy as np

from cpu_experts import layout, reference

MODULES = {"torch": "onednn", "kt-kernel": "kt", "llama.cpp": "ggml"}


class Batch(NamedTuple):
    """Rows, as floats and as bfloat16's bits (both `[n D]`, the same values), and the experts chosen for each (`[n K]`)."""

    x: np.ndarray
    bits: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


def found(names: list[str]) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """Those that are installed; and of every name what it is, or why it is not here."""
    here, words = {}, {}
    for name in names:
        try:
            peer = importlib.import_module(f"peers.{MODULES[name]}")
            words[name] = peer.about()
            here[name] = peer
        except (ImportError, OSError) as error:
            words[name] = f"missing: {error}"
    return here, words


def expected(batch: Batch, parts: list[layout.Parts], formats: tuple[str, ...]) -> np.ndarray:
    """What the weights' values give, multiplied out; what they are multiplied with is bfloat16, whatever the formats."""
    out, inputs = np.zeros(batch.x.shape), (batch.x.shape[1], batch.x.shape[1], parts[0][0].shape[1])
    for e in np.unique(batch.ids):
        token, k = np.nonzero(batch.ids == e)
        one = [tuple(part[e] for part in matrix) for matrix in parts]
        values = [layout.dequantize(p, f, i) for p, f, i in zip(one, formats, inputs, strict=True)]
        out[token] += batch.weights[token, k, None] * reference.expert(batch.x[token], *values, ("bf16", "bf16"))
    return out


def distance(out: np.ndarray, right: np.ndarray) -> float:
    """Of a layer's outputs, as norms."""
    values = layout.from_bf16(out) if out.dtype == np.uint16 else out
    return float(np.linalg.norm(values - right) / np.linalg.norm(right))
