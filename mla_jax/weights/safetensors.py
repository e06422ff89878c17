"""A folder of safetensors files, single or sharded: headers are validated before use, tensors are read by `pread`.

Files are not memory-mapped, because truncating a mapped file kills the process. FP8 and BF16 are read as ml_dtypes, not through
PyTorch."""

import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import ml_dtypes
import numpy as np
import safetensors

from mla_jax.base.errors import BadFile, Unsupported, printable, shortened
from mla_jax.base.files import parse_json, read_json, within
from mla_jax.weights import boxes
from mla_jax.weights.boxes import Box

MAX_HEADER = 100 << 20  # the format's own limit
MAX_INDEX = 64 << 20
MAX_TENSORS = 100_000  # in one file
MAX_INDEXED = 500_000  # in one model; Kimi-K2 has 140,000
MAX_NAME = 512  # bytes
MAX_DIMENSIONS = 8
MAX_READ = 1 << 30  # bytes of one call of the system
MAX_FILE_NAME = 255  # bytes; the limit of file systems
# In bytes: a longer header that the library refuses is not parsed again for a better message
LONG_HEADER = 8 << 20

STORED_DTYPES = {
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
class TensorSpan:
    """Where a tensor is stored: `size` bytes from byte `start` of `file`, valid while the file has this `stamp`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int
    stamp: tuple[int, ...]


@dataclass
class TensorFiles:
    """The tensors of a model folder by name; `read` copies one into host memory."""

    path: Path
    tensors: Mapping[str, TensorSpan]
    _open: dict[Path, tuple[int, tuple[int, ...]]] = field(default_factory=dict, repr=False)
    _opening: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, name: str, index: int | None = None, box: Box | None = None) -> np.ndarray:
        """The tensor in its own dtype, or one entry of its first axis, or a `box` of these; any thread may call it.

        Reads no other bytes. Raises BadFile if the file was truncated or rewritten since its header was read."""
        tensor = self.tensors[name] if index is None else _entry_of(self.tensors[name], index)
        box = box or boxes.whole_box(tensor.shape)
        dtype = np.dtype(STORED_DTYPES[tensor.dtype])
        shape = boxes.box_shape(box)
        out = np.empty(prod(shape) * dtype.itemsize, np.uint8)
        length, starts = boxes.runs(tensor.shape, box)
        for i, start in enumerate(starts):
            self._fill(
                out[i * length * dtype.itemsize :][: length * dtype.itemsize], tensor, start * dtype.itemsize
            )
        return out.view(dtype).reshape(shape)

    def _fill(self, out: np.ndarray, tensor: TensorSpan, start: int) -> None:
        """Fills `out` from the file, from byte `start` of the tensor."""
        file, done, start = tensor.file.name, 0, tensor.start + start
        try:
            descriptor = self._descriptor(tensor)
            while done < out.size:
                count = os.preadv(descriptor, [out.data[done : done + MAX_READ]], start + done)
                if count <= 0:
                    needed = f"{printable(tensor.name)} needs bytes to {tensor.start + tensor.size:,}"
                    raise BadFile(f"{file} became shorter while it was read", needed)
                done += count
        except OSError as e:
            where = f"{e.strerror} at byte {start + done:,}, in {printable(tensor.name)}"
            raise BadFile(f"{file} cannot be read", where) from e

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({tensor.file for tensor in self.tensors.values()}))

    def close(self):
        """Closes the files; raises BadFile if one changed while it was open: its tensors may then be of two versions."""
        opened, self._open = self._open, {}
        try:
            for file, (descriptor, stamp) in opened.items():
                _refuse_changed(file, descriptor, stamp)
        finally:
            for descriptor, _ in opened.values():
                os.close(descriptor)

    def _descriptor(self, tensor: TensorSpan) -> int:
        with self._opening:
            if tensor.file not in self._open:
                descriptor = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
                self._open[tensor.file] = (descriptor, tensor.stamp)
                _refuse_changed(tensor.file, descriptor, tensor.stamp)
            return self._open[tensor.file][0]


def _entry_of(tensor: TensorSpan, index: int) -> TensorSpan:
    if not (tensor.shape and 0 <= index < tensor.shape[0]):
        raise IndexError(f"{tensor.name} has the shape {tensor.shape}, and no entry {index}")
    size = tensor.size // tensor.shape[0]
    return replace(tensor, shape=tensor.shape[1:], start=tensor.start + index * size, size=size)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _refuse_changed(file: Path, descriptor: int, stamp: tuple[int, ...]):
    if _stamp(os.fstat(descriptor)) != stamp:
        raise BadFile(
            f"{file.name} changed while it was read", "load it again when nothing writes to it", str(file)
        )


def open_folder(path: str | Path) -> TensorFiles:
    """Validates every header of the model in `path` and lists its tensors; reads no weights."""
    path = Path(path)
    if not path.is_dir():
        raise BadFile(
            f"{path} is not a model folder",
            "expected a folder with config.json, *.safetensors and, for text, tokenizer.json",
        )
    found = {p.name: p for p in sorted(path.iterdir()) if p.name.endswith(".safetensors")}
    index = path / "model.safetensors.index.json"
    if index.exists():
        return TensorFiles(path, _indexed(path, _read_index(index), found))
    if not found:
        _refuse_without_safetensors(path)
    _refuse_missing_parts(path, found)
    tensors: dict[str, TensorSpan] = {}
    for name in found:
        for tensor in read_header(inside(path, name)):
            if tensor.name in tensors:
                other = tensors[tensor.name].file.name
                raise BadFile(
                    f"{printable(tensor.name)} is in two files",
                    f"{other} and {name}",
                    "keep one model in the folder",
                )
            tensors[tensor.name] = tensor
    return TensorFiles(path, tensors)


def read_header(file: Path) -> list[TensorSpan]:
    """The tensors of one file, after checking that its header is valid and describes every byte exactly once."""
    header, stamp = _header_bytes(file)
    count = header.count(b'"data_offsets"')
    if count > MAX_TENSORS:  # before anything parses them
        raise BadFile(f"{file.name} lists too many tensors", f"found {count:,}, the limit is {MAX_TENSORS:,}")
    refusal = _refusal_of_library(file)
    if refusal is not None and len(header) > LONG_HEADER:
        raise refusal
    entries = parse_json(header, f"the header of {file.name}")
    entries.pop("__metadata__", None)
    start = 8 + len(header)
    found = [_span(file, name, entry, start, stamp) for name, entry in entries.items()]
    tensors = sorted(found, key=lambda tensor: (tensor.start, tensor.size))
    _refuse_gaps(file, tensors, start, stamp[2])
    if refusal is not None:
        raise refusal
    return tensors


def _refusal_of_library(file: Path) -> BadFile | None:
    """The safetensors library's complaint about a file, as an error; our own checks say more where they find the same."""
    try:
        with safetensors.safe_open(file, framework="numpy"):
            return None
    except Exception as e:  # its error types differ by version
        return BadFile(f"{file.name} is refused by the safetensors library", printable(str(e), 300))


def _refuse_gaps(file: Path, tensors: list[TensorSpan], start: int, size: int) -> None:
    """Refuses tensors that overlap, leave holes, or do not end with the file of `size` bytes."""
    end = start
    for tensor in tensors:
        if tensor.start != end:
            what = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            where = f"it starts at byte {tensor.start:,}, expected {end:,}"
            raise BadFile(f"{file.name}: {printable(tensor.name)} {what}", where)
        end += tensor.size
    if end > size:
        promised = f"header promises {end:,} bytes, the file has {size:,}"
        raise BadFile(
            f"{file.name} is cut short", promised, "the download stopped early; fetch that file again"
        )
    if end < size:
        raise BadFile(
            f"{file.name} has trailing bytes", f"header describes {end:,} bytes, the file has {size:,}"
        )


def _header_bytes(file: Path) -> tuple[bytes, tuple[int, ...]]:
    """The raw header, at the end of which the data starts, and the file's stamp."""
    try:
        if not stat.S_ISREG(os.stat(file).st_mode):
            raise BadFile(f"{file.name} is not a regular file", str(file))
        with open(file, "rb") as stream:
            stamp = _stamp(os.fstat(stream.fileno()))
            length = _header_length(file, stream.read(8), stamp[2])
            return stream.read(length), stamp
    except OSError as e:
        raise BadFile(f"{file.name} cannot be read", e.strerror or str(e)) from e


def _header_length(file: Path, first: bytes, size: int) -> int:
    length = int.from_bytes(first, "little")
    if len(first) < 8 or length + 8 > size:
        needed = f"a header of {length:,} bytes" if len(first) == 8 else "at least 8 bytes"
        raise BadFile(
            f"{file.name} is cut short", f"expected {needed}, the file has {size:,}", "fetch that file again"
        )
    if length > MAX_HEADER:
        found = f"its length says {length:,} bytes, the limit is {MAX_HEADER:,}"
        raise BadFile(f"{file.name} has an impossible header", found)
    return length


def _span(file: Path, name: str, entry: object, start: int, stamp: tuple[int, ...]) -> TensorSpan:
    """A tensor by its entry in the header; `start` is the byte at which the data starts."""
    where = f"{file.name}: {printable(name)}"
    if not 0 < len(name.encode("utf-8", "surrogatepass")) <= MAX_NAME:
        raise BadFile(
            f"{where} is not a tensor name",
            f"it has {len(name):,} characters, expected 1 to {MAX_NAME} bytes",
        )
    dtype, shape, offsets = _fields(where, entry)
    size = offsets[1] - offsets[0]
    needed = prod(shape) * np.dtype(STORED_DTYPES[dtype]).itemsize
    if size != needed:
        found = f"{dtype} of shape {shape} takes {needed:,}, its offsets span {size:,}"
        raise BadFile(f"{where} has the wrong number of bytes", found)
    return TensorSpan(name, file, dtype, tuple(shape), start + offsets[0], size, stamp)


def _fields(where: str, entry: object) -> tuple[str, list[int], list[int]]:
    """The dtype, shape and offsets of a header's entry, each possible by itself."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise BadFile(f"{where} has no dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    for numbers in (shape, offsets):
        if not _are_sizes(numbers):
            raise BadFile(f"{where} has an impossible shape or offset", f"found {printable(str(numbers))}")
    if len(offsets) != 2 or len(shape) > MAX_DIMENSIONS:
        found = f"found shape {printable(str(shape))}, offsets {printable(str(offsets))}"
        raise BadFile(f"{where} has an impossible shape or offset", found)
    if not isinstance(dtype, str) or dtype not in STORED_DTYPES:
        raise Unsupported(f"{where} has dtype {printable(str(dtype))}", "known: " + ", ".join(STORED_DTYPES))
    return dtype, shape, offsets


def _are_sizes(numbers: object) -> bool:
    return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in numbers)


def _read_index(index: Path) -> dict[str, str]:
    weight_map = read_json(index, MAX_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise BadFile(f"{index.name} has no weight_map of tensor names to file names")
    if len(weight_map) > MAX_INDEXED:
        raise BadFile(
            f"{index.name} lists too many tensors", f"found {len(weight_map):,}, the limit is {MAX_INDEXED:,}"
        )
    return weight_map


def _indexed(path: Path, weight_map: dict[str, str], found: Mapping[str, Path]) -> dict[str, TensorSpan]:
    """The tensors of the files that the index names and of others in the folder, such as a layer for drafts in a file of its own.

    Released indices lack tensors, so the headers count. Raises BadFile with everything on which the index and they disagree."""
    files = {file: inside(path, file) for file in sorted({*weight_map.values(), *found})}
    faults = [f"{file} is missing" for file, where in files.items() if not where.exists()]
    tensors: dict[str, TensorSpan] = {}
    for where in files.values():
        for tensor in read_header(where) if where.exists() else ():
            if tensor.name in tensors:
                faults.append(
                    f"{printable(tensor.name)} is in {tensors[tensor.name].file.name} and in {where.name}"
                )
            tensors[tensor.name] = tensor
    _refuse_disagreement(faults)
    _refuse_disagreement([*_misplaced(weight_map, files, tensors)])
    return tensors


def _misplaced(
    weight_map: dict[str, str], files: Mapping[str, Path], tensors: Mapping[str, TensorSpan]
) -> Iterator[str]:
    """Tensors that are not in the file that the index names."""
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != files[file].name:
            yield f"{printable(name)} is not in {file}"


def _refuse_disagreement(faults: list[str]) -> None:
    if faults:
        raise BadFile("the index and the files of the model disagree", *shortened(faults))


def inside(path: Path, file: str) -> Path:
    """`path / file`; raises BadFile if it leaves the folder, except for the blobs of the Hub cache that the folder belongs to."""
    plain = file.isprintable() and not {"/", "\\"} & {*file} and len(file.encode()) <= MAX_FILE_NAME
    if not plain or not file.endswith(".safetensors"):
        expected = "expected a plain name that ends in .safetensors"
        raise BadFile(f"{printable(file)} is not a name of a file in the folder", expected)
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
    """Refuses a folder that lacks some of the files NAME-00001-of-0000N.safetensors."""
    matches = [re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", name) for name in found]
    expected: set[str] = set()
    for prefix, total in {(m[1], m[3]) for m in matches if m}:
        count = min(int(total), 10_000)
        expected.update(f"{prefix}-{i:05d}-of-{total}.safetensors" for i in range(1, count + 1))
    missing = sorted(expected - found.keys())
    if missing:
        raise BadFile(
            f"{path} lacks {len(missing)} of its weight files",
            *shortened(missing),
            "fetch them again, and the index",
        )
