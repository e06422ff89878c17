"""The ranges of keys that queries attend to: brought to one form, and what the queries of a block have in common."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

FAR = jnp.iinfo(jnp.int32).max


class Spans(NamedTuple):
    """Bounds of what the queries of each block attend to, int32 `[B blocks]`; queries that attend to nothing do not count."""

    first: jax.Array  # the least first key; FAR if none attends to anything
    stop: jax.Array  # the largest stop; 0 if none does
    all_first: jax.Array  # from here on, every query attends to all keys
    all_stop: jax.Array  # up to here


def clipped(first: jax.Array, stop: jax.Array, keys: int) -> tuple[jax.Array, jax.Array]:
    """The same ranges within the keys there are, in int32; 0 and 0 where a query attends to nothing."""
    first, stop = (jnp.clip(x.astype(jnp.int32), 0, keys) for x in (first, stop))
    some = first < stop
    return jnp.where(some, first, 0), jnp.where(some, stop, 0)


def spans(first: jax.Array, stop: jax.Array, block: int) -> Spans:
    """Of clipped ranges `[B T]`, for `block` queries at a time; the last block may be shorter."""
    first, stop = (
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % block))).reshape(len(x), -1, block) for x in (first, stop)
    )
    some = {"where": first < stop, "initial": FAR}
    return Spans(first.min(-1, **some), stop.max(-1), first.max(-1), stop.min(-1, **some))
