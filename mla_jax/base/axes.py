"""Logical axis names of parameters, the config fields that give their sizes, and the mesh axes that cut them.

A parameter's shape follows from its axes; an error about a shape names the config fields that disagree."""

import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from numbers import Integral
from typing import Any

from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, printable, shown

# name -> (config fields, how they combine)
AXES: dict[str, tuple[tuple[str, ...], Callable]] = {
    "vocab": (("vocab_size",), prod),
    "model": (("hidden_size",), prod),
    "heads": (("num_attention_heads",), prod),
    "q_rank": (("q_lora_rank",), prod),
    "kv_rank": (("kv_lora_rank",), prod),
    "nope": (("qk_nope_head_dim",), prod),
    "value": (("v_head_dim",), prod),
    "query": (("qk_nope_head_dim", "qk_rope_head_dim"), sum),  # one head's nope and rope parts
    "up": (("qk_nope_head_dim", "v_head_dim"), sum),  # one head's uk and uv, joined as kv_b_proj
    # A token in the cache: c_kv and k_pe
    "latent": (("kv_lora_rank", "qk_rope_head_dim"), sum),
    "index_heads": (("index_n_heads",), prod),
    "index": (("index_head_dim",), prod),  # one head of the indexer
    "mlp": (("intermediate_size",), prod),
    "experts": (("n_routed_experts",), prod),
    "scores": (("n_routed_experts", "zero_expert_num"), sum),  # of the router, which every device has whole
    "expert_mlp": (("moe_intermediate_size",), prod),
    "expert_pair": (("moe_intermediate_size", "moe_intermediate_size"), sum),  # gate and up, joined
    "shared_mlp": (("moe_intermediate_size", "n_shared_experts"), prod),
    # Embedding and hidden state, concatenated for the MTP layer
    "model_pair": (("hidden_size", "hidden_size"), sum),
}

DATA, TENSOR, CONTEXT = "data", "tensor", "context"
MESH_AXES = (DATA, TENSOR, CONTEXT)
MAX_SIZE = 9999  # devices along an axis
# Logical axis -> the mesh axes that cut it. Rows and their pages are cut over `data`, each page's tokens over `context`.
MESH = {
    "vocab": (TENSOR,),
    "heads": (TENSOR,),
    "mlp": (TENSOR,),
    "shared_mlp": (TENSOR,),
    "experts": MESH_AXES,
}


def parse_mesh(mesh: str | Mapping[str, int], flag: str = "--mesh") -> dict[str, int]:
    """The sizes of `data=4,tensor=2`, or of a mapping of such, by axis; raises BadRequest."""
    axes = mesh.items() if isinstance(mesh, Mapping) else [_axis(word) for word in mesh.split(",") if mesh]
    sizes = {name: int(size) for name, size in axes if name in MESH_AXES and _is_size(size)}
    if len(sizes) < len(axes):
        raise _no_mesh(mesh, flag)
    return sizes


def _no_mesh(mesh: str | Mapping[str, int], flag: str) -> BadRequest:
    found = printable(mesh) if isinstance(mesh, str) else shown(mesh)
    expected = ",".join(f"{axis}=N" for axis in MESH_AXES)
    return BadRequest(f"{flag} {found} is no mesh", f"expected {expected}; an axis that is left out is 1")


def _axis(word: str) -> tuple[str, int]:
    """The name and the size in `data=4`; 0 if that is no number."""
    name, _, size = word.strip(" ").partition("=")
    return name, int(size) if re.fullmatch("[1-9][0-9]{0,3}", size) else 0


def _is_size(size: Any) -> bool:
    return isinstance(size, Integral) and not isinstance(size, bool) and 0 < int(size) <= MAX_SIZE


def shown_mesh(mesh: Mapping[str, int]) -> str:
    """`data=4,tensor=2`, without the axes of size 1."""
    return ",".join(f"{axis}={mesh[axis]}" for axis in MESH_AXES if mesh.get(axis, 1) > 1) or f"{DATA}=1"


def partition(words: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The mesh axes that cut each dimension of a parameter; a product of axes is cut along its first."""
    return tuple(MESH.get(word.split("*")[0], ()) for word in words)


def axis_size(config: Config, axis: str) -> int:
    """The size of one logical axis."""
    fields, combine = AXES[axis]
    return combine(getattr(config, f) for f in fields)


def shape(config: Config, words: Iterable[str]) -> tuple[int, ...]:
    """The shape of axes such as `("heads*nope", "kv_rank")`: a word per dimension, each a product of logical axes."""
    return tuple(prod(axis_size(config, axis) for axis in word.split("*")) for word in words)


def why(config: Config, word: str) -> str:
    """The config fields behind the size of one dimension, for an error."""
    fields = dict.fromkeys(field for axis in word.split("*") for field in AXES[axis][0])
    return ", ".join(f"{field} {getattr(config, field)}" for field in fields)
