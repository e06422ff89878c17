"""The manifest of a folder of weights: every tensor's format, shape and checksums, and how its parts are cut into chunks.

Reads and checks manifest.json; knows no Orbax and no devices."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mla_jax.base import qtensor
from mla_jax.base.errors import BadFile, Unsupported, printable
from mla_jax.base.files import read_json
from mla_jax.base.qtensor import Shape
from mla_jax.weights.boxes import Box, box_shape
from mla_jax.weights.safetensors import STORED_DTYPES

KIND, VERSION = "mla-jax weights", 1
MANIFEST, MAX_MANIFEST = "manifest.json", 64 << 20
TENSOR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")  # a tensor's name becomes a folder's name
COPY_AGAIN = "copy that folder again, or convert again"


@dataclass(frozen=True)
class StoredPart:
    """An array of a stored tensor, cut into chunks of one shape; the last chunk along an axis may be smaller."""

    dtype: str
    shape: Shape
    chunk: Shape
    checksums: tuple[str, ...]  # xxh3-64 of each chunk's bytes; the last axis counts fastest

    def chunks(self, tensor: str, number: int) -> list["StoredChunk"]:
        """The chunks of this part, which is part `number` of `tensor`."""
        boxes = enumerate(zip(grid(self.shape, self.chunk), self.checksums, strict=True))
        return [
            StoredChunk(f"{tensor}.{number}.{i}", self.dtype, box, checksum) for i, (box, checksum) in boxes
        ]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the manifest: the step that stored it, and its parts."""

    format: str
    shape: Shape
    step: int
    parts: tuple[StoredPart, ...]

    @property
    def nbytes(self) -> int:
        return sum(prod(part.shape) * np.dtype(part.dtype).itemsize for part in self.parts)


class StoredChunk(NamedTuple):
    """The unit of reading: the `box` of a part. `leaf` is its name in Orbax."""

    leaf: str
    dtype: str
    box: Box
    checksum: str

    @property
    def shape(self) -> Shape:
        return box_shape(self.box)

    @property
    def nbytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)


def grid(shape: Shape, chunk: Shape) -> list[Box]:
    """The boxes of an array's chunks; the last axis counts fastest."""
    along = [[(i, min(i + c, size)) for i in range(0, size, c)] for size, c in zip(shape, chunk, strict=True)]
    return [*product(*along)]


def part_specs(name: str, format: str, shape: Shape) -> list[tuple[str, Shape]]:
    """The dtype and shape of each part; raises BadFile or Unsupported for a tensor that cannot be stored."""
    if not TENSOR_NAME.fullmatch(name):
        raise BadFile(f"{printable(name)} cannot name a tensor", "expected at most 200 of A-Z a-z 0-9 _ . -")
    if not all(shape):  # Orbax refuses them too
        raise Unsupported(f"{name} has the shape {list(shape)}", "an empty tensor cannot be stored")
    if format in STORED_DTYPES:
        return [(np.dtype(STORED_DTYPES[format]).name, shape)]
    return [(np.dtype(part.dtype).name, part.shape) for part in qtensor.abstract(format, shape).parts]


def read_manifest(folder: Path) -> tuple[bool, dict, dict[str, StoredTensor]]:
    """Whether the folder is complete, its metadata and its tensors; raises BadFile for anything that does not fit together."""
    file = folder / MANIFEST
    found = read_json(file, MAX_MANIFEST)
    version = found.get("version")
    if isinstance(version, int) and version > VERSION:
        raise BadFile(
            f"{folder} has version {version} of its format",
            f"known are versions up to {VERSION}",
            "update mla-jax",
        )
    fields = {"complete": bool, "metadata": dict, "tensors": dict}
    sound = all(isinstance(found.get(key), kind) for key, kind in fields.items())
    if not sound or (found.get("kind"), version) != (KIND, VERSION):
        raise BadFile(f"{file} is not a manifest of weights", "expected one that mla-convert wrote")
    tensors = {name: _checked(file, name, raw) for name, raw in found["tensors"].items()}
    return found["complete"], found["metadata"], tensors


def _checked(file: Path, name: str, raw: Any) -> StoredTensor:
    """One tensor of the manifest, after all checks."""
    try:
        parts = tuple(_part(part) for part in raw["parts"])
        tensor = StoredTensor(raw["format"], tuple(raw["shape"]), raw["step"], parts)
        sound = _is_sound(name, tensor)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise BadFile(
            f"{file} has an invalid entry for {printable(name)}",
            f"found {printable(str(raw), 200)}",
            COPY_AGAIN,
        )
    return tensor


def _part(raw: Any) -> StoredPart:
    return StoredPart(raw["dtype"], tuple(raw["shape"]), tuple(raw["chunk"]), tuple(raw["checksums"]))


def _is_sound(name: str, tensor: StoredTensor) -> bool:
    """Whether types, sizes and counts are possible and fit together; may raise what comparing strange values raises."""
    if not isinstance(tensor.format, str) or type(tensor.step) is not int or tensor.step < 0:
        return False
    if not _are_sizes(tensor.shape) or not all(
        _are_sizes((*part.shape, *part.chunk)) for part in tensor.parts
    ):
        return False
    if [(part.dtype, part.shape) for part in tensor.parts] != part_specs(name, tensor.format, tensor.shape):
        return False
    return all(_has_all_checksums(part) for part in tensor.parts)


def _are_sizes(numbers: Sequence[Any]) -> bool:
    return all(type(n) is int and 0 < n < 1 << 63 for n in numbers)


def _has_all_checksums(part: StoredPart) -> bool:
    count = prod(-(-size // c) for size, c in zip(part.shape, part.chunk, strict=True))
    return count == len(part.checksums) and all(isinstance(checksum, str) for checksum in part.checksums)
