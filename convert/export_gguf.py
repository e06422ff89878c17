"""Writes a GGUF file that llama.cpp opens, by the gguf package, tensor by tensor. The file gets its name when all is in it."""

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from convert import gguf_metadata
from convert.gguf_tensors import GgufTensor, read, tensors
from convert.plan import COMPILER, LIBRARIES, UNCALIBRATED, available, free, held, stamp
from convert.progress import Bar
from convert.write import lock, refusal
from mla_jax import __version__
from mla_jax.base import gguf_blocks
from mla_jax.base.errors import BadFile, DoesNotFit, printable
from mla_jax.base.limits import gib
from mla_jax.weights.gguf_header import SCALARS
from mla_jax.weights.gguf_keys import ARCHITECTURE
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.orbax_store import writing
from mla_jax.weights.save import complete

HEADER = 64 << 20  # bytes, at most: vocabularies are the largest part
NUMBERS = {np.dtype(dtype): gguf.GGUFValueType(kind) for kind, dtype in SCALARS.items()}
ROUNDED = ("Q8_0", "Q4_0")  # types to which values are rounded in blocks


def run(
    checkpoint: Checkpoint, out: Path, name: str, dtype: str, dry_run: bool, allow_nonfinite: bool
) -> int:
    """Prints the plan; unless it is a dry run, writes the file. Returns the exit code."""
    keys = gguf_metadata.architecture(
        checkpoint.config, checkpoint.has_mtp, tied="head" not in checkpoint.sources
    )
    found = tensors(checkpoint, dtype)
    described = gguf_metadata.described(checkpoint.source, name)
    if dtype != "keep" or "general.file_type" not in described:
        described |= _made(found)
    needed = peak(checkpoint, found)
    print(*_lines(checkpoint, out, found, needed), sep="\n", file=sys.stderr, flush=True)
    if dry_run:
        return 0
    _refuse_small(out, found, needed)
    with lock(out):
        _refuse_foreign(out.with_name(out.name + ".partial"))
        start, bar = time.monotonic(), Bar("writing")
        with writing(out, "no files"):
            complete(out, partial(_write, checkpoint, found, described | keys, bar, allow_nonfinite))
        bar.close(time.monotonic() - start)
    return 0


def _made(found: list[GgufTensor]) -> dict[str, Any]:
    """The type of most of the bytes, as llama.cpp numbers files, and who has rounded them to it."""
    largest = next(iter(_sizes(found)))
    kind = gguf.LlamaFileType.__members__.get("ALL_F32" if largest == "F32" else f"MOSTLY_{largest}")
    made: dict[str, Any] = {} if kind is None else {"general.file_type": int(kind)}
    if any(tensor.type in ROUNDED and not tensor.kept for tensor in found):
        made["general.quantized_by"] = f"mla-convert {__version__}"
    return made


def _sizes(found: list[GgufTensor]) -> dict[str, int]:
    """Bytes by type, the largest first."""
    sizes: dict[str, int] = {}
    for tensor in found:
        sizes[tensor.type] = sizes.get(tensor.type, 0) + tensor.nbytes
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


# ---- the plan


def _lines(checkpoint: Checkpoint, out: Path, found: list[GgufTensor], needed: int) -> Iterator[str]:
    source, config = checkpoint.source, checkpoint.config
    stored = sum(entry.nbytes for entry in source.tensors.values())
    sizes = ", ".join(f"{name} {gib(size)}" for name, size in _sizes(found).items())
    yield f"reads     {source.path} ({source.kind}): {config.model_type}, {gib(stored)}"
    yield f"writes    {out}: {sizes}"
    yield _memory_line(needed)
    yield f"disk      {gib(_total(found))} of {gib(free(out))} free"
    rounded = any(tensor.type in ROUNDED and not tensor.kept for tensor in found)
    for note in (
        *config.notes,
        *gguf_metadata.notes(config),
        *([UNCALIBRATED] if rounded else []),
    ):
        yield f"note      {note}"


def _memory_line(needed: int) -> str:
    return f"memory    at most {gib(needed)} of {gib(available())}"


def _total(found: list[GgufTensor]) -> int:
    return sum(tensor.nbytes + gguf.GGUF_DEFAULT_ALIGNMENT for tensor in found)


def peak(checkpoint: Checkpoint, found: list[GgufTensor]) -> int:
    """Peak host memory in bytes: one tensor, while pieces of it are read and converted."""
    largest = max(tensor.nbytes + tensor.workspace(checkpoint) for tensor in found)
    unpacks = any(tensor.stored not in gguf_blocks.PLAIN_TYPES and not tensor.kept for tensor in found)
    return held() + LIBRARIES + (COMPILER if unpacks else 0) + HEADER + largest


def _refuse_small(out: Path, found: list[GgufTensor], needed: int) -> None:
    total, room = _total(found) + HEADER, free(out)
    if total > room:
        raise DoesNotFit(
            f"{out} does not fit on its disk", f"up to {gib(total)} are to be written, {gib(room)} are free"
        )
    if needed > available():
        raise DoesNotFit("the conversion needs more memory than there is", _memory_line(needed))


def _refuse_foreign(temporary: Path) -> None:
    """Raises BadFile if something else than a killed conversion has the file's temporary name."""
    if not os.path.lexists(temporary):
        return
    if temporary.is_file() and not temporary.is_symlink():
        with open(temporary, "rb") as file:
            if file.read(4) in (b"", b"GGUF"):
                return
    shown = printable(str(temporary), 200)
    raise BadFile(f"{shown} was not made by a conversion", "move it away, or choose another OUT")


# ---- writing


def _write(
    checkpoint: Checkpoint,
    found: list[GgufTensor],
    metadata: dict[str, Any],
    bar: Bar,
    allow_nonfinite: bool,
    path: Path,
) -> None:
    source = checkpoint.source
    stamps = {file: stamp(file) for file in source.files}
    writer = _begun(path, metadata, found)
    try:
        done, total = 0, sum(tensor.nbytes for tensor in found)
        for tensor in found:
            data, unsound = read(tensor, checkpoint)
            if unsound and (not allow_nonfinite or tensor.type in ROUNDED):
                raise refusal({tensor.path: unsound})
            writer.write_tensor_data(data)
            done += tensor.nbytes
            bar(done, total, tensor.name)
        source.close()
        _refuse_changed(stamps)
    finally:
        writer.close()


def _refuse_changed(stamps: dict[Path, list[int]]) -> None:
    changed = [file.name for file, before in stamps.items() if not file.exists() or stamp(file) != before]
    if changed:
        raise BadFile(
            "the source changed while it was read", *changed, "convert it again when nothing writes to it"
        )


def _begun(path: Path, metadata: dict[str, Any], found: list[GgufTensor]) -> gguf.GGUFWriter:
    """A writer that has written the header."""
    writer = gguf.GGUFWriter(None, ARCHITECTURE)
    for tensor in found:
        kind = gguf.GGMLQuantizationType[tensor.type]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, kind)
    label = gguf.size_label(*writer.get_total_parameter_count())
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in ({"general.size_label": label} | metadata).items():
        _add(writer, key, value)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return writer


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """A key in the type that llama.cpp's converter gives it; the package cannot write an empty array."""
    kind = gguf.GGUFValueType
    if isinstance(value, np.ndarray | list):
        inner = NUMBERS[value.dtype] if isinstance(value, np.ndarray) else None
        items = value.tolist() if isinstance(value, np.ndarray) else value
        if items:
            writer.add_key_value(key, items, kind.ARRAY, inner)
    elif isinstance(value, str):
        writer.add_key_value(key, value, kind.STRING)
    elif isinstance(value, bool):
        writer.add_key_value(key, value, kind.BOOL)
    elif isinstance(value, float):
        writer.add_key_value(key, value, kind.FLOAT32)
    else:
        small = 0 <= value < 1 << 32
        writer.add_key_value(key, value, kind.UINT32 if small else kind.INT64)
