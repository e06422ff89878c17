"""A model that gradients can be taken of."""

import dataclasses

from flax import nnx

from mla_jax.base.errors import Unsupported
from mla_jax.base.options import OWN_ATTENTION, OWN_EXPERTS
from mla_jax.mesh.partition import ONE
from mla_jax.model.moe import MoE
from mla_jax.model.ops import plain
from mla_jax.model.transformer import Transformer


def trainable(model: Transformer, remat: bool = False) -> Transformer:
    """A copy of `model` whose forward pass, without a cache, `jax.grad` can differentiate; it is used as any NNX module.

    Weights are floating-point numbers of the model's dtype: arrays that are so already are shared, quantised ones are unpacked.
    All experts are computed for all tokens (the backend "dense"), because the loop over experts on a CPU and the kernels have no
    gradients; a form and a backend of a user's own stay. On a mesh arrays stay where they are, and JAX shares the work out. With
    `remat` a layer's activations are computed again for its gradients, and only its input is kept. Raises Unsupported as
    `refuse_apart` does."""
    refuse_apart(model)
    graph, state = nnx.split(model)
    flat = [
        (path, variable.replace(plain(variable.get_value(), model.dtype)))
        for path, variable in nnx.to_flat_state(state)
    ]
    copy = nnx.merge(graph, nnx.from_flat_state(flat))
    attention = model.dispatch.attention if model.dispatch.attention in OWN_ATTENTION else "move_elided"
    experts = model.dispatch.experts if model.dispatch.experts in OWN_EXPERTS else "dense"
    copy.dispatch = dataclasses.replace(
        model.dispatch, attention=attention, experts=experts, layout=ONE, remat=remat
    )
    return copy


def refuse_apart(model: Transformer) -> None:
    """Raises Unsupported if some weights are no single arrays on the devices: experts on the CPU, or with copies on a mesh."""
    if model.on_host():
        raise Unsupported(
            "experts on the host are neither trained nor changed", 'open the model with experts="dense"'
        )
    if any(isinstance(block.mlp, MoE) and block.mlp.places is not None for block in model.blocks()):
        raise Unsupported(
            "experts with copies on a mesh are neither trained nor changed",
            "open the model with device_experts=0",
        )
