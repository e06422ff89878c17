"""RoPE's settings of a config.json: `rope_theta` with `rope_scaling`, or `rope_parameters` of transformers 5, which has both."""

from __future__ import annotations  # field types as text: the checks of type read them

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, no_type_check

from mla_jax.base.config_checks import LARGEST_OF
from mla_jax.base.errors import BadConfig, Unsupported, printable, shortened, shown
from mla_jax.base.families import NAMING_ROTATED_PART, ROPE_DEFAULTS, ROPE_NEUTRAL_VALUES

if TYPE_CHECKING:
    from mla_jax.base.config import Config

ROPE_KEYS = ("rope_scaling", "rope_parameters")
ROPE_TYPES = ("default", "linear", "longrope", "yarn")
FACTORS = ("short_factor", "long_factor")  # of longrope


@no_type_check  # its values come from a file: `type_faults` checks them all at once
@dataclass(frozen=True)
class RopeScaling:
    """How RoPE frequencies are scaled beyond the trained length: `rope_scaling`, or `rope_parameters` of transformers 5."""

    rope_type: str = "yarn"  # one of ROPE_TYPES, without the first
    factor: float = 1.0
    original_max_position_embeddings: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    llama_4_scaling_beta: float | None = None  # queries grow with the position by this
    # longrope divides each frequency by a number of its own; the second ones are for texts beyond the trained length
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


def read_rope(hf: Mapping, values: Mapping) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a config whose other `values` are known, from either spelling in `hf`."""
    if not any(hf.get(name) for name in ROPE_KEYS):
        hf = ROPE_DEFAULTS.get(values["model_type"], {})
    old, new = (_settings(hf.get(name), values) for name in ROPE_KEYS)
    if other := [k for k in old if k in new and old[k] != new[k]]:
        both = [
            f"{k} is {shown(old[k])} in rope_scaling and {shown(new[k])} in rope_parameters" for k in other
        ]
        raise BadConfig("rope_scaling and rope_parameters contradict each other", *both)
    settings = {"rope_theta": values["rope_theta"], "rope_type": "default"} | old | new
    theta = settings.pop("rope_theta")
    scaling = None if settings["rope_type"] == "default" else RopeScaling(**settings)
    return {"rope_theta": theta, "rope_scaling": scaling}


def rope_to_hf(config: Config) -> dict[str, Any] | None:
    """A config's `rope_scaling` for a config.json: both names of the type, and of the rest what differs from the default."""
    if config.rope_scaling is None:
        return None
    rope = dataclasses.asdict(config.rope_scaling)
    given = {k: v for k, v in rope.items() if v is not None and (k, v) != ("truncate", True)}
    if config.model_type in NAMING_ROTATED_PART:
        given["partial_rotary_factor"] = _rotated_part(config.qk_nope_head_dim, config.qk_rope_head_dim)
    return {**given, "type": rope["rope_type"]}


def _settings(given: object, values: Mapping) -> dict[str, Any]:
    """The fields of RopeScaling that `given` sets, absent ones as they are filled in, and its `rope_theta` if it names one."""
    if not given:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise BadConfig("the RoPE settings are not an object", f"found {shown(given)}")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise Unsupported(f"rope_type {shown(kind)} is not implemented", "known: " + ", ".join(ROPE_TYPES))
    known = _KNOWN_OF_DEFAULT if kind == "default" else _KNOWN
    strange = {k: v for k, v in given.items() if k not in known and v not in _neutral_values(k, values)}
    if strange:
        named = [f"{printable(k)} = {shown(v)}" for k, v in strange.items()]
        raise Unsupported("the RoPE settings need arithmetic that is not implemented", *shortened(named, 20))
    theta = {} if given.get("rope_theta") is None else {"rope_theta": given["rope_theta"]}
    return {**theta, **({"rope_type": kind} if kind == "default" else _filled_in(given, kind, values))}


_FIELDS = {f.name for f in dataclasses.fields(RopeScaling)}
_KNOWN = {*_FIELDS, "type", "rope_theta", "max_position_embeddings"}
_KNOWN_OF_DEFAULT = _KNOWN - {"llama_4_scaling_beta"}  # there is no trained length to grow by


def _neutral_values(key: str, values: Mapping) -> tuple:
    """Those of a further RoPE key; some families say which part of a whole head is rotated."""
    neutral = ROPE_NEUTRAL_VALUES.get(key, (None,))
    if key != "partial_rotary_factor" or values["model_type"] not in NAMING_ROTATED_PART:
        return neutral
    nope, rope = values["qk_nope_head_dim"], values["qk_rope_head_dim"]
    return (*neutral, _rotated_part(nope, rope)) if is_length(nope) and is_length(rope) else neutral


def _rotated_part(nope: int, rope: int) -> float:
    return rope / (nope + rope)


def _filled_in(given: Mapping, kind: str, values: Mapping) -> dict[str, Any]:
    """The fields of RopeScaling; an absent factor is the ratio of the lengths after and before the stretching."""
    chosen = {k: v for k, v in given.items() if k in _FIELDS and v is not None}
    chosen |= {name: tuple(chosen[name]) for name in FACTORS if isinstance(chosen.get(name), list)}
    longest = values["max_position_embeddings"]
    original = chosen.setdefault("original_max_position_embeddings", longest)
    if all(is_length(n) for n in (longest, original)):
        chosen.setdefault("factor", longest / original)
        _refuse_two_lengths(chosen, longest)
    return dataclasses.asdict(RopeScaling(**{**chosen, "rope_type": kind}))


def _refuse_two_lengths(chosen: Mapping, longest: int):
    """longrope rotates otherwise once a text is longer than the trained length, which would change the keys in the cache."""
    short, long = (chosen.get(name) for name in FACTORS)
    trained = chosen["original_max_position_embeddings"]
    if longest > trained and short != long:
        raise Unsupported(
            "the RoPE settings need arithmetic that is not implemented",
            f"long_factor is not short_factor, for max_position_embeddings {longest:,} beyond {trained:,}",
            f"give max_position_embeddings as {trained:,} or less",
        )


def is_length(found: object) -> bool:
    return isinstance(found, int) and 0 < found <= LARGEST_OF["max_position_embeddings"]
