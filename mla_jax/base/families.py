"""The model families, as data: the defaults of absent keys, the presets, and the keys that need care.

Defaults are those of the released code of each `model_type` (transformers 5.23); presets are the released config.json files."""

_V2 = {
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1407,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
}
_V3 = {
    "q_lora_rank": 1536,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
_UNGROUPED = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_DENSE = {"n_routed_experts": None, "num_nextn_predict_layers": 0}
_INDEXER = {"index_topk": 2048, "index_head_dim": 128}  # DeepSeek Sparse Attention

DEFAULTS: dict[str, dict] = {
    "deepseek_v2": _V2,
    "deepseek_v3": _V3,
    "kimi_k2": {
        **_V3,
        **_UNGROUPED,
        "n_routed_experts": 384,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
    },
    "glm4_moe_lite": {
        **_V3,
        **_UNGROUPED,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
        "max_position_embeddings": 202752,
    },
    "deepseek_v32": {
        **_V3,
        **_INDEXER,
        "index_n_heads": 64,
        "indexer_rope_interleave": False,
        "max_position_embeddings": 163840,
    },
    "glm_moe_dsa": {
        **_V3,
        **_UNGROUPED,
        **_INDEXER,
        "index_n_heads": 32,
        "indexer_rope_interleave": True,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rms_norm_eps": 1e-5,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 202752,
    },
    "youtu": {**_DENSE, "q_lora_rank": 1536, "tie_word_embeddings": True, "max_position_embeddings": 131072},
    "unknown": {**_V3, **_DENSE},  # experts only where the config names them
}

ARCHITECTURES = {  # the classes of transformers that read each model_type
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "youtu": "YoutuForCausalLM",
}

# Models that also see, whose language model is their text_config: the rest is not read.
NESTED_TYPES = ("kimi_k25",)

# Keys that change the arithmetic, and the values for which ours is right (the first is what we compute).
# fmt: off
_SWITCHES = (
    "attention_bias", "mlp_bias", "mla_use_nope", "use_qk_norm", "qk_layernorm", "mtp_hidden_states_first",
    "apply_mla_qkv_lora_rescale", "use_mla_scaling_factor", "attention_output_gate", "gated_mla", "learnable_sink", "enable_ihc",
    "mla_use_output_gate",
)
_FACTORS = ("scale_emb", "embedding_multiplier", "logits_scaling", "residual_multiplier", "partial_rotary_factor")
_LIMITS = (
    "final_logit_softcapping", "attn_logit_softcapping", "sliding_window", "sliding_window_size", "swiglu_limit",
)
# fmt: on
NEUTRAL_VALUES: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "zero_expert_num": (0, None),
    **dict.fromkeys(_SWITCHES, (False, None)),
    **dict.fromkeys(_FACTORS, (1, None)),
    **dict.fromkeys(_LIMITS, (None, 0)),
    **dict.fromkeys(("scale_depth", "dim_model_base", "linear_attn_config"), (None,)),
}

# All keys that begin so change the arithmetic: query scales that grow with the position, scales of the latents, indexers,
# hyper-connections. A value that says nothing is accepted, and so are the keys of an indexer where the family has one.
OTHER_PREFIXES = ("llama_4_scaling", "mla_scale_", "index_", "indexer_", "hc_")
SAYING_NOTHING = (None, False, 0, [], {}, "")

# The same for the further keys in `rope_scaling` or `rope_parameters`.
ROPE_NEUTRAL_VALUES: dict[str, tuple] = {
    "partial_rotary_factor": (1, None),
    "attn_factor": (1, None),
    "extrapolation_factor": (1, None),
    "finetuned": (True, False, None),
}

# Keys that say nothing about the arithmetic of inference, or repeat what other keys say.
# fmt: off
IGNORED_KEYS = frozenset({
    "_from_model_config", "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "auto_map",
    "aux_loss_alpha", "chunk_size_feed_forward", "dtype", "embedding_initializer_range", "ep_size", "head_dim", "id2label",
    "initializer_range", "is_encoder_decoder", "label2id", "layer_types", "num_key_value_heads", "output_attentions",
    "output_hidden_states", "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "qk_head_dim",
    "return_dict", "rope_parameters", "router_aux_loss_coef", "seq_aux", "tokenizer_class", "torch_dtype", "transformers_version",
    "unk_token_id", "use_cache",
})
# fmt: on

_DEEPSEEK = {
    "model_type": "deepseek_v2",
    "max_position_embeddings": 163840,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def _sizes(hidden: int, mlp: int, layers: int, heads: int, vocabulary: int = 102400) -> dict:
    attention = {"num_attention_heads": heads, "kv_lora_rank": 512, "vocab_size": vocabulary}
    return {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, **attention}


def _yarn(factor: float, mscale: float, **changes) -> dict:
    scaling = {
        "type": "yarn",
        "factor": factor,
        "mscale": mscale,
        "mscale_all_dim": mscale,
        "original_max_position_embeddings": 4096,
    }
    return {"rope_scaling": {**scaling, "beta_fast": 32, "beta_slow": 1, **changes}}


PRESETS: dict[str, dict] = {
    "tiny": {
        "model_type": "deepseek_v3",
        **_sizes(128, 256, 3, 4, 512),
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
        **_yarn(4, 1.0, original_max_position_embeddings=1024),
    },
    "v2_lite": {
        **_DEEPSEEK,
        **_sizes(2048, 10944, 27, 16),
        "q_lora_rank": None,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
        **_yarn(40, 0.707),
    },
    "v2": {
        **_DEEPSEEK,
        **_sizes(5120, 12288, 60, 128),
        "moe_intermediate_size": 1536,
        "n_routed_experts": 160,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 8,
        "topk_group": 3,
        "routed_scaling_factor": 16.0,
        **_yarn(40, 0.707),
    },
    "v3_2": {
        "model_type": "deepseek_v32",
        **_sizes(7168, 18432, 61, 128, 129280),
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": _FP8,
        **_yarn(40, 1.0),
    },
    "v3": {
        "model_type": "deepseek_v3",
        **_sizes(7168, 18432, 61, 128, 129280),
        "max_position_embeddings": 163840,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "quantization_config": _FP8,
        **_yarn(40, 1.0),
    },
    "kimi_k2": {
        "model_type": "kimi_k2",
        **_sizes(7168, 18432, 61, 64, 163840),
        "max_position_embeddings": 131072,
        "rope_theta": 50000.0,
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "quantization_config": _FP8,
        **_yarn(32, 1.0, beta_fast=1),
    },
    "glm_4_7_flash": {
        "model_type": "glm4_moe_lite",
        **_sizes(2048, 10240, 47, 20, 154880),
        "rope_theta": 1e6,
        "eos_token_id": [154820, 154827, 154829],
    },
    "glm_5_2": {
        "model_type": "glm_moe_dsa",
        **_sizes(6144, 12288, 78, 64, 154880),
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "max_position_embeddings": 1 << 20,
        "rope_theta": 8e6,
        "eos_token_id": [154820, 154827, 154829],
    },
}
