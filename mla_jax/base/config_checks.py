"""Checks of the values of a config: types first, then ranges, then pairs that cannot both be true.

Every check gives a list of faults, so that a user reads all of them at once."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mla_jax.base import indexers
from mla_jax.base.errors import printable, shown
from mla_jax.base.families import PAIRED_LAYERS

if TYPE_CHECKING:
    from mla_jax.base.config import Config

# No known model comes near any of these; they keep every product of sizes below 2**63 and the count of layers walkable.
MAX_FIELD = 1 << 20
LARGEST_OF = {
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 24,
    "num_hidden_layers": 1000,
    "num_nextn_predict_layers": 100,
    "num_attention_heads": 1 << 14,
    "n_routed_experts": 1 << 14,
    "zero_expert_num": 1 << 14,
}
LEAST_OF: dict[str, int] = dict.fromkeys(  # else 1
    ("first_k_dense_replace", "num_nextn_predict_layers", "n_shared_experts", "zero_expert_num"), 0
)

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "max_position_embeddings",
    "moe_layer_freq",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
    "zero_expert_num",
)
SIZES_IF_GIVEN = ("q_lora_rank", "n_group", "topk_group", "n_shared_experts", "dim_model_base")
SIZES_OF_INDEXERS = ("index_topk", "index_n_heads", "index_head_dim")
SIZES_OF_EXPERTS = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")


class FieldRange(NamedTuple):
    """`holds` must be true of the value of each field in `names`."""

    names: tuple[str, ...]
    holds: Callable[[Any], bool]
    expected: str


RANGES = (
    FieldRange(("qk_rope_head_dim",), lambda size: size % 2 == 0, "an even number"),
    FieldRange(("rms_norm_eps",), lambda eps: 0 < eps < 1, "a small positive number"),
    FieldRange(("routed_scaling_factor",), lambda factor: 0 < factor < 1e6, "a positive number"),
    FieldRange(("scale_emb",), lambda factor: 0 < factor < 1e6, "a positive number"),
    FieldRange(("scale_depth",), lambda factor: factor is None or 0 < factor < 1e6, "a positive number"),
    FieldRange(("rope_theta",), lambda theta: 1 < theta < 1e15, "more than 1"),
)
ROPE_RANGES = (
    FieldRange(("factor", "beta_fast", "beta_slow"), lambda x: 0 < x < 1e6, "a positive number"),
    FieldRange(
        ("mscale", "mscale_all_dim", "attention_factor", "llama_4_scaling_beta"),
        lambda x: x is None or 0 <= x < 1e6,
        "0 or more",
    ),
    FieldRange(
        ("original_max_position_embeddings",),
        lambda length: 0 < length <= LARGEST_OF["max_position_embeddings"],
        f"1 to {LARGEST_OF['max_position_embeddings']:,}",
    ),
)
# V2's two, and V3's with a bias and without
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc", "none")
SCORING_FUNCS = ("softmax", "sigmoid")


def faults(config: "Config") -> list[str]:
    """Every fault of `config`. Values are compared only if all types are right."""
    parts = {
        "": config,
        "rope_scaling.": config.rope_scaling,
        "quantization_config.": config.quantization_config,
    }
    wrong_types = [fault for prefix, part in parts.items() for fault in type_faults(part, prefix)]
    return wrong_types or [fault for check in CHECKS for fault in check(config)]


def type_faults(part: Any, prefix: str) -> list[str]:
    """Fields of the dataclass `part` whose values are not of the annotated type; none if `part` is None."""
    found = []
    for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
        kinds, value = str(field.type), getattr(part, field.name)
        if value is None and "None" not in kinds:
            found.append(f"{prefix}{field.name} is missing, expected {kinds}")
        elif not any(_fits(value, kind) for kind in kinds.split(" | ")):
            found.append(f"{prefix}{field.name} is {shown(value)}, expected {kinds}")
    return found


def _fits(value: object, kind: str) -> bool:
    if kind == "float":
        return type(value) in (int, float)
    if kind.startswith("tuple["):
        return isinstance(value, tuple) and all(_fits(x, kind[6:].partition(",")[0]) for x in value)
    return type(value).__name__ in (kind, kind + "Type")  # NoneType


def _sizes(c: "Config") -> list[str]:
    names = [*SIZES, *(name for name in SIZES_IF_GIVEN if getattr(c, name) is not None)]
    if c.n_routed_experts is not None:
        names += SIZES_OF_EXPERTS
    if c.index_topk is not None:
        names += SIZES_OF_INDEXERS
    return [fault for name in names if (fault := _size_fault(name, getattr(c, name)))]


def _size_fault(name: str, value: int | None) -> str | None:
    least, most = LEAST_OF.get(name, 1), LARGEST_OF.get(name, MAX_FIELD)
    if value is not None and least <= value <= most:
        return None
    return f"{name} is {shown(value)}, expected {least} to {most:,}"


def _token_ids(c: "Config") -> list[str]:
    ids = [i for i in (c.bos_token_id, *c.eos_token_id) if i is not None]
    if all(0 <= i < 1 << 31 for i in ids):
        return []
    return ["bos_token_id and eos_token_id must be token ids: 0 or more, and 32 bits wide"]


def _numbers(c: "Config") -> list[str]:
    rope = [] if c.rope_scaling is None else _broken(ROPE_RANGES, c.rope_scaling, "rope_scaling.")
    return [*_broken(RANGES, c, ""), *rope]


def _broken(rules: tuple[FieldRange, ...], part: object, prefix: str) -> list[str]:
    values = [(name, getattr(part, name), rule) for rule in rules for name in rule.names]
    return [
        f"{prefix}{name} is {shown(value)}, expected {rule.expected}"
        for name, value, rule in values
        if not rule.holds(value)
    ]


def _pairs(c: "Config") -> list[str]:
    if c.model_type not in PAIRED_LAYERS or c.num_hidden_layers % 2 == 0:
        return []
    return [f"num_hidden_layers is {shown(c.num_hidden_layers)}, expected pairs of layers"]


def _longrope(c: "Config") -> list[str]:
    if c.rope_scaling is None or c.rope_scaling.rope_type != "longrope":
        return []
    pairs = c.qk_rope_head_dim // 2
    factors = {name: getattr(c.rope_scaling, name) or () for name in ("short_factor", "long_factor")}
    return [
        f"rope_scaling.{name} is {shown(found)}, expected {pairs} positive numbers, half of qk_rope_head_dim"
        for name, found in factors.items()
        if len(found) != pairs or min(found, default=0) <= 0
    ]


def _layer_types(c: "Config") -> list[str]:
    if c.mlp_layer_types is None:
        return []
    found, entries = [], len(c.mlp_layer_types)
    if entries != c.num_hidden_layers:
        found.append(f"mlp_layer_types has {entries} entries for {shown(c.num_hidden_layers)} layers")
    if not {*c.mlp_layer_types} <= {"dense", "sparse"}:
        found.append("mlp_layer_types holds other words than dense and sparse")
    return found


def _routing(c: "Config") -> list[str]:
    """How experts are chosen; a size that is out of range has its own fault already."""
    experts, chosen = c.n_routed_experts, c.num_experts_per_tok
    if experts is None or chosen is None or min(experts, chosen, c.n_group or 1, c.topk_group or 1) <= 0:
        return []
    found, experts = [], experts + max(c.zero_expert_num, 0)
    if chosen > experts:
        found.append(f"num_experts_per_tok is {shown(chosen)}, but n_routed_experts only {shown(experts)}")
    if c.topk_method not in TOPK_METHODS:
        found.append(f"topk_method is {printable(c.topk_method)}, expected one of {', '.join(TOPK_METHODS)}")
    if c.scoring_func not in SCORING_FUNCS:
        found.append(f"scoring_func is {printable(c.scoring_func)}, expected softmax or sigmoid")
    if c.topk_method == "greedy":
        return found
    return [*found, *_groups(experts, chosen, c.n_group or 1, c.topk_group)]


def _groups(experts: int, chosen: int, groups: int, topk_group: int | None) -> list[str]:
    """Experts in groups of one size, of which the best few are kept."""
    kept, found = topk_group or groups, []
    if experts % groups:
        found.append(f"n_group is {shown(groups)}, which does not divide n_routed_experts {shown(experts)}")
    left = kept * (experts // groups)
    if kept > groups:
        found.append(f"topk_group is {shown(kept)}, but n_group only {shown(groups)}")
    elif chosen > left:
        found.append(
            f"num_experts_per_tok is {shown(chosen)}, but {shown(kept)} groups hold only {shown(left)} experts"
        )
    return found


CHECKS = (_sizes, _token_ids, _numbers, _routing, _layer_types, _pairs, _longrope, indexers.indexer_faults)
