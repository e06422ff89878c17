"""The architecture of a model, read from config.json: one frozen, validated dataclass with the fields named as there.

Anything with `kv_lora_rank` is taken for MLA. Absent keys take the defaults of their `model_type`; keys that would change the
arithmetic in a way we do not compute are refused. Knows nothing of JAX, tensors or tokenizers."""

from __future__ import annotations  # field types as text: the checks of type read them

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, no_type_check

from mla_jax.base.errors import BadConfig, Unsupported, printable
from mla_jax.base.families import ARCHITECTURES, DEFAULTS, IGNORED_KEYS, NEUTRAL_VALUES, PRESETS, ROPE_NEUTRAL_VALUES, WAITING
from mla_jax.base.files import read_json

CONFIG_BYTES = 1 << 20  # the largest config.json read
# No known model comes near any of these; they keep every product of sizes below 2**63 and the count of layers walkable.
LARGEST = 1 << 20
LARGEST_OF = {
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 24,
    "num_hidden_layers": 1000,
    "num_nextn_predict_layers": 100,
    "num_attention_heads": 1 << 14,
    "n_routed_experts": 1 << 14,
}
LATENT_NORM_EPS = 1e-6  # of q_a_norm and kv_a_norm: the released code never hands rms_norm_eps to these two


@no_type_check  # its values come from a file: `_type_faults` checks them, and all at once
@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained length: `rope_scaling`, or transformers 5's `rope_parameters`."""

    rope_type: str = "yarn"  # "yarn" or "linear"
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@no_type_check
@dataclass(frozen=True)
class Quantization:
    """FP8 weights with one scale a block, as DeepSeek-V3 is released."""

    quant_method: str = "fp8"
    fmt: str = "e4m3"
    weight_block_size: tuple[int, int] = (128, 128)
    scale_fmt: str | None = None  # "ue8m0": scales are powers of two


@no_type_check
@dataclass(frozen=True)
class Config:
    """What config.json says of an MLA model. Construction raises BadConfig with every fault found."""

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
    first_k_dense_replace: int = 0
    moe_layer_freq: int = 1
    mlp_layer_types: tuple[str, ...] | None = None  # "dense" or "sparse" a layer; overrides the two above
    topk_method: str = "greedy"
    scoring_func: str = "softmax"
    n_group: int | None = None
    topk_group: int | None = None
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int = 0  # MTP
    bos_token_id: int | None = None
    eos_token_id: tuple[int, ...] = ()
    quantization_config: Quantization | None = None
    model_type: str = "deepseek_v3"
    notes: tuple[str, ...] = field(default=(), compare=False, repr=False)  # what a reader of the folder should know

    def __post_init__(self):
        if faults := _type_faults(self) or _value_faults(self):
            counted = f"{len(faults)} faults" if len(faults) > 1 else "1 fault"
            raise BadConfig(f"the config describes no possible model ({counted})", *faults)

    @classmethod
    def from_hf(cls, source: str | Path | Mapping) -> "Config":
        """Reads a folder, a config.json or its parsed content; raises BadConfig, or Unsupported for arithmetic we lack."""
        if not isinstance(source, Mapping):
            path = Path(source)
            path = path / "config.json" if path.is_dir() else path
            source = read_json(path, CONFIG_BYTES, BadConfig)
        return cls(**_fields(source))

    @classmethod
    def preset(cls, name: str, **changes) -> "Config":
        """A known architecture by name (`PRESETS`), with some fields changed."""
        if name not in PRESETS:
            raise BadConfig(f"no preset {printable(name)}", "known: " + ", ".join(PRESETS))
        return cls.from_hf({**PRESETS[name], **changes})

    def to_hf(self) -> dict:
        """The content of a config.json that reads back as this config."""
        values = {k: v for k, v in dataclasses.asdict(self).items() if k not in ("notes", "rope_scaling", "quantization_config")}
        values = {k: v for k, v in values.items() if v is not None or k in _NULLABLE}
        values["eos_token_id"] = self.eos_token_id[0] if len(self.eos_token_id) == 1 else list(self.eos_token_id)
        if self.model_type in ARCHITECTURES:
            values["architectures"] = [ARCHITECTURES[self.model_type]]
        rope = self.rope_scaling and dataclasses.asdict(self.rope_scaling)
        rope = rope and {k: v for k, v in rope.items() if v is not None and (k, v) != ("truncate", True)}
        quantization = self.quantization_config and dataclasses.asdict(self.quantization_config)
        values |= {"num_key_value_heads": self.num_attention_heads, "rope_scaling": rope and {**rope, "type": rope["rope_type"]}}
        return values | ({"quantization_config": quantization} if quantization else {})

    def is_moe(self, layer: int) -> bool:
        """Whether `layer` has routed experts; the MTP layers after the last one always do."""
        if self.n_routed_experts is None:
            return False
        if layer >= self.num_hidden_layers:
            return True
        if self.mlp_layer_types is not None:
            return self.mlp_layer_types[layer] == "sparse"
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


def _fields(hf: Mapping) -> dict:
    """The constructor's arguments from the content of a config.json of any family, written by transformers 4 or 5."""
    model_type = hf.get("model_type", "unknown")
    if not isinstance(model_type, str):
        raise BadConfig("model_type is not a name", f"found {printable(str(model_type))}")
    _refuse_other_arithmetic(hf, model_type)
    notes, known = [], {f.name for f in dataclasses.fields(Config)} - {"notes"}
    if model_type not in DEFAULTS:
        notes.append(f"model_type {printable(model_type)} is not known; absent keys take DeepSeek-V3's values")
    values: dict[str, Any] = {f.name: None for f in dataclasses.fields(Config) if f.default is dataclasses.MISSING}
    values |= DEFAULTS.get(model_type, DEFAULTS["unknown"])
    values |= {k: v for k, v in hf.items() if k in known and (v is not None or k in _NULLABLE)}
    values["q_lora_rank"] = values.get("q_lora_rank") or None  # some write 0 for none
    if values.get("mlp_layer_types") is not None:
        values["mlp_layer_types"] = _as_tuple(values["mlp_layer_types"])
    values["eos_token_id"] = _as_tuple(values.get("eos_token_id"))
    values |= _rope(hf, values)
    values["quantization_config"] = _quantization(hf.get("quantization_config"))
    if hf.get("auto_map"):
        notes.append("auto_map names remote code; it is not needed and never imported")
    if strange := sorted(k for k in hf if k not in known | IGNORED_KEYS | NEUTRAL_VALUES.keys()):
        notes.append("keys not known and not used: " + ", ".join(printable(k) for k in strange[:20]))
    return {**values, "model_type": model_type, "notes": tuple(notes)}


_NULLABLE = {"q_lora_rank", "n_routed_experts", "n_shared_experts", "n_group", "topk_group", "bos_token_id", "eos_token_id"}


def _refuse_other_arithmetic(hf: Mapping, model_type: str):
    if model_type in WAITING:
        raise Unsupported(f"model_type {model_type} is known but not supported yet", WAITING[model_type])
    if hf.get("kv_lora_rank") is None:
        raise BadConfig(
            "this is not an MLA model",
            f"config.json of model_type {printable(model_type)} has no kv_lora_rank",
            "models with latent attention have one",
        )
    other = [
        f"{k} = {printable(str(hf[k]))} (we compute {v[0]!r})" for k, v in NEUTRAL_VALUES.items() if k in hf and hf[k] not in v
    ]
    heads, kv_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        ours = f"num_attention_heads = {printable(str(heads))}"
        other.append(f"num_key_value_heads = {printable(str(kv_heads))} (we compute {ours})")
    if other:
        raise Unsupported("config.json asks for arithmetic that is not implemented", *other)


def _rope(hf: Mapping, values: Mapping) -> dict:
    """`rope_theta` and `rope_scaling` from either spelling; transformers 5 puts both into `rope_parameters`."""
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise BadConfig("the RoPE settings are not an object", f"found {printable(str(given))}")
    theta = given.get("rope_theta", hf.get("rope_theta", values.get("rope_theta", 10000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ("default", "yarn", "linear"):
        raise Unsupported(f"rope_type {printable(str(kind))} is not implemented", "known: default, linear, yarn")
    known = {f.name for f in dataclasses.fields(RopeScaling)}
    strange = {
        k: v for k, v in given.items() if k not in known | {"type", "rope_theta"} and v not in ROPE_NEUTRAL_VALUES.get(k, (None,))
    }
    if strange:
        raise Unsupported("the RoPE settings ask for arithmetic that is not implemented", *_shown(strange))
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    chosen: dict[str, Any] = {k: v for k, v in given.items() if k in known and v is not None} | {"rope_type": kind}
    longest = values.get("max_position_embeddings", Config.max_position_embeddings)
    original = chosen.setdefault("original_max_position_embeddings", longest)
    if "factor" not in chosen and all(
        isinstance(n, int) and 0 < n <= LARGEST_OF["max_position_embeddings"] for n in (longest, original)
    ):
        chosen["factor"] = longest / original
    return {"rope_theta": theta, "rope_scaling": RopeScaling(**chosen)}


def _shown(settings: Mapping) -> list[str]:
    return [f"{printable(k)} = {printable(str(v))}" for k, v in list(settings.items())[:20]]


def _quantization(given: object) -> Quantization | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise BadConfig("quantization_config is not an object", f"found {printable(str(given))}")
    method, fmt = given.get("quant_method"), given.get("fmt", "e4m3")
    block = _as_tuple(given.get("weight_block_size", (128, 128)))
    if method != "fp8" or fmt != "e4m3":
        raise Unsupported(
            f"quantization {printable(str(method))} {printable(str(fmt))} cannot be read", "known: fp8 e4m3 with block scales"
        )
    if len(block) != 2 or not all(type(n) is int and 0 < n <= LARGEST for n in block):
        raise BadConfig("weight_block_size is not two positive numbers", f"found {printable(str(block))}")
    return Quantization(weight_block_size=block, scale_fmt=given.get("scale_fmt"))


def _as_tuple(value: object) -> tuple:
    return () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)


def _type_faults(config: Config) -> list[str]:
    """Faults of type, from the annotations, so that the checks of value can compare freely."""
    faults = []
    for part, prefix in (
        (config, ""),
        (config.rope_scaling, "rope_scaling."),
        (config.quantization_config, "quantization_config."),
    ):
        for f in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
            kinds, value = str(f.type), getattr(part, f.name)
            if value is None and "None" not in kinds:
                faults.append(f"{prefix}{f.name} is missing, expected {kinds}")
            elif not any(_fits(value, kind) for kind in kinds.split(" | ")):
                faults.append(f"{prefix}{f.name} is {printable(repr(value))}, expected {kinds}")
    return faults


def _fits(value: object, kind: str) -> bool:
    if kind == "float":
        return type(value) in (int, float)
    if kind.startswith("tuple["):
        return isinstance(value, tuple) and all(type(x).__name__ == kind[6:9] for x in value)
    return type(value).__name__ in (kind, kind + "Type")  # NoneType


def _value_faults(c: Config) -> list[str]:
    """Every value out of its range, and every pair that cannot both be true."""
    faults = []

    def check(holds: bool, text: str):
        if not holds:
            faults.append(text)

    sizes = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "kv_lora_rank"]
    sizes += ["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "max_position_embeddings", "moe_layer_freq"]
    sizes += [name for name in ("q_lora_rank", "n_group", "topk_group") if getattr(c, name) is not None]
    moe = c.n_routed_experts is not None
    sizes += ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"] if moe else []
    counts = ["first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts"]
    for name, least in [*((name, 1) for name in sizes), *((name, 0) for name in counts)]:
        value, most = getattr(c, name), LARGEST_OF.get(name, LARGEST)
        missing_is_fine = value is None and name == "n_shared_experts"
        check(
            missing_is_fine or (value is not None and least <= value <= most),
            f"{name} is {value}, expected {least} to {most:,}",
        )
    ids = [i for i in (c.bos_token_id, *c.eos_token_id) if i is not None]
    check(all(0 <= i < 1 << 31 for i in ids), "bos_token_id and eos_token_id must be token ids: 0 or more, and 32 bits wide")
    check(c.qk_rope_head_dim % 2 == 0, f"qk_rope_head_dim is {c.qk_rope_head_dim}, expected an even number")
    check(0 < c.rms_norm_eps < 1, f"rms_norm_eps is {c.rms_norm_eps}, expected a small positive number")
    check(0 < c.routed_scaling_factor < 1e6, f"routed_scaling_factor is {c.routed_scaling_factor}, expected a positive number")
    check(1 < c.rope_theta < 1e15, f"rope_theta is {c.rope_theta}, expected more than 1")
    if moe and min(c.n_routed_experts or 0, c.num_experts_per_tok or 0, c.n_group or 1, c.topk_group or 1) > 0:
        faults += _routing_faults(c)
    types = c.mlp_layer_types
    entries = f"mlp_layer_types has {len(types or ())} entries for {c.num_hidden_layers} layers"
    check(types is None or len(types) == c.num_hidden_layers, entries)
    check(types is None or {*types} <= {"dense", "sparse"}, "mlp_layer_types holds other words than dense and sparse")
    if (rope := c.rope_scaling) is not None:
        check(0 < rope.factor < 1e6, f"rope_scaling.factor is {rope.factor}, expected a positive number")
        original = rope.original_max_position_embeddings
        most = LARGEST_OF["max_position_embeddings"]
        expected = f"rope_scaling.original_max_position_embeddings is {original}, expected 1 to {most:,}"
        check(0 < original <= most, expected)
        for name in ("beta_fast", "beta_slow"):
            check(0 < getattr(rope, name) < 1e6, f"rope_scaling.{name} is {getattr(rope, name)}, expected a positive number")
        for name in ("mscale", "mscale_all_dim", "attention_factor"):
            value = getattr(rope, name)
            check(value is None or 0 <= value < 1e6, f"rope_scaling.{name} is {value}, expected 0 or more")
    return faults


def _routing_faults(c: Config) -> list[str]:
    faults, experts, groups = [], c.n_routed_experts or 0, c.n_group or 1
    kept, chosen = c.topk_group or groups, c.num_experts_per_tok or 0
    if chosen > experts:
        faults.append(f"num_experts_per_tok is {chosen}, but n_routed_experts only {experts}")
    if c.topk_method not in ("greedy", "group_limited_greedy", "noaux_tc"):
        faults.append(f"topk_method is {printable(c.topk_method)}, expected greedy, group_limited_greedy or noaux_tc")
    if c.scoring_func not in ("softmax", "sigmoid"):
        faults.append(f"scoring_func is {printable(c.scoring_func)}, expected softmax or sigmoid")
    if c.topk_method == "greedy":
        return faults
    if experts % groups:
        faults.append(f"n_group is {groups}, which does not divide n_routed_experts {experts}")
    if kept > groups:
        faults.append(f"topk_group is {kept}, but n_group only {groups}")
    elif chosen > kept * (experts // groups):
        faults.append(f"num_experts_per_tok is {chosen}, but {kept} groups hold only {kept * (experts // groups)} experts")
    return faults
