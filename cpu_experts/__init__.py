"""Mixture-of-experts layers on the CPU, by AMX tiles, AVX-512, AVX2 or plain C++: whatever is there. Knows numpy only.

    layer = Experts(gate, up, down, precision="int8")
    out = layer.forward(x, topk_ids, topk_weights)

Packing takes seconds a layer, once: `layer.save(path)` keeps it in a file, which `Experts.open(path)` maps at once.

The library behind it is built once, by `python -m cpu_experts.build`."""

import ctypes
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import cache
from os import PathLike
from pathlib import Path

import numpy as np

from cpu_experts import blocks, layout, packed
from cpu_experts.library import ISAS, Batch, Closed, Unsupported, Weights, check, load

__all__ = ["Closed", "Experts", "Unsupported", "available", "isa"]

Matrix = np.ndarray | Sequence[np.ndarray]


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
        self._prepare(isa)
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
        layer._prepare(isa)
        layer._start(packed.read(Path(path), verify), threads, isa, max_rows)
        return layer

    def _prepare(self, isa: str) -> None:
        """What can fail before anything is packed or mapped."""
        self._handle = None
        self._forget: Callable[[], object] = lambda: None  # by which XLA programs hear that the weights go
        self._library = load()
        _known("isa", isa, ISAS)

    def _start(self, weights: packed.Packed, threads: int | None, isa: str, max_rows: int) -> None:
        """Has the library open a layer over the weights, which are held as long as it is open."""
        (self.experts, self.model, self.width), (self.precision, self.down_precision), self._packed = weights
        ids = (layout.FORMATS[p].id for p in weights.precisions)
        pointers, sizes = (p.ctypes.data for p in self._packed), (p.nbytes for p in self._packed)
        options, handle = (threads or 0, ISAS.index(isa), max_rows), ctypes.c_uint64()
        given = Weights(ctypes.sizeof(Weights), *ids, *weights.shape, *pointers, *sizes, *options)
        check(self._library, self._library.cpu_experts_open(given, handle))
        self._handle, self._max_rows = handle.value, max_rows

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

        The id X stands for no expert. The same arguments give the same bits, on any number of threads. KeyboardInterrupt comes
        between two turns of `max_rows`; a given `out` then holds the tokens of some."""
        handle = self._handle
        if handle is None:
            raise Closed("the layer is closed")
        held = self._packed  # while it runs, should another thread close the layer
        if out is None:
            out = np.empty(np.shape(x), np.float32)
        n = np.shape(x)[0] if np.ndim(x) else 0
        chosen = np.shape(topk_ids)[-1] if np.ndim(topk_ids) == 2 else 0
        _expect("x", x, (n, self.model), _FLOATS)
        _expect("out", out, (n, self.model), _FLOATS)
        _expect("topk_ids", topk_ids, (n, chosen), ("int32",))
        _expect("topk_weights", topk_weights, (n, chosen), ("float32",))
        if not out.flags.writeable:
            raise ValueError("out: not writable")
        arrays, dtypes = (x, topk_ids, topk_weights, out), [_FLOATS.index(a.dtype.name) for a in (x, out)]

        def call(function: Callable[..., int], first: int, last: int) -> None:
            pointers = (a.ctypes.data + first * a.strides[0] for a in arrays)
            check(self._library, function(handle, Batch(ctypes.sizeof(Batch), last - first, chosen, *dtypes, *pointers)))

        turns = max(1, -(-n // max(1, self._max_rows // max(1, chosen))))
        if turns > 1:  # one by one, as the library would take them: Python sees an interrupt only in between
            call(self._library.cpu_experts_check, 0, n)
        for i in range(turns):
            call(self._library.cpu_experts_forward, n * i // turns, n * (i + 1) // turns)
        del held
        return out

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
        if precision == "q8_0" and len(matrix) == 1 and matrix[0].shape[-1] == 34:
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
    return experts, model, width
