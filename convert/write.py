"""Writes the tensors of a plan step by step. A kill at any moment loses only one step; only one converter may write an output."""

import fcntl
import json
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax

from convert.plan import Plan, stamp
from convert.tensors import Job, Parts, read
from mla_jax.base import qtensor
from mla_jax.base.config import says_all
from mla_jax.base.errors import BadFile, printable, shortened
from mla_jax.engine.text import files_of
from mla_jax.mesh.partition import Layout
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.orbax_store import NewTensor, Writer, writing
from mla_jax.weights.safetensors import STORED_DTYPES

Progress = Callable[[int, int, Job], None]


class Stopped(KeyboardInterrupt):
    """Raised after Ctrl-C, when the current step is written."""


def writer(out: Path, metadata: dict[str, Any], plan: Plan) -> Writer:
    """The folder to write: a new one, or one to resume."""
    by_name, layout = {job.name: job for job in plan.jobs}, Layout(**plan.mesh)

    def shards(name: str, part: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        job = by_name[name]
        if job.format in STORED_DTYPES:
            own = layout.local_shape(job.axes, jax.ShapeDtypeStruct(job.shape, STORED_DTYPES[job.format]))
        else:
            own = layout.local(job.axes, qtensor.abstract(job.format, job.shape)).parts[part].shape
        return tuple(n // m for n, m in zip(shape, own, strict=True))

    return Writer(out, metadata, shards)


def write(plan: Plan, target: Writer, progress: Progress, allow_nonfinite: bool = False) -> None:
    """Writes all that is missing and renames the folder. Raises Stopped after Ctrl-C, BadFile for weights that are not finite."""
    stamps = plan.metadata()["source"]
    _write_steps(plan, target, progress, allow_nonfinite)
    source = plan.checkpoint.source
    source.close()
    if changed := [
        file.name for file in source.files if not file.exists() or stamp(file) != stamps[file.name]
    ]:
        raise BadFile(
            "the source changed while it was read", *changed, "convert it again when nothing writes to it"
        )
    with writing(target.partial, "all its tensors"):
        write_others(plan.checkpoint, plan.dtype == "keep", target.partial)
    target.finalize()


def _write_steps(plan: Plan, target: Writer, progress: Progress, allow_nonfinite: bool) -> None:
    """Writes one step while a thread reads the next."""
    todo = plan.todo
    done = sum(job.nbytes for job in plan.jobs if job.name in plan.done)
    with interrupts() as stop, ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(_read, todo[0], plan) if todo else None
        for i, step in enumerate(todo):
            assert ahead is not None
            last = i + 1 == len(todo)
            tensors, counts = ahead.result()
            ahead = None if last or stop else pool.submit(_read, todo[i + 1], plan)
            unsound = {name: count for name, count in counts.items() if count}
            if unsound and not allow_nonfinite:
                raise refusal(unsound)
            target.save(tensors)
            del tensors  # before the step after the next one is read
            done += sum(job.nbytes for job in step)
            progress(done, plan.written, step[-1])
            if stop and not last:
                raise Stopped


def _read(step: list[Job], plan: Plan) -> tuple[dict[str, NewTensor], dict[str, int]]:
    found: dict[str, tuple[Parts, int]] = {}
    for job in step:
        found[job.name] = read(job, plan.checkpoint)
        _forget(plan.checkpoint.source.files)
    tensors = {job.name: NewTensor(job.format, job.shape, found[job.name][0]) for job in step}
    return tensors, {name: count for name, (_, count) in found.items()}


def _forget(files: Iterable[Path]) -> None:
    """Drops files from the page cache, as they are read only once. In a VM, where new pages are slow, this saves a third."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in files:
        with suppress(OSError), open(file, "rb") as opened:  # reading its weights reports a missing file
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def refusal(unsound: dict[str, int]) -> BadFile:
    found = [f"{printable(name)}: {count:,}" for name, count in unsound.items()]
    return BadFile(
        "weights hold NaN or infinity",
        *shortened(found),
        "the file is damaged; --allow-nonfinite converts it nevertheless",
    )


def write_others(checkpoint: Checkpoint, kept: bool, folder: Path) -> None:
    """Writes config.json and the tokenizer's files. Unless the weights are `kept`, quantization_config is left out."""
    source = checkpoint.source
    if kept and source.kind in ("safetensors", "orbax") and says_all(source.path):
        shutil.copyfile(source.path / "config.json", folder / "config.json")
    else:
        hf = checkpoint.config.to_hf()
        if not kept:
            hf = {key: value for key, value in hf.items() if key != "quantization_config"}
        (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    for name, content in files_of(source).items():
        (folder / name).write_bytes(content)


@contextmanager
def lock(out: Path) -> Iterator[None]:
    """Locks an output against a second converter. The system releases the lock when the process ends, also by a kill."""
    path = out.with_name(out.name + ".lock")
    try:
        file = open(path, "a+")  # noqa: SIM115
    except OSError as e:
        raise BadFile(f"{printable(str(path), 200)} cannot be written", e.strerror or str(e)) from e
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise BadFile(
                f"another converter writes {printable(str(out), 200)}",
                printable(file.read(200)),
                "wait for it",
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Yields a list; the first Ctrl-C adds an entry, so that the current step can end. The second is a KeyboardInterrupt."""
    stop: list[int] = []

    def once(number: int, frame: Any) -> None:
        stop.append(number)
        signal.signal(signal.SIGINT, before)
        os.write(
            2, b"\nstopping after this step; Ctrl-C again stops now. The next run resumes in both cases\n"
        )

    before = signal.signal(signal.SIGINT, once)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
