"""A tiny model whose weights are packed in formats that kernels take: FP8, int8, or the blocks of a GGUF file."""

from pathlib import Path

import models
import numpy as np
from checkpoints import convert
from gguf import GGMLQuantizationType
from weights import as_gguf, fp8

from mla_jax.base import qtensor
from pallas_kernels import packed

SIZES = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "q_lora_rank": 64}
HF = models.FAMILIES["v3"] | SIZES | {"num_nextn_predict_layers": 0}
KINDS = {"gate_exps": "Q5_K", "up_exps": "Q6_K", "down_exps": "Q8_0", "attn_q_b": "Q8_0", "": "Q4_K"}  # the first that is found


def written(folder: Path, kind: str) -> Path:
    """A model with weights in FP8, int8, or in a GGUF file in KINDS where rows allow it."""
    weights = models.tensors(HF)
    if kind == "fp8":
        blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        return models.write(folder / "hf", HF | {"quantization_config": blocks}, fp8.quantized(weights, (128, 128)))
    if kind == "int8":
        assert convert(models.write(folder / "hf", HF, weights), folder / "int8", "--dtype", "int8") == 0
        return folder / "int8"
    found = {}
    for name, w in as_gguf.gguf_tensors(HF, weights, "new").items():
        format = next(format for part, format in KINDS.items() if part in name)
        found[name] = w
        if w.ndim > 1 and "gate_inp" not in name and w.shape[-1] % qtensor.format_of(format).block[1] == 0:
            (blocks,) = packed.random_parts(format, w.shape, len(found))
            found[name] = np.asarray(blocks).reshape(*w.shape[:-1], -1), GGMLQuantizationType[format]
    return as_gguf.write(folder / "m.gguf", as_gguf.keyed(as_gguf.full("v3") | HF), found)
