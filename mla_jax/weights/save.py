"""Writes a model back as an HF folder: config.json and one safetensors file, under the names that released checkpoints use."""

import json
import os
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import save_file

from mla_jax.base.errors import BadFile
from mla_jax.model.transformer import Transformer
from mla_jax.weights import names


def save(model: Transformer, folder: str | Path, *, dtype: str = "bfloat16") -> None:
    """Writes `model` into `folder`, weights in `dtype` and router biases in float32; refuses to overwrite a model.

    Every file is complete or absent: it is written under another name first. config.json, which makes it a model, comes last."""
    folder = Path(folder)
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors*")):
        raise BadFile(f"{folder} holds a model already", "choose another folder, or delete it first")
    folder.mkdir(parents=True, exist_ok=True)
    _, state = nnx.split(model)
    parameters = {".".join(map(str, path)): variable for path, variable in nnx.to_flat_state(state)}
    exact = {names.find(path, model.config).names[0] for path, v in parameters.items() if v.get_metadata().get("exact")}
    values = {path: variable[...] for path, variable in parameters.items()}
    tensors = {
        name: np.asarray(jnp.asarray(value, "float32" if name in exact else dtype))
        for name, value in names.export(values, model.config)
    }
    _complete(folder / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    config = replace(model.config, quantization_config=None)  # what was read from FP8 is written multiplied out
    _complete(folder / "config.json", lambda path: path.write_text(json.dumps(config.to_hf(), indent=2) + "\n"))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _complete(path: Path, write) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        write(partial)
        partial.chmod(0o666 & ~_umask())  # safetensors makes its files private
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
