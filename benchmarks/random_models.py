"""Models with random weights, made on the devices one parameter at a time, for timing what multiplies them.

    from random_models import random_model
    model = random_model(Config.preset("v2_lite"), "Q4_K")
    model = random_model(Config.preset("v3"), "fp8_block", devices=Devices.of({"data": 8}))

In a packed format every parameter that a checkpoint may have packed is so, and is reordered where a kernel of this device then
takes it. On a mesh each device makes its own part."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import report
from flax import nnx
from jax.sharding import PartitionSpec

from cpu_experts import Experts
from mla_jax import Config, Transformer
from mla_jax.base import qtensor
from mla_jax.base.qtensor import BY_COLUMN, REORDERED, QTensor
from mla_jax.mesh.devices import Devices
from mla_jax.mesh.partition import Layout
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.kernels import kernels_here
from mla_jax.offload.experts import HostExperts
from pallas_kernels import packed

DTYPE = jnp.dtype("bfloat16")
# What llama.cpp takes for rows that no block of 256 divides
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}


def random_model(
    config: Config,
    format: str = "bf16",
    dispatch: Dispatch | None = None,
    mtp: bool = False,
    on_host: Mapping[int, Experts] | None = None,
    devices: Devices | None = None,
) -> Transformer:
    """A model in bf16, or in a format of `packed.KINDS`, "Q4_K" being llama.cpp's Q4_K_M.

    `dispatch` None takes the fastest on this device, `devices` None the first one. `on_host` gives the experts of its layers."""
    plan = Layout() if devices is None else Layout(**devices.sizes)
    dispatch = dataclasses.replace(dispatch or Dispatch(device=report.device()), layout=plan)
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dispatch=dispatch, mtp=mtp))
    for number, layer in (on_host or {}).items():
        model.layers[number].mlp.experts = HostExperts(layer)
    graph, state = nnx.split(model)
    for seed, (path, variable) in enumerate(nnx.to_flat_state(state)):
        whole = stored(path, variable, format)
        value = (
            _one_device(whole, seed)
            if devices is None
            else _mesh(whole, variable.get_metadata()["axes"], plan, devices, seed)
        )
        variable.set_value(jax.block_until_ready(value))
    return nnx.merge(graph, state)


def stored(path: tuple, variable: Any, format: str) -> Any:
    """The shape of the parameter at `path` in a checkpoint of this format, packed or not."""
    kind = None if format == "bf16" else stored_as(path, variable, format)
    if kind is None:
        return jax.ShapeDtypeStruct(
            variable.shape, jnp.float32 if variable.get_metadata()["exact"] else DTYPE
        )
    return qtensor.abstract(kind + REORDERED * reordered(variable, kind), variable.shape)


def stored_as(path: tuple, variable: Any, format: str) -> str | None:
    """The format of the parameter at `path`; None: it is not packed. Q4_K_M has the head in Q6_K, and down in about half of the
    layers."""
    if variable.get_metadata()["role"] == "heads" and format == "fp8_block":
        return BY_COLUMN
    if not variable.get_metadata()["packs"]:
        return None
    if format == "Q4_K" and (path[0] == "head" or (path[-1] == "down" and path[1] % 2)):
        format = "Q6_K"
    return NARROW.get(format, format) if variable.shape[-1] % 256 else format


def reordered(variable: Any, kind: str) -> bool:
    if variable.get_metadata()["role"] == "rows" or not kernels_here():
        return False
    return packed.why_not(kind, variable.shape) is None


def _one_device(whole: Any, seed: int) -> Any:
    if not isinstance(whole, QTensor):
        return numbers(whole.shape, whole.dtype, seed)
    return QTensor(whole.format, _parts(whole.format, whole.shape, seed), whole.shape)


def _mesh(whole: Any, words: tuple[str, ...], plan: Layout, devices: Devices, seed: int) -> Any:
    """A parameter of which each device makes its part; the parts of all are alike."""
    local, specs = plan.local_shape(words, whole), plan.specs(words, whole)
    if not isinstance(whole, QTensor):
        return _on_each(numbers, (local, whole.dtype), devices.mesh, specs)(seed)
    parts = _on_each(_parts, (whole.format, local), devices.mesh, specs.parts)(seed)
    return QTensor(whole.format, parts, whole.shape)


@functools.cache
def _on_each(make: Callable, of_part: tuple, mesh: jax.sharding.Mesh, specs: Any) -> Callable[[int], Any]:
    one = functools.partial(make, *of_part)
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs, check_vma=False))


@functools.partial(jax.jit, static_argnums=(0, 1))
def numbers(shape: tuple[int, ...], dtype: jnp.dtype, seed: int) -> jax.Array:
    """Around 0, or 1 for norms."""
    mean = float(len(shape) == 1)
    return mean + 0.02 * jax.random.normal(jax.random.key(seed), shape, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _parts(format: str, shape: tuple[int, ...], seed: int) -> tuple[jax.Array, ...]:
    """Random bytes of the format; a stack's matrices come one after the other."""
    if len(shape) == 3:
        return jax.lax.map(functools.partial(_parts, format, shape[1:]), seed * 1000 + jnp.arange(shape[0]))
    if format == BY_COLUMN:
        codes, scales = packed.random_parts("fp8_row", shape[::-1], seed)
        return codes.T, scales
    kind = format.removesuffix(REORDERED)
    w = QTensor(kind, packed.random_parts(kind, shape, seed), shape)
    return (w if kind == format else qtensor.reorder(w)).parts
