"""Finds a damaged shared library before the system maps it: in a file that was cut short, SIGBUS ends the process at the first
access to a missing page.

A library that the build installed ends with a seal, which loaders ignore: a mark, and the SHA-256 of all bytes before the mark.
The length of other libraries is compared with their ELF headers (System V ABI, chapters 4 and 5)."""

import hashlib
import struct
from pathlib import Path
from typing import NamedTuple

MARK = b"\x93cpu_experts sha256:"
SEAL_BYTES = len(MARK) + hashlib.sha256().digest_size

ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<16x HHI QQQ I HHHHHH")
# p_type, p_flags, p_offset, p_vaddr, p_paddr, p_filesz, p_memsz, p_align
_SEGMENT = struct.Struct("<II QQQQQQ")
_LOAD = 1  # the p_type of a segment that is mapped


class _Header(NamedTuple):
    """Elf64_Ehdr after its 16 bytes of identification."""

    type: int
    machine: int
    version: int
    entry: int
    phoff: int
    shoff: int
    flags: int
    ehsize: int
    phentsize: int
    phnum: int
    shentsize: int
    shnum: int
    shstrndx: int


def sealed(contents: bytes) -> bytes:
    """A library's bytes followed by their seal."""
    return contents + MARK + hashlib.sha256(contents).digest()


def damage(path: Path) -> str | None:
    """The damage of a library's file, or None; raises OSError if it cannot be read.

    The system's loader checks files of other formats than 64-bit little-endian ELF."""
    contents = path.read_bytes()
    body, seal = contents[:-SEAL_BYTES], contents[-SEAL_BYTES:]
    if seal.startswith(MARK):
        return None if sealed(body) == contents else "its checksum is not the one that the build wrote"
    if not contents.startswith(ELF64_LITTLE_ENDIAN):
        return None
    described = _described_bytes(contents)
    if described > len(contents):
        return f"it has {len(contents):,} bytes, but its headers describe {described:,}"
    return None


def _described_bytes(contents: bytes) -> int:
    """The end of the last table or segment in the headers of an ELF file."""
    if len(contents) < _HEADER.size:
        return _HEADER.size
    header = _Header._make(_HEADER.unpack_from(contents))
    segments_end = header.phoff + header.phnum * header.phentsize
    sections_end = header.shoff + header.shnum * header.shentsize
    tables_end = max(segments_end, sections_end)
    if tables_end > len(contents) or header.phentsize != _SEGMENT.size:
        return tables_end
    ends = [tables_end]
    for kind, _, offset, _, _, size, _, _ in _SEGMENT.iter_unpack(contents[header.phoff : segments_end]):
        if kind == _LOAD:
            ends.append(offset + size)
    return max(ends)
