"""Fuzzes the manifest of what mla-convert writes."""

import json
from pathlib import Path

import numpy as np
from fuzz import harness

from mla_jax.weights.orbax_store import MANIFEST, open_store

PART = {"dtype": "float32", "shape": [4, 6], "chunk": [2, 6], "checksums": ["0" * 16] * 2}
SCALED = [{**PART, "dtype": "float8_e4m3fn"}, {**PART, "shape": [1, 1], "chunk": [1, 1], "checksums": ["0" * 16]}]
TENSORS = {
    "a": {"format": "F32", "shape": [4, 6], "step": 0, "parts": [PART]},
    "b": {"format": "fp8_block", "shape": [4, 6], "step": 0, "parts": SCALED},
}
VALID = json.dumps({"kind": "mla-jax weights", "version": 1, "complete": True, "metadata": {}, "tensors": TENSORS}).encode()


def read(folder: Path, data: bytes) -> None:
    """The chunks of an accepted tensor tile it."""
    (folder / "weights" / "00000").mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).write_bytes(data)
    for name, entry in open_store(folder).tensors.items():
        for number, part in enumerate(entry.parts):
            sizes = [np.prod([end - start for start, end in chunk.box], dtype=object) for chunk in part.chunks(name, number)]
            assert sum(sizes) == np.prod(part.shape, dtype=object)


if __name__ == "__main__":
    words = [*json.loads(VALID), *TENSORS["a"], *PART, "fp8_block_16x24", "int8", "Q4_K", "float8_e4m3fn", "../"]
    harness.fuzz(read, [VALID, *harness.spoilt("store", MANIFEST)], words)
