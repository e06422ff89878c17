"""A folder of weights in Orbax's format: written step by step, resumed after a kill, read by tensor or by shard.

    OUT.partial/ until the last step, then renamed to OUT/
        manifest.json     every tensor's format, shape and checksums; the source of the weights (orbax_manifest.py)
        weights/00000/    one Orbax checkpoint per step; each chunk of a tensor is a leaf with a file of its own
        ...               other files that the caller adds: config.json, tokenizer.json

The only module that uses Orbax, through its experimental v1 API. Knows names, formats and arrays; nothing of models.

Each step is a checkpoint of its own. `ocp.partial` is not used: its calls grow slower with every step, and its `finalize`
compares every name with every other (24 s for 3,600 arrays). Chunks are cut here, because Orbax splits numpy arrays only into
single rows: so a device reads only its share, a checksum covers one read, and many threads write one tensor."""

import json
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from errno import EDQUOT, EFBIG, ENOSPC
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding
from safetensors import SafetensorError

from mla_jax.base.errors import BadFile, DoesNotFit, Unsupported, printable, shortened
from mla_jax.base.qtensor import Shape
from mla_jax.weights import boxes
from mla_jax.weights.boxes import Box
from mla_jax.weights.orbax_chunks import (
    MAX_CHUNK,
    assembled,
    batches,
    checksum,
    chunk_shape,
    in_chunks,
    overlapping,
)
from mla_jax.weights.orbax_manifest import (
    COPY_AGAIN,
    KIND,
    MANIFEST,
    VERSION,
    StoredChunk,
    StoredTensor,
    part_specs,
    read_manifest,
)
from mla_jax.weights.safetensors import STORED_DTYPES

COPY_BYTES = 3 * MAX_CHUNK  # bytes that Orbax may hold in copies
NOISE = (
    "TensorStore data files not found",
    "Skipping merge of OCDBT",
    "raised an exception",  # it is also raised to us
    "Failed to get metadata for checkpointable",  # the same error is then raised by `_load`
    "Failed to json parse Metadata file",  # of _CHECKPOINT_METADATA, which is not needed to read
    "No handler found for typestr",
    "Provided metadata contains unknown key",
    "[tensorstore_spec=",  # errors of other reads that were in flight when the first one failed
)


class NewTensor(NamedTuple):
    """A tensor to store: `format` is the safetensors name of a plain dtype, or a format of base/qtensor.py."""

    format: str
    shape: Shape
    parts: tuple[np.ndarray, ...]


class Writer:
    """Writes a folder that gets its name once it is complete. A new Writer after a kill resumes after the last stored step.

    `tensors` are the tensors stored so far. The manifest keeps `metadata`, which says what the weights are made from; resuming
    with other metadata raises BadFile. `shards` gives, for a part (tensor's name, number, shape), how many devices share each
    axis. Two writers at once would corrupt the folder: the caller must keep the second out."""

    def __init__(
        self, folder: Path, metadata: dict, shards: Callable[[str, int, Shape], Shape] | None = None
    ):
        self.folder = Path(os.path.abspath(folder))
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self.metadata = json.loads(json.dumps(metadata, allow_nan=False))
        self.shards = shards or (lambda name, part, shape: (1,) * len(shape))
        self.tensors: dict[str, StoredTensor] = {}
        self._refuse_existing()
        with self._writing():
            refuse_foreign(self.partial, MANIFEST)
        if (self.partial / MANIFEST).exists():
            _, recorded, self.tensors = read_manifest(self.partial)
            self._refuse_other_metadata(recorded)

    def save(self, tensors: Mapping[str, NewTensor]) -> dict[str, StoredTensor]:
        """Stores one step durably: a power cut after the return loses nothing. Copies only chunks that are cut along columns."""
        if repeated := sorted(self.tensors.keys() & tensors.keys()):
            raise BadFile(
                f"{self.partial} holds these already", *shortened([printable(name) for name in repeated])
            )
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
        """Gives the folder its name. The caller has put all other files into `partial` before."""
        self._refuse_existing()
        with self._writing():
            self._discard_unrecorded()
            self._record(self.tensors, complete=True)
            os.rename(self.partial, self.folder)
            os.sync()

    def _refuse_other_metadata(self, recorded: Mapping[str, Any]) -> None:
        differing = [
            key for key in {**recorded, **self.metadata} if recorded.get(key) != self.metadata.get(key)
        ]
        if differing:
            what = "what differs: " + ", ".join(map(printable, shortened(differing)))
            raise BadFile(
                f"{self.partial} was begun from something else", what, "go on from that, or delete it"
            )

    def _cut(self, name: str, tensor: NewTensor, step: int) -> tuple[StoredTensor, dict[str, np.ndarray]]:
        """A tensor's entry in the manifest, and its chunks by leaf."""
        found = [(part.dtype.name, part.shape) for part in tensor.parts if part.dtype.isnative]
        expected = part_specs(name, tensor.format, tensor.shape)
        if found != expected:
            raise BadFile(
                f"{name} is not {tensor.format} of shape {list(tensor.shape)}",
                f"found {found}",
                f"expected {expected}",
            )
        parts, leaves = [], {}
        for number, part in enumerate(tensor.parts):
            chunk = chunk_shape(part, self.shards(name, number, part.shape))
            stored, pieces = in_chunks(part, chunk)
            leaves |= {c.leaf: piece for c, piece in zip(stored.chunks(name, number), pieces, strict=True)}
            parts.append(stored)
        return StoredTensor(tensor.format, tuple(tensor.shape), step, tuple(parts)), leaves

    def _record(self, tensors: Mapping[str, StoredTensor], complete: bool) -> None:
        """Replaces the manifest, after everything that it lists is on disk."""
        described = {name: asdict(entry) for name, entry in tensors.items()}
        manifest = {
            "kind": KIND,
            "version": VERSION,
            "complete": complete,
            "metadata": self.metadata,
            "tensors": described,
        }
        temporary = self.partial / f"{MANIFEST}.new"
        temporary.write_text(json.dumps(manifest), encoding="utf-8")
        os.sync()  # a step has thousands of small files and folders: an fsync of each takes seconds
        os.replace(temporary, self.partial / MANIFEST)
        os.sync()

    def _begin(self) -> None:
        """Makes the folder and its manifest, by which the next run knows it as a conversion's."""
        if not (self.partial / MANIFEST).exists():
            self.partial.mkdir(parents=True, exist_ok=True)
            self._record({}, complete=False)

    def _discard_unrecorded(self) -> None:
        """Removes a step that was written but not recorded before a kill; Orbax removes one that was not written completely."""
        weights = self.partial / "weights"
        weights.mkdir(parents=True, exist_ok=True)
        recorded = {_step_folder(self.partial, entry.step) for entry in self.tensors.values()}
        for path in {*weights.iterdir()} - recorded:
            shutil.rmtree(path)

    def _refuse_existing(self) -> None:
        if self.folder.exists():
            raise BadFile(f"{self.folder} exists already", "choose another folder, or delete it first")

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.partial, f"the {len(self.tensors):,} tensors before")


class Store:
    """A finished folder; `metadata` is what its Writer was given. Any thread may read."""

    def __init__(self, path: Path, metadata: dict, tensors: Mapping[str, StoredTensor]):
        self.path, self.metadata, self.tensors = path, metadata, tensors
        self._stored = cache(lambda step: _stored(_step_folder(path, step)))

    def read(self, name: str, index: int | None = None, box: Box | None = None) -> tuple[np.ndarray, ...]:
        """The parts of a tensor, or of one entry of its first axis, or of a `box` of these, for which the chunks are read that
        hold some of it; raises BadFile if a checksum does not match."""
        entry = self.tensors[name]
        asked = [boxes.whole_box(part.shape) for part in entry.parts]
        if index is not None and not (entry.shape and 0 <= index < entry.shape[0]):
            raise IndexError(f"{name} has the shape {entry.shape}, and no entry {index}")
        if box is not None:
            box = box if index is None else ((index, index + 1), *box)
            asked = [box] if entry.format in STORED_DTYPES else boxes.of_parts(entry.format, entry.shape, box)
        elif index is not None:
            asked = [((index, index + 1), *part[1:]) for part in asked]
        filled = self._filled(name, [{each} for each in asked])
        parts = tuple(found[each] for found, each in zip(filled, asked, strict=True))
        return parts if index is None else tuple(part.reshape(part.shape[1:]) for part in parts)

    def check(self, name: str) -> None:
        """Reads a tensor and keeps nothing of it; raises BadFile as `read` does."""
        entry = self.tensors[name]
        chunks = chain.from_iterable(part.chunks(name, number) for number, part in enumerate(entry.parts))
        for _ in self._load(name, entry.step, [*chunks]):
            pass

    def restore(self, name: str, shardings: tuple[Sharding, ...]) -> tuple[jax.Array, ...]:
        """A tensor on devices, with a sharding for each part. Reads once each chunk that this process's devices need."""
        parts = self.tensors[name].parts
        for part in parts:
            if jax.dtypes.canonicalize_dtype(part.dtype) != part.dtype:
                raise Unsupported(
                    f"{name} is {part.dtype}, which JAX would make narrower", "set jax_enable_x64"
                )
        asked = [_device_boxes(part.shape, sharding) for part, sharding in zip(parts, shardings, strict=True)]
        arrays = zip(parts, shardings, self._filled(name, asked), strict=True)
        return tuple(_placed(part.shape, sharding, filled) for part, sharding, filled in arrays)

    def _filled(self, name: str, asked: list[set[Box]]) -> Iterator[dict[Box, np.ndarray]]:
        """The contents of the boxes that are `asked` for of each part, part by part."""
        entry = self.tensors[name]
        chunks = [
            overlapping(part.chunks(name, number), of_part)
            for number, (part, of_part) in enumerate(zip(entry.parts, asked, strict=True))
        ]
        stream = self._load(name, entry.step, [*chain.from_iterable(chunks)])
        for of_part, needed in zip(asked, chunks, strict=True):
            # The stream continues with the next part
            yield assembled(of_part, zip(needed, stream, strict=False))

    def _load(self, name: str, step: int, chunks: list[StoredChunk]) -> Iterator[np.ndarray]:
        """The contents of `chunks` in their order; one call of Orbax reads several."""
        folder = _step_folder(self.path, step)
        for batch in batches(chunks):
            try:
                self._refuse_other_chunks(name, step, batch)
                with _orbax(max(chunk.nbytes for chunk in batch)) as ocp:
                    values = ocp.load(folder, {chunk.leaf: np.ndarray for chunk in batch})
            except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError) as e:
                raise BadFile(
                    f"{name} cannot be read",
                    "a file is missing, cut short or damaged",
                    f"in {folder}",
                    COPY_AGAIN,
                ) from e
            for chunk in batch:
                yield _sound(name, folder, chunk, values.pop(chunk.leaf))

    def _refuse_other_chunks(self, name: str, step: int, chunks: list[StoredChunk]) -> None:
        """Compares Orbax's metadata of the chunks with the manifest, before anything is allocated."""
        stored = self._stored(step)
        for chunk in chunks:
            found, expected = stored.get(chunk.leaf), (chunk.dtype, chunk.shape)
            if found != expected:
                what = f"{chunk.leaf} is {found or 'missing'}, expected {expected}"
                where = f"in {_step_folder(self.path, step)}"
                raise BadFile(f"{name} does not match the manifest", what, where, COPY_AGAIN)


def refuse_foreign(partial: Path, record: str) -> None:
    """Raises BadFile if `partial` has files but not the `record` that a conversion writes first: something else made it."""
    if not os.path.lexists(partial):
        return
    names = sorted(path.name for path in partial.iterdir()) if partial.is_dir() else [partial.name]
    records = {record, f"{record}.new", f"{record}.partial"}  # a kill may leave it under its temporary name
    if names and not records & {*names}:
        found = ", ".join(shortened([printable(name) for name in names], 5))
        raise BadFile(
            f"{partial} was not made by a conversion",
            f"it has no {record}, found {found}",
            "move it away, or choose another OUT",
        )


@contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
    """Turns an error of the system while `path` is written into one of ours; `kept` says what the next run will reuse."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as e:
        # TensorStore raises ValueError for errors of the system
        named = re.findall(r"os[_ ]error(?:_code=')? ?(\d+)", str(e))
        codes = {getattr(e, "errno", None), *map(int, named)}
        full = codes & {ENOSPC, EDQUOT, EFBIG}
        reason = "the disk is full, or a quota is reached" if full else printable(str(e), 300)
        error = DoesNotFit if full else BadFile
        advice = f"{kept} are kept: remove the cause and run the same command again"
        raise error(f"{path} cannot be written", reason, advice) from e


def is_store(folder: Path) -> bool:
    """Whether `folder` holds weights in this format, complete or not; reads nothing."""
    return (folder / MANIFEST).is_file() and (folder / "weights").is_dir()


def open_store(folder: Path) -> Store:
    """Reads and checks the manifest, no weights."""
    path = Path(os.path.abspath(folder))
    complete, metadata, tensors = read_manifest(path)
    if not complete:
        raise BadFile(
            f"{path} is not complete",
            "its conversion was stopped: run the same command again, and it goes on",
        )
    folders = {_step_folder(path, entry.step) for entry in tensors.values()}
    missing = sorted(f"{step.name} is missing" for step in folders if not step.is_dir())
    if missing:
        raise BadFile(f"{path / 'weights'} lacks a part of the weights", *shortened(missing), COPY_AGAIN)
    return Store(path, metadata, tensors)


@contextmanager
def _orbax(largest: int = 0) -> Iterator[Any]:
    """Orbax's API with our options; `largest`: bytes of the largest leaf that is read or written."""
    import orbax.checkpoint.experimental.v1 as ocp

    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_without_noise)
    _ignore_what_errors_leave()
    context = ocp.Context()
    context.array.saving.use_ocdbt = False  # one file per chunk: an error can name it
    # Quantised weights do not shrink, and compressing takes a step's memory again
    context.array.saving.use_compression = False
    context.memory.deepcopy_host_arrays = False
    context.memory.write_concurrent_bytes = context.memory.read_concurrent_bytes = max(COPY_BYTES, largest)
    context.pytree.loading.partial_load = True
    # The default of 20 minutes is too short for a large step on a slow disk
    context.asynchronous.timeout_secs = 24 * 3600
    with context:
        yield ocp


def _without_noise(record: logging.LogRecord) -> bool:
    return not any(noise in record.getMessage() for noise in NOISE)


@cache
def _ignore_what_errors_leave() -> None:
    """After an error, which is raised to us, Orbax closes its event loop while other reads are in flight or not yet awaited.

    Python would print a traceback or a warning for each of these."""
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning, r"orbax\.")
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        of_tensorstore = unraisable.object is None and unraisable.exc_type is RuntimeError
        if not (of_tensorstore and str(unraisable.exc_value) == "Event loop is closed"):
            before(unraisable)

    sys.unraisablehook = hook


def _stored(folder: Path) -> dict[str, tuple]:
    """The dtype and shape of each leaf of a step that is a single chunk; reads metadata only."""
    with _orbax() as ocp:
        leaves = ocp.metadata(folder).metadata.items()
    return {
        name: (leaf.dtype.name, leaf.shape)
        for name, leaf in leaves
        if leaf.storage_metadata.chunk_shape == leaf.shape
    }


def _sound(name: str, folder: Path, chunk: StoredChunk, value: np.ndarray) -> np.ndarray:
    found = checksum(value)
    if found != chunk.checksum:
        raise BadFile(
            f"{name} is damaged",
            f"{chunk.leaf} has the checksum {found}, not {chunk.checksum}",
            f"in {folder}",
            COPY_AGAIN,
        )
    return value


def _step_folder(folder: Path, step: int) -> Path:
    return folder / "weights" / f"{step:05d}"


def _box(index: Any, shape: Shape) -> Box:
    return tuple(along.indices(size)[:2] for along, size in zip(index, shape, strict=True))


def _placed(shape: Shape, sharding: Sharding, filled: dict[Box, np.ndarray]) -> jax.Array:
    return jax.make_array_from_callback(shape, sharding, lambda index: filled[_box(index, shape)])


def _device_boxes(shape: Shape, sharding: Sharding) -> set[Box]:
    """The boxes that this process's devices need of an array."""
    return {_box(index, shape) for index in sharding.addressable_devices_indices_map(shape).values()}
