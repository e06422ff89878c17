"""Routed experts on the CPU as a module of the model: computed there while the device goes on, or streamed to the device."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mla_jax.model.kernels import largest
from mla_jax.model.moe import ExpertPlan
from mla_jax.offload.replicated import ReplicatedExperts, split
from mla_jax.offload.streaming import Packing, abstract_for_kernels, streamed

Choice = tuple[Array, Array]  # topk_ids and topk_weights


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HostDeferred:
    """Experts that the CPU computes while the next layer runs."""

    ticket: Any  # cpu_experts.ffi.Ticket

    def collect(self, after: Array) -> Float[Array, "n D"]:
        """Their sum, waited for once `after` is computed."""
        from cpu_experts import ffi

        return ffi.collect(self.ticket, after=after)


class HostExperts(nnx.Module):
    """The routed experts of a layer, whose weights are in the host's memory, with replicas of some on the device.

    `layer` is a `cpu_experts.Experts`, or a `Packing` that has its sizes, for a model without weights. It has the call and the
    stacks of `mla_jax.model.moe.Experts`."""

    def __init__(self, layer: Any, replicated: ReplicatedExperts | None = None):
        self.layer, self.replicated = layer, replicated

    def __call__(
        self,
        x: Float[Array, "n D"],
        topk_ids: Int[Array, "n K"],
        topk_weights: Float[Array, "n K"],
        plan: ExpertPlan,
        concurrent: Callable[[Array], Array],
    ) -> tuple[Array, Array, HostDeferred | None]:
        """The chosen experts' sum without the `plan.defer` lowest-weighted of each token, `concurrent(x)`, and the deferred sum.

        Streamed experts defer nothing."""
        if plan.streamed is not None:
            return streamed(self.layer, x, topk_ids, topk_weights, plan.streamed), concurrent(x), None
        return self._on_cpu(x, topk_ids, topk_weights, plan, concurrent)

    def stacks(self, dtype: jnp.dtype) -> dict[str, tuple[Any, ...]]:
        """gate and down as backends on the device get them: all when they are streamed, and the replicas."""
        gate, _, down = abstract_for_kernels(Packing.of(self.layer), self.layer.experts, dtype)
        found = {"streamed": (gate, down)}
        if self.replicated is not None:
            found["replicated"] = (self.replicated.gate.get_value(), self.replicated.down.get_value())
        return found

    def _on_cpu(
        self,
        x: Array,
        topk_ids: Array,
        topk_weights: Array,
        plan: ExpertPlan,
        concurrent: Callable[[Array], Array],
    ) -> tuple[Array, Array, HostDeferred | None]:
        """Each part reads the rows `x` that the one before returned: data is what orders kernels in a GPU's graph."""
        from cpu_experts import ffi

        now, later = self._split(topk_ids, topk_weights, min(plan.defer, topk_ids.shape[1] - 1))
        ticket = ffi.submit(self.layer, x, *now)
        deferred = HostDeferred(ffi.submit(self.layer, ticket.x, *later)) if plan.defer else None
        x = ticket.x if deferred is None else deferred.ticket.x
        other = concurrent(x)
        if self.replicated is None:
            return ffi.collect(ticket, after=other), other, deferred
        replicas = self.replicated(x, topk_ids, topk_weights, plan.replicated or plan.backend)
        return ffi.collect(ticket, after=(other, replicas)) + replicas, other, deferred

    def _split(self, topk_ids: Array, topk_weights: Array, defer: int) -> tuple[Choice, Choice]:
        """The experts that the CPU computes now, and the deferred ones: each token's `defer` lowest weights.

        These are sorted first: a router orders by scores with a bias."""
        if defer:
            order = largest(topk_weights, topk_weights.shape[1])
            topk_ids = jnp.take_along_axis(topk_ids, order, axis=1)
            topk_weights = jnp.take_along_axis(topk_weights, order, axis=1)
        if self.replicated is not None:
            now, later = split(topk_ids, self.replicated.has(topk_ids), defer, self.layer.experts)
            return (now, topk_weights), (later, topk_weights)
        kept = topk_ids.shape[1] - defer
        return (topk_ids[:, :kept], topk_weights[:, :kept]), (topk_ids[:, kept:], topk_weights[:, kept:])


def raise_failed() -> None:
    """Raises the error of the first failed call from a GPU's programs, once."""
    from cpu_experts import ffi

    ffi.check()
