"""A folder of safetensors files, single or sharded: headers validated before anything is trusted, tensors read by `pread`.

Never memory-mapped (a file cut short while mapped kills the process), never through PyTorch (FP8 and BF16 come as ml_dtypes)."""

import os
import re
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from mla_jax.base.errors import BadFile, Unsupported, printable, shortened
from mla_jax.base.files import parse_json, read_json, within

MAX_HEADER = 100 << 20  # the format's own limit
MAX_INDEX = 64 << 20
MAX_TENSORS = 100_000  # in one file
MAX_INDEXED = 500_000  # in one model; Kimi-K2 has 140,000
MAX_NAME = 512  # bytes
LONG_HEADER = 8 << 20  # beyond, a header that the library refuses is not read again for a better message

DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U64": np.uint64,
    "U32": np.uint32,
    "U16": np.uint16,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: `size` bytes from `start` of `file`, as long as that has its `stamp`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    stamp: tuple[int, ...]


@dataclass
class Folder:
    """The tensors of a model folder by name; `read` brings one into host memory."""

    path: Path
    tensors: Mapping[str, Tensor]
    _open: dict[Path, tuple[int, tuple[int, ...]]] = field(default_factory=dict, repr=False)
    _opening: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """The tensor's own bytes in its own dtype, or those of one entry of its first axis; any thread may call it.

        Raises BadFile if the file was cut or rewritten since its header was read."""
        tensor = self.tensors[name] if index is None else _entry_of(self.tensors[name], index)
        out, done, end = np.empty(tensor.size, np.uint8), 0, tensor.start + tensor.size
        try:
            descriptor = self._descriptor(tensor)
            while done < tensor.size:
                chunk = os.preadv(descriptor, [out.data[done : done + (1 << 30)]], tensor.start + done)
                if chunk <= 0:
                    raise BadFile(
                        f"{tensor.file.name} became shorter while it was read", f"{printable(name)} needs bytes to {end:,}"
                    )
                done += chunk
        except OSError as e:
            raise BadFile(
                f"{tensor.file.name} cannot be read", f"{e.strerror} at byte {tensor.start + done:,}, in {printable(name)}"
            ) from e
        return out.view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    def close(self):
        """Closes the files; raises BadFile if one changed while it was open, for then its tensors may be of two versions."""
        opened, self._open = self._open, {}
        try:
            for file, (descriptor, stamp) in opened.items():
                _refuse_changed(file, descriptor, stamp)
        finally:
            for descriptor, _ in opened.values():
                os.close(descriptor)

    def _descriptor(self, tensor: Tensor) -> int:
        with self._opening:
            if tensor.file not in self._open:
                descriptor = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
                self._open[tensor.file] = (descriptor, tensor.stamp)
                _refuse_changed(tensor.file, descriptor, tensor.stamp)
            return self._open[tensor.file][0]


def _entry_of(tensor: Tensor, index: int) -> Tensor:
    if not (tensor.shape and 0 <= index < tensor.shape[0]):
        raise IndexError(f"{tensor.name} has the shape {tensor.shape}, and no entry {index}")
    size = tensor.size // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], start=tensor.start + index * size, size=size)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_changed(file: Path, descriptor: int, stamp: tuple[int, ...]):
    if _stamp(os.fstat(descriptor)) != stamp:
        raise BadFile(f"{file.name} changed while it was read", "load it again when nothing writes to it", str(file))


def open_folder(path: str | Path) -> Folder:
    """Checks every header of the model in `path` and lists its tensors; reads no weights."""
    path = Path(path)
    if not path.is_dir():
        raise BadFile(
            f"{path} is not a model folder", "expected a folder with config.json, *.safetensors and, for text, tokenizer.json"
        )
    found = {p.name: p for p in sorted(path.iterdir()) if p.name.endswith(".safetensors")}
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = _read_index(index)
        return Folder(path, _indexed(path, weight_map, found))
    if not found:
        _refuse_without_safetensors(path)
    _refuse_missing_parts(path, found)
    tensors: dict[str, Tensor] = {}
    for name in found:
        for tensor in read_header(inside(path, name)):
            if tensor.name in tensors:
                other = tensors[tensor.name].file.name
                raise BadFile(f"{printable(tensor.name)} is in two files", f"{other} and {name}", "keep one model in the folder")
            tensors[tensor.name] = tensor
    return Folder(path, tensors)


def read_header(file: Path) -> list[Tensor]:
    """The tensors of one file, after checking that its header is sound and describes every byte exactly once."""
    header, stamp = _header_bytes(file)
    start, size = 8 + len(header), stamp[2]
    if (count := header.count(b'"data_offsets"')) > MAX_TENSORS:  # before anything parses them
        raise BadFile(f"{file.name} lists too many tensors", f"found {count:,}, the limit is {MAX_TENSORS:,}")
    try:
        with safetensors.safe_open(file, framework="numpy"):
            verdict = None
    except Exception as e:  # its error types differ by version; ours below say more where they can
        verdict = BadFile(f"{file.name} is refused by the safetensors library", printable(str(e), 300))
        if len(header) > LONG_HEADER:
            raise verdict from None
    entries = parse_json(header, f"the header of {file.name}")
    entries.pop("__metadata__", None)
    tensors = sorted(
        (_entry(file, name, entry, start, stamp) for name, entry in entries.items()), key=lambda t: (t.start, t.size)
    )
    end = start
    for tensor in tensors:
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            raise BadFile(
                f"{file.name}: {printable(tensor.name)} {what}", f"it starts at byte {tensor.start:,}, expected {end:,}"
            )
        end += tensor.size
    if end > size:
        raise BadFile(
            f"{file.name} is cut short",
            f"header promises {end:,} bytes, the file has {size:,}",
            "the download stopped early; fetch that file again",
        )
    if end < size:
        raise BadFile(f"{file.name} has trailing bytes", f"header describes {end:,} bytes, the file has {size:,}")
    if verdict is not None:
        raise verdict
    return tensors


def _header_bytes(file: Path) -> tuple[bytes, tuple[int, ...]]:
    """The raw header, which data follows at once, and the file's stamp."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise BadFile(f"{file.name} is not a regular file", str(file))
        with open(file, "rb") as f:
            stamp = _stamp(os.fstat(f.fileno()))
            size, first = stamp[2], f.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length + 8 > size:
                needed = f"a header of {length:,} bytes" if len(first) == 8 else "at least 8 bytes"
                raise BadFile(f"{file.name} is cut short", f"expected {needed}, the file has {size:,}", "fetch that file again")
            if length > MAX_HEADER:
                raise BadFile(
                    f"{file.name} has an impossible header", f"its length says {length:,} bytes, the limit is {MAX_HEADER:,}"
                )
            return f.read(length), stamp
    except OSError as e:
        raise BadFile(f"{file.name} cannot be read", e.strerror or str(e)) from e


def _entry(file: Path, name: str, entry: object, start: int, stamp: tuple[int, ...]) -> Tensor:
    where = f"{file.name}: {printable(name)}"
    if not 0 < len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME:
        raise BadFile(f"{where} is no tensor name", f"it has {len(name):,} characters, expected 1 to {MAX_NAME} bytes")
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise BadFile(f"{where} has no dtype, shape and data_offsets")
    shape, offsets, dtype = entry["shape"], entry["data_offsets"], entry["dtype"]
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or not all(
            isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in numbers
        ):
            raise BadFile(f"{where} has an impossible shape or offset", f"found {printable(str(numbers))}")
    if len(offsets) != 2 or len(shape) > 8:
        raise BadFile(
            f"{where} has an impossible shape or offset",
            f"found shape {printable(str(shape))}, offsets {printable(str(offsets))}",
        )
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Unsupported(f"{where} has dtype {printable(str(dtype))}", "known: " + ", ".join(DTYPES))
    size, promised = offsets[1] - offsets[0], prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if size != promised:
        raise BadFile(
            f"{where} has the wrong number of bytes", f"{dtype} of shape {shape} takes {promised:,}, its offsets span {size:,}"
        )
    return Tensor(name, file, dtype, tuple(shape), start + offsets[0], size, stamp)


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index, MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise BadFile(f"{index.name} has no weight_map of tensor names to file names")
    if len(weight_map) > MAX_INDEXED:
        raise BadFile(f"{index.name} lists too many tensors", f"found {len(weight_map):,}, the limit is {MAX_INDEXED:,}")
    return weight_map


def _indexed(path: Path, weight_map: dict[str, str], found: Mapping[str, Path]) -> dict[str, Tensor]:
    """The tensors the index names; everything that the index and the files disagree on is listed together."""
    files = {file: inside(path, file) for file in sorted(set(weight_map.values()))}
    faults = [f"{file} is missing" for file, where in files.items() if not where.exists()]
    faults += [f"{printable(file)} is not in the index" for file in found if file not in files]
    held: dict[str, Tensor] = {}
    for where in (w for w in files.values() if w.exists()):
        for tensor in read_header(where):
            if tensor.name in held:
                faults.append(f"{printable(tensor.name)} is in {held[tensor.name].file.name} and in {where.name}")
            held[tensor.name] = tensor
    if faults:
        raise BadFile("the index and the files of the model disagree", *shortened(faults))
    faults = [
        f"{printable(n)} is not in {f}" for n, f in weight_map.items() if n not in held or held[n].file.name != files[f].name
    ]
    faults += [
        f"{printable(name)} is in {t.file.name} but not in the index" for name, t in held.items() if name not in weight_map
    ]
    if faults:
        raise BadFile("the index and the files of the model disagree", *shortened(faults))
    return held


def inside(path: Path, file: str) -> Path:
    """`path / file` after making sure that this stays in the folder, or in the blobs of a Hub cache the folder belongs to."""
    plain = file.isprintable() and not {"/", "\\"} & {*file} and len(file.encode()) <= 255  # the longest name that files can have
    if not plain or not file.endswith(".safetensors"):
        raise BadFile(
            f"{printable(file)} is not a name of a file in the folder", "expected a plain name that ends in .safetensors"
        )
    return within(path, file)


def _refuse_without_safetensors(path: Path):
    pickles = [p.name for p in sorted(path.iterdir()) if p.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt")]
    if pickles:
        raise Unsupported(
            f"{path} holds pickled weights only ({printable(pickles[0])})",
            "pickles can run code when they are opened, so they are not opened here",
            "load the model with transformers and save_pretrained() it again: that writes safetensors",
        )
    raise BadFile(f"{path} holds no weights", "expected *.safetensors next to config.json")


def _refuse_missing_parts(path: Path, found: Mapping[str, Path]):
    parts = [m for m in (re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", name) for name in found) if m]
    wanted = {f"{m[1]}-{i:05d}-of-{m[3]}.safetensors" for m in parts for i in range(1, min(int(m[3]), 10_000) + 1)}
    if missing := sorted(wanted - found.keys()):
        raise BadFile(f"{path} lacks {len(missing)} of its weight files", *shortened(missing), "fetch them again, and the index")
