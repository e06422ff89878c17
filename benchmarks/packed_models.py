"""Models with random packed weights, made on the device one parameter at a time, for timing what multiplies them.

    from packed_models import random_model
    model = random_model(Config.preset("v2_lite"), "Q4_K")

Every parameter that a checkpoint may have packed is so, and is reordered where a kernel of this device then takes it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import report
from flax import nnx

from mla_jax import Config, Transformer
from mla_jax.base import qtensor
from mla_jax.base.qtensor import QTensor
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.ops import kernels_here
from pallas_kernels import packed

DTYPE = jnp.dtype("bfloat16")
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}  # what llama.cpp takes for rows that no block of 256 divides


def random_model(config: Config, format: str, dispatch: Dispatch | None = None, mtp: bool = False) -> Transformer:
    """A model in a format of `packed.KINDS`, "Q4_K" being llama.cpp's Q4_K_M; `dispatch` None: what is fastest on this device."""
    dispatch = dispatch or Dispatch(device=report.device())
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dispatch=dispatch, mtp=mtp)))
    for seed, (path, variable) in enumerate(nnx.to_flat_state(state)):
        kind = stored_as(path, variable, format)
        if kind is None:
            value = _numbers(variable.shape, jnp.float32 if variable.get_metadata()["exact"] else DTYPE, seed)
        else:
            value = _packed(kind, variable.shape, reordered(variable, kind), seed)
        variable.set_value(jax.block_until_ready(value))
    return nnx.merge(graph, state)


def stored_as(path: tuple, variable: Any, format: str) -> str | None:
    """The format of the parameter at `path`; None: it is not packed. Q4_K_M has the head in Q6_K, and down in about half of the
    layers."""
    if not variable.get_metadata()["packs"]:
        return None
    if format == "Q4_K" and (path[0] == "head" or (path[-1] == "down" and path[1] % 2)):
        format = "Q6_K"
    return NARROW.get(format, format) if variable.shape[-1] % 256 else format


def reordered(variable: Any, kind: str) -> bool:
    return variable.get_metadata()["role"] != "rows" and kernels_here() and packed.why_not(kind, variable.shape) is None


@functools.partial(jax.jit, static_argnums=(0, 1))
def _numbers(shape: tuple[int, ...], dtype: jnp.dtype, seed: int) -> jax.Array:
    mean = float(len(shape) == 1)
    return mean + 0.02 * jax.random.normal(jax.random.key(seed), shape, dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _packed(kind: str, shape: tuple[int, ...], reordered: bool, seed: int) -> QTensor:
    """Random bytes of the format; a stack's matrices come one after the other."""
    if len(shape) == 3:
        one = functools.partial(_packed, kind, shape[1:], reordered)
        stack = jax.lax.map(one, seed * 1000 + jnp.arange(shape[0]))
        return QTensor(stack.format, stack.parts, shape)
    w = QTensor(kind, packed.random_parts(kind, shape, seed), shape)
    return qtensor.reorder(w) if reordered else w
