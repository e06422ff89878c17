"""Opens a checkpoint as a model on the devices: names resolved, shapes checked; fill.py then reads tensor by tensor.

Quantised tensors stay so, as QTensors, and are unpacked where they are used; a GPU's kernels unpack them in registers, and for
these kernels tensors are reordered on the device as they are read. With a requested dtype all tensors are unpacked there."""

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from mla_jax.base import qtensor
from mla_jax.base.errors import Unsupported, printable
from mla_jax.base.qtensor import BY_COLUMN, REORDERED, QTensor
from mla_jax.mesh.devices import Devices
from mla_jax.mesh.expert_copies import expert_slots
from mla_jax.mesh.partition import Layout, refuse_uneven
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.fp8_up import stays_fp8
from mla_jax.model.kernels import takes_reordered
from mla_jax.model.moe import MoE, Places
from mla_jax.model.ops import Shapes
from mla_jax.model.transformer import Transformer
from mla_jax.offload.experts import HostExperts
from mla_jax.offload.pack import precision_of, unpacked_shape
from mla_jax.offload.place import ExpertLayer, Placement
from mla_jax.offload.replicated import replica_bytes, replica_shapes, replicate
from mla_jax.offload.streaming import Packing
from mla_jax.weights import boxes, names
from mla_jax.weights.fill import PLAIN_DTYPES, Fill, Progress
from mla_jax.weights.fill_mesh import FillMesh, mesh_reads
from mla_jax.weights.open import open_source
from mla_jax.weights.packed_folder import PackedFolder
from mla_jax.weights.source import Source

ON_DEVICE = Placement()


class Checkpoint:
    """Files whose names, shapes and number formats fit the model they describe. Opening them reads headers only.

    `slots` are the parameters by path, with their metadata and no values; `sources` say which tensors fill each. On a mesh all
    bytes and the `model` are those of one device; `parameters` and what `load` returns have whole shapes."""

    def __init__(
        self,
        path: Path,
        *,
        dispatch: Dispatch | None = None,
        dtype: str | None = None,
        devices: Devices | None = None,
    ):
        """`dtype` None: packed weights as they are, others float32 on a CPU and bfloat16 elsewhere.

        `dispatch` chooses how steps compute; None: by the table's figures of the default device. `devices` None: the default."""
        self.source: Source = open_source(path)
        self.config, table, present = self.source.config, self.source.table, self.source.tensors
        devices = devices or Devices.default(None if dispatch is None else dispatch.device)
        self._dispatch = dispatch or Dispatch(device=devices.figures)
        self.device = devices.figures
        self.dtype = jnp.dtype(dtype or ("float32" if self.device.platform == "cpu" else "bfloat16"))
        self.asked = dtype
        table.refuse_other_counts(self.config, present)
        self._build(mtp=table.has_mtp(self.config, present))
        self.sources = table.resolve(self.slots, self.config, present)
        self.stored = {path: self.format_of(source) for path, source in self.sources.items()}
        self.experts = self._experts()
        # Which expert each slot has, of layers with copies of some
        self.placed: dict[int, Sequence[int]] = {}
        self._lay_out(devices)

    def _build(self, mtp: bool) -> None:
        """The slots of the model."""
        self.has_mtp = mtp
        self._graph, state = nnx.split(Transformer(self.config, Shapes(), dispatch=self._dispatch, mtp=mtp))
        self._state = nnx.to_flat_state(state)
        self.slots = {".".join(map(str, keys)): variable for keys, variable in self._state}

    def without_mtp(self) -> "Checkpoint":
        """The same checkpoint without layers for multi-token prediction: they are not read."""
        other = copy.copy(self)
        other._build(mtp=False)
        other.sources = {path: self.sources[path] for path in other.slots}
        other.stored = {path: self.stored[path] for path in other.slots}
        other.experts = other._experts()
        other._lay_out(self.devices)
        return other

    def with_copies(self, placed: Mapping[int, Sequence[int]]) -> "Checkpoint":
        """The same checkpoint with copies of experts: of some layers, which expert each slot on the devices of the mesh has."""
        other = copy.copy(self)
        other.placed, other.sources, other._local = dict(placed), dict(self.sources), {}
        for number, slots in placed.items():
            for path in self.experts[number].values():
                other.sources[path] = self.sources[path].one_by_one(slots)
        return other

    def on(self, devices: Devices) -> "Checkpoint":
        """The same checkpoint for other devices of the same kind; reads nothing again. Raises Unsupported as the first did."""
        other = copy.copy(self)
        other._lay_out(devices)
        return other

    def _lay_out(self, devices: Devices) -> None:
        self.devices, self.layout = devices, Layout(**devices.sizes)
        refuse_uneven(self.config, self.layout)
        self.dispatch = dataclasses.replace(self._dispatch, layout=self.layout)
        self.reordered = self._reordered()
        self._local: dict[tuple[int, ...], dict[str, Any]] = {}  # by the layers on the host

    def _experts(self) -> dict[int, dict[str, str]]:
        """The paths of each layer's routed experts, by "gate", "up" and "down"; MTP's layers follow the model's."""
        found: dict[int, dict[str, str]] = {}
        for path, variable in self._state:
            if variable.get_metadata().get("role") == "expert":
                keys: tuple[Any, ...] = path
                number = keys[1] + (self.config.num_hidden_layers if keys[0] == "mtp" else 0)
                found.setdefault(number, {})[keys[-1]] = ".".join(map(str, keys))
        return dict(sorted(found.items()))

    def _reordered(self) -> frozenset[str]:
        """The paths of packed weights that a kernel of this device takes once they are reordered.

        Of the experts all or none: a step computes those of all layers in one way."""
        taken = frozenset(path for path in self.slots if self._packs(path) and self._takes_reordered(path))
        experts = {path for paths in self.experts.values() for path in paths.values()}
        return taken if experts <= taken else taken - experts

    def _packs(self, path: str) -> bool:
        """Whether a parameter stays as packed as it is stored."""
        return (
            self.asked is None
            and self.slots[path].get_metadata()["packs"]
            and self.stored[path] not in PLAIN_DTYPES
        )

    def _is_by_column(self, path: str) -> bool:
        """Whether a half of kv_b_proj stays in FP8."""
        is_half = self.slots[path].get_metadata()["role"] == "heads"
        return self.asked is None and is_half and stays_fp8(self.stored[path], self.config)

    def _takes_reordered(self, path: str) -> bool:
        """Whether a kernel takes one device's part. What can be cut only as it is stored is cut, and not reordered."""
        slot, format = self.slots[path], self.stored[path]
        if slot.get_metadata()["role"] == "rows":
            return False
        words, stored = self.words(path), qtensor.abstract(format, slot.shape)
        local = self.layout.local_shape(words, stored)
        if not takes_reordered(format, local, self.dtype):
            return False
        return self.layout.local_shape(words, qtensor.abstract(format + REORDERED, slot.shape)) == local

    def expert_layers(self, precision: str | None = None) -> tuple[ExpertLayer, ...]:
        """Each layer with routed experts, and how it is packed on the host, in `precision` or as it is stored."""
        on_device = self.local(ON_DEVICE)
        sizes = {
            n: sum(_nbytes(on_device[path]) for path in paths.values()) for n, paths in self.experts.items()
        }
        return tuple(
            ExpertLayer(number, size, self.packing(number, precision)) for number, size in sizes.items()
        )

    def packing(self, layer: int, precision: str | None = None) -> Packing:
        """Sizes and number formats of a layer's experts once they are packed for the host."""
        if precision or self.asked:
            return Packing.for_config(self.config, precision or "bf16")
        gate, up, down = (self.stored[self.experts[layer][name]] for name in ("gate", "up", "down"))
        return Packing.for_config(self.config, precision_of(gate, up), precision_of(down, down))

    def on_host(self, placement: Placement) -> dict[str, int]:
        """The layers of those parameters that are packed on the host."""
        return {path: number for number in placement.host for path in self.experts[number].values()}

    def words(self, path: str) -> tuple[str, ...]:
        """The names of a parameter's axes, by which a mesh cuts it."""
        return self.slots[path].get_metadata()["axes"]

    def parameters(self, placement: Placement = ON_DEVICE) -> dict[str, Any]:
        """Shape and format of each parameter as it is read, on the devices or, before packing, on the host: whole shapes only."""
        on_host = self.on_host(placement)
        return {
            path: self._packable(path) if path in on_host else self.on_device(path) for path in self.slots
        }

    def local(self, placement: Placement = ON_DEVICE) -> dict[str, Any]:
        """The same, with one device's part of the parameters on the devices."""
        if placement.host not in self._local:  # many ask
            found, on_host = self.parameters(placement), self.on_host(placement)
            self._local[placement.host] = {
                path: value if path in on_host else self.layout.local(self.words(path), value)
                for path, value in found.items()
            }
        return self._local[placement.host]

    def size(self, piece: names.Piece) -> int:
        """Stored bytes of a piece."""
        tensor = self.source.tensors[piece.name]
        shape, size = tensor.shape, tensor.nbytes
        if piece.index is not None:
            shape, size = shape[1:], size // shape[0]
        return size if piece.box is None else boxes.box_bytes(tensor.format, shape, size, piece.box)

    @property
    def copies(self) -> int:
        """Times the bytes of a piece that reading it takes besides."""
        return max((entry.copies for entry in self.source.tensors.values()), default=0)

    def largest_piece(self, placement: Placement = ON_DEVICE) -> int:
        """The most bytes that are read at once."""
        on_host, largest = self.on_host(placement), 0
        for path, source in self.sources.items():
            first = source.pieces[0]  # of a stack all are alike
            pieces = [first]
            if self.layout.devices > 1 and path not in on_host:
                pieces = [
                    first._replace(box=window)
                    for window in {share.window for share in mesh_reads(self, path).of}
                ]
            largest = max(largest, *map(self.size, pieces))
        return largest

    def _packable(self, path: str) -> Any:
        return unpacked_shape(self.stored[path], self.slots[path].shape, self.asked)

    def shape(self, path: str) -> tuple[int, ...]:
        """Of a parameter on the devices, all copies of experts counted."""
        shape = self.slots[path].shape
        slots = next((slots for n, slots in self.placed.items() if path in self.experts[n].values()), None)
        return shape if slots is None else (len(slots), *shape[1:])

    def on_device(self, path: str) -> Any:
        """Shape and format of a parameter on the devices, in its whole shape."""
        metadata = self.slots[path].get_metadata()
        shape = self.shape(path)
        format = self.stored[path]
        if self._packs(path):
            return qtensor.abstract(format + REORDERED if path in self.reordered else format, shape)
        if self._is_by_column(path):
            return qtensor.abstract(BY_COLUMN, shape)
        return jax.ShapeDtypeStruct(shape, jnp.float32 if metadata["exact"] else self.dtype)

    def bytes(self, placement: Placement = ON_DEVICE, host: bool = False) -> int:
        """Bytes of the weights on one device, or of those on the `host` before they are packed."""
        on_host = self.on_host(placement)
        sizes = {path: _nbytes(value) for path, value in self.local(placement).items()}
        kept = sum(size for path, size in sizes.items() if (path in on_host) == host)
        return kept if host else kept + self._replica_bytes(placement)

    def formats(self, placement: Placement = ON_DEVICE) -> dict[str, int]:
        """The bytes of the weights by number format, on one device and on the host."""
        found: dict[str, int] = {}
        on_host = self.on_host(placement)
        for path, value in self.local(placement).items():
            name = value.format if isinstance(value, QTensor) else value.dtype.name
            name += " on the host" if path in on_host else ""
            found[name] = found.get(name, 0) + _nbytes(value)
        replicas = self._replica_bytes(placement)
        return found | ({"replicated experts": replicas} if replicas else {})

    def _replica_bytes(self, placement: Placement) -> int:
        replicas = placement.replicated.items()
        return sum(
            len(ids) * replica_bytes(self.packing(n, placement.precision), self.dtype) for n, ids in replicas
        )

    def model(self, placement: Placement = ON_DEVICE) -> Transformer:
        """The model as one device has it, without its weights: parameters have shapes only."""
        layers = {}
        for number in placement.host:
            packing, ids = self.packing(number, placement.precision), placement.replicated.get(number)
            replicas = replica_shapes(packing, ids, self.dtype) if ids else None
            layers[number] = HostExperts(packing, replicas)
        shapes = {
            number: jax.ShapeDtypeStruct(places.shape, places.dtype)
            for number, places in self._places().items()
        }
        return self._merged(self.local(placement), layers, placement, shapes)

    def load(
        self, placement: Placement = ON_DEVICE, progress: Progress | None = None, folder: Path | None = None
    ) -> Transformer:
        """The model with its weights, on the devices; `folder` keeps packed experts, which the next start maps."""
        try:
            kept = None
            if folder is not None and placement.host:
                kept = PackedFolder(folder, self._made_of(placement))
            fill = FillMesh if self.layout.devices > 1 else Fill
            values, packed = fill(self, placement, progress or (lambda done, total: None), kept).run()
        finally:
            self.source.close()
        layers = {}
        for number, layer in packed.items():
            ids = placement.replicated.get(number)
            layers[number] = HostExperts(
                layer, replicate(layer, ids, self.dtype, self.devices.first) if ids else None
            )
        replicated = {number: self.devices.put(places) for number, places in self._places().items()}
        return self._merged(values, layers, placement, replicated)

    def _places(self) -> dict[int, np.ndarray]:
        """The slots of each expert, and of none, in layers with copies of some."""
        experts = self.config.n_routed_experts or 0

        def with_none(slots: Sequence[int]) -> np.ndarray:
            found = expert_slots(slots, experts)
            return np.concatenate([found, np.full_like(found[:1], len(slots))])

        return {number: with_none(slots) for number, slots in self.placed.items()}

    def _merged(
        self,
        values: Mapping[str, Any],
        layers: Mapping[int, HostExperts],
        placement: Placement,
        places: Mapping[int, Any] | None = None,
    ) -> Transformer:
        """The model of these parameters, with these layers' experts on the host, and these slots of copied ones."""
        flat = [(keys, variable.replace(values[".".join(map(str, keys))])) for keys, variable in self._state]
        model = nnx.merge(self._graph, nnx.from_flat_state(flat))
        model.dispatch = dataclasses.replace(self.dispatch, defer=placement.defer, stream=placement.stream)
        blocks = model.blocks()
        for number, experts in layers.items():
            cast(MoE, blocks[number].mlp).experts = experts
        for number, slots in (places or {}).items():
            cast(MoE, blocks[number].mlp).places = Places(slots)
        return model

    def format_of(self, source: names.Origin) -> str:
        """The one format of all tensors of a parameter; raises Unsupported if they have several, or one that cannot be read."""
        kinds = {self.source.tensors[name].format: name for name in source.names}
        kind, name = next(iter(kinds.items()))
        if len(kinds) > 1:
            found = f"{printable(name)} is {kind}, {printable(list(kinds.values())[1])} is {list(kinds)[1]}"
            raise Unsupported("the experts of one layer have several number formats", found)
        if kind not in PLAIN_DTYPES and not _is_stored(kind):
            known = ", ".join((*PLAIN_DTYPES, "F8_E4M3", *qtensor.FORMATS))
            raise Unsupported(f"{printable(name)} has dtype {printable(kind)}", f"weights can be {known}")
        return kind

    def _made_of(self, placement: Placement) -> dict[str, Any]:
        """The inputs of packed experts: files, precision and dtype."""
        stats = {file.name: file.stat() for file in self.source.files}
        return {
            "files": {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()},
            "precision": placement.precision or "stored",
            "dtype": self.asked or "stored",
        }


def load(path: str | Path, **options: Any) -> Transformer:
    """The model of a checkpoint of any kind, on the default device or others; `options` are Checkpoint's."""
    return Checkpoint(Path(path), **options).load()


def _nbytes(value: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(value))


def _is_stored(format: str) -> bool:
    """Whether files hold weights in this format: not in the order of a kernel, which is made on loading."""
    try:
        qtensor.format_of(format)
    except Unsupported:
        return False
    return not format.endswith(REORDERED)
