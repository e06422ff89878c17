"""Mixture-of-experts layers on the CPU, by AMX tiles, AVX-512, AVX2 or plain C++: whatever is there. Knows numpy only.

    layer = Experts(gate, up, down, precision="int8")
    out = layer.forward(x, topk_ids, topk_weights)

Packing takes seconds a layer, once: `layer.save(path)` keeps it in a file, which `Experts.open(path)` maps at once.

The library behind it is built once, by `python -m cpu_experts.build`."""

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

# Tokens times K D F in a turn, for each core: about a second of int8, that Ctrl-C is heard soon. Only where bits do not depend on
# turns: AVX-512 and AMX, many times faster, choose kernels by how many rows an expert has in one.
_TURN_WORK = {"portable": 1 << 28, "avx2": 6 << 30}


def available() -> bool:
    """Whether the library is built and loads here; if not, a warning says why, once."""
    try:
        load()
    except Unsupported as error:
        _say(str(error))
        return False
    return True


@cache
def _say(words: str) -> None:
    warnings.warn(words, RuntimeWarning, stacklevel=3)


def isa() -> str:
    """The best instruction set usable here: amx, avx512, avx2 or portable; raises Unsupported without the library."""
    return ISAS[load().cpu_experts_best_isa()]


def note() -> str | None:
    """What to tell a user of a processor without the fast instruction sets; None where it has them."""
    found = isa()
    return f"experts on this CPU are computed by {found}: slower than by AVX-512 or AMX" if found in _TURN_WORK else None


class Experts:
    """One layer's experts: `down (silu(gate x) * up x)` each, summed by weight over those chosen for a token.

    gate and up are `[X F D]`, down `[X D F]`: floats, quantised here, or already the parts of `precision` (codes and scales,
    as `layout.quantize` makes them, or GGUF's blocks as one part of bytes). `down_precision` is down's own: GGUF files mix.
    `threads` counts the calling one; None is one a usable core. `isa` forces a lesser instruction set. `max_rows` bounds the
    scratch memory: tokens times experts chosen that are worked on at once."""

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
        gate, up, down = (_parts(*of) for of in zip((gate, up, down), precisions, ("gate", "up", "down"), strict=True))
        experts, model, width = _agreed(gate, up, down, precisions)
        sections = (
            layout.pack_experts([gate, up], precisions[1], model),
            layout.pack_experts([down], precisions[2], width),
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
        """A layer as `save` left it, at once: its weights are mapped, and a page is read when it is first computed with.

        Raises ValueError for a file that is damaged or none of these, Unsupported for another version's; what is damaged within
        the weights only `verify` finds, which reads all of them. While the layer is open the file may be renamed, deleted and
        replaced by another, also by `save`, but not changed in place: shortened, the process ends by SIGBUS."""
        layer = cls.__new__(cls)
        layer._prepare(isa, threads, max_rows)
        layer._start(packed.read(Path(path), verify), threads, isa, max_rows)
        return layer

    def _prepare(self, isa: str, threads: int | None, max_rows: int) -> None:
        """What can fail before anything is packed or mapped."""
        self._handle = None
        self._forget: Callable[[], object] = lambda: None  # by which XLA programs hear that the weights go
        self._library = load()
        _known("isa", isa, ISAS)
        _in_range("threads", 0 if threads is None else threads, 0, 1024)
        _in_range("max_rows", max_rows, 1, 1 << 20)

    def _start(self, weights: packed.Packed, threads: int | None, isa: str, max_rows: int) -> None:
        """Has the library open a layer over the weights, which are held as long as it is open."""
        (self.experts, self.model, self.width), (self.precision, self.down_precision), self._packed = weights
        ids = (layout.FORMATS[p].id for p in weights.precisions)
        pointers, sizes = (p.ctypes.data for p in self._packed), (p.nbytes for p in self._packed)
        options, handle = (threads or 0, ISAS.index(isa), max_rows), ctypes.c_uint64()
        given = Weights(ctypes.sizeof(Weights), *ids, *weights.shape, *pointers, *sizes, *options)
        try:
            check(self._library, self._library.cpu_experts_open(given, handle))
        except MemoryError as error:
            raise MemoryError(f"{error}: scratch for max_rows {max_rows:,}, beside {self.nbytes:,} bytes of weights") from None
        self._handle, self._max_rows = handle.value, max_rows
        self._isa = isa if isa != "best" else ISAS[self._library.cpu_experts_best_isa()]
        usable = getattr(os, "sched_getaffinity", None)  # not on macOS
        self._cores = threads or (len(usable(0)) if usable else os.cpu_count() or 1)

    def __reduce__(self):
        raise TypeError("Experts cannot be copied or pickled, for a copy would close the layer: save it, and open the file again")

    def save(self, path: str | PathLike[str]) -> None:
        """Writes a file for `open`, of `nbytes` and up to 4 MiB of holes; it has its name only once all of it is on the disk."""
        sections = self._packed  # held while it is written, should another thread close the layer
        if not sections:
            raise Closed("the layer is closed")
        shape, precisions = (self.experts, self.model, self.width), (self.precision, self.down_precision)
        packed.write(Path(path), packed.Packed(shape, precisions, sections))

    @property
    def nbytes(self) -> int:
        """What the packed weights take."""
        return sum(p.nbytes for p in self._packed)

    def forward(self, x: np.ndarray, topk_ids: np.ndarray, topk_weights: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """`[n D]` in float32, or into `out`; x and out are float32 or bfloat16, ids int32 `[n K]`, weights float32 `[n K]`.

        The id X stands for no expert. The same arguments give the same bits, on any number of threads. out may be x itself.
        KeyboardInterrupt comes between two turns of `max_rows` or less; a given `out` then holds the tokens of some."""
        handle = self._handle
        if handle is None:
            raise Closed("the layer is closed")
        held = self._packed  # while it runs, should another thread close the layer
        if out is None:
            out = np.empty(np.shape(x), np.float32)
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
        for name, array in (("x", x), ("topk_ids", topk_ids), ("topk_weights", topk_weights)):
            itself = array is x and out.ctypes.data == x.ctypes.data and out.dtype == x.dtype
            if np.may_share_memory(out, array) and not itself:  # what a turn writes, a later one would read
                raise ValueError(f"out: overlaps {name}, must be apart{' or x itself' if name == 'x' else ''}")
        arrays, dtypes = (x, topk_ids, topk_weights, out), [_FLOATS.index(a.dtype.name) for a in (x, out)]

        def call(function: Callable[..., int], first: int, last: int) -> None:
            pointers = (a.ctypes.data + first * a.strides[0] for a in arrays)
            check(
                self._library, function(handle, ForwardCall(ctypes.sizeof(ForwardCall), last - first, chosen, *dtypes, *pointers))
            )

        turns = max(1, -(-n // self._tokens_a_turn(chosen)))
        if turns > 1:  # one by one, as the library would take those of max_rows: Python sees an interrupt only in between
            call(self._library.cpu_experts_check, 0, n)
        for i in range(turns):
            call(self._library.cpu_experts_forward, n * i // turns, n * (i + 1) // turns)
        del held
        return out

    def _tokens_a_turn(self, chosen: int) -> int:
        rows = self._max_rows
        if self._isa in _TURN_WORK:
            rows = min(rows, _TURN_WORK[self._isa] * self._cores // (self.model * self.width))
        return max(1, rows // chosen)

    def close(self) -> None:
        """Frees the weights; a second time is an error."""
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


def _in_range(name: str, value: int, least: int, most: int) -> None:
    """Else ctypes would take what is left of it in 32 bits."""
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


def _parts(matrix: Matrix, precision: str, name: str) -> layout.Parts:
    """A matrix's parts: those given, with codes and bfloat16 scales as plain bits, or those of its floats."""
    if not isinstance(matrix, np.ndarray):
        if not isinstance(matrix, Sequence) or not all(isinstance(part, np.ndarray) for part in matrix):
            raise TypeError(f"{name}: {type(matrix).__name__}, must be a numpy array or a sequence of such parts")
        if precision == "q8_0" and len(matrix) == 1 and matrix[0].shape[-1:] == (34,):
            return blocks.q8_0_parts(matrix[0])
        return tuple(part.view(_BITS.get(part.dtype.name, part.dtype)) for part in matrix)
    if matrix.ndim != 3:
        raise ValueError(f"{name}: shape {matrix.shape}, must have three axes")
    if matrix.dtype.name not in (*_FLOATS, "float16", "float64"):
        raise TypeError(f"{name}: {matrix.dtype}, must be of floats")
    each = [layout.quantize(one, precision) for one in matrix]
    return tuple(np.stack(part) for part in zip(*each, strict=True))


_BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}


def _agreed(gate: layout.Parts, up: layout.Parts, down: layout.Parts, precisions: Sequence[str]) -> tuple[int, int, int]:
    """X, D and F, once every part has the dtype and shape that they and the precisions ask for."""
    first = down[0].shape if down and down[0].ndim >= 3 else (0, 0, 0)
    experts, model = first[:2]
    width = gate[0].shape[1] if gate and gate[0].ndim >= 3 else 0
    if not experts or not model or not width:
        raise ValueError("gate, up and down must be [X F D], [X F D] and [X D F], none empty")
    matrices = (("gate", gate, width, model), ("up", up, width, model), ("down", down, model, width))
    for (name, parts, n, k), precision in zip(matrices, precisions, strict=True):
        expected = layout.part_shapes(precision, n, k)
        found = [(str(p.dtype), p.shape) for p in parts]
        wanted = [(dtype, (experts, *shape)) for dtype, shape in expected]
        if found != wanted:
            raise ValueError(f"{name}: parts {found}, must be {wanted}")
    for name, size in (("experts", experts), ("model", model), ("width", width)):
        _in_range(name, size, 1, packed.MOST)
    return experts, model, width
