"""Safetensors as a Source: a packed weight and the tensors of its scales become one tensor of a packed format."""

from collections.abc import Iterator, Mapping, Sequence
from math import lcm, prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, printable
from mla_jax.base.qtensor import Shape
from mla_jax.base.quantization import Quantization, Scheme
from mla_jax.weights import boxes
from mla_jax.weights.boxes import Box
from mla_jax.weights.hf_names import names_of
from mla_jax.weights.layouts import SCALE_DTYPES, Field, FileLayout, layout_of
from mla_jax.weights.names import NameTable
from mla_jax.weights.safetensors import TensorSpan, open_folder
from mla_jax.weights.source import TensorEntry

Spans = Mapping[str, TensorSpan]


@runtime_checkable
class Files(Protocol):
    """Tensors in files: TensorFiles, or a class that joins the pieces of sharded ones."""

    path: Path
    tensors: Spans

    @property
    def files(self) -> tuple[Path, ...]: ...
    def read(self, name: str, index: int | None = None, box: Box | None = None) -> np.ndarray: ...
    def close(self) -> None: ...


class PackedWeight(NamedTuple):
    """A matrix of `shape` whose tensors, named after its `module`, are in a `layout`."""

    module: str
    layout: FileLayout
    shape: Shape

    def names(self) -> list[str]:
        names = [field.name for field in self.layout.fields]
        return [f"{self.module}.{name}" for name in (*names, self.layout.sizes) if name is not None]

    def entry(self, tensors: Spans) -> TensorEntry:
        size = sum(tensors[name].size for name in self.names())
        return TensorEntry(self.layout.format, self.shape, size, self.layout.copies)

    def around(self, box: Box) -> Box:
        """The smallest box around a box of values that begins and ends between entries of all tensors."""
        fields = self.layout.fields
        sizes = lcm(*(field.rows or 1 for field in fields)), lcm(*(field.columns or 1 for field in fields))
        return boxes.outward(box, self.shape, sizes)


class Safetensors:
    """A folder of safetensors as a Source, whose weights are plain or packed in one of `schemes`."""

    metadata: Mapping[str, Any] | None = None
    made_of: Mapping[str, Any] | None = None

    def __init__(self, kind: str, files: Files, config: Config, table: NameTable, schemes: Sequence[Scheme]):
        self.kind, self.path, self.raw = kind, files.path, files
        self.config, self.table = config, table
        self.packed = {f"{one.module}.weight": one for one in _packed(files, [*map(layout_of, schemes)])}
        used = {name for packed in self.packed.values() for name in packed.names()}
        dtypes = {files.tensors[name].dtype for name in used} & {*SCALE_DTYPES}
        self.scales = dtypes.pop() if len(dtypes) == 1 else "F32"
        plain = {n: TensorEntry(t.dtype, t.shape, t.size) for n, t in files.tensors.items() if n not in used}
        self.tensors: Mapping[str, TensorEntry] = plain | {
            name: one.entry(files.tensors) for name, one in self.packed.items()
        }

    @property
    def files(self) -> tuple[Path, ...]:
        return self.raw.files

    def read(self, name: str, index: int | None = None, box: Box | None = None) -> tuple[np.ndarray, ...]:
        if name not in self.packed:
            return (self.raw.read(name, index, box),)
        packed = self.packed[name]
        box = box or boxes.whole_box(packed.shape)
        around = packed.around(box)
        arrays = tuple(self._entries(packed, field, around) for field in packed.layout.fields)
        self._check_sizes(packed)
        parts = packed.layout.unpack(arrays, boxes.box_shape(around))
        if not packed.layout.sound(parts):
            names = packed.names()
            raise BadFile(
                f"{printable(names[1])} holds a scale that is not positive and finite",
                f"it scales {printable(names[0])}; only a block of zeros may have the scale 0",
            )
        return parts if around == box else _cut(packed.layout.format, parts, box, around)

    def close(self) -> None:
        self.raw.close()

    def _entries(self, packed: PackedWeight, field: Field, box: Box) -> np.ndarray:
        """The entries of a tensor for a box of values, with the matrix's rows first."""
        name, entries = f"{packed.module}.{field.name}", field.box(box)
        axes = len(self.raw.tensors[name].shape)  # a last one, of one entry, can be missing
        found = self.raw.read(name, None, entries[:axes]).reshape(boxes.box_shape(entries))
        return found.T if field.transposed else found

    def _check_sizes(self, packed: PackedWeight) -> None:
        if packed.layout.sizes is None:
            return
        name = f"{packed.module}.{packed.layout.sizes}"
        found = self.raw.read(name).reshape(-1).tolist()
        if found != [*packed.shape]:
            raise BadFile(
                f"{printable(name)} does not fit the tensors of its layer",
                f"found {found}, they have {list(packed.shape)}",
            )


def _cut(format: str, parts: tuple[np.ndarray, ...], box: Box, around: Box) -> tuple[np.ndarray, ...]:
    """The parts of a box of the parts of a box around it."""
    shape = boxes.box_shape(around)
    inner = tuple((i - o, j - o) for (i, j), (o, _) in zip(box, around, strict=True))
    found = zip(parts, boxes.of_parts(format, shape, inner), strict=True)
    return tuple(part[boxes.slices(of_part)] for part, of_part in found)


def open_hf(path: Path) -> Safetensors:
    """Opens a released folder: config.json, and safetensors with the names that transformers writes."""
    config, files = Config.from_hf(path), open_folder(path)
    schemes = (config.quantization_config or Quantization()).schemes
    return Safetensors("safetensors", files, config, names_of(config, files.tensors), schemes)


def _packed(files: Files, layouts: list[FileLayout]) -> Iterator[PackedWeight]:
    """The packed weights; raises BadFile where the tensors of one do not belong together."""
    found = {field.name for layout in layouts for field in layout.fields} - {"weight"}
    dtypes = {dtype for layout in layouts for dtype in layout.fields[0].dtypes}
    modules: dict[str, None] = {}  # in order, each once
    for name, tensor in files.tensors.items():
        module, _, field = name.rpartition(".")
        if field in found or (field == "weight" and tensor.dtype in dtypes):
            modules[module] = None
    for module in modules:
        if (packed := _fitting(files, module, layouts)) is not None:
            yield packed


def _fitting(files: Files, module: str, layouts: list[FileLayout]) -> PackedWeight | None:
    """A weight in the first layout that its tensors fit; None without codes: that its name is missing says more."""
    reasons: list[BadFile] = []
    for layout in layouts:
        if f"{module}.{layout.fields[0].name}" in files.tensors:
            packed = PackedWeight(module, layout, _shape(files, module, layout))
            if (reason := _fault(files.tensors, packed)) is None:
                return packed
            reasons.append(reason)
    if reasons:
        raise reasons[0]
    return None


def _shape(files: Files, module: str, layout: FileLayout) -> Shape:
    """The rows and columns of a matrix; () if its codes are no matrix."""
    codes, *others = (files.tensors.get(f"{module}.{field.name}") for field in layout.fields)
    field = layout.fields[0]
    assert codes is not None
    if len(codes.shape) != 2:
        return ()
    rows, columns = codes.shape[::-1] if field.transposed else codes.shape
    rows, columns = rows * field.rows, columns * field.columns
    if layout.sizes is None:
        return rows, columns
    by_groups = prod(others[0].shape[1:]) * layout.fields[1].columns if others[0] is not None else 0
    if columns - 8 < by_groups <= columns:  # the last word may be filled up
        return rows, by_groups
    sizes = files.tensors.get(f"{module}.{layout.sizes}")
    if sizes is None or sizes.shape != (2,) or sizes.dtype not in ("I64", "I32"):
        return rows, columns
    return rows, int(files.read(sizes.name)[1])


def _fault(tensors: Spans, packed: PackedWeight) -> BadFile | None:
    """The first tensor that is missing or another one than the layout has."""
    first = packed.names()[0]
    codes = tensors[first]
    for name in packed.names():
        if name not in tensors:
            return BadFile(
                f"{printable(first)} is {codes.dtype} without {name.rpartition('.')[2]}",
                f"expected a tensor {printable(name)}",
            )
    if codes.dtype not in packed.layout.fields[0].dtypes:
        expected = f"{printable(first)} is {codes.dtype}, expected {packed.layout.fields[0].dtypes[0]}"
        return BadFile(f"{printable(packed.names()[1])} belongs to a packed weight", expected)
    if not packed.shape:
        found = f"found {codes.dtype} {list(codes.shape)}, expected a matrix"
        return BadFile(f"{printable(packed.names()[1])} does not fit {printable(first)}", found)
    if packed.shape[1] % packed.layout.multiple:
        found = f"{list(packed.shape)} has no whole groups of {packed.layout.multiple} columns"
        return BadFile(f"{printable(first)} is not packed as its quantiser packs", found)
    for name, field in zip(packed.names(), packed.layout.fields, strict=False):
        if reason := _misfit(tensors[name], field, packed.shape):
            return BadFile(f"{printable(name)} does not fit {printable(first)}", reason)
    return None


def _misfit(tensor: TensorSpan, field: Field, shape: Shape) -> str | None:
    found = f"found {tensor.dtype} {list(tensor.shape)}"
    expected = field.shape(shape)
    is_shape = tensor.shape == expected[: len(tensor.shape)] and prod(tensor.shape) == prod(expected)
    if is_shape and tensor.dtype in field.dtypes:
        return None
    block = [field.rows or shape[0], field.columns or shape[1]]
    needed = f"{list(shape)} in blocks of {block} needs {list(expected)} of {' or '.join(field.dtypes)}"
    return f"{needed}, {found}"
