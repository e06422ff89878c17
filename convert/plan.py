"""What a conversion will read and write, and whether it can: said before anything is done."""

import ctypes
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from convert.tensors import Job, jobs, steps
from mla_jax import __version__
from mla_jax.base import axes
from mla_jax.base.errors import BadFile, BadRequest, DoesNotFit, printable
from mla_jax.base.files import within
from mla_jax.engine.text import FILES, KIMI_FILES
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.orbax_store import BATCH
from mla_jax.weights.plan import available, gib

COPIES = {"embed_tokens.weight": "embed", "shared_head.head.weight": "head", "lm_head.weight": "embed"}
M_ARENA_MAX = -8  # of malloc.h
LIBRARIES = 48 << 20  # what Orbax comes to hold while it works, beside what the interpreter holds by then
COMPILER = 96 << 20  # and XLA, where numbers are converted


@dataclass(frozen=True)
class Plan:
    """`done` are names that an earlier run has written; `copies` are tensors left out as equal to one of ours."""

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
        """Most host memory at a time: one step is written while the next is read, or a batch is verified."""
        most, written = min(max((job.nbytes for job in self.jobs), default=0), BATCH), 0
        for step in steps(self.jobs):
            begun = list(accumulate(job.nbytes for job in step))
            most = max(most, *(written + done + job.workspace for job, done in zip(step, begun, strict=True)))
            written = begun[-1]
        return held() + LIBRARIES + COMPILER * any(job.format != job.stored for job in self.jobs) + most

    @property
    def layers(self) -> int:
        return len({job.layer for job in self.jobs} - {None})

    def metadata(self) -> dict[str, Any]:
        return metadata(self.checkpoint, self.dtype, self.mesh, self.copies)

    def lines(self) -> list[str]:
        source, config = self.checkpoint.source, self.checkpoint.config
        read = sum(tensor.nbytes for tensor in source.tensors.values())
        formats: dict[str, int] = {}
        for job in self.jobs:
            formats[job.format] = formats.get(job.format, 0) + job.nbytes
        held_formats = ", ".join(f"{name} {gib(size)}" for name, size in sorted(formats.items(), key=lambda item: -item[1]))
        needless = sorted(source.tensors.keys() - {piece.name for job in self.jobs for piece in job.pieces})
        left = ", ".join(map(printable, needless[:3])) + (" ..." if len(needless) > 3 else "")
        return [
            f"reads     {source.path} ({source.kind}): {config.model_type}, {self.layers} layers, {gib(read)}",
            f"writes    {self.out}: {held_formats}",
            f"memory    at most {gib(self.peak)} of {gib(available())}",
            f"disk      {gib(self.written)} of {gib(free(self.out))} free",
            f"left out  {len(needless)} tensors no model needs" + (f": {left}" if needless else ""),
            *(f"note      {note}" for note in config.notes),
            *([f"resuming at layer {self.first_layer()} of {self.layers}"] if self.done else []),
        ]

    def first_layer(self) -> int:
        return next((job.layer for step in self.todo for job in step if job.layer is not None), self.layers)

    def refuse(self) -> None:
        """Raises for what can be foreseen: no room on the disk or in memory."""
        needed = sum(job.nbytes for step in self.todo for job in step)
        if needed > (room := free(self.out)):
            raise DoesNotFit(
                f"{self.out} does not fit on its disk", f"{gib(needed)} are still to be written, {gib(room)} are free"
            )
        if self.peak > available():
            raise DoesNotFit("the conversion needs more memory than there is", *self.lines()[2:3])


def plan(checkpoint: Checkpoint, out: Path, dtype: str, mesh: dict[str, int], done: frozenset[str] = frozenset()) -> Plan:
    return Plan(checkpoint, out, jobs(checkpoint, dtype), dtype, mesh, done, copies(checkpoint))


def metadata(checkpoint: Checkpoint, dtype: str, mesh: dict[str, int], repeated: dict[str, str]) -> dict[str, Any]:
    """What weights are made of and how: a run that differs in this is another conversion."""
    source = checkpoint.source
    made = {"source": {file.name: stamp(file) for file in source.files}, "kind": source.kind, "scales": source.scales}
    return {**made, "dtype": dtype, "mesh": mesh, "copies": repeated, "converter": __version__}


def copies(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensors that repeat the embedding or the head, as MTP layers have them, by what they repeat; compared byte for byte.

    What was converted before has none, and says which were left out."""
    source, table, config = checkpoint.source, checkpoint.source.table, checkpoint.config
    if source.made_of is not None:
        return dict(source.made_of.get("copies", {}))
    used = {name for found in checkpoint.sources.values() for name in found.names}
    found = {}
    for name in (name for name in source.tensors if name not in used):
        ours = next((path for suffix, path in COPIES.items() if name.endswith(suffix)), None)
        if ours is None or ours not in checkpoint.sources:
            continue
        one, other = source.read(name), source.read(table.find(ours, config, source.tensors).names[0])
        if all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True)):
            found[name] = ours
    return found


def check_paths(source: Path, out: Path) -> None:
    """Refuses an output that exists, cannot be written or is inside the source, and a source with links to other folders."""
    shown, inside, out = printable(str(out), 200), source.resolve(), Path(os.path.realpath(out.parent), out.name)
    if os.path.lexists(out):
        raise BadFile(f"{shown} exists already", "choose another folder, or delete it first")
    if not os.path.isdir(out.parent):
        raise BadFile(f"there is no folder {printable(str(out.parent), 200)}", "make it first")
    if not os.access(out.parent, os.W_OK):
        raise BadFile(f"{printable(str(out.parent), 200)} cannot be written to", "choose another folder")
    if not source.is_dir():
        return
    if inside in out.parents:
        raise BadFile(f"{shown} is inside the source", f"which is {printable(str(source), 200)}; choose another folder")
    for name in ("config.json", *FILES, *KIMI_FILES):  # those that are copied
        within(source, name)


def parse_mesh(text: str) -> dict[str, int]:
    """`tensor=4,expert=8` as a mapping; raises BadRequest."""
    found = {}
    for word in text.split(",") if text else []:
        name, _, size = word.partition("=")
        if name not in axes.MESH_AXES or not re.fullmatch("[1-9][0-9]{0,3}", size) or name in found:
            raise BadRequest(f"--mesh {printable(text)} is no mesh", f"expected {','.join(n + '=N' for n in axes.MESH_AXES)}")
        found[name] = int(size)
    return found


def stamp(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns]


def free(out: Path) -> int:
    return shutil.disk_usage(out.parent).free


def share_heap() -> None:
    """Has all threads take memory from one heap: glibc gives each its own, which comes to keep hundreds of MB unforeseen."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_ARENA_MAX, 1)


def held() -> int:
    """Bytes of memory that this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if os.path.exists("/proc") else 0
