"""A layer's most chosen experts on the device, while the host holds them all: what the device can compute the host need not read.

The host keeps its copies, so that its packed files stay whole and prompts can bring all experts over in one piece."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int


class HotExperts(nnx.Module):
    """Stacks of some `ids` of a layer's `experts`: gate and up `[H F D]`, down `[H D F]`, in FP8 blocks or not."""

    def __init__(self, ids: Sequence[int], stacks: Sequence[Any], experts: int):
        self.gate, self.up, self.down = (nnx.Param(w) for w in stacks)
        place = np.full(experts + 1, len(ids), np.int32)  # the id `experts` stands for no expert, and has no place
        place[list(ids)] = np.arange(len(ids))
        self.count, self.place = len(ids), nnx.Variable(jnp.asarray(place))

    def __call__(
        self, x: Float[Array, "n D"], topk_ids: Int[Array, "n K"], topk_weights: Float[Array, "n K"], backend: Callable
    ) -> Float[Array, "n D"]:
        """The sum of those of the chosen experts that are here."""
        stacks = (self.gate[...], self.up[...], self.down[...])
        return backend(x, self.place[...][topk_ids], topk_weights, stacks)

    def holds(self, topk_ids: Int[Array, "n K"]) -> Bool[Array, "n K"]:
        return self.place[...][topk_ids] < self.count


def turns(
    topk_ids: Int[Array, "n K"], held: Bool[Array, "n K"], defer: int, experts: int
) -> tuple[Int[Array, "n K"], Int[Array, "n K"]]:
    """What the host computes now, and what of a token's is left for later: the last `defer` of those that it computes.

    The id `experts`, for none, stands where there is nothing to do."""
    theirs = ~held & (topk_ids < experts)
    if not defer:
        return jnp.where(theirs, topk_ids, experts), jnp.full_like(topk_ids, experts)
    behind = jnp.cumsum(theirs[:, ::-1], axis=1)[:, ::-1]  # of the host's from a place on
    later = theirs & (behind <= defer)
    return jnp.where(theirs & ~later, topk_ids, experts), jnp.where(later, topk_ids, experts)
