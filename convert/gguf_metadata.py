"""The metadata of a GGUF file of llama.cpp's architecture `deepseek2`: the config, the text, and what the file is."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mla_jax.base.config import Config, RopeScaling
from mla_jax.base.errors import Unsupported, shortened
from mla_jax.engine.text import GGUF_SAMPLING, open_text
from mla_jax.text.chat import ChatTemplate
from mla_jax.text.gguf_vocabulary import to_metadata
from mla_jax.weights.gguf_config import hf_of_metadata
from mla_jax.weights.gguf_keys import (
    ARCHITECTURE,
    ARCHITECTURE_KEYS,
    BLOCKS,
    EXPERT_KEYS,
    GATE,
    GATES,
    KEY_LENGTH,
    KV_HEADS,
    LOG_FACTOR,
    LOG_MULTIPLIER,
    MTP_LAYERS,
    OF_A_HEAD,
    ROPE_NAMES,
    VALUE_LENGTH,
    YARN_KEYS,
)
from mla_jax.weights.source import Source

Metadata = dict[str, Any]  # as the reader has it: arrays of numbers are numpy arrays

# Of a GGUF file that is converted again: what is written anew
_OWN = ("general.architecture", "general.quantization_version", "general.alignment")
# Fields that change no number, or are compared otherwise
_APART = {
    "bos_token_id",
    "eos_token_id",
    "first_k_dense_replace",
    "mlp_layer_types",
    "model_type",
    "moe_layer_freq",
    "notes",
    "num_nextn_predict_layers",
    "quantization_config",
}
_NONE = {"n_shared_experts": 0, "n_group": 1, "topk_group": 1}  # what None stands for
_LITE_LAYERS = (26, 27)  # llama.cpp knows by these that a model has no q_lora_rank


def architecture(config: Config, mtp: bool, tied: bool) -> Metadata:
    """The keys of the architecture. Raises Unsupported for a model that would be another one when it is read from them."""
    mtp_layers = config.num_nextn_predict_layers if mtp else 0
    found = {name: getattr(config, field) for field, name in ARCHITECTURE_KEYS.items()}
    found |= _widths(config) | _experts(config) | _rope(config.rope_scaling)
    found |= {BLOCKS: config.num_hidden_layers + mtp_layers, MTP_LAYERS: mtp_layers or None}
    keys = {f"{ARCHITECTURE}.{name}": value for name, value in found.items() if value is not None}
    _refuse_other_model(config, keys, tied)
    return keys


def _widths(config: Config) -> Metadata:
    """The layout with `attn_k_b` and `attn_v_b`: one head of the latent is cached."""
    return {
        KV_HEADS: 1,
        KEY_LENGTH: config.kv_lora_rank + config.qk_rope_head_dim,
        VALUE_LENGTH: config.kv_lora_rank,
        KEY_LENGTH + OF_A_HEAD: config.qk_nope_head_dim + config.qk_rope_head_dim,
        VALUE_LENGTH + OF_A_HEAD: config.v_head_dim,
    }


def _experts(config: Config) -> Metadata:
    """Keys that llama.cpp asks for in any model come first."""
    found: Metadata = {
        ARCHITECTURE_KEYS["n_shared_experts"]: config.n_shared_experts or 0,
        ARCHITECTURE_KEYS["moe_intermediate_size"]: config.moe_intermediate_size or config.intermediate_size,
        ARCHITECTURE_KEYS["first_k_dense_replace"]: _leading_dense(config),
    }
    if config.n_routed_experts is None:
        return found
    found |= {name: getattr(config, field) for field, name in EXPERT_KEYS.items()}
    groups = config.n_group or 1
    return found | {
        EXPERT_KEYS["norm_topk_prob"]: config.norm_topk_prob or None,
        EXPERT_KEYS["n_group"]: groups,
        EXPERT_KEYS["topk_group"]: config.topk_group or groups,
        GATE: next((number for number, name in GATES.items() if name == config.scoring_func), None),
    }


def _leading_dense(config: Config) -> int:
    layers = range(config.num_hidden_layers)
    return next((layer for layer in layers if config.is_moe(layer)), config.num_hidden_layers)


def _rope(scaling: RopeScaling | None) -> Metadata:
    if scaling is None:
        return {}
    found: Metadata = {name: getattr(scaling, field) for field, name in ROPE_NAMES.items()}
    found[ROPE_NAMES["factor"]] = float(scaling.factor)
    if scaling.rope_type != "yarn":
        return found
    found |= {name: float(getattr(scaling, field)) for field, name in YARN_KEYS.items()}
    if scaling.mscale_all_dim is not None:
        found[LOG_MULTIPLIER] = LOG_FACTOR * scaling.mscale_all_dim
    return found


# ---- what the keys cannot say


def _refuse_other_model(config: Config, keys: Metadata, tied: bool) -> None:
    as_in_file = {key: _rounded(value) for key, value in keys.items()}
    as_in_file["general.architecture"] = ARCHITECTURE
    hf, _ = hf_of_metadata(as_in_file, () if tied else ("output.weight",))
    wanted, read = _numbers(config), _numbers(Config.from_hf(hf))
    differing = [
        f"{name} is {value}; read back it would be {read[name]}"
        for name, value in wanted.items()
        if not _alike(value, read[name])
    ]
    if differing:
        raise Unsupported(
            "a GGUF file of llama.cpp's architecture deepseek2 cannot describe this model",
            *shortened(differing),
        )


def _rounded(value: Any) -> Any:
    """Fractions are float32 in files."""
    return float(np.float32(value)) if isinstance(value, float) else value


def _numbers(config: Config) -> Metadata:
    """All settings that change what the model computes, flat, with the layers that have experts."""
    found = {name: value for name, value in vars(config).items() if name not in _APART}
    found |= {name: found[name] or value for name, value in _NONE.items()}
    if config.n_routed_experts is None:
        found = {name: value for name, value in found.items() if name not in _OF_EXPERTS}
    elif found["topk_method"] == "group_limited_greedy" and found["n_group"] == 1:
        found["topk_method"] = "greedy"
    scaling = found.pop("rope_scaling")
    found |= {
        f"rope_scaling.{field.name}": scaling and getattr(scaling, field.name)
        for field in dataclasses.fields(RopeScaling)
    }
    return found | {"layers with experts": [*map(config.is_moe, range(config.num_hidden_layers))]}


_OF_EXPERTS = {*EXPERT_KEYS, *_NONE, "moe_intermediate_size", "scoring_func", "topk_method"}


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return one == other


def notes(config: Config) -> Iterator[str]:
    """The settings that llama.cpp computes or reads in its own way, whatever the file says."""
    lite = config.num_hidden_layers in _LITE_LAYERS
    if lite != (config.q_lora_rank is None):
        has = "no" if config.q_lora_rank is None else "a"
        yield (
            f"llama.cpp cannot open it: models of {' or '.join(map(str, _LITE_LAYERS))} layers, and these alone, "
            f"have no q_lora_rank there; this one has {config.num_hidden_layers} layers and {has} q_lora_rank"
        )
    if config.scoring_func == "softmax" and (config.n_group or 1) > 1:
        yield "llama.cpp rates groups of experts by their best two; this model's are rated by the best one"
    scaling = config.rope_scaling
    if scaling and scaling.rope_type == "yarn" and (scaling.beta_fast, scaling.beta_slow) != (32, 1):
        yield (
            "llama.cpp does not read YaRN's betas from files, it takes 32 and 1: "
            f"run it with --yarn-beta-fast {scaling.beta_fast:g} --yarn-beta-slow {scaling.beta_slow:g}"
        )


# ---- text, and what the file is


def described(source: Source, name: str) -> Metadata:
    """The keys `general.*` and `tokenizer.*`: those of a GGUF file stay as they are."""
    if source.metadata is not None:
        kept = {
            key: value
            for key, value in source.metadata.items()
            if key.startswith(("general.", "tokenizer.")) and key not in _OWN
        }
        return {"general.type": "model", "general.name": name, **kept}
    return {"general.type": "model", "general.name": name, **_text(source)}


def _text(source: Source) -> Metadata:
    text, config = open_text(source), source.config
    if text.tokenizer is None:
        return {"tokenizer.ggml.model": "no_vocab"}
    template = text.chat_template.source if isinstance(text.chat_template, ChatTemplate) else None
    vocabulary = to_metadata(text.tokenizer, config.vocab_size, config.bos_token_id, text.end_ids, template)
    return vocabulary | _sampling(text.defaults)


def _sampling(defaults: Mapping[str, Any]) -> Metadata:
    """Settings that differ from the choice among all tokens; none for a model that takes the best one."""
    if not defaults["temperature"]:
        return {}
    given = {"temperature": defaults["temperature"]}
    given |= {
        name: defaults[name]
        for name, all_tokens in (("top_k", 0), ("top_p", 1))
        if defaults[name] != all_tokens
    }
    return {GGUF_SAMPLING[name]: value for name, value in given.items()}
