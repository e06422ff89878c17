"""Models on simulated devices: whole weights that are laid out as a mesh has them."""

import dataclasses

import jax
from flax import nnx
from jax.sharding import NamedSharding

from mla_jax.base.axes import MESH_AXES
from mla_jax.base.qtensor import QTensor
from mla_jax.mesh import partition
from mla_jax.mesh.devices import Devices
from mla_jax.mesh.partition import Layout
from mla_jax.model.transformer import Transformer


def spread(model: Transformer, devices: Devices) -> Transformer:
    """The same model on the devices of a mesh."""
    plan = Layout(*(devices.sizes[axis] for axis in MESH_AXES))

    def laid(words, value):
        specs = plan.specs(words, value)
        if isinstance(value, QTensor):
            parts = (jax.device_put(p, NamedSharding(devices.mesh, s)) for p, s in zip(value.parts, specs.parts, strict=True))
            return dataclasses.replace(value, parts=tuple(parts))
        return jax.device_put(value, NamedSharding(devices.mesh, specs))

    graph, state = nnx.split(model)
    found = nnx.merge(graph, partition.of_parameters(state, laid))
    found.dispatch = dataclasses.replace(model.dispatch, layout=plan)
    return found
