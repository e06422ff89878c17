"""Reads a checkpoint's weights, tensor by tensor, from files to the device, or to the host's memory to be packed.

Host memory holds the few tensors in flight and the stacks of the layer that is packed next."""

from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array

from mla_jax.base import qtensor
from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, printable, shortened
from mla_jax.base.qtensor import QTensor
from mla_jax.offload.pack import cpu_device, pack
from mla_jax.offload.place import Placement
from mla_jax.weights import names
from mla_jax.weights.packed_folder import PackedFolder
from mla_jax.weights.source import Source

if TYPE_CHECKING:
    from mla_jax.weights.load import Checkpoint

PLAIN = ("F64", "F32", "F16", "BF16")
Progress = Callable[[int, int], Any]  # is told the bytes read, and of all there are
IN_FLIGHT = 3  # tensors read ahead while one is placed
Tensor = tuple[np.ndarray, ...]


class Fill:
    """One reading of a checkpoint. Layers that the folder `kept` has are mapped and not read."""

    def __init__(self, checkpoint: "Checkpoint", placement: Placement, progress: Progress, kept: PackedFolder | None):
        self.checkpoint, self.placement, self.progress, self.kept = checkpoint, placement, progress, kept
        self.values, self.on_host = checkpoint.parameters(placement), checkpoint.on_host(placement)
        self.packed = {} if kept is None else self._mapped(kept)
        self.stacks: dict[int, dict[str, Any]] = {}  # of layers on the host, until gate, up and down are there
        self.finite: list[Array] = []

    def run(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """Every parameter by path, on the device, and the packed experts by layer. Raises BadFile for NaN and infinity."""
        sources = {path: source for path, source in self.checkpoint.sources.items() if self.on_host.get(path) not in self.packed}
        pieces = [piece for source in sources.values() for piece in source.pieces]
        self.reached = list(accumulate(map(self._size, pieces)))
        with closing(ahead(self.checkpoint.source, pieces)) as tensors:
            for path, source in sources.items():
                self._put(path, self._parameter(path, source, islice(tensors, len(source.pieces))))
        self._refuse_unsound(pieces)
        return self.values, dict(sorted(self.packed.items()))

    def _mapped(self, kept: PackedFolder) -> dict[int, Any]:
        found = {number: kept.mapped(number) for number in self.placement.host}
        return {number: layer for number, layer in found.items() if layer is not None}

    def _parameter(self, path: str, source: names.Origin, tensors: Iterable[Tensor]) -> Any:
        """A parameter from its tensors; a stack of experts is filled in place, one expert after the other."""
        sharding = SingleDeviceSharding(cpu_device() if path in self.on_host else self.checkpoint.devices.first)
        value, conversion = self.values[path], self._conversion(source)
        if source.stacked:
            value = empty(value, sharding)
            for i, parts in enumerate(tensors):
                value, sound = _insert(value, jax.device_put(parts, sharding), i, how=conversion)
                self._read(sound)
            return value
        (parts,) = tensors
        value, sound = _place(jax.device_put(parts, sharding), how=conversion, like=value)
        self._read(sound)
        return value

    def _read(self, sound: Array) -> None:
        """One more tensor is on its way. Dispatch is asynchronous: the host keeps what the device has not taken yet."""
        self.finite.append(sound)
        self.progress(self.reached[len(self.finite) - 1], self.reached[-1])
        if len(self.finite) > IN_FLIGHT:
            self.finite[-IN_FLIGHT].block_until_ready()

    def _put(self, path: str, value: Any) -> None:
        number = self.on_host.get(path)
        if number is None:
            self.values[path] = value
            return
        stacks = self.stacks.setdefault(number, {})
        stacks[path.rpartition(".")[2]] = value
        if len(stacks) == len(self.checkpoint.experts[number]):
            self._pack(number)

    def _pack(self, number: int) -> None:
        layer = pack(**self.stacks.pop(number), precision=self.placement.precision)
        self.packed[number] = layer if self.kept is None else self.kept.keep(number, layer)

    def _refuse_unsound(self, pieces: list[names.Piece]) -> None:
        sound = jax.device_get(self.finite)
        if faulty := [piece.name for piece, fine in zip(pieces, sound, strict=True) if not fine]:
            raise BadFile(
                "weights hold NaN or infinity",
                *shortened(list(dict.fromkeys(map(printable, faulty)))),
                "the file is damaged, or the model was saved after a failed run",
            )

    def _conversion(self, source: names.Origin) -> "Conversion":
        tensor = self.checkpoint.source.tensors[source.names[0]]
        shape = tensor.shape[1:] if source.pieces[0].index is not None else tensor.shape
        return Conversion(source.part, self.checkpoint.config, tensor.format, shape)

    def _size(self, piece: names.Piece) -> int:
        tensor = self.checkpoint.source.tensors[piece.name]
        return tensor.nbytes if piece.index is None else tensor.nbytes // tensor.shape[0]


def ahead(source: Source, wanted: list[names.Piece]) -> Generator[Tensor, None, None]:
    """The pieces in their order, some read ahead."""
    with ThreadPoolExecutor(1) as pool:
        queue, rest = [pool.submit(source.read, *piece) for piece in wanted[:IN_FLIGHT]], iter(wanted[IN_FLIGHT:])
        while queue:
            ready = queue.pop(0).result()
            queue += [pool.submit(source.read, *piece) for piece in islice(rest, 1)]
            yield ready


def empty(like: Any, sharding: Sharding) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=sharding), like)


class Conversion(NamedTuple):
    """What makes a parameter of what is read at once: a tensor of `shape`."""

    part: names.PartOf
    config: Config
    format: str
    shape: tuple[int, ...]


@partial(jax.jit, static_argnames=("how", "like"))
def _place(parts: tuple[Array, ...], *, how: Conversion, like: Any) -> tuple[Any, Array]:
    """A stored tensor as our parameter, which is `like`, and whether all of it is finite."""
    if isinstance(like, QTensor):
        value = QTensor(how.format, tuple(how.part(p, how.config) for p in parts), like.shape)
        sound = qtensor.unsound(how.format, value.parts) == 0
        return value if value.format == like.format else qtensor.reorder(value), sound
    stored = parts[0] if how.format in PLAIN else qtensor.dequantize(QTensor(how.format, parts, how.shape))
    value = how.part(stored, how.config).reshape(like.shape).astype(like.dtype)
    return value, jnp.isfinite(value).all()


@partial(jax.jit, static_argnames=("how",), donate_argnums=0)
def _insert(stack: Any, parts: tuple[Array, ...], index: Array, *, how: Conversion) -> tuple[Any, Array]:
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack)
    value, finite = _place(parts, how=how, like=one)
    return jax.tree.map(partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0), stack, value), finite
