"""Changes for the corpora: a fault is a valid folder, changed by a named mutation, with the error it must raise and its words.

A mutation is a function of the folder. The same tables seed the fuzzers."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mla_jax.base.errors import MlaJaxError


class Fault(NamedTuple):
    name: str
    mutate: Callable[[Path], object]
    error: type[MlaJaxError]
    words: tuple[str, ...]
    base: str = "single"
    reads: bool = False  # whether it can be seen only in the weights themselves


class Corpus(NamedTuple):
    """`write_valid` makes the folders that mutations start from, `read` is what must refuse them afterwards."""

    write_valid: Callable[[Path], object]
    read: Callable[[Path], object]
    faults: tuple[Fault, ...]
    memory: int = 256 << 20  # bytes that may be taken before the refusal


def raw(edit: Callable[[bytes], bytes], file: str):
    """Changes the bytes of a file."""

    def mutate(folder: Path):
        (folder / file).write_bytes(edit((folder / file).read_bytes()))

    return mutate


def sparse(file: str, size: int, start: bytes = b""):
    """A file of `size` bytes that takes no room."""

    def mutate(folder: Path):
        (folder / file).write_bytes(start)
        os.truncate(folder / file, size)

    return mutate


def remove(*files: str):
    return lambda folder: [(folder / file).unlink() for file in files]


def rename(*moves: tuple[str, str]):
    return lambda folder: [(folder / old).rename(folder / new) for old, new in moves]


def copy(file: str, to: str):
    return lambda folder: (folder / to).write_bytes((folder / file).read_bytes())


def pipe_instead_of(file: str):
    """Whoever opens it without looking waits for ever."""
    return both(remove(file), lambda folder: os.mkfifo(folder / file))


def folder_instead_of(file: str):
    return both(remove(file), lambda folder: (folder / file).mkdir())


def link_to_itself(file: str):
    return both(remove(file), lambda folder: (folder / file).symlink_to(file))


def both(*mutations):
    return lambda folder: [mutate(folder) for mutate in mutations]
