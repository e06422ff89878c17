"""Writes a model as an HF folder: config.json and one safetensors file, with the names of released checkpoints."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mla_jax.base.config import Quantization
from mla_jax.base.errors import BadFile
from mla_jax.model.ops import plain
from mla_jax.model.transformer import Transformer
from mla_jax.weights.hf_names import LINEAR, SCALE, table_of
from mla_jax.weights.quantize import fp8_blocks
from mla_jax.weights.safetensors import STORED_DTYPES


def save(model: Transformer, folder: str | Path, *, dtype: str = "bfloat16", fp8: bool = False) -> None:
    """Writes `model` into `folder`: weights in `dtype`, router biases in float32. Raises BadFile if the folder holds a model.

    With `fp8` the weights of linear layers become E4M3 with a scale per block of 128x128, as DeepSeek-V3 is released. Each file
    is written under a temporary name and then renamed; config.json comes last."""
    folder = Path(folder)
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors*")):
        raise BadFile(f"{folder} holds a model already", "choose another folder, or delete it first")
    folder.mkdir(parents=True, exist_ok=True)
    complete(
        folder / "model.safetensors",
        partial(save_file, _tensors(model, dtype, fp8), metadata={"format": "pt"}),
    )
    config = replace(model.config, quantization_config=Quantization() if fp8 else None)
    complete(
        folder / "config.json", lambda path: path.write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    )


def _tensors(model: Transformer, dtype: str, fp8: bool) -> dict[str, np.ndarray]:
    """The tensors of the file, by their released names."""
    _, state = nnx.split(model)
    table = table_of(model.config)
    parameters = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    exact = {
        table.find(path, model.config).names[0]
        for path, v in parameters.items()
        if v.get_metadata().get("exact")
    }
    values = {path: plain(variable[...], jnp.dtype("float32")) for path, variable in parameters.items()}
    tensors = {}
    for name, value in table.export(values, model.config):
        if fp8 and LINEAR.fullmatch(name):
            tensors[name], tensors[name + SCALE] = fp8_blocks(np.asarray(value, np.float32))
        else:
            tensors[name] = np.asarray(jnp.asarray(value, "float32" if name in exact else dtype))
    return tensors


def write_tensors(
    path: Path, specs: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Writes a safetensors file from `tensors` that arrive one by one, in any order; `specs` gives each one's dtype and shape.

    The safetensors library needs all tensors in memory. As the library does, the file begins with the widest dtypes, so that
    every tensor is aligned."""
    header, offsets = _layout(specs)
    missing = {*specs}
    with open(path, "wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors:
            dtype, shape = specs[name]
            assert (tensor.dtype, tensor.shape) == (STORED_DTYPES[dtype], shape), name
            file.seek(8 + len(header) + offsets[name])
            _write_all(file, tensor)
            missing.remove(name)
    assert not missing, missing


def _layout(specs: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and each tensor's offset behind it."""
    sizes = {name: np.dtype(STORED_DTYPES[dtype]).itemsize for name, (dtype, _) in specs.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in sorted(specs, key=lambda name: (-sizes[name], name)):
        dtype, shape = specs[name]
        offsets[name], end = end, end + sizes[name] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[name], end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8), offsets


def _write_all(file: RawIOBase, tensor: np.ndarray) -> None:
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    while data:
        data = data[file.write(data) :]  # the system writes at most 2 GiB at a time


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def complete(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary path, and renames that file to `path` after it is durably on disk."""
    temporary = path.with_name(path.name + ".partial")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())  # safetensors makes its files private
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
