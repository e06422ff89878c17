"""Writes a model back as an HF folder: config.json and one safetensors file, under the names that released checkpoints use."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
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
from mla_jax.weights.hf_names import HF, LINEAR, SCALE
from mla_jax.weights.quantize import fp8_blocks
from mla_jax.weights.safetensors import DTYPES


def save(model: Transformer, folder: str | Path, *, dtype: str = "bfloat16", fp8: bool = False) -> None:
    """Writes `model` into `folder`, weights in `dtype` and router biases in float32; refuses to overwrite a model.

    With `fp8` the weights of linear layers become E4M3 with a scale for each block of 128x128, as DeepSeek-V3 is released. Every
    file is complete or absent: it is written under another name first. config.json, which makes it a model, comes last."""
    folder = Path(folder)
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors*")):
        raise BadFile(f"{folder} holds a model already", "choose another folder, or delete it first")
    folder.mkdir(parents=True, exist_ok=True)
    _, state = nnx.split(model)
    parameters = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    exact = {HF.find(path, model.config).names[0] for path, v in parameters.items() if v.get_metadata().get("exact")}
    tensors = {}
    values = {path: plain(variable[...], jnp.dtype("float32")) for path, variable in parameters.items()}
    for name, value in HF.export(values, model.config):
        if fp8 and LINEAR.fullmatch(name):
            tensors[name], tensors[name + SCALE] = fp8_blocks(np.asarray(value, np.float32))
        else:
            tensors[name] = np.asarray(jnp.asarray(value, "float32" if name in exact else dtype))
    complete(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    config = replace(model.config, quantization_config=Quantization() if fp8 else None)
    complete(folder / "config.json", lambda path: path.write_text(json.dumps(config.to_hf(), indent=2) + "\n"))


def stream(path: Path, specs: Mapping[str, tuple[str, tuple[int, ...]]], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """A safetensors file of tensors that come one by one, in any order; `specs` are their dtypes and shapes, known before.

    The library itself writes what is all in memory. As it does, we begin with the widest numbers, so that each is aligned."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, (dtype, shape) in sorted(specs.items(), key=lambda item: (-np.dtype(DTYPES[item[1][0]]).itemsize, item[0])):
        offsets[name], end = end, end + np.dtype(DTYPES[dtype]).itemsize * prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    missing = {*specs}
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors:
            dtype, shape = specs[name]
            assert (tensor.dtype, tensor.shape) == (DTYPES[dtype], shape), name
            file.seek(8 + len(text) + offsets[name])
            _write_all(file, tensor)
            missing.remove(name)
    assert not missing, missing


def _write_all(file: RawIOBase, tensor: np.ndarray) -> None:
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    while data:
        data = data[file.write(data) :]  # the system writes at most 2 GiB at a time


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def complete(path: Path, write: Callable[[Path], object]) -> None:
    """Has `write` make the file under another name, and gives it its own when all of it is on the disk."""
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        partial.chmod(0o666 & ~_umask())  # safetensors makes its files private
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
