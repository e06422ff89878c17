"""How parts of tensors are cut into chunks, which of them hold a box, and boxes from chunks. Knows no Orbax and no files."""

from collections.abc import Iterable
from itertools import accumulate, groupby
from math import prod

import numpy as np
import xxhash

from mla_jax.base.qtensor import Shape
from mla_jax.weights.boxes import Box, box_shape, common, slices
from mla_jax.weights.orbax_manifest import StoredChunk, StoredPart, grid

# Bytes of a chunk that no mesh cuts smaller; glibc maps 32 MiB and more anew each time, at half the rate
MAX_CHUNK = 30 << 20
BATCH = 256 << 20  # bytes that are read at once


def chunk_shape(part: np.ndarray, shards: Shape) -> Shape:
    """A device's share; if no mesh axis cuts the rows, they are cut into chunks of at most MAX_CHUNK bytes."""
    chunk = [-(-size // count) for size, count in zip(part.shape, shards, strict=True)]
    if chunk and shards[0] == 1:
        chunk[0] = min(chunk[0], max(1, MAX_CHUNK // (part.itemsize * prod(chunk[1:]))))
    return tuple(chunk)


def in_chunks(part: np.ndarray, chunk: Shape) -> tuple[StoredPart, list[np.ndarray]]:
    """A part's entry in the manifest, and the contents of its chunks."""
    pieces = [np.asarray(part[slices(box)], order="C") for box in grid(part.shape, chunk)]
    return StoredPart(part.dtype.name, part.shape, chunk, tuple(map(checksum, pieces))), pieces


def overlapping(chunks: list[StoredChunk], boxes: set[Box]) -> list[StoredChunk]:
    return [chunk for chunk in chunks if any(common(chunk.box, box) is not None for box in boxes)]


def batches(chunks: list[StoredChunk]) -> list[list[StoredChunk]]:
    """Consecutive chunks in groups of about BATCH bytes."""
    reached = accumulate(chunk.nbytes for chunk in chunks)
    groups = groupby(zip(reached, chunks, strict=True), key=lambda pair: pair[0] // BATCH)
    return [[chunk for _, chunk in group] for _, group in groups]


def assembled(boxes: set[Box], pieces: Iterable[tuple[StoredChunk, np.ndarray]]) -> dict[Box, np.ndarray]:
    """The contents of `boxes`; a box that is one chunk is that chunk, not a copy."""
    filled: dict[Box, np.ndarray] = {}
    for chunk, value in pieces:
        for box in boxes:
            if box == chunk.box:
                filled[box] = value
                continue
            both = common(chunk.box, box)
            if both is None:
                continue
            if box not in filled:
                filled[box] = np.empty(box_shape(box), value.dtype)
            filled[box][slices(both, box)] = value[slices(both, chunk.box)]
    return filled


def checksum(array: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(array.reshape(-1).view(np.uint8).data)
