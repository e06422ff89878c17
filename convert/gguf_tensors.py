"""The tensors of a GGUF file: which parameter each one is, its type, and its bytes, quantised by the gguf package."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import gguf
import jax
import numpy as np

from convert.tensors import READERS, ROWS, Parts, by_rows, cut, plain, unsound_in
from mla_jax.base import axes, gguf_blocks
from mla_jax.base.errors import Unsupported
from mla_jax.weights.fill import PLAIN_DTYPES
from mla_jax.weights.gguf_header import TENSOR_TYPES
from mla_jax.weights.gguf_names import GGUF, transposed
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.names import Origin, first_half, second_half, unchanged
from mla_jax.weights.orbax_chunks import BATCH

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0", "q4_0": "Q4_0"}  # of --dtype
OF_VOCABULARY = {"Q4_0": "Q8_0"}  # of embedding and head, where four bits cost most
RAGGED = "F16"  # of matrices whose rows are no whole blocks, as llama.cpp's converter has it
PIECES = {unchanged, first_half, second_half}  # parts that can be taken of packed rows


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the file. `kept`: its bytes are those of the source, else its values are converted to `type`."""

    name: str
    path: str  # of our parameter
    shape: tuple[int, ...]
    type: str
    stored: str  # the format in the source
    kept: bool
    origin: Origin

    @property
    def nbytes(self) -> int:
        return prod(self.shape[:-1]) * row_bytes(self.type, self.shape[-1])

    @property
    def pieces(self) -> int:
        return len(self.origin.pieces)

    def workspace(self, checkpoint: Checkpoint) -> int:
        """Bytes of memory to read and convert it, besides the tensor itself."""
        piece = checkpoint.size(self.origin.pieces[0])  # all have one size
        values = prod(self.shape) // self.pieces
        halves = 0 if self.origin.part in PIECES else 3 * 4 * _values_in(self, checkpoint)
        read = (1 + checkpoint.copies) * piece + min(piece, BATCH) + self.nbytes // self.pieces + halves
        return min(READERS, self.pieces) * (read + 6 * 4 * min(ROWS, values))


def row_bytes(type: str, values: int) -> int:
    kind = TENSOR_TYPES[type]
    return values // kind.values * kind.bytes


def _values_in(tensor: GgufTensor, checkpoint: Checkpoint) -> int:
    return prod(checkpoint.source.tensors[tensor.origin.names[0]].shape)


# ---- which


def tensors(checkpoint: Checkpoint, dtype: str) -> list[GgufTensor]:
    """The file's tensors, layer by layer; `dtype` is keep or one of TYPES. Raises Unsupported for formats that GGUF lacks."""
    found = [_tensor(path, origin, checkpoint, dtype) for path, origin in checkpoint.sources.items()]
    return sorted(found, key=lambda tensor: _block(tensor.name))


def _block(name: str) -> int:
    return int(name.split(".")[1]) if name.startswith("blk.") else -1


def _tensor(path: str, origin: Origin, checkpoint: Checkpoint, dtype: str) -> GgufTensor:
    target, stored = GGUF.find(path, checkpoint.config), checkpoint.format_of(origin)
    shape = axes.shape(checkpoint.config, target.axes)
    stays = origin.part in PIECES or origin.part is target.part
    type = "F32" if _is_small(path, shape) else _type(dtype, stored, path, shape, stays)
    kept = stays and stored == type and stored not in PLAIN_DTYPES
    return GgufTensor(target.names[0], path, shape, type, stored, kept, origin)


def _is_small(path: str, shape: tuple[int, ...]) -> bool:
    """Norms, biases and routers, which llama.cpp takes in float32 alone."""
    return len(shape) == 1 or path.endswith("router.weight")


def _type(dtype: str, stored: str, path: str, shape: tuple[int, ...], stays: bool) -> str:
    """The type of a matrix. Blocks that must be cut otherwise (`kv_b_proj`) become float32, which has all their values."""
    if dtype == "keep":
        if stored not in gguf_blocks.PLAIN_TYPES and stored not in gguf_blocks.TYPES:
            raise _refusal(stored, path)
        return stored if stays or stored in PLAIN_DTYPES else "F32"
    wanted = TYPES[dtype]
    if path in ("embed", "head"):
        wanted = OF_VOCABULARY.get(wanted, wanted)
    return RAGGED if shape[-1] % TENSOR_TYPES[wanted].values else wanted


def _refusal(stored: str, path: str) -> Unsupported:
    advice = f"--dtype converts it: {', '.join(TYPES)}"
    return Unsupported(f"a GGUF file cannot hold {stored}", f"as {path} is", advice)


# ---- their bytes


def read(tensor: GgufTensor, checkpoint: Checkpoint) -> tuple[np.ndarray, int]:
    """The bytes of a tensor, and the number of values (blocks, if packed) that are not finite in the source.

    Raises Unsupported for finite values that are too large for the type."""
    pieces, whole = tensor.pieces, np.empty(tensor.nbytes, np.uint8)
    parts = whole.reshape(pieces, -1)

    def read_piece(i: int) -> int:
        data, unsound = _piece(tensor, checkpoint, i)
        if not unsound and not tensor.kept:
            _refuse_overflow(tensor, data)
        parts[i] = data.reshape(-1).view(np.uint8)
        return unsound

    if pieces == 1:
        return whole, read_piece(0)
    with ThreadPoolExecutor(READERS) as pool:
        return whole, sum(pool.map(read_piece, range(pieces)))


def _piece(tensor: GgufTensor, checkpoint: Checkpoint, i: int) -> tuple[np.ndarray, int]:
    config, origin = checkpoint.config, tensor.origin
    raw = checkpoint.source.read(*origin.pieces[i])
    unsound = unsound_in(raw, tensor.stored)
    if tensor.kept:
        part = cut(origin)  # of attn_k_b all: its heads are in the file's order
        return part(raw[0], config), unsound
    if origin.part in PIECES:
        raw = tuple(cut(origin)(part, config) for part in raw)
        shape = tensor.shape[1:] if origin.stacked else tensor.shape
        return packed(raw, tensor.stored, shape, tensor.type), unsound
    shape = checkpoint.source.tensors[origin.names[0]].shape
    values = origin.part(_values(raw, tensor.stored, shape), config)  # uk or uv
    if GGUF.find(tensor.path, config).part is transposed:
        values = transposed(values, config)
    return packed((values,), "F32", tensor.shape, tensor.type), unsound


def packed(raw: Parts, stored: str, shape: tuple[int, ...], type: str) -> np.ndarray:
    """The bytes of a matrix, or of several, in a GGUF type: `[.. rows bytes]`, converted some rows at a time."""
    like = [jax.ShapeDtypeStruct((*shape[:-1], row_bytes(type, shape[-1])), np.uint8)]

    def convert(rows: Parts, size: tuple[int, ...]) -> Parts:
        return (quantized(_values(rows, stored, size), type),)

    if len(shape) == 1:
        return convert(raw, shape)[0]
    return by_rows(raw, stored, shape, like, 1, convert)[0]


def quantized(values: np.ndarray, type: str) -> np.ndarray:
    """Float32 values in a GGUF type, as the gguf package rounds them: bytes along the last axis."""
    with np.errstate(over="ignore"):  # which `_refuse_overflow` finds
        found = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type])
    return np.ascontiguousarray(found).view(np.uint8)


def _values(raw: Parts, stored: str, shape: Sequence[int]) -> np.ndarray:
    """In float32, which has every value of a plain number; by numpy, for XLA flushes the smallest to zero."""
    if stored in PLAIN_DTYPES:
        return np.asarray(raw[0], np.float32)
    return plain(raw, stored, tuple(shape), np.float32)


def _refuse_overflow(tensor: GgufTensor, data: np.ndarray) -> None:
    kind = TENSOR_TYPES[tensor.type]
    stored = data if tensor.type in PLAIN_DTYPES else data.reshape(-1, kind.bytes)
    if unsound_in((stored,), tensor.type):
        raise Unsupported(
            f"{tensor.path} has values that are too large for {tensor.type}",
            "use --dtype bf16 or --dtype f32",
        )
