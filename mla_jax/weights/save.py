"""Writes a model as an HF folder: config.json and safetensors, with the names of released checkpoints."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import RawIOBase
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from mla_jax.base import axes
from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, BadRequest, DoesNotFit, Unsupported, printable, shown
from mla_jax.base.limits import gib
from mla_jax.base.quantization import read_quantization
from mla_jax.model.transformer import Transformer
from mla_jax.weights.held import HeldWeights
from mla_jax.weights.hf_names import LINEAR, table_of
from mla_jax.weights.names import Origin, value_half
from mla_jax.weights.released import SETTINGS, Spec, Stored, as_stored
from mla_jax.weights.safetensors import STORED_DTYPES

FILE_BYTES = 4 << 30  # most bytes of weights in one file, except of a single larger parameter
_DTYPES = {"bfloat16": "BF16", "float32": "F32"}
AS_NUMBERS = 'give dtype="bfloat16" or dtype="float32", which writes numbers'


def save(
    model: Transformer | HeldWeights,
    folder: str | Path,
    *,
    dtype: str | None = "bfloat16",
    fp8: bool = False,
    others: Mapping[str, bytes] | None = None,
) -> None:
    """Writes a model into a new folder: weights in `dtype`, router biases in float32; `others` are further files by name.

    `dtype` None keeps all as the model holds them. With `fp8` the weights of linear layers become E4M3 with a scale per block of
    128x128, as DeepSeek-V3 is released. The folder appears once it is complete; on the host is one parameter at a time. Raises
    BadFile for a folder that is not empty, DoesNotFit for a full disk, and Unsupported for weights that no such folder holds."""
    if dtype is not None and dtype not in _DTYPES:
        raise BadRequest(f"dtype is {shown(dtype)}", f"expected None, {' or '.join(_DTYPES)}")
    held = model if isinstance(model, HeldWeights) else HeldWeights.of(model)
    items = _items(held, dtype, fp8)
    files, size = in_files(items, FILE_BYTES), sum(item.nbytes for item in items)
    with _new_folder(Path(folder), size) as new:
        index = {}
        for i, some in enumerate(files):
            name = file_name(i, len(files))
            specs = dict(spec for item in some for spec in item.specs())
            tensors = (tensor for item in some for tensor in item.tensors(held))
            complete(new / name, partial(write_tensors, specs=specs, tensors=tensors))
            index |= dict.fromkeys(specs, name)
        if len(files) > 1:
            _write(
                new / "model.safetensors.index.json", {"metadata": {"total_size": size}, "weight_map": index}
            )
        for name, content in (others or {}).items():
            complete(new / name, partial(Path.write_bytes, data=content))
        _write(new / "config.json", _config(held.config, items).to_hf())


@dataclass(frozen=True)
class _Item:
    """A parameter (`uk` includes `uv`), its tensors in the folder, and how each is stored."""

    path: str
    origin: Origin
    stored: Stored

    @property
    def nbytes(self) -> int:
        return sum(
            np.dtype(STORED_DTYPES[dtype]).itemsize * prod(shape) for _, (dtype, shape) in self.specs()
        )

    def specs(self) -> Iterator[tuple[str, Spec]]:
        for name in self.origin.names:
            yield from self.stored.specs(name)

    def tensors(self, held: HeldWeights) -> Iterator[tuple[str, np.ndarray]]:
        """Raises Unsupported for scales that such a folder does not have: fewer numbers are stored there."""
        stored = self.stored
        matrices = held.matrices(self.path, self.origin, stored.shape, stored.format)
        for name, parts in zip(self.origin.names, matrices, strict=True):
            if not stored.keeps(parts):
                raise Unsupported(
                    f"quantization_config cannot hold the scales of {self.path}, as they are now", AS_NUMBERS
                )
            yield from stored.tensors(name, parts)


def _items(held: HeldWeights, dtype: str | None, fp8: bool) -> list[_Item]:
    table, config, found = table_of(held.config), held.config, []
    described = config if dtype is None else replace(config, quantization_config=None)
    for path in held.values:
        origin = table.find(path, config)
        if origin.part is value_half:
            continue  # written with uk
        format = held.format(path)
        if dtype is not None:
            format = "F32" if path in held.exact else _DTYPES[dtype]
        if fp8 and LINEAR.fullmatch(origin.names[0]):
            format = "fp8_block"
        shape = axes.shape(config, origin.axes)
        found.append(_Item(path, origin, as_stored(described, format, shape, path, AS_NUMBERS)))
    return found


def _config(config: Config, items: list[_Item]) -> Config:
    """The config that says how these weights are packed."""
    packed = [item.stored.format for item in items if item.stored.layout is not None]
    found = config.quantization_config or read_quantization(SETTINGS[packed[0]]) if packed else None
    return replace(config, quantization_config=found)


def in_files(items: Iterable[Any], most: int) -> list[list[Any]]:
    """The parameters of each file, with `nbytes` each: at most these bytes in all, or a single parameter."""
    files: list[list[Any]] = [[]]
    size = 0
    for item in items:
        if files[-1] and size + item.nbytes > most:
            files.append([])
            size = 0
        files[-1].append(item)
        size += item.nbytes
    return files


def file_name(i: int, count: int) -> str:
    """Of file `i` of a folder's weights."""
    if count == 1:
        return "model.safetensors"
    return f"model-{i + 1:05d}-of-{count:05d}.safetensors"


@contextmanager
def _new_folder(folder: Path, size: int) -> Iterator[Path]:
    """A folder beside `folder`, whose name it takes once it is complete; after an error nothing is left of it."""
    folder = folder.resolve()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise BadFile(
            f"{printable(str(folder), 200)} is there already and not empty",
            "give another folder, or delete it first",
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    if size > (free := shutil.disk_usage(folder.parent).free):
        raise DoesNotFit(f"{folder} does not fit on its disk", f"it takes {gib(size)}, {gib(free)} are free")
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield new
        new.chmod(0o777 & ~_umask())
        os.rename(new, folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _write(path: Path, content: Any) -> None:
    complete(path, lambda path: path.write_text(json.dumps(content, indent=2) + "\n"))


def write_tensors(path: Path, specs: Mapping[str, Spec], tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes a safetensors file from `tensors` that arrive one by one, in any order; `specs` gives each one's dtype and shape.

    The safetensors library needs all tensors in memory. As the library does, the file begins with the widest dtypes, so that
    every tensor is aligned."""
    header, offsets = _layout(specs)
    missing = {*specs}
    with open(path, "wb", buffering=0) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, tensor in tensors:
            dtype, shape = specs[name]
            assert (tensor.dtype, tensor.shape) == (STORED_DTYPES[dtype], shape), name
            file.seek(8 + len(header) + offsets[name])
            _write_all(file, tensor)
            missing.remove(name)
    assert not missing, missing


def _layout(specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int]]:
    """The header of a safetensors file, and each tensor's offset behind it."""
    sizes = {name: np.dtype(STORED_DTYPES[dtype]).itemsize for name, (dtype, _) in specs.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name in sorted(specs, key=lambda name: (-sizes[name], name)):
        dtype, shape = specs[name]
        offsets[name], end = end, end + sizes[name] * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offsets[name], end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    return header + b" " * (-len(header) % 8), offsets


def _write_all(file: RawIOBase, tensor: np.ndarray) -> None:
    data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
    while data:
        data = data[file.write(data) :]  # the system writes at most 2 GiB at a time


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def complete(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write` with a temporary path, and renames that file to `path` after it is durably on disk."""
    temporary = path.with_name(path.name + ".partial")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())  # safetensors makes its files private
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
