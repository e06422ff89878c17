"""A layer's packed weights as a file that is mapped and never read in: a header, then the panels of layout.py as they lie there.

    header     magic, version; formats, X, D and F; of each section offset, bytes and CRC-32; the CRC-32 of all that
    sections   gate and up as one, then down, each from a huge page of its own; in between zeros, which a sparse file lacks

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
VERSION = 1  # raised with the header, and with any byte that layout.py packs otherwise
# A huge page. From 4,096 bytes on it would be mapped as well, but what is written in chunks that start at one lies in the page
# cache as huge pages, and is mapped by them: of 530 MiB nearly all, else three quarters (ext4 of Linux 6.18).
ALIGN = 2 << 20
CHUNK = 4 * ALIGN  # summed, then written: it is still in the processor's cache, and an interrupt comes in between
MOST = 1 << 16  # of X, D and F: the library's
AGAIN = "save the layer again"

_HEADER = struct.Struct("<8sI 16s16s 3I QQI QQI")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_NAMES = ("gate and up", "down")


class Packed(NamedTuple):
    """X, D and F; the formats of gate and up, and of down; the packed bytes of both, each `[X panels bytes]`."""

    shape: tuple[int, int, int]
    precisions: tuple[str, str]
    sections: tuple[np.ndarray, np.ndarray]


class Section(NamedTuple):
    """Where packed bytes lie in a file."""

    offset: int
    shape: tuple[int, int, int]

    @property
    def end(self) -> int:
        experts, panels, size = self.shape
        return self.offset + experts * panels * size


def places(shape: tuple[int, int, int], precisions: tuple[str, str]) -> tuple[Section, Section]:
    """The two sections of a layer of X, D and F; raises ValueError where a format has none of that size."""
    experts, model, width = shape
    for precision, n, k in zip(precisions, (width, model), (model, width), strict=True):
        layout.part_shapes(precision, n, k)
    panels = -(-width // layout.TILE), -(-model // layout.PANEL)
    sizes = (layout.panel_bytes(precision, k)[2] for precision, k in zip(precisions, (model, width), strict=True))
    first, second = ((experts, *each) for each in zip(panels, sizes, strict=True))
    gate_up = Section(ALIGN, first)
    return gate_up, Section(-(-gate_up.end // ALIGN) * ALIGN, second)


def write(path: Path, packed: Packed) -> None:
    """In one step: under another name until all of it is on the disk. Killed amid it, a `.partial` beside the path is left."""
    partial = path.with_name(f"{path.name}.{os.urandom(4).hex()}.partial")  # of this call alone: two may write at once
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
    """The header comes last, with the sections' checksums."""
    fields = []
    for section, data in zip(places(*packed[:2]), packed.sections, strict=True):
        assert data.shape == section.shape
        file.seek(section.offset)
        fields += section.offset, data.nbytes, _written(file, data)
    file.seek(0)
    header = _HEADER.pack(MAGIC, VERSION, *(p.encode() for p in packed.precisions), *packed.shape, *fields)
    _write_all(file, memoryview(header + _CHECKSUM.pack(zlib.crc32(header))))


def _written(file: FileIO, data: np.ndarray) -> int:
    """The checksum."""
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
    """What a file holds, mapped and so not writable; nothing of it is read but the header, unless its checksums are asked for.

    Raises ValueError for what is no such file, or damaged; Unsupported for another version's."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would have opening wait
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
    # No advice. By MADV_HUGEPAGE a cold file's first token takes half the time, but the first use of all experts twice; WILLNEED
    # reads some MiB at most, and RANDOM page after page, in ten times the time. With a warm page cache there is no difference.
    whole, sections = np.frombuffer(memory, np.uint8), places(shape, precisions)
    packed = Packed(shape, precisions, tuple(whole[s.offset : s.end].reshape(s.shape) for s in sections))
    if verify:
        _verify(path, packed, checksums)
    return packed


def _verify(path: Path, packed: Packed, checksums: tuple[int, int]) -> None:
    for name, data, expected in zip(_NAMES, packed.sections, checksums, strict=True):
        found = 0
        for chunk in _chunks(data):
            found = zlib.crc32(chunk, found)
        if found != expected:
            raise ValueError(f"{path}: {name}: checksum {found:08x}, expected {expected:08x}: damaged; {AGAIN}")


def _header(path: Path, raw: bytes, size: int) -> tuple[tuple[int, int, int], tuple[str, str], tuple[int, int]]:
    """X, D and F, the formats, and the sections' checksums, where all in it agrees with itself and the file's size."""
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path}: {len(raw)} bytes, but a header has {HEADER_BYTES}: cut short, or no file of packed experts")
    magic, version, *rest = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise ValueError(f"{path}: starts with {magic!r}, expected {MAGIC!r}: no file of packed experts, as Experts.save makes")
    if version != VERSION:
        raise Unsupported(f"{path}: version {version} of packed experts, expected {VERSION}: {AGAIN}, with this library")
    checksum, (expected,) = zlib.crc32(raw[: _HEADER.size]), _CHECKSUM.unpack_from(raw, _HEADER.size)
    if checksum != expected:
        raise ValueError(f"{path}: header: checksum {checksum:08x}, expected {expected:08x}: damaged; {AGAIN}")
    precisions = tuple(name.rstrip(b"\0").decode("ascii", "backslashreplace") for name in rest[:2])
    shape, sections = tuple(rest[2:5]), (rest[5:8], rest[8:])
    _agree(path, shape, precisions, sections, size)
    return shape, precisions, tuple(checksum for *_, checksum in sections)


def _agree(path: Path, shape: tuple, precisions: tuple, found: tuple[list[int], list[int]], size: int) -> None:
    """Raises ValueError where what a header says of both sections (offset, bytes, checksum) is not what follows from the rest."""
    for precision in precisions:
        if precision not in layout.FORMATS:
            raise ValueError(f"{path}: precision {precision!r}, must be one of {', '.join(layout.FORMATS)}")
    if not all(1 <= n <= MOST for n in shape):
        raise ValueError(f"{path}: {shape} experts, model and width, each must be 1 to {MOST}")
    try:
        sections = places(shape, precisions)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    for name, (offset, length, _), section in zip(_NAMES, found, sections, strict=True):
        if (offset, offset + length) != (section.offset, section.end):
            expected = f"{section.end - section.offset:,} at {section.offset:,}"
            raise ValueError(f"{path}: {name}: {length:,} bytes at {offset:,}, must be {expected} for {shape} in {precisions}")
    if size != sections[-1].end:
        how = "cut short" if size < sections[-1].end else "something was added"
        raise ValueError(f"{path}: {size:,} bytes, must be {sections[-1].end:,}: {how}; {AGAIN}")
