"""What devices of a mesh say to each other: collectives over mesh axes, inside `jax.shard_map`.

Outside of a mesh an axis has one device, and nothing is sent. So a module's code is the same for one device and for many."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from mla_jax.base.axes import MESH_AXES

Axes = str | Sequence[str]


def size(axes: Axes) -> int:
    """Devices along these mesh axes; 1 outside of a mesh."""
    count = 1
    for axis in _names(axes):
        count *= _size(axis)
    return count


def index(axes: Axes) -> Array:
    """This device's place among them; the last axis runs fastest."""
    found = jnp.int32(0)
    for axis in _bound(axes):
        found = found * _size(axis) + jax.lax.axis_index(axis)
    return found


def total(x: Any, axes: Axes) -> Any:
    """The sum over these axes, on each device."""
    names = _bound(axes)
    return jax.lax.psum(x, names) if names else x


def largest(x: Any, axes: Axes = MESH_AXES) -> Any:
    """The maximum over these axes, on each device."""
    names = _bound(axes)
    return jax.lax.pmax(x, names) if names else x


def any_of(x: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether this holds on any device of the mesh: for loops and branches in which devices speak to each other."""
    return largest(x.astype(jnp.int32)) > 0 if _bound(MESH_AXES) else x


def gathered(x: Any, axes: Axes, along: int = 0) -> Any:
    """What each device has, one after the other along an axis of the arrays."""
    names = _bound(axes)
    if not names:
        return x
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, names, axis=along % leaf.ndim, tiled=True), x)


def scattered(x: Array, axes: Axes, along: int = 0) -> Array:
    """The sum over these axes, of which each device gets its own part."""
    names = _bound(axes)
    return jax.lax.psum_scatter(x, names, scatter_dimension=along, tiled=True) if names else x


def own(x: Any, axes: Axes, along: int = 0) -> Any:
    """This device's part of arrays that all have, cut along one of their axes."""
    return jax.tree.map(lambda leaf: part(leaf, leaf.shape[along] // size(axes), axes, along), x)


def part(x: Array, length: int, axes: Axes, along: int = 0) -> Array:
    """This device's part, of this length."""
    if x.shape[along] == length:
        return x
    return jax.lax.dynamic_slice_in_dim(x, index(axes) * length, length, along)


def swapped(x: Array, axis: str, cut: int, join: int) -> Array:
    """An array of which each device has a part along `join`, as one of which each has a part along `cut`."""
    return jax.lax.all_to_all(x, axis, cut % x.ndim, join % x.ndim, tiled=True) if size(axis) > 1 else x


def _names(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _bound(axes: Axes) -> tuple[str, ...]:
    """The axes with several devices."""
    return tuple(axis for axis in _names(axes) if _size(axis) > 1)


def _size(axis: str) -> int:
    try:
        return jax.lax.axis_size(axis)
    except NameError:  # no mesh
        return 1
