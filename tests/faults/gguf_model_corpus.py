"""Every bad GGUF file that is sound as a file, but whose metadata describes another model than its tensors are of."""

from pathlib import Path

import models
import numpy as np
from faults.change import Fault
from weights import as_gguf

from mla_jax.base.errors import BadConfig, BadFile, Unsupported

HF = {**as_gguf.full("v3"), "num_nextn_predict_layers": 0}
TENSORS = as_gguf.gguf_tensors(HF, models.tensors(HF), "new")
FILE, OUTPUT, GATE = "model.gguf", "blk.0.attn_output.weight", "blk.1.ffn_gate_exps.weight"


def write_valid(root: Path) -> None:
    (root / "single").mkdir(parents=True)
    as_gguf.write(root / "single" / FILE, as_gguf.keyed(HF), TENSORS)


def metadata(**changes):
    """Changes keys of config.json, from which the metadata is made."""
    return lambda folder: as_gguf.write(folder / FILE, as_gguf.keyed({**HF, **changes}), TENSORS)


def keys(**changes):
    """Changes the metadata itself; None removes a key."""
    changed = {f"deepseek2.{key.replace('__', '.')}": value for key, value in changes.items()}
    found = as_gguf.keyed(HF)
    made = {k: (changed.get(k, v), kind) for k, (v, kind) in found.items() if changed.get(k, v) is not None}
    return lambda folder: as_gguf.write(folder / FILE, made, TENSORS)


def tensors(**changes):
    """Changes tensors; None removes one."""
    found = {k: v for k, v in {**TENSORS, **{k.replace("__", "."): v for k, v in changes.items()}}.items() if v is not None}
    return lambda folder: as_gguf.write(folder / FILE, as_gguf.keyed(HF), found)


def disagrees(name: str, change: dict, *words: str) -> Fault:
    return Fault(name, metadata(**change), BadConfig, words)


FAULTS = (
    # row 24: both numbers
    disagrees("heads", {"num_attention_heads": 8}, "attn_q_b.weight: found [96, 24]", "says [192, 24]", "num_attention_heads 8"),
    disagrees("kv_rank", {"kv_lora_rank": 40}, "attn_kv_a_mqa.weight: found [40, 48]", "says [48, 48]", "kv_lora_rank 40"),
    disagrees("q_rank", {"q_lora_rank": 32}, "attn_q_a.weight: found [24, 48]", "says [32, 48]", "q_lora_rank 32"),
    disagrees("no_q_rank", {"q_lora_rank": None}, "missing: blk.0.attn_q.weight", "not used: blk.0.attn_q_a.weight"),
    disagrees("rope", {"qk_rope_head_dim": 16}, "attn_kv_a_mqa.weight: found [40, 48]", "says [48, 48]", "qk_rope_head_dim 16"),
    disagrees("nope", {"qk_nope_head_dim": 24}, "attn_q_b.weight: found [96, 24]", "says [128, 24]", "qk_nope_head_dim 24"),
    disagrees("value", {"v_head_dim": 32}, "attn_v_b.weight: found [4, 16, 32]", "says [4, 32, 32]", "v_head_dim 32"),
    disagrees("width", {"hidden_size": 64}, "token_embd.weight: found [96, 48]", "says [96, 64]", "hidden_size 64"),
    disagrees("mlp", {"intermediate_size": 96}, "blk.0.ffn_gate.weight: found [80, 48]", "says [96, 48]", "intermediate_size 96"),
    disagrees("vocabulary", {"vocab_size": 100}, "token_embd.weight: found [96, 48]", "says [100, 48]", "vocab_size 100"),
    disagrees("experts", {"n_routed_experts": 16}, f"{GATE}: found [8, 24, 48]", "says [16, 24, 48]", "n_routed_experts 16"),
    disagrees(
        "fewer_experts",
        {"n_routed_experts": 4, "num_experts_per_tok": 2},
        f"{GATE}: found [8, 24, 48]",
        "says [4, 24, 48]",
        "n_routed_experts 4",
    ),
    disagrees(
        "no_experts", {"n_routed_experts": None}, "missing: blk.1.ffn_gate.weight", "not used: blk.1.ffn_gate_shexp.weight"
    ),
    disagrees("expert_width", {"moe_intermediate_size": 32}, f"{GATE}: found [8, 24, 48]", "moe_intermediate_size 32"),
    disagrees("shared", {"n_shared_experts": 2}, "ffn_gate_shexp.weight: found [24, 48]", "says [48, 48]", "n_shared_experts 2"),
    disagrees("more_layers", {"num_hidden_layers": 4}, "num_hidden_layers is 4, blk.* has 3"),
    disagrees("a_thousand_layers", {"num_hidden_layers": 1000}, "num_hidden_layers is 1000, blk.* has 3"),
    disagrees("fewer_layers", {"num_hidden_layers": 2}, "not used: blk.2.attn_norm.weight"),
    disagrees("dense_layers", {"first_k_dense_replace": 2}, "missing: blk.1.ffn_gate.weight", f"not used: {GATE}"),
    disagrees("router_bias", {"scoring_func": "softmax"}, "not used: blk.1.exp_probs_b.bias"),
    disagrees("largest_sizes", {"hidden_size": 1 << 20, "vocab_size": 1 << 24}, "found [96, 48]", "says [16777216, 1048576]"),
    Fault("latent_of_another_length", keys(attention__key_length=48), BadConfig, ("key_length is 48, expected 40",)),
    Fault("no_rank", keys(attention__kv_lora_rank=None), BadConfig, ("deepseek2.attention.kv_lora_rank is missing",)),
    # tensors
    Fault("tensor_missing", tensors(output_norm__weight=None), BadConfig, ("missing: output_norm.weight", "the file's metadata")),
    Fault("tensor_not_used", tensors(blk__0__attn_sinks__weight=np.ones(4, "f4")), BadConfig, ("not used: blk.0.attn_sinks",)),
    Fault(
        "matrix_transposed",
        tensors(**{OUTPUT: np.ascontiguousarray(TENSORS[OUTPUT].T)}),
        BadConfig,
        (f"{OUTPUT}: found [64, 48]", "says [48, 64]", "hidden_size 48"),
    ),
    Fault("half_of_the_latents_weights", tensors(blk__1__attn_k_b__weight=None), BadConfig, ("missing: blk.1.attn_k_b.weight",)),
    Fault("weights_of_integers", tensors(output_norm__weight=np.ones(48, "i4")), Unsupported, ("output_norm.weight", "I32")),
    Fault(
        "weight_nan",
        tensors(output_norm__weight=np.full(48, np.nan, "f4")),
        BadFile,
        ("output_norm.weight", "NaN or infinity"),
        reads=True,
    ),
)
