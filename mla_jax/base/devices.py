"""The devices that a model runs on, as data: a mesh, and what one of its devices reaches. A mesh of one today."""

import dataclasses
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mla_jax.base import roofline
from mla_jax.base.axes import MESH_AXES
from mla_jax.base.platforms import default_device


@dataclasses.dataclass(frozen=True)
class Devices:
    """`figures` are FLOP/s and bytes/s of one device of the `mesh`, whose axes are `MESH_AXES`."""

    mesh: Mesh
    figures: roofline.Device

    @staticmethod
    def default(figures: roofline.Device | None = None) -> "Devices":
        """JAX's first device; `figures` None takes those of the table. Raises Unsupported if JAX cannot start."""
        first = default_device()
        mesh = Mesh(np.array([first]).reshape(1, 1), MESH_AXES)
        return Devices(mesh, figures or roofline.device(first.device_kind, first.platform))

    @property
    def first(self) -> Any:
        return self.mesh.devices.flat[0]

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        return self.first.platform

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of an array that every device has a copy of."""
        return NamedSharding(self.mesh, PartitionSpec())

    def free_bytes(self) -> int | None:
        """Memory of one device that may still be allocated; None where the device does not tell, as a CPU does not."""
        stats = self.first.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)

    def peak_bytes(self) -> int | None:
        """The most memory that one device has had allocated; None where the device does not tell."""
        stats = self.first.memory_stats() or {}
        return stats.get("peak_bytes_in_use") or None
