"""Unpacking of every quantised format to float32 under jit, in GB/s written, next to the gguf package on the same bytes.

    python benchmarks/unpack.py --out unpack.json

The package's numpy code runs on one core whatever the device; our own formats have no peer. The default shape writes 8 MiB:
from 32 MiB on, glibc hands an array's memory back after every call, and a CPU spends most of its time on fresh pages. To
measure larger shapes without that, set MALLOC_MMAP_THRESHOLD_ and MALLOC_TRIM_THRESHOLD_ to more bytes than are written."""

import argparse
from importlib import metadata

import gguf
import jax
import numpy as np
import report

from mla_jax.base.gguf_blocks import TYPES
from mla_jax.base.qtensor import FORMATS, QTensor, abstract, dequantize


def random_tensor(format: str, shape: tuple[int, int]) -> QTensor:
    """Random bytes, which unpack as fast as any."""
    rng = np.random.default_rng(0)
    parts = (
        rng.integers(0, 256, (*spec.shape, np.dtype(spec.dtype).itemsize), np.uint8).view(spec.dtype)[..., 0]
        for spec in abstract(format, shape).parts
    )
    return QTensor(format, tuple(jax.device_put(part) for part in parts), shape)


def peer_seconds(q: QTensor) -> float | None:
    if q.format not in TYPES:
        return None
    packed, kind = np.asarray(q.parts[0]).reshape(q.shape[0], -1), gguf.GGMLQuantizationType[q.format]
    with np.errstate(all="ignore"):
        return report.best_seconds(lambda: gguf.quants.dequantize(packed, kind))


def measured(format: str, shape: tuple[int, int], repeats: int) -> dict:
    q, unpack = random_tensor(format, shape), jax.jit(dequantize)
    seconds, peer = report.best_seconds(lambda: unpack(q), repeats), peer_seconds(q)
    written = 4 * shape[0] * shape[1]
    return {
        "format": format,
        "bits": 8 * q.nbytes / (shape[0] * shape[1]),
        "GB/s": written / seconds / 1e9,
        "gguf GB/s": peer and written / peer / 1e9,
        "times": peer and peer / seconds,
    }


def main(args: argparse.Namespace):
    rows = [measured(format, tuple(args.shape), args.repeats) for format in args.formats]
    report.show(rows, args.out, shape=args.shape, gguf=metadata.version("gguf"))


if __name__ == "__main__":
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=(1024, 2048), metavar=("N", "K"))
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS), metavar="FORMAT")
    main(parser.parse_args())
