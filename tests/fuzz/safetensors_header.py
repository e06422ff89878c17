"""Fuzzes the header of a safetensors file."""

from pathlib import Path

import numpy as np
import safetensors
from faults import hf
from fuzz import harness
from safetensors.numpy import save_file

from mla_jax.weights.safetensors import STORED_DTYPES, read_header


def small(root: Path) -> None:
    """A model's file so short that a change of one byte is likely to matter; three of its names are in the corpus."""
    (root / "single").mkdir(parents=True)
    save_file({name: np.ones((2, 3), np.float32) for name in (hf.EMBED, hf.NORM, hf.O_PROJ)}, root / "single" / hf.FILE)


def read(folder: Path, data: bytes) -> None:
    """Accepted tensors tile the file, and the library reads them equally."""
    (folder / hf.FILE).write_bytes(data)
    tensors, at = read_header(folder / hf.FILE), 8 + int.from_bytes(data[:8], "little")
    for tensor in tensors:
        assert tensor.start == at
        at += tensor.size
    assert at == len(data)
    with safetensors.safe_open(folder / hf.FILE, framework="numpy") as file:
        assert set(file.keys()) == {tensor.name for tensor in tensors}


if __name__ == "__main__":
    words = ["dtype", "shape", "data_offsets", "__metadata__", *STORED_DTYPES]
    harness.fuzz(read, harness.spoilt("safetensors", hf.FILE, small), words)
