"""Online softmax in float32: the running maximum, sum of weights and weighted values of scores that arrive in pieces."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Running(NamedTuple):
    top: jax.Array  # [.. 1]
    total: jax.Array  # [.. 1]
    out: jax.Array  # [.. V]


def start(shape: tuple[int, ...], width: int) -> Running:
    """The initial state, for queries of `shape` and values of `width`."""
    return Running(jnp.full((*shape, 1), -jnp.inf), jnp.zeros((*shape, 1)), jnp.zeros((*shape, width)))


def nothing(queries: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """The answer without keys or queries, for queries `[.. D]`: zeros `[.. width]` and an LSE of -inf."""
    return jnp.zeros((*queries.shape[:-1], width), queries.dtype), jnp.full(queries.shape[:-1], -jnp.inf)


def add(state: Running, scores: jax.Array, weigh: Callable[[jax.Array], jax.Array]) -> Running:
    """Adds scores `[.. S]`, -inf where masked; `weigh` maps weights `[.. S]` to weighted values `[.. V]`."""
    top = jnp.maximum(state.top, jnp.max(scores, axis=-1, keepdims=True))
    safe = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(scores - safe)
    keep = jnp.exp(state.top - safe)
    total = state.total * keep + jnp.sum(weights, axis=-1, keepdims=True)
    return Running(top, total, state.out * keep + weigh(weights))


def finish(state: Running) -> tuple[jax.Array, jax.Array]:
    """The output `[.. V]` and the LSE `[..]`: zeros and -inf where everything was masked."""
    none = state.total == 0  # False for NaN, which propagates to both
    total = jnp.where(none, 1, state.total)
    lse = jnp.where(none, -jnp.inf, state.top + jnp.log(total))
    return state.out / total, lse[..., 0]
