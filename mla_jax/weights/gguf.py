"""GGUF models, in a single file or split: tensors by name, read by `pread`. Files are not memory-mapped.

Knows nothing of models: gguf_config.py interprets the metadata, gguf_names.py the tensor names."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from mla_jax.base.errors import BadFile, printable, shortened
from mla_jax.weights.boxes import Box
from mla_jax.weights.gguf_header import TENSOR_TYPES, Header, TensorInfo, read_gguf_header
from mla_jax.weights.safetensors import TensorFiles, TensorSpan


class GGUFFile:
    """One model: `metadata` by key (arrays of numbers as numpy arrays), `tensors` by name; `read` copies one into host memory."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo]):
        self.path, self.metadata, self.tensors = path, metadata, tensors
        self._raw = TensorFiles(path, {t.name: _blocks(t) for t in tensors.values()})

    def read(self, name: str, index: int | None = None, box: Box | None = None) -> np.ndarray:
        """The tensor in its own dtype, or its blocks as uint8 `[.. blocks bytes]`; any thread may call it.

        `index`: only that entry of the first axis, such as one expert's matrix; `box`: only that part of these. Raises BadFile if
        the file was truncated or rewritten since its header was read."""
        data = self._raw.read(name, index, box and self._in_blocks(name, box))
        dtype = TENSOR_TYPES[self.tensors[name].type].dtype
        return data if dtype is None else data.view(dtype)[..., 0]

    def close(self):
        """Closes the files; raises BadFile if one changed while it was open: its tensors may then be of two versions."""
        self._raw.close()

    def _in_blocks(self, name: str, box: Box) -> Box:
        """A box of a tensor's values as one of its blocks of bytes."""
        kind, (start, end) = TENSOR_TYPES[self.tensors[name].type], box[-1]
        return (*box[:-1], (start // kind.values, -(-end // kind.values)), (0, kind.bytes))


def _blocks(t: TensorInfo) -> TensorSpan:
    """The tensor as blocks of bytes; a plain number is one block."""
    kind = TENSOR_TYPES[t.type]
    shape = (*t.shape[:-1], t.shape[-1] // kind.values, kind.bytes)
    return TensorSpan(t.name, t.file, "U8", shape, t.offset, t.nbytes, t.stamp)


def open_gguf(path: str | Path) -> GGUFFile:
    """Validates every header of the model in `path`: a file, any part of a split model, or a folder with one model.

    Reads no weights; raises BadFile or Unsupported."""
    files = _parts(_chosen(Path(path)))
    headers = [read_gguf_header(file) for file in files]
    _refuse_unlike_parts(files, headers)
    tensors: dict[str, TensorInfo] = {}
    for info in chain.from_iterable(header.tensors for header in headers):
        if info.name in tensors:
            where = f"{tensors[info.name].file.name} and {info.file.name}"
            raise BadFile(
                f"{printable(info.name)} is in two parts",
                where,
                "the parts are not of one model; fetch them again",
            )
        tensors[info.name] = info
    return GGUFFile(files[0], headers[0].metadata, tensors)


# ---- split models

_SPLIT_KEYS = ("split.no", "split.count", "split.tensors.count")
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def _chosen(path: Path) -> Path:
    """The file, or the only model in the folder (its first file if it is split)."""
    if not path.exists():
        raise BadFile(f"{path} does not exist", "expected a .gguf file, or a folder with one")
    if not path.is_dir():
        return path
    first: dict[str, str] = {}  # the first file of each model
    for name in sorted(p.name for p in path.iterdir() if p.name.endswith(".gguf")):
        part = _PART.fullmatch(name)
        first.setdefault(part[1] + part[3] if part else name, name)
    if len(first) != 1:
        found = f"{path} holds {len(first)} GGUF models" if first else f"{path} holds no GGUF model"
        raise BadFile(
            found, *shortened([printable(name) for name in sorted(first.values())]), "name the file to read"
        )
    return path / next(iter(first.values()))


def _parts(file: Path) -> list[Path]:
    """All parts of the model that `file` belongs to, in order."""
    if (name := _PART.fullmatch(file.name)) is None:
        return [file]
    total = int(name[3])
    parts = [file.with_name(f"{name[1]}-{i:05d}-of-{name[3]}.gguf") for i in range(1, total + 1)]
    if not 1 <= int(name[2]) <= total:
        raise BadFile(f"{printable(file.name)} is an impossible name", f"part {int(name[2])} of {total}")
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise BadFile(
            f"the model lacks {len(missing)} of its {total} parts", *shortened(missing), "fetch them again"
        )
    return parts


def _refuse_unlike_parts(files: list[Path], headers: list[Header]):
    """Raises BadFile if the metadata of a part says that it belongs to another model or place."""
    tensors, faults = sum(len(header.tensors) for header in headers), []
    for i, (file, header) in enumerate(zip(files, headers, strict=True)):
        faults += [
            f"{file.name}: {fault}" for fault in _split_faults(header.metadata, i, len(files), tensors)
        ]
        unlike = _unlike_keys(header.metadata, headers[0].metadata)
        faults += [f"{file.name}: {printable(key)} is not what it is in {files[0].name}" for key in unlike]
    if faults:
        named = "parts are found by their names, NAME-00001-of-0000N.gguf; fetch all of one model again"
        raise BadFile("the parts are not those of one model", *shortened(faults), named)


def _split_faults(metadata: Mapping[str, Any], number: int, parts: int, tensors: int) -> Iterator[str]:
    """Faults in the split.* keys of part `number`. A single file may lack them; a merged file has a count of 0."""
    for key, expected in zip(_SPLIT_KEYS, (number, parts, tensors), strict=True):
        found = metadata.get(key, None if parts > 1 else expected)
        allowed = (expected, 0) if parts == 1 and key == "split.count" else (expected,)
        if type(found) is not int or found not in allowed:
            yield f"{key} is {printable(str(found))}, expected {expected:,}"


def _unlike_keys(metadata: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """The keys that two parts share, with different values; split.* differ by design."""
    shared = (key for key in metadata if key in first and key not in _SPLIT_KEYS)
    return [key for key in shared if not _same(metadata[key], first[key])]


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else str(one) == str(other)
