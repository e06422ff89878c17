"""Tiny models as the parts that DeepSeek's own inference code loads: names and cuts, written down apart from ours."""

import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

OWN = {
    "embed_tokens": ("embed", 0),
    "input_layernorm": ("attn_norm", None),
    "post_attention_layernorm": ("ffn_norm", None),
    "q_proj": ("wq", 0),
    "q_a_proj": ("wq_a", None),
    "q_a_layernorm": ("q_norm", None),
    "q_b_proj": ("wq_b", 0),
    "kv_a_proj_with_mqa": ("wkv_a", None),
    "kv_a_layernorm": ("kv_norm", None),
    "kv_b_proj": ("wkv_b", 0),
    "o_proj": ("wo", 1),
    "gate": ("gate", None),
    "gate_proj": ("w1", 0),
    "down_proj": ("w2", 1),
    "up_proj": ("w3", 0),
    "norm": ("norm", None),
    "lm_head": ("head", 0),
}


def parts(weights: dict[str, np.ndarray], count: int, layers: int, experts: int) -> list[dict[str, np.ndarray]]:
    """A folder's tensors under the names of DeepSeek's inference code, cut into `count` parts; MTP layers left out."""
    held: list[dict] = [{} for _ in range(count)]
    for name, w in weights.items():
        if (layer := re.match(r"model\.layers\.(\d+)\.", name)) and int(layer[1]) >= layers:
            continue
        words = name.removeprefix("model.").replace("self_attn", "attn").replace("mlp", "ffn")
        words = words.replace("weight_scale_inv", "scale").replace("e_score_correction_bias", "bias").split(".")
        words[-2], axis = OWN[words[-2]]
        found = ".".join(words)
        if "experts" in words:
            held[int(words[-3]) // (experts // count)][found] = w
            continue
        cut = [w] * count if axis is None else np.split(w, count, axis)
        for part, piece in zip(held, cut, strict=True):
            part[found] = np.ascontiguousarray(piece)
    return held


def write(folder: Path, config: dict, weights: dict, count: int) -> Path:
    """A folder of `count` parts, of a model of eight experts."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    layers = config.get("num_hidden_layers", config.get("n_layers"))
    for i, part in enumerate(parts(weights, count, layers, 8)):
        save_file(part, folder / f"model{i}-mp{count}.safetensors")
    return folder
