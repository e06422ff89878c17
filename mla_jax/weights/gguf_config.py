"""What the metadata of a GGUF file says of the model, as the mapping that `Config.from_hf` takes.

The keys are those that llama.cpp's converter writes for `deepseek2`, the name under which it holds every DeepSeek-style model
(V2, V3, Kimi-K2, Moonlight, GLM-4.7-Flash, Youtu). Knows nothing of files, and of tensors only the names."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import BadConfig, Unsupported, printable, shortened
from mla_jax.base.families import PRESETS

ARCHITECTURE = "deepseek2"
_SPARSE = "it chooses tokens with a lightning indexer, which is not built yet"
_WAITING = {"glm-dsa": _SPARSE, "deepseek32": _SPARSE, "deepseek4": "it has no latent attention of this kind"}
_GATES = {1: "softmax", 2: "sigmoid"}
_GLM_VOCABULARY = 154_880  # files of GLM-4.7-Flash were written before the gate was named in them

# config.json's key: the file's, which must be there
_NEEDED = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_rope_head_dim": "rope.dimension_count",
    "max_position_embeddings": "context_length",
}
_NEEDED_BY_EXPERTS = {"num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length"}
# keys that would change the arithmetic, and the value under which ours is right
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
_IGNORED = {"attention.indexer.head_count", "attention.indexer.key_length", "rope.scaling.finetuned", "tensor_data_layout"}


def config(metadata: Mapping[str, Any], tensors: Collection[str]) -> Config:
    """The model's config; raises BadConfig with every key that is missing or out of range, or Unsupported."""
    hf, notes = to_hf(metadata, tensors)
    found = Config.from_hf(hf)
    return dataclasses.replace(found, notes=(*found.notes, *notes))


def to_hf(metadata: Mapping[str, Any], tensors: Collection[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The content of a config.json, and what a reader of the file should know; `tensors` are the names of the file's tensors."""
    keys = _Keys(metadata)
    hf = {"rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon")}
    hf |= {ours: keys.integer(theirs) for ours, theirs in _NEEDED.items()}
    hf |= _layers(keys) | _heads(keys, hf) | _vocabulary(keys)
    hf |= _rope(keys, hf)
    hf |= _experts(keys, hf)
    hf |= {"hidden_act": "silu", "rope_interleave": True, "tie_word_embeddings": "output.weight" not in tensors}
    hf["model_type"] = "deepseek_v2" if hf.get("scoring_func") == "softmax" else "deepseek_v3"
    keys.refuse()
    return hf, (*keys.notes, *keys.unknown())


class _Keys:
    """The keys of one architecture, each counted as known once it is asked for; what is wrong with them is gathered."""

    def __init__(self, metadata: Mapping[str, Any]):
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or architecture != ARCHITECTURE:
            _refuse_architecture(architecture)
        self.all, self.prefix = metadata, f"{ARCHITECTURE}."
        self.asked: set[str] = set()
        self.faults: list[str] = []
        self.notes: list[str] = []

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """The value, `default` where there is none; without a default the key must be there."""
        key = name if name.startswith("tokenizer.") else self.prefix + name
        self.asked.add(key)
        value = self.all.get(key)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # one value a layer, all of them equal
        if value is None and default is ...:
            self.faults.append(f"{key} is missing")
        elif value is not None and not (isinstance(value, kind) and (kind is bool or not isinstance(value, bool))):
            self.faults.append(f"{key} is {printable(str(value))}, expected {_WORDS[kind]}")
            value = None
        return (None if default is ... else default) if value is None else value

    def integer(self, name: str, default: Any = ...) -> Any:
        return self.get(name, int, default)

    def number(self, name: str, default: Any = ...) -> Any:
        return _decimal(self.get(name, (int, float), default))

    def refuse(self):
        if self.faults:
            counted = f"{len(self.faults)} faults" if len(self.faults) > 1 else "1 fault"
            raise BadConfig(f"the file's metadata describes no possible model ({counted})", *shortened(self.faults, 30))
        strange = [name for name, value in _NEUTRAL.items() if not _is(self.all.get(self.prefix + name, value), value)]
        if strange:
            shown = [f"{self.prefix}{name} is {printable(str(self.all[self.prefix + name]))}" for name in strange]
            raise Unsupported("the file asks for arithmetic that is not implemented", *shown)

    def unknown(self) -> Iterator[str]:
        known = self.asked | {self.prefix + name for name in (*_NEUTRAL, *_IGNORED)}
        if strange := sorted(key for key in self.all if key.startswith(self.prefix) and key not in known):
            yield "keys not known and not used: " + ", ".join(printable(key) for key in strange[:20])


def _decimal(value: Any) -> Any:
    """A number that lies in the file as float32 as it stands in config.json: the shortest decimal that stands for the same."""
    short = isinstance(value, float) and abs(value) < 1e38 and np.float32(value) == value
    return float(str(np.float32(value))) if short else value


def _is(found: Any, value: float) -> bool:
    """Whether `found`, a number or one a layer, is `value`."""
    return bool((np.asarray(found) == value).all()) if isinstance(found, int | float | np.ndarray) else False


_WORDS = {int: "a whole number", (int, float): "a number", bool: "a truth", str: "a text", list: "a list of texts"}


def _refuse_architecture(found: Any):
    if isinstance(found, str) and found in _WAITING:
        raise Unsupported(f"architecture {found} is known but not supported", _WAITING[found])
    shown = "the file names no general.architecture" if found is None else f"found architecture {printable(str(found))}"
    raise BadConfig("this is not a model that can be read from GGUF", shown, f"known: {ARCHITECTURE}")


def _layers(keys: _Keys) -> dict[str, Any]:
    """The file counts the MTP layers among its blocks."""
    blocks, mtp = keys.integer("block_count"), keys.integer("nextn_predict_layers", 0)
    if blocks is not None and blocks <= mtp:
        keys.faults.append(f"{keys.prefix}block_count is {blocks}, but nextn_predict_layers of them {mtp}")
    return {"num_hidden_layers": blocks and blocks - mtp, "num_nextn_predict_layers": mtp}


def _heads(keys: _Keys, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Files with `*_mla` keys name the heads' widths there, and the latent's elsewhere; older ones name the heads' alone."""
    split = keys.prefix + "attention.key_length_mla" in keys.all
    key, value = (keys.integer(f"attention.{part}_length" + "_mla" * split) for part in ("key", "value"))
    rope, rank, heads = hf["qk_rope_head_dim"], hf["kv_lora_rank"], hf["num_attention_heads"]
    known = {"attention.head_count_kv": 1 if split else heads}
    if split and None not in (rank, rope):
        known |= {"attention.key_length": rank + rope, "attention.value_length": rank}
    for name, expected in known.items():
        found = keys.integer(name, expected)
        if None not in (found, expected) and found != expected:
            keys.faults.append(f"{keys.prefix}{name} is {found}, expected {expected}")
    if None not in (key, rope) and key <= rope:
        keys.faults.append(f"{keys.prefix}attention.key_length is {key}, expected more than rope.dimension_count {rope}")
    nope = None if None in (key, rope) else key - rope
    return {"qk_nope_head_dim": nope, "v_head_dim": value, "q_lora_rank": keys.integer("attention.q_lora_rank", None)}


def _vocabulary(keys: _Keys) -> dict[str, Any]:
    tokens = keys.get("tokenizer.ggml.tokens", list, None)
    size = keys.integer("vocab_size", ... if tokens is None else len(tokens))
    if tokens is not None and size is not None and len(tokens) > size:
        keys.faults.append(f"{keys.prefix}vocab_size is {size:,}, tokenizer.ggml.tokens has {len(tokens):,}")
    bos, *ends = (keys.integer(f"tokenizer.ggml.{name}_token_id", None) for name in ("bos", "eos", "eot", "eom"))
    eos = list(dict.fromkeys(end for end in ends if end is not None))
    return {"vocab_size": size, "bos_token_id": bos, "eos_token_id": eos}


def _rope(keys: _Keys, hf: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's settings; without a scaling the factor says nothing."""
    found = {"rope_theta": keys.number("rope.freq_base", 10000.0), "rope_scaling": None}
    kind, factor = keys.get("rope.scaling.type", str, "none"), keys.number("rope.scaling.factor", 0)
    original = keys.integer("rope.scaling.original_context_length", None)
    # 0.1 * mscale_all_dim (llama.cpp, pull request 17945); mscale itself is not in the file, and equal in every release
    weight = keys.number("rope.scaling.yarn_log_multiplier", None)
    beta = _beta(keys, hf)
    if kind == "none" or not factor:
        return found
    if kind not in ("linear", "yarn"):
        raise Unsupported(f"{keys.prefix}rope.scaling.type {printable(kind)} is not implemented", "known: none, linear, yarn")
    scaling = {"type": kind, "factor": factor, "original_max_position_embeddings": original} | (beta if kind == "yarn" else {})
    if kind == "yarn" and weight is not None:
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), _decimal(float(np.float32(10 * min(max(weight, -1e6), 1e6)))))
    if original is None:
        keys.faults.append(f"{keys.prefix}rope.scaling.original_context_length is missing")
    return {**found, "rope_scaling": scaling}


_BETA = {"beta_fast": 32.0, "beta_slow": 1.0}


def _experts(keys: _Keys, hf: Mapping[str, Any]) -> dict[str, Any]:
    count, shared = keys.integer("expert_count", 0), keys.integer("expert_shared_count", 0)
    found = {"n_routed_experts": count or None, "n_shared_experts": shared or None, "moe_layer_freq": 1}
    found |= {ours: keys.integer(theirs, ... if count else None) for ours, theirs in _NEEDED_BY_EXPERTS.items()}
    found["first_k_dense_replace"] = keys.integer("leading_dense_block_count", 0)
    found["norm_topk_prob"] = keys.get("expert_weights_norm", bool, False)
    found["routed_scaling_factor"] = keys.number("expert_weights_scale", 0) or 1.0
    unnamed = 2 if hf["vocab_size"] == _GLM_VOCABULARY else 1
    gate = keys.integer("expert_gating_func", unnamed) or unnamed
    if gate not in _GATES:
        keys.faults.append(f"{keys.prefix}expert_gating_func is {gate}, expected 1 (softmax) or 2 (sigmoid)")
    groups = {**_groups(keys, hf, count), "scoring_func": _GATES.get(gate) if count else "sigmoid"}
    plain = "group_limited_greedy" if (groups["n_group"] or 1) > 1 else "greedy"
    return {**found, **groups, "topk_method": plain if gate == 1 else "noaux_tc"}


def _groups(keys: _Keys, hf: Mapping[str, Any], experts: int) -> dict[str, Any]:
    """Expert groups; files from before they were written down take those of the release of that size."""
    found = [keys.integer(f"expert_group_{name}", None) for name in ("count", "used_count")]
    if found == [None, None] and (release := _release(hf, experts)) is not None:
        name, config = release
        found = [config.n_group, config.topk_group]
        if (config.n_group or 1) > 1:
            keys.notes.append(f"the file does not name the groups of experts; they are taken to be those of {name}")
    groups = found[0] or 1
    return {"n_group": groups, "topk_group": found[1] or groups}


def _release(hf: Mapping[str, Any], experts: int) -> tuple[str, Config] | None:
    """The released model of the same sizes."""
    sizes = (hf["hidden_size"], hf["num_hidden_layers"], experts or None)
    found = ((name, Config.preset(name)) for name in PRESETS)
    same = [(n, c) for n, c in found if sizes == (c.hidden_size, c.num_hidden_layers, c.n_routed_experts)]
    return same[-1] if same else None


def _beta(keys: _Keys, hf: Mapping[str, Any]) -> dict[str, Any]:
    """YaRN's betas; files from before they were written down take those of the release of that size, else the usual ones."""
    found = {name: keys.number(f"rope.scaling.yarn_{name}", None) for name in _BETA}
    if None not in found.values():
        return found
    release = _release(hf, keys.integer("expert_count", 0))
    known = _BETA | (vars(release[1].rope_scaling) if release and release[1].rope_scaling else {})
    return {name: known[name] if value is None else value for name, value in found.items()}
