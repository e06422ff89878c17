"""The devices that a model runs on, as data: a mesh, and what one of its devices reaches."""

import dataclasses
from collections.abc import Mapping
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mla_jax.base import roofline
from mla_jax.base.axes import MESH_AXES, shown_mesh
from mla_jax.base.errors import BadRequest, DoesNotFit
from mla_jax.base.platforms import default_device


@dataclasses.dataclass(frozen=True)
class Devices:
    """`figures` are FLOP/s and bytes/s of one device of the `mesh`, whose axes are `MESH_AXES`."""

    mesh: Mesh
    figures: roofline.Device

    @staticmethod
    def default(figures: roofline.Device | None = None) -> "Devices":
        """JAX's first device; `figures` None takes the table's. Raises Unsupported if JAX cannot start."""
        return Devices.of({}, figures)

    @staticmethod
    def of(mesh: Mapping[str, int] | Mesh, figures: roofline.Device | None = None) -> "Devices":
        """The first of JAX's devices for these sizes, or a mesh of the caller's; an axis that is left out is 1.

        Raises DoesNotFit for more devices than there are, BadRequest for a mesh with other axes."""
        first = default_device()
        if not isinstance(mesh, Mesh):
            shape = tuple(mesh.get(axis, 1) for axis in MESH_AXES)
            devices = _enough(prod(shape), mesh, first)
            mesh = Mesh(np.array(devices).reshape(shape), MESH_AXES)
        mesh = _with_all_axes(mesh)
        first = mesh.devices.flat[0]
        return Devices(mesh, figures or roofline.device(first.device_kind, first.platform))

    @property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return {axis: self.mesh.shape[axis] for axis in MESH_AXES}

    @property
    def count(self) -> int:
        return self.mesh.devices.size

    @property
    def first(self) -> Any:
        """The first device of this process."""
        return self.mesh.local_devices[0]

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        return self.first.platform

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device has a copy of."""
        return NamedSharding(self.mesh, PartitionSpec())

    def put(self, array: np.ndarray) -> jax.Array:
        """A copy on each device."""
        return jax.make_array_from_callback(array.shape, self.replicated, lambda index: array[index])

    def free_bytes(self) -> int | None:
        """Memory of the fullest device of this process that may still be allocated; None where it does not tell, as a CPU."""
        found = [device.memory_stats() or {} for device in self.mesh.local_devices]
        free = [
            stats["bytes_limit"] - stats.get("bytes_in_use", 0) for stats in found if "bytes_limit" in stats
        ]
        return min(free, default=None)


def _enough(count: int, mesh: Mapping[str, int], first: Any) -> list[Any]:
    devices = jax.devices()
    if count > len(devices):
        found = f"{len(devices)} {'are' if len(devices) > 1 else 'is'} here: {first.device_kind}"
        simulated = "XLA_FLAGS=--xla_force_host_platform_device_count=N simulates N on a CPU"
        hint = [simulated] if first.platform == "cpu" else []
        raise DoesNotFit(f"the mesh {shown_mesh(mesh)} needs {count} devices", found, *hint)
    return [first] if count == 1 else devices[:count]


def _with_all_axes(mesh: Mesh) -> Mesh:
    """The same devices with our axes, in our order."""
    if wrong := [axis for axis in mesh.axis_names if axis not in MESH_AXES]:
        raise BadRequest(f"the mesh has an axis {wrong[0]}", f"expected {', '.join(MESH_AXES)}")
    order = [mesh.axis_names.index(axis) for axis in MESH_AXES if axis in mesh.axis_names]
    shape = tuple(mesh.shape.get(axis, 1) for axis in MESH_AXES)
    return Mesh(mesh.devices.transpose(order).reshape(shape), MESH_AXES)
