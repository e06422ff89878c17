"""The names table of released folders, as transformers writes them. DeepSeek's FP8 scales are tensors of their own."""

import re
from collections.abc import Container

from mla_jax.base.config import Config
from mla_jax.weights.names import Rule, Table, first_half, key_half, layered, second_half, value_half

LAYER_RULES = (
    Rule("attn_norm", "input_layernorm.weight", "model"),
    Rule("mlp_norm", "post_attention_layernorm.weight", "model"),
    Rule("attn.q_proj", "self_attn.q_proj.weight", "heads*query model"),
    Rule("attn.q_a_proj", "self_attn.q_a_proj.weight", "q_rank model"),
    Rule("attn.q_a_norm", "self_attn.q_a_layernorm.weight", "q_rank"),
    Rule("attn.q_b_proj", "self_attn.q_b_proj.weight", "heads*query q_rank"),
    Rule("attn.kv_a_proj", "self_attn.kv_a_proj_with_mqa.weight", "latent model"),
    Rule("attn.kv_a_norm", "self_attn.kv_a_layernorm.weight", "kv_rank"),
    Rule("attn.uk", "self_attn.kv_b_proj.weight", "heads*up kv_rank", key_half),
    Rule("attn.uv", "self_attn.kv_b_proj.weight", "heads*up kv_rank", value_half),
    Rule("attn.o_proj", "self_attn.o_proj.weight", "model heads*value"),
    Rule("mlp.gate", "mlp.gate_proj.weight", "mlp model"),
    Rule("mlp.up", "mlp.up_proj.weight", "mlp model"),
    Rule("mlp.down", "mlp.down_proj.weight", "model mlp"),
    Rule("mlp.router.weight", "mlp.gate.weight", "experts model"),
    Rule("mlp.router.bias", "mlp.gate.e_score_correction_bias", "experts"),
    Rule("mlp.experts.gate", "mlp.experts.{x}.gate_proj.weight", "expert_mlp model"),
    Rule("mlp.experts.up", "mlp.experts.{x}.up_proj.weight", "expert_mlp model"),
    Rule("mlp.experts.down", "mlp.experts.{x}.down_proj.weight", "model expert_mlp"),
    Rule("mlp.experts.gate", "mlp.experts.gate_up_proj", "experts expert_pair model", first_half),  # transformers 5, in memory
    Rule("mlp.experts.up", "mlp.experts.gate_up_proj", "experts expert_pair model", second_half),
    Rule("mlp.experts.down", "mlp.experts.down_proj", "experts model expert_mlp"),
    Rule("mlp.shared.gate", "mlp.shared_experts.gate_proj.weight", "shared_mlp model"),
    Rule("mlp.shared.up", "mlp.shared_experts.up_proj.weight", "shared_mlp model"),
    Rule("mlp.shared.down", "mlp.shared_experts.down_proj.weight", "model shared_mlp"),
)
MTP_RULES = (
    Rule("enorm", "enorm.weight", "model"),
    Rule("hnorm", "hnorm.weight", "model"),
    Rule("eh_proj", "eh_proj.weight", "model model_pair"),
    Rule("norm", "shared_head.norm.weight", "model"),
)
MODEL_RULES = (
    Rule("embed", "model.embed_tokens.weight", "vocab model"),
    Rule("norm", "model.norm.weight", "model"),
    Rule("head", "lm_head.weight", "vocab model"),
)
SCALE = "_scale_inv"  # suffix of the names of FP8 scales
LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight")  # quantised by FP8 checkpoints


def needless(name: str, config: Config, found: Container[str]) -> bool:
    """Whether no model needs a tensor: rotary tables, MTP's copies of embedding and head, a tied head."""
    if re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name):
        return True
    extra = re.fullmatch(r"model\.layers\.(\d+)\.(embed_tokens|shared_head\.head)\.weight", name)
    if extra is not None:
        return int(extra[1]) >= config.num_hidden_layers
    return name == "lm_head.weight" and config.tie_word_embeddings


HF = Table(
    (*MODEL_RULES, *layered(LAYER_RULES, MTP_RULES, "model.layers.{l}.")),
    layer=r"model\.layers\.(\d+)\.",
    expert=r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.",
    needless=needless,
)
