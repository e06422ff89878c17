"""Selection of the first k of many numbers by their bits, four at a time, by counting smaller ones.

A GPU sorts slowly. This reads the numbers eight times at most, and stops once there are k in every row."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32


def descending(x: Float[Array, "*B W"]) -> UInt32[Array, "*B W"]:
    """Bits that are smaller where float32 numbers are larger, and equal where these are. NaN has no place."""
    bits = jax.lax.bitcast_convert_type(
        jnp.where(x == 0, 0.0, x), jnp.uint32
    )  # a negative zero has other bits
    is_negative = bits >> 31 == 1
    return jnp.where(is_negative, bits, ~bits & 0x7FFFFFFF)


def border(bits: UInt32[Array, "B W"], k: Int[Array, " B"], needed: Bool[Array, " B"]) -> UInt32[Array, " B"]:
    """A number than which at most k of a row are smaller, and at least k not larger; any for rows that do not need it."""

    def is_unfinished(search: _Search) -> Array:
        return (search.shift >= 0) & (needed & (search.most < k)).any()

    start = _Search(jnp.int32(28), jnp.zeros(k.shape, jnp.uint32), jnp.zeros(k.shape, jnp.int32))
    return jax.lax.while_loop(is_unfinished, functools.partial(_with_next_digit, bits, k), start).bits


def first(
    bits: UInt32[Array, "B W"], k: Int[Array, " B"], then: UInt32[Array, "B W"] | None = None
) -> Bool[Array, "B W"]:
    """The k smallest of each row, of equal ones those whose `then` is smaller, then those at the smaller places; all, if there
    are no more."""
    last = border(bits, k, k < bits.shape[1])[:, None]
    smaller, equal = bits < last, bits == last
    room = k - smaller.sum(1, dtype=jnp.int32)
    if then is None:
        taken = equal & (equal.cumsum(1) <= room[:, None])
    else:
        taken = equal & first(jnp.where(equal, then, np.uint32(0xFFFFFFFF)), room)
    return jnp.where((k < bits.shape[1])[:, None], smaller | taken, True)


class _Search(NamedTuple):
    """The `bits` found so far of each row's border, above `shift`; `most` numbers are known to be smaller."""

    shift: Int[Array, ""]
    bits: UInt32[Array, " B"]
    most: Int[Array, " B"]


def _with_next_digit(bits: UInt32[Array, "B W"], k: Int[Array, " B"], search: _Search) -> _Search:
    shift = search.shift.astype(jnp.uint32)
    digits = np.arange(1, 16, dtype=np.uint32)
    tried = search.bits + (digits[:, None] << shift)
    smaller = [(bits < number[:, None]).astype(jnp.int32) for number in tried]
    # Reduced together: two kernels on a GPU, where fifteen sums are sixteen
    add = functools.partial(jax.tree.map, jnp.add)
    counts = jnp.stack(jax.lax.reduce(smaller, [np.int32(0)] * len(digits), add, (1,)))
    fits = counts <= k
    found = search.bits + (fits.sum(0, dtype=jnp.uint32) << shift)
    return _Search(search.shift - 4, found, jnp.maximum(search.most, jnp.where(fits, counts, 0).max(0)))
