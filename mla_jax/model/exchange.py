"""How tokens reach the experts that they have chosen, which are shared by all devices of a mesh.

Each device computes what its own experts make of tokens; the sums over devices are the layer's. Devices of one data shard have
the same tokens. Outside of a mesh nothing is exchanged."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base import across
from mla_jax.base.axes import CONTEXT, DATA, MESH_AXES, TENSOR

Compute = Callable[
    [Array, Array, Array], Array
]  # (x [n D], topk_ids [n K], topk_weights [n K]) -> [n D] of this device's experts
Exchange = Callable[[Array, Array, Array, int, Compute], Array]


def gather(
    x: Float[Array, "n D"], topk_ids: Int[Array, "n K"], topk_weights: Float[Array, "n K"], experts: int, compute: Compute
) -> Float[Array, "n D"]:
    """Every device gets the tokens of all data shards, and each shard the sums of its own: for few tokens.

    A device has `experts` experts; the id of no expert is the number of all."""
    x, topk_ids, topk_weights = across.gathered((x, topk_ids, topk_weights), DATA)
    y = compute(x, own_ids(topk_ids, experts), topk_weights)
    return across.total(across.scattered(y, DATA), (TENSOR, CONTEXT))


def own_ids(topk_ids: Int[Array, "n K"], experts: int) -> Int[Array, "n K"]:
    """The ids among this device's experts; theirs is the number of these for all others."""
    here = topk_ids - across.index(MESH_AXES) * experts
    return jnp.where((here >= 0) & (here < experts), here, experts)


EXCHANGES: dict[str, Exchange] = {"gather": gather}
