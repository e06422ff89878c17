"""Reads a checkpoint's weights for a mesh: each device's part of every parameter, and nothing that no device here has.

A part that several devices have is read once and put on each. Host memory holds the few parts in flight. The conversion of
stored parts to a parameter is one program over the mesh, in which each device computes its own part without communicating."""

from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from mla_jax.base import qtensor
from mla_jax.base.axes import MESH_AXES
from mla_jax.base.config import Config
from mla_jax.base.qtensor import QTensor
from mla_jax.mesh.partition import Cut, Layout
from mla_jax.weights import boxes, names
from mla_jax.weights.boxes import Box
from mla_jax.weights.fill import IN_FLIGHT, PLAIN_DTYPES, Conversion, Fill, Parts, empty, insert, parameter_of
from mla_jax.weights.gguf_names import transposed

if TYPE_CHECKING:
    from mla_jax.weights.load import Checkpoint

EACH = PartitionSpec(MESH_AXES)  # of an array with an entry for each device
Reads = list[tuple[names.Piece, list[int]]]  # what is read, with the places of the devices that have it


class Share(NamedTuple):
    """One device's reads of a parameter: the `window` of each stored tensor, in which its part begins at `start`.

    Of a stack it is the window of each of the experts from `first`."""

    first: int
    window: Box
    start: tuple[int, ...]


class MeshReads(NamedTuple):
    """The reads of a parameter by each device, in the order of the mesh, and their conversion.

    `entries` is the number of tensors that a device reads one after the other: of a stack its experts."""

    of: list[Share]
    how: Conversion
    entries: int

    def pieces(self, source: names.Origin, places: Iterable[int]) -> Reads:
        """The pieces to read for the devices at these places of the mesh."""
        groups: dict[Share, list[int]] = {}
        for at in places:
            groups.setdefault(self.of[at], []).append(at)
        found = (
            (source.pieces[share.first + i], share, group)
            for i in range(self.entries)
            for share, group in groups.items()
        )
        return [(piece._replace(box=share.window), group) for piece, share, group in found]


def mesh_reads(checkpoint: "Checkpoint", path: str) -> MeshReads:
    """Who reads what of a parameter; it follows from the layout alone."""
    source, value, layout = checkpoint.sources[path], checkpoint.on_device(path), checkpoint.layout
    entry = checkpoint.source.tensors[source.names[0]]
    shape = entry.shape[1:] if source.pieces[0].index is not None else entry.shape
    cuts = layout.cuts(checkpoint.words(path), value)
    sizes = boxes.blocks(entry.format, len(shape))
    own = [box_of(layout, cuts, value.shape, at) for at in product(*map(range, layout))]
    of_tensor = [_stored(source.part, box[source.stacked :], shape, checkpoint.config) for box in own]
    windows = [boxes.outward(box, shape, sizes) for box in of_tensor]
    kept = None if windows == of_tensor else boxes.box_shape(of_tensor[0])
    assert kept is None or not isinstance(value, QTensor), "a packed parameter is cut between its blocks"
    most = tuple(map(max, zip(*map(boxes.box_shape, windows), strict=True)))
    found = [
        Share(
            box[0][0] if source.stacked else 0,
            window,
            tuple(i - o for (i, _), (o, _) in zip(part, window, strict=True)),
        )
        for box, part, window in zip(own, of_tensor, windows, strict=True)
    ]
    entries = value.shape[0] // layout.parts(cuts[0]) if source.stacked else 1
    return MeshReads(found, Conversion(source.part, checkpoint.config, entry.format, most, kept), entries)


def box_of(layout: Layout, cuts: tuple[Cut, ...], shape: tuple[int, ...], at: tuple[int, ...]) -> Box:
    """The part of an array that the device at a place of the mesh has."""
    index: dict[str, int] = dict(zip(MESH_AXES, at, strict=True))

    def along(size: int, cut: Cut) -> tuple[int, int]:
        number = 0
        for axis in cut:
            number = number * layout.sizes[axis] + index[axis]
        length = size // layout.parts(cut)
        return number * length, (number + 1) * length

    return tuple(map(along, shape, cuts))


def _stored(part: names.PartOf, box: Box, shape: tuple[int, ...], config: Config) -> Box:
    """The box of a stored tensor that holds a box of our parameter."""
    if part is names.unchanged:
        return box
    if part is transposed:
        return (*box[:-2], box[-1], box[-2])
    if part in (names.key_half, names.value_half):
        rows = names.rows_of_head(config)
        return ((box[0][0] * rows, box[0][1] * rows), *boxes.whole_box(shape)[1:])
    return boxes.whole_box(shape)  # of one expert, whose joined gate and up no device has a part of


class FillMesh(Fill):
    """One reading of a checkpoint for this process's devices. Experts on the host are read whole, as for one device."""

    def run(self) -> tuple[dict[str, Any], dict[int, Any]]:
        self.mesh = self.checkpoint.devices.mesh
        flat = list(self.mesh.devices.flat)
        self.here = {flat.index(device): device for device in self.mesh.local_devices}
        self.sent: deque[Array] = deque()
        return super().run()

    def _pieces(self, path: str, source: names.Origin) -> tuple[names.Piece, ...]:
        if path in self.on_host:
            return super()._pieces(path, source)
        return tuple(piece for piece, _ in mesh_reads(self.checkpoint, path).pieces(source, self.here))

    def _parameter(self, path: str, source: names.Origin, tensors: Iterable[Parts]) -> Any:
        if path in self.on_host:
            return super()._parameter(path, source, tensors)
        found = mesh_reads(self.checkpoint, path)
        whole = self.values[path]
        tensors = iter(tensors)
        layout, words = self.checkpoint.layout, self.checkpoint.words(path)
        leaves, tree = jax.tree.flatten(
            layout.specs(words, whole), is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
        how = {"how": found.how, "mesh": self.mesh, "specs": tuple(leaves)}
        start = None if found.how.kept is None else self._starts(found)
        queue = list(found.pieces(source, self.here))
        if not source.stacked:
            parts = self._sent(found.how, queue, tensors)
            filled, sound = _place_all(parts, start, like=layout.local(words, whole), **how)
            self._heard(queue, sound)
            return jax.tree.unflatten(tree, filled)
        value = jax.tree.map(
            empty, whole, jax.tree.unflatten(tree, [NamedSharding(self.mesh, spec) for spec in leaves])
        )
        each = len(queue) // found.entries
        for i in range(found.entries):
            pieces = queue[i * each :][:each]
            value, sound = _insert_all(value, self._sent(found.how, pieces, tensors), i, start, **how)
            self._heard(pieces, sound)
        return value

    def _sent(self, how: Conversion, pieces: Reads, tensors: Iterator[Parts]) -> tuple[Array, ...]:
        """Sends the parts to their devices: arrays with an entry for each device of the mesh."""
        shapes = _part_shapes(how)
        arrays: list[dict[int, Array]] = [{} for _ in shapes]
        for _, places in pieces:
            for found, part, shape in zip(arrays, next(tensors), shapes, strict=True):
                part = boxes.fitted(part, shape)[None]
                found.update((at, jax.device_put(part, self.here[at])) for at in places)
            self.sent.append(arrays[0][places[-1]])
            if len(self.sent) == IN_FLIGHT:
                self.sent.popleft().block_until_ready()
        return tuple(map(self._joined, arrays))

    def _starts(self, found: MeshReads) -> Array:
        """The offset of each device's part in its window."""
        own = {at: np.array([found.of[at].start], np.int32) for at in self.here}
        return self._joined({at: jax.device_put(start, self.here[at]) for at, start in own.items()})

    def _joined(self, entries: dict[int, Array]) -> Array:
        """An array with an entry for each device of the mesh, from the entries of this process's devices."""
        shape = (self.mesh.devices.size, *next(iter(entries.values())).shape[1:])
        return jax.make_array_from_single_device_arrays(
            shape, NamedSharding(self.mesh, EACH), list(entries.values())
        )

    def _heard(self, pieces: Reads, sound: Array) -> None:
        """Whether each device's part is finite will be known."""
        name = {at: piece.name for piece, places in pieces for at in places}
        found = [(name[shard.index[0].start or 0], shard.data) for shard in sound.addressable_shards]
        self._placed(found, len(pieces))


def _part_shapes(how: Conversion) -> list[tuple[int, ...]]:
    """The shapes of the parts to read for one device."""
    return (
        [how.shape]
        if how.format in PLAIN_DTYPES
        else [part.shape for part in qtensor.abstract(how.format, how.shape).parts]
    )


@partial(jax.jit, static_argnames=("how", "like", "mesh", "specs"))
def _place_all(
    parts: Any, start: Any, *, how: Conversion, like: Any, mesh: Mesh, specs: tuple
) -> tuple[Any, Array]:
    """As `parameter_of`, by each device for its own part: the arrays of a parameter, and a flag for each device."""

    def one(parts: Any, start: Any) -> tuple[Any, Array]:
        value, sound = parameter_of(*_own((parts, start)), how=how, like=like)
        return tuple(jax.tree.leaves(value)), sound[None]

    by_all = jax.shard_map(one, mesh=mesh, in_specs=(EACH, EACH), out_specs=(specs, EACH), check_vma=False)
    return by_all(parts, start)


@partial(jax.jit, static_argnames=("how", "mesh", "specs"), donate_argnums=0)
def _insert_all(
    stack: Any, parts: Any, index: Any, start: Any, *, how: Conversion, mesh: Mesh, specs: tuple
) -> tuple[Any, Array]:
    """As `insert`, by each device into the part of the stack that it has."""
    of_stack = jax.tree.unflatten(jax.tree.structure(stack), specs)

    def one(stack: Any, parts: Any, index: Any, start: Any) -> tuple[Any, Array]:
        parts, start = _own((parts, start))
        value, sound = insert(stack, parts, index, start, how=how)
        return value, sound[None]

    in_specs, out_specs = (of_stack, EACH, PartitionSpec(), EACH), (of_stack, EACH)
    by_all = jax.shard_map(one, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return by_all(stack, parts, index, start)


def _own(entries: Any) -> Any:
    """Of arrays with an entry for each device, this device's."""
    return jax.tree.map(lambda array: array[0], entries)
