"""A model that gradients can be taken of."""

import dataclasses

from flax import nnx

from mla_jax.base.errors import Unsupported
from mla_jax.base.options import OWN_ATTENTION, OWN_EXPERTS
from mla_jax.base.qtensor import QTensor
from mla_jax.model.ops import plain
from mla_jax.model.transformer import Transformer


def trainable(model: Transformer) -> Transformer:
    """A copy of `model` whose forward pass, without a cache, `jax.grad` can differentiate; it is used as any NNX module.

    Weights are floating-point numbers of the model's dtype: arrays that are so already are shared, quantised ones are unpacked.
    All experts are computed for all tokens (the backend "dense"), because the loop over experts on a CPU and the kernels have no
    gradients; a form and a backend of a user's own stay. Raises Unsupported if experts are on the CPU next to a device."""
    if model.on_host():
        raise Unsupported("experts on the host have no gradients", 'open the model with experts="dense"')
    graph, state = nnx.split(model)
    flat = []
    for path, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        flat.append(
            (path, variable.replace(plain(value, model.dtype)) if isinstance(value, QTensor) else variable)
        )
    copy = nnx.merge(graph, nnx.from_flat_state(flat))
    attention = model.dispatch.attention if model.dispatch.attention in OWN_ATTENTION else "move_elided"
    experts = model.dispatch.experts if model.dispatch.experts in OWN_EXPERTS else "dense"
    copy.dispatch = dataclasses.replace(model.dispatch, attention=attention, experts=experts)
    return copy
