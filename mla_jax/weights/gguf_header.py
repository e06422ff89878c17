"""The header of one GGUF file, parsed field by field and validated before use.

Every count and length is compared with the remaining bytes before anything is allocated. Knows nothing of models."""

import os
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
from mla_jax.base.errors import BadFile, Unsupported, printable

MAX_GGUF_HEADER = 100 << 20
MAX_GGUF_TENSORS = 100_000  # in one file
MAX_KEYS = 10_000
MAX_KEY = 65_535  # bytes; the format's own limit
MAX_GGUF_NAME = 512  # bytes
# Strings and inner arrays in one header; the largest vocabularies have 900,000 tokens and merges
MAX_ITEMS = 2_000_000
MAX_DEPTH = 2  # arrays of arrays, no deeper
MAX_GGUF_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
VERSIONS = (2, 3)

BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
# The least bytes of a value, by its kind
_LEAST = {STRING: 8, ARRAY: 12} | {kind: np.dtype(number).itemsize for kind, number in SCALARS.items()}


class Type(NamedTuple):
    """A tensor type: a block of `values` takes `bytes`; `dtype` is None unless a block is a single number."""

    id: int
    values: int
    bytes: int
    dtype: Any = None


def _plain(number: int, dtype: Any) -> Type:
    return Type(number, 1, np.dtype(dtype).itemsize, np.dtype(dtype))


_BF16 = {"bfloat16": ml_dtypes.bfloat16}
TENSOR_TYPES = (
    {
        name: _plain(number, _BF16.get(dtype, dtype))
        for name, (number, dtype) in gguf_blocks.PLAIN_TYPES.items()
    }
    | {
        "F64": _plain(28, "f8"),
        "I8": _plain(24, "i1"),
        "I16": _plain(25, "i2"),
        "I32": _plain(26, "i4"),
        "I64": _plain(27, "i8"),
    }
    | {name: Type(t.id, t.values, t.bytes) for name, t in gguf_blocks.TYPES.items()}
)
_NAME_OF_TYPE = {t.id: name for name, t in TENSOR_TYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is stored: `nbytes` from byte `offset` of `file`. `shape` is numpy's; blocks follow its last axis."""

    name: str
    shape: tuple[int, ...]
    type: str
    file: Path
    offset: int
    nbytes: int
    stamp: tuple[int, ...]


class Header(NamedTuple):
    """The content of one file's header."""

    metadata: dict[str, Any]
    tensors: list[TensorInfo]


def read_gguf_header(file: Path) -> Header:
    """The metadata and tensors of one file, after checking that its header is valid and describes every byte exactly once."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise BadFile(f"{file.name} is not a regular file", str(file))
        with open(file, "rb", buffering=1 << 20) as stream:
            return _header(_Cursor(file, stream))
    except OSError as e:
        raise BadFile(f"{file.name} cannot be read", e.strerror or str(e), str(file)) from e


class _Cursor:
    """A position in a header that moves forward; `subject` names the field there, for errors."""

    def __init__(self, file: Path, stream: BinaryIO):
        status = os.fstat(stream.fileno())
        self.file = file
        self.stream = stream
        self.subject = "the header"
        self.at = 0
        self.items = 0
        self.size = status.st_size
        self.stamp = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def fail(self, finding: str, *details: str, at: int | None = None) -> NoReturn:
        raise BadFile(
            f"{self.file.name}: {self.subject} {finding}",
            *details,
            f"at byte {self.at if at is None else at:,}",
        )

    def room(self, count: int, each: int):
        """Raises BadFile unless the rest of the file has room for `count` values of at least `each` bytes."""
        left = self.size - self.at
        if count * each > left:
            wanted = f"{count:,} values of at least {each}" if each > 1 else f"{count:,}"
            self.fail(
                "is cut short",
                f"it needs {wanted} bytes, the file has {left:,} left",
                "fetch that file again",
            )

    def more(self, items: int):
        """Raises BadFile if the header has too many items with these."""
        self.items += items
        if self.items > MAX_ITEMS:
            self.fail(
                "has too many items", f"found {items:,}, the limit is {MAX_ITEMS:,} in all of the header"
            )

    def take(self, size: int) -> bytes:
        self.room(size, 1)
        if self.at + size > MAX_GGUF_HEADER:
            self.fail("makes the header too large", f"the limit is {MAX_GGUF_HEADER:,} bytes")
        data = self.stream.read(size)
        self.at += len(data)
        if len(data) < size:
            raise BadFile(f"{self.file.name} became shorter while it was read", f"at byte {self.at:,}")
        return data

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, most: int = MAX_GGUF_HEADER) -> str:
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
            finding = f"is {printable(found)}, which the file has twice" if found else "has no name"
            self.fail(finding, at=start)
        return found


def _header(cursor: _Cursor) -> Header:
    tensors, keys = _start(cursor)
    metadata = _metadata(cursor, keys)
    alignment = _alignment(cursor, metadata)
    entries = _entries(cursor, tensors)
    start = _aligned(cursor.at, alignment)
    infos = [
        TensorInfo(
            name, entry.shape, entry.type, cursor.file, start + entry.offset, entry.nbytes, cursor.stamp
        )
        for name, entry in entries.items()
    ]
    _refuse_unaligned(cursor, infos, start, alignment)
    _refuse_gaps(cursor, infos, start, alignment)
    return Header(metadata, infos)


def _start(cursor: _Cursor) -> tuple[int, int]:
    """The counts of tensors and of metadata keys, after the magic bytes and the version."""
    if (magic := cursor.take(4)) != b"GGUF":
        _refuse_magic(cursor, magic)
    version = cursor.number("<I")
    if version not in VERSIONS:
        _refuse_version(cursor, version)
    tensors, keys = cursor.number("<Q"), cursor.number("<Q")
    _refuse_count(cursor, tensors, MAX_GGUF_TENSORS, 33, "tensors")
    _refuse_count(cursor, keys, MAX_KEYS, 14, "metadata keys")
    return tensors, keys


def _refuse_count(cursor: _Cursor, found: int, most: int, least: int, what: str):
    """Raises BadFile for more than `most`, or for more than the file has room for; each takes at least `least` bytes."""
    cursor.room(found, least)
    if found > most:
        cursor.fail(f"has too many {what}", f"found {found:,}, the limit is {most:,}")


def _refuse_magic(cursor: _Cursor, magic: bytes) -> NoReturn:
    name = cursor.file.name
    if magic == b"FUGG":
        raise BadFile(
            f"{name} is byte-swapped", "it begins with FUGG, expected GGUF", "fetch a little-endian file"
        )
    if magic == b"vers" and cursor.size < 1024:
        raise BadFile(f"{name} is a pointer of Git LFS, not the model", "fetch the file itself: git lfs pull")
    raise BadFile(
        f"{name} is not a GGUF file", f"it begins with {printable(magic.decode('latin-1'))}, expected GGUF"
    )


def _refuse_version(cursor: _Cursor, version: int) -> NoReturn:
    name, known = cursor.file.name, " and ".join(map(str, VERSIONS))
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
        raise BadFile(
            f"{name} is a big-endian file",
            f"known: little-endian GGUF of versions {known}",
            "fetch that instead",
        )
    if version == 1:
        raise BadFile(
            f"{name} is GGUF of version 1, which is outdated", f"known: {known}", "convert the model again"
        )
    if version > max(VERSIONS):
        raise BadFile(
            f"{name} is GGUF of version {version:,}", f"known: {known}", "this program may be too old for it"
        )
    raise BadFile(f"{name} is GGUF of version {version}, which does not exist", f"known: {known}")


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
    """A metadata value of type `kind`, inside `depth` arrays."""
    if kind in SCALARS:
        return _numbers(cursor, kind, 1)[0].item()
    if kind == STRING:
        return cursor.text()
    if kind != ARRAY:
        cursor.fail("has an unknown type", f"found type {kind:,}, known: 0 to 12", at=cursor.at - 4)
    if depth == MAX_DEPTH:
        cursor.fail("is nested too deeply", f"arrays may hold arrays, {MAX_DEPTH} deep at most")
    kind, count = cursor.number("<I"), cursor.number("<Q")
    if kind not in _LEAST:
        cursor.fail(
            "has an unknown type", f"found an array of type {kind:,}, known: 0 to 12", at=cursor.at - 12
        )
    cursor.room(count, _LEAST[kind])
    if kind in SCALARS:
        return _numbers(cursor, kind, count)
    cursor.more(count)
    return [_value(cursor, kind, depth + 1) for _ in range(count)]


def _numbers(cursor: _Cursor, kind: int, count: int) -> np.ndarray:
    start, dtype = cursor.at, np.dtype(SCALARS[kind])
    data = np.frombuffer(cursor.take(count * dtype.itemsize), np.uint8 if kind == BOOL else dtype)
    if kind == BOOL and count and data.max() > 1:
        cursor.fail(
            "holds a boolean that is neither 0 nor 1", f"found {data.max()}", at=start + int(data.argmax())
        )
    return data.astype(dtype, copy=False)


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    found = metadata.get("general.alignment", 32)
    if not 8 <= found <= MAX_ALIGNMENT or found & (found - 1):
        cursor.subject = "metadata general.alignment"
        cursor.fail("is impossible", f"found {found:,}, expected a power of two from 8 to {MAX_ALIGNMENT:,}")
    return found


# ---- tensors


class _Entry(NamedTuple):
    """A tensor as the header lists it; `offset` counts from the start of the data."""

    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


def _entries(cursor: _Cursor, count: int) -> dict[str, _Entry]:
    found: dict[str, _Entry] = {}
    for i in range(count):
        cursor.subject = f"tensor {i:,} of {count:,}"
        name = cursor.name(MAX_GGUF_NAME, found)
        cursor.subject = printable(name)
        found[name] = _entry(cursor)
    return found


def _entry(cursor: _Cursor) -> _Entry:
    shape = _shape(cursor)
    number, offset = cursor.number("<I"), cursor.number("<Q")
    if number not in _NAME_OF_TYPE:
        finding = f"{cursor.file.name}: {cursor.subject} has type {number}"
        raise Unsupported(finding, "known: " + ", ".join(TENSOR_TYPES), f"at byte {cursor.at - 12:,}")
    name = _NAME_OF_TYPE[number]
    kind = TENSOR_TYPES[name]
    if shape[-1] % kind.values:
        cursor.fail(
            "has an impossible shape",
            f"found {list(shape)}, but {name} comes in blocks of {kind.values} values",
        )
    return _Entry(shape, name, offset, prod(shape) // kind.values * kind.bytes)


def _shape(cursor: _Cursor) -> tuple[int, ...]:
    """A tensor's shape in numpy's order: the file lists the fastest axis first."""
    dimensions = cursor.number("<I")
    if not 1 <= dimensions <= MAX_GGUF_DIMENSIONS:
        cursor.fail(
            "has an impossible shape", f"found {dimensions:,} dimensions, expected 1 to {MAX_GGUF_DIMENSIONS}"
        )
    shape = tuple(cursor.number("<Q") for _ in range(dimensions))[::-1]
    if not all(0 < n < 1 << 63 for n in shape):
        cursor.fail("has an impossible shape", f"found {list(shape)}, expected positive numbers")
    return shape


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _refuse_unaligned(cursor: _Cursor, infos: list[TensorInfo], start: int, alignment: int):
    """Raises BadFile for tensors that are not aligned or reach beyond the end of the file."""
    for info in infos:
        cursor.subject, offset = printable(info.name), info.offset - start
        if offset % alignment:
            cursor.fail("is not aligned", f"its offset is {offset:,}, expected a multiple of {alignment}")
        if info.offset + info.nbytes > cursor.size:
            needs = f"it takes {info.nbytes:,} bytes from {info.offset:,}, the file has {cursor.size:,}"
            cursor.fail(
                "reaches beyond the end of the file",
                needs,
                "the download stopped early, or the header is damaged",
            )


def _refuse_gaps(cursor: _Cursor, infos: list[TensorInfo], start: int, alignment: int):
    """Raises BadFile unless the tensors follow each other from `start`, each padded to the alignment, to the end of the file."""
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
