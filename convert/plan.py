"""The plan of a conversion: its reads and writes, and whether memory and disk suffice. Made before anything is written."""

import ctypes
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from convert.tensors import QUANTIZED, Job, jobs, steps
from mla_jax import __version__
from mla_jax.base.errors import BadFile, DoesNotFit, printable
from mla_jax.base.files import within
from mla_jax.base.limits import free_memory, gib
from mla_jax.engine.text import FILES, KIMI_FILES
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.orbax_chunks import BATCH

COPIES = {"embed_tokens.weight": "embed", "shared_head.head.weight": "head", "lm_head.weight": "embed"}
M_ARENA_MAX = -8  # from malloc.h
UNCALIBRATED = (
    "weights are rounded to the nearest codes, without calibration: docs/checkpoints.md has the loss"
)
LIBRARIES = 48 << 20  # bytes that Orbax allocates while it writes
COMPILER = 96 << 20  # bytes that XLA allocates, if formats are converted


@dataclass(frozen=True)
class Plan:
    """`done` are the tensors that an earlier run wrote; `copies` are tensors left out because they repeat another one."""

    checkpoint: Checkpoint
    out: Path
    jobs: Sequence[Job]
    dtype: str
    mesh: dict[str, int]
    done: frozenset[str]
    copies: dict[str, str]

    @property
    def todo(self) -> list[list[Job]]:
        return [*steps(job for job in self.jobs if job.name not in self.done)]

    @property
    def written(self) -> int:
        return sum(job.nbytes for job in self.jobs)

    @property
    def peak(self) -> int:
        """Peak host memory in bytes: one step is written while the next is read, or a batch is verified."""
        largest = max((job.nbytes for job in self.jobs), default=0)
        most = min(largest, BATCH)
        writing = 0  # bytes of the step before
        for step in steps(self.jobs):
            read = list(accumulate(job.nbytes for job in step))
            most = max(most, *(writing + done + job.workspace for job, done in zip(step, read, strict=True)))
            writing = read[-1]
        converts = any(job.format != job.stored for job in self.jobs)
        return held() + LIBRARIES + (COMPILER if converts else 0) + most

    @property
    def layers(self) -> int:
        return len({job.layer for job in self.jobs} - {None})

    def metadata(self) -> dict[str, Any]:
        return metadata(self.checkpoint, self.dtype, self.mesh, self.copies)

    def lines(self) -> list[str]:
        source, config = self.checkpoint.source, self.checkpoint.config
        read = sum(tensor.nbytes for tensor in source.tensors.values())
        found = [
            f"reads     {source.path} ({source.kind}): {config.model_type}, {self.layers} layers, {gib(read)}",
            f"writes    {self.out}: {self._sizes_by_format()}",
            self._memory_line(),
            f"disk      {gib(self.written)} of {gib(free(self.out))} free",
            f"left out  {self._left_out()}",
        ]
        found += [
            f"note      {note}"
            for note in (*config.notes, *([UNCALIBRATED] if self.dtype in QUANTIZED else []))
        ]
        if self.done:
            found.append(f"resuming at layer {self.first_layer()} of {self.layers}")
        return found

    def _sizes_by_format(self) -> str:
        sizes: dict[str, int] = {}
        for job in self.jobs:
            sizes[job.format] = sizes.get(job.format, 0) + job.nbytes
        largest_first = sorted(sizes.items(), key=lambda item: -item[1])
        return ", ".join(f"{name} {gib(size)}" for name, size in largest_first)

    def _memory_line(self) -> str:
        return f"memory    at most {gib(self.peak)} of {gib(available())}"

    def _left_out(self) -> str:
        """The number of tensors that are not read, and the names of the first three."""
        read = {piece.name for job in self.jobs for piece in job.pieces}
        unused = sorted(self.checkpoint.source.tensors.keys() - read)
        count = f"{len(unused)} tensors no model needs"
        if not unused:
            return count
        more = " ..." if len(unused) > 3 else ""
        return f"{count}: {', '.join(map(printable, unused[:3]))}{more}"

    def first_layer(self) -> int:
        return next((job.layer for step in self.todo for job in step if job.layer is not None), self.layers)

    def refuse(self) -> None:
        """Raises DoesNotFit if the disk or the memory is too small."""
        needed = sum(job.nbytes for step in self.todo for job in step)
        if needed > (room := free(self.out)):
            raise DoesNotFit(
                f"{self.out} does not fit on its disk",
                f"{gib(needed)} are still to be written, {gib(room)} are free",
            )
        if self.peak > available():
            raise DoesNotFit("the conversion needs more memory than there is", self._memory_line())


def plan(
    checkpoint: Checkpoint, out: Path, dtype: str, mesh: dict[str, int], done: frozenset[str] = frozenset()
) -> Plan:
    return Plan(checkpoint, out, jobs(checkpoint, dtype), dtype, mesh, done, copies(checkpoint))


def metadata(
    checkpoint: Checkpoint, dtype: str, mesh: dict[str, int], repeated: dict[str, str]
) -> dict[str, Any]:
    """The source and the options of a conversion. Only a run with the same ones may resume it."""
    source = checkpoint.source
    made = {
        "source": {file.name: stamp(file) for file in source.files},
        "kind": source.kind,
        "scales": source.scales,
    }
    return {**made, "dtype": dtype, "mesh": mesh, "copies": repeated, "converter": __version__}


def copies(checkpoint: Checkpoint) -> dict[str, str]:
    """Unused tensors that repeat the embedding or the head byte for byte, as MTP layers have them, and the paths they repeat.

    The manifest of a converted source lists those that were left out."""
    source = checkpoint.source
    if source.made_of is not None:
        return dict(source.made_of.get("copies", {}))
    used = {name for origin in checkpoint.sources.values() for name in origin.names}
    found = {}
    for name in source.tensors:
        path = next((path for suffix, path in COPIES.items() if name.endswith(suffix)), None)
        if name in used or path is None or path not in checkpoint.sources:
            continue
        if _equal(checkpoint, name, path):
            found[name] = path
    return found


def _equal(checkpoint: Checkpoint, name: str, path: str) -> bool:
    """Whether a tensor of the source has the bytes of the parameter `path`."""
    source = checkpoint.source
    other = source.table.find(path, checkpoint.config, source.tensors).names[0]
    pairs = zip(source.read(name), source.read(other), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


def check_paths(source: Path, out: Path) -> None:
    """Raises BadFile if the output exists, cannot be written or is inside the source, or if the source links to other folders."""
    shown = printable(str(out), 200)
    parent = Path(os.path.realpath(out.parent))
    if os.path.lexists(parent / out.name):
        raise BadFile(f"{shown} exists already", "choose another folder, or delete it first")
    if not os.path.isdir(parent):
        raise BadFile(f"there is no folder {printable(str(parent), 200)}", "create it first")
    if not os.access(parent, os.W_OK):
        raise BadFile(f"{printable(str(parent), 200)} cannot be written to", "choose another folder")
    if not source.is_dir():
        return
    if source.resolve() in (parent, *parent.parents):
        raise BadFile(
            f"{shown} is inside the source", f"which is {printable(str(source), 200)}; choose another folder"
        )
    for name in ("config.json", *FILES, *KIMI_FILES):  # the files that are copied
        within(source, name)


def stamp(file: Path) -> list[int]:
    """Identifies a version of a file: it changes when the file is written to or replaced."""
    status = file.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def free(out: Path) -> int:
    """Free bytes on the disk of `out`."""
    return shutil.disk_usage(out.parent).free


def share_heap() -> None:
    """Makes all threads allocate from one heap: glibc's heaps per thread keep hundreds of MB, which no plan can predict."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)


def available() -> int:
    """Bytes of host memory that this process may have: its own now, and the free ones."""
    return held() + free_memory()


def held() -> int:
    """Bytes of memory that this process has now; 0 without /proc."""
    if not os.path.exists("/proc"):
        return 0
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
