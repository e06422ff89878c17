"""The names table of released folders, as transformers writes them. DeepSeek's FP8 scales are tensors of their own."""

import re
from collections.abc import Container, Iterable

from mla_jax.base.config import Config
from mla_jax.base.families import PAIRED_LAYERS
from mla_jax.weights.names import NameRule, NameTable, first_half, key_half, layered, second_half, value_half

LAYER_RULES = (
    NameRule("attn_norm", "input_layernorm.weight", "model"),
    NameRule("mlp_norm", "post_attention_layernorm.weight", "model"),
    NameRule("attn_post_norm", "post_attention_layernorm.weight", "model"),  # where mlp_norm has another name
    NameRule("attn.q_proj", "self_attn.q_proj.weight", "heads*query model"),
    NameRule("attn.q_a_proj", "self_attn.q_a_proj.weight", "q_rank model"),
    NameRule("attn.q_a_norm", "self_attn.q_a_layernorm.weight", "q_rank"),
    NameRule("attn.q_b_proj", "self_attn.q_b_proj.weight", "heads*query q_rank"),
    NameRule("attn.kv_a_proj", "self_attn.kv_a_proj_with_mqa.weight", "latent model"),
    NameRule("attn.kv_a_norm", "self_attn.kv_a_layernorm.weight", "kv_rank"),
    NameRule("attn.uk", "self_attn.kv_b_proj.weight", "heads*up kv_rank", key_half),
    NameRule("attn.uv", "self_attn.kv_b_proj.weight", "heads*up kv_rank", value_half),
    NameRule("attn.o_proj", "self_attn.o_proj.weight", "model heads*value"),
    NameRule("attn.indexer.wq_b", "self_attn.indexer.wq_b.weight", "index_heads*index q_rank"),
    NameRule("attn.indexer.wk", "self_attn.indexer.wk.weight", "index model"),
    NameRule("attn.indexer.k_norm", "self_attn.indexer.k_norm.weight", "index"),
    NameRule("attn.indexer.k_norm_bias", "self_attn.indexer.k_norm.bias", "index"),
    NameRule("attn.indexer.weights_proj", "self_attn.indexer.weights_proj.weight", "index_heads model"),
    NameRule("mlp.gate", "mlp.gate_proj.weight", "mlp model"),
    NameRule("mlp.up", "mlp.up_proj.weight", "mlp model"),
    NameRule("mlp.down", "mlp.down_proj.weight", "model mlp"),
    NameRule("mlp.router.weight", "mlp.gate.weight", "scores model"),
    NameRule("mlp.router.bias", "mlp.gate.e_score_correction_bias", "scores"),
    NameRule("mlp.experts.gate", "mlp.experts.{x}.gate_proj.weight", "expert_mlp model"),
    NameRule("mlp.experts.up", "mlp.experts.{x}.up_proj.weight", "expert_mlp model"),
    NameRule("mlp.experts.down", "mlp.experts.{x}.down_proj.weight", "model expert_mlp"),
    NameRule(
        "mlp.experts.gate", "mlp.experts.gate_up_proj", "experts expert_pair model", first_half
    ),  # transformers 5, in memory
    NameRule("mlp.experts.up", "mlp.experts.gate_up_proj", "experts expert_pair model", second_half),
    NameRule("mlp.experts.down", "mlp.experts.down_proj", "experts model expert_mlp"),
    NameRule("mlp.shared.gate", "mlp.shared_experts.gate_proj.weight", "shared_mlp model"),
    NameRule("mlp.shared.up", "mlp.shared_experts.up_proj.weight", "shared_mlp model"),
    NameRule("mlp.shared.down", "mlp.shared_experts.down_proj.weight", "model shared_mlp"),
    NameRule("mlp_post_norm", "post_mlp_layernorm.weight", "model"),
)
# With norms on both sides of attention and MLP
SANDWICHED_RULES = (
    *(rule for rule in LAYER_RULES if rule.ours != "mlp_norm"),
    NameRule("mlp_norm", "pre_mlp_layernorm.weight", "model"),
)
# Two of our layers are one of the release, of which the first has experts
PAIRED_RULES = (
    *(
        rule._replace(theirs=rule.theirs.replace("self_attn", "self_attn.{half}"))
        for rule in LAYER_RULES
        if rule.ours.startswith("attn.")
    ),
    *(rule for rule in LAYER_RULES if rule.ours.startswith("mlp.experts.")),
    NameRule("attn_norm", "input_layernorm.{half}.weight", "model"),
    NameRule("mlp_norm", "post_attention_layernorm.{half}.weight", "model"),
    NameRule("mlp.router.weight", "mlp.router.classifier.weight", "scores model"),
    NameRule("mlp.router.bias", "mlp.router.e_score_correction_bias", "scores"),
    *(
        NameRule(f"{ours}.{part}", f"mlps.{{half}}.{part}_proj.weight", axes)
        for ours in ("mlp", "mlp.dense")
        for part, axes in (("gate", "mlp model"), ("up", "mlp model"), ("down", "model mlp"))
    ),
)
MTP_RULES = (
    NameRule("enorm", "enorm.weight", "model"),
    NameRule("hnorm", "hnorm.weight", "model"),
    NameRule("eh_proj", "eh_proj.weight", "model model_pair"),
    NameRule("norm", "shared_head.norm.weight", "model"),
)
MODEL_RULES = (
    NameRule("embed", "model.embed_tokens.weight", "vocab model"),
    NameRule("norm", "model.norm.weight", "model"),
    NameRule("head", "lm_head.weight", "vocab model"),
)
SCALE = "_scale_inv"  # suffix of the names of FP8 scales
# Weights that FP8 checkpoints quantise
LINEAR = re.compile(
    r"model\.layers\.\d+\.((self_attn|mlps?)\.(?!indexer\.).*_proj(_with_mqa)?|self_attn\.indexer\.(wq_b|wk))\.weight"
)


# Scales of activations and of the cache, which are not quantised as the checkpoint's maker had it; GPTQ's numbers of groups,
# which are in order unless the config says otherwise
_SCALES = re.compile(
    r"model\.layers\.\d+\..*\.((input|output|[qkv])_(global_)?scale|g_idx)|lm_head\.(input_scale|g_idx)"
)
EXPERT = r"model\.layers\.\d+\.mlp\.experts\.(\d+)\."
VISION = ("vision_tower.", "mm_projector.", "multi_modal_projector.")


def _needless(name: str, config: Config, found: Container[str]) -> bool:
    """Whether no model needs a tensor: rotary tables, MTP's copies of embedding and head, a tied head, scales of activations,
    norms of dense layers that only the experts' sum passes through, what transformers saves of experts without weights,
    and MTP layers of another kind."""
    if re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name) or _SCALES.fullmatch(name):
        return True
    extra = re.fullmatch(r"model\.layers\.(\d+)\.(embed_tokens|shared_head\.head)\.weight", name)
    if extra is not None:
        return int(extra[1]) >= config.num_hidden_layers
    if config.model_type in PAIRED_LAYERS and name.startswith("model.mtp."):
        return True
    if config.zero_expert_num and (expert := re.match(EXPERT, name)):
        return int(expert[1]) >= (config.n_routed_experts or 0)
    if re.fullmatch(r"model\.layers\.\d+\.post_mlp_layernorm\.weight", name):
        return config.post_mlp_layernorm
    return name == "lm_head.weight" and config.tie_word_embeddings


def _table(
    rules: Iterable[NameRule], prefix: str = "model.layers.{l}.", layer: str = r"model\.layers\.(\d+)\."
) -> NameTable:
    """The names of layers by these rules; `layer` matches what tells layers apart."""
    return NameTable(
        (*MODEL_RULES, *layered(rules, MTP_RULES, prefix)),
        layer=layer,
        expert=EXPERT,
        needless=_needless,
    )


HF, SANDWICHED = _table(LAYER_RULES), _table(SANDWICHED_RULES)
PAIRED = _table(PAIRED_RULES, "model.layers.{pair}.", r"model\.layers\.(\d+\.self_attn\.\d+)\.")
INNER = "language_model."  # begins the names of a language model in one that also sees


def _needless_around(name: str, config: Config, found: Container[str]) -> bool:
    inner = name.removeprefix(INNER)
    return name.startswith(VISION) or (inner != name and _needless(inner, config, found))


def table_of(config: Config) -> NameTable:
    """The names table of a released folder of such a model."""
    if config.model_type in PAIRED_LAYERS:
        return PAIRED
    return SANDWICHED if config.sandwich_norm else HF


def names_of(config: Config, tensors: Iterable[str]) -> NameTable:
    """The names table of a folder with these tensors."""
    table = table_of(config)
    is_inner = any(name.startswith(INNER) for name in tensors)
    return table.under(INNER, _needless_around) if is_inner else table
