"""Reads a checkpoint's weights, tensor by tensor, from files to the device, or to the host's memory to be packed.

Host memory holds the few tensors in flight and the stacks of the layer that is packed next. fill_mesh.py reads for a mesh."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array

from mla_jax.base import qtensor
from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, printable, shortened
from mla_jax.base.qtensor import BY_COLUMN, QTensor
from mla_jax.offload.pack import cpu_device, pack_experts
from mla_jax.offload.place import Placement
from mla_jax.weights import names
from mla_jax.weights.packed_folder import PackedFolder
from mla_jax.weights.source import Source

if TYPE_CHECKING:
    from mla_jax.weights.load import Checkpoint

PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
Progress = Callable[[int, int], Any]  # is told the bytes read, and of all there are
IN_FLIGHT = 3  # tensors read ahead while one is placed
IN_MEMORY = 2 * IN_FLIGHT + 1  # tensors: those, that one, and what devices may not have taken yet
Parts = tuple[np.ndarray, ...]


class Fill:
    """One reading of a checkpoint. Layers that the folder `kept` has are mapped and not read."""

    def __init__(
        self, checkpoint: "Checkpoint", placement: Placement, progress: Progress, kept: PackedFolder | None
    ):
        self.checkpoint, self.placement, self.progress, self.kept = checkpoint, placement, progress, kept
        self.values, self.on_host = checkpoint.parameters(placement), checkpoint.on_host(placement)
        self.packed = {} if kept is None else self._mapped(kept)
        # Stacks of layers on the host, until gate, up and down are there
        self.stacks: dict[int, dict[str, Any]] = {}
        self.finite: list[tuple[str, Array]] = []  # of each tensor that was read, by its name
        self.behind: deque[Array] = deque()  # of those that the device may not have taken yet
        self.read = 0

    def run(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """Every parameter by path, on the device, and the packed experts by layer. Raises BadFile for NaN and infinity."""
        sources = {
            path: source
            for path, source in self.checkpoint.sources.items()
            if self.on_host.get(path) not in self.packed
        }
        wanted = {path: self._pieces(path, source) for path, source in sources.items()}
        pieces = list(chain.from_iterable(wanted.values()))
        self.reached = list(accumulate(map(self.checkpoint.size, pieces)))
        with closing(read_ahead(self.checkpoint.source, pieces)) as tensors:
            for path, source in sources.items():
                self._put(path, self._parameter(path, source, islice(tensors, len(wanted[path]))))
        self._refuse_unsound()
        return self.values, dict(sorted(self.packed.items()))

    def _pieces(self, path: str, source: names.Origin) -> tuple[names.Piece, ...]:
        """The pieces to read for a parameter, in order."""
        return source.pieces

    def _mapped(self, kept: PackedFolder) -> dict[int, Any]:
        found = {number: kept.mapped(number) for number in self.placement.host}
        return {number: layer for number, layer in found.items() if layer is not None}

    def _parameter(self, path: str, source: names.Origin, tensors: Iterable[Parts]) -> Any:
        """A parameter from its tensors; a stack of experts is filled in place, one expert after the other."""
        sharding = SingleDeviceSharding(
            cpu_device() if path in self.on_host else self.checkpoint.devices.first
        )
        value, conversion = self.values[path], self._conversion(source)
        if source.stacked:
            value = empty(value, sharding)
            for i, (piece, parts) in enumerate(zip(source.pieces, tensors, strict=True)):
                value, sound = insert(value, jax.device_put(parts, sharding), i, how=conversion)
                self._placed([(piece.name, sound)])
            return value
        (parts,) = tensors
        value, sound = parameter_of(jax.device_put(parts, sharding), how=conversion, like=value)
        self._placed([(source.names[0], sound)])
        return value

    def _placed(self, found: list[tuple[str, Array]], pieces: int = 1) -> None:
        """More pieces are on their way. Dispatch is asynchronous: the host keeps what the device has not taken yet."""
        self.finite += found
        self.read += pieces
        self.progress(self.reached[self.read - 1], self.reached[-1])
        self.behind.append(found[-1][1])
        if len(self.behind) == IN_FLIGHT:
            self.behind.popleft().block_until_ready()

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
        layer = pack_experts(**self.stacks.pop(number), precision=self.placement.precision)
        self.packed[number] = layer if self.kept is None else self.kept.keep(number, layer)

    def _refuse_unsound(self) -> None:
        sound = jax.device_get([sound for _, sound in self.finite])
        if faulty := [name for (name, _), fine in zip(self.finite, sound, strict=True) if not fine.all()]:
            raise BadFile(
                "weights hold NaN or infinity",
                *shortened(list(dict.fromkeys(map(printable, faulty)))),
                "the file is damaged, or the model was saved after a failed run",
            )

    def _conversion(self, source: names.Origin) -> "Conversion":
        tensor = self.checkpoint.source.tensors[source.names[0]]
        shape = tensor.shape[1:] if source.pieces[0].index is not None else tensor.shape
        return Conversion(source.part, self.checkpoint.config, tensor.format, shape)


def read_ahead(source: Source, wanted: list[names.Piece]) -> Generator[Parts, None, None]:
    """The pieces in their order, some read ahead."""
    with ThreadPoolExecutor(1) as pool:
        queue = [pool.submit(source.read, *piece) for piece in wanted[:IN_FLIGHT]]
        rest = iter(wanted[IN_FLIGHT:])
        while queue:
            ready = queue.pop(0).result()
            queue += [pool.submit(source.read, *piece) for piece in islice(rest, 1)]
            yield ready


def empty(like: Any, sharding: Sharding) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=sharding), like)


class Conversion(NamedTuple):
    """Converts a stored tensor of `shape` to a parameter; `kept` is the slice's shape, whose offset is passed at call time."""

    part: names.PartOf
    config: Config
    format: str
    shape: tuple[int, ...]
    kept: tuple[int, ...] | None = None  # None: all of it


@partial(jax.jit, static_argnames=("how", "like"))
def parameter_of(
    parts: tuple[Array, ...], start: Any = None, *, how: Conversion, like: Any
) -> tuple[Any, Array]:
    """A stored tensor as our parameter, which is `like`, and whether all of it is finite."""
    if isinstance(like, QTensor):
        value = _packed(parts, how, like)
        sound = qtensor.unsound(value.format, value.parts) == 0
        return value if value.format == like.format else qtensor.reorder(value), sound
    stored = (
        parts[0] if how.format in PLAIN_DTYPES else qtensor.dequantize(QTensor(how.format, parts, how.shape))
    )
    stored = stored if how.kept is None else jax.lax.dynamic_slice(stored, tuple(start), how.kept)
    value = how.part(stored, how.config).reshape(like.shape).astype(like.dtype)
    return value, jnp.isfinite(value).all()


def _packed(parts: tuple[Array, ...], how: Conversion, like: QTensor) -> QTensor:
    """The part of a packed tensor, in the stored format; of kv_b_proj with a scale for each column of a head."""
    if like.format == BY_COLUMN:
        codes, scale = parts
        rows, columns = qtensor.format_of(how.format).block
        wide = jnp.repeat(scale, columns, axis=1)[:, : codes.shape[1]]
        of_heads = how.part(jnp.repeat(wide, rows, axis=0), how.config)  # whose rows all have the same
        return QTensor(BY_COLUMN, (how.part(codes, how.config), of_heads[:, 0]), like.shape)
    return QTensor(how.format, tuple(how.part(p, how.config) for p in parts), like.shape)


@partial(jax.jit, static_argnames=("how",), donate_argnums=0)
def insert(
    stack: Any, parts: tuple[Array, ...], index: Array, start: Array | None = None, *, how: Conversion
) -> tuple[Any, Array]:
    """A stack with one more of its tensors, and whether all of that is finite."""
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack)
    value, finite = parameter_of(parts, start, how=how, like=one)
    put = partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0)
    return jax.tree.map(put, stack, value), finite
