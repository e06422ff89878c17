"""Checkpoints of every kind to convert, and their comparison afterwards: tensors as bytes, models as their parameters."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import jax
import ml_dtypes
import models
import numpy as np
from pairs import pairs_tokenizer
from weights import as_deepseek, as_gguf, fp8, parameters

from convert.__main__ import main
from mla_jax.weights.load import load

BLOCK = (16, 24)
BF16, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu


def convert(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def _fp8(weights: dict, scales: type = np.float32, powers_of_two: bool = False) -> dict:
    found = fp8.quantized(weights, BLOCK, powers_of_two=powers_of_two)
    return {name: value.astype(scales) if name.endswith(fp8.SCALE) else value for name, value in found.items()}


NUMBERS: dict[str, Callable[[dict], dict]] = {
    "f32": dict,
    "f16": lambda weights: {name: value.astype(np.float16) for name, value in weights.items()},
    "bf16": lambda weights: {name: value.astype(np.float32 if "bias" in name else BF16) for name, value in weights.items()},
    "fp8": _fp8,
    "fp8_bf16": lambda weights: _fp8(weights, BF16),
    "fp8_e8m0": lambda weights: _fp8(weights, E8M0, powers_of_two=True),
}


def released(folder: Path, family: str = "v3", numbers: str = "bf16", shards: int = 1) -> Path:
    """A folder as it would be downloaded: MTP layers with their copies, tokenizer, and config.json in no layout of ours."""
    hf = dict(models.FAMILIES[family])
    weights = models.tensors(hf, mtp=True)
    if numbers.startswith("fp8"):
        hf["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    models.write(folder, hf, NUMBERS[numbers](weights), shards)
    (folder / "config.json").write_text(json.dumps({**hf, "architectures": ["X"]}, indent=7) + "\n\n")
    return with_text(folder)


def with_text(folder: Path) -> Path:
    pairs_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<bos>",   "add_bos_token": true}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1]}')
    return folder


def packed_gguf(file: Path, layout: str) -> Path:
    """Q8_0 where rows allow it; a tokenizer in the metadata."""
    hf = {**as_gguf.full("v3"), "hidden_size": 64, "moe_intermediate_size": 32}
    packed, _ = as_gguf.as_q8_0(as_gguf.gguf_tensors(hf, models.tensors(hf, mtp=True), layout))
    kind = gguf.GGUFValueType
    tokens = ["<bos>", "<eos>", "!!", *map(chr, range(33, 126))]
    tokenizer = {"tokens": tokens, "token_type": [3, 3] + [1] * 94, "merges": ["! !"]}
    found = {f"tokenizer.ggml.{key}": (value, kind.ARRAY) for key, value in tokenizer.items()}
    found |= {f"tokenizer.ggml.{key}": (value, kind.STRING) for key, value in {"model": "gpt2", "pre": "deepseek-v3"}.items()}
    return as_gguf.write(file, as_gguf.keyed(hf, old=layout == "old") | found, packed)


def parts(folder: Path, count: int = 2) -> Path:
    """DeepSeek's own, in FP8."""
    hf = {**models.FAMILIES["v3"], "hidden_size": 256, "intermediate_size": 512, "v_head_dim": 64, "q_lora_rank": 128}
    hf |= {"qk_nope_head_dim": 56, "moe_intermediate_size": 256, "num_nextn_predict_layers": 0}
    hf |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    return with_text(as_deepseek.write(folder, hf, fp8.quantized(models.tensors(hf), (128, 128)), count))


def raw(folder: Path) -> dict[str, tuple]:
    """Every tensor of a folder of safetensors: dtype, shape and bytes."""
    found = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                first, end = entry["data_offsets"]
                found[name] = entry["dtype"], entry["shape"], data[start + first : start + end]
    return found


def assert_same_model(one: Path, other: Path, **options) -> None:
    """The same parameters in the same formats, bit for bit."""
    a, b = (parameters.state(load(path, **options)) for path in (one, other))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for ours, theirs in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
