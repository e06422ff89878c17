"""A mesh of absent devices, for planning: figures and memory come from a table, and no program can run."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NoReturn

from jax.sharding import AbstractMesh

from mla_jax.base.axes import MESH_AXES
from mla_jax.base.errors import BadRequest, Unsupported, printable
from mla_jax.base.link_rates import PLANNED
from mla_jax.base.options import MEMORY_FRACTION
from mla_jax.mesh.devices import Devices


@dataclasses.dataclass(frozen=True)
class PlannedDevices(Devices):
    """`memory` are the bytes of one device that may be used."""

    mesh: AbstractMesh  # pyright: ignore[reportIncompatibleVariableOverride]
    memory: int

    @property
    def count(self) -> int:
        return self.mesh.size

    @property
    def first(self) -> NoReturn:
        raise Unsupported(
            f"there is no {self.figures.name} here", "it was planned for alone, as --dry-run does"
        )

    @property
    def platform(self) -> str:
        return self.figures.platform

    def free_bytes(self) -> int:
        return self.memory


def planned(kind: str, mesh: Mapping[str, int], fraction: float | None = None) -> PlannedDevices:
    """A mesh of these sizes of a kind of PLANNED; an axis that is left out is 1. Raises BadRequest for another kind."""
    if kind not in PLANNED:
        raise BadRequest(f"no device {printable(kind)} can be planned for", "known: " + ", ".join(PLANNED))
    sizes: Any = tuple(mesh.get(axis, 1) for axis in MESH_AXES)
    found = PLANNED[kind]
    return PlannedDevices(
        AbstractMesh(sizes, MESH_AXES), found.figures, int(found.memory * (fraction or MEMORY_FRACTION))
    )
