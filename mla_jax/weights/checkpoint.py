"""A folder of weights in Orbax's format: written step by step, resumed after a kill, read tensor by tensor or shard by shard.

    OUT.partial/ until the last step, then renamed to OUT/
        manifest.json     every tensor's format, shape and checksums; what it all was made from
        weights/00000/    one Orbax checkpoint a step; a tensor's chunk is a leaf, and a file, of its own
        ...               whatever else the writer's user puts there: config.json, tokenizer.json

The one place that touches Orbax, through its experimental v1 API. Knows names, formats and arrays; nothing of models.

One checkpoint a step, not `ocp.partial`, whose calls grow slower with every step and whose `finalize` compares every name with
every other (24 s for 3,600 arrays). Chunks are cut here, not by Orbax, which shards numpy arrays into single rows only: so a
device reads its part alone, a checksum covers what is read at once, and one tensor is written by many threads."""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from errno import EDQUOT, EFBIG, ENOSPC
from functools import cache
from itertools import accumulate, chain, groupby, product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import xxhash
from jax.sharding import Sharding
from safetensors import SafetensorError

from mla_jax.base import qtensor
from mla_jax.base.errors import BadFile, DoesNotFit, Unsupported, printable, shortened
from mla_jax.base.files import read_json
from mla_jax.weights.safetensors import DTYPES

KIND, VERSION = "mla-jax weights", 1
MANIFEST, MAX_MANIFEST = "manifest.json", 64 << 20
MAX_CHUNK = 30 << 20  # bytes of a chunk that no mesh asks for; glibc maps 32 MiB and more anew each time, at half the rate
COPIED = 3 * MAX_CHUNK  # bytes that Orbax may hold in copies
BATCH = 256 << 20  # bytes read by one call of Orbax
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}")  # names become names of folders, and no others do
NOISE = ("TensorStore data files not found", "Skipping merge of OCDBT", "raised an exception")  # the last is raised to us as well
AGAIN = "copy that folder again, or convert again"

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]  # the first index and the end, along each axis


class Tensor(NamedTuple):
    """A tensor to store: `format` is a plain dtype by its name in safetensors, or a format of base/qtensor.py."""

    format: str
    shape: Shape
    parts: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Part:
    """An array of a stored tensor, cut into chunks of one shape, the last along an axis perhaps smaller."""

    dtype: str
    shape: Shape
    chunk: Shape
    checksums: tuple[str, ...]  # xxh3-64 of each chunk's bytes, the last axis counting fastest

    def chunks(self, tensor: str, number: int) -> list["Chunk"]:
        """The chunks of this part, which is the `number`th of `tensor`."""
        boxes = enumerate(zip(_grid(self.shape, self.chunk), self.checksums, strict=True))
        return [Chunk(f"{tensor}.{number}.{i}", self.dtype, box, checksum) for i, (box, checksum) in boxes]


@dataclass(frozen=True)
class Entry:
    """A stored tensor."""

    format: str
    shape: Shape
    step: int
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(prod(part.shape) * np.dtype(part.dtype).itemsize for part in self.parts)


class Chunk(NamedTuple):
    """What is read at once: the `box` of a part. `leaf` is its name in Orbax."""

    leaf: str
    dtype: str
    box: Box
    checksum: str


class Writer:
    """Writes a folder that appears under its name when all is there; made again after a kill, it goes on where it was.

    `tensors` are those that are safe on disk. `metadata` is kept in the manifest and says what the weights are made from: to go
    on with another is refused. `shards` says for a part (tensor's name, number, shape) how many devices share each axis. Two
    writers at once on one folder would spoil it; keeping the second out is the caller's part."""

    def __init__(self, folder: Path, metadata: dict, shards: Callable[[str, int, Shape], Shape] | None = None):
        self.folder = Path(os.path.abspath(folder))
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self.metadata = json.loads(json.dumps(metadata, allow_nan=False))
        self.shards = shards or (lambda name, part, shape: (1,) * len(shape))
        self.tensors: dict[str, Entry] = {}
        self._refuse_existing()
        with self._writing():
            refuse_foreign(self.partial, MANIFEST)
        if (self.partial / MANIFEST).exists():
            _, recorded, self.tensors = _read_manifest(self.partial)
            if differing := [k for k in {**recorded, **self.metadata} if recorded.get(k) != self.metadata.get(k)]:
                what = "what differs: " + ", ".join(map(printable, shortened(differing)))
                raise BadFile(f"{self.partial} was begun from something else", what, "go on from that, or delete it")

    def save(self, tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
        """Stores one step, which no power cut takes back after the return. Takes no memory but copies of columns cut apart."""
        if repeated := sorted(self.tensors.keys() & tensors.keys()):
            raise BadFile(f"{self.partial} holds these already", *shortened([printable(name) for name in repeated]))
        step = 1 + max((entry.step for entry in self.tensors.values()), default=-1)
        entries, leaves = {}, {}
        for name, tensor in tensors.items():
            entries[name], cut = self._cut(name, tensor, step)
            leaves |= cut
        with self._writing():
            self._begin()
            self._discard_unrecorded()
            with _orbax(max(leaf.nbytes for leaf in leaves.values())) as ocp:
                ocp.save(_step_folder(self.partial, step), leaves)
            self._record({**self.tensors, **entries}, complete=False)
        self.tensors |= entries
        return entries

    def finalize(self) -> None:
        """Gives the folder its name. Files to go with the weights are in `partial` by now."""
        self._refuse_existing()
        with self._writing():
            self._discard_unrecorded()
            self._record(self.tensors, complete=True)
            os.rename(self.partial, self.folder)
            os.sync()

    def _cut(self, name: str, tensor: Tensor, step: int) -> tuple[Entry, dict[str, np.ndarray]]:
        """The entry of a tensor, and its chunks by their leaves."""
        found = [(part.dtype.name, part.shape) for part in tensor.parts if part.dtype.isnative]
        if found != (expected := _specs(name, tensor.format, tensor.shape)):
            raise BadFile(f"{name} is no {tensor.format} of shape {list(tensor.shape)}", f"found {found}", f"expected {expected}")
        parts, leaves = [], {}
        for number, part in enumerate(tensor.parts):
            chunk = _chunk_shape(part, self.shards(name, number, part.shape))
            pieces = [np.asarray(part[_slices(box)], order="C") for box in _grid(part.shape, chunk)]
            parts.append(Part(part.dtype.name, part.shape, chunk, tuple(map(_checksum, pieces))))
            leaves |= {c.leaf: piece for c, piece in zip(parts[-1].chunks(name, number), pieces, strict=True)}
        return Entry(tensor.format, tuple(tensor.shape), step, tuple(parts)), leaves

    def _record(self, tensors: Mapping[str, Entry], complete: bool) -> None:
        """Replaces the manifest, once all that it speaks of is on disk."""
        described = {name: asdict(entry) for name, entry in tensors.items()}
        manifest = {"kind": KIND, "version": VERSION, "complete": complete, "metadata": self.metadata, "tensors": described}
        temporary = self.partial / f"{MANIFEST}.new"
        temporary.write_text(json.dumps(manifest), encoding="utf-8")
        os.sync()  # a step has thousands of small files and folders: to fsync each takes seconds
        os.replace(temporary, self.partial / MANIFEST)
        os.sync()

    def _begin(self) -> None:
        """Makes the folder and its manifest, by which the next run knows it as a conversion's."""
        if not (self.partial / MANIFEST).exists():
            self.partial.mkdir(parents=True, exist_ok=True)
            self._record({}, complete=False)

    def _discard_unrecorded(self) -> None:
        """Removes what a kill between a step and its record left; Orbax itself removes what a kill within a step left."""
        weights = self.partial / "weights"
        weights.mkdir(parents=True, exist_ok=True)
        for path in {*weights.iterdir()} - {_step_folder(self.partial, entry.step) for entry in self.tensors.values()}:
            shutil.rmtree(path)

    def _refuse_existing(self) -> None:
        if self.folder.exists():
            raise BadFile(f"{self.folder} exists already", "choose another folder, or delete it first")

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.partial, f"the {len(self.tensors):,} tensors before")


class Store:
    """A finished folder; `metadata` is what its writer was given. Any thread may read."""

    def __init__(self, path: Path, metadata: dict, tensors: Mapping[str, Entry]):
        self.path, self.metadata, self.tensors = path, metadata, tensors
        self._stored = cache(lambda step: _stored(_step_folder(path, step)))

    def read(self, name: str, index: int | None = None) -> tuple[np.ndarray, ...]:
        """The parts of a tensor, or of one entry of its first axis; raises BadFile if a byte of them is not what was written."""
        entry = self.tensors[name]
        boxes = [tuple((0, size) for size in part.shape) for part in entry.parts]
        if index is not None:
            if not (entry.shape and 0 <= index < entry.shape[0]):
                raise IndexError(f"{name} has the shape {entry.shape}, and no entry {index}")
            boxes = [((index, index + 1), *box[1:]) for box in boxes]
        filled = self._filled(name, [{box} for box in boxes])
        parts = [found[box] for found, box in zip(filled, boxes, strict=True)]
        return tuple(part if index is None else part.reshape(part.shape[1:]) for part in parts)

    def check(self, name: str) -> None:
        """Reads all of a tensor and keeps none of it; raises BadFile as `read` does."""
        entry = self.tensors[name]
        for _ in self._load(name, entry.step, [c for number, part in enumerate(entry.parts) for c in part.chunks(name, number)]):
            pass

    def restore(self, name: str, shardings: tuple[Sharding, ...]) -> tuple[jax.Array, ...]:
        """A tensor on devices, with a sharding for each part; reads the chunks that this process's devices need, once each."""
        parts = self.tensors[name].parts
        for part in parts:
            if jax.dtypes.canonicalize_dtype(part.dtype) != part.dtype:
                raise Unsupported(f"{name} is {part.dtype}, which JAX would make narrower", "set jax_enable_x64")
        indices = [s.addressable_devices_indices_map(part.shape).values() for part, s in zip(parts, shardings, strict=True)]
        boxes = [{_box(index, part.shape) for index in along} for part, along in zip(parts, indices, strict=True)]
        arrays = zip(parts, shardings, self._filled(name, boxes), strict=True)
        return tuple(_placed(part.shape, sharding, filled) for part, sharding, filled in arrays)

    def _filled(self, name: str, boxes: list[set[Box]]) -> Iterator[dict[Box, np.ndarray]]:
        """The boxes that are asked for of each part, one part after the other."""
        entry = self.tensors[name]
        chunks = [
            [chunk for chunk in part.chunks(name, number) if any(_common(chunk.box, box) is not None for box in asked)]
            for number, (part, asked) in enumerate(zip(entry.parts, boxes, strict=True))
        ]
        stream = self._load(name, entry.step, [*chain.from_iterable(chunks)])
        for asked, wanted in zip(boxes, chunks, strict=True):
            yield _assembled(asked, zip(wanted, stream, strict=False))  # the stream goes on to the next part

    def _load(self, name: str, step: int, chunks: list[Chunk]) -> Iterator[np.ndarray]:
        """The chunks in their order, some read together."""
        folder = _step_folder(self.path, step)
        for batch in _batches(chunks):
            try:
                stored = self._stored(step)
                for chunk in batch:
                    if (found := stored.get(chunk.leaf)) != (expected := (chunk.dtype, _shape(chunk.box))):
                        what = f"{chunk.leaf} is {found or 'missing'}, expected {expected}"
                        raise BadFile(f"{name} is stored otherwise than the manifest says", what, f"in {folder}", AGAIN)
                with _orbax(max(map(_nbytes, batch))) as ocp:
                    values = ocp.load(folder, {chunk.leaf: np.ndarray for chunk in batch})
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as e:
                raise BadFile(f"{name} cannot be read", "a file is missing, cut short or damaged", f"in {folder}", AGAIN) from e
            for chunk in batch:
                yield _sound(name, folder, chunk, values.pop(chunk.leaf))


def refuse_foreign(partial: Path, record: str) -> None:
    """Raises BadFile if `partial` has files but not the `record` that a conversion writes first: something else made it."""
    if not os.path.lexists(partial):
        return
    names = sorted(path.name for path in partial.iterdir()) if partial.is_dir() else [partial.name]
    records = {record, f"{record}.new", f"{record}.partial"}  # a kill may leave it under its temporary name
    if names and not records & {*names}:
        found = ", ".join(shortened([printable(name) for name in names], 5))
        raise BadFile(
            f"{partial} was not made by a conversion", f"it has no {record}, found {found}", "move it away, or choose another OUT"
        )


@contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
    """Says what the system refuses while `path` is written, and what of it is kept for the next run."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:  # TensorStore raises ValueError for what the system refuses
        codes = {getattr(e, "errno", None), *map(int, re.findall(r"os[_ ]error(?:_code=')? ?(\d+)", str(e)))}
        full = codes & {ENOSPC, EDQUOT, EFBIG}
        reason = "the disk is full, or a quota is reached" if full else printable(str(e), 300)
        advice = f"{kept} are kept: remove the cause and run the same command again"
        raise (DoesNotFit if full else BadFile)(f"{path} cannot be written", reason, advice) from e


def is_store(folder: Path) -> bool:
    """Whether `folder` holds weights in this format, be they complete or not; reads nothing."""
    return (folder / MANIFEST).is_file() and (folder / "weights").is_dir()


def open_store(folder: Path) -> Store:
    """Reads and checks the manifest, no weights."""
    path = Path(os.path.abspath(folder))
    complete, metadata, tensors = _read_manifest(path)
    if not complete:
        raise BadFile(f"{path} is not complete", "its conversion was stopped: run the same command again, and it goes on")
    folders = {_step_folder(path, entry.step) for entry in tensors.values()}
    if missing := sorted(f"{step.name} is missing" for step in folders if not step.is_dir()):
        raise BadFile(f"{path / 'weights'} lacks a part of the weights", *shortened(missing), AGAIN)
    return Store(path, metadata, tensors)


@contextmanager
def _orbax(largest: int = 0) -> Iterator[Any]:
    """Orbax's API under our options; `largest`: bytes of the largest leaf that it is to read or write."""
    import orbax.checkpoint.experimental.v1 as ocp

    logging.getLogger("absl").addFilter(_without_noise)
    context = ocp.Context()
    context.array.saving.use_ocdbt = False  # a chunk is a file: a fault has an address
    context.array.saving.use_compression = False  # quantised weights do not shrink, and packing takes a step's memory again
    context.memory.deepcopy_host_arrays = False
    context.memory.write_concurrent_bytes = context.memory.read_concurrent_bytes = max(COPIED, largest)
    context.pytree.loading.partial_load = True
    context.asynchronous.timeout_secs = 24 * 3600  # the default of 20 minutes is too short for a large step on a slow disk
    with context:
        yield ocp


def _without_noise(record: logging.LogRecord) -> bool:
    return not any(noise in record.getMessage() for noise in NOISE)


def _stored(folder: Path) -> dict[str, tuple]:
    """The dtype and shape of each leaf of a step that is one chunk, known before anything is allocated."""
    with _orbax() as ocp:
        leaves = ocp.metadata(folder).metadata.items()
    return {name: (leaf.dtype.name, leaf.shape) for name, leaf in leaves if leaf.storage_metadata.chunk_shape == leaf.shape}


def _sound(name: str, folder: Path, chunk: Chunk, value: np.ndarray) -> np.ndarray:
    if (found := _checksum(value)) != chunk.checksum:
        raise BadFile(f"{name} is damaged", f"{chunk.leaf} has the checksum {found}, not {chunk.checksum}", f"in {folder}", AGAIN)
    return value


def _read_manifest(folder: Path) -> tuple[bool, dict, dict[str, Entry]]:
    """Whether it is complete, its metadata and its tensors."""
    file = folder / MANIFEST
    found = read_json(file, MAX_MANIFEST)
    version, kinds = found.get("version"), {"complete": bool, "metadata": dict, "tensors": dict}
    if isinstance(version, int) and version > VERSION:
        raise BadFile(f"{folder} has version {version} of its format", f"known are versions up to {VERSION}", "update mla-jax")
    if (found.get("kind"), version) != (KIND, VERSION) or not all(isinstance(found.get(k), kind) for k, kind in kinds.items()):
        raise BadFile(f"{file} is no manifest of weights", "expected one that mla-convert wrote")
    tensors = {name: _entry(file, name, raw) for name, raw in found["tensors"].items()}
    return found["complete"], found["metadata"], tensors


def _entry(file: Path, name: str, raw: Any) -> Entry:
    """One tensor of the manifest, everything checked."""
    try:
        parts = tuple(Part(p["dtype"], tuple(p["shape"]), tuple(p["chunk"]), tuple(p["checksums"])) for p in raw["parts"])
        entry = Entry(raw["format"], tuple(raw["shape"]), raw["step"], parts)
        numbers = [*entry.shape, *chain.from_iterable((*part.shape, *part.chunk) for part in parts)]
        sound = isinstance(entry.format, str) and type(entry.step) is int and entry.step >= 0
        sound = sound and all(type(n) is int and 0 < n < 1 << 63 for n in numbers)
        sound = sound and [(part.dtype, part.shape) for part in parts] == _specs(name, entry.format, entry.shape)
        counts = [prod(-(-size // c) for size, c in zip(part.shape, part.chunk, strict=True)) for part in parts if sound]
        sound = sound and counts == [len(part.checksums) for part in parts]
        sound = sound and all(isinstance(checksum, str) for part in parts for checksum in part.checksums)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise BadFile(
            f"{file} describes {printable(name)} in a way that makes no sense", f"found {printable(str(raw), 200)}", AGAIN
        )
    return entry


def _specs(name: str, format: str, shape: Shape) -> list[tuple[str, Shape]]:
    """The dtype and shape of each part; raises BadFile or Unsupported for what cannot be stored."""
    if not NAME.fullmatch(name):
        raise BadFile(f"{printable(name)} cannot name a tensor", "expected at most 200 of A-Z a-z 0-9 _ . -")
    if not all(shape):  # Orbax refuses them too
        raise Unsupported(f"{name} has the shape {list(shape)}, and what is empty cannot be stored")
    if format in DTYPES:
        return [(np.dtype(DTYPES[format]).name, shape)]
    return [(np.dtype(part.dtype).name, part.shape) for part in qtensor.abstract(format, shape).parts]


def _step_folder(folder: Path, step: int) -> Path:
    return folder / "weights" / f"{step:05d}"


def _chunk_shape(part: np.ndarray, shards: Shape) -> Shape:
    """A device's share; rows that no device has for itself are cut again, to chunks of a size that is quick to write."""
    chunk = [-(-size // count) for size, count in zip(part.shape, shards, strict=True)]
    if chunk and shards[0] == 1:
        chunk[0] = min(chunk[0], max(1, MAX_CHUNK // (part.itemsize * prod(chunk[1:]))))
    return tuple(chunk)


def _grid(shape: Shape, chunk: Shape) -> list[Box]:
    return [*product(*([(i, min(i + c, size)) for i in range(0, size, c)] for size, c in zip(shape, chunk, strict=True)))]


def _box(index: Any, shape: Shape) -> Box:
    return tuple(along.indices(size)[:2] for along, size in zip(index, shape, strict=True))


def _placed(shape: Shape, sharding: Sharding, filled: dict[Box, np.ndarray]) -> jax.Array:
    return jax.make_array_from_callback(shape, sharding, lambda index: filled[_box(index, shape)])


def _shape(box: Box) -> Shape:
    return tuple(end - start for start, end in box)


def _slices(box: Box, origin: Box | None = None) -> tuple[slice, ...]:
    return tuple(slice(i - o, j - o) for (i, j), (o, _) in zip(box, origin or ((0, 0),) * len(box), strict=True))


def _common(a: Box, b: Box) -> Box | None:
    box = tuple((max(i, m), min(j, n)) for (i, j), (m, n) in zip(a, b, strict=True))
    return box if all(i < j for i, j in box) else None


def _nbytes(chunk: Chunk) -> int:
    return np.dtype(chunk.dtype).itemsize * prod(_shape(chunk.box))


def _batches(chunks: list[Chunk]) -> list[list[Chunk]]:
    """Chunks that follow each other, about BATCH bytes together."""
    reached = accumulate(map(_nbytes, chunks))
    groups = groupby(zip(reached, chunks, strict=True), key=lambda pair: pair[0] // BATCH)
    return [[chunk for _, chunk in group] for _, group in groups]


def _assembled(boxes: set[Box], pieces: Iterable[tuple[Chunk, np.ndarray]]) -> dict[Box, np.ndarray]:
    filled: dict[Box, np.ndarray] = {}
    for chunk, value in pieces:
        for box in boxes:
            if box == chunk.box:
                filled[box] = value
            elif (common := _common(chunk.box, box)) is not None:
                if box not in filled:
                    filled[box] = np.empty(_shape(box), value.dtype)
                filled[box][_slices(common, box)] = value[_slices(common, chunk.box)]
    return filled


def _checksum(array: np.ndarray) -> str:
    return xxhash.xxh3_64_hexdigest(array.reshape(-1).view(np.uint8).data)
