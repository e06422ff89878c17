"""The architecture of a model, read from config.json: one frozen, validated dataclass with the fields named as there.

A config with `kv_lora_rank` is an MLA model. Absent keys take the defaults of their `model_type`. Keys that change the arithmetic
in a way that is not implemented are refused. Knows nothing of JAX, tensors or tokenizers."""

from __future__ import annotations  # field types as text: the checks of type read them

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, no_type_check

from mla_jax.base import indexers
from mla_jax.base.config_checks import LARGEST_OF, faults
from mla_jax.base.errors import BadConfig, Unsupported, printable, shortened, shown
from mla_jax.base.families import (
    ARCHITECTURES,
    DEFAULTS,
    IGNORED_KEYS,
    NESTED_TYPES,
    NEUTRAL_VALUES,
    OTHER_PREFIXES,
    OTHER_WORDS,
    PAIRED_LAYERS,
    PRESETS,
    SAYING_NOTHING,
    UNSUPPORTED_TYPES,
)
from mla_jax.base.files import read_json
from mla_jax.base.quantization import Quantization, quantization_notes, read_quantization
from mla_jax.base.rope_settings import RopeScaling, is_length, read_rope, rope_to_hf

CONFIG_BYTES = 1 << 20  # the largest config.json read
OTHER_QUANTIZATION = "hf_quant_config.json"
LATENT_NORM_EPS = 1e-6  # of q_a_norm and kv_a_norm: the released code does not pass rms_norm_eps to these two


@no_type_check  # its values come from a file: `type_faults` checks them all at once
@dataclass(frozen=True)
class Config:
    """The settings of an MLA model, by the keys of config.json. Construction raises BadConfig with every fault found."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int  # without the MTP layers
    num_attention_heads: int
    vocab_size: int
    kv_lora_rank: int
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 4096
    rope_theta: float = 10000.0
    rope_interleave: bool = True  # rotary pairs are neighbours (2i, 2i+1), not halves
    rope_scaling: RopeScaling | None = None
    n_routed_experts: int | None = None  # None: every layer is dense
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    zero_expert_num: int = 0  # further experts, which give back what they get
    shortcut_moe: bool = False  # a dense MLP beside the experts, whose sum the next layer adds
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    mlp_layer_types: tuple[str, ...] | None = None  # "dense" or "sparse" per layer; overrides the two above
    topk_method: str = "greedy"
    scoring_func: str = "softmax"
    n_group: int | None = None
    topk_group: int | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    mla_scale_q_lora: bool = False  # latents are scaled to the model's width
    mla_scale_kv_lora: bool = False
    scale_emb: float = 1.0  # the factor on embeddings
    scale_depth: float | None = None
    dim_model_base: int | None = None
    sandwich_norm: bool = False  # what attention and MLP give is normed before it is added
    post_mlp_layernorm: bool = False  # the same for the sum of a layer's experts alone
    num_nextn_predict_layers: int = 0  # MTP
    index_topk: int | None = None  # tokens that a query attends to, chosen by a lightning indexer; None: all
    index_n_heads: int | None = None
    index_head_dim: int | None = None
    indexer_types: tuple[str, ...] | None = None  # "full" or "shared" per layer; None: all are full
    indexer_rope_interleave: bool | None = None  # as rope_interleave, of the indexer's queries and keys
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    quantization_config: Quantization | None = None
    model_type: str = "deepseek_v3"
    # What a reader of the folder should know
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __post_init__(self):
        if found := faults(self):
            counted = f"{len(found)} faults" if len(found) > 1 else "1 fault"
            raise BadConfig(f"the config describes no possible model ({counted})", *found)

    @classmethod
    def from_hf(cls, source: str | Path | Mapping) -> "Config":
        """Reads a folder, a config.json or its parsed content; raises BadConfig, or Unsupported for arithmetic we lack."""
        if isinstance(source, str | Path):
            source = _read(Path(source))
        if not isinstance(source, Mapping):
            raise BadConfig(
                "a config is read from a folder, a file or its content", f"found {type(source).__name__}"
            )
        if unnamed := [key for key in source if not isinstance(key, str)]:
            raise BadConfig("the keys of a config are texts", f"found {shown(unnamed[0])}")
        text = _language_model(source)
        found = _fields(text)
        if text is not source:
            found["notes"] += ("it also sees: the language model alone is read",)
        return cls(**found)

    @classmethod
    def preset(cls, name: str, **changes) -> "Config":
        """A known architecture by name (`PRESETS`), with some fields changed."""
        if not isinstance(name, str) or name not in PRESETS:
            found = name if isinstance(name, str) else f"of type {type(name).__name__}"
            raise BadConfig(f"no preset {printable(found)}", "known: " + ", ".join(PRESETS))
        return cls.from_hf({**PRESETS[name], **changes})

    def to_hf(self) -> dict:
        """The content of a config.json that reads back as this config."""
        values = dataclasses.asdict(self)
        for apart in ("rope_scaling", "quantization_config", "notes"):
            values.pop(apart)
        values = {k: v for k, v in values.items() if self._is_written(k, v)}
        values["eos_token_id"] = (
            self.eos_token_id[0] if len(self.eos_token_id) == 1 else list(self.eos_token_id)
        )
        values["num_key_value_heads"] = self.num_attention_heads
        values["rope_scaling"] = rope_to_hf(self)
        if self.quantization_config is not None:
            values["quantization_config"] = self.quantization_config.to_hf()
        for theirs, ours in OTHER_WORDS.get(self.model_type, {}).items():
            values |= {theirs: values.pop(ours)} if ours in values else {}
        if self.model_type in PAIRED_LAYERS:
            values["num_layers"] = self.num_hidden_layers // 2
            values.pop("num_hidden_layers")
        if self.model_type in ARCHITECTURES:
            values["architectures"] = [ARCHITECTURES[self.model_type]]
        return values

    def _is_written(self, key: str, value: object) -> bool:
        """Whether an absent `key` would say something else, or no reader knows it."""
        if key in _SWITCHES and key not in DEFAULTS.get(self.model_type, {}):
            return value != getattr(Config, key)
        return value is not None or key in _NULLABLE

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has routed experts; the MTP layers after the last one always do."""
        if self.n_routed_experts is None:
            return False
        if layer >= self.num_hidden_layers:
            return True
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[layer] == "sparse"
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def has_indexer(self, layer: int) -> bool:
        """Whether `layer` chooses tokens by itself; the MTP layers after the last one do."""
        if self.index_topk is None:
            return False
        kinds = self.indexer_types
        return kinds is None or layer >= self.num_hidden_layers or kinds[layer] == indexers.OWN_CHOICE

    @property
    def adds_experts_alone(self) -> bool:
        """Whether a layer adds what each of its experts gives, and not their sum changed or later."""
        is_changed = self.sandwich_norm or self.post_mlp_layernorm or self.residual_scale != 1
        return not (is_changed or self.shortcut_moe)

    @property
    def routed_per_token(self) -> float:
        """Experts with weights among those that a token chooses: of all alike, on average."""
        chosen, experts = self.num_experts_per_tok or 0, self.n_routed_experts or 0
        return chosen * experts / (experts + self.zero_expert_num) if self.zero_expert_num else chosen

    @property
    def q_lora_scale(self) -> float:
        """The factor on the query's latent once it is normed."""
        if self.q_lora_rank is None or not self.mla_scale_q_lora:
            return 1.0
        return math.sqrt(self.hidden_size / self.q_lora_rank)

    @property
    def kv_lora_scale(self) -> float:
        """The same for the latent of keys and values."""
        return math.sqrt(self.hidden_size / self.kv_lora_rank) if self.mla_scale_kv_lora else 1.0

    @property
    def residual_scale(self) -> float:
        """The factor on what attention and MLP add to the hidden state."""
        return 1.0 if self.scale_depth is None else self.scale_depth / math.sqrt(self.num_hidden_layers)

    @property
    def logits_scaling(self) -> float:
        """The number that the hidden state is divided by before the head."""
        return 1.0 if self.dim_model_base is None else self.hidden_size / self.dim_model_base


def _read(path: Path) -> dict:
    """A config.json; NVIDIA's quantiser describes its format in a file next to it, which newer folders repeat."""
    hf = read_json(path / "config.json" if path.is_dir() else path, CONFIG_BYTES, BadConfig)
    other = path / OTHER_QUANTIZATION
    if path.is_dir() and other.exists() and hf.get("quantization_config") is None:
        given = read_json(other, CONFIG_BYTES, BadConfig).get("quantization")
        if isinstance(given, Mapping) and given.get("quant_algo") is not None:
            return {**hf, "quantization_config": {**given, "quant_method": "modelopt"}}
    return hf


def _language_model(hf: Mapping) -> Mapping:
    """The settings of the language model in a model that also sees; `quantization_config` can be in either place."""
    inner = hf.get("text_config")
    if hf.get("model_type") not in NESTED_TYPES or not isinstance(inner, Mapping):
        return hf
    given = inner.get("quantization_config") or hf.get("quantization_config")
    return {**inner, "quantization_config": given}


def says_all(folder: Path) -> bool:
    """Whether a folder's config.json describes the language model and nothing else, without other files."""
    hf = read_json(folder / "config.json", CONFIG_BYTES, BadConfig)
    return _language_model(hf) is hf and not (folder / OTHER_QUANTIZATION).exists()


def _fields(hf: Mapping) -> dict:
    """The constructor's arguments from the content of a config.json of any family, written by transformers 4 or 5."""
    model_type = _model_type(hf)
    hf = _in_our_words(hf, model_type)
    _refuse_other_arithmetic(hf, model_type)
    values: dict[str, Any] = {
        f.name: None if f.default is dataclasses.MISSING else f.default for f in dataclasses.fields(Config)
    }
    values |= DEFAULTS.get(model_type, DEFAULTS["unknown"])
    values |= {k: v for k, v in hf.items() if k in _KNOWN and (v is not None or k in _NULLABLE)}
    values["model_type"] = model_type
    values["q_lora_rank"] = values["q_lora_rank"] or None  # some write 0 for none
    values["zero_expert_num"] = values["zero_expert_num"] or 0  # and others none for 0
    if values["v_head_dim"] is None:
        values["v_head_dim"] = _share_of_head(values)
    if values["mlp_layer_types"] is not None:
        values["mlp_layer_types"] = _as_tuple(values["mlp_layer_types"])
    values["eos_token_id"] = _as_tuple(values["eos_token_id"])
    values |= read_rope(hf, values) | _indexer(hf, values, model_type)
    values["quantization_config"] = read_quantization(hf.get("quantization_config"))
    return {**values, "notes": _notes(hf, model_type)}


def _in_our_words(hf: Mapping, model_type: str) -> Mapping:
    """The settings by our keys, where a family has others for them."""
    words = OTHER_WORDS.get(model_type, {})
    ours = {words.get(key, key): value for key, value in hf.items()}
    if model_type in PAIRED_LAYERS and is_length(pairs := ours.pop("num_layers", None)):
        ours["num_hidden_layers"] = 2 * pairs
    return ours


def _model_type(hf: Mapping) -> str:
    """The family; files that leave it out name a class."""
    classes = hf.get("architectures")
    of_class = (family for family, name in ARCHITECTURES.items() if classes == [name])
    found = hf.get("model_type", next(of_class, "unknown"))
    if not isinstance(found, str):
        raise BadConfig("model_type is not a name", f"found {shown(found)}")
    return found


_KNOWN = {f.name for f in dataclasses.fields(Config)} - {"notes"}
_SWITCHES = {  # of a few families
    "zero_expert_num",
    "shortcut_moe",
    "mla_scale_q_lora",
    "mla_scale_kv_lora",
    "scale_emb",
    "scale_depth",
    "dim_model_base",
    "sandwich_norm",
    "post_mlp_layernorm",
}
_NULLABLE = {
    "q_lora_rank",
    "n_routed_experts",
    "n_shared_experts",
    "n_group",
    "topk_group",
    "bos_token_id",
    "eos_token_id",
    "zero_expert_num",
    "scale_depth",
    "dim_model_base",
}


def _share_of_head(values: Mapping) -> int | None:
    """A head's part of the hidden state, which is the width of its values where a family leaves that out."""
    width, heads = values["hidden_size"], values["num_attention_heads"]
    return width // heads if is_length(width) and is_length(heads) else None


def _notes(hf: Mapping, model_type: str) -> tuple[str, ...]:
    notes = []
    if model_type not in DEFAULTS:
        notes.append(
            f"model_type {printable(model_type)} is not known; absent keys take DeepSeek-V3's values"
        )
    if hf.get("auto_map"):
        notes.append("auto_map names remote code; it is not needed and never imported")
    read = _KNOWN | IGNORED_KEYS | NEUTRAL_VALUES.keys()
    if strange := sorted(k for k in hf if k not in read and not k.startswith(OTHER_PREFIXES)):
        notes.append("keys not known and not used: " + ", ".join(printable(k) for k in strange[:20]))
    return *notes, *quantization_notes(hf.get("quantization_config"))


def _refuse_other_arithmetic(hf: Mapping, model_type: str):
    if model_type in UNSUPPORTED_TYPES:
        raise Unsupported(
            f"model_type {model_type} is known but not supported yet", UNSUPPORTED_TYPES[model_type]
        )
    inner = hf.get("text_config")
    if (
        hf.get("kv_lora_rank") is None
        and isinstance(inner, Mapping)
        and inner.get("kv_lora_rank") is not None
    ):
        raise Unsupported(
            f"model_type {printable(model_type)} has an MLA model inside, as its text_config",
            "models that also see or hear are not read; take a folder of the language model alone",
        )
    if hf.get("kv_lora_rank") is None:
        raise BadConfig(
            "this is not an MLA model",
            f"config.json of model_type {printable(model_type)} has no kv_lora_rank",
            "models with latent attention have one",
        )
    if other := [*_other_arithmetic(hf, model_type)]:
        raise Unsupported("config.json needs arithmetic that is not implemented", *shortened(other, 32))


def _other_arithmetic(hf: Mapping, model_type: str) -> Iterator[str]:
    """The keys by which the model computes something that we do not, and their values."""
    known, kinds = (
        (indexers.INDEXER_KEYS, indexers.INDEXED_LAYERS)
        if _indexes(model_type)
        else ((), ("full_attention",))
    )
    for key, value in hf.items():
        if key in known:
            continue
        is_other = key.startswith(OTHER_PREFIXES) and key not in _SWITCHES
        neutral = SAYING_NOTHING if is_other else NEUTRAL_VALUES.get(key)
        if neutral is not None and value not in neutral:
            yield f"{printable(key)} = {shown(value)} (we compute {neutral[0]!r})"
    heads, kv_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        yield f"num_key_value_heads = {shown(kv_heads)} (we compute num_attention_heads = {shown(heads)})"
    layers = hf.get("layer_types")
    if layers is not None and (not isinstance(layers, list) or any(kind not in kinds for kind in layers)):
        yield f"layer_types = {shown(layers)} (we compute {kinds[0]} in every layer)"


def _indexes(model_type: str) -> bool:
    """Whether models of this family choose the tokens that they attend to."""
    return "index_topk" in DEFAULTS.get(model_type, {})


def _indexer(hf: Mapping, values: Mapping, model_type: str) -> dict:
    """The layers that choose; elsewhere all of an indexer's keys say nothing."""
    if not _indexes(model_type):
        fields = {f.name: f.default for f in dataclasses.fields(Config)}
        return {name: fields[name] for name in indexers.INDEXER_FIELDS}
    layers = values.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers <= LARGEST_OF["num_hidden_layers"]:
        return {"indexer_types": None}  # the layers are a fault of their own
    return {"indexer_types": indexers.types_of_layers(hf, layers)}


def _as_tuple(value: object) -> tuple:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)
