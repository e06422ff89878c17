"""Unpacking of every quantised format to float32 under jit, in GB/s written, next to the gguf package on the same bytes.

    python benchmarks/unpack.py --out unpack.json

The package's numpy code runs on one core whatever the device; our own formats have no peer. glibc is told to keep freed memory,
or either side would spend most of its time on fresh pages, by chance of the one and not of the other. Rates are the best of the
rounds and `times` is their ratio, for what else a machine does only ever slows; the median of the rounds' ratios is beside it."""

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

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


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


def measured(format: str, shape: tuple[int, int], rounds: int) -> dict:
    """In each round ours runs before and after the package, so that both see the same machine."""
    q, unpack = random_tensor(format, shape), jax.jit(dequantize)
    ours, theirs = lambda: unpack(q), peer(q)
    with np.errstate(all="ignore"):
        seconds(ours), seconds(theirs)
        times = [(seconds(ours), seconds(theirs), seconds(ours)) for _ in range(rounds)]
    written, best = 4 * shape[0] * shape[1], min(t for first, _, second in times for t in (first, second))
    row = {"format": format, "bits": 8 * q.nbytes / (shape[0] * shape[1]), "GB/s": written / best / 1e9}
    if theirs is not None:
        least, ratios = min(t for _, t, _ in times), [2 * t / (first + second) for first, t, second in times]
        row |= {"gguf GB/s": written / least / 1e9, "times": least / best, "times, median": statistics.median(ratios)}
    return row


def keep_memory() -> None:
    """Has glibc neither map large arrays apart nor give freed memory back."""
    malloc = ctypes.CDLL(None)
    if hasattr(malloc, "mallopt"):
        for option in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
            malloc.mallopt(option, 1 << 30)


def main(args: argparse.Namespace):
    keep_memory()
    rows = [measured(format, tuple(args.shape), args.rounds) for format in args.formats]
    report.show(rows, args.out, shape=args.shape, python=platform.python_version(), gguf=metadata.version("gguf"))


if __name__ == "__main__":
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=(1024, 2048), metavar=("N", "K"))
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT")
    main(parser.parse_args())
