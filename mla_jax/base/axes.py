"""Logical axis names of parameters, the config fields that give their sizes, and the mesh axes that shard them.

A parameter's shape follows from its axes; an error about a shape names the config fields that disagree."""

from collections.abc import Callable, Iterable, Mapping
from math import prod

from mla_jax.base.config import Config

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
    "latent": (("kv_lora_rank", "qk_rope_head_dim"), sum),  # what one token stores in the cache: c_kv and k_pe
    "mlp": (("intermediate_size",), prod),
    "experts": (("n_routed_experts",), prod),
    "expert_mlp": (("moe_intermediate_size",), prod),
    "expert_pair": (("moe_intermediate_size", "moe_intermediate_size"), sum),  # gate and up, joined
    "shared_mlp": (("moe_intermediate_size", "n_shared_experts"), prod),
    "model_pair": (("hidden_size", "hidden_size"), sum),  # embedding and hidden state, concatenated for the MTP layer
}

MESH_AXES = ("tensor", "expert")
# logical axis -> mesh axis that shards it
MESH = {
    "vocab": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
    "shared_mlp": "tensor",
    "expert_mlp": "tensor",
    "experts": "expert",
}


def partition(words: Iterable[str]) -> tuple[str | None, ...]:
    """The mesh axis of each dimension of a parameter; a product of axes is sharded along its first."""
    return tuple(MESH.get(word.split("*")[0]) for word in words)


def shards(words: Iterable[str], shape: tuple[int, ...], part: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The number of devices that shard each dimension of a `part` of a tensor of `shape`; 1 if their shares were unequal."""
    counts = [mesh.get(axis or "", 1) for axis in partition(words)]
    counts = [n if size % n == 0 else 1 for n, size in zip(counts, shape, strict=True)] + [1] * len(part)
    return tuple(n if size % n == 0 else 1 for n, size in zip(counts, part, strict=False))


def size(config: Config, axis: str) -> int:
    """The size of one logical axis."""
    fields, combine = AXES[axis]
    return combine(getattr(config, f) for f in fields)


def shape(config: Config, words: Iterable[str]) -> tuple[int, ...]:
    """The shape of axes such as `("heads*nope", "kv_rank")`: a word per dimension, each a product of logical axes."""
    return tuple(prod(size(config, axis) for axis in word.split("*")) for word in words)


def why(config: Config, word: str) -> str:
    """The config fields behind the size of one dimension, for an error."""
    fields = dict.fromkeys(field for axis in word.split("*") for field in AXES[axis][0])
    return ", ".join(f"{field} {getattr(config, field)}" for field in fields)
