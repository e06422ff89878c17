"""Every bad config.json."""

import models
from faults.change import Fault, folder_instead_of, pipe_instead_of, remove, sparse
from faults.hf import config, config_text, raw
from faults.safetensors_corpus import NESTED

from mla_jax.base.errors import BadConfig, Unsupported

_HUGE = "9" * 4000

FAULTS = (
    # row 37: a config.json that is none
    Fault("config_missing", remove("config.json"), BadConfig, ("config.json", "No such file")),
    Fault(
        "config_is_a_folder",
        folder_instead_of("config.json"),
        BadConfig,
        ("regular file",),
    ),
    Fault("config_is_a_pipe", pipe_instead_of("config.json"), BadConfig, ("config.json", "not a regular file")),
    Fault("config_empty", config_text(lambda text: ""), BadConfig, ("config.json", "not valid JSON")),
    Fault("config_cut", config_text(lambda text: text[:100]), BadConfig, ("config.json", "not valid JSON")),
    Fault("config_of_1_gb", sparse("config.json", 1 << 30), BadConfig, ("config.json", "too large", "1,048,576")),
    Fault("config_is_a_list", config_text(lambda text: "[]"), BadConfig, ("not a JSON object", "list")),
    Fault("config_not_utf8", raw(lambda d: b'{"a": "\xff"}', "config.json"), BadConfig, ("not valid JSON",)),
    Fault("config_nested", raw(lambda d: b'{"a": ' + NESTED + b"}", "config.json"), BadConfig, ("nested too deeply",)),
    Fault(
        "config_key_twice", config_text(lambda t: t[:-1] + ', "hidden_size": 48}'), BadConfig, ("key given twice", "hidden_size")
    ),
    Fault("config_nan", config_text(lambda t: t.replace("1e-06", "NaN")), BadConfig, ("not valid JSON", "holds NaN")),
    Fault("config_infinity", config_text(lambda t: t.replace("1e-06", "-Infinity")), BadConfig, ("holds -Infinity",)),
    Fault("config_1e999", config_text(lambda t: t.replace("10000.0", "1e999")), BadConfig, ("number 1e999 is too large",)),
    Fault(
        "config_integer_of_5000_digits",
        config_text(lambda t: t.replace("10000.0", "9" * 5000)),
        BadConfig,
        ("not valid JSON", "number 9999", "is too large"),
    ),
    Fault(
        "config_integer_of_4000_digits",
        config_text(lambda t: t.replace("10000.0", _HUGE)),
        BadConfig,
        ("not valid JSON", "number 9999", "is too large"),
    ),
    Fault(
        "config_with_half_a_surrogate_pair",
        config_text(lambda t: t[:-1] + ', "note": ["\\ud83d", "\\ud83d\\ude00"]}'),
        BadConfig,
        ("config.json is not valid JSON", "\\ud83d, half of a surrogate pair"),
    ),
    Fault(
        "config_without_kv_lora_rank", config(kv_lora_rank=...), BadConfig, ("not an MLA model", "deepseek_v3", "no kv_lora_rank")
    ),
    Fault("config_with_null_kv_lora_rank", config(kv_lora_rank=None), BadConfig, ("not an MLA model", "no kv_lora_rank")),
    Fault(
        "config_without_sizes",
        config(hidden_size=..., vocab_size=...),
        BadConfig,
        ("2 faults", "hidden_size is missing", "vocab_size is missing"),
    ),
    Fault("config_of_no_family", config(model_type=["deepseek_v3"]), BadConfig, ("model_type is not a name", "deepseek_v3")),
    # row 38: values that describe no model
    *(
        Fault(f"{name}_{value}", config(**{name: value}), BadConfig, (f"{name} is {value}",))
        for name, value in [
            ("hidden_size", 0),
            ("num_hidden_layers", -1),
            ("num_hidden_layers", 1 << 31),
            ("vocab_size", 0),
            ("kv_lora_rank", 0),
            ("q_lora_rank", -5),
            ("qk_rope_head_dim", 7),
            ("qk_nope_head_dim", 0),
            ("v_head_dim", 1 << 31),
            ("moe_intermediate_size", 0),
            ("num_experts_per_tok", 0),
            ("num_experts_per_tok", 9),
            ("n_group", 3),
            ("topk_group", 5),
            ("first_k_dense_replace", -1),
            ("moe_layer_freq", 0),
            ("rms_norm_eps", 0),
            ("rms_norm_eps", 2),
            ("rope_theta", -1.0),
            ("max_position_embeddings", 0),
            ("num_nextn_predict_layers", 1000),
            ("n_routed_experts", 0),
            ("hidden_size", 48.5),
            ("hidden_size", True),
            ("norm_topk_prob", 1),
            ("routed_scaling_factor", []),
        ]
    ),
    *(
        Fault(f"heads_{n}", config(num_attention_heads=n, num_key_value_heads=n), BadConfig, (f"num_attention_heads is {n}",))
        for n in (0, -4, 1 << 31)
    ),
    Fault(
        "topk_beyond_experts",
        config(num_experts_per_tok=9),
        BadConfig,
        ("num_experts_per_tok is 9, but n_routed_experts only 8",),
    ),
    Fault("groups_do_not_divide", config(n_group=3), BadConfig, ("n_group is 3, which does not divide n_routed_experts 8",)),
    Fault(
        "topk_beyond_kept_groups",
        config(topk_group=1),
        BadConfig,
        ("num_experts_per_tok is 3, but 1 groups hold only 2 experts",),
    ),
    Fault(
        "unknown_routing",
        config(topk_method="hash", scoring_func="sqrtsoftplus"),
        BadConfig,
        ("2 faults", "hash", "sqrtsoftplus"),
    ),
    Fault(
        "sizes_are_texts",
        config(hidden_size="48", eos_token_id="</s>"),
        BadConfig,
        ("hidden_size is '48'", "eos_token_id is ('</s>',)"),
    ),
    Fault(
        "token_ids_out_of_range", config(eos_token_id=[1, 1 << 40], bos_token_id=-1), BadConfig, ("bos_token_id", "eos_token_id")
    ),
    Fault(
        "layer_types_of_another_length",
        config(mlp_layer_types=["dense"]),
        BadConfig,
        ("mlp_layer_types has 1 entries for 3 layers",),
    ),
    Fault(
        "layer_types_of_other_words",
        config(mlp_layer_types=["dense", "mamba", "dense"]),
        BadConfig,
        ("other words than dense and sparse",),
    ),
    Fault(
        "rope_settings_that_contradict_each_other",
        config(rope_scaling=models.yarn(4, 1, 1), rope_parameters={"rope_type": "yarn", "factor": 8}),
        BadConfig,
        ("contradict each other", "factor is 4 in rope_scaling and 8 in rope_parameters"),
    ),
    *(
        Fault(f"arithmetic_of_{key}", config(**{key: value}), Unsupported, ("not implemented", f"{key} = {value!r}"))
        for key, value in {
            "llama_4_scaling_beta": 0.1,
            "use_mla_scaling_factor": True,
            "gated_mla": True,
            "hc_mult": 4,
            "index_topk_freq": 4,
            "layer_types": ["sliding_attention"],
        }.items()
    ),
    Fault("rope_scaling_is_a_text", config(rope_scaling="yarn"), BadConfig, ("RoPE settings", "yarn")),
    Fault(
        "rope_scaling_of_texts",
        config(rope_scaling={"type": "yarn", "factor": "40"}),
        BadConfig,
        ("rope_scaling.factor is '40'",),
    ),
    Fault("rope_factor_negative", config(rope_scaling=models.yarn(-4, 1, 1)), BadConfig, ("rope_scaling.factor is -4",)),
    Fault(
        "rope_of_huge_integers",
        config(rope_scaling=models.yarn(int(_HUGE), 1, 1)),
        BadConfig,
        ("not valid JSON", "number 9999", "is too large"),
    ),
    Fault(
        "block_size_of_zero",
        config(quantization_config={"quant_method": "fp8", "weight_block_size": [0, 128]}),
        BadConfig,
        ("weight_block_size",),
    ),
    Fault(
        "scale_format_is_a_list",
        config(quantization_config={"quant_method": "fp8", "scale_fmt": []}),
        BadConfig,
        ("scale_fmt is []",),
    ),
    Fault(
        "every_size_wrong",
        config(
            num_attention_heads=0,
            num_key_value_heads=0,
            kv_lora_rank=-1,
            q_lora_rank=-1,
            qk_rope_head_dim=7,
            num_experts_per_tok=0,
            hidden_size=0,
        ),
        BadConfig,
        (
            "6 faults",
            "num_attention_heads is 0",
            "kv_lora_rank is -1",
            "q_lora_rank is -1",
            "qk_rope_head_dim is 7",
            "num_experts_per_tok is 0",
            "hidden_size is 0",
            "expected an even number",
        ),
    ),
    Fault(
        "every_route_wrong",
        config(num_experts_per_tok=9, n_group=3, topk_group=4),
        BadConfig,
        ("3 faults", "is 9", "n_group is 3", "topk_group is 4"),
    ),
)
