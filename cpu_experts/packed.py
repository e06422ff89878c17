"""A file of one layer's packed weights, which is mapped: a header, then the panels of layout.py.

    header     magic, version; formats, X, D and F; the offset, bytes and CRC-32 of each section; the CRC-32 of the header
    sections   gate and up as one, then down; each starts at a multiple of 2 MiB; zeros in between, holes in a sparse file

Numbers are little-endian. Knows numpy only."""

import contextlib
import errno
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cpu_experts import layout
from cpu_experts.library import Unsupported

MAGIC = b"\x93experts"
VERSION = 1  # changes with the header, and with the layout of layout.py
# The size of a huge page. A mapping needs only 4,096 bytes, but the page cache keeps chunks that are written from such an offset
# as huge pages: nearly all of 530 MiB, else three quarters (ext4 of Linux 6.18).
ALIGN = 2 << 20
# Bytes that are checksummed, then written while in the processor's cache; Ctrl-C takes effect between two chunks
CHUNK = 4 * ALIGN
MOST = 1 << 16  # the library's limit of X, D and F
AGAIN = "save the layer again"

_HEADER = struct.Struct("<8sI 16s16s 3I QQI QQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_NAMES = ("gate and up", "down")


class Packed(NamedTuple):
    """X, D and F; the formats of gate and up, and of down; the packed bytes of each, `[X panels bytes]`."""

    shape: tuple[int, int, int]
    precisions: tuple[str, str]
    sections: tuple[np.ndarray, np.ndarray]


class Section(NamedTuple):
    """The position of packed bytes in a file."""

    offset: int
    shape: tuple[int, int, int]

    @property
    def end(self) -> int:
        experts, panels, size = self.shape
        return self.offset + experts * panels * size


def places(shape: tuple[int, int, int], precisions: tuple[str, str]) -> tuple[Section, Section]:
    """The two sections of a layer with the sizes X, D and F; raises ValueError if a format cannot have such a matrix."""
    experts, model, width = shape
    layout.part_shapes(precisions[0], width, model)
    layout.part_shapes(precisions[1], model, width)
    gate_up_panels = (experts, -(-width // layout.TILE), layout.panel_bytes(precisions[0], model)[2])
    down_panels = (experts, -(-model // layout.PANEL), layout.panel_bytes(precisions[1], width)[2])
    gate_up = Section(ALIGN, gate_up_panels)
    return gate_up, Section(-(-gate_up.end // ALIGN) * ALIGN, down_panels)


def write(path: Path, packed: Packed) -> None:
    """Writes the file under a temporary name and renames it once it is on disk. A kill leaves the `.partial` file there."""
    # Unique: two processes may write at once
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")
    try:
        with open(partial, "xb", buffering=0) as file:
            _fill(file, packed)
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        what = f"{error.strerror}: {sum(s.nbytes for s in packed.sections):,} bytes of packed weights were not saved"
        raise OSError(error.errno, what, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _fill(file: FileIO, packed: Packed) -> None:
    """Writes the sections, then the header, which holds their checksums."""
    fields = []
    for section, data in zip(places(*packed[:2]), packed.sections, strict=True):
        assert data.shape == section.shape
        file.seek(section.offset)
        fields += section.offset, data.nbytes, _written(file, data)
    file.seek(0)
    header = _HEADER.pack(MAGIC, VERSION, *(p.encode() for p in packed.precisions), *packed.shape, *fields)
    _write_all(file, memoryview(header + _CHECKSUM.pack(zlib.crc32(header))))


def _written(file: FileIO, data: np.ndarray) -> int:
    """Writes `data` and returns its checksum."""
    checksum = 0
    for chunk in _chunks(data):
        checksum = zlib.crc32(chunk, checksum)
        _write_all(file, chunk)
    return checksum


def _write_all(file: FileIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _chunks(data: np.ndarray) -> Iterator[memoryview]:
    flat = data.reshape(-1).data
    return (flat[i : i + CHUNK] for i in range(0, len(flat), CHUNK))


def read(path: Path, verify: bool = False) -> Packed:
    """Maps a file read-only. Reads only the header, unless `verify` compares the checksums.

    Raises ValueError for a damaged file or one of another kind, Unsupported for another version."""
    # Without O_NONBLOCK, opening a pipe would wait
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path}: not a regular file")
        shape, precisions, checksums = _header(path, os.pread(file, HEADER_BYTES, 0), status.st_size)
        memory = mmap.mmap(file, status.st_size, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise MemoryError(f"{path}: {status.st_size:,} bytes to map: {error.strerror}") from None
        raise
    finally:
        os.close(file)
    # No madvise. With a cold page cache, MADV_HUGEPAGE halves the time of the first token but doubles the time of the first use
    # of all experts. MADV_WILLNEED reads a few MiB at most. MADV_RANDOM reads page by page, ten times as slow. With a warm page
    # cache none makes a difference.
    contents = np.frombuffer(memory, np.uint8)
    sections = tuple(contents[s.offset : s.end].reshape(s.shape) for s in places(shape, precisions))
    packed = Packed(shape, precisions, sections)
    if verify:
        _verify(path, packed, checksums)
    return packed


def _verify(path: Path, packed: Packed, checksums: tuple[int, int]) -> None:
    for name, data, expected in zip(_NAMES, packed.sections, checksums, strict=True):
        found = 0
        for chunk in _chunks(data):
            found = zlib.crc32(chunk, found)
        if found != expected:
            raise ValueError(
                f"{path}: {name}: checksum {found:08x}, expected {expected:08x}: damaged; {AGAIN}"
            )


def _header(
    path: Path, raw: bytes, size: int
) -> tuple[tuple[int, int, int], tuple[str, str], tuple[int, int]]:
    """X, D and F, the formats, and the checksums of the sections; raises unless the header is sound and fits the file's size."""
    _check_kind(path, raw)
    _, _, *names_and_sizes = _HEADER.unpack_from(raw)
    precisions = tuple(name.rstrip(b"\0").decode("ascii", "backslashreplace") for name in names_and_sizes[:2])
    shape = tuple(names_and_sizes[2:5])
    gate_up, down = names_and_sizes[5:8], names_and_sizes[8:]  # offset, bytes, checksum
    expected = _sections(path, shape, precisions)
    for name, (offset, length, _), section in zip(_NAMES, (gate_up, down), expected, strict=True):
        if (offset, offset + length) != (section.offset, section.end):
            right = f"{section.end - section.offset:,} at {section.offset:,}"
            raise ValueError(
                f"{path}: {name}: {length:,} bytes at {offset:,}, must be {right} for {shape} in {precisions}"
            )
    _check_size(path, size, expected[-1].end)
    return shape, precisions, (gate_up[2], down[2])


def _check_size(path: Path, found: int, expected: int) -> None:
    if found < expected:
        raise ValueError(f"{path}: {found:,} bytes, must be {expected:,}: cut short; {AGAIN}")
    if found > expected:
        raise ValueError(f"{path}: {found:,} bytes, must be {expected:,}: something was added; {AGAIN}")


def _check_kind(path: Path, raw: bytes) -> None:
    """Raises unless a file starts with a whole header of this version."""
    if len(raw) < HEADER_BYTES:
        raise ValueError(
            f"{path}: {len(raw)} bytes, but a header has {HEADER_BYTES}: cut short, or no file of packed experts"
        )
    magic, version, *_ = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise ValueError(
            f"{path}: starts with {magic!r}, expected {MAGIC!r}: no file of packed experts, as Experts.save makes"
        )
    if version != VERSION:
        raise Unsupported(
            f"{path}: version {version} of packed experts, expected {VERSION}: {AGAIN}, with this library"
        )
    found = zlib.crc32(raw[: _HEADER.size])
    (expected,) = _CHECKSUM.unpack_from(raw, _HEADER.size)
    if found != expected:
        raise ValueError(f"{path}: header: checksum {found:08x}, expected {expected:08x}: damaged; {AGAIN}")


def _sections(path: Path, shape: tuple, precisions: tuple) -> tuple[Section, Section]:
    """The sections that a header's sizes and formats require; raises ValueError if these are impossible."""
    for precision in precisions:
        if precision not in layout.FORMATS:
            raise ValueError(f"{path}: precision {precision!r}, must be one of {', '.join(layout.FORMATS)}")
    if not all(1 <= n <= MOST for n in shape):
        raise ValueError(f"{path}: {shape} experts, model and width, each must be 1 to {MOST}")
    try:
        return places(shape, precisions)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
