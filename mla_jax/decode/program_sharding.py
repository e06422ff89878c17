"""Sharding of programs over a mesh: every device runs the one-device program, under one `jax.shard_map`.

A device has its part of the weights, and pool, rows and page tables of its own. The arrays that programs keep are concatenated
over all devices on the first axis. Arrays from the host have one entry for each data shard. Arrays for the host are replicated:
programs all-gather them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from mla_jax.base.axes import DATA, MESH_AXES
from mla_jax.decode.packing import here
from mla_jax.mesh import partition
from mla_jax.mesh.partition import ONE, Layout
from mla_jax.model.transformer import Transformer

OWN = PartitionSpec(MESH_AXES)  # every device has an array of its own
SENT = PartitionSpec(DATA)
# Ragged messages go by NCCL between processes, and where GPUs do not reach each other's memory. XLA refuses that since JAX 0.11,
# unless it is told that it is meant.
BY_NCCL = "xla_gpu_allow_ragged_all_to_all_nccl_send_recv_fallback"


@dataclasses.dataclass(frozen=True)
class Spread:
    """`mesh` None is one device, whose programs are as they would be without any of this. Programs for an abstract mesh, whose
    devices need not be there, can be exported alone."""

    mesh: Mesh | AbstractMesh | None = None
    layout: Layout = ONE
    specs: tuple[PartitionSpec, ...] = ()  # of each array of the weights

    @classmethod
    def of(cls, model: Transformer) -> "Spread":
        """As the model's weights are sharded, or their shapes."""
        state = nnx.state(model)
        sharding = getattr(jax.tree.leaves(state)[0], "sharding", None)
        if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
            return cls()
        plan = Layout(*(sharding.mesh.shape[axis] for axis in MESH_AXES))
        specs = jax.tree.leaves(partition.of_parameters(state, plan.specs), is_leaf=_is_spec)
        return cls(sharding.mesh, plan, tuple(specs))

    @property
    def shards(self) -> int:
        """Data shards: of what the host sends."""
        return self.layout.data

    @property
    def devices(self) -> list[Any] | None:
        """Of the mesh, in order."""
        return list(self.mesh.devices.flat) if isinstance(self.mesh, Mesh) else None

    @property
    def compiler_options(self) -> dict[str, bool]:
        """XLA's options for programs on several GPUs; none elsewhere."""
        devices = self.devices or []
        if len(devices) > 1 and devices[0].platform == "gpu" and _is_option(BY_NCCL):
            return {BY_NCCL: True}
        return {}

    def local(self, state: Any) -> Any:
        """A model's state as one device has it, of shapes."""
        return partition.of_parameters(state, self.layout.local) if self.mesh is not None else state

    def whole(self, shapes: Any) -> Any:
        """Shapes of arrays concatenated over all devices, from those of one."""
        if self.mesh is None:
            return shapes
        sharding, count = NamedSharding(self.mesh, OWN), self.mesh.size
        return jax.tree.map(
            lambda one: _shaped((one.shape[0] * count, *one.shape[1:]), one.dtype, sharding), shapes
        )

    def sent(self, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """The shape of what the host sends, from that for one data shard."""
        if self.mesh is None:
            return shape
        return _shaped((self.shards, *shape.shape), shape.dtype, NamedSharding(self.mesh, SENT))

    def send(self, array: np.ndarray) -> Any:
        """Sends an array of the host to the devices of this process."""
        if self.mesh is None:
            return array
        return jax.make_array_from_callback(
            array.shape, NamedSharding(self.mesh, SENT), lambda index: array[index]
        )

    def added_up(self, array: jax.Array) -> np.ndarray:
        """The sum of the data shards' arrays, on the host."""
        if self.mesh is None:
            return np.asarray(array)
        whole = jax.device_put(array, NamedSharding(self.mesh, PartitionSpec()))
        return here(whole).reshape(*self.layout, -1, *array.shape[1:])[:, 0, 0].sum(0)

    def fetch(self, array: jax.Array, parts: int) -> list[np.ndarray]:
        """An array that programs keep, on the host: `[K parts ..]` of each data shard, whose first `parts` devices hold all that
        differs."""
        if self.mesh is None:
            return [np.asarray(array)[:, None]]
        data, tensor, context = self.layout
        found = np.asarray(array).reshape(data, tensor * context, -1, *array.shape[1:])
        return [np.moveaxis(mine[:parts], 0, 1) for mine in found]

    def put(self, arrays: Sequence[np.ndarray]) -> jax.Array:
        """The same array on the devices again; those beyond `parts` get copies."""
        if self.mesh is None:
            return jax.device_put(arrays[0][:, 0])
        _, tensor, context = self.layout
        parts = np.moveaxis(np.stack(arrays), 2, 1)
        copies = np.tile(parts, (1, tensor * context // parts.shape[1], *[1] * (parts.ndim - 2)))
        return jax.device_put(copies.reshape(-1, *parts.shape[3:]), NamedSharding(self.mesh, OWN))

    def on_each(self, program: Callable) -> Callable:
        """`program(weights, kept, sent) -> arrays` of one device, as one of all."""
        if self.mesh is None:
            return program

        def of_one(weights: Any, kept: Any, sent: Any) -> Any:
            return program(weights, kept, sent[0])

        return jax.shard_map(
            of_one, mesh=self.mesh, in_specs=(self.specs, OWN, SENT), out_specs=OWN, check_vma=False
        )


@functools.cache
def _is_option(name: str) -> bool:
    """Whether this XLA has a switch of that name."""
    try:
        jax.jit(lambda: 0, compiler_options={name: True}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _shaped(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
