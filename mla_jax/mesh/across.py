"""Collectives over the axes of a mesh, inside `jax.shard_map`.

Outside of a mesh an axis has one device, and nothing is sent. So a module's code is the same for one device and for many."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from mla_jax.base.axes import MESH_AXES

Axes = str | Sequence[str]
# What a GPU's messages are cut into, all together. XLA copies each piece with one block of threads: to another H200 4,096 rows of
# 14 KB take 22.3 ms whole, 0.37 ms in 256 pieces (2026-11-26). Between processes NCCL sends them, whole.
EXCHANGE_PIECES = 512


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


def maximum(x: Any, axes: Axes = MESH_AXES) -> Any:
    """The maximum over these axes, on each device."""
    names = _bound(axes)
    return jax.lax.pmax(x, names) if names else x


def log_total(x: Array, axes: Axes) -> Array:
    """The logarithm of the sum of exponentials over these axes, on each device; -inf is an empty sum."""
    if not _bound(axes):
        return x
    top = maximum(x, axes)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    return jnp.log(total(jnp.exp(x - top), axes)) + top


def any_of(x: Bool[Array, ""]) -> Bool[Array, ""]:
    """Whether this holds on any device of the mesh: for loops and branches in which devices speak to each other."""
    return maximum(x.astype(jnp.int32)) > 0 if _bound(MESH_AXES) else x


def gathered(x: Any, axes: Axes, along: int = 0) -> Any:
    """All-gathers the devices' arrays, concatenated along an axis."""
    names = _bound(axes)
    if not names:
        return x
    return jax.tree.map(lambda leaf: jax.lax.all_gather(leaf, names, axis=along % leaf.ndim, tiled=True), x)


def gathered_as_one(tree: Any, axes: Axes) -> Any:
    """`gathered` of arrays with one first axis, as a single message."""
    if not _bound(axes):
        return tree
    joined, apart = as_one(tree)
    return apart(gathered(joined, axes))


def as_one(tree: Any) -> tuple[Array, Callable[[Array], Any]]:
    """Arrays `[n ..]` as the bits of one `[n bits]`, and how the first rows of such an array are taken apart again."""
    leaves, structure = jax.tree.flatten(tree)
    least = min(leaf.dtype.itemsize for leaf in leaves)
    word = jnp.dtype(f"uint{8 * least}")
    joined = [_as_words(leaf, word) for leaf in leaves]

    def apart(rows: Array) -> Any:
        stops = np.cumsum([words.shape[1] for words in joined])[:-1]
        parts = jnp.split(rows, stops, axis=1)
        return jax.tree.unflatten(
            structure, [_as_numbers(part, leaf) for part, leaf in zip(parts, leaves, strict=True)]
        )

    return jnp.concatenate(joined, axis=1), apart


def _as_words(leaf: Array, word: jnp.dtype) -> Array:
    return jax.lax.bitcast_convert_type(leaf, word).reshape(leaf.shape[0], -1)


def _as_numbers(words: Array, like: Array) -> Array:
    ratio = like.dtype.itemsize // words.dtype.itemsize
    shape = (words.shape[0], *like.shape[1:], *[ratio] * (ratio > 1))
    return jax.lax.bitcast_convert_type(words.reshape(shape), like.dtype)


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


class Route(NamedTuple):
    """How many rows each device sends to each other along some axes: `counts[i, j]` from the i-th to the j-th."""

    axes: tuple[str, ...]
    counts: Int[Array, "N N"]

    @staticmethod
    def of(sends: Int[Array, " N"], axes: Axes) -> "Route":
        """From how many rows this device sends to each."""
        return Route(_bound(axes), gathered(sends[None], axes))

    def back(self) -> "Route":
        return self._replace(counts=self.counts.T)

    @property
    def received(self) -> Int[Array, ""]:
        """Rows that come here."""
        return self.counts[:, index(self.axes)].sum()


class Pieces(NamedTuple):
    """Messages that are cut into equally many pieces, one message's after the other's: where each starts in its message, and how
    many rows it has."""

    starts: Int[Array, " NP"]
    sizes: Int[Array, " NP"]


def cut(counts: Int[Array, " N"], pieces: int) -> Pieces:
    """Messages of `counts` rows, each in `pieces` of nearly equal size."""
    bounds = counts[:, None] * jnp.arange(pieces + 1) // pieces
    return Pieces(bounds[:, :-1].reshape(-1), jnp.diff(bounds, axis=1).reshape(-1))


class Ranges(NamedTuple):
    """The rows of each message of this device: where they begin, and their number."""

    starts: Int[Array, " N"]
    counts: Int[Array, " N"]


class OwnMessages(NamedTuple):
    """This device's part of an exchange: `sends` are ranges of its own rows, `comes` of the received ones.

    `lands` is where each sent message begins among the rows that its destination receives."""

    sends: Ranges
    comes: Ranges
    lands: Int[Array, " N"]

    @staticmethod
    def of(route: Route) -> "OwnMessages":
        here, counts = index(route.axes), route.counts
        outgoing, incoming = jnp.cumsum(counts, axis=1) - counts, jnp.cumsum(counts, axis=0) - counts
        sends, comes = Ranges(outgoing[here], counts[here]), Ranges(incoming[:, here], counts[:, here])
        return OwnMessages(sends, comes, incoming[here])


def sent(rows: Shaped[Array, "S ..."], route: Route, most: int, room: int) -> Shaped[Array, "R ..."]:
    """Ragged all-to-all: the `room` rows that all devices send here, in the devices' order. `rows` are in the order of their
    destinations, of which none gets more than `most`.

    Rows past the last one received may be anything. Where a platform has no ragged exchange, messages are padded to `most` rows.
    On GPUs of one process they go in pieces."""
    messages = OwnMessages.of(route)
    pieces = max(EXCHANGE_PIECES // size(route.axes), 1) if jax.process_count() == 1 else 1
    return jax.lax.platform_dependent(
        rows,
        cpu=lambda rows: _padded(rows, messages, route.axes, most, room),
        cuda=lambda rows: _ragged(rows, messages, route.axes, room, pieces),
        default=lambda rows: _ragged(rows, messages, route.axes, room, 1),
    )


def _ragged(rows: Array, messages: OwnMessages, axes: tuple[str, ...], room: int, pieces: int) -> Array:
    # Not zeros: they depend on nothing, so XLA would make those of all layers at once
    into = rows.at[jnp.arange(room)].get(mode="clip")
    outgoing, incoming = cut(messages.sends.counts, pieces), cut(messages.comes.counts, pieces)
    begins = jnp.repeat(messages.sends.starts, pieces) + outgoing.starts
    lands = jnp.repeat(messages.lands, pieces) + outgoing.starts
    return jax.lax.ragged_all_to_all(
        rows, into, begins, outgoing.sizes, lands, incoming.sizes, axis_name=axes
    )


def _padded(rows: Array, messages: OwnMessages, axes: tuple[str, ...], most: int, room: int) -> Array:
    place = jnp.arange(most)
    blocks = rows.at[messages.sends.starts[:, None] + place].get(mode="clip")
    found = jax.lax.all_to_all(blocks, axes, 0, 0, tiled=True)
    starts, counts = messages.comes
    to = jnp.where(place < counts[:, None], starts[:, None] + place, room)
    return jnp.zeros((room, *rows.shape[1:]), rows.dtype).at[to].set(found, mode="drop")


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
