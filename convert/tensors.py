"""What is to be written: each tensor under its stored name, where it comes from, and what becomes of its number format."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base import axes, qtensor
from mla_jax.base.qtensor import QTensor
from mla_jax.weights import store_names
from mla_jax.weights.load import PLAIN, Checkpoint
from mla_jax.weights.names import Piece, first_half, second_half
from mla_jax.weights.quantize import quantize
from mla_jax.weights.safetensors import DTYPES

Parts = tuple[np.ndarray, ...]
DTYPE_NAMES = {"keep": "", "bf16": "BF16", "f32": "F32", "int8": "int8"}
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
    part: Callable
    stored: str  # the format and, of a piece, the shape in the source
    stored_shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.format, self.shape)

    @property
    def workspace(self) -> int:
        """What reading and converting one piece takes besides."""
        raw, values = nbytes(self.stored, self.stored_shape), prod(self.stored_shape)
        return raw + (0 if self.format == self.stored else 3 * 4 * values)


def nbytes(format: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * np.dtype(DTYPES[format]).itemsize if format in DTYPES else qtensor.nbytes(format, shape)


def jobs(checkpoint: Checkpoint, dtype: str) -> list[Job]:
    """Every tensor of the model, layer by layer; `dtype` is keep, bf16, f32 or int8."""
    found = {}
    for path, source in checkpoint.sources.items():
        if (place := store_names.stored(path, source, checkpoint.config)) is None:
            continue
        name, words = place
        slot, stored = checkpoint.slots[path].get_metadata(), checkpoint.format_of(source)
        entry = checkpoint.source.tensors[source.names[0]]
        piece = entry.shape[1:] if source.pieces[0].index is not None else entry.shape
        linear = slot["packs"] and path not in ("embed", "head")
        layer = int(name.split(".")[1]) if name.startswith("layers.") else None
        part = source.part if source.part in (first_half, second_half) else _whole
        shape, format = axes.shape(checkpoint.config, words), _format(dtype, stored, linear, slot["exact"])
        found[name] = Job(name, words, layer, format, shape, source.pieces, source.stacked, part, stored, piece)
    return sorted(found.values(), key=lambda job: -1 if job.layer is None else job.layer)


def _whole(part: np.ndarray, _: object) -> np.ndarray:
    return part


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
    filled, unsound = None, 0
    for i, piece in enumerate(job.pieces):
        raw = tuple(job.part(part, None) for part in checkpoint.source.read(*piece))
        unsound += int(_unsound(raw, job.stored))
        parts = converted(raw, job, job.shape[1:] if job.stacked else job.shape)
        if not job.stacked:
            return parts, unsound
        if filled is None:
            filled = tuple(np.empty((len(job.pieces), *part.shape), part.dtype) for part in parts)
        for stack, part in zip(filled, parts, strict=True):
            stack[i] = part
    assert filled is not None
    return filled, unsound


def converted(raw: Parts, job: Job, shape: tuple[int, ...]) -> Parts:
    """A piece in the job's format; untouched if that is its own."""
    if job.format == job.stored:
        return raw
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


@partial(jax.jit, static_argnums=1)
def _unsound(raw: tuple, stored: str) -> jax.Array:
    """How many values or blocks hold NaN or infinity."""
    return jnp.sum(~jnp.isfinite(raw[0])) if stored in PLAIN else qtensor.unsound(stored, raw)
