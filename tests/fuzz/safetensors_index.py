"""Fuzzes the index of a model in two safetensors files; whatever it says, only files of its folder are opened."""

import json
import os
from pathlib import Path

import numpy as np
from faults import hf
from fuzz import harness
from safetensors.numpy import save_file

from mla_jax.weights.safetensors import open_folder

TENSORS = {hf.FIRST: ["a", "b"], hf.SECOND: ["c"]}
VALID = json.dumps({"weight_map": {name: file for file, names in TENSORS.items() for name in names}}).encode()


def read(folder: Path, data: bytes) -> None:
    """Tensors that are read equal the files' own."""
    for file, names in TENSORS.items():
        if not (folder / file).exists():
            save_file({name: np.ones(2, np.float32) for name in names}, folder / file)
    (folder / hf.INDEX).write_bytes(data)
    (folder.parent / "outside.safetensors").unlink(missing_ok=True)
    os.mkfifo(folder.parent / "outside.safetensors")  # whoever opens it waits for ever
    found = open_folder(folder).tensors
    assert {(tensor.file.name, name) for name, tensor in found.items()} == {(f, n) for f, names in TENSORS.items() for n in names}


if __name__ == "__main__":
    words = ["weight_map", "../outside.safetensors", ".safetensors", hf.FIRST, hf.SECOND, "\\\\u0000", "\\\\ud800"]
    harness.fuzz(read, [VALID, *harness.spoilt("safetensors", hf.INDEX)], words)
