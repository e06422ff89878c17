"""The names table of GGUF files that llama.cpp's converter wrote for `deepseek2` and the architectures with indexers.

Axes are in numpy's order, as gguf.py gives shapes: the reverse of the file's. Experts are stacked in one tensor, and the
numbers of MTP layers continue after the last layer's, as in released folders."""

import re
from collections.abc import Container
from typing import Any

from mla_jax.base.config import Config
from mla_jax.base.errors import BadConfig
from mla_jax.weights.names import NameRule, NameTable, first_half, key_half, layered, second_half, value_half


def transposed(w: Any, config: Config) -> Any:
    """`uk` of attn_k_b, which stores each head as `[kv_rank nope]`."""
    return w.swapaxes(-1, -2)


_LAYER_RULES = (
    NameRule("attn_norm", "attn_norm.weight", "model"),
    NameRule("mlp_norm", "ffn_norm.weight", "model"),
    NameRule("attn.q_proj", "attn_q.weight", "heads*query model"),
    NameRule("attn.q_a_proj", "attn_q_a.weight", "q_rank model"),
    NameRule("attn.q_a_norm", "attn_q_a_norm.weight", "q_rank"),
    NameRule("attn.q_b_proj", "attn_q_b.weight", "heads*query q_rank"),
    NameRule("attn.kv_a_proj", "attn_kv_a_mqa.weight", "latent model"),
    NameRule("attn.kv_a_norm", "attn_kv_a_norm.weight", "kv_rank"),
    NameRule("attn.uk", "attn_k_b.weight", "heads kv_rank nope", transposed),
    NameRule("attn.uv", "attn_v_b.weight", "heads value kv_rank"),
    NameRule("attn.uk", "attn_kv_b.weight", "heads*up kv_rank", key_half),  # files from before April 2025
    NameRule("attn.uv", "attn_kv_b.weight", "heads*up kv_rank", value_half),
    NameRule("attn.o_proj", "attn_output.weight", "model heads*value"),
    NameRule("attn.indexer.wq_b", "indexer.attn_q_b.weight", "index_heads*index q_rank"),
    NameRule("attn.indexer.wk", "indexer.attn_k.weight", "index model"),
    NameRule("attn.indexer.k_norm", "indexer.k_norm.weight", "index"),
    NameRule("attn.indexer.k_norm_bias", "indexer.k_norm.bias", "index"),
    NameRule("attn.indexer.weights_proj", "indexer.proj.weight", "index_heads model"),
    NameRule("mlp.gate", "ffn_gate.weight", "mlp model"),
    NameRule("mlp.up", "ffn_up.weight", "mlp model"),
    NameRule("mlp.down", "ffn_down.weight", "model mlp"),
    NameRule("mlp.router.weight", "ffn_gate_inp.weight", "scores model"),
    NameRule("mlp.router.bias", "exp_probs_b.bias", "scores"),
    NameRule("mlp.experts.gate", "ffn_gate_exps.weight", "experts expert_mlp model"),
    NameRule("mlp.experts.up", "ffn_up_exps.weight", "experts expert_mlp model"),
    NameRule("mlp.experts.gate", "ffn_gate_up_exps.weight", "experts expert_pair model", first_half),
    NameRule("mlp.experts.up", "ffn_gate_up_exps.weight", "experts expert_pair model", second_half),
    NameRule("mlp.experts.down", "ffn_down_exps.weight", "experts model expert_mlp"),
    NameRule("mlp.shared.gate", "ffn_gate_shexp.weight", "shared_mlp model"),
    NameRule("mlp.shared.up", "ffn_up_shexp.weight", "shared_mlp model"),
    NameRule("mlp.shared.down", "ffn_down_shexp.weight", "model shared_mlp"),
)
_MTP_RULES = (
    NameRule("enorm", "nextn.enorm.weight", "model"),
    NameRule("hnorm", "nextn.hnorm.weight", "model"),
    NameRule("eh_proj", "nextn.eh_proj.weight", "model model_pair"),
    NameRule("norm", "nextn.shared_head_norm.weight", "model"),
)
_MODEL_RULES = (
    NameRule("embed", "token_embd.weight", "vocab model"),
    NameRule("norm", "output_norm.weight", "model"),
    NameRule("head", "output.weight", "vocab model"),
)


def _needless(name: str, config: Config, found: Container[str]) -> bool:
    """Whether no model needs a tensor: MTP's copies of embedding and head; attn_kv_b if the file has both layouts; an indexer of
    a layer that takes the choice of one below."""
    if re.fullmatch(r"blk\.\d+\.attn_kv_b\.weight", name):
        return True  # if it is needed, `Table.resolve` uses it
    if indexer := re.match(r"blk\.(\d+)\.indexer\.", name):
        return config.index_topk is not None and not config.has_indexer(int(indexer[1]))
    copy = re.fullmatch(r"blk\.(\d+)\.nextn\.(embed_tokens|shared_head_head)\.weight", name)
    return copy is not None and int(copy[1]) >= config.num_hidden_layers


GGUF = NameTable(
    (*_MODEL_RULES, *layered(_LAYER_RULES, _MTP_RULES, "blk.{l}.")),
    layer=r"blk\.(\d+)\.",
    expert=None,
    needless=_needless,
    described="the file's metadata",
    error=BadConfig,
)
