"""Converts back to a Hugging Face folder: safetensors with the released names. Without --dtype, tensors are equal bit for bit."""

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

from convert.plan import COMPILER, LIBRARIES, available, copies, free, held, metadata
from convert.progress import Bar
from convert.tensors import DTYPE_NAMES, QUANTIZED, Parts, cut, nbytes, plain, unsound_in
from convert.write import Stopped, interrupts, lock, refusal, write_others
from mla_jax.base import axes
from mla_jax.base.config import CONFIG_BYTES
from mla_jax.base.errors import BadFile, DoesNotFit
from mla_jax.base.files import read_json
from mla_jax.base.limits import gib
from mla_jax.weights.hf_names import table_of
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.names import Origin, value_half
from mla_jax.weights.orbax_chunks import BATCH
from mla_jax.weights.orbax_store import refuse_foreign, writing
from mla_jax.weights.released import SETTINGS, Stored, as_stored, refusal_of
from mla_jax.weights.safetensors import STORED_DTYPES
from mla_jax.weights.save import FILE_BYTES, complete, file_name, in_files, write_tensors

JOURNAL = "conversion.json"
ADVICE = "use --dtype bf16 or --dtype f32"
READERS = 3  # parameters in memory at a time: one is written while the others are read


@dataclass(frozen=True)
class Item:
    """A parameter of the model (`uk` includes `uv`), its tensors in a released folder, and how each is stored."""

    path: str
    names: tuple[str, ...]
    stored: Stored
    copies: tuple[str, ...]  # names of tensors that repeat it

    @property
    def nbytes(self) -> int:
        return (len(self.names) + len(self.copies)) * nbytes(self.stored.format, self.stored.shape)


def run(checkpoint: Checkpoint, out: Path, dtype: str, dry_run: bool, allow_nonfinite: bool) -> int:
    """Prints the plan; unless it is a dry run, writes the folder. Returns the exit code."""
    files = in_files(_items(checkpoint, dtype), FILE_BYTES)
    source, total = checkpoint.source, _total(files)
    needed = peak(checkpoint, files)
    memory = f"memory    at most {gib(needed)} of {gib(available())}"
    lines = [
        f"reads     {source.path} ({source.kind}): {gib(sum(entry.nbytes for entry in source.tensors.values()))}",
        f"writes    {out}: {gib(total)}",
        memory,
        f"disk      {gib(total)} of {gib(free(out))} free",
    ]
    print(*lines, sep="\n", file=sys.stderr, flush=True)
    if dry_run:
        return 0
    if needed > available():
        raise DoesNotFit("the conversion needs more memory than there is", memory)
    with lock(out):
        folder = _begin(checkpoint, out, dtype)
        _refuse_full_disk(folder, out, total)
        start, bar = time.monotonic(), Bar("writing")
        _write(checkpoint, files, folder, bar, allow_nonfinite)
        bar.close(time.monotonic() - start)
        source.close()
        with writing(folder, "all its weights"):
            write_others(checkpoint, dtype == "keep", folder)
            _describe(folder, files)
            (folder / JOURNAL).unlink()
            os.rename(folder, out)
    return 0


def _total(files: list[list[Item]]) -> int:
    """Bytes of weights in all files."""
    return sum(item.nbytes for file in files for item in file)


def _refuse_full_disk(folder: Path, out: Path, total: int) -> None:
    left = total - sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if left > (room := free(out)):
        raise DoesNotFit(
            f"{out} does not fit on its disk", f"{gib(left)} are still to be written, {gib(room)} are free"
        )


def peak(checkpoint: Checkpoint, files: list[list[Item]]) -> int:
    """Peak host memory in bytes: READERS parameters of the largest size, each written, read or converted."""
    most = 0
    for item in (item for file in files for item in file):
        source = checkpoint.sources[item.path]
        stored = sum(checkpoint.source.tensors[name].nbytes for name in source.names)
        raw = stored * (item.stored.format != checkpoint.format_of(source))
        layout = item.stored.layout
        copies = max(checkpoint.copies, layout.copies if layout else 0)
        moved = READERS * copies * nbytes(item.stored.format, item.stored.shape)
        most = max(most, READERS * (item.nbytes + min(stored, BATCH)) + raw + moved)
    return held() + LIBRARIES + COMPILER + most


def _begin(checkpoint: Checkpoint, out: Path, dtype: str) -> Path:
    """The folder to write, under a temporary name until it is complete. Raises BadFile if another conversion began it."""
    folder = out.with_name(out.name + ".partial")
    wanted = json.loads(json.dumps(metadata(checkpoint, dtype, {}, {})))
    with writing(folder, "the files in it"):
        refuse_foreign(folder, JOURNAL)
        folder.mkdir(exist_ok=True)
        if not (folder / JOURNAL).exists():
            complete(folder / JOURNAL, lambda path: path.write_text(json.dumps(wanted)))
    found = read_json(folder / JOURNAL, 1 << 26)
    if differing := [key for key in {**found, **wanted} if found.get(key) != wanted.get(key)]:
        raise BadFile(
            f"{folder} was begun from something else",
            f"what differs: {', '.join(differing)}",
            "delete it first",
        )
    return folder


def _items(checkpoint: Checkpoint, dtype: str) -> list[Item]:
    config, table, found = checkpoint.config, table_of(checkpoint.config), []
    repeated = {
        name: path for name, path in copies(checkpoint).items() if name.startswith(("model.", "lm_head."))
    }
    for path, source in checkpoint.sources.items():
        if source.part is value_half or path.endswith("attn.uv"):
            continue  # written with uk
        target = table.find(path, config)
        exact = checkpoint.slots[path].get_metadata()["exact"]
        format = _format(dtype, checkpoint.format_of(source), exact, path)
        same = tuple(name for name, ours in repeated.items() if ours == path)
        shape = axes.shape(config, target.axes)
        found.append(Item(path, target.names, as_stored(config, format, shape, path, ADVICE), same))
    return found


def _format(dtype: str, stored: str, exact: bool, path: str) -> str:
    """The format to write; raises Unsupported for those that are quantised here, of which no released folder is made."""
    if dtype in QUANTIZED:
        raise refusal_of(dtype, path, ADVICE)
    if dtype == "keep":
        return stored
    return "F32" if exact else DTYPE_NAMES[dtype]


def _describe(folder: Path, files: list[list[Item]]) -> None:
    """Says in config.json how weights are packed, if nothing there does."""
    packed = {item.stored.format for file in files for item in file if item.stored.layout is not None}
    config = read_json(folder / "config.json", CONFIG_BYTES)
    if packed and config.get("quantization_config") is None:
        config["quantization_config"] = SETTINGS[packed.pop()]
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write(
    checkpoint: Checkpoint, files: list[list[Item]], folder: Path, bar: Bar, allow_nonfinite: bool
) -> None:
    """Writes the missing files, and the index if there are several. Raises Stopped after Ctrl-C."""
    done, total = 0, _total(files)
    index: dict[str, str] = {}
    with interrupts() as stop:
        for i, file in enumerate(files):
            name = file_name(i, len(files))
            specs = dict(spec for item in file for spec in _specs(item, checkpoint.source.scales))
            if not (folder / name).exists():
                parameters = _parameters(
                    checkpoint, file, allow_nonfinite, partial(_show, bar, done, total, i, len(files))
                )
                with writing(folder, f"the {i:,} files before"):
                    complete(folder / name, partial(write_tensors, specs=specs, tensors=parameters))
            done += sum(item.nbytes for item in file)
            index |= dict.fromkeys(specs, name)
            if stop and i + 1 < len(files):
                raise Stopped
    if len(files) > 1:
        content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        with writing(folder, "all its weights"):
            (folder / "model.safetensors.index.json").write_text(json.dumps(content, indent=2) + "\n")


def _show(bar: Bar, before: int, total: int, i: int, count: int, written: int) -> None:
    """Shows the progress: bytes of the files before file i, and bytes written to it."""
    bar(before + written, total, f"file {i + 1} of {count}")


def _parameters(
    checkpoint: Checkpoint, file: list[Item], allow_nonfinite: bool, progress: Callable[[int], None]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a file, in order; raises BadFile for weights that are not finite."""
    written = 0
    for item, (tensors, unsound) in zip(file, _ahead(partial(_read, checkpoint), file), strict=True):
        if unsound and not allow_nonfinite:
            raise refusal({item.path: unsound})
        yield from tensors
        del tensors
        written += item.nbytes
        progress(written)


def _ahead(read: Callable[[Item], Any], items: list[Item]) -> Iterator[Any]:
    """Yields what `read` returns for each item, and reads ahead up to READERS items."""
    with ThreadPoolExecutor(READERS) as pool:
        reading = deque()
        for item in items:
            reading.append(pool.submit(read, item))
            if len(reading) == READERS:
                yield reading.popleft().result()
        while reading:
            yield reading.popleft().result()


def _specs(item: Item, scales: str) -> Iterator[tuple[str, tuple[str, tuple[int, ...]]]]:
    """The name, dtype and shape of each tensor to write."""
    for name in (*item.names, *item.copies):
        yield from item.stored.specs(name, scales)


def _read(checkpoint: Checkpoint, item: Item) -> tuple[list[tuple[str, np.ndarray]], int]:
    """The tensors of a parameter, experts one by one, and the number of values (blocks, if packed) that are not finite."""
    found = list(_pieces(item, checkpoint, checkpoint.sources[item.path]))
    pieces = [parts for parts, _ in found]
    unsound = sum(count for _, count in found)
    if len(item.names) > 1 and len(pieces) == 1:  # one tensor with all experts
        pieces = [tuple(part[x] for part in pieces[0]) for x in range(len(item.names))]
    named = zip((*item.names, *item.copies), pieces * (1 + len(item.copies)), strict=True)
    scales = checkpoint.source.scales
    return [tensor for name, parts in named for tensor in item.stored.tensors(name, parts, scales)], unsound


def _pieces(item: Item, checkpoint: Checkpoint, source: Origin) -> Iterator[tuple[Parts, int]]:
    """The parts of each piece of a parameter in the item's format, and the number of values that are not finite."""
    if item.path.endswith("attn.uk") and source.names != checkpoint.sources[_other_half(item.path)].names:
        yield _joined(item, checkpoint)
        return
    stored, shape = checkpoint.format_of(source), item.stored.shape
    if len(item.names) > len(source.pieces):  # one piece has all experts
        shape = (len(item.names), *shape)
    for piece in source.pieces:
        raw = tuple(cut(source)(part, checkpoint.config) for part in checkpoint.source.read(*piece))
        parts = (
            raw
            if stored == item.stored.format
            else (plain(raw, stored, shape, STORED_DTYPES[item.stored.format]),)
        )
        yield parts, unsound_in(raw, stored)


def _other_half(path: str) -> str:
    return path.removesuffix("uk") + "uv"


def _joined(item: Item, checkpoint: Checkpoint) -> tuple[Parts, int]:
    """kv_b_proj of its halves uk and uv, which are separate tensors in the source."""
    halves, unsound = [], 0
    for path in (item.path, _other_half(item.path)):
        source = checkpoint.sources[path]
        entry = checkpoint.source.tensors[source.names[0]]
        raw = checkpoint.source.read(source.names[0])
        unsound += unsound_in(raw, entry.format)
        halves.append(
            source.part(
                plain(raw, entry.format, entry.shape, STORED_DTYPES[item.stored.format]), checkpoint.config
            )
        )
    return (np.concatenate(halves, axis=1).reshape(item.stored.shape),), unsound
