"""The names table of released folders, as transformers writes them; DeepSeek's FP8 scales lie beside their weights."""

import re
from collections.abc import Container

from mla_jax.base.config import Config
from mla_jax.weights.names import Row, Table, first_half, key_half, layered, second_half, value_half

BLOCK = (
    Row("attn_norm", "input_layernorm.weight", "model"),
    Row("mlp_norm", "post_attention_layernorm.weight", "model"),
    Row("attn.q_proj", "self_attn.q_proj.weight", "heads*query model"),
    Row("attn.q_a_proj", "self_attn.q_a_proj.weight", "q_rank model"),
    Row("attn.q_a_norm", "self_attn.q_a_layernorm.weight", "q_rank"),
    Row("attn.q_b_proj", "self_attn.q_b_proj.weight", "heads*query q_rank"),
    Row("attn.kv_a_proj", "self_attn.kv_a_proj_with_mqa.weight", "latent model"),
    Row("attn.kv_a_norm", "self_attn.kv_a_layernorm.weight", "kv_rank"),
    Row("attn.uk", "self_attn.kv_b_proj.weight", "heads*up kv_rank", key_half),
    Row("attn.uv", "self_attn.kv_b_proj.weight", "heads*up kv_rank", value_half),
    Row("attn.o_proj", "self_attn.o_proj.weight", "model heads*value"),
    Row("mlp.gate", "mlp.gate_proj.weight", "mlp model"),
    Row("mlp.up", "mlp.up_proj.weight", "mlp model"),
    Row("mlp.down", "mlp.down_proj.weight", "model mlp"),
    Row("mlp.router.weight", "mlp.gate.weight", "experts model"),
    Row("mlp.router.bias", "mlp.gate.e_score_correction_bias", "experts"),
    Row("mlp.experts.gate", "mlp.experts.{x}.gate_proj.weight", "expert_mlp model"),
    Row("mlp.experts.up", "mlp.experts.{x}.up_proj.weight", "expert_mlp model"),
    Row("mlp.experts.down", "mlp.experts.{x}.down_proj.weight", "model expert_mlp"),
    Row("mlp.experts.gate", "mlp.experts.gate_up_proj", "experts expert_pair model", first_half),  # transformers 5, in memory
    Row("mlp.experts.up", "mlp.experts.gate_up_proj", "experts expert_pair model", second_half),
    Row("mlp.experts.down", "mlp.experts.down_proj", "experts model expert_mlp"),
    Row("mlp.shared.gate", "mlp.shared_experts.gate_proj.weight", "shared_mlp model"),
    Row("mlp.shared.up", "mlp.shared_experts.up_proj.weight", "shared_mlp model"),
    Row("mlp.shared.down", "mlp.shared_experts.down_proj.weight", "model shared_mlp"),
)
MTP = (
    Row("enorm", "enorm.weight", "model"),
    Row("hnorm", "hnorm.weight", "model"),
    Row("eh_proj", "eh_proj.weight", "model model_pair"),
    Row("norm", "shared_head.norm.weight", "model"),
)
TOP = (
    Row("embed", "model.embed_tokens.weight", "vocab model"),
    Row("norm", "model.norm.weight", "model"),
    Row("head", "lm_head.weight", "vocab model"),
)
SCALE = "_scale_inv"  # what FP8 checkpoints add to the name of a weight
LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight")  # which of them they quantise


def needless(name: str, config: Config, found: Container[str]) -> bool:
    """Tensors that releases hold and no model needs: rotary tables, MTP's copies of embedding and head, a tied head."""
    if re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name):
        return True
    extra = re.fullmatch(r"model\.layers\.(\d+)\.(embed_tokens|shared_head\.head)\.weight", name)
    if extra is not None:
        return int(extra[1]) >= config.num_hidden_layers
    return name == "lm_head.weight" and config.tie_word_embeddings


HF = Table(
    (*TOP, *layered(BLOCK, MTP, "model.layers.{l}.")),
    layer=r"model\.layers\.(\d+)\.",
    expert=r"model\.layers\.\d+\.mlp\.experts\.(\d+)\.",
    needless=needless,
)
