"""Dequantisation of every format to float32 under jit, in GB/s written, compared with the gguf package on the same bytes.

    python benchmarks/unpack.py --out unpack.json

The shape is V2-Lite's lm_head: shorter calls of a millisecond or two can find both threads on one core. The package's numpy
code uses one core on any device; our own formats have no peer. glibc is set to keep freed memory, because page faults would
otherwise take most of the time, by chance of one side only. Rates are of the median call."""

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
    """A tensor of random bytes."""
    rng = np.random.default_rng(0)
    parts = (
        rng.integers(0, 256, (*spec.shape, np.dtype(spec.dtype).itemsize), np.uint8).view(spec.dtype)[..., 0]
        for spec in abstract(format, shape).parts
    )
    return QTensor(format, tuple(jax.device_put(part) for part in parts), shape)


def peer(q: QTensor) -> Callable[[], np.ndarray] | None:
    """Dequantisation by the gguf package, if it knows the type."""
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
    """Times of `calls` calls except the first, which meets a cold cache and sleeping threads."""
    return [seconds(run) for _ in range(calls)][1:] if run is not None else []


def measured(format: str, shape: tuple[int, int], rounds: int) -> dict:
    """The rates of one format; both sides are timed interleaved, so that both meet the same load."""
    q, unpack = random_tensor(format, shape), jax.jit(dequantize)
    ours, theirs, peers = [], [], peer(q)
    with np.errstate(all="ignore"):
        for _ in range(rounds):
            ours += in_a_row(lambda: unpack(q), 11)
            theirs += in_a_row(peers, 2)
    written, median = 4 * shape[0] * shape[1], statistics.median(ours)
    row = {"format": format, "bits": 8 * q.nbytes / (shape[0] * shape[1]), "GB/s": written / median / 1e9}
    if theirs:
        row |= {
            "gguf GB/s": written / statistics.median(theirs) / 1e9,
            "times": statistics.median(theirs) / median,
        }
    return row


def keep_memory() -> None:
    """Sets glibc to allocate without mmap and to keep freed memory."""
    malloc = ctypes.CDLL(None)
    if hasattr(malloc, "mallopt"):
        for option, value in {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: 2**31 - 1, M_ARENA_MAX: 1}.items():
            malloc.mallopt(option, value)


def main(args: argparse.Namespace):
    keep_memory()
    rows = [measured(format, tuple(args.shape), args.rounds) for format in args.formats]
    report.show(
        rows, args.out, shape=args.shape, python=platform.python_version(), gguf=metadata.version("gguf")
    )


if __name__ == "__main__":
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=(102400, 2048), metavar=("N", "K"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT"
    )
    main(parser.parse_args())
