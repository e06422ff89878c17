"""Rows times packed weights on a Hopper GPU: the kernel for each format against XLA's matmul in bfloat16, and its results.

    python benchmarks/packed.py --out packed.json
    python benchmarks/packed.py --formats Q4_K --rows 1 16    # a part of it
    python benchmarks/packed.py --unpacked                    # also the former way: XLA unpacks, then multiplies
    python benchmarks/packed.py --expected                    # only: experts of which few rows have any

A time is wall time per call, of many calls back to back in one program, over rotating weights that exceed the L2. The weights
are reordered before. Checks come first: a line each, FAIL where an error is more than twice that of XLA on the same weights.
Kernels are compiled in threads. After --seconds no further format is begun, and the table is printed last."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")
os.environ.setdefault(
    "XLA_FLAGS", "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=2"
)

import jax
import jax.numpy as jnp
import numpy as np
import report
from ops import timing
from ops.ragged_dot import deal

from mla_jax.base.qtensor import QTensor, dequantize
from pallas_kernels import fp8, packed, testing
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.ragged_dot import ragged_dot, ragged_swiglu

OUT, IN = 8192, 4096
ROWS = (1, 4, 8, 16, 64, 128, 512, 4096)
FORMATS = (
    "Q4_K",
    "int4_g32",
    "Q8_0",
    "int8",
    "fp8_block",
    "w8",
    "w8a8",
    "Q6_K",
    "int4_g128",
    "Q5_K",
    "Q5_0",
    "Q5_1",
)
SHAPES = ((5, 200, 512), (1, 264, 768), (70, 136, 256), (300, 72, 256))  # rows, features, depth
GROUPS = ((3, 0, 70, 1, 12), (1, 0, 3, 1))  # rows of each; of the few, the depth is split
EXPERTS = (32, 2048, 7168)  # of V3 on one of eight devices, and their widths, in FP8
# Rows, those expected, those with an expert
EXPECTED = ((1024, 512, 512), (64, 8, 1), (16, 8, 4), (16, 8, 8), (64, 8, 8))
SECONDS = 0.1  # of timing a program
BY_THE_FILE = {"w8", "w8a8"}  # E4M3 in the file's order: rows in bfloat16, and rows that are quantised before


def plain(x, w):
    return jnp.einsum("md,fd->mf", x, w)


def unpacked(format: str, x, *parts):
    return plain(x, dequantize(QTensor(format, parts, (OUT, IN)), x.dtype))


def rows_of(M: int, D: int = IN) -> jax.Array:
    return jax.random.normal(jax.random.key(M), (M, D), jnp.bfloat16)


def values(format: str, parts: tuple, shape: tuple[int, ...] = (OUT, IN)) -> jax.Array:
    """The weights in float32, by the format's own definition."""
    format = "fp8_block" if format in BY_THE_FILE else format
    return jax.jit(dequantize)(QTensor(format, parts, shape))


def line(title: str, got, wanted, own) -> str:
    off, own = testing.error(got, wanted), testing.error(own, wanted)
    return f"{'ok  ' if off <= 2 * own else 'FAIL'} {title}: {off:.5f}, XLA {own:.5f}"


def checks(format: str) -> list[str]:
    """Odd shapes, groups, and that reordering is undone; in threads."""
    if format not in packed.KINDS:
        return []
    calls = [partial(check_shape, format, *shape) for shape in SHAPES] + [
        partial(check_groups, format, sizes) for sizes in GROUPS
    ]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda call: call(), calls))


def check_shape(format: str, M: int, F: int, D: int) -> str:
    parts, x = packed.random_parts(format, (F, D)), rows_of(M, D)
    w, numbers = packed.reorder(format, parts), values(format, parts, (F, D))
    same = all((a == b).all() for a, b in zip(packed.restore(w), parts, strict=True))
    got = quantized_matmul(x, w, impl="mosaic_gpu")
    wanted = jnp.dot(x.astype(jnp.float32), numbers.T, precision="highest")
    text = line(f"{format}, {M} x {D} x {F}", got, wanted, plain(x, numbers.astype(x.dtype)))
    return text if same else f"FAIL {format}: the file's bytes are not restored"


def check_groups(format: str, groups: tuple[int, ...], F: int = 136, D: int = 512) -> str:
    stacks = [packed.random_parts(format, (len(groups), F, D), seed) for seed in range(2)]
    weights = [packed.reorder(format, parts) for parts in stacks]
    x = rows_of(sum(groups), D)
    sizes = jnp.array(groups)
    got, own = (ragged_swiglu(x, *weights, sizes, impl=impl) for impl in ("mosaic_gpu", "xla"))
    exact, group = x.astype(jnp.float32), np.repeat(np.arange(len(groups)), groups)
    numbers = (values(format, parts, (len(groups), F, D)) for parts in stacks)
    gate, up = (jnp.einsum("md,mfd->mf", exact, each[group], precision="highest") for each in numbers)
    return line(f"{format}, {len(groups)} groups", got, jax.nn.silu(gate) * up, own)


class Side:
    """Sets of weights, and a program for each number of rows."""

    def __init__(self, make: Callable[[int], tuple], call: Callable, rows: list[int]):
        first = make(0)
        self.nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(first))
        self.sets = [first, *(make(seed) for seed in range(1, timing.sets_of(self.nbytes)))]
        with ThreadPoolExecutor() as pool:
            programs = pool.map(
                lambda M: timing.Program(call, [(rows_of(M), *w) for w in self.sets], 64 if M < 512 else 16),
                rows,
            )
            self.programs = dict(zip(rows, programs, strict=True))


def quantized(seed: int) -> tuple:
    return tuple(jax.jit(fp8.quantize_weight)(jax.random.normal(jax.random.key(seed), (OUT, IN)) * IN**-0.5))


def by_the_file(format: str, x, codes, scale):
    rows = fp8.quantize(x) if format == "w8a8" else x
    return quantized_matmul(rows, fp8.Fp8(codes, scale), out_dtype=x.dtype, impl="mosaic_gpu")


def sides(format: str, old: bool) -> dict[str, tuple]:
    """By name: the maker of a set of weights, the function called with it after the rows, and the maker of a file's parts."""
    if format == "bf16":
        return {
            format: (
                lambda seed: (jax.random.normal(jax.random.key(seed), (OUT, IN), jnp.bfloat16),),
                plain,
                None,
            )
        }
    if format in BY_THE_FILE:
        return {format: (quantized, partial(by_the_file, format), quantized)}
    parts = partial(packed.random_parts, format, (OUT, IN))
    call = partial(quantized_matmul, impl="mosaic_gpu")
    found = {format: (lambda seed: (packed.reorder(format, parts(seed)),), call, parts)}
    return found | {f"{format}, XLA": (parts, partial(unpacked, format), None)} if old else found


def rounded(name: str, x):
    """The rows as the kernel takes them."""
    return fp8.dequantize(fp8.quantize(x)).astype(x.dtype) if name == "w8a8" else x


def measured(name: str, side: Side, w: jax.Array | None, beside: dict[int, float]) -> list[dict]:
    """A row per number of rows; `w` are the first weights in float32, `beside` the times in bfloat16."""
    found = []
    for M, program in side.programs.items():
        us = program.microseconds(SECONDS)
        row = {
            "format": name,
            "rows": M,
            "us": us,
            "GB/s": side.nbytes / us / 1e3,
            "TFLOP/s": 2 * M * OUT * IN / us / 1e6,
        }
        row |= {"of bf16": beside[M] / us} if beside else {}
        if w is not None:
            x = rounded(name, rows_of(M))
            wanted = jnp.dot(x.astype(jnp.float32), w.T, precision="highest")
            print(line(f"{name}, {M} rows", program.out(), wanted, plain(x, w.astype(x.dtype))), flush=True)
        print(row, flush=True)
        found.append(row)
    return found


def grouped(op: Callable, expected: int | None, x: jax.Array, sizes: jax.Array, *weights) -> jax.Array:
    return op(x, *weights, sizes, expected=expected)


def expected() -> Iterator[dict]:
    """Grouped matmuls of whose rows some have an expert, for all rows and for as many as a device of a mesh expects."""
    experts, F, D = EXPERTS
    stacks = [
        packed.random_parts("fp8_block", shape, seed)
        for seed, shape in enumerate([EXPERTS, EXPERTS, (experts, D, F)])
    ]
    gate, up, down = (packed.reorder("fp8_block", parts) for parts in stacks)
    for op, width, weights in ((ragged_swiglu, D, (gate, up)), (ragged_dot, F, (down,))):
        for rows, told, have in EXPECTED:
            x = rows_of(rows, width)
            sets = [(sizes, *weights) for sizes in deal(have, experts, 16, even=False)]
            row = {"op": op.__name__, "rows": rows, "expected": told, "with an expert": have}
            for name, number in (("us", None), ("us, for those", told)):
                call = partial(grouped, op, number, x)
                row[name] = timing.Program(call, sets).microseconds(SECONDS)
            print(row, flush=True)
            yield row


def main():
    start = time.perf_counter()
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="FORMAT", help=", ".join(FORMATS)
    )
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--unpacked", action="store_true", help="also time XLA's unpacking")
    parser.add_argument("--expected", action="store_true", help="only experts of which few rows have any")
    parser.add_argument("--seconds", type=float, default=110)
    args, table = parser.parse_args(), []
    if args.expected:
        report.show(list(expected()), args.out, shape=EXPERTS)
        return
    for format in ("bf16", *args.formats):
        if time.perf_counter() - start > args.seconds:
            print(f"no time is left for {format}", flush=True)
            continue
        try:
            print(*checks(format), sep="\n", flush=True)
            for name, (make, call, parts) in sides(format, args.unpacked).items():
                side, w = Side(make, call, args.rows), values(format, parts(0)) if parts else None
                table += measured(
                    name, side, w, {row["rows"]: row["us"] for row in table if row["format"] == "bf16"}
                )
        except Exception as error:  # the table of what was measured is worth more
            print(f"FAIL {format}: {type(error).__name__}: {str(error)[:2000]}", flush=True)
        print(f"{format}: {time.perf_counter() - start:.0f} s so far", flush=True)
    report.show(table, args.out, shape=(OUT, IN))


if __name__ == "__main__":
    main()
