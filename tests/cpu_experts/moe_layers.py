"""Random layers, batches, and how far an output is from the specification's."""

import ctypes
import hashlib
import mmap
import os
from functools import cache
from typing import NamedTuple

import numpy as np

from cpu_experts import blocks, layout, reference

SANITIZED = "CPU_EXPERTS_TESTED" in os.environ  # test_sanitizers.py has started this process


class Batch(NamedTuple):
    x: np.ndarray
    ids: np.ndarray
    weights: np.ndarray


def random_layer(experts: int, model: int, width: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = [(experts, width, model)] * 2 + [(experts, model, width)]
    return [rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5) for shape in shapes]


def fitting(precision: str, *sizes: int) -> list[int]:
    """The sizes, or where the precision has blocks of 256 inputs the next that these fill."""
    block = blocks.VALUES if precision in blocks.BYTES else 1
    return [-(-size // block) * block for size in sizes]


def random_batch(tokens: int, model: int, experts: int, chosen: int, seed: int = 1) -> Batch:
    """Some ids stand for no expert."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, experts + 1, (tokens, chosen)).astype(np.int32)
    return Batch(rng.standard_normal((tokens, model), np.float32), ids, rng.random((tokens, chosen), np.float32))


def parts_of(layer: list[np.ndarray], precision: str) -> list[layout.Parts]:
    return [layout.quantize(w, precision) for w in layer]


@cache
def random_parts(precision: str, experts: int, model: int, width: int) -> list[layout.Parts]:
    """Of a random layer, quantised once for all instruction sets."""
    made = parts_of(random_layer(experts, model, width), precision)
    for matrix in made:
        for part in matrix:
            part.flags.writeable = False
    return made


_specified: dict[bytes, np.ndarray] = {}


def specified(batch: Batch, parts: list[layout.Parts], *precisions: str | None) -> np.ndarray:
    """The specification's result, computed once for all instruction sets with the same inputs."""
    digest = hashlib.blake2b(repr((batch.x.shape, batch.ids.shape, [[p.shape for p in m] for m in parts], precisions)).encode())
    for array in (*batch, *(part for matrix in parts for part in matrix)):
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    key = digest.digest()
    if key not in _specified:
        _specified[key] = reference.forward(*batch, *parts, *precisions)
    return _specified[key]


def distance(
    out: np.ndarray, batch: Batch, parts: list[layout.Parts], precision: str, down_precision: str | None = None
) -> float:
    """The relative error, or a fifth of the worst row's (relative to the root mean row). Rows without experts must be zero."""
    expected = specified(batch, parts, precision, down_precision)
    size = np.linalg.norm(expected, axis=1)
    assert not out[size == 0].any()
    error, size = np.linalg.norm(out.astype(np.float32) - expected, axis=1)[size > 0], size[size > 0]
    if not len(size):
        return 0.0
    mean = np.sqrt(np.mean(size**2))
    return float(max(np.sqrt(np.mean(error**2)), error.max() / 5) / mean)


def guarded(size: int) -> np.ndarray:
    """Bytes that end at a page which may not be touched. Never given back: an array may outlive all that could do it."""
    page = mmap.PAGESIZE
    held = -(-size // page) * page
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    base = libc.mmap(None, held + page, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert libc.mprotect(base + held, page, 0) == 0
    return np.frombuffer((ctypes.c_char * size).from_address(base + held - size), np.uint8)


def at_a_page_end(array: np.ndarray) -> np.ndarray:
    """A copy of it there."""
    copy = guarded(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
