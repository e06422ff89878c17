"""Checkpoints of the largest models that take no room: headers are whole, and weights are holes in a sparse file."""

import json
import struct
from pathlib import Path

import models
from checkpoints import with_text
from weights import fp8

BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}


def folder(at: Path, hf: dict) -> Path:
    """A released folder of this config, in FP8 if that says so. What reads headers reads it; its weights are zero."""
    block = hf.get("quantization_config", {}).get("weight_block_size")
    header, end = {}, 0
    for name, shape in models.shapes(hf, mtp=bool(hf.get("num_nextn_predict_layers"))).items():
        for each, dtype, size in _stored(name, shape, block):
            count = BYTES[dtype]
            for n in size:
                count *= n
            header[each] = {"dtype": dtype, "shape": size, "data_offsets": [end, end + count]}
            end += count
    text = json.dumps(header).encode()
    at.mkdir(parents=True, exist_ok=True)
    with open(at / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    (at / "config.json").write_text(json.dumps(hf))
    return with_text(at)


def _stored(name: str, shape: tuple[int, ...], block: list[int] | None) -> list[tuple[str, str, list[int]]]:
    if block is None or not fp8.is_quantized(name):
        return [(name, "F32" if name.endswith("bias") else "BF16", list(shape))]
    scales = [-(-n // b) for n, b in zip(shape, block, strict=True)]
    return [(name, "F8_E4M3", list(shape)), (name + fp8.SCALE, "F32", scales)]
