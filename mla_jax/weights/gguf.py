"""GGUF files, single or split: headers read field by field and checked before anything is trusted, tensors read by `pread`.

Every count and length is held against the bytes that are left before anything is made of it. Never memory-mapped.
Knows nothing of models: what the metadata means is read in gguf_config.py, what the names mean in gguf_names.py."""

import os
import re
import stat
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import ml_dtypes
import numpy as np

from mla_jax.base import gguf_blocks
from mla_jax.base.errors import BadFile, Unsupported, printable, shortened
from mla_jax.weights.safetensors import TensorFiles, TensorSpan

MAX_HEADER = 100 << 20
MAX_TENSORS = 100_000  # in one file
MAX_KEYS = 10_000
MAX_KEY = 65_535  # bytes; the format's own limit
MAX_NAME = 512  # bytes
MAX_ITEMS = 2_000_000  # strings and inner arrays in one header; the largest vocabularies have 900,000 tokens and merges
MAX_DEPTH = 2  # arrays in arrays, but no deeper
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
VERSIONS = (2, 3)

BOOL, STRING, ARRAY = 7, 8, 9
NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<?", 10: "<u8", 11: "<i8", 12: "<f8"}
_LEAST = {STRING: 8, ARRAY: 12} | {kind: np.dtype(number).itemsize for kind, number in NUMBERS.items()}  # bytes of a value


class Type(NamedTuple):
    """A number format: `values` take `bytes`, a block; `dtype` is None where a block is more than one number."""

    id: int
    values: int
    bytes: int
    dtype: Any = None


def _plain(number: int, dtype: Any) -> Type:
    return Type(number, 1, np.dtype(dtype).itemsize, np.dtype(dtype))


_BF16 = {"bfloat16": ml_dtypes.bfloat16}
TENSOR_TYPES = (
    {name: _plain(number, _BF16.get(dtype, dtype)) for name, (number, dtype) in gguf_blocks.PLAIN.items()}
    | {"F64": _plain(28, "f8"), "I8": _plain(24, "i1"), "I16": _plain(25, "i2"), "I32": _plain(26, "i4"), "I64": _plain(27, "i8")}
    | {name: Type(t.id, t.values, t.bytes) for name, t in gguf_blocks.TYPES.items()}
)
_NAME_OF_TYPE = {t.id: name for name, t in TENSOR_TYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `nbytes` from `offset` of `file`. `shape` is numpy's; its last axis is cut into blocks."""

    name: str
    shape: tuple[int, ...]
    type: str
    file: Path
    offset: int
    nbytes: int
    stamp: tuple[int, ...]


class Header(NamedTuple):
    """What one file says of itself."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]


class GGUFFile:
    """One model: `metadata` by key (arrays of numbers are numpy's), `tensors` by name; `read` brings one into host memory."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo]):
        self.path, self.metadata, self.tensors = path, metadata, tensors
        self._raw = TensorFiles(path, {t.name: _blocks(t) for t in tensors.values()})

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """The tensor in its own dtype, or its blocks as uint8 `[.. blocks bytes]`; any thread may call it.

        `index`: only that entry of the first axis, such as one expert's matrix. Raises BadFile if the file was cut or rewritten
        since its header was read."""
        data, dtype = self._raw.read(name, index), TENSOR_TYPES[self.tensors[name].type].dtype
        return data if dtype is None else data.view(dtype)[..., 0]

    def close(self):
        """Closes the files; raises BadFile if one changed while it was open, for then its tensors may be of two versions."""
        self._raw.close()


def _blocks(t: TensorInfo) -> TensorSpan:
    """The tensor's bytes block by block; a plain number is a block of its own."""
    kind = TENSOR_TYPES[t.type]
    shape = (*t.shape[:-1], t.shape[-1] // kind.values, kind.bytes)
    return TensorSpan(t.name, t.file, "U8", shape, t.offset, t.nbytes, t.stamp)


def open_gguf(path: str | Path) -> GGUFFile:
    """Checks every header of the model in `path`: a file, any part of several, or a folder with one model. Reads no weights."""
    files = _parts(_chosen(Path(path)))
    headers = [read_header(file) for file in files]
    _refuse_unlike_parts(files, headers)
    tensors: dict[str, TensorInfo] = {}
    for info in (info for header in headers for info in header.tensors):
        if info.name in tensors:
            where = f"{tensors[info.name].file.name} and {info.file.name}"
            raise BadFile(f"{printable(info.name)} is in two parts", where, "the parts are not of one model; fetch them again")
        tensors[info.name] = info
    return GGUFFile(files[0], headers[0].metadata, tensors)


# ---- one file


def read_header(file: Path) -> Header:
    """The metadata and tensors of one file, after checking that its header is sound and describes every byte once."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise BadFile(f"{file.name} is not a regular file", str(file))
        with open(file, "rb", buffering=1 << 20) as stream:
            return _header(_Cursor(file, stream))
    except OSError as e:
        raise BadFile(f"{file.name} cannot be read", e.strerror or str(e), str(file)) from e


class _Cursor:
    """A place in a header that moves forward; `subject` is what stands there, for the errors."""

    def __init__(self, file: Path, stream: BinaryIO):
        status = os.fstat(stream.fileno())
        self.file, self.stream, self.subject, self.at, self.items = file, stream, "the header", 0, 0
        self.size, self.stamp = status.st_size, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def fail(self, finding: str, *details: str, at: int | None = None) -> NoReturn:
        raise BadFile(f"{self.file.name}: {self.subject} {finding}", *details, f"at byte {self.at if at is None else at:,}")

    def room(self, count: int, each: int):
        """Fails unless `count` things of at least `each` bytes can still come."""
        left = self.size - self.at
        if count * each > left:
            wanted = f"{count:,} values of at least {each}" if each > 1 else f"{count:,}"
            self.fail("is cut short", f"it needs {wanted} bytes, the file has {left:,} left", "fetch that file again")

    def more(self, items: int):
        """Fails if `items` are too many, with all that came before."""
        self.items += items
        if self.items > MAX_ITEMS:
            self.fail("has too many items", f"found {items:,}, the limit is {MAX_ITEMS:,} in all of the header")

    def take(self, size: int) -> bytes:
        self.room(size, 1)
        if self.at + size > MAX_HEADER:
            self.fail("makes the header too large", f"the limit is {MAX_HEADER:,} bytes")
        data = self.stream.read(size)
        self.at += len(data)
        if len(data) < size:
            raise BadFile(f"{self.file.name} became shorter while it was read", f"at byte {self.at:,}")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, most: int = MAX_HEADER) -> str:
        size, start = self.number("<Q"), self.at
        self.room(size, 1)
        if size > most:
            self.fail("is too long", f"found {size:,} bytes, the limit is {most:,}", at=start)
        try:
            return str(self.take(size), "utf-8")
        except UnicodeDecodeError as e:
            self.fail("is not UTF-8", e.reason, at=start + e.start)

    def name(self, most: int, present: Container[str]) -> str:
        start, found = self.at, self.text(most)
        if not found or found in present:
            finding = f"is {printable(found)}, which is in the file twice" if found else "has no name"
            self.fail(finding, at=start)
        return found


def _header(cursor: _Cursor) -> Header:
    tensors, keys = _start(cursor)
    metadata = _metadata(cursor, keys)
    alignment = _alignment(cursor, metadata)
    entries: dict[str, tuple] = {}
    for i in range(tensors):
        cursor.subject = f"tensor {i:,} of {tensors:,}"
        name = cursor.name(MAX_NAME, entries)
        cursor.subject = printable(name)
        entries[name] = _entry(cursor)
    start = _aligned(cursor.at, alignment)
    infos = [
        TensorInfo(name, shape, kind, cursor.file, start + offset, size, cursor.stamp)
        for name, (shape, kind, offset, size) in entries.items()
    ]
    _refuse_holes(cursor, infos, start, alignment)
    return Header(metadata, infos)


def _start(cursor: _Cursor) -> tuple[int, int]:
    """The counts of tensors and of metadata keys, after the magic bytes and the version."""
    if (magic := cursor.take(4)) != b"GGUF":
        _refuse_magic(cursor, magic)
    version = cursor.number("<I")
    if version not in VERSIONS:
        _refuse_version(cursor, version)
    tensors, keys = cursor.number("<Q"), cursor.number("<Q")
    for found, most, least, what in ((tensors, MAX_TENSORS, 33, "tensors"), (keys, MAX_KEYS, 14, "metadata keys")):
        cursor.room(found, least)
        if found > most:
            cursor.fail(f"has too many {what}", f"found {found:,}, the limit is {most:,}")
    return tensors, keys


def _refuse_magic(cursor: _Cursor, magic: bytes) -> NoReturn:
    name = cursor.file.name
    if magic == b"FUGG":
        raise BadFile(f"{name} is byte-swapped", "it begins with FUGG, expected GGUF", "fetch a little-endian file")
    if magic == b"vers" and cursor.size < 1024:
        raise BadFile(f"{name} is a pointer of Git LFS, not the model", "fetch the file that it stands for: git lfs pull")
    raise BadFile(f"{name} is not a GGUF file", f"it begins with {printable(magic.decode('latin-1'))}, expected GGUF")


def _refuse_version(cursor: _Cursor, version: int) -> NoReturn:
    name, known = cursor.file.name, " and ".join(map(str, VERSIONS))
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
        raise BadFile(f"{name} is a big-endian file", f"known: little-endian GGUF of versions {known}", "fetch that instead")
    if version == 1:
        raise BadFile(f"{name} is GGUF of version 1, of the year 2023", f"known: {known}", "convert the model again")
    if version > max(VERSIONS):
        raise BadFile(f"{name} is GGUF of version {version:,}", f"known: {known}", "this program may be too old for it")
    raise BadFile(f"{name} is GGUF of version {version}, which there never was", f"known: {known}")


# ---- metadata


def _metadata(cursor: _Cursor, keys: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(keys):
        cursor.subject = f"metadata key {i:,} of {keys:,}"
        key = cursor.name(MAX_KEY, metadata)
        cursor.subject = f"metadata {printable(key)}"
        kind = cursor.number("<I")
        if key == "general.alignment" and kind != 4:
            cursor.fail("has the wrong type", f"found type {kind}, expected 4, an unsigned number of 32 bits")
        metadata[key] = _value(cursor, kind, 0)
    return metadata


def _value(cursor: _Cursor, kind: int, depth: int) -> Any:
    if kind in NUMBERS:
        return _numbers(cursor, kind, 1)[0].item()
    if kind == STRING:
        return cursor.text()
    if kind != ARRAY:
        cursor.fail("has an unknown type", f"found type {kind:,}, known: 0 to 12", at=cursor.at - 4)
    if depth == MAX_DEPTH:
        cursor.fail("is nested too deeply", f"arrays may hold arrays, {MAX_DEPTH} deep at most")
    kind, count = cursor.number("<I"), cursor.number("<Q")
    if kind not in _LEAST:
        cursor.fail("has an unknown type", f"found an array of type {kind:,}, known: 0 to 12", at=cursor.at - 12)
    cursor.room(count, _LEAST[kind])
    if kind in NUMBERS:
        return _numbers(cursor, kind, count)
    cursor.more(count)
    return [_value(cursor, kind, depth + 1) for _ in range(count)]


def _numbers(cursor: _Cursor, kind: int, count: int) -> np.ndarray:
    start, dtype = cursor.at, np.dtype(NUMBERS[kind])
    data = np.frombuffer(cursor.take(count * dtype.itemsize), np.uint8 if kind == BOOL else dtype)
    if kind == BOOL and count and data.max() > 1:
        cursor.fail("holds a truth that is neither 0 nor 1", f"found {data.max()}", at=start + int(data.argmax()))
    return data.astype(dtype, copy=False)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    found = metadata.get("general.alignment", 32)
    if not 8 <= found <= MAX_ALIGNMENT or found & (found - 1):
        cursor.subject = "metadata general.alignment"
        cursor.fail("is impossible", f"found {found:,}, expected a power of two from 8 to {MAX_ALIGNMENT:,}")
    return found


# ---- tensors


def _entry(cursor: _Cursor) -> tuple[tuple[int, ...], str, int, int]:
    """Shape, type, offset and bytes of a tensor."""
    dimensions = cursor.number("<I")
    if not 1 <= dimensions <= MAX_DIMENSIONS:
        cursor.fail("has an impossible shape", f"found {dimensions:,} dimensions, expected 1 to {MAX_DIMENSIONS}")
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]  # the file has the fastest first
    if not all(0 < n < 1 << 63 for n in shape):
        cursor.fail("has an impossible shape", f"found {list(shape)}, expected positive numbers")
    number, offset = cursor.number("<I"), cursor.number("<Q")
    if number not in _NAME_OF_TYPE:
        finding = f"{cursor.file.name}: {cursor.subject} has type {number}"
        raise Unsupported(finding, "known: " + ", ".join(TENSOR_TYPES), f"at byte {cursor.at - 12:,}")
    kind = _NAME_OF_TYPE[number]
    _, values, size, _ = TENSOR_TYPES[kind]
    if shape[-1] % values:
        cursor.fail("has an impossible shape", f"found {list(shape)}, but {kind} comes in blocks of {values} values")
    return shape, kind, offset, prod(shape) // values * size


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _refuse_holes(cursor: _Cursor, infos: list[TensorInfo], start: int, alignment: int):
    """Tensors lie one behind the other from `start`, each padded to the alignment, and nothing is behind the last."""
    for info in infos:
        cursor.subject, offset = printable(info.name), info.offset - start
        if offset % alignment:
            cursor.fail("is not aligned", f"its offset is {offset:,}, expected a multiple of {alignment}")
        if info.offset + info.nbytes > cursor.size:
            needs = f"it takes {info.nbytes:,} bytes from {info.offset:,}, the file has {cursor.size:,}"
            cursor.fail("reaches beyond the end of the file", needs, "the download stopped early, or the header is damaged")
    end = at = start
    for info in sorted(infos, key=lambda info: info.offset):
        cursor.subject = printable(info.name)
        if info.offset != at:
            what = "overlaps the tensor before it" if info.offset < at else "leaves a hole before it"
            cursor.fail(what, f"it starts at byte {info.offset:,}, expected {at:,}")
        end = info.offset + info.nbytes
        at = _aligned(end, alignment)
    if cursor.size > at:
        cursor.subject = "the file"
        cursor.fail("has trailing bytes", f"the header describes {end:,} bytes, the file has {cursor.size:,}")


# ---- several files

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def _chosen(path: Path) -> Path:
    """The file, or the one model in the folder."""
    if not path.exists():
        raise BadFile(f"{path} does not exist", "expected a .gguf file, or a folder with one")
    if not path.is_dir():
        return path
    names = sorted(p.name for p in path.iterdir() if p.name.endswith(".gguf"))
    first = {m[1] + m[3] if (m := _PART.fullmatch(name)) else name: name for name in reversed(names)}
    if len(first) != 1:
        found = f"{path} holds {len(first)} GGUF models" if first else f"{path} holds no GGUF model"
        raise BadFile(found, *shortened([printable(name) for name in sorted(first.values())]), "name the file to be read")
    return path / next(iter(first.values()))


def _parts(file: Path) -> list[Path]:
    """All parts of the model that `file` belongs to, in order."""
    if (name := _PART.fullmatch(file.name)) is None:
        return [file]
    total = int(name[3])
    wanted = [file.with_name(f"{name[1]}-{i:05d}-of-{name[3]}.gguf") for i in range(1, total + 1)]
    if not 1 <= int(name[2]) <= total:
        raise BadFile(f"{printable(file.name)} is an impossible name", f"part {int(name[2])} of {total}")
    if missing := [part.name for part in wanted if not part.exists()]:
        raise BadFile(f"the model lacks {len(missing)} of its {total} parts", *shortened(missing), "fetch them again")
    return wanted


def _refuse_unlike_parts(files: list[Path], headers: list[Header]):
    """Refuses parts that say of themselves that they belong elsewhere."""
    tensors, first, faults = sum(len(header.tensors) for header in headers), headers[0].metadata, []
    for i, (file, (metadata, _)) in enumerate(zip(files, headers, strict=True)):
        known = {"split.no": i, "split.count": len(files), "split.tensors.count": tensors}
        for key, expected in known.items():
            found = metadata.get(key, None if len(files) > 1 else expected)
            merged = 0 if len(files) == 1 and key == "split.count" else expected  # which merging writes
            if type(found) is not int or found not in (expected, merged):
                faults.append(f"{file.name}: {key} is {printable(str(found))}, expected {expected:,}")
        unlike = [key for key in metadata if key not in known and key in first and not _same(metadata[key], first[key])]
        faults += [f"{file.name}: {printable(key)} is not what it is in {files[0].name}" for key in unlike]
    if faults:
        renamed = "parts are found by their names, NAME-00001-of-0000N.gguf; fetch all of one model again"
        raise BadFile("the parts are not those of one model", *shortened(faults), renamed)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (np.array_equal(one, other) if isinstance(one, np.ndarray) else str(one) == str(other))
