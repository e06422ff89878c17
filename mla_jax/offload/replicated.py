"""Replicas on the device of the experts that tokens choose most, while the host holds all: the CPU need not read those.

The host keeps its copies, so that its packed files stay complete and a streamed prompt copies all experts in one piece."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from mla_jax.offload.streaming import Packing, abstract_for_kernels, for_kernels, unpacked


class ReplicatedExperts(nnx.Module):
    """Stacks of the experts `ids` of a layer of `experts`: gate and up `[H F D]`, down `[H D F]`, in FP8 blocks or floats."""

    def __init__(self, ids: Sequence[int], stacks: Sequence[Any], experts: int):
        self.gate, self.up, self.down = (nnx.Param(w) for w in stacks)
        # The id `experts` stands for no expert, and has no place
        place = np.full(experts + 1, len(ids), np.int32)
        place[list(ids)] = np.arange(len(ids))
        self.count, self.place = len(ids), nnx.Variable(jnp.asarray(place))

    def __call__(
        self,
        x: Float[Array, "n D"],
        topk_ids: Int[Array, "n K"],
        topk_weights: Float[Array, "n K"],
        backend: Callable,
    ) -> Float[Array, "n D"]:
        """The sum of those chosen experts that have a replica."""
        stacks = (self.gate[...], self.up[...], self.down[...])
        return backend(x, self.place[...][topk_ids], topk_weights, stacks)

    def has(self, topk_ids: Int[Array, "n K"]) -> Bool[Array, "n K"]:
        return self.place[...][topk_ids] < self.count


def split(
    topk_ids: Int[Array, "n K"], replicated: Bool[Array, "n K"], defer: int, experts: int
) -> tuple[Int[Array, "n K"], Int[Array, "n K"]]:
    """The experts that the host computes now, and the deferred ones: of each token's experts without a replica the last `defer`.

    The id `experts` is of no expert."""
    hosted = ~replicated & (topk_ids < experts)
    if not defer:
        return jnp.where(hosted, topk_ids, experts), jnp.full_like(topk_ids, experts)
    # How many experts of the host there are from this place to the last
    from_here = jnp.cumsum(hosted[:, ::-1], axis=1)[:, ::-1]
    later = hosted & (from_here <= defer)
    return jnp.where(hosted & ~later, topk_ids, experts), jnp.where(later, topk_ids, experts)


def replicate(layer: Any, ids: Sequence[int], dtype: jnp.dtype, target: Any) -> ReplicatedExperts:
    """Replicas on the device `target` of experts of a packed layer, copied one by one: the same numbers, read from no file."""
    from cpu_experts import ffi

    packing, cpu = Packing.of(layer), jax.devices("cpu")[0]
    fetch = jax.jit(lambda first: ffi.fetch(layer, first, 1))
    shapes = abstract_for_kernels(packing, len(ids), dtype)
    stacks = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=target), shapes)
    for i, expert in enumerate(ids):
        with jax.default_device(cpu):  # a GPU's program would pin all of the layer's memory
            sections = fetch(jnp.int32(expert))
        stacks = _insert(stacks, jax.device_put(sections, target), i, packing=packing, dtype=dtype)
    return ReplicatedExperts(ids, stacks, layer.experts)


def replica_shapes(packing: Packing, ids: Sequence[int], dtype: jnp.dtype) -> ReplicatedExperts:
    """The same without weights."""
    return ReplicatedExperts(ids, abstract_for_kernels(packing, len(ids), dtype), packing.experts)


def replica_bytes(packing: Packing, dtype: jnp.dtype) -> int:
    """Bytes of one replica on the device."""
    return sum(
        leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_for_kernels(packing, 1, dtype))
    )


@partial(jax.jit, static_argnames=("packing", "dtype"), donate_argnums=0)
def _insert(
    stacks: Any, sections: tuple[jax.Array, ...], index: jax.Array, *, packing: Packing, dtype: jnp.dtype
) -> Any:
    one = jax.tree.leaves(for_kernels(unpacked(packing, sections, dtype), dtype))
    held, tree = jax.tree.flatten(stacks)
    put = (
        jax.lax.dynamic_update_index_in_dim(stack, new[0], index, 0)
        for stack, new in zip(held, one, strict=True)
    )
    return jax.tree.unflatten(tree, put)
