"""Tiny models of every family, as folders: config.json in the spelling of the family, weights drawn by numpy.

Names and shapes are written down here once more, apart from the table that loading uses: each checks the other."""

import json
from pathlib import Path

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from safetensors.numpy import save_file

_SIZES = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_EXPERTS = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_INDEXER = {"index_topk": 24, "index_n_heads": 32, "index_head_dim": 16}  # with few heads many scores are exactly zero, and tie
_V2 = {
    **_SIZES,
    **_EXPERTS,
    "model_type": "deepseek_v2",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_shared_experts": 2,
}


def yarn(factor: float, mscale: float, all_dim: float, original: int = 64) -> dict:
    return {
        "type": "yarn",
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": all_dim,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": original,
    }


def longrope(factors: list[float], original: int) -> dict:
    return {
        "type": "longrope",
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": original,
    }


FAMILIES: dict[str, dict] = {
    "v2": {**_V2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "rope_scaling": yarn(40, 0.707, 0.707)},
    "v2_lite": {
        **_V2,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rope_scaling": yarn(40, 0.707, 0.707),
    },
    "v3": {**_SIZES, **_EXPERTS, "model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "rope_scaling": yarn(40, 1.0, 1.0)},
    "kimi_k2": {
        **_SIZES,
        **_EXPERTS,
        "model_type": "kimi_k2",
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 50000.0,
        "num_nextn_predict_layers": 0,
        "rope_scaling": {**yarn(32, 1.0, 1.0), "beta_fast": 1},
    },
    "moonlight": {
        **_SIZES,
        **_EXPERTS,
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.446,
        "rope_theta": 50000.0,
        "num_nextn_predict_layers": 0,
    },
    "glm_4_7_flash": {
        **_SIZES,
        **_EXPERTS,
        "model_type": "glm4_moe_lite",
        "hidden_size": 40,
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_nextn_predict_layers": 1,
    },
    "axk1": {
        **_SIZES,
        **_EXPERTS,
        "model_type": "axk1",
        "num_nextn_predict_layers": 0,
        "rope_scaling": yarn(40, 1.0, 1.0),
    },
    "longcat_flash": {
        **{k: v for k, v in _SIZES.items() if k != "num_hidden_layers"},
        **_EXPERTS,
        "model_type": "longcat_flash",
        "head_dim": 8,  # of what is rotated
        "num_layers": 2,
        "num_hidden_layers": 4,
        "moe_layer_freq": 2,
        "first_k_dense_replace": 0,
        "n_shared_experts": None,
        "n_group": 1,
        "topk_group": 1,
        "zero_expert_num": 4,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 6.0,
        "rms_norm_eps": 1e-5,
    },
    "minicpm3": {
        **_SIZES,
        "model_type": "minicpm3",
        "v_head_dim": 12,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-5,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 16,
        "rope_scaling": longrope([1.0625, 1.25, 4.5, 17.0], original=128),
    },
    "mistral4": {
        **_SIZES,
        **_EXPERTS,
        "model_type": "mistral4",
        "first_k_dense_replace": 0,
        "topk_method": "none",
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.5,
        "rope_scaling": {**yarn(32, 1.0, 1.0, original=16), "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 8 / 24},
    },
    "pangu_ultra_moe": {
        **_SIZES,
        **_EXPERTS,
        "model_type": "pangu_ultra_moe",
        "sandwich_norm": True,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "none",
        "rms_norm_eps": 1e-5,
        "rope_theta": 25600000.0,
        "num_nextn_predict_layers": 1,
    },
    "v32": {
        **_SIZES,
        **_EXPERTS,
        **_INDEXER,
        "model_type": "deepseek_v32",
        "num_nextn_predict_layers": 1,
        "rope_scaling": yarn(40, 1.0, 1.0),
    },
    "glm_5": {
        **_SIZES,
        **_EXPERTS,
        **_INDEXER,
        "model_type": "glm_moe_dsa",
        "num_hidden_layers": 5,
        "qk_nope_head_dim": 24,
        "v_head_dim": 32,
        "n_group": 1,
        "topk_group": 1,
        "rms_norm_eps": 1e-5,
        "num_nextn_predict_layers": 1,
        "index_n_heads": 24,
        "index_topk_freq": 3,
        "index_skip_topk_offset": 2,
    },
    "youtu": {**_SIZES, "model_type": "youtu", "tie_word_embeddings": True, "rope_theta": 1.6e6},
}


# Families that llama.cpp converts to GGUF, as the architecture deepseek2
IN_GGUF = ("v2", "v2_lite", "v3", "kimi_k2", "moonlight", "glm_4_7_flash", "youtu")


def has_indexer(hf: dict, layer: int) -> bool:
    if "index_topk" not in hf:
        return False
    frequency, offset = hf.get("index_topk_freq", 1), hf.get("index_skip_topk_offset", 2)
    return layer >= hf["num_hidden_layers"] or max(layer - offset + 1, 0) % frequency == 0


def is_moe(hf: dict, layer: int) -> bool:
    return "n_routed_experts" in hf and layer >= hf["first_k_dense_replace"]


def shapes(hf: dict, mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """Every tensor of a released checkpoint of this config, MTP's if asked for."""
    d = hf["hidden_size"]
    found = {"model.embed_tokens.weight": (hf["vocab_size"], d), "model.norm.weight": (d,)}
    if not hf["tie_word_embeddings"]:
        found["lm_head.weight"] = (hf["vocab_size"], d)
    if hf["model_type"] == "longcat_flash":
        return found | _pairs(hf)
    last = hf["num_hidden_layers"] + (hf.get("num_nextn_predict_layers", 0) if mtp else 0)
    for layer in range(last):
        at = f"model.layers.{layer}."
        found |= {at + "input_layernorm.weight": (d,), at + "post_attention_layernorm.weight": (d,)}
        found |= _attention(hf, at + "self_attn.") | _mlp(hf, at, layer)
        if has_indexer(hf, layer):
            found |= _indexer(hf, at + "self_attn.indexer.")
        if hf.get("sandwich_norm"):
            found |= {at + "pre_mlp_layernorm.weight": (d,), at + "post_mlp_layernorm.weight": (d,)}
        if hf["model_type"] == "axk1" and is_moe(hf, layer):
            found[at + "post_mlp_layernorm.weight"] = (d,)
        if layer >= hf["num_hidden_layers"]:
            found |= {at + name: (d,) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
            found |= {at + "eh_proj.weight": (d, 2 * d)}
            found |= {at + name: (hf["vocab_size"], d) for name in ("embed_tokens.weight", "shared_head.head.weight")}
    return found


def _attention(hf: dict, at: str) -> dict[str, tuple[int, ...]]:
    d, n, r, q = hf["hidden_size"], hf["num_attention_heads"], hf["kv_lora_rank"], hf["q_lora_rank"]
    query, up = n * (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]), n * (hf["qk_nope_head_dim"] + hf["v_head_dim"])
    if q is None:
        found = {at + "q_proj.weight": (query, d)}
    else:
        found = {at + "q_a_proj.weight": (q, d), at + "q_a_layernorm.weight": (q,), at + "q_b_proj.weight": (query, q)}
    found |= {at + "kv_a_proj_with_mqa.weight": (r + hf["qk_rope_head_dim"], d), at + "kv_a_layernorm.weight": (r,)}
    return found | {at + "kv_b_proj.weight": (up, r), at + "o_proj.weight": (d, n * hf["v_head_dim"])}


def _indexer(hf: dict, at: str) -> dict[str, tuple[int, ...]]:
    d, heads, width = hf["hidden_size"], hf["index_n_heads"], hf["index_head_dim"]
    norm = {at + "k_norm.weight": (width,), at + "k_norm.bias": (width,)}
    wide = {at + "wk.weight": (width, d), at + "weights_proj.weight": (heads, d)}
    return {at + "wq_b.weight": (heads * width, hf["q_lora_rank"])} | wide | norm


def _pairs(hf: dict) -> dict[str, tuple[int, ...]]:
    """LongCat-Flash's layers, of two attentions and two dense MLPs, with experts beside the first."""
    d, experts, found = hf["hidden_size"], hf["n_routed_experts"], {}
    for pair in range(hf["num_layers"]):
        at = f"model.layers.{pair}."
        for half in "01":
            found |= {f"{at}{norm}_layernorm.{half}.weight": (d,) for norm in ("input", "post_attention")}
            found |= _attention(hf, f"{at}self_attn.{half}.") | _swiglu(hf, f"{at}mlps.{half}", hf["intermediate_size"])
        for expert in range(experts):
            found |= _swiglu(hf, f"{at}mlp.experts.{expert}", hf["moe_intermediate_size"])
        scores = experts + hf["zero_expert_num"]
        found |= {at + "mlp.router.classifier.weight": (scores, d), at + "mlp.router.e_score_correction_bias": (scores,)}
    return found


def _swiglu(hf: dict, name: str, width: int) -> dict[str, tuple[int, ...]]:
    d = hf["hidden_size"]
    wide = {f"{name}.{part}_proj.weight": (width, d) for part in ("gate", "up")}
    return wide | {f"{name}.down_proj.weight": (d, width)}


def _mlp(hf: dict, at: str, layer: int) -> dict[str, tuple[int, ...]]:
    if not is_moe(hf, layer):
        return _swiglu(hf, at + "mlp", hf["intermediate_size"])
    found = _swiglu(hf, at + "mlp.shared_experts", hf["moe_intermediate_size"] * hf["n_shared_experts"])
    for expert in range(hf["n_routed_experts"]):
        found |= _swiglu(hf, f"{at}mlp.experts.{expert}", hf["moe_intermediate_size"])
    found[at + "mlp.gate.weight"] = (hf["n_routed_experts"], hf["hidden_size"])
    if hf["topk_method"] == "noaux_tc":
        found[at + "mlp.gate.e_score_correction_bias"] = (hf["n_routed_experts"],)
    return found


def tensors(hf: dict, seed: int = 0, mtp: bool = False) -> dict[str, np.ndarray]:
    """Random float32 weights, large enough that every part of the model shows in its logits."""
    rng, found = np.random.default_rng(seed), {}
    for name, shape in shapes(hf, mtp).items():
        value = rng.standard_normal(shape).astype(np.float32)
        scale = 0.1 if len(shape) == 1 else 1.0 if "embed" in name else shape[-1] ** -0.5
        found[name] = value * np.float32(scale) + np.float32("norm" in name)
    if mtp and hf.get("num_nextn_predict_layers"):
        at = f"model.layers.{hf['num_hidden_layers']}."
        found[at + "embed_tokens.weight"] = found["model.embed_tokens.weight"].copy()
        found[at + "shared_head.head.weight"] = found["lm_head.weight"].copy()
    return found


def write(folder: Path, hf: dict, weights: dict[str, np.ndarray], shards: int = 1) -> Path:
    """A model folder as it would be downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf))
    if shards == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names, weight_map = list(weights), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: weights[name] for name in names[i::shards]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder
