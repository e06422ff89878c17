"""What is to be written: each tensor under its stored name, where it comes from, and what becomes of its number format."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base import axes, gguf_blocks, qtensor
from mla_jax.base.qtensor import QTensor
from mla_jax.weights import orbax_names
from mla_jax.weights.fill import PLAIN
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.names import Origin, PartOf, Piece, first_half, second_half, whole
from mla_jax.weights.quantize import quantize
from mla_jax.weights.safetensors import DTYPES

Parts = tuple[np.ndarray, ...]
DTYPE_NAMES = {"keep": "", "bf16": "BF16", "f32": "F32", "int8": "int8"}
EXPONENTS = {
    "F64": (np.uint64, 0x7FF << 52),
    "F32": (np.uint32, 0xFF << 23),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
E4M3_SCALE = np.finfo(np.float32).max / 448  # a scale that takes no value to infinity
CACHED = 1 << 17  # values looked at together
READERS = 2  # threads that read and check a stack's pieces: one waits for the disk while the other works
ROWS = 1 << 20  # values converted together: what a core's cache holds
STEP = 256 << 20  # bytes written at once, unless one tensor has more


@dataclass(frozen=True)
class Job:
    """One tensor to write. `pieces` are read one by one and, if `stacked`, put one upon the other; `part` is cut of each."""

    name: str
    axes: tuple[str, ...]
    layer: int | None
    format: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stacked: bool
    part: PartOf
    stored: str  # the format and, of a piece, the shape in the source
    stored_shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.format, self.shape)

    @property
    def workspace(self) -> int:
        """What reading and converting takes beside the tensor itself."""
        raw, piece = nbytes(self.stored, self.stored_shape), self.shape[1:] if self.stacked else self.shape
        extra = 0 if self.format == self.stored else 4 * 4 * min(ROWS, prod(piece))
        held = raw + extra + nbytes(self.format, piece) * (extra > 0)
        return READERS * held if self.stacked else (raw + extra) * (extra > 0)


def nbytes(format: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * np.dtype(DTYPES[format]).itemsize if format in DTYPES else qtensor.nbytes(format, shape)


def jobs(checkpoint: Checkpoint, dtype: str) -> list[Job]:
    """Every tensor of the model, layer by layer; `dtype` is keep, bf16, f32 or int8."""
    found = {}
    for path, source in checkpoint.sources.items():
        if (place := orbax_names.stored(path, source, checkpoint.config)) is None:
            continue
        name, words = place
        slot, stored = checkpoint.slots[path].get_metadata(), checkpoint.format_of(source)
        entry = checkpoint.source.tensors[source.names[0]]
        piece = entry.shape[1:] if source.pieces[0].index is not None else entry.shape
        linear = slot["packs"] and path not in ("embed", "head")
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        shape, format = axes.shape(checkpoint.config, words), _format(dtype, stored, linear, slot["exact"])
        found[name] = Job(name, words, layer, format, shape, source.pieces, source.stacked, cut(source), stored, piece)
    return sorted(found.values(), key=lambda job: -1 if job.layer is None else job.layer)


def cut(source: Origin) -> PartOf:
    """What is cut out of each piece when it is stored: halves of joined experts, while kv_b_proj stays whole."""
    return source.part if source.part in (first_half, second_half) else whole


def _format(dtype: str, stored: str, linear: bool, exact: bool) -> str:
    """The format to write: `exact` weights stay float32, and int8 is for the matrices of linear layers alone."""
    if dtype == "keep":
        return stored
    if dtype == "int8" and not linear:
        return stored if stored in PLAIN else "BF16"
    return "F32" if exact else DTYPE_NAMES[dtype]


def steps(wanted: Iterable[Job]) -> Iterator[list[Job]]:
    """Tensors of one layer that are written together, about STEP bytes of them."""
    step: list[Job] = []
    for job in wanted:
        if step and (job.layer != step[0].layer or sum(j.nbytes for j in step) + job.nbytes > STEP):
            yield step
            step = []
        step.append(job)
    if step:
        yield step


def read(job: Job, checkpoint: Checkpoint) -> tuple[Parts, int]:
    """The parts of a tensor as they are to be written, and how many of its values (of packed ones: blocks) are not finite."""
    parts, unsound = _piece(job, checkpoint, 0)
    if not job.stacked:
        return parts, unsound
    stacks = tuple(np.empty((len(job.pieces), *part.shape), part.dtype) for part in parts)

    def put(i: int, parts: Parts, unsound: int) -> int:
        for stack, part in zip(stacks, parts, strict=True):
            stack[i] = part
        return unsound

    put(0, parts, unsound)
    with ThreadPoolExecutor(READERS) as pool:
        return stacks, unsound + sum(pool.map(lambda i: put(i, *_piece(job, checkpoint, i)), range(1, len(job.pieces))))


def _piece(job: Job, checkpoint: Checkpoint, i: int) -> tuple[Parts, int]:
    raw = tuple(job.part(part, checkpoint.config) for part in checkpoint.source.read(*job.pieces[i]))
    return converted(raw, job, job.shape[1:] if job.stacked else job.shape), unsound_in(raw, job.stored)


def converted(raw: Parts, job: Job, shape: tuple[int, ...]) -> Parts:
    """A piece in the job's format, made of it some rows at a time; untouched if that is its own."""
    if job.format == job.stored:
        return raw
    block = qtensor.format_of(job.stored).block[0] if job.stored not in PLAIN and len(shape) == 2 else 1
    blocks, filled = max(1, ROWS // (block * prod(shape[1:]))), ()
    for i in range(0, -(-shape[0] // block), blocks):
        start, end = i * block, min((i + blocks) * block, shape[0])
        some = tuple(part[i : i + blocks] if len(part) < shape[0] else part[start:end] for part in raw)
        parts = _converted(some, job, (end - start, *shape[1:]))
        filled = filled or tuple(np.empty((shape[0], *part.shape[1:]), part.dtype) for part in parts)
        for all_rows, part in zip(filled, parts, strict=True):
            all_rows[start:end] = part
    return filled


def _converted(raw: Parts, job: Job, shape: tuple[int, ...]) -> Parts:
    if job.format in PLAIN:
        return (plain(raw, job.stored, shape, DTYPES[job.format]),)
    values = plain(raw, job.stored, shape, np.float32)
    return tuple(np.asarray(part) for part in quantize(values, job.format).parts)


def plain(raw: Parts, stored: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The numbers of a tensor of `shape`, packed or not, in another dtype."""
    return np.asarray(_plain(raw, stored, shape, np.dtype(dtype)))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _plain(raw: tuple, stored: str, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    value = raw[0] if stored in PLAIN else qtensor.dequantize(QTensor(stored, raw, shape))
    return value.astype(dtype)


def unsound_in(raw: Parts, stored: str) -> int:
    """How many values, of packed ones blocks, hold NaN or infinity; in numpy, for XLA sums truths at a twentieth of the rate."""
    if stored in EXPONENTS:
        return _counted(raw[0], *EXPONENTS[stored])
    if stored.startswith("fp8_block") and (np.abs(raw[1]) < E4M3_SCALE).all():
        return _counted(raw[0], np.uint8, 0x7F)
    if halves := gguf_blocks.TYPES[stored].halves if stored in gguf_blocks.TYPES else ():
        return int(np.count_nonzero(np.any([raw[0][..., at + 1] & 0x7C == 0x7C for at in halves], axis=0)))
    return int(qtensor.unsound(stored, tuple(map(jnp.asarray, raw))))


def _counted(values: np.ndarray, unsigned: type, bits: int) -> int:
    """How many of the values have all of these `bits` set, counted by pieces that a core's cache holds."""
    numbers, found = values.reshape(-1).view(unsigned), 0
    for start in range(0, numbers.size, CACHED):
        masked = numbers[start : start + CACHED] & unsigned(bits)
        if masked.max() == bits:  # seldom: the largest is found in half the time that counting takes
            found += int(np.count_nonzero(masked == bits))
    return found
