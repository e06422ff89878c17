"""Mixture-of-experts layers on the CPU, with AMX, AVX-512, AVX2 or portable C++, whichever is available. Knows numpy only.

    layer = Experts(gate, up, down, precision="int8")
    out = layer.forward(x, topk_ids, topk_weights)

Packing takes seconds per layer. `layer.save(path)` writes the packed weights to a file, and `Experts.open(path)` maps that file.

`python -m cpu_experts.build` builds the C++ library."""

import ctypes
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import cache
from numbers import Integral
from os import PathLike
from pathlib import Path

import numpy as np

from cpu_experts import blocks, layout, packed
from cpu_experts.library import ISAS, Closed, ForwardCall, Unsupported, Weights, check, load

__all__ = ["Closed", "Experts", "Unsupported", "available", "isa", "note"]

Matrix = np.ndarray | Sequence[np.ndarray]

# The most work of one call of the library, tokens x K x D x F per core: about a second of int8, so that Ctrl-C takes effect soon.
# AVX-512 and AMX have no such limit: they are many times faster, and their bits would depend on it, because they choose a kernel
# by the number of rows that an expert has in one call.
_CALL_WORK = {"portable": 1 << 28, "avx2": 6 << 30}


def available() -> bool:
    """Whether the library is built and can be loaded; if not, one warning says why."""
    try:
        load()
    except Unsupported as error:
        _warn(str(error))
        return False
    return True


@cache
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def isa() -> str:
    """The best instruction set of this processor: amx, avx512, avx2 or portable. Raises Unsupported without the library."""
    return ISAS[load().cpu_experts_best_isa()]


def note() -> str | None:
    """A note for users of a processor without AVX-512 and AMX; None if it has them."""
    found = isa()
    if found not in _CALL_WORK:
        return None
    return f"experts on this CPU are computed by {found}: slower than by AVX-512 or AMX"


class Experts:
    """The experts of one layer. An expert computes `down (silu(gate x) * up x)`; a token gets the weighted sum of its experts.

    gate and up are `[X F D]`, down is `[X D F]`. They are floats, which are quantised here, or the parts of `precision`: codes
    and scales as `layout.quantize` makes them, or GGUF blocks as one part of bytes. `down_precision` is the format of down, for
    GGUF files that mix formats. `threads` includes the calling thread; None is one per usable core. `isa` selects a lesser
    instruction set. `max_rows` limits the scratch memory: the number of rows (tokens x chosen experts) computed at a time."""

    def __init__(
        self,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        precision: str = "bf16",
        threads: int | None = None,
        *,
        down_precision: str | None = None,
        isa: str = "best",
        max_rows: int = 8192,
    ):
        self._prepare(isa, threads, max_rows)
        precisions = (precision, precision, down_precision or precision)
        for each in precisions:
            _known("precision", each, layout.FORMATS)
        gate_parts = _parts(gate, precisions[0], "gate")
        up_parts = _parts(up, precisions[1], "up")
        down_parts = _parts(down, precisions[2], "down")
        experts, model, width = _agreed_sizes(gate_parts, up_parts, down_parts, precisions)
        sections = (
            layout.pack_experts([gate_parts, up_parts], precisions[1], model),
            layout.pack_experts([down_parts], precisions[2], width),
        )
        self._start(packed.Packed((experts, model, width), precisions[1:], sections), threads, isa, max_rows)

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        threads: int | None = None,
        *,
        isa: str = "best",
        max_rows: int = 8192,
        verify: bool = False,
    ) -> "Experts":
        """Opens a file that `save` wrote. The weights are mapped; the system reads a page when it is first used.

        Raises ValueError for a damaged file or one of another kind, and Unsupported for another version. Only `verify` finds
        damage in the weights: it reads all of them. While the layer is open the file may be renamed, deleted or replaced, also by
        `save`. It must not be changed in place: if it is shortened, SIGBUS ends the process."""
        layer = cls.__new__(cls)
        layer._prepare(isa, threads, max_rows)
        layer._start(packed.read(Path(path), verify), threads, isa, max_rows)
        return layer

    def _prepare(self, isa: str, threads: int | None, max_rows: int) -> None:
        """Loads the library and checks the options, before anything is packed or mapped."""
        self._handle = None
        # Tells XLA programs that the layer is closed, once ffi.py has replaced it
        self._forget: Callable[[], object] = lambda: None
        self._library = load()
        _known("isa", isa, ISAS)
        _in_range("threads", 0 if threads is None else threads, 0, 1024)
        _in_range("max_rows", max_rows, 1, 1 << 20)

    def _start(self, weights: packed.Packed, threads: int | None, isa: str, max_rows: int) -> None:
        """Opens a layer of the library over the packed weights, which stay referenced until it is closed."""
        self.experts, self.model, self.width = weights.shape
        self.precision, self.down_precision = weights.precisions
        self._packed = weights.sections
        ids = [layout.FORMATS[precision].id for precision in weights.precisions]
        addresses = [section.ctypes.data for section in self._packed]
        sizes = [section.nbytes for section in self._packed]
        options = (threads or 0, ISAS.index(isa), max_rows)
        struct = Weights(ctypes.sizeof(Weights), *ids, *weights.shape, *addresses, *sizes, *options)
        handle = ctypes.c_uint64()
        try:
            check(self._library, self._library.cpu_experts_open(struct, handle))
        except MemoryError as error:
            raise MemoryError(
                f"{error}: scratch for max_rows {max_rows:,} and {self.nbytes:,} bytes of weights"
            ) from None
        self._handle, self._max_rows = handle.value, max_rows
        self._isa = isa if isa != "best" else ISAS[self._library.cpu_experts_best_isa()]
        self._cores = threads or _usable_cores()

    def __reduce__(self):
        raise TypeError(
            "Experts cannot be copied or pickled: a copy would close the layer. Save it, and open the file again"
        )

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a file for `open`: `nbytes` and up to 4 MiB of holes. It gets its name once all of it is on disk."""
        sections = self._packed  # keeps the weights if another thread closes the layer meanwhile
        if not sections:
            raise Closed("the layer is closed")
        shape, precisions = (self.experts, self.model, self.width), (self.precision, self.down_precision)
        packed.write(Path(path), packed.Packed(shape, precisions, sections))

    @property
    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(p.nbytes for p in self._packed)

    def forward(
        self, x: np.ndarray, topk_ids: np.ndarray, topk_weights: np.ndarray, out: np.ndarray | None = None
    ) -> np.ndarray:
        """The output `[n D]`: a new float32 array, or `out`.

        x and out are float32 or bfloat16 `[n D]`, topk_ids int32 and topk_weights float32 `[n K]`. The id X means no expert. out
        may be x itself. The same arguments give the same bits, on any number of threads. The library is called for at most
        `max_rows` rows at a time. Ctrl-C takes effect between two calls; a part of `out` is then written."""
        handle = self._handle
        if handle is None:
            raise Closed("the layer is closed")
        weights = self._packed  # keeps the weights if another thread closes the layer meanwhile
        if out is None:
            out = np.empty(np.shape(x), np.float32)
        self._check_batch(x, topk_ids, topk_weights, out)
        _check_overlap(x, topk_ids, topk_weights, out)
        n, chosen = topk_ids.shape
        arrays = (x, topk_ids, topk_weights, out)
        dtypes = [_FLOATS.index(array.dtype.name) for array in (x, out)]

        def call(function: Callable[..., int], first: int, last: int) -> None:
            addresses = [array.ctypes.data + first * array.strides[0] for array in arrays]
            struct = ForwardCall(ctypes.sizeof(ForwardCall), last - first, chosen, *dtypes, *addresses)
            check(self._library, function(handle, struct))

        calls = max(1, -(-n // self._tokens_per_call(chosen)))
        if calls > 1:  # all ids and weights are checked before anything is written
            call(self._library.cpu_experts_check, 0, n)
        for i in range(calls):
            call(self._library.cpu_experts_forward, n * i // calls, n * (i + 1) // calls)
        del weights
        return out

    def _check_batch(
        self, x: np.ndarray, topk_ids: np.ndarray, topk_weights: np.ndarray, out: np.ndarray
    ) -> None:
        """Raises TypeError or ValueError unless the arrays have the right types and fit together."""
        n = np.shape(x)[0] if np.ndim(x) else 0
        chosen = np.shape(topk_ids)[-1] if np.ndim(topk_ids) == 2 else 0
        _in_range("tokens", n, 0, (1 << 31) - 1)
        _expect("x", x, (n, self.model), _FLOATS)
        _expect("out", out, (n, self.model), _FLOATS)
        _expect("topk_ids", topk_ids, (n, chosen), ("int32",))
        _expect("topk_weights", topk_weights, (n, chosen), ("float32",))
        _in_range("topk_ids: experts chosen", chosen, 1, 64)
        if not out.flags.writeable:
            raise ValueError("out: not writable")

    def _tokens_per_call(self, chosen: int) -> int:
        rows = self._max_rows
        if self._isa in _CALL_WORK:
            rows = min(rows, _CALL_WORK[self._isa] * self._cores // (self.model * self.width))
        return max(1, rows // chosen)

    def close(self) -> None:
        """Frees the weights. Closing a closed layer raises Closed."""
        handle, self._handle = self._handle, None
        if handle is None:
            raise Closed("the layer is closed")
        check(self._library, self._library.cpu_experts_close(handle))
        self._forget()
        self._packed = ()

    def __enter__(self) -> "Experts":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        if getattr(self, "_handle", None) is not None:
            self._library.cpu_experts_close(self._handle)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # macOS lacks it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _in_range(name: str, value: int, least: int, most: int) -> None:
    """Raises unless `value` is an integer in the range; ctypes would silently cut it to 32 bits."""
    if not isinstance(value, Integral):
        raise TypeError(f"{name}: {value!r}, must be an integer")
    if not least <= value <= most:
        raise ValueError(f"{name}: {value}, must be {least} to {most}")


def _known(what: str, name: str, names: Collection[str]) -> None:
    if name not in names:
        raise ValueError(f"{what} {name!r}: must be one of {', '.join(names)}")


_FLOATS = ("float32", "bfloat16")  # in the order of cpu_experts_dtype


def _expect(name: str, array: np.ndarray, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name}: {type(array).__name__}, must be a numpy array")
    if array.dtype.name not in dtypes or not array.dtype.isnative:
        raise TypeError(f"{name}: {array.dtype}, must be {' or '.join(dtypes)}")
    if array.shape != shape:
        raise ValueError(f"{name}: shape {array.shape}, must be {shape}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: not contiguous")


def _check_overlap(x: np.ndarray, topk_ids: np.ndarray, topk_weights: np.ndarray, out: np.ndarray) -> None:
    """`out` may be x, but overlap nothing else: a later call would read what an earlier one wrote."""
    is_x = out.ctypes.data == x.ctypes.data and out.dtype == x.dtype
    if np.may_share_memory(out, x) and not is_x:
        raise ValueError("out: overlaps x, must be apart or x itself")
    for name, array in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if np.may_share_memory(out, array):
            raise ValueError(f"out: overlaps {name}, must be apart")


def _parts(matrix: Matrix, precision: str, name: str) -> layout.Parts:
    """The parts of a matrix: the given ones, with codes and bfloat16 scales as plain bits, or the quantised floats."""
    if isinstance(matrix, np.ndarray):
        return _quantized(matrix, precision, name)
    if not isinstance(matrix, Sequence) or not all(isinstance(part, np.ndarray) for part in matrix):
        raise TypeError(f"{name}: {type(matrix).__name__}, must be a numpy array or a sequence of such parts")
    if precision == "q8_0" and len(matrix) == 1 and matrix[0].shape[-1:] == (34,):
        return blocks.q8_0_parts(matrix[0])
    return tuple(part.view(_BITS.get(part.dtype.name, part.dtype)) for part in matrix)


def _quantized(matrix: np.ndarray, precision: str, name: str) -> layout.Parts:
    """The parts of floats `[X N K]`, quantised one expert at a time."""
    if matrix.ndim != 3:
        raise ValueError(f"{name}: shape {matrix.shape}, must have three axes")
    if matrix.dtype.name not in (*_FLOATS, "float16", "float64"):
        raise TypeError(f"{name}: {matrix.dtype}, must be of floats")
    each = [layout.quantize(one, precision) for one in matrix]
    return tuple(np.stack(part) for part in zip(*each, strict=True))


_BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}


def _agreed_sizes(
    gate: layout.Parts, up: layout.Parts, down: layout.Parts, precisions: Sequence[str]
) -> tuple[int, int, int]:
    """X, D and F. Raises ValueError unless each part has the dtype and shape that these and the precisions require."""
    experts, model = down[0].shape[:2] if down and down[0].ndim >= 3 else (0, 0)
    width = gate[0].shape[1] if gate and gate[0].ndim >= 3 else 0
    if not experts or not model or not width:
        raise ValueError("gate, up and down must be [X F D], [X F D] and [X D F], none empty")
    matrices = (("gate", gate, width, model), ("up", up, width, model), ("down", down, model, width))
    for (name, parts, n, k), precision in zip(matrices, precisions, strict=True):
        expected = [(dtype, (experts, *shape)) for dtype, shape in layout.part_shapes(precision, n, k)]
        found = [(str(part.dtype), part.shape) for part in parts]
        if found != expected:
            raise ValueError(f"{name}: parts {found}, must be {expected}")
    for name, size in (("experts", experts), ("model", model), ("width", width)):
        _in_range(name, size, 1, packed.MOST)
    return experts, model, width
