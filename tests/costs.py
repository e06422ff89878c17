"""The cost model of released models on GPUs that are not here."""

from collections.abc import Mapping

from mla_jax.base.config import Config
from mla_jax.base.roofline import DEVICES, Device
from mla_jax.mesh.cost import MeshCost
from mla_jax.model import kernels
from mla_jax.model.parts import cost_of, released

H200 = DEVICES["NVIDIA H200"]


def released_cost(config: Config, sizes: Mapping[str, int] | None = None, device: Device = H200, **options) -> MeshCost:
    """With the kernels of Hopper, whatever the device's figures."""
    with kernels.as_if_on("NVIDIA H200", "gpu", "9.0"):
        return cost_of(released(config, device, sizes, **options))
