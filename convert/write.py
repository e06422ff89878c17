"""Writes a plan's tensors step by step: safe against a kill at any moment, and one converter at a time on an output."""

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

from convert.plan import Plan, stamp
from convert.tensors import Job, Parts, read
from mla_jax.base import axes
from mla_jax.base.errors import BadFile, printable, shortened
from mla_jax.engine.text import files_of
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.orbax_store import Tensor, Writer, writing

Progress = Callable[[int, int, Job], None]


class Stopped(KeyboardInterrupt):
    """Ctrl-C, after the step that was under way."""


def writer(out: Path, metadata: dict[str, Any], plan: Plan) -> Writer:
    """The folder to write, begun or to be gone on with."""
    by_name = {job.name: job for job in plan.jobs}

    def shards(name: str, part: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        return axes.shards(by_name[name].axes, by_name[name].shape, shape, plan.mesh)

    return Writer(out, metadata, shards)


def write(plan: Plan, target: Writer, progress: Progress, allow_nonfinite: bool = False) -> None:
    """Everything that is still to be written; raises Stopped after Ctrl-C, BadFile for weights that are not finite."""
    todo, done = plan.todo, sum(job.nbytes for job in plan.jobs if job.name in plan.done)
    stamps, unsound = plan.metadata()["source"], {}
    with interrupts() as stop, ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(_read, todo[0], plan) if todo else None
        for i, step in enumerate(todo):
            assert ahead is not None
            tensors, counts = ahead.result()
            ahead = pool.submit(_read, todo[i + 1], plan) if i + 1 < len(todo) and not stop else None
            unsound |= {name: count for name, count in counts.items() if count}
            if unsound and not allow_nonfinite:
                raise refusal(unsound)
            target.save(tensors)
            del tensors
            done += sum(job.nbytes for job in step)
            progress(done, plan.written, step[-1])
            if stop and i + 1 < len(todo):
                raise Stopped
    plan.checkpoint.source.close()
    files = plan.checkpoint.source.files
    if changed := [file.name for file in files if not file.exists() or stamp(file) != stamps[file.name]]:
        raise BadFile("the source changed while it was read", *changed, "convert it again when nothing writes to it")
    with writing(target.partial, "all its tensors"):
        write_others(plan.checkpoint, plan.dtype == "keep", target.partial)
    target.finalize()


def _read(step: list[Job], plan: Plan) -> tuple[dict[str, Tensor], dict[str, int]]:
    found: dict[str, tuple[Parts, int]] = {}
    for job in step:
        found[job.name] = read(job, plan.checkpoint)
        _forget(plan.checkpoint.source.files)
    tensors = {job.name: Tensor(job.format, job.shape, found[job.name][0]) for job in step}
    return tensors, {name: count for name, (_, count) in found.items()}


def _forget(files: Iterable[Path]) -> None:
    """Has the system give up its copy of files that are read once: a third of the time where fresh memory is dear, as in a VM."""
    for file in files if hasattr(os, "posix_fadvise") else ():
        with suppress(OSError), open(file, "rb") as opened:  # a file that went missing is noticed by who reads it
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def refusal(unsound: dict[str, int]) -> BadFile:
    found = [f"{printable(name)}: {count:,}" for name, count in unsound.items()]
    return BadFile(
        "weights hold NaN or infinity", *shortened(found), "the file is damaged; --allow-nonfinite converts it all the same"
    )


def write_others(checkpoint: Checkpoint, kept: bool, folder: Path) -> None:
    """config.json, without a claim of FP8 unless the weights are `kept`, and the tokenizer's files."""
    source = checkpoint.source
    config = source.path / "config.json"
    if kept and source.kind in ("safetensors", "orbax"):
        shutil.copyfile(config, folder / "config.json")
    else:
        hf = checkpoint.config.to_hf()
        hf = hf if kept else {key: value for key, value in hf.items() if key != "quantization_config"}
        (folder / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
    for name, content in files_of(source).items():
        (folder / name).write_bytes(content)


@contextmanager
def lock(out: Path) -> Iterator[None]:
    """Keeps a second converter from the same output; the system takes the lock away when its holder ends, however it does."""
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
                f"another converter writes {printable(str(out), 200)}", printable(file.read(200)), "wait for it"
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
    """A list that is filled by the first Ctrl-C, which lets the step under way end; the second is a KeyboardInterrupt."""
    stop: list[int] = []

    def once(number: int, frame: Any) -> None:
        stop.append(number)
        signal.signal(signal.SIGINT, before)
        os.write(2, b"\nstopping after this step; Ctrl-C again stops now. Either way the next run goes on from here\n")

    before = signal.signal(signal.SIGINT, once)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
