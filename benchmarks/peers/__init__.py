"""MoE layers of other libraries on the CPU, with the same weights as ours and one interface.

A peer is a module with `about()`, which describes the library or raises why it is not available; `METHODS`, its methods by our
precision, and `named(method)`; and `Layer(method, parts, formats, threads)` with gate, up and down from `layout.quantize` in
these formats. A Layer is called with a Batch and returns its rows' outputs: floats, or the bits of bfloat16."""

import importlib
from types import ModuleType
from typing import NamedTuple

import numpy as np

from cpu_experts import layout, reference

MODULES = {"torch": "onednn", "kt-kernel": "kt", "llama.cpp": "ggml"}


class Batch(NamedTuple):
    """Rows, as floats and as bfloat16's bits (both `[n D]`, the same values), and the experts of each (`[n K]`)."""

    x: np.ndarray
    bits: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


def found(names: list[str]) -> tuple[dict[str, ModuleType], dict[str, str]]:
    """The installed peers; and for every name its description, or why it is not available."""
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
    """The exact result with the weights' values, for bfloat16 activations in every format."""
    out, inputs = np.zeros(batch.x.shape), (batch.x.shape[1], batch.x.shape[1], parts[0][0].shape[1])
    for e in np.unique(batch.ids):
        token, k = np.nonzero(batch.ids == e)
        one = [tuple(part[e] for part in matrix) for matrix in parts]
        values = [layout.dequantize(p, f, i) for p, f, i in zip(one, formats, inputs, strict=True)]
        out[token] += batch.weights[token, k, None] * reference.expert(
            batch.x[token], *values, ("bf16", "bf16")
        )
    return out


def distance(out: np.ndarray, right: np.ndarray) -> float:
    """The relative distance of a layer's outputs, by norms."""
    values = layout.from_bf16(out) if out.dtype == np.uint16 else out
    return float(np.linalg.norm(values - right) / np.linalg.norm(right))
