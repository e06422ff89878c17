"""Pairs of a token and one of its experts, in the order of the experts, and grouped matmuls over them.

A device of a mesh gets the tokens of all, and has experts for few of their pairs: it computes these a block at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from mla_jax.base.axes import MESH_AXES
from mla_jax.base.qtensor import QTensor
from mla_jax.mesh import across
from mla_jax.model.kernels import ragged_dot, ragged_swiglu
from mla_jax.model.ops import zeros_after

ExpertWeights = tuple[
    Float[Array, "X F D"] | QTensor, Float[Array, "X F D"] | QTensor, Float[Array, "X D F"] | QTensor
]


class Grouped(NamedTuple):
    """Pairs of a token and one of its experts, in the order of the experts; those without an expert come last."""

    token: Int[Array, " m"]  # of the pair at a place
    place: Int[Array, " m"]  # of a pair
    sizes: Int[Array, " X"]

    @staticmethod
    def of(topk_ids: Int[Array, "n K"], experts: int) -> "Grouped":
        ids, chosen = topk_ids.reshape(-1), topk_ids.shape[1]
        pairs = jnp.arange(ids.size)

        def by_comparing(ids: Array) -> Grouped:  # no scatter, which is three kernels
            before = (ids[None] < ids[:, None]) | (
                (ids[None] == ids[:, None]) & (pairs[None] < pairs[:, None])
            )
            place = before.sum(1, dtype=jnp.int32)
            pair = jnp.where(place[None] == pairs[:, None], pairs[None], 0).sum(1)
            sizes = (ids[None] == jnp.arange(experts)[:, None]).sum(1, dtype=jnp.int32)
            return Grouped(pair // chosen, place, sizes)

        def by_sorting(ids: Array) -> Grouped:
            sizes = jnp.bincount(ids, length=experts + 1)[:experts].astype(jnp.int32)
            order = jnp.argsort(ids, stable=True)
            return Grouped(
                order // chosen, jnp.zeros_like(order).at[order].set(pairs, unique_indices=True), sizes
            )

        if ids.size <= COMPARED:
            return by_comparing(ids)
        if ids.size > COMPARED_ON_A_GPU:
            return by_sorting(ids)
        return jax.lax.platform_dependent(ids, cuda=by_comparing, default=by_sorting)

    def combine(self, y: Float[Array, "m D"], weights: Float[Array, "n K"]) -> Float[Array, "n D"]:
        """The weighted sum over each token's experts; `weights` are zero for no expert, whose rows may be anything."""
        chosen = y.at[self.place.reshape(weights.shape)].get(mode="clip")
        return jnp.where(weights[..., None] != 0, chosen * weights[..., None].astype(y.dtype), 0).sum(1)

    def block(self, first: Array, count: int) -> "Grouped":
        """`count` pairs from the place `first` on, as if there were no others."""
        stop = jnp.cumsum(self.sizes)
        inside = jnp.clip(stop - first, 0, count) - jnp.clip(stop - self.sizes - first, 0, count)
        token = self.token.at[first + jnp.arange(count)].get(mode="clip")
        return Grouped(
            token,
            jnp.where((self.place >= first) & (self.place < first + count), self.place - first, -1),
            inside,
        )


# Numbers up to which each is compared with every other, which is one fused kernel on a GPU, instead of sorting them. There more
# are compared: a sort is a library's, which a CUDA graph cannot hold, so the decode loop would be a program of the host.
COMPARED, COMPARED_ON_A_GPU = 512, 4096


def chosen_weights(
    topk_ids: Int[Array, "n K"], topk_weights: Float[Array, "n K"], experts: int
) -> Float[Array, "n K"]:
    """The weights, zero where no expert is chosen."""
    return jnp.where(topk_ids < experts, topk_weights, 0)


def ragged(
    x: Float[Array, "n D"],
    topk_ids: Int[Array, "n K"],
    topk_weights: Float[Array, "n K"],
    experts: ExpertWeights,
) -> Float[Array, "n D"]:
    """Grouped matmuls over tokens sorted by expert: for a GPU with a kernel for them, and for many tokens on a TPU."""
    gate, up, down = experts
    grouped = Grouped.of(topk_ids, gate.shape[0])
    weights = chosen_weights(topk_ids, topk_weights, gate.shape[0])

    pairs = topk_ids.size
    mine = -(-pairs // across.size(MESH_AXES))  # if all devices have as many
    block = ROOM * mine

    def of(some: Grouped, weights: Array) -> Array:
        hidden = ragged_swiglu(x[some.token], gate, up, some.sizes, expected=mine)
        return some.combine(ragged_dot(hidden, down, some.sizes, expected=mine), weights)

    if pairs <= max(block, AT_ONCE):
        return of(grouped, weights)

    def with_next(i: Array, sums: Array) -> Array:
        some = grouped.block(i * block, block)
        return sums + of(some, jnp.where(some.place.reshape(weights.shape) >= 0, weights, 0))

    count = grouped.sizes.sum()
    return jax.lax.fori_loop(0, -(-count // block), with_next, zeros_after(count, x.shape, x.dtype))


# On a mesh a device expects its share of all pairs, and takes so many times as many at once: there is hardly ever a second block.
# Few pairs are one block. On four H200s a loop adds 20 us to a layer, about what 3,000 more rows of V3 do (2026-11-26).
ROOM, AT_ONCE = 2, 4096
