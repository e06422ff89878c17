"""The arithmetic shared by all layers, and the one door to kernels: everything that may run faster elsewhere passes here.

Weights keep the checkpoint's order, output axes first: quantised blocks stay whole, and kernels want the contracted axis last."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from mla_jax.base import axes as logical
from mla_jax.base.config import Config


def parameter(
    config: Config, rngs: nnx.Rngs, *axes: str, scale: float = 0.02, mean: float = 0.0, exact: bool = False
) -> nnx.Param:
    """A random weight whose shape follows from the names of its axes; `exact` weights stay float32 in a bfloat16 model."""
    value = mean + scale * jax.random.normal(rngs.params(), logical.shape(config, axes))
    return nnx.Param(value, axes=axes, exact=exact)


def norm_weight(config: Config, rngs: nnx.Rngs, axis: str) -> nnx.Param:
    return parameter(config, rngs, axis, scale=0.0, mean=1.0)


def linear(x: Float[Array, "*B I"], w: Float[Array, "*O I"], out: str | None = None) -> Float[Array, "..."]:
    """Contracts the last axes: `[*B *O]`, in dtype `out` if given. Flat, for a CPU is up to 7 times slower with more axes."""
    flat = w.reshape(-1, w.shape[-1])
    y = jax.lax.dot_general(x, flat, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=out)
    return y.reshape(*x.shape[:-1], *w.shape[:-1])


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*B D"]:
    """Divides by the root mean square, in float32, as the released models do."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return weight * y.astype(x.dtype)


def swiglu(
    x: Float[Array, "*B D"], gate: Float[Array, "F D"], up: Float[Array, "F D"], down: Float[Array, "D F"]
) -> Float[Array, "*B D"]:
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def masked_exp(scores: Float[Array, "*B S"], mask: jax.Array) -> tuple[Float[Array, "*B S"], Float[Array, "*B 1"]]:
    """A softmax over what `mask` allows, before its division: weights up to 1 and their sum, in float32.

    Where nothing is allowed the weights are zeros and the sum is 1, so that attention gives exact zeros."""
    scores = jnp.where(mask, scores.astype(jnp.float32), -jnp.inf)
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, jnp.where(total > 0, total, 1.0)
