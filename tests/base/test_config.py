"""config.json of every family, in every spelling, and the refusals."""

import copy
import functools
import json

import jaxtyping
import models
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_jax.base.config import Config, Quantization, RopeScaling
from mla_jax.base.errors import BadConfig, MlaJaxError, Unsupported
from mla_jax.base.families import NEUTRAL_VALUES, OTHER_PREFIXES, OTHER_WORDS, PRESETS, ROPE_NEUTRAL_VALUES
from mla_jax.generate import main

V3 = models.FAMILIES["v3"]

# ---- presets, against the published table

FIELDS = """
    hidden_size num_hidden_layers num_attention_heads intermediate_size moe_intermediate_size n_routed_experts
    n_shared_experts num_experts_per_tok first_k_dense_replace moe_layer_freq q_lora_rank kv_lora_rank qk_nope_head_dim
    qk_rope_head_dim v_head_dim topk_method scoring_func n_group topk_group norm_topk_prob routed_scaling_factor
    num_nextn_predict_layers vocab_size rope_theta max_position_embeddings bos_token_id eos_token_id
""".split()  # noqa: SIM905
# fmt: off
PUBLISHED = {
    "v2_lite": (2048, 27, 16, 10944, 1408, 64, 2, 6, 1, 1, None, 512, 128, 64, 128, "greedy", "softmax", 1, 1, False,
                1.0, 0, 102400, 10000, 163840, 100000, (100001,)),
    "v2": (5120, 60, 128, 12288, 1536, 160, 2, 6, 1, 1, 1536, 512, 128, 64, 128, "group_limited_greedy", "softmax",
           8, 3, False, 16, 0, 102400, 10000, 163840, 100000, (100001,)),
    "v3": (7168, 61, 128, 18432, 2048, 256, 1, 8, 3, 1, 1536, 512, 128, 64, 128, "noaux_tc", "sigmoid", 8, 4, True, 2.5, 1,
           129280, 10000, 163840, 0, (1,)),
    "kimi_k2": (7168, 61, 64, 18432, 2048, 384, 1, 8, 1, 1, 1536, 512, 128, 64, 128, "noaux_tc", "sigmoid", 1, 1, True, 2.827, 0,
                163840, 50000, 131072, 163584, (163585,)),
    "glm_4_7_flash": (2048, 47, 20, 10240, 1536, 64, 1, 4, 1, 1, 768, 512, 192, 64, 256, "noaux_tc", "sigmoid", 1, 1, True,
                      1.8, 1, 154880, 1e6, 202752, None, (154820, 154827, 154829)),
    "mistral_small_4": (4096, 36, 32, 12288, 2048, 128, 1, 4, 0, 1, 1024, 256, 64, 64, 128, "none", "softmax", 1, 1, True, 1.0, 0,
                        131072, 10000, 1048576, 1, (2,)),
    "axk1": (7168, 61, 64, 18432, 2048, 192, 1, 8, 1, 1, 1536, 512, 128, 64, 128, "noaux_tc", "sigmoid", 8, 4, True, 2.5, 0,
             163840, 10000, 32768, 163691, (163691,)),
    "minicpm3": (2560, 62, 40, 6400, None, None, None, None, 0, 1, 768, 256, 64, 32, 64, "greedy", "softmax", 1, 1, False, 1.0, 0,
                 73448, 10000, 32768, 1, (2, 73440)),
    "longcat_flash": (6144, 56, 64, 12288, 2048, 512, None, 12, 0, 2, 1536, 512, 128, 64, 128, "noaux_tc", "softmax", 1, 1, False,
                      6.0, 0, 131072, 10000000, 131072, 1, (2,)),
    "v3_2": (7168, 61, 128, 18432, 2048, 256, 1, 8, 3, 1, 1536, 512, 128, 64, 128, "noaux_tc", "sigmoid", 8, 4, True, 2.5, 1,
             129280, 10000, 163840, 0, (1,)),
    "glm_5_2": (6144, 78, 64, 12288, 2048, 256, 1, 8, 3, 1, 2048, 512, 192, 64, 256, "noaux_tc", "sigmoid", 1, 1, True,
                2.5, 1, 154880, 8e6, 1 << 20, None, (154820, 154827, 154829)),
}
# fmt: on
ROPE = {
    "v2_lite": (40, 0.707, 32, 4096),
    "v2": (40, 0.707, 32, 4096),
    "v3": (40, 1.0, 32, 4096),
    "kimi_k2": (32, 1.0, 1, 4096),
    "glm_4_7_flash": None,
    "mistral_small_4": (128, 1.0, 32, 8192),
    "axk1": None,
    "minicpm3": (1.0, None, 32, 32768),
    "longcat_flash": None,
    "v3_2": (40, 1.0, 32, 4096),
    "glm_5_2": None,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_the_published_architecture(name):
    config = Config.preset(name)
    found = {field: getattr(config, field) for field in FIELDS}
    found |= {field: found[field] or 1 for field in ("n_group", "topk_group")}  # absent means one group
    assert found == dict(zip(FIELDS, PUBLISHED[name], strict=True))
    assert config.notes == ()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_rotary_settings(name):
    rope = Config.preset(name).rope_scaling
    found = rope and (rope.factor, rope.mscale, rope.beta_fast, rope.original_max_position_embeddings)
    assert found == ROPE[name]
    assert rope is None or rope.rope_type == ("longrope" if name == "minicpm3" else "yarn")
    assert rope is None or rope.beta_slow == 1
    assert rope is None or rope.mscale == rope.mscale_all_dim


def test_every_published_preset_is_checked():
    assert PRESETS.keys() - {"tiny"} == PUBLISHED.keys() == ROPE.keys()


def test_a_preset_can_be_changed():
    assert Config.preset("v3", num_hidden_layers=2).num_hidden_layers == 2


@pytest.mark.parametrize("name", [5, None, ["v3"], [10**5000]])
def test_a_preset_of_no_name_is_refused(monkeypatch, name):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checks of the tests
    with pytest.raises(BadConfig, match="no preset of type"):
        Config.preset(name)


def test_an_unknown_preset_names_the_known_ones():
    with pytest.raises(BadConfig, match=r"no preset v9\n.*v2_lite.*v3"):
        Config.preset("v9")


# ---- the two spellings of RoPE

YARN = models.yarn(40, 1.0, 0.7)
GROWING = {**PRESETS["mistral_small_4"]["rope_parameters"], "rope_theta": 10000.0}


def spelled_by_transformers_5(hf: dict) -> dict:
    """`rope_theta` and `rope_scaling` joined into `rope_parameters`."""
    hf = copy.deepcopy(hf)
    scaling = hf.pop("rope_scaling", None) or {"type": "default"}
    return {**hf, "rope_parameters": {**scaling, "rope_type": scaling.pop("type"), "rope_theta": hf.pop("rope_theta")}}


@pytest.mark.parametrize("family", models.FAMILIES)
def test_both_spellings_of_rope_give_equal_configs(family):
    hf = models.FAMILIES[family]
    old, new = Config.from_hf(hf), Config.from_hf(spelled_by_transformers_5(hf))
    assert old == new
    assert old.rope_theta == hf["rope_theta"]
    assert old.notes == new.notes == ()


def test_every_rotary_setting_is_read():
    given = {
        "rope_type": "yarn",
        "rope_theta": 5e4,
        "factor": 8,
        "original_max_position_embeddings": 99,
        "beta_fast": 20,
        "beta_slow": 2,
    }
    given |= {"mscale": 0.5, "mscale_all_dim": 0.6, "attention_factor": 1.5, "truncate": False, "llama_4_scaling_beta": 0.2}
    config = Config.from_hf({**V3, "rope_scaling": None, "rope_parameters": given})
    assert config.rope_theta == 5e4
    assert config.rope_scaling == RopeScaling("yarn", 8, 99, 20, 2, 0.5, 0.6, 1.5, False, 0.2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"factor": 8}, "factor is 40 in rope_scaling and 8 in rope_parameters"),
        ({"rope_type": "linear"}, "rope_type is 'yarn' in rope_scaling and 'linear' in rope_parameters"),
        ({"mscale": None}, "mscale is 1.0 in rope_scaling and None in rope_parameters"),
        ({"rope_theta": 5e4}, "rope_theta is 20000.0 in rope_scaling and 50000.0 in rope_parameters"),
        ({"rope_type": "default"}, "rope_type is 'yarn' in rope_scaling and 'default' in rope_parameters"),
    ],
)
def test_two_spellings_that_contradict_each_other_are_refused_with_both_values(change, words):
    old = {**YARN, "rope_theta": 2e4}
    new = {**{k: v for k, v in old.items() if k != "type"}, "rope_type": "yarn", **change}
    with pytest.raises(BadConfig, match=f"contradict each other\n.*{words}"):
        Config.from_hf({**V3, "rope_scaling": old, "rope_parameters": new})


@pytest.mark.parametrize("rope_scaling", [None, {}, YARN, {**YARN, "factor": 40}])
def test_two_spellings_that_say_the_same_are_accepted(rope_scaling):
    new = {**{k: v for k, v in YARN.items() if k != "type"}, "rope_type": "yarn", "rope_theta": 10000.0}
    config = Config.from_hf({**V3, "rope_scaling": rope_scaling, "rope_parameters": new})
    assert config == Config.from_hf({**V3, "rope_scaling": YARN})


def test_an_absent_factor_is_the_ratio_of_the_lengths():
    scaling = {"type": "yarn", "original_max_position_embeddings": 64}
    assert Config.from_hf({**V3, "rope_scaling": scaling}).rope_scaling.factor == 512 / 64


@pytest.mark.parametrize("given", [None, {}, {"type": "default"}, {"rope_type": "default", "rope_theta": 10000.0}])
def test_no_scaling_can_be_said_in_many_ways(given):
    assert Config.from_hf({**V3, "rope_scaling": given}).rope_scaling is None


@pytest.mark.parametrize("kind", ["llama3", "dynamic", 7, ["yarn"]])
def test_other_rotary_scalings_are_refused(kind):
    with pytest.raises(Unsupported, match=r"rope_type .* is not implemented\n.*known: default, linear, longrope, yarn"):
        Config.from_hf({**V3, "rope_scaling": {**YARN, "type": kind}})


@pytest.mark.parametrize(
    "setting",
    [
        {"partial_rotary_factor": 0.5},
        {"attn_factor": 2.0},
        {"full_attention": {"rope_type": "yarn"}},
    ],
)
def test_other_rotary_settings_are_refused_by_name(setting):
    for rope in ({**YARN, **setting}, setting):
        with pytest.raises(Unsupported, match=next(iter(setting))):
            Config.from_hf({**V3, "rope_scaling": rope})


def stretched(length: int = 512, **changes) -> Config:
    return Config.from_hf(
        {**V3, "max_position_embeddings": length, "rope_scaling": {**models.longrope([1, 1.5, 2, 4.0], 128), **changes}}
    )


def test_a_factor_of_each_frequency_is_read():
    rope = stretched().rope_scaling
    assert (rope.rope_type, rope.short_factor, rope.long_factor) == ("longrope", (1, 1.5, 2, 4), (1, 1.5, 2, 4))
    assert rope.factor == 512 / 128


def test_other_factors_for_longer_texts_are_refused_where_texts_can_be_longer():
    other = {"long_factor": [2.0, 2.0, 2.0, 2.0]}
    with pytest.raises(Unsupported, match=r"long_factor is not short_factor, for max_position_embeddings 512 beyond 128"):
        stretched(**other)
    assert stretched(128, **other).rope_scaling.short_factor == (1, 1.5, 2, 4)


@pytest.mark.parametrize("factors", [None, [1.0, 2.0], [1.0, 2.0, 3.0, -1.0], [1.0, 2.0, 3.0, "4"], 5])
def test_factors_that_are_no_number_of_each_frequency_are_refused(factors):
    with pytest.raises(BadConfig, match=r"rope_scaling\.short_factor is"):
        stretched(short_factor=factors, long_factor=factors)


def test_queries_that_grow_from_no_length_on_are_refused():
    with pytest.raises(Unsupported, match=r"llama_4_scaling_beta = 0\.1"):
        Config.from_hf({**V3, "rope_scaling": {"type": "default", "llama_4_scaling_beta": 0.1}})


@pytest.mark.parametrize("factor", [1, None, 64 / 128])
def test_a_family_can_name_the_rotated_part_of_a_head(factor):
    assert written("mistral4", rope_parameters=GROWING | {"partial_rotary_factor": factor}) == written("mistral4")


@pytest.mark.parametrize(("family", "factor"), [("mistral4", 0.25), ("deepseek_v3", 64 / 192)])
def test_another_part_of_a_head_is_refused(family, factor):
    with pytest.raises(Unsupported, match="partial_rotary_factor"):
        written(family, rope_parameters=GROWING | {"partial_rotary_factor": factor})


def test_without_rotary_settings_a_family_has_its_own():
    assert written("mistral4", rope_parameters=None) == written("mistral4")
    assert written("mistral4").rope_scaling.llama_4_scaling_beta == 0.1


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in ROPE_NEUTRAL_VALUES.items() for v in values])
def test_rotary_settings_that_change_nothing_are_accepted(key, value):
    assert Config.from_hf({**V3, "rope_scaling": {**V3["rope_scaling"], key: value}}) == Config.from_hf(V3)


# ---- as transformers 5.23 writes them: the content of DeepseekV2Config(), DeepseekV3Config() and so on

WRITTEN = {
    "deepseek_v2": """
        {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 0,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
        "kv_lora_rank": 512, "max_position_embeddings": 2048, "mlp_bias": false, "model_type": "deepseek_v2",
        "moe_intermediate_size": 1407, "n_group": null, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob":
        false, "num_attention_heads": 32, "num_experts_per_tok": null, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "output_router_logits": false, "pad_token_id": null, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_head_dim": 192,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_parameters": {"rope_theta": 10000.0,
        "rope_type": "default"}, "routed_scaling_factor": 1.0, "tie_word_embeddings": false, "topk_group": null,
        "topk_method": "greedy", "transformers_version": "5.23.0", "use_cache": true, "v_head_dim": 128, "vocab_size": 102400}
    """,
    "deepseek_v3": """
        {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "first_k_dense_replace": 3,
        "head_dim": 64, "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 4096, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "output_router_logits": false, "pad_token_id": null, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_head_dim": 192,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": true, "rope_parameters":
        {"rope_theta": 10000.0, "rope_type": "default"}, "routed_scaling_factor": 2.5, "tie_word_embeddings": false,
        "topk_group": 4, "transformers_version": "5.23.0", "use_cache": true, "v_head_dim": 128, "vocab_size": 129280}
    """,
    "glm4_moe_lite": """
        {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10240, "kv_lora_rank": 512,
        "max_position_embeddings": 202752, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse", "sparse", "sparse",
        "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse",
        "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse",
        "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse",
        "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse", "sparse"], "model_type": "glm4_moe_lite",
        "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": true,
        "num_attention_heads": 20, "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20,
        "output_router_logits": false, "pad_token_id": null, "pretraining_tp": 1, "q_lora_rank": 768, "qk_head_dim": 256,
        "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05, "rope_interleave": true, "rope_parameters":
        {"rope_theta": 10000.0, "rope_type": "default"}, "routed_scaling_factor": 1.8, "tie_word_embeddings": false,
        "topk_group": 1, "transformers_version": "5.23.0", "use_cache": true, "v_head_dim": 256, "vocab_size": 154880}
    """,
    "axk1": """
        {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 163691, "eos_token_id": 163691, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 32768, "model_type": "axk1", "moe_intermediate_size": 2048, "n_group": 8,
        "n_routed_experts": 192, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64, "output_router_logits": false,
        "pad_token_id": null, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_head_dim": 192, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": true, "rope_parameters": {"rope_theta": 10000.0,
        "rope_type": "default"}, "routed_scaling_factor": 2.5, "tie_word_embeddings": false, "topk_group": 4,
        "transformers_version": "5.23.0", "use_cache": true, "v_head_dim": 128, "vocab_size": 163840}
    """,
    "longcat_flash": """
        {"attention_bias": false, "attention_dropout": 0.0, "attention_method": "MLA", "bos_token_id": 1, "eos_token_id": 2,
        "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288, "head_dim": 64, "hidden_act": "silu", "hidden_size": 6144,
        "initializer_range": 0.02, "kv_lora_rank": 512, "max_position_embeddings": 131072, "mla_scale_kv_lora": true,
        "mla_scale_q_lora": true, "model_type": "longcat_flash", "moe_topk": 12, "n_routed_experts": 512,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_layers": 28, "output_router_logits": false, "pad_token_id":
        null, "q_lora_rank": 1536, "qk_head_dim": 192, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "routed_scaling_factor": 6.0,
        "tie_word_embeddings": false, "transformers_version": "5.23.0", "use_cache": true, "v_head_dim": 128, "vocab_size":
        131072, "zero_expert_num": 256, "zero_expert_type": "identity"}
    """,
    "minicpm3": """
        {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1, "dim_model_base": 256, "eos_token_id": 2,
        "head_dim": 32, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.1, "intermediate_size": 6400,
        "kv_lora_rank": 256, "max_position_embeddings": 32768, "mlp_bias": false, "model_type": "minicpm3",
        "num_attention_heads": 40, "num_hidden_layers": 62, "num_key_value_heads": 40, "pad_token_id": null, "pretraining_tp":
        1, "q_lora_rank": 768, "qk_head_dim": 96, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "scale_depth": 1.4, "scale_emb": 12,
        "tie_word_embeddings": true, "transformers_version": "5.23.0", "use_cache": true, "v_head_dim": 64, "vocab_size":
        73448}
    """,
    "mistral4": """
        {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 0,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 12288,
        "kv_lora_rank": 256, "max_position_embeddings": 1048576, "model_type": "mistral4", "moe_intermediate_size": 2048,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": true, "num_attention_heads": 32,
        "num_experts_per_tok": 4, "num_hidden_layers": 36, "num_key_value_heads": 32, "output_router_logits": false,
        "pad_token_id": 11, "pretraining_tp": 1, "q_lora_rank": 1024, "qk_head_dim": 128, "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": true, "rope_parameters": {"beta_fast": 32.0,
        "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 1048576, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
        "rope_type": "yarn", "type": "yarn"}, "routed_scaling_factor": 1.0, "tie_word_embeddings": false, "topk_group": 1,
        "transformers_version": "5.23.0", "use_cache": true, "v_head_dim": 128, "vocab_size": 131072}
    """,
    "youtu": """
        {"attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000, "embedding_initializer_range":
        0.03952847075210474, "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.01976423537605237, "intermediate_size": 6144, "kv_lora_rank": 512, "max_position_embeddings":
        131072, "mlp_bias": false, "model_type": "youtu", "num_attention_heads": 16, "num_hidden_layers": 32,
        "num_key_value_heads": 16, "pad_token_id": null, "q_lora_rank": 1536, "qk_head_dim": 192, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_interleave": true, "rope_parameters": {"rope_theta": 10000.0,
        "rope_type": "default"}, "tie_word_embeddings": true, "transformers_version": "5.23.0", "use_cache": true,
        "v_head_dim": 128, "vocab_size": 128256}
    """,
}


def written(family: str, **changes) -> Config:
    return Config.from_hf({**json.loads(WRITTEN[family]), **changes})


@pytest.mark.parametrize("family", WRITTEN)
def test_what_transformers_5_writes_is_read_without_a_note(family):
    hf, config = json.loads(WRITTEN[family]), written(family)
    assert config.notes == ()
    assert config.rope_theta == 10000.0
    assert (config.rope_scaling is None) == (hf["rope_parameters"]["rope_type"] == "default")
    assert config.eos_token_id == (hf["eos_token_id"],)
    same = [key for key in hf if hasattr(config, key) and key not in ("eos_token_id", "mlp_layer_types", "num_experts_per_tok")]
    assert len(same) > 15
    assert {key: getattr(config, key) for key in same} == {key: hf[key] for key in same}


def test_routing_that_transformers_5_leaves_out_is_that_of_the_family():
    for family in ("deepseek_v3", "glm4_moe_lite"):
        assert not {"scoring_func", "topk_method"} & json.loads(WRITTEN[family]).keys()
        assert (written(family).scoring_func, written(family).topk_method) == ("sigmoid", "noaux_tc")
    assert (written("deepseek_v2").scoring_func, written("deepseek_v2").topk_method) == ("softmax", "greedy")
    assert (written("mistral4").scoring_func, written("mistral4").topk_method) == ("softmax", "none")


def test_layer_types_say_which_layers_have_experts():
    config = written("glm4_moe_lite")
    assert [config.is_moe(layer) for layer in range(47)] == [False] + [True] * 46
    mixed = written("glm4_moe_lite", num_hidden_layers=4, mlp_layer_types=["sparse", "dense", "sparse", "dense"])
    assert [mixed.is_moe(layer) for layer in range(5)] == [True, False, True, False, True]  # the last is MTP's


def test_without_layer_types_the_first_layers_are_dense():
    config = Config.from_hf({**V3, "num_hidden_layers": 6, "first_k_dense_replace": 2, "moe_layer_freq": 2})
    assert [config.is_moe(layer) for layer in range(7)] == [False, False, True, False, True, False, True]


def test_a_dense_model_has_no_experts_in_any_layer():
    config = written("youtu")
    assert config.n_routed_experts is None
    assert not any(config.is_moe(layer) for layer in range(33))


def test_token_ids_beyond_the_vocabulary_are_accepted():
    config = written("youtu", vocab_size=128000)
    assert config.bos_token_id == 128000
    assert config.eos_token_id == (128001,)


@pytest.mark.parametrize(("given", "read"), [(None, ()), (5, (5,)), ([5, 6], (5, 6)), ([], ())])
def test_end_tokens_are_none_one_or_many(given, read):
    assert Config.from_hf({**V3, "eos_token_id": given}).eos_token_id == read


# ---- keys that are absent, null, unknown


@pytest.mark.parametrize("rank", [None, 0])
def test_no_q_lora_rank_means_a_plain_q_proj(rank):
    assert written("deepseek_v3", q_lora_rank=rank).q_lora_rank is None


def test_a_null_stands_for_the_default_of_the_family():
    assert written("deepseek_v3", rms_norm_eps=None, routed_scaling_factor=None) == written("deepseek_v3")
    assert written("deepseek_v2").num_experts_per_tok == 6


def test_a_scale_that_is_null_is_none_though_the_family_has_one():
    config = written("minicpm3", scale_depth=None, dim_model_base=None)
    assert (config.residual_scale, config.logits_scaling, written("minicpm3").logits_scaling) == (1, 1, 10)
    assert Config.from_hf(config.to_hf()) == config


def test_values_of_heads_share_the_width_where_the_family_says_so():
    assert written("minicpm3", v_head_dim=None).v_head_dim == 2560 // 40
    assert written("deepseek_v3", v_head_dim=None).v_head_dim == 128


def test_a_family_that_is_not_named_is_that_of_the_class():
    hf = {k: v for k, v in json.loads(WRITTEN["minicpm3"]).items() if k not in ("model_type", "scale_emb")}
    config = Config.from_hf({**hf, "architectures": ["MiniCPM3ForCausalLM"]})
    assert (config.model_type, config.scale_emb, config.notes) == ("minicpm3", 12, ())
    assert Config.from_hf({**hf, "architectures": ["Other"]}).model_type == "unknown"


PANGU = {
    "attention_kv_lora_dim": 32,
    "attention_q_lora_dim": 24,
    "attention_qk_dim": 16,
    "attention_qk_rope_dim": 8,
    "attention_v_dim": 16,
    "num_routed_experts": 8,
    "num_shared_experts": 1,
    "num_dense_layers": 1,
    "num_mtp_layers": 1,
}


def test_a_family_can_have_words_of_its_own_which_are_written_too():
    ours = models.FAMILIES["pangu_ultra_moe"]
    released = {k: v for k, v in ours.items() if k not in OTHER_WORDS["pangu_ultra_moe"].values()} | PANGU
    config = Config.from_hf(released)
    assert config == Config.from_hf(ours)
    assert config.notes == ()
    written = config.to_hf()
    assert {key: written[key] for key in PANGU} == PANGU
    assert not written.keys() & {"kv_lora_rank", "n_routed_experts"}
    assert Config.from_hf(written) == config


def test_layers_that_are_counted_in_pairs_are_twice_as_many():
    config = written("longcat_flash", num_layers=3)
    assert [config.is_moe(layer) for layer in range(6)] == [True, False] * 3
    assert (config.num_hidden_layers, config.to_hf()["num_layers"]) == (6, 3)
    assert config.shortcut_moe
    with pytest.raises(BadConfig, match="num_hidden_layers is 5, expected pairs"):
        Config.preset("longcat_flash", num_hidden_layers=5)


@pytest.mark.parametrize("count", [0, None])
def test_experts_without_weights_can_be_none(count):
    assert written("longcat_flash", zero_expert_num=count).zero_expert_num == 0


def test_experts_without_weights_count_as_experts_to_choose():
    assert written("longcat_flash", moe_topk=768).routed_per_token == 512
    with pytest.raises(BadConfig, match="num_experts_per_tok is 769"):
        written("longcat_flash", moe_topk=769)


def test_null_experts_mean_a_dense_model():
    assert not any(written("deepseek_v3", n_routed_experts=None).is_moe(layer) for layer in range(61))


def test_an_unknown_family_is_taken_for_deepseek_v3_with_a_note():
    config = Config.from_hf(
        {**{k: v for k, v in V3.items() if k not in ("topk_method", "scoring_func")}, "model_type": "new_mla"}
    )
    assert (config.topk_method, config.scoring_func, config.model_type) == ("noaux_tc", "sigmoid", "new_mla")
    assert any("new_mla is not known" in note and "DeepSeek-V3" in note for note in config.notes)


def test_an_unknown_family_without_experts_is_dense():
    assert Config.from_hf({**models.FAMILIES["youtu"], "model_type": "new"}).n_routed_experts is None


def test_unknown_keys_are_noted_once_and_escaped():
    notes = Config.from_hf({**V3, "favourite_colour": "blue", "a\x1b[2J": 1}).notes
    assert [note for note in notes if "favourite_colour" in note] == ["keys not known and not used: a\\x1b[2J, favourite_colour"]


def test_notes_do_not_make_configs_differ():
    assert Config.from_hf({**V3, "favourite_colour": "blue"}) == Config.from_hf(V3)
    assert hash(Config.from_hf({**V3, "favourite_colour": "blue"})) == hash(Config.from_hf(V3))


# ---- layers that choose tokens

V32, GLM_5 = models.FAMILIES["v32"], models.FAMILIES["glm_5"]


@pytest.mark.parametrize(("hf", "interleave"), [(V32, False), (GLM_5, True)], ids=["v32", "glm_5"])
@pytest.mark.parametrize("word", ["indexed_attention", "deepseek_sparse_attention"])
def test_both_words_for_layers_with_an_indexer_are_known(hf, interleave, word):
    config = Config.from_hf({**hf, "layer_types": [word] * hf["num_hidden_layers"]})
    assert config == Config.from_hf(hf)
    assert (config.index_topk, config.index_head_dim, config.indexer_rope_interleave) == (24, 16, interleave)
    flagged = Config.from_hf({**hf, "indexer_rope_interleave": not interleave})
    assert flagged.indexer_rope_interleave == (not interleave)


def test_sizes_of_an_indexer_that_are_absent_are_those_of_the_release():
    sizes = ("index_topk", "index_n_heads", "index_head_dim")
    found = [[getattr(Config.preset(name), size) for size in sizes] for name in ("v3_2", "glm_5_2")]
    assert found == [[2048, 64, 128], [2048, 32, 128]]


def test_layers_of_glm_5_2_with_an_indexer_are_the_published_ones():
    config = Config.preset("glm_5_2")
    own = [layer for layer in range(78) if config.has_indexer(layer)]
    assert own == [0, 1, *range(2, 78, 4)]
    assert config.has_indexer(78), "MTP's layer"


@pytest.mark.parametrize(
    ("keys", "own"),
    [
        ({"index_topk_freq": None}, [0, 1, 2, 3, 4]),
        ({"index_topk_freq": 1}, [0, 1, 2, 3, 4]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [0, 2, 4]),
        ({"index_topk_pattern": "FSSFS"}, [0, 3]),
        ({"index_topk_pattern": ["full", "shared", "full", "full", "shared"]}, [0, 2, 3]),
        ({"index_topk_pattern": "FSSFS", "indexer_types": ["full"] * 4 + ["shared"]}, [0, 1, 2, 3]),
    ],
    ids=str,
)
def test_the_layers_with_an_indexer_follow_from_the_first_of_three_keys(keys, own):
    config = Config.from_hf({**GLM_5, **keys})
    assert [layer for layer in range(5) if config.has_indexer(layer)] == own


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"indexer_types": ["shared", "full", "full", "full", "full"]}, "begins with shared"),
        ({"indexer_types": ["full"] * 4}, "has 4 entries for 5 layers"),
        ({"index_topk_pattern": "FSXFS"}, "holds X, expected full or shared"),
        ({"index_topk": 0}, "index_topk is 0, expected 1 to"),
        ({"index_n_heads": "many"}, "index_n_heads is .*many"),
        ({"index_head_dim": 4}, "index_head_dim is 4, expected at least qk_rope_head_dim 8"),
        ({"q_lora_rank": None}, "q_lora_rank is not set"),
        ({"index_topk_freq": "often"}, "index_topk_freq is not a whole number"),
    ],
    ids=str,
)
def test_an_impossible_indexer_is_refused(keys, words):
    with pytest.raises(BadConfig, match=rf"(?s){words}"):
        Config.from_hf({**GLM_5, **keys})


def test_a_family_with_indexers_is_refused_with_other_layers():
    with pytest.raises(Unsupported, match=r"layer_types = .*we compute indexed_attention in every layer"):
        Config.from_hf({**V32, "layer_types": ["indexed_attention", "full_attention", "indexed_attention"]})
    with pytest.raises(Unsupported, match=r"index_kpool = 4"):
        Config.from_hf({**GLM_5, "index_kpool": 4})


# ---- what we would compute wrongly


@pytest.mark.parametrize(("model_type", "reason"), [("axk2", "gates"), ("hy_v4", "sinks"), ("longcat_flash_ngram", "n-gram")])
def test_families_that_are_known_and_not_built_are_refused_with_the_reason(model_type, reason):
    with pytest.raises(Unsupported, match=rf"{model_type} is known but not supported yet\n.*{reason}"):
        Config.from_hf({**V3, "model_type": model_type})


OTHER = {
    "hidden_act": "gelu",
    "attention_bias": True,
    "mlp_bias": True,
    "mla_use_nope": True,
    "attention_method": "GQA",
    "zero_expert_type": "drop",
    "router_bias": True,
    "embedding_multiplier": 2.0,
    "logits_scaling": 8,
    "residual_multiplier": 0.2,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "sliding_window": 4096,
    "linear_attn_config": {"kda_layers": [1]},
    "swiglu_limit": 10,
    "partial_rotary_factor": 0.5,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "mtp_hidden_states_first": True,
    "apply_mla_qkv_lora_rescale": True,
    "use_mla_scaling_factor": True,
    "sliding_window_size": 128,
    "attention_output_gate": True,
    "gated_mla": True,
    "learnable_sink": True,
    "enable_ihc": True,
    "mla_use_output_gate": True,
}
OF_A_KIND = {
    "index_topk": 2048,
    "index_n_heads": 64,
    "llama_4_scaling": {"beta": 0.1},
    "llama_4_scaling_beta": 0.1,
    "mla_scale_kv_norm": 0.5,
    "index_topk_freq": 4,
    "index_topk_pattern": "FSSF",
    "index_share_for_mtp_iteration": True,
    "indexer_types": ["full", "shared"],
    "hc_mult": 4,
    "hc_eps": 1e-6,
}


def test_every_key_that_changes_the_arithmetic_is_tried():
    assert OTHER.keys() == NEUTRAL_VALUES.keys()
    assert {prefix for prefix in OTHER_PREFIXES if any(key.startswith(prefix) for key in OF_A_KIND)} == {*OTHER_PREFIXES}


@pytest.mark.parametrize("key", OF_A_KIND)
def test_keys_of_a_kind_that_changes_the_arithmetic_are_refused_by_name_unless_they_say_nothing(key):
    with pytest.raises(Unsupported, match=rf"(?s)arithmetic that is not implemented.*{key} = .*we compute"):
        Config.from_hf({**V3, key: OF_A_KIND[key]})
    for value in (None, False, 0, [], {}, ""):
        assert Config.from_hf({**V3, key: value}).notes == ()


@pytest.mark.parametrize("layers", [["full_attention", "sliding_attention"], "sliding_attention", 5, [["full_attention"]]])
def test_layers_that_see_a_part_of_the_context_are_refused(layers):
    with pytest.raises(Unsupported, match=r"layer_types = .*we compute full_attention in every layer"):
        Config.from_hf({**V3, "layer_types": layers})


def test_layers_that_all_see_the_full_context_are_accepted():
    assert Config.from_hf({**V3, "layer_types": ["full_attention"] * 3}).notes == ()


def test_foreign_arithmetic_is_refused_before_anything_is_planned(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps({**V3, "llama_4_scaling_beta": 0.1}))
    assert main(["--model", str(tmp_path), "--dry-run"]) == Unsupported.exit_code
    assert "llama_4_scaling_beta = 0.1" in capsys.readouterr().err


@pytest.mark.parametrize("key", OTHER)
def test_keys_that_change_the_arithmetic_are_refused_by_name(key):
    with pytest.raises(Unsupported, match=rf"(?s)arithmetic that is not implemented.*{key} = .*we compute"):
        Config.from_hf({**V3, key: OTHER[key]})


@pytest.mark.parametrize("key", OTHER)
def test_the_same_keys_with_neutral_values_change_nothing(key):
    for value in NEUTRAL_VALUES[key]:
        config = Config.from_hf({**V3, key: value})
        assert config == Config.from_hf(V3)
        assert config.notes == ()


def test_all_foreign_arithmetic_is_listed_together():
    with pytest.raises(Unsupported) as caught:
        Config.from_hf({**V3, **OTHER, "num_key_value_heads": 1})
    assert len(str(caught.value).split("\n")) == 1 + len(OTHER) + 1


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_grouped_heads_are_refused(heads):
    with pytest.raises(Unsupported, match=f"num_key_value_heads = {heads}"):
        Config.from_hf({**V3, "num_key_value_heads": heads})


GROUP = {"targets": ["Linear"], "format": "pack-quantized", "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}


def grouped(**changes) -> dict:
    weights = {"weights": {**GROUP["weights"], **changes}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP | weights}}


def in_fp8(**activations) -> dict:
    """Scales by tensor, and what is said of those of the activations; `dynamic` is False where it is not said."""
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    inputs = {"num_bits": 8, "type": "float", "strategy": "tensor", **activations}
    group = {"format": "float-quantized", "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


MIXED = {"a": {"quant_algo": "NVFP4", "group_size": 16}, "b": {"quant_algo": "FP8"}}  # ModelOpt's algorithms by layer


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "quantization None cannot be read\n  known: fp8 e4m3, compressed-tensors, awq"),
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' cannot be read"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'; known: 'e4m3'"),
        ({"quant_method": "compressed-tensors"}, "config_groups = None"),
        ({"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["X"]}}, "config_groups.W4A16 = ['X']; known:"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {}}}},
            "config_groups.a.format = None; known:",
        ),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": GROUP | {"weights": {}}}},
            "a.weights.num_bits = 8; known: 4",
        ),
        (grouped(num_bits=8), "config_groups.group_0.weights.num_bits = 8; known: 4"),
        (grouped(actorder="group"), "weights.actorder = 'group'; known: None, 'static'"),
        (grouped(strategy="group", group_size=48), "weights.group_size = 48; known: multiples of 32"),
        (grouped() | {"transform_config": {"config_groups": {"u": 1}}}, "transform_config = "),
        (grouped() | {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config.format = 'sparse-24'; known: 'dense'"),
        ({"quant_method": "awq", "bits": 8}, "bits = 8; known: 4"),
        ({"quant_method": "awq", "version": "gemv"}, "version = 'gemv'; known: 'gemm'"),
        ({"quant_method": "awq", "zero_point": False}, "zero_point = False; known: True"),
        ({"quant_method": "gptq", "bits": 4, "desc_act": True}, "desc_act = True; known: False"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic = "),
        ({"quant_method": "auto-round", "packing_format": "auto_round:exllamav2"}, "packing_format = "),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
        ({"quant_method": "modelopt"}, "quant_algo = None"),
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            "activation_scheme = 'static': activations are rounded by fixed",
        ),
        (in_fp8(dynamic=False), "config_groups.group_0.input_activations.dynamic = False: activations are rounded by fixed"),
        (in_fp8(), "config_groups.group_0.input_activations.dynamic = False: "),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo = 'FP8': activations are rounded by fixed scales"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": MIXED}, "quant_algo = 'FP8': "),
    ],
)
def test_other_quantisations_are_refused_by_the_key_that_stands_against_them(given, words):
    with pytest.raises(Unsupported) as caught:
        Config.from_hf({**V3, "quantization_config": given})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "schemes"),
    [
        (grouped(), [("pack-quantized", (1, 0)), ("pack-quantized f16", (1, 0))]),
        (grouped(symmetric=False), [("pack-quantized asymmetric", (1, 0))]),
        ({"quant_method": "fp8", "weight_block_size": None}, [("fp8", (0, 0)), ("fp8", (1, 0))]),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, [("awq", (1, 64))]),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1, "checkpoint_format": "gptq_v2"}, [("gptq_v2", (1, 0))]),
        ({"quant_method": "auto-round", "bits": 4, "sym": True}, [("gptq", (1, 128))]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, [("nvfp4", (1, 16))]),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, [("float-quantized", (1, 0))]),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, [("fp8", (128, 128))]),
        (in_fp8(dynamic=True), [("float-quantized", (0, 0))]),
    ],
)
def test_settings_of_other_quantisers_become_schemes_and_are_written_as_they_were(given, schemes):
    config = Config.from_hf({**V3, "quantization_config": given})
    assert config.quantization_config is not None
    assert [*config.quantization_config.schemes] == schemes
    assert Config.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(("outer", "inner"), [("kimi_k25", "kimi_k2"), ("mistral3", "mistral4")])
def test_the_language_model_of_one_that_also_sees_is_read(outer, inner):
    inner = {**V3, "model_type": inner}
    config = Config.from_hf({"model_type": outer, "text_config": inner, "quantization_config": grouped()})
    assert config == Config.from_hf({**inner, "quantization_config": grouped()})
    assert "it also sees: the language model alone is read" in config.notes
    with pytest.raises(Unsupported, match="has an MLA model inside"):
        Config.from_hf({"model_type": "kimi_vl", "text_config": inner})


def test_released_fp8_settings_are_read():
    given = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 64],
    }
    assert Config.from_hf({**V3, "quantization_config": given}).quantization_config == Quantization(
        "fp8", "e4m3", (128, 64), "ue8m0"
    )


# ---- there and back


@pytest.mark.parametrize("name", [*PRESETS, *WRITTEN])
def test_what_to_hf_gives_reads_back_equal(name):
    config = Config.preset(name) if name in PRESETS else written(name)
    again = Config.from_hf(json.loads(json.dumps(config.to_hf())))
    assert again == config
    assert again.notes == ()


def test_switches_of_other_families_are_not_written():
    switches = {"scale_emb", "scale_depth", "sandwich_norm", "zero_expert_num", "shortcut_moe", "mla_scale_q_lora"}
    assert not Config.preset("v3").to_hf().keys() & switches
    assert Config.preset("v3", sandwich_norm=True).to_hf()["sandwich_norm"] is True
    assert written("longcat_flash", zero_expert_num=0).to_hf()["zero_expert_num"] == 0


def test_to_hf_names_the_heads_that_transformers_would_otherwise_guess():
    assert Config.preset("tiny").to_hf()["num_key_value_heads"] == 4


def test_a_folder_a_file_and_its_content_read_alike(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert Config.from_hf(tmp_path) == Config.from_hf(str(tmp_path / "config.json")) == Config.from_hf(V3)


def test_a_config_made_by_hand_is_checked_too():
    with pytest.raises(BadConfig, match=r"(?s)2 faults.*hidden_size is 0.*qk_rope_head_dim is 7"):
        Config(0, 64, 2, 4, 96, 32, qk_rope_head_dim=7)


HUGE = 10**5000  # Python itself refuses to write it
NESTED: list = functools.reduce(lambda inner, _: [inner], range(100_000), [])  # it cannot be written either


@pytest.mark.parametrize(
    "content",
    [
        *(
            {**V3, key: HUGE}
            for key in (*(k for k in V3 if k != "eos_token_id"), "num_key_value_heads", "favourite", "index_topk")
        ),
        {**V3, "eos_token_id": ["a", HUGE]},
        {**V3, "hidden_act": [HUGE]},
        {**V3, "hidden_act": NESTED},
        {**V3, "rope_scaling": {"type": NESTED}},
        {**V3, "hidden_size": NESTED},
        {**V3, "favourite": NESTED},
        {**V3, "rope_scaling": {"type": HUGE}},
        {**V3, "rope_scaling": {"type": "yarn", "factor": HUGE}},
        {**V3, "rope_parameters": {"rope_type": "yarn", "factor": 2, "unheard": HUGE}},
        {**V3, "quantization_config": {"quant_method": HUGE}},
        {**V3, "quantization_config": {"quant_method": "fp8", "weight_block_size": [HUGE, 1]}},
        {**V3, 5: 1},
        {**V3, None: 1, "other": 2},
        {**V3, "rope_scaling": {**YARN, 5: 1}},
        {**V3, "rope_scaling": {HUGE: 1}},
        {**V3, "mlp_layer_types": ["dense", HUGE, "dense"]},
        [V3],
        None,
        5,
        "nowhere\0",
    ],
)
def test_content_that_no_json_file_can_hold_gives_our_own_error(content):
    config, error = outcome(content)
    assert (config is None) != (error is None)
    assert all(line.isprintable() and len(line) < 2500 for line in str(error).split("\n"))


def test_a_huge_number_is_shown_by_its_size():
    with pytest.raises(BadConfig, match=r"hidden_size is a number of 16,610 bits"):
        Config.from_hf({**V3, "hidden_size": HUGE})
    with pytest.raises(BadConfig, match=r"hidden_size is a number of 16,610 bits"):
        Config(HUGE, 64, 2, 4, 96, 32)


# ---- random content

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(-(10**99), 10**99),
    st.sampled_from([1 << 20, 1 << 24, 1 << 31, 1 << 63, 0.0, -1.0, 1e-300, 1e300, 0.5]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["yarn", "linear", "default", "fp8", "e4m3", "greedy", "noaux_tc", "softmax", "sigmoid", "", "\ud800", "x" * 300]
    ),
    st.lists(st.integers(-2, 300) | st.sampled_from(["dense", "sparse"]), max_size=4),
    st.dictionaries(
        st.sampled_from(
            [
                "type",
                "rope_type",
                "factor",
                "rope_theta",
                "mscale",
                "beta_fast",
                "original_max_position_embeddings",
                "quant_method",
            ]
        ),
        st.none() | st.sampled_from(["yarn", "linear", "fp8", "e4m3"]) | st.integers(-2, 10**99) | st.floats(0, 100),
        max_size=4,
    ),
)
KEYS = sorted(
    {*V3, *json.loads(WRITTEN["glm4_moe_lite"]), *NEUTRAL_VALUES, "quantization_config", "rope_parameters", "auto_map", "other"}
)


def outcome(content: dict) -> tuple[Config | None, MlaJaxError | None]:
    """The config, or the error if it is one of ours; any other is raised."""
    try:
        return Config.from_hf(content), None
    except MlaJaxError as e:
        return None, e


@settings(max_examples=600)
@given(
    st.sampled_from([*models.FAMILIES]),
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4),
    st.sets(st.sampled_from(KEYS), max_size=2),
)
def test_random_content_gives_a_valid_config_or_our_own_error(family, changes, removed):
    hf = {key: value for key, value in {**models.FAMILIES[family], **changes}.items() if key not in removed}
    config, error = outcome(hf)
    assert all(line.isprintable() and len(line) < 2500 for line in str(error).split("\n"))
    if config is None:
        return
    assert Config.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    assert hash(config) == hash(copy.deepcopy(config))
    numbers = [x for x in (*vars(config).values(), *vars(config.rope_scaling or object).values()) if isinstance(x, int | float)]
    assert all(abs(x) < 1e15 for x in numbers)
    assert 0 < config.num_hidden_layers <= 1000
    assert config.n_routed_experts is None or config.num_experts_per_tok <= config.n_routed_experts + config.zero_expert_num


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=6), VALUES, max_size=12))
def test_content_of_nothing_we_know_gives_our_own_error(content):
    config, error = outcome(content)
    assert (config is None) != (error is None)
