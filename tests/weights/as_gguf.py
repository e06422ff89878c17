"""Tiny models as the files that llama.cpp's converter makes of them: keys, names, shapes, written down apart from our tables."""

import re
from pathlib import Path

import gguf
import models
import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.families import PRESETS


def write(path: Path, metadata: dict | None = None, tensors: dict | None = None, **options) -> Path:
    """A file of `metadata` {key: (value, kind)} and `tensors` {name: array, or (bytes, block type)}.

    `architecture` is deepseek2 if it is not given; a file of "" has none."""
    alignment = options.pop("alignment", None)
    writer = gguf.GGUFWriter(path, options.pop("architecture", "deepseek2"), **options)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, (value, *kind) in (metadata or {}).items():
        writer.add_key_value(key, value, *kind)
    for name, tensor in (tensors or {}).items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


ARCHITECTURES = {"deepseek_v32": "deepseek32", "glm_moe_dsa": "glm-dsa"}


def converted(hf: dict, old: bool = False) -> dict:
    """The metadata that llama.cpp's converter writes for a config.json: `old`, before the latent's weights were split."""
    rank, rope, heads = hf["kv_lora_rank"], hf["qk_rope_head_dim"], hf["num_attention_heads"]
    key, f32 = hf["qk_nope_head_dim"] + rope, lambda x: float(np.float32(x))
    mtp, experts = hf.get("num_nextn_predict_layers", 0), hf.get("n_routed_experts")
    found = {
        "block_count": hf["num_hidden_layers"] + mtp,
        "context_length": hf["max_position_embeddings"],
        "embedding_length": hf["hidden_size"],
        "feed_forward_length": hf["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": heads if old else 1,
        "rope.freq_base": f32(hf["rope_theta"]),
        "attention.layer_norm_rms_epsilon": f32(hf["rms_norm_eps"]),
        "leading_dense_block_count": hf.get("first_k_dense_replace", hf["num_hidden_layers"]),
        "vocab_size": hf["vocab_size"],
        "attention.q_lora_rank": hf["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": key if old else rank + rope,
        "attention.value_length": hf["v_head_dim"] if old else rank,
        "attention.key_length_mla": None if old else key,
        "attention.value_length_mla": None if old else hf["v_head_dim"],
        "expert_feed_forward_length": hf.get("moe_intermediate_size", hf["intermediate_size"]),
        "expert_count": experts,
        "expert_used_count": hf.get("num_experts_per_tok"),
        "expert_shared_count": hf.get("n_shared_experts", 0),
        "expert_weights_scale": f32(hf["routed_scaling_factor"]) if experts else None,
        "expert_weights_norm": hf.get("norm_topk_prob") or None,
        "expert_gating_func": {"softmax": 1, "sigmoid": 2}.get(hf.get("scoring_func")),
        "expert_group_count": hf.get("n_group"),
        "expert_group_used_count": hf.get("topk_group"),
        "nextn_predict_layers": mtp or None,
        "rope.dimension_count": rope,
    }
    if yarn := hf.get("rope_scaling"):
        found |= {"rope.scaling.type": "yarn", "rope.scaling.factor": f32(yarn["factor"])}
        found |= {"rope.scaling.original_context_length": yarn["original_max_position_embeddings"]}
        found |= {f"rope.scaling.yarn_beta_{n}": f32(yarn[f"beta_{n}"]) for n in ("fast", "slow")}
        found |= {"rope.scaling.yarn_log_multiplier": f32(0.1 * yarn["mscale_all_dim"])}
    if "index_topk" in hf:
        sizes = {"head_count": "index_n_heads", "key_length": "index_head_dim", "top_k": "index_topk"}
        found |= {f"attention.indexer.{theirs}": hf[ours] for theirs, ours in sizes.items()}
    if types := hf.get("indexer_types"):
        found["attention.indexer.types"] = np.array([kind == "full" for kind in types], np.int32)
    architecture = ARCHITECTURES.get(hf["model_type"], "deepseek2")
    found = {f"{architecture}.{k}": v for k, v in found.items()}
    ends = hf.get("eos_token_id")
    ends = dict(zip(("eos", "eot", "eom"), ends if isinstance(ends, list) else [ends], strict=False))
    found |= {f"tokenizer.ggml.{name}_token_id": number for name, number in {"bos": hf.get("bos_token_id"), **ends}.items()}
    return {"general.architecture": architecture} | {k: v for k, v in found.items() if v is not None}


def keyed(hf: dict, old: bool = False) -> dict:
    """Metadata as gguf-py's writer takes it."""
    kind = gguf.GGUFValueType
    kinds = {bool: kind.BOOL, float: kind.FLOAT32, str: kind.STRING}
    found = converted(hf, old=old)
    found.pop("general.architecture")  # which the writer adds
    plain = {key: value for key, value in found.items() if not isinstance(value, np.ndarray)}
    arrays = {key: (value.tolist(), kind.ARRAY) for key, value in found.items() if key not in plain}
    return {key: (value, kinds.get(type(value), kind.UINT32)) for key, value in plain.items()} | arrays


def full(name: str) -> dict:
    """The config.json of a tiny model or, named with a capital, a release, with nothing left to defaults."""
    hf = Config.from_hf(models.FAMILIES[name] if name in models.FAMILIES else PRESETS[name.lower()]).to_hf()
    return {k: v for k, v in hf.items() if v is not None or k in ("q_lora_rank", "rope_scaling")}


SUFFIXES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.k_norm": "indexer.k_norm",
    "self_attn.indexer.weights_proj": "indexer.proj",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
    **{f"{name}": f"nextn.{name}" for name in ("enorm", "hnorm", "eh_proj", "embed_tokens")},
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def gguf_tensors(hf: dict, weights: dict[str, np.ndarray], layout: str) -> dict[str, np.ndarray]:
    """A folder's tensors as llama.cpp's converter names and shapes them."""
    found, experts = {}, {}
    for name, w in weights.items():
        if name in TOP:
            found[TOP[name]] = w
            continue
        _, _, layer, rest = name.split(".", 3)
        at, rest = f"blk.{layer}.", rest.removesuffix(".weight")
        if m := re.fullmatch(r"mlp\.experts\.\d+\.(gate|up|down)_proj", rest):
            experts.setdefault(f"{at}ffn_{m[1]}_exps.weight", []).append(w)
        elif rest.endswith("e_score_correction_bias"):
            found[at + "exp_probs_b.bias"] = w
        elif rest == "self_attn.indexer.k_norm.bias":
            found[at + "indexer.k_norm.bias"] = w
        elif rest == "self_attn.kv_b_proj" and layout != "old":
            heads = w.reshape(hf["num_attention_heads"], -1, hf["kv_lora_rank"])
            found[at + "attn_k_b.weight"] = heads[:, : hf["qk_nope_head_dim"]].transpose(0, 2, 1)
            found[at + "attn_v_b.weight"] = heads[:, hf["qk_nope_head_dim"] :]
        if rest in SUFFIXES and (rest != "self_attn.kv_b_proj" or layout != "new"):
            found[f"{at}{SUFFIXES[rest]}.weight"] = w
    found |= {name: np.stack(parts) for name, parts in experts.items()}
    if layout == "fused":
        for name in [n for n in found if "ffn_gate_exps" in n]:
            up = found.pop(name.replace("gate_exps", "up_exps"))
            found[name.replace("gate_exps", "gate_up_exps")] = np.concatenate([found.pop(name), up], axis=1)
    return found


def as_q8_0(weights: dict[str, np.ndarray]) -> tuple[dict, dict]:
    """Matrices as Q8_0 blocks where their rows allow it, and all as gguf-py unpacks them."""
    kind, packed, plain = gguf.GGMLQuantizationType.Q8_0, {}, {}
    for name, w in weights.items():
        if w.ndim > 1 and w.shape[-1] % 32 == 0 and "gate_inp" not in name:
            blocks = gguf.quants.quantize(w, kind)
            packed[name], plain[name] = (blocks, kind), gguf.quants.dequantize(blocks, kind).reshape(w.shape)
        else:
            packed[name] = plain[name] = w
    return packed, plain
