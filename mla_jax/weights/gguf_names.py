"""The names table of GGUF files that llama.cpp's converter wrote for its architecture `deepseek2`.

Axes are in numpy's order, as gguf.py gives shapes: the reverse of the file's. Experts are stacked in one tensor, and the
numbers of MTP layers continue after the last layer's, as in released folders."""

import re
from collections.abc import Container
from typing import Any

from mla_jax.base.config import Config
from mla_jax.base.errors import BadConfig
from mla_jax.weights.names import Rule, Table, first_half, key_half, layered, second_half, value_half


def transposed(w: Any, config: Config) -> Any:
    """`uk` of attn_k_b, which stores each head as `[kv_rank nope]`."""
    return w.swapaxes(-1, -2)


_LAYER_RULES = (
    Rule("attn_norm", "attn_norm.weight", "model"),
    Rule("mlp_norm", "ffn_norm.weight", "model"),
    Rule("attn.q_proj", "attn_q.weight", "heads*query model"),
    Rule("attn.q_a_proj", "attn_q_a.weight", "q_rank model"),
    Rule("attn.q_a_norm", "attn_q_a_norm.weight", "q_rank"),
    Rule("attn.q_b_proj", "attn_q_b.weight", "heads*query q_rank"),
    Rule("attn.kv_a_proj", "attn_kv_a_mqa.weight", "latent model"),
    Rule("attn.kv_a_norm", "attn_kv_a_norm.weight", "kv_rank"),
    Rule("attn.uk", "attn_k_b.weight", "heads kv_rank nope", transposed),
    Rule("attn.uv", "attn_v_b.weight", "heads value kv_rank"),
    Rule("attn.uk", "attn_kv_b.weight", "heads*up kv_rank", key_half),  # files from before April 2025
    Rule("attn.uv", "attn_kv_b.weight", "heads*up kv_rank", value_half),
    Rule("attn.o_proj", "attn_output.weight", "model heads*value"),
    Rule("mlp.gate", "ffn_gate.weight", "mlp model"),
    Rule("mlp.up", "ffn_up.weight", "mlp model"),
    Rule("mlp.down", "ffn_down.weight", "model mlp"),
    Rule("mlp.router.weight", "ffn_gate_inp.weight", "experts model"),
    Rule("mlp.router.bias", "exp_probs_b.bias", "experts"),
    Rule("mlp.experts.gate", "ffn_gate_exps.weight", "experts expert_mlp model"),
    Rule("mlp.experts.up", "ffn_up_exps.weight", "experts expert_mlp model"),
    Rule("mlp.experts.gate", "ffn_gate_up_exps.weight", "experts expert_pair model", first_half),
    Rule("mlp.experts.up", "ffn_gate_up_exps.weight", "experts expert_pair model", second_half),
    Rule("mlp.experts.down", "ffn_down_exps.weight", "experts model expert_mlp"),
    Rule("mlp.shared.gate", "ffn_gate_shexp.weight", "shared_mlp model"),
    Rule("mlp.shared.up", "ffn_up_shexp.weight", "shared_mlp model"),
    Rule("mlp.shared.down", "ffn_down_shexp.weight", "model shared_mlp"),
)
_MTP_RULES = (
    Rule("enorm", "nextn.enorm.weight", "model"),
    Rule("hnorm", "nextn.hnorm.weight", "model"),
    Rule("eh_proj", "nextn.eh_proj.weight", "model model_pair"),
    Rule("norm", "nextn.shared_head_norm.weight", "model"),
)
_MODEL_RULES = (
    Rule("embed", "token_embd.weight", "vocab model"),
    Rule("norm", "output_norm.weight", "model"),
    Rule("head", "output.weight", "vocab model"),
)


def needless(name: str, config: Config, found: Container[str]) -> bool:
    """Whether no model needs a tensor: MTP's copies of embedding and head; attn_kv_b if the file has both layouts."""
    if re.fullmatch(r"blk\.\d+\.attn_kv_b\.weight", name):
        return True  # if it is needed, `Table.resolve` uses it
    copy = re.fullmatch(r"blk\.(\d+)\.nextn\.(embed_tokens|shared_head_head)\.weight", name)
    return copy is not None and int(copy[1]) >= config.num_hidden_layers


GGUF = Table(
    (*_MODEL_RULES, *layered(_LAYER_RULES, _MTP_RULES, "blk.{l}.")),
    layer=r"blk\.(\d+)\.",
    expert=None,
    needless=needless,
    described="the file's metadata",
    error=BadConfig,
)
