"""Parameters and arithmetic shared by all layers, without kernels.

Weights keep the checkpoint's order, output axes first: quantised blocks stay whole, and kernels want the contracted axis last."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from mla_jax.base import axes as logical
from mla_jax.base import qtensor
from mla_jax.base.config import Config
from mla_jax.base.qtensor import QTensor, dequantize, format_of

Weight = Float[Array, "..."] | QTensor


class Shapes(nnx.Rngs):
    """Given for random numbers, it has a model made whose parameters are shapes: nothing is computed, or traced."""


def parameter(
    config: Config,
    rngs: nnx.Rngs,
    *axes: str,
    scale: float = 0.02,
    mean: float = 0.0,
    exact: bool = False,
    packs: bool = True,
    role: str | None = None,
) -> nnx.Param:
    """A random weight whose shape follows from the names of its axes.

    `exact` ones stay float32 in a bfloat16 model; those that `pack` stay quantised, as QTensors, if a checkpoint has them so.
    The `role` "expert" marks weights of routed experts, "rows" those of which rows are read, "heads" the halves of kv_b_proj."""
    shape = logical.shape(config, axes)
    if isinstance(rngs, Shapes):
        value = jax.ShapeDtypeStruct(shape, jnp.float32)
    else:
        value = mean + scale * jax.random.normal(rngs.params(), shape)
    return nnx.Param(value, axes=axes, exact=exact, packs=packs and len(axes) > 1, role=role)


def norm_weight(config: Config, rngs: nnx.Rngs, axis: str) -> nnx.Param:
    return parameter(config, rngs, axis, scale=0.0, mean=1.0)


def zeros_after(count: Int[Array, ""], shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros that are made once `count`, which is never negative, is there.

    Constant ones XLA makes for all layers at once on a GPU, and keeps them until each layer's turn."""
    return jnp.full(shape, jnp.where(count < 0, 1, 0), dtype)


def plain(w: Weight, dtype: jnp.dtype) -> Float[Array, "..."]:
    """The numbers themselves of a weight that may be packed."""
    return dequantize(w, dtype) if isinstance(w, QTensor) else w


def take_one(w: Weight, index: Array) -> Weight:
    """One matrix of a stack, packed if the stack is."""
    return w.one(index) if isinstance(w, QTensor) else jax.lax.dynamic_index_in_dim(w, index, keepdims=False)


def take(w: Weight, indices: Int[Array, "*B"], dtype: jnp.dtype | None = None) -> Float[Array, "..."]:
    """Rows of a matrix, or matrices of a stack; an index that is too large takes the last."""
    if not isinstance(w, QTensor):
        return w.at[indices].get(mode="clip")
    w = qtensor.restore(w) if len(w.shape) == 2 else w
    if len(w.shape) == 2 and (sharing := format_of(w.format).block[0]) > 1:  # rows that share scales
        at = jnp.clip(indices, 0, w.shape[0] - 1)
        codes, scales = w.parts
        one = QTensor(
            w.format,
            (codes[at][..., None, :], scales[at // sharing][..., None, :]),
            (*at.shape, 1, w.shape[1]),
        )
        return dequantize(one, dtype or jnp.float32)[..., 0, :]
    parts = tuple(part.at[indices].get(mode="clip") for part in w.parts)
    return dequantize(QTensor(w.format, parts, indices.shape + w.shape[1:]), dtype or jnp.float32)


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Divides by the root mean square, in float32, as the released models do."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return weight * y.astype(x.dtype)


def masked_exp(
    scores: Float[Array, "*B S"], mask: jax.Array
) -> tuple[Float[Array, "*B 1"], Float[Array, "*B S"], Float[Array, "*B 1"]]:
    """A softmax over what `mask` allows, before its division: the largest score, weights up to 1, and their sum, in float32.

    Where nothing is allowed these are -inf, zeros and 0."""
    scores = jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    return top, weights, jnp.sum(weights, axis=-1, keepdims=True)
