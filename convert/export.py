"""Back to a Hugging Face folder: safetensors under the released names, kept tensors bit for bit."""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from convert.plan import COMPILER, LIBRARIES, copies, free, held, metadata
from convert.progress import Bar
from convert.tensors import DTYPE_NAMES, Parts, cut, nbytes, plain, unsound_in
from convert.write import Stopped, interrupts, lock, refusal, write_others
from mla_jax.base import axes, qtensor
from mla_jax.base.errors import BadFile, DoesNotFit, Unsupported
from mla_jax.base.files import read_json
from mla_jax.weights.fill import PLAIN
from mla_jax.weights.hf_names import HF, SCALE
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.names import Origin, value_half
from mla_jax.weights.orbax_store import BATCH, refuse_foreign, writing
from mla_jax.weights.plan import available, gib
from mla_jax.weights.safetensors import DTYPES
from mla_jax.weights.save import complete, write_tensors

FILE = 4 << 30  # bytes of weights in one file, unless one parameter has more
JOURNAL = "conversion.json"
READERS = 3  # parameters in memory at a time: one is written, the others are read


@dataclass(frozen=True)
class Item:
    """One of our parameters (`uk` with its `uv`) and the tensors that it is in a released folder."""

    path: str
    names: tuple[str, ...]
    shape: tuple[int, ...]  # of each
    format: str
    copies: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return (len(self.names) + len(self.copies)) * nbytes(self.format, self.shape)


def run(checkpoint: Checkpoint, out: Path, dtype: str, dry_run: bool, allow_nonfinite: bool) -> int:
    files = _files(_items(checkpoint, dtype))
    total = sum(item.nbytes for file in files for item in file)
    needed, read = peak(checkpoint, files), sum(entry.nbytes for entry in checkpoint.source.tensors.values())
    lines = [
        f"reads     {checkpoint.source.path} ({checkpoint.source.kind}): {gib(read)}",
        f"writes    {out}: {gib(total)}",
        f"memory    at most {gib(needed)} of {gib(available())}",
        f"disk      {gib(total)} of {gib(free(out))} free",
    ]
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    if dry_run:
        return 0
    if needed > available():
        raise DoesNotFit("the conversion needs more memory than there is", lines[2])
    with lock(out):
        folder = _begin(checkpoint, out, dtype)
        left = total - sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if left > (room := free(out)):
            raise DoesNotFit(f"{out} does not fit on its disk", f"{gib(left)} are still to be written, {gib(room)} are free")
        start, bar = time.monotonic(), Bar("writing")
        _write(checkpoint, files, folder, bar, allow_nonfinite)
        bar.close(time.monotonic() - start)
        checkpoint.source.close()
        with writing(folder, "all its weights"):
            write_others(checkpoint, dtype == "keep", folder)
            (folder / JOURNAL).unlink()
            os.rename(folder, out)
    return 0


def peak(checkpoint: Checkpoint, files: list[list[Item]]) -> int:
    """Most host memory at a time: READERS of the largest parameters, being written, read or converted."""
    most = 0
    for item in (item for file in files for item in file):
        source = checkpoint.sources[item.path]
        stored = sum(checkpoint.source.tensors[name].nbytes for name in source.names)
        raw = stored * (item.format != checkpoint.format_of(source))
        most = max(most, READERS * (item.nbytes + min(stored, BATCH)) + raw)
    return held() + LIBRARIES + COMPILER + most


def _begin(checkpoint: Checkpoint, out: Path, dtype: str) -> Path:
    """The folder that is written under another name until all is there; refuses one that was begun from something else."""
    folder, wanted = out.with_name(out.name + ".partial"), json.loads(json.dumps(metadata(checkpoint, dtype, {}, {})))
    with writing(folder, "the files in it"):
        refuse_foreign(folder, JOURNAL)
        folder.mkdir(exist_ok=True)
        if not (folder / JOURNAL).exists():
            complete(folder / JOURNAL, lambda path: path.write_text(json.dumps(wanted)))
    found = read_json(folder / JOURNAL, 1 << 26)
    if differing := [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]:
        raise BadFile(f"{folder} was begun from something else", f"what differs: {', '.join(differing)}", "delete it first")
    return folder


def _items(checkpoint: Checkpoint, dtype: str) -> list[Item]:
    config, found = checkpoint.config, []
    repeated = {name: path for name, path in copies(checkpoint).items() if name.startswith(("model.", "lm_head."))}
    for path, source in checkpoint.sources.items():
        if source.part is value_half or path.endswith("attn.uv"):
            continue  # written with its other half
        target, exact = HF.find(path, config), checkpoint.slots[path].get_metadata()["exact"]
        format = _format(dtype, checkpoint.format_of(source), exact, path)
        same = tuple(name for name, ours in repeated.items() if ours == path)
        found.append(Item(path, target.names, axes.shape(config, target.axes), format, same))
    return found


def _format(dtype: str, stored: str, exact: bool, path: str) -> str:
    if dtype == "int8" or (dtype == "keep" and stored not in PLAIN and not stored.startswith("fp8_block")):
        kind = dtype if dtype == "int8" else stored
        raise Unsupported(f"a Hugging Face folder cannot hold {kind}", f"as {path} is", "say --dtype bf16 or --dtype f32")
    return stored if dtype == "keep" else "F32" if exact else DTYPE_NAMES[dtype]


def _files(items: list[Item]) -> list[list[Item]]:
    files: list[list[Item]] = [[]]
    for item in items:
        if files[-1] and sum(i.nbytes for i in files[-1]) + item.nbytes > FILE:
            files.append([])
        files[-1].append(item)
    return files


def _write(checkpoint: Checkpoint, files: list[list[Item]], folder: Path, bar: Bar, allow_nonfinite: bool) -> None:
    index, total = {}, sum(item.nbytes for file in files for item in file)
    done = 0

    def parameters(file: list[Item], i: int) -> Iterator[tuple[str, np.ndarray]]:
        nonlocal done
        for item, (tensors, unsound) in zip(file, _ahead(partial(_read, checkpoint), file), strict=True):
            if unsound and not allow_nonfinite:
                raise refusal({item.path: unsound})
            yield from tensors
            del tensors
            done += item.nbytes
            bar(done, total, f"file {i + 1} of {len(files)}")

    with interrupts() as stop:
        for i, file in enumerate(files):
            name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
            specs = dict(spec for item in file for spec in _specs(item, checkpoint.source.scales))
            if (folder / name).exists():
                done += sum(item.nbytes for item in file)
            else:
                with writing(folder, f"the {i:,} files before"):
                    complete(
                        folder / name, lambda path, specs=specs, file=file, i=i: write_tensors(path, specs, parameters(file, i))
                    )
            index |= dict.fromkeys(specs, name)
            if stop and i + 1 < len(files):
                raise Stopped
    if len(files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        with writing(folder, "all its weights"):
            (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def _ahead(read: Callable[[Item], Any], items: list[Item]) -> Iterator[Any]:
    """What is read of each, some ahead of what is used."""
    with ThreadPoolExecutor(READERS) as pool:
        reading = deque()
        for item in items:
            reading.append(pool.submit(read, item))
            if len(reading) == READERS:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()


def _specs(item: Item, scales: str) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """The dtype and shape of each tensor that is written."""
    packed = item.format.startswith("fp8_block")
    for name in (*item.names, *item.copies):
        yield name, ("F8_E4M3" if packed else item.format, item.shape)
        if packed:
            yield name + SCALE, (scales, qtensor.abstract(item.format, item.shape).parts[1].shape)


def _read(checkpoint: Checkpoint, item: Item) -> tuple[list[tuple[str, np.ndarray]], int]:
    """The tensors of a parameter, experts one by one, and how many values (of packed ones: blocks) are not finite."""
    found = list(_pieces(item, checkpoint, checkpoint.sources[item.path]))
    pieces, unsound = [parts for parts, _ in found], sum(count for _, count in found)
    if len(item.names) > 1 and len(pieces) == 1:  # a stack that is read whole
        pieces = [tuple(part[x] for part in pieces[0]) for x in range(len(item.names))]
    scales, tensors = np.dtype(DTYPES[checkpoint.source.scales]), []
    for name, parts in zip((*item.names, *item.copies), pieces * (1 + len(item.copies)), strict=True):
        tensors.append((name, parts[0]))
        if len(parts) > 1:
            tensors.append((name + SCALE, parts[1].astype(scales)))
    return tensors, unsound


def _pieces(item: Item, checkpoint: Checkpoint, source: Origin) -> Iterator[tuple[Parts, int]]:
    stored, stack = checkpoint.format_of(source), (len(item.names),) if len(item.names) > len(source.pieces) else ()
    if item.path.endswith("attn.uk") and source.names != checkpoint.sources[_other_half(item.path)].names:
        yield _joined(item, checkpoint)
        return
    for piece in source.pieces:
        raw = tuple(cut(source)(part, checkpoint.config) for part in checkpoint.source.read(*piece))
        unsound = unsound_in(raw, stored)
        yield raw if stored == item.format else (plain(raw, stored, (*stack, *item.shape), DTYPES[item.format]),), unsound


def _other_half(path: str) -> str:
    return path.removesuffix("uk") + "uv"


def _joined(item: Item, checkpoint: Checkpoint) -> tuple[Parts, int]:
    """kv_b_proj of its halves, which lie apart."""
    halves, unsound = [], 0
    for path in (item.path, _other_half(item.path)):
        source = checkpoint.sources[path]
        entry, raw = checkpoint.source.tensors[source.names[0]], checkpoint.source.read(source.names[0])
        unsound += unsound_in(raw, entry.format)
        halves.append(source.part(plain(raw, entry.format, entry.shape, DTYPES[item.format]), checkpoint.config))
    return (np.concatenate(halves, axis=1).reshape(item.shape),), unsound
