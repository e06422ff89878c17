"""Translates the metadata of a GGUF file into the mapping that `Config.from_hf` takes.

The keys are those that llama.cpp's converter writes for its architectures `deepseek2`, which covers every DeepSeek-style model
(V2, V3, Kimi-K2, Moonlight, GLM-4.7-Flash, Youtu), `deepseek32` and `glm-dsa`, whose models have indexers. Knows nothing of
files, and of tensors only the names."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import BadConfig, Unsupported, printable, shortened
from mla_jax.base.families import PRESETS
from mla_jax.base.indexers import OWN_CHOICE, TAKEN_CHOICE, types_of_layers
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

# Architectures and the model_type of their files; None: the router tells it
GGUF_ARCHITECTURES = {ARCHITECTURE: None, "deepseek32": "deepseek_v32", "glm-dsa": "glm_moe_dsa"}
_WAITING = {"deepseek4": "its attention is not MLA"}
_GLM_VOCABULARY = 154_880  # files of GLM-4.7-Flash can lack expert_gating_func

# whole numbers that every file has
_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "max_position_embeddings",
)
_NEEDED_BY_INDEXERS = {
    "index_topk": "attention.indexer.top_k",
    "index_n_heads": "attention.indexer.head_count",
    "index_head_dim": "attention.indexer.key_length",
}
# GLM-5.2 is told by its context; its first files do not say which layers have indexers of their own
_GLM_5_2_CONTEXT = 1 << 20
_GLM_5_2_LAYERS = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
# keys that change the arithmetic -> the only value that is implemented
_NEUTRAL = {
    "attention.indexer.top_k": 0,
    "attention.temperature_scale": 0,
    "attention.temperature_length": 0,
    "attention.sliding_window": 0,
    "attention.scale": 0,
    "rope.scaling.yarn_ext_factor": 1,
    "rope.scaling.yarn_attn_factor": 1,
    "rope.scaling.attn_factor": 1,
    "logit_scale": 0,
    "swiglu_clamp_exp": 0,
}
_IGNORED = {
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
}


def config(metadata: Mapping[str, Any], tensors: Collection[str]) -> Config:
    """The model's config; raises BadConfig with every key that is missing or out of range, or Unsupported."""
    hf, notes = hf_of_metadata(metadata, tensors)
    found = Config.from_hf(hf)
    return dataclasses.replace(found, notes=(*found.notes, *notes))


def hf_of_metadata(
    metadata: Mapping[str, Any], tensors: Collection[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The content of a config.json, and notes for the user; `tensors` are the names of the file's tensors."""
    keys = _Keys(metadata)
    hf = {"rms_norm_eps": keys.number(ARCHITECTURE_KEYS["rms_norm_eps"])}
    hf |= {name: keys.integer(ARCHITECTURE_KEYS[name]) for name in _NEEDED}
    hf |= _layers(keys) | _heads(keys, hf) | _vocabulary(keys)
    hf |= _rope(keys, hf)
    hf |= _experts(keys, hf)
    hf |= {
        "hidden_act": "silu",
        "rope_interleave": True,
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    if keys.model_type is None:
        hf["model_type"] = "deepseek_v2" if hf.get("scoring_func") == "softmax" else "deepseek_v3"
    else:
        hf |= {"model_type": keys.model_type} | _indexers(keys, hf, tensors)
    keys.refuse()
    return hf, (*keys.notes, *keys.unknown())


class _Keys:
    """The keys of one architecture; collects faults, notes, and which keys were read."""

    def __init__(self, metadata: Mapping[str, Any]):
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in GGUF_ARCHITECTURES:
            raise _other_architecture(architecture)
        self.model_type = GGUF_ARCHITECTURES[architecture]
        self.all, self.prefix = metadata, f"{architecture}."
        self.read: set[str] = set()
        self.faults: list[str] = []
        self.notes: list[str] = []

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value, or `default` if the key is absent; without a default the key is required.

        None stands for a value that is missing or of another type, which is recorded as a fault."""
        key = name if name.startswith("tokenizer.") else self.prefix + name
        self.read.add(key)
        value = _scalar(self.all.get(key))
        absent = None if default is ... else default
        if value is None:
            if default is ...:
                self.faults.append(f"{key} is missing")
            return absent
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            self.faults.append(f"{key} is {printable(str(value))}, expected {_WORDS[kind]}")
            return absent
        return value

    def integer(self, name: str, default: Any = ...) -> Any:
        return self.get(name, int, default)

    def number(self, name: str, default: Any = ...) -> Any:
        return _decimal(self.get(name, (int, float), default))

    def array(self, name: str) -> np.ndarray | None:
        """Numbers or truths, one per layer; None if the key is absent."""
        key = self.prefix + name
        self.read.add(key)
        value = self.all.get(key)
        if value is None or (isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "biu"):
            return value
        self.faults.append(f"{key} is {printable(str(value))}, expected a number for each layer")
        return None

    def refuse(self):
        if self.faults:
            counted = f"{len(self.faults)} faults" if len(self.faults) > 1 else "1 fault"
            raise BadConfig(
                f"the file's metadata describes no possible model ({counted})", *shortened(self.faults, 30)
            )
        others = [
            name
            for name, value in _NEUTRAL.items()
            if self.prefix + name not in self.read and not _is(self.all.get(self.prefix + name, value), value)
        ]
        if others:
            shown = [
                f"{self.prefix}{name} is {printable(str(self.all[self.prefix + name]))}" for name in others
            ]
            raise Unsupported("the model needs arithmetic that is not implemented", *shown)

    def unknown(self) -> Iterator[str]:
        """A note on the architecture's keys that were not read."""
        known = self.read | {self.prefix + name for name in (*_NEUTRAL, *_IGNORED)}
        unknown = sorted(key for key in self.all if key.startswith(self.prefix) and key not in known)
        if unknown:
            yield "keys not known and not used: " + ", ".join(printable(key) for key in unknown[:20])


def _scalar(value: Any) -> Any:
    """An array of equal values, one per layer, as that value; anything else unchanged."""
    if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
        return value[0].item()
    return value


def _decimal(value: Any) -> Any:
    """A float32 of the file as in config.json: the shortest decimal that rounds to it."""
    short = isinstance(value, float) and abs(value) < 1e38 and np.float32(value) == value
    return float(str(np.float32(value))) if short else value


def _is(found: Any, value: float) -> bool:
    """Whether `found`, a number or one per layer, is `value`."""
    return isinstance(found, int | float | np.ndarray) and bool((np.asarray(found) == value).all())


_WORDS = {
    int: "an integer",
    (int, float): "a number",
    bool: "a boolean",
    str: "a string",
    list: "a list of strings",
}


def _other_architecture(found: Any) -> BadConfig | Unsupported:
    if isinstance(found, str) and found in _WAITING:
        return Unsupported(f"architecture {found} is known but not supported", _WAITING[found])
    shown = (
        "the file names no general.architecture"
        if found is None
        else f"found architecture {printable(str(found))}"
    )
    known = ", ".join(GGUF_ARCHITECTURES)
    return BadConfig("this is not a model that can be read from GGUF", shown, f"known: {known}")


def _layers(keys: _Keys) -> dict[str, Any]:
    """The number of layers: block_count includes the MTP layers."""
    blocks, mtp = keys.integer(BLOCKS), keys.integer(MTP_LAYERS, 0)
    if blocks is not None and blocks <= mtp:
        keys.faults.append(f"{keys.prefix}{BLOCKS} is {blocks}, of which {MTP_LAYERS} are {mtp}")
    return {"num_hidden_layers": blocks and blocks - mtp, "num_nextn_predict_layers": mtp}


def _heads(keys: _Keys, hf: Mapping[str, Any]) -> dict[str, Any]:
    """The widths of a head. Files with `*_mla` keys keep them there, and the latent's widths in the keys without the suffix."""
    with_latent = keys.prefix + KEY_LENGTH + OF_A_HEAD in keys.all
    suffix = OF_A_HEAD if with_latent else ""
    key = keys.integer(KEY_LENGTH + suffix)
    value = keys.integer(VALUE_LENGTH + suffix)
    rope = hf["qk_rope_head_dim"]
    _expect_latent(keys, hf, with_latent)
    nope = None
    if key is not None and rope is not None:
        nope = key - rope
        if nope <= 0:
            keys.faults.append(
                f"{keys.prefix}{KEY_LENGTH} is {key}, expected more than {ARCHITECTURE_KEYS['qk_rope_head_dim']} {rope}"
            )
    return {
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
        "q_lora_rank": keys.integer(ARCHITECTURE_KEYS["q_lora_rank"], None),
    }


def _expect_latent(keys: _Keys, hf: Mapping[str, Any], with_latent: bool):
    """Records keys that must repeat the latent's shape, if they do not."""
    rope, rank = hf["qk_rope_head_dim"], hf["kv_lora_rank"]
    expected = {KV_HEADS: 1 if with_latent else hf["num_attention_heads"]}
    if with_latent and rank is not None and rope is not None:
        expected |= {KEY_LENGTH: rank + rope, VALUE_LENGTH: rank}
    for name, value in expected.items():
        found = keys.integer(name, value)
        if found is not None and value is not None and found != value:
            keys.faults.append(f"{keys.prefix}{name} is {found}, expected {value}")


def _vocabulary(keys: _Keys) -> dict[str, Any]:
    tokens = keys.get("tokenizer.ggml.tokens", list, None)
    size = keys.integer(ARCHITECTURE_KEYS["vocab_size"], ... if tokens is None else len(tokens))
    if tokens is not None and size is not None and len(tokens) > size:
        keys.faults.append(f"{keys.prefix}vocab_size is {size:,}, tokenizer.ggml.tokens has {len(tokens):,}")
    bos, *ends = (
        keys.integer(f"tokenizer.ggml.{name}_token_id", None) for name in ("bos", "eos", "eot", "eom")
    )
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    return {"vocab_size": size, "bos_token_id": bos, "eos_token_id": eos}


def _rope(keys: _Keys, hf: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's settings. All keys are read, so that none is reported as unknown; without a scaling type the others are ignored."""
    found = {"rope_theta": keys.number(ARCHITECTURE_KEYS["rope_theta"], 10000.0), "rope_scaling": None}
    kind, factor = keys.get(ROPE_NAMES["rope_type"], str, "none"), keys.number(ROPE_NAMES["factor"], 0)
    original = keys.integer(ROPE_NAMES["original_max_position_embeddings"], None)
    multiplier = keys.number(LOG_MULTIPLIER, None)
    beta = _beta(keys, hf)
    if kind == "none" or not factor:
        return found
    if kind not in ("linear", "yarn"):
        raise Unsupported(
            f"{keys.prefix}{ROPE_NAMES['rope_type']} {printable(kind)} is not implemented",
            "known: none, linear, yarn",
        )
    scaling = {"type": kind, "factor": factor, "original_max_position_embeddings": original}
    if kind == "yarn":
        scaling |= beta | _mscale(multiplier)
    if original is None:
        keys.faults.append(f"{keys.prefix}{ROPE_NAMES['original_max_position_embeddings']} is missing")
    return {**found, "rope_scaling": scaling}


def _mscale(multiplier: Any) -> dict[str, float]:
    if multiplier is None:
        return {}
    bounded = min(max(multiplier, -1e6), 1e6)
    return dict.fromkeys(("mscale", "mscale_all_dim"), _decimal(float(np.float32(bounded / LOG_FACTOR))))


_BETA = {"beta_fast": 32.0, "beta_slow": 1.0}


def _experts(keys: _Keys, hf: Mapping[str, Any]) -> dict[str, Any]:
    count, shared = (
        keys.integer(key, 0)
        for key in (EXPERT_KEYS["n_routed_experts"], ARCHITECTURE_KEYS["n_shared_experts"])
    )
    needed = ... if count else None
    found = {
        "n_routed_experts": count or None,
        "n_shared_experts": shared or None,
        "num_experts_per_tok": keys.integer(EXPERT_KEYS["num_experts_per_tok"], needed),
        "moe_intermediate_size": keys.integer(ARCHITECTURE_KEYS["moe_intermediate_size"], needed),
        "moe_layer_freq": 1,
        "first_k_dense_replace": keys.integer(ARCHITECTURE_KEYS["first_k_dense_replace"], 0),
        "norm_topk_prob": keys.get(EXPERT_KEYS["norm_topk_prob"], bool, False),
        "routed_scaling_factor": keys.number(EXPERT_KEYS["routed_scaling_factor"], 0) or 1.0,
    }
    gate = _gate(keys, hf)
    found |= _groups(keys, hf, count)
    found["scoring_func"] = GATES.get(gate) if count else "sigmoid"
    if gate != 1:
        method = "noaux_tc"
    elif (found["n_group"] or 1) > 1:
        method = "group_limited_greedy"
    else:
        method = "greedy"
    return {**found, "topk_method": method}


def _indexers(keys: _Keys, hf: Mapping[str, Any], tensors: Collection[str]) -> dict[str, Any]:
    """The sizes of indexers, and the layers that have one of their own."""
    found = {ours: keys.integer(theirs) for ours, theirs in _NEEDED_BY_INDEXERS.items()}
    types = keys.array("attention.indexer.types")
    layers = hf["num_hidden_layers"]
    if types is not None:
        found["indexer_types"] = [OWN_CHOICE if own else TAKEN_CHOICE for own in types.tolist()[:layers]]
    elif keys.model_type == "glm_moe_dsa" and (hf["max_position_embeddings"] or 0) >= _GLM_5_2_CONTEXT:
        found |= _GLM_5_2_LAYERS
        keys.notes.append(
            "the file does not say which layers choose tokens; they are assumed to be those of GLM-5.2"
        )
    unused = _unused_indexers({**hf, **found}, layers, tensors)
    if unused:
        keys.notes.append(
            f"the indexers of {unused} layers are not used: these take the choice of a layer below"
        )
    return found


def _unused_indexers(hf: Mapping[str, Any], layers: int | None, tensors: Collection[str]) -> int:
    """Layers that share a choice and for which the file holds an indexer all the same."""
    kinds = types_of_layers(hf, layers) if isinstance(layers, int) and layers < 1 << 16 else None
    shared = [i for i, kind in enumerate(kinds or ()) if kind == TAKEN_CHOICE]
    return sum(f"blk.{i}.indexer.attn_k.weight" in tensors for i in shared)


def _gate(keys: _Keys, hf: Mapping[str, Any]) -> int:
    """The number of the router's scoring function."""
    default = 2 if keys.model_type is not None or hf["vocab_size"] == _GLM_VOCABULARY else 1
    gate = keys.integer(GATE, default) or default
    if gate not in GATES:
        keys.faults.append(f"{keys.prefix}{GATE} is {gate}, expected 1 (softmax) or 2 (sigmoid)")
    return gate


def _groups(keys: _Keys, hf: Mapping[str, Any], experts: int) -> dict[str, Any]:
    """Expert groups; a file without them has the groups of the released model of the same sizes."""
    count, used = (keys.integer(EXPERT_KEYS[name], None) for name in ("n_group", "topk_group"))
    release = _release(hf, experts) if count is None and used is None else None
    if release is not None:
        name, config = release
        count, used = config.n_group, config.topk_group
        if (count or 1) > 1:
            keys.notes.append(
                f"the file does not name the groups of experts; they are assumed to be those of {name}"
            )
    count = count or 1
    return {"n_group": count, "topk_group": used or count}


def _release(hf: Mapping[str, Any], experts: int) -> tuple[str, Config] | None:
    """The name and config of the released model of the same sizes."""
    sizes, found = (hf["hidden_size"], hf["num_hidden_layers"], experts or None), None
    for name in PRESETS:
        config = Config.preset(name)
        if sizes == (config.hidden_size, config.num_hidden_layers, config.n_routed_experts):
            found = name, config  # the last of several
    return found


def _beta(keys: _Keys, hf: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's betas; a file without them has the betas of the released model of the same sizes, else the usual ones."""
    found = {name: keys.number(YARN_KEYS[name], None) for name in _BETA}
    if None not in found.values():
        return found
    release = _release(hf, keys.integer(EXPERT_KEYS["n_routed_experts"], 0))
    known = _BETA
    if release is not None and release[1].rope_scaling:
        known = _BETA | vars(release[1].rope_scaling)
    return {name: known[name] if value is None else value for name, value in found.items()}
