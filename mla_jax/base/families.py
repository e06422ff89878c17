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
    "axk1": {
        **_V3,
        "n_routed_experts": 192,
        "first_k_dense_replace": 1,
        "max_position_embeddings": 32768,
        "post_mlp_layernorm": True,
        "num_nextn_predict_layers": 0,
    },
    "minicpm3": {
        **_DENSE,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": None,  # the heads share the model's width
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
        "rope_interleave": False,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
    "mistral4": {
        **_V3,
        **_UNGROUPED,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "max_position_embeddings": 1048576,
        "n_routed_experts": 128,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 0,
        "topk_method": "none",
        "scoring_func": "softmax",
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
    },
    "longcat_flash": {
        **_V3,
        **_UNGROUPED,
        "n_routed_experts": 512,
        "n_shared_experts": None,
        "num_experts_per_tok": 12,
        "zero_expert_num": 256,
        "shortcut_moe": True,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 6.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000000.0,
        "max_position_embeddings": 131072,
        "num_nextn_predict_layers": 0,
    },
    "pangu_ultra_moe": {
        **_V3,
        **_UNGROUPED,
        "first_k_dense_replace": 3,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 25600000.0,
        "topk_method": "none",
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

# Keys of a family -> ours, where it has words of its own
OTHER_WORDS: dict[str, dict[str, str]] = {
    "longcat_flash": {
        "ffn_hidden_size": "intermediate_size",
        "expert_ffn_hidden_size": "moe_intermediate_size",
        "moe_topk": "num_experts_per_tok",
    },
    "pangu_ultra_moe": {
        "attention_q_lora_dim": "q_lora_rank",
        "attention_kv_lora_dim": "kv_lora_rank",
        "attention_qk_dim": "qk_nope_head_dim",
        "attention_qk_rope_dim": "qk_rope_head_dim",
        "attention_v_dim": "v_head_dim",
        "num_routed_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "num_dense_layers": "first_k_dense_replace",
        "num_mtp_layers": "num_nextn_predict_layers",
    },
}

# Families that count layers in pairs, as `num_layers`
PAIRED_LAYERS = ("longcat_flash",)

# What rotates where neither of the two RoPE keys says it, if not RoPE's usual angles
ROPE_DEFAULTS: dict[str, dict] = {
    "mistral4": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 128.0,
            "original_max_position_embeddings": 8192,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        }
    },
}
# Families whose RoPE settings name the rotated part of a head in `partial_rotary_factor`
NAMING_ROTATED_PART = ("mistral4",)

ARCHITECTURES = {  # the classes that read each model_type, of transformers or of the release
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "axk1": "AXK1ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "longcat_flash": "LongcatFlashForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "pangu_ultra_moe": "PanguUltraMoEForCausalLM",
    "youtu": "YoutuForCausalLM",
}

UNSUPPORTED_TYPES = {
    "axk2": "its norms and the output of its attention have gates (gated_norm_rank), and it has a lightning indexer",
    "hy_v4": "its attention has gates and sinks, its layers hyper-connections (hc_mult), and it has a lightning indexer",
    "longcat2": "it has n-gram embeddings and a lightning indexer",
    "longcat_flash_ngram": "it has n-gram embeddings",
}

# Models that also see, whose language model is their text_config: the rest is not read.
NESTED_TYPES = ("kimi_k25", "mistral3")

# Keys that change the arithmetic, and the values for which ours is right (the first is what we compute).
# fmt: off
_SWITCHES = (
    "attention_bias", "mlp_bias", "mla_use_nope", "use_qk_norm", "qk_layernorm", "mtp_hidden_states_first",
    "apply_mla_qkv_lora_rescale", "use_mla_scaling_factor", "attention_output_gate", "gated_mla", "learnable_sink", "enable_ihc",
    "mla_use_output_gate", "router_bias",
)
_FACTORS = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "partial_rotary_factor")
_LIMITS = (
    "final_logit_softcapping", "attn_logit_softcapping", "sliding_window", "sliding_window_size", "swiglu_limit",
)
# fmt: on
NEUTRAL_VALUES: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_method": ("MLA", None),
    "zero_expert_type": ("identity", None),
    **dict.fromkeys(_SWITCHES, (False, None)),
    **dict.fromkeys(_FACTORS, (1, None)),
    **dict.fromkeys(_LIMITS, (None, 0)),
    "linear_attn_config": (None,),
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


# fmt: off
_MINICPM_FACTORS = [
    1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725, 2.093982484148734, 3.1446935121267696,
    4.937952647693647, 7.524541999994549, 10.475458000005451, 13.062047352306353, 14.85530648787323, 15.906017515851266,
    16.461961959767827, 16.740306425132907, 16.87581087164081, 16.940876586213285,
]
# fmt: on

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
    "mistral_small_4": {
        "model_type": "mistral4",
        **_sizes(4096, 12288, 36, 32, 131072),
        "kv_lora_rank": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **ROPE_DEFAULTS["mistral4"],
    },
    "longcat_flash": {
        "model_type": "longcat_flash",
        **_sizes(6144, 12288, 56, 64, 131072),
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "minicpm3": {
        "model_type": "minicpm3",
        **_sizes(2560, 6400, 62, 40, 73448),
        "kv_lora_rank": 256,
        "bos_token_id": 1,
        "eos_token_id": [2, 73440],
        "rope_scaling": {
            "type": "longrope",
            "original_max_position_embeddings": 32768,
            "short_factor": _MINICPM_FACTORS,
            "long_factor": _MINICPM_FACTORS,
        },
    },
    "axk1": {
        "model_type": "axk1",
        **_sizes(7168, 18432, 61, 64, 163840),
        "bos_token_id": 163691,
        "eos_token_id": 163691,
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
