"""The tensors to write: their stored names, their sources, and the conversion of their number format."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base import axes, gguf_blocks, qtensor
from mla_jax.base.qtensor import QTensor
from mla_jax.weights import orbax_names
from mla_jax.weights.fill import PLAIN_DTYPES
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.names import Origin, PartOf, Piece, first_half, second_half, unchanged
from mla_jax.weights.quantize import quantize
from mla_jax.weights.safetensors import STORED_DTYPES

Parts = tuple[np.ndarray, ...]
DTYPE_NAMES = {"bf16": "BF16", "f32": "F32"}
QUANTIZED = {
    "int8": "int8",
    "int4_g32": "int4_g32",
    "int4_g128": "int4_g128",
    "fp8": "fp8_block",
    "q4_k": "Q4_K",
}
RAGGED = {"Q4_K": "int4_g32"}  # of a matrix whose rows the format cannot hold
EXPONENTS = {
    "F64": (np.uint64, 0x7FF << 52),
    "F32": (np.uint32, 0xFF << 23),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
E4M3_SCALE = np.finfo(np.float32).max / 448  # smaller scales make no value infinite
CACHED = 1 << 17  # values checked at a time
READERS = 2  # threads that read and check a stack's pieces: one waits for the disk while the other computes
ROWS = 1 << 20  # values converted at a time: a core's cache holds them
STEP = 256 << 20  # bytes written at once, unless one tensor has more


@dataclass(frozen=True)
class Job:
    """One tensor to write. `pieces` are read one by one, `part` takes its share of each, and they are stacked if `stacked`."""

    name: str
    axes: tuple[str, ...]
    layer: int | None
    format: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    stacked: bool
    part: PartOf
    stored: str  # the format in the source
    stored_shape: tuple[int, ...]  # the shape of one piece in the source
    copies: int  # of a piece, in memory while it is read

    @property
    def nbytes(self) -> int:
        return nbytes(self.format, self.shape)

    @property
    def workspace(self) -> int:
        """Bytes of memory to read and convert the tensor, in addition to the tensor itself."""
        raw = nbytes(self.stored, self.stored_shape)
        reading = self.copies * raw
        if self.format == self.stored:
            return READERS * (raw + reading) if self.stacked else reading
        piece = self.shape[1:] if self.stacked else self.shape
        needed = raw + reading + 4 * 4 * min(ROWS, prod(piece))
        return READERS * (needed + nbytes(self.format, piece)) if self.stacked else needed


def nbytes(format: str, shape: tuple[int, ...]) -> int:
    return (
        prod(shape) * np.dtype(STORED_DTYPES[format]).itemsize
        if format in STORED_DTYPES
        else qtensor.nbytes(format, shape)
    )


def jobs(checkpoint: Checkpoint, dtype: str) -> list[Job]:
    """All tensors of the model, layer by layer; `dtype` is keep, bf16, f32 or one of QUANTIZED."""
    found = {}
    for path, source in checkpoint.sources.items():
        if (place := orbax_names.stored_as(path, source, checkpoint.config)) is not None:
            name, words = place
            found[name] = _job(name, words, path, source, checkpoint, dtype)
    return sorted(found.values(), key=lambda job: -1 if job.layer is None else job.layer)


def _job(
    name: str, words: tuple[str, ...], path: str, source: Origin, checkpoint: Checkpoint, dtype: str
) -> Job:
    """The tensor `name`, whose axes are named `words`, of the parameter `path`."""
    slot, stored = checkpoint.slots[path].get_metadata(), checkpoint.format_of(source)
    entry = checkpoint.source.tensors[source.names[0]]
    linear = slot["packs"] and path not in ("embed", "head")
    shape = axes.shape(checkpoint.config, words)
    return Job(
        name=name,
        axes=words,
        layer=int(name.split(".")[1]) if name.startswith("layers.") else None,
        format=_format(dtype, stored, linear, slot["exact"], shape),
        shape=shape,
        pieces=source.pieces,
        stacked=source.stacked,
        part=cut(source),
        stored=stored,
        stored_shape=entry.shape if source.pieces[0].index is None else entry.shape[1:],
        copies=entry.copies,
    )


def cut(source: Origin) -> PartOf:
    """The share of each piece that is stored: a half of joined gate and up; kv_b_proj stays whole."""
    return source.part if source.part in (first_half, second_half) else unchanged


def _format(dtype: str, stored: str, linear: bool, exact: bool, shape: tuple[int, ...]) -> str:
    """The format to write: `exact` weights stay float32, and only matrices of linear layers are quantised."""
    if dtype == "keep":
        return stored
    if dtype not in QUANTIZED:
        return "F32" if exact else DTYPE_NAMES[dtype]
    if not linear:
        return stored if stored in PLAIN_DTYPES else "BF16"
    wanted = QUANTIZED[dtype]
    return RAGGED[wanted] if wanted in RAGGED and shape[-1] % qtensor.format_of(wanted).block[1] else wanted


def steps(wanted: Iterable[Job]) -> Iterator[list[Job]]:
    """Groups of tensors to write together: about STEP bytes, of one layer."""
    step: list[Job] = []
    for job in wanted:
        if step and (job.layer != step[0].layer or sum(j.nbytes for j in step) + job.nbytes > STEP):
            yield step
            step = []
        step.append(job)
    if step:
        yield step


def read(job: Job, checkpoint: Checkpoint) -> tuple[Parts, int]:
    """The parts of a tensor to write, and the number of its values (blocks, if packed) that are not finite."""
    parts, unsound = _piece(job, checkpoint, 0)
    if not job.stacked:
        return parts, unsound
    stacks = tuple(np.empty((len(job.pieces), *part.shape), part.dtype) for part in parts)

    def put(i: int, parts: Parts, unsound: int) -> int:
        for stack, part in zip(stacks, parts, strict=True):
            stack[i] = part
        return unsound

    def read_piece(i: int) -> int:
        return put(i, *_piece(job, checkpoint, i))

    put(0, parts, unsound)
    with ThreadPoolExecutor(READERS) as pool:
        return stacks, unsound + sum(pool.map(read_piece, range(1, len(job.pieces))))


def _piece(job: Job, checkpoint: Checkpoint, i: int) -> tuple[Parts, int]:
    raw = tuple(job.part(part, checkpoint.config) for part in checkpoint.source.read(*job.pieces[i]))
    shape = job.shape[1:] if job.stacked else job.shape
    return converted(raw, job, shape), unsound_in(raw, job.stored)


def converted(raw: Parts, job: Job, shape: tuple[int, ...]) -> Parts:
    """A piece in the job's format; unchanged if it has that format."""
    if job.format == job.stored:
        return raw
    like, sharing = _parts_like(job.format, shape), _sharing(job.format, shape)
    return by_rows(raw, job.stored, shape, like, sharing, lambda rows, size: _converted(rows, job, size))


def by_rows(
    raw: Parts,
    stored: str,
    shape: tuple[int, ...],
    like: Sequence[jax.ShapeDtypeStruct],
    sharing: int,
    convert: Callable[[Parts, tuple[int, ...]], Parts],
) -> Parts:
    """Arrays `like` these, filled by `convert` with some rows of a piece at a time, of which `sharing` share an entry there."""
    block = lcm(_sharing(stored, shape), sharing)
    step = block * max(1, ROWS // (block * prod(shape[1:])))
    filled = tuple(np.empty(part.shape, part.dtype) for part in like)
    for start in range(0, shape[0], step):
        end = min(start + step, shape[0])
        rows = _rows(raw, start, end, _sharing(stored, shape), shape[0])
        parts = convert(rows, (end - start, *shape[1:]))
        for whole, part in zip(_rows(filled, start, end, sharing, shape[0]), parts, strict=True):
            whole[...] = part
    return filled


def _sharing(format: str, shape: tuple[int, ...]) -> int:
    """Rows of a matrix that share scales."""
    return qtensor.format_of(format).block[0] if format not in PLAIN_DTYPES and len(shape) == 2 else 1


def _parts_like(format: str, shape: tuple[int, ...]) -> Sequence[jax.ShapeDtypeStruct]:
    if format in PLAIN_DTYPES:
        return [jax.ShapeDtypeStruct(shape, STORED_DTYPES[format])]
    return qtensor.abstract(format, shape).parts


def _rows(raw: Parts, start: int, end: int, block: int, rows: int) -> Parts:
    """The rows from `start` to `end` of all parts. A part with fewer than `rows` entries has one for each `block` rows."""
    blocks = slice(start // block, -(-end // block))
    return tuple(part[blocks] if len(part) < rows else part[start:end] for part in raw)


def _converted(raw: Parts, job: Job, shape: tuple[int, ...]) -> Parts:
    if job.format in PLAIN_DTYPES:
        return (plain(raw, job.stored, shape, STORED_DTYPES[job.format]),)
    values = plain(raw, job.stored, shape, np.float32)
    return tuple(np.asarray(part) for part in quantize(values, job.format).parts)


def plain(raw: Parts, stored: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The values of a tensor of `shape`, packed or not, in another dtype."""
    return np.asarray(_plain(raw, stored, shape, np.dtype(dtype)))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _plain(raw: tuple, stored: str, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    value = raw[0] if stored in PLAIN_DTYPES else qtensor.dequantize(QTensor(stored, raw, shape))
    return value.astype(dtype)


def unsound_in(raw: Parts, stored: str) -> int:
    """The number of values (blocks, if packed) with NaN or infinity. In numpy: XLA takes 20 times as long to count booleans."""
    if stored in EXPONENTS:
        return _count_set(raw[0], *EXPONENTS[stored])
    if stored.startswith("fp8_block") and (np.abs(raw[1]) < E4M3_SCALE).all():
        return _count_set(raw[0], np.uint8, 0x7F)
    if stored in gguf_blocks.TYPES and (halves := gguf_blocks.TYPES[stored].halves):
        exponents = [raw[0][..., at + 1] & 0x7C for at in halves]  # of each float16 in a block
        return int(np.count_nonzero(np.any([exponent == 0x7C for exponent in exponents], axis=0)))
    return int(qtensor.unsound(stored, tuple(map(jnp.asarray, raw))))


def _count_set(values: np.ndarray, unsigned: type, bits: int) -> int:
    """The number of values with all of these `bits` set, counted in pieces that a core's cache holds."""
    numbers, found = values.reshape(-1).view(unsigned), 0
    for start in range(0, numbers.size, CACHED):
        masked = numbers[start : start + CACHED] & unsigned(bits)
        if masked.max() == bits:  # rare; the maximum takes half the time of counting
            found += int(np.count_nonzero(masked == bits))
    return found
