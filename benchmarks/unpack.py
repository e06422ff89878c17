"""Unpacking of every quantised format to float32 under jit, in GB/s written, next to the gguf package on the same bytes.

    python benchmarks/unpack.py --out unpack.json

Of the shape of V2-Lite's lm_head, for calls of a millisecond or two may find both threads on one core. The package's numpy
code runs on one core whatever the device; our own formats have no peer. glibc is told to keep freed memory, or either side
would spend most of its time on fresh pages, by chance of the one and not of the other. Rates are of the median call."""

import argparse
import ctypes
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata

import gguf
import jax
import numpy as np
import report

from mla_jax.base.gguf_blocks import TYPES
from mla_jax.base.qtensor import FORMATS, QTensor, abstract, dequantize

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of malloc.h


def random_tensor(format: str, shape: tuple[int, int]) -> QTensor:
    """Random bytes, which unpack as fast as any."""
    rng = np.random.default_rng(0)
    parts = (
        rng.integers(0, 256, (*spec.shape, np.dtype(spec.dtype).itemsize), np.uint8).view(spec.dtype)[..., 0]
        for spec in abstract(format, shape).parts
    )
    return QTensor(format, tuple(jax.device_put(part) for part in parts), shape)


def peer(q: QTensor) -> Callable[[], np.ndarray] | None:
    """The gguf package's way to the same values, if it knows the type."""
    if q.format not in TYPES or q.format not in gguf.GGMLQuantizationType.__members__:
        return None
    packed, kind = np.asarray(q.parts[0]).reshape(q.shape[0], -1), gguf.GGMLQuantizationType[q.format]
    return lambda: gguf.quants.dequantize(packed, kind)


def seconds(run: Callable[[], object] | None) -> float | None:
    if run is None:
        return None
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def in_a_row(run: Callable[[], object] | None, calls: int) -> list[float]:
    """The first call's time is left out: it finds the other side's data in the cache, and idle threads asleep."""
    return [seconds(run) for _ in range(calls)][1:] if run is not None else []


def measured(format: str, shape: tuple[int, int], rounds: int) -> dict:
    """Tensor after tensor, as a loader does it; the two sides take turns, so that both see the same machine."""
    q, unpack = random_tensor(format, shape), jax.jit(dequantize)
    ours, theirs, peers = [], [], peer(q)
    with np.errstate(all="ignore"):
        for _ in range(rounds):
            ours += in_a_row(lambda: unpack(q), 11)
            theirs += in_a_row(peers, 2)
    written, median = 4 * shape[0] * shape[1], statistics.median(ours)
    row = {"format": format, "bits": 8 * q.nbytes / (shape[0] * shape[1]), "GB/s": written / median / 1e9}
    if theirs:
        row |= {"gguf GB/s": written / statistics.median(theirs) / 1e9, "times": statistics.median(theirs) / median}
    return row


def keep_memory() -> None:
    """Has glibc take no array from a mapping of its own and give no freed memory back."""
    malloc = ctypes.CDLL(None)
    if hasattr(malloc, "mallopt"):
        for option, value in {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_ARENA_MAX: 1}.items():
            malloc.mallopt(option, value)


def main(args: argparse.Namespace):
    keep_memory()
    rows = [measured(format, tuple(args.shape), args.rounds) for format in args.formats]
    report.show(rows, args.out, shape=args.shape, python=platform.python_version(), gguf=metadata.version("gguf"))


if __name__ == "__main__":
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=(102400, 2048), metavar=("N", "K"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT")
    main(parser.parse_args())
