"""Opens a checkpoint as a model on the device: names resolved, shapes checked, then tensor by tensor from file to device.

Host memory holds the few tensors in flight. What lies quantised stays so, as QTensors, and is unpacked where it is used; with a
dtype asked for, everything is unpacked here, on the device."""

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding
from jaxtyping import Array

from mla_jax.base import qtensor, roofline
from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, Unsupported, printable, shortened
from mla_jax.base.qtensor import QTensor
from mla_jax.model.hot import HotExperts
from mla_jax.model.moe import HostExperts, MoE
from mla_jax.model.ops import Shapes
from mla_jax.model.stream import Kind
from mla_jax.model.transformer import Transformer
from mla_jax.weights import host as host_experts
from mla_jax.weights import names
from mla_jax.weights.kinds import open_source
from mla_jax.weights.source import Source

PLAIN = ("F64", "F32", "F16", "BF16")
Progress = Callable[[int, int], Any]  # hears of the bytes read, and of how many there are
IN_FLIGHT = 3  # tensors read ahead while one is placed


class Checkpoint:
    """Files whose names, shapes and number formats fit the model they describe. Opening them reads headers only."""

    def __init__(
        self,
        path: Path,
        *,
        experts: str = "auto",
        dtype: str | None = None,
        device: roofline.Device | None = None,
        **options: Any,
    ):
        """`dtype` None: packed weights as they are, others float32 on a CPU and bfloat16 elsewhere.

        `device` are the figures that forms and places are chosen by (None: the table's), `options` are Transformer's."""
        self.source: Source = open_source(path)
        self.config, table, present = self.source.config, self.source.table, self.source.tensors
        self.target = jax.devices()[0]
        self.device = device or roofline.device(self.target.device_kind, self.target.platform)
        self.dtype = jnp.dtype(dtype or ("float32" if self.device.platform == "cpu" else "bfloat16"))
        table.refuse_other_counts(self.config, present)
        mtp = table.has_mtp(self.config, present)
        build = partial(Transformer, self.config, experts=experts, device=self.device, mtp=mtp, **options)
        self.graph, self.state = nnx.split(build(Shapes()))
        self.slots = {".".join(map(str, keys)): variable for keys, variable in nnx.to_flat_state(self.state)}
        self.sources = table.resolve(self.slots, self.config, present)
        self._asked, self.precision = dtype, None
        self.host: frozenset[int] = frozenset()
        self.hot: dict[int, tuple[int, ...]] = {}
        self.stream = 0  # tokens from which the device computes the experts that lie on the host; 0 for never
        self.defer: int = options.get("defer", 0)  # of a token's experts there, so many are added a layer later
        self.place(())

    def place(self, host: Iterable[int], precision: str | None = None, hot: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """Has the routed experts of the layers `host` lie on the host, in a `precision` of cpu_experts (None: as they are).

        Those that are `hot` in a layer lie on the device, too."""
        self.host, self.precision, self.hot = frozenset(host), precision, dict(hot or {})
        for name, slot in self.slots.items():
            kind, shape = self.format_of(self.sources[name]), slot.get_value().shape
            keep = self._asked is None and slot.get_metadata()["packs"] and kind not in PLAIN
            plain = jax.ShapeDtypeStruct(shape, jnp.float32 if slot.get_metadata()["exact"] else self.dtype)
            on_device = qtensor.abstract(kind, shape) if keep else plain
            slot.set_value(host_experts.stored(kind, shape, self._asked) if self.layer_on_host(name) is not None else on_device)

    def layer_on_host(self, path: str) -> int | None:
        """The layer of a parameter, if it is of routed experts that lie on the host."""
        number = _layer_of_experts(path, self.config)
        return number if number in self.host else None

    @property
    def layers_with_experts(self) -> list[int]:
        """By number; MTP's follow the model's."""
        model = self.abstract
        blocks = [*model.layers, *(further.block for further in model.mtp)]
        return [number for number, block in enumerate(blocks) if isinstance(block.mlp, MoE)]

    def expert_bytes(self, layer: int) -> int:
        """What a layer's routed experts take, packed or not, where they lie."""
        return sum(
            _nbytes(slot.get_value()) for path, slot in self.slots.items() if _layer_of_experts(path, self.config) == layer
        )

    def precisions_on_host(self, layer: int) -> tuple[str, str]:
        """What a layer's experts are computed in on the host: gate and up, and down."""
        kind = self._kind_on_host(layer)
        return kind.precision, kind.down_precision

    def hot_bytes(self, layer: int) -> int:
        """What a hot expert of a layer takes on the device."""
        return _nbytes(host_experts.like_copies(self._kind_on_host(layer), 1, self.dtype))

    def _kind_on_host(self, layer: int) -> Kind:
        paths = {path.rpartition(".")[2]: path for path in self.slots if _layer_of_experts(path, self.config) == layer}
        gate, up, down = (self.format_of(self.sources[paths[name]]) for name in ("gate", "up", "down"))
        stored = [host_experts.precision_of(*pair) if self._asked is None else "bf16" for pair in ((gate, up), (down, down))]
        sizes = (self.config.hidden_size, self.config.moe_intermediate_size or 0)
        return Kind(*sizes, *(self.precision or each for each in stored))

    @property
    def abstract(self) -> Transformer:
        """The model without its weights, whose parameters have shapes only."""
        return self._merged(dict.fromkeys(self.host))

    def bytes(self, host: bool = False) -> int:
        """What the weights take on the device, or those on the `host` there."""
        slots = (slot for path, slot in self.slots.items() if (self.layer_on_host(path) is not None) == host)
        copied = 0 if host else sum(len(ids) * self.hot_bytes(layer) for layer, ids in self.hot.items())
        return copied + sum(_nbytes(slot.get_value()) for slot in slots)

    def formats(self) -> dict[str, int]:
        """The bytes of the weights by their number formats, as they will lie on the device or the host."""
        found: dict[str, int] = {}
        for path, slot in self.slots.items():
            value = slot.get_value()
            name = value.format if isinstance(value, QTensor) else value.dtype.name
            name += " on the host" if self.layer_on_host(path) is not None else ""
            found[name] = found.get(name, 0) + _nbytes(value)
        if self.hot:
            found["hot experts"] = sum(len(ids) * self.hot_bytes(layer) for layer, ids in self.hot.items())
        return found

    def read(self, progress: Progress | None = None, folder: Path | None = None) -> Transformer:
        """The model with its weights, on the default device; in `folder` packed experts are kept, or mapped if they are there."""
        try:
            kept = host_experts.Folder(folder, self._made_of()) if folder is not None and self.host else None
            packed = self._fill(progress or (lambda done, total: None), kept)
        finally:
            self.source.close()
        return self._merged(packed)

    def _merged(self, on_host: Mapping[int, Any]) -> Transformer:
        """The model of the present state, with these packed experts in their layers."""
        model = nnx.merge(self.graph, self.state)
        model.defer = self.defer
        blocks = [*model.layers, *(further.block for further in model.mtp)]
        for number, layer in on_host.items():
            blocks[number].mlp.experts = HostExperts(layer, self.stream, self._hot(number, layer))
        return model

    def _hot(self, number: int, layer: Any) -> HotExperts | None:
        """A layer's experts that are on the device, too: copies of the packed `layer`, or without it their shapes."""
        if not (ids := self.hot.get(number)):
            return None
        if layer is not None:
            return host_experts.copies(layer, ids, self.dtype, self.target)
        like = host_experts.like_copies(self._kind_on_host(number), len(ids), self.dtype)
        return HotExperts(ids, like, self.config.n_routed_experts or 0)

    def format_of(self, source: names.Source) -> str:
        """The one format of all tensors of a parameter; raises Unsupported if they have several, or one that cannot be read."""
        kinds = {self.source.tensors[name].format: name for name in source.names}
        kind, name = next(iter(kinds.items()))
        if len(kinds) > 1:
            found = f"{printable(name)} is {kind}, {printable(list(kinds.values())[1])} is {list(kinds)[1]}"
            raise Unsupported("the experts of one layer have several number formats", found)
        if kind not in PLAIN:
            try:
                qtensor.format_of(kind)
            except Unsupported:
                known = ", ".join((*PLAIN, "F8_E4M3", *qtensor.FORMATS))
                raise Unsupported(f"{printable(name)} has dtype {kind}", f"weights can be {known}") from None
        return kind

    def _made_of(self) -> dict[str, Any]:
        """What packed experts follow from."""
        stats = {file.name: file.stat() for file in self.source.files}
        return {
            "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
            "precision": self.precision or "stored",
            "dtype": self._asked or "stored",
        }

    def _fill(self, progress: Progress, kept: host_experts.Folder | None) -> dict[int, Any]:
        """Puts every parameter on the device, and packs the experts of layers on the host, which it returns.

        Experts go one by one into a buffer that is updated in place; those of layers that are `kept` are not read."""
        packed = {number: kept.open(number) for number in self.host if kept.has(number)} if kept is not None else {}
        sources = {path: source for path, source in self.sources.items() if self.layer_on_host(path) not in packed}
        pieces = [piece for source in sources.values() for piece in source.pieces]
        reached = list(accumulate(self._share(piece) for piece in pieces))
        finite: list[Array] = []
        waiting: dict[int, dict[str, Any]] = {}
        with closing(self._ahead(pieces)) as stream:
            for path, source in sources.items():
                slot, number = self.slots[path], self.layer_on_host(path)
                sharding = SingleDeviceSharding(self.target if number is None else host_experts.device())
                how = How(source.part, self.config, *self._stored(source))
                value = empty(slot.get_value(), sharding) if source.stacked else None
                for i, parts in enumerate(islice(stream, len(source.pieces))):
                    if source.stacked:
                        value, sound = _insert(value, jax.device_put(parts, sharding), i, how=how)
                    else:
                        value, sound = _place(jax.device_put(parts, sharding), how=how, like=slot.get_value())
                    finite.append(sound)
                    progress(reached[len(finite) - 1], reached[-1])
                    if len(finite) > IN_FLIGHT:  # dispatch is asynchronous: the host keeps what the device has not taken yet
                        finite[-IN_FLIGHT].block_until_ready()
                if number is None:
                    slot.set_value(value)
                    continue
                waiting.setdefault(number, {})[path.rpartition(".")[2]] = value
                if len(waiting[number]) == 3:
                    layer = host_experts.pack(**waiting.pop(number), precision=self.precision)
                    packed[number] = layer if kept is None else kept.keep(number, layer)
        if faulty := [piece.name for piece, sound in zip(pieces, jax.device_get(finite), strict=True) if not sound]:
            raise BadFile(
                "weights hold NaN or infinity",
                *shortened(list(dict.fromkeys(map(printable, faulty)))),
                "the file is damaged, or the model was saved after a failed run",
            )
        return packed

    def _stored(self, source: names.Source) -> tuple[str, tuple[int, ...]]:
        """The format and the shape of what is read at once."""
        tensor = self.source.tensors[source.names[0]]
        return tensor.format, tensor.shape[1:] if source.pieces[0].index is not None else tensor.shape

    def _share(self, piece: names.Piece) -> int:
        tensor = self.source.tensors[piece.name]
        return tensor.nbytes if piece.index is None else tensor.nbytes // tensor.shape[0]

    def _ahead(self, wanted: list[names.Piece]) -> Generator[tuple[np.ndarray, ...], None, None]:
        """The pieces in their order, some read ahead."""
        with ThreadPoolExecutor(1) as pool:
            queue, rest = [pool.submit(self.source.read, *piece) for piece in wanted[:IN_FLIGHT]], iter(wanted[IN_FLIGHT:])
            while queue:
                ready = queue.pop(0).result()
                queue += [pool.submit(self.source.read, *piece) for piece in islice(rest, 1)]
                yield ready


def load(path: str | Path, **options: Any) -> Transformer:
    """The model of a checkpoint of any kind, on the default device; `options` are Checkpoint's."""
    return Checkpoint(Path(path), **options).read()


def _layer_of_experts(path: str, config: Config) -> int | None:
    """The number of the layer whose routed experts a parameter is of; MTP's follow the model's."""
    found = re.fullmatch(r"(layers|mtp)\.(\d+)\.(?:block\.)?mlp\.experts\.\w+", path)
    return int(found[2]) + config.num_hidden_layers * (found[1] == "mtp") if found else None


def _nbytes(value: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))


def empty(like: Any, sharding: Sharding) -> Any:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=sharding), like)


class How(NamedTuple):
    """What makes a parameter of a stored tensor of `shape`."""

    part: names.Part
    config: Config
    format: str
    shape: tuple[int, ...]


@partial(jax.jit, static_argnames=("how", "like"))
def _place(parts: tuple[Array, ...], *, how: How, like: Any) -> tuple[Any, Array]:
    """A stored tensor as our parameter, which is `like`, and whether all of it is finite."""
    if isinstance(like, QTensor):
        value = QTensor(how.format, tuple(how.part(p, how.config) for p in parts), like.shape)
        return value, qtensor.unsound(how.format, value.parts) == 0
    stored = parts[0] if how.format in PLAIN else qtensor.dequantize(QTensor(how.format, parts, how.shape))
    value = how.part(stored, how.config).reshape(like.shape).astype(like.dtype)
    return value, jnp.isfinite(value).all()


@partial(jax.jit, static_argnames=("how",), donate_argnums=0)
def _insert(stack: Any, parts: tuple[Array, ...], index: Array, *, how: How) -> tuple[Any, Array]:
    one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack)
    value, finite = _place(parts, how=how, like=one)
    return jax.tree.map(partial(jax.lax.dynamic_update_index_in_dim, index=index, axis=0), stack, value), finite
