"""Back to a Hugging Face folder: safetensors under the released names, kept tensors bit for bit."""

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from convert.plan import copies, free, metadata
from convert.progress import Bar
from convert.tensors import DTYPE_NAMES, cut, nbytes, plain
from convert.write import Stopped, interrupts, lock, write_others
from mla_jax.base import axes
from mla_jax.base.errors import BadFile, DoesNotFit, Unsupported
from mla_jax.base.files import read_json
from mla_jax.weights.checkpoint import writing
from mla_jax.weights.hf_names import HF, SCALE
from mla_jax.weights.load import PLAIN, Checkpoint
from mla_jax.weights.names import Source, value_half
from mla_jax.weights.plan import gib
from mla_jax.weights.safetensors import DTYPES
from mla_jax.weights.save import complete

FILE = 4 << 30  # bytes of weights in one file, unless one parameter has more
JOURNAL = "conversion.json"


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


def run(checkpoint: Checkpoint, out: Path, dtype: str, dry_run: bool) -> int:
    files = _files(_items(checkpoint, dtype))
    total = sum(item.nbytes for file in files for item in file)
    for line in (f"reads     {checkpoint.source.path} ({checkpoint.source.kind})", f"writes    {out}: {gib(total)}"):
        print(line, file=sys.stderr, flush=True)
    if dry_run:
        return 0
    with lock(out):
        folder = _begin(checkpoint, out, dtype)
        needed = total - sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        if needed > (room := free(out)):
            raise DoesNotFit(f"{out} does not fit on its disk", f"{gib(needed)} are still to be written, {gib(room)} are free")
        start, bar = time.monotonic(), Bar("writing")
        _write(checkpoint, files, folder, bar)
        bar.close(time.monotonic() - start)
        checkpoint.source.close()
        with writing(folder, "all its weights"):
            write_others(checkpoint, dtype == "keep", folder)
            (folder / JOURNAL).unlink()
            os.rename(folder, out)
    return 0


def _begin(checkpoint: Checkpoint, out: Path, dtype: str) -> Path:
    """The folder that is written under another name until all is there; refuses one that was begun from something else."""
    folder, wanted = out.with_name(out.name + ".partial"), json.loads(json.dumps(metadata(checkpoint, dtype, {}, {})))
    with writing(folder, "the files in it"):
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


def _write(checkpoint: Checkpoint, files: list[list[Item]], folder: Path, bar: Bar) -> None:
    index, done, total = {}, 0, sum(item.nbytes for file in files for item in file)
    with interrupts() as stop:
        for i, file in enumerate(files):
            name = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else "model.safetensors"
            path = folder / name
            if not path.exists():
                tensors = {name: value for item in file for name, value in _tensors(item, checkpoint)}
                with writing(folder, f"the {i:,} files before"):
                    complete(path, lambda file, tensors=tensors: save_file(tensors, file, metadata={"format": "pt"}))
            index |= {n: name for item in file for n in _names(item)}
            done += sum(item.nbytes for item in file)
            bar(done, total, f"file {i + 1} of {len(files)}")
            if stop and i + 1 < len(files):
                raise Stopped
    if len(files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        with writing(folder, "all its weights"):
            (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def _names(item: Item) -> Iterator[str]:
    for name in (*item.names, *item.copies):
        yield name
        if item.format.startswith("fp8_block"):
            yield name + SCALE


def _tensors(item: Item, checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a parameter, experts one by one."""
    pieces = list(_pieces(item, checkpoint, checkpoint.sources[item.path]))
    if len(item.names) > 1 and len(pieces) == 1:  # a stack that is read whole
        pieces = [tuple(part[x] for part in pieces[0]) for x in range(len(item.names))]
    scales = np.dtype(DTYPES[checkpoint.source.scales])
    for name, parts in zip((*item.names, *item.copies), pieces * (1 + len(item.copies)), strict=True):
        yield name, np.ascontiguousarray(parts[0])
        if len(parts) > 1:
            yield name + SCALE, parts[1].astype(scales)


def _pieces(item: Item, checkpoint: Checkpoint, source: Source) -> Iterator[tuple[np.ndarray, ...]]:
    stored, stack = checkpoint.format_of(source), (len(item.names),) if len(item.names) > len(source.pieces) else ()
    if item.path.endswith("attn.uk") and source.names != checkpoint.sources[_other_half(item.path)].names:
        yield (_joined(item, checkpoint),)
        return
    for piece in source.pieces:
        raw = tuple(cut(source)(part, checkpoint.config) for part in checkpoint.source.read(*piece))
        yield raw if stored == item.format else (plain(raw, stored, (*stack, *item.shape), DTYPES[item.format]),)


def _other_half(path: str) -> str:
    return path.removesuffix("uk") + "uv"


def _joined(item: Item, checkpoint: Checkpoint) -> np.ndarray:
    """kv_b_proj of its halves, which lie apart."""
    halves = []
    for path in (item.path, _other_half(item.path)):
        source = checkpoint.sources[path]
        entry = checkpoint.source.tensors[source.names[0]]
        values = plain(checkpoint.source.read(source.names[0]), entry.format, entry.shape, DTYPES[item.format])
        halves.append(np.asarray(source.part(values, checkpoint.config)))
    return np.concatenate(halves, axis=1).reshape(item.shape)
