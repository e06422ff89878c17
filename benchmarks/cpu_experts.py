"""One MoE layer on the CPU, by tokens and precision, compared with torch (oneDNN), kt-kernel and llama.cpp in the same run.

    python benchmarks/cpu_experts.py --out cpu_experts.json --limits build/limits

The peers are those of `peers/` that are installed. Forwards rotate over several layers, so that no cache holds the next one's
weights. All libraries are timed interleaved, a few forwards at a time in changing order, and medians are compared, because
other load on the machine varies. Routing is random. `error` is the relative distance from the product with the weights' exact
values. `--limits` is a program of csrc/tests (cmake -DCPU_EXPERTS_TESTS=ON) that measures the machine, interleaved as well: the
floor is the larger of bytes over its bandwidth and operations over its rate."""

import argparse
import datetime
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

# this file has the package's name: search its folder last
HERE = Path(__file__).resolve().parent
sys.path[:] = [str(HERE.parent)] + [p for p in sys.path if Path(p or ".").resolve() != HERE] + [str(HERE)]
cpu_experts = importlib.import_module("cpu_experts")
layout = importlib.import_module("cpu_experts.layout")
blocks = importlib.import_module("cpu_experts.blocks")
peers = importlib.import_module("peers")

GEOMETRIES = {"v2-lite": (2048, 1408, 64, 6), "v3": (7168, 2048, 32, 8)}  # D, F, X, K
TOKENS = (1, 16, 64, 256, 1024)
# ms with two AMX cores of these limits
BAR_LIMITS = {"read_GBps": 29, "bf16_TFLOPs": 6.1, "int8_TOPs": 12.2}
BARS = {
    ("v2-lite", "bf16"): (4.3, 36, 45, 48, 70),
    ("v2-lite", "int8"): (2.4, 20, 25, 30, 50),
    ("v2-lite", "int4_g32"): (1.6, 13, 17, 25, 55),
    ("v3", "bf16"): (28, 105, 112, 135, 240),
    ("v3", "int8"): (15, 55, 60, 85, 170),
    ("v3", "int4_g32"): (8.5, 36, 40, 60, 170),
}
INT8 = {"int8", "int4_g32", "int4_g128", "q4_k"}  # precisions that multiply many rows in int8
ROTATED = 2.4 * 2**30
TURN = 4  # forwards at a time; the first one wakes the threads and does not count
# Seconds: a peer's threads spin for up to 50 ms after their work, on cores that the next one needs
PAUSE = 0.07
CHECKED = (1, 64)  # tokens; few and many use different kernels

Layer = Callable[[peers.Batch], np.ndarray]


def down_precision(geometry: str, precision: str) -> str:
    """Q8_0 if the width is not a multiple of Q4_K's and Q6_K's blocks, as in GGUF files."""
    return "q8_0" if precision in blocks.BYTES and GEOMETRIES[geometry][1] % blocks.VALUES else precision


def random_parts(geometry: str, precision: str, seed: int) -> list[layout.Parts]:
    """gate, up and down: the random weights of two experts, repeated for all experts."""
    model, width, experts, _ = GEOMETRIES[geometry]
    rng = np.random.default_rng(seed)
    matrices = []
    down = down_precision(geometry, precision)
    for n, k, name in ((width, model, precision), (width, model, precision), (model, width, down)):
        few = [
            layout.quantize(rng.standard_normal((n, k), np.float32) / np.float32(k**0.5), name)
            for _ in range(2)
        ]
        matrices.append(tuple(np.stack([few[e % 2][i] for e in range(experts)]) for i in range(len(few[0]))))
    return matrices


class Limits:
    """The machine's current limits, measured by `program`; empty without it."""

    def __init__(self, program: Path | None, threads: int):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([str(program), str(threads)], **pipes) if program else None

    def __call__(self) -> dict[str, float]:
        if self.process is None:
            return {}
        print(file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())


class Ours:
    def __init__(self, parts: list[layout.Parts], formats: tuple[str, ...], threads: int, isa: str):
        self.experts = cpu_experts.Experts(*parts, formats[0], threads, down_precision=formats[2], isa=isa)

    def __call__(self, batch: peers.Batch) -> np.ndarray:
        return self.experts.forward(batch.x, batch.ids, batch.weights)


def makers(precision: str, here: dict, threads: int, isa: str) -> dict[str, Callable[[list, tuple], Layer]]:
    """Constructors of layers from weights and formats, by name: ours, and every peer's methods for this precision."""
    found = {"ours": partial(Ours, threads=threads, isa=isa)}
    for peer in here.values():
        found |= {
            peer.named(m): partial(peer.Layer, m, threads=threads) for m in peer.METHODS.get(precision, ())
        }
    return found


def layers(
    geometry: str, precision: str, made_by: dict[str, Callable[[list, tuple], Layer]]
) -> dict[str, list[Layer]]:
    """For each library, layers of the same weights that exceed the caches; a peer that refuses them is left out."""
    made, held = {name: [] for name in made_by}, 0
    formats = (precision, precision, down_precision(geometry, precision))
    while held < ROTATED:
        parts = random_parts(geometry, precision, len(made["ours"]))
        for name in list(made):
            try:
                made[name].append(made_by[name](parts, formats))
            except RuntimeError as error:
                print(f"{name}: not with these sizes: {error}")
                del made[name]
        held += made["ours"][-1].experts.nbytes
    return made


def batch(geometry: str, tokens: int, seed: int, few: bool = False) -> peers.Batch:
    """Random rows with random routing; `few`: all rows choose the same experts."""
    model, _, experts, chosen = GEOMETRIES[geometry]
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
    if few:
        ids = np.repeat(ids[:1], tokens, axis=0)
    bits = layout.to_bf16(rng.standard_normal((tokens, model), np.float32))
    return peers.Batch(layout.from_bf16(bits), bits, ids, rng.random((tokens, chosen), np.float32))


def errors(made: dict[str, list[Layer]], geometry: str, precision: str) -> dict[str, float]:
    """The error of each library's first layer: the larger of few and many tokens."""
    formats = (precision, precision, down_precision(geometry, precision))
    many = batch(geometry, max(CHECKED), 0, few=True)
    right = peers.expected(many, random_parts(geometry, precision, 0), formats)
    found = dict.fromkeys(made, 0.0)
    for tokens in CHECKED:
        given = peers.Batch(*(part[:tokens] for part in many))
        for name, (first, *_) in made.items():
            found[name] = max(found[name], peers.distance(first(given), right[:tokens]))
    return found


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def milliseconds(
    made: dict[str, list[Layer]],
    geometry: str,
    tokens: int,
    seconds: float,
    clock: Callable[[], float],
    limits: Limits,
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Sorted milliseconds of each library, timed interleaved, every forward on the next layer; and the medians of the limits."""
    times, order, found = {name: [] for name in made}, list(made), []
    for each in made.values():  # lets each prepare for this number of tokens
        for layer in each:
            layer(batch(geometry, tokens, 0))
    start, i = time.perf_counter(), 0
    while i < 5 or (time.perf_counter() - start < seconds and i < 200):
        given = [batch(geometry, tokens, i * TURN + at) for at in range(TURN)]
        for name in order:
            time.sleep(PAUSE)
            for at, one in enumerate(given):
                layer = made[name][(i * TURN + at) % len(made[name])]
                begin = clock()
                layer(one)
                times[name] += [(clock() - begin) * 1e3] if at else []
        time.sleep(PAUSE)
        found.append(limits())
        order, i = order[1:] + order[:1], i + 1
    medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
    return {name: sorted(t) for name, t in times.items()}, medians


def floor(geometry: str, precision: str, tokens: int, nbytes: int, limits: dict[str, float]) -> float:
    """Milliseconds: bytes touched over the bandwidth, or operations over the rate, whichever is larger."""
    model, width, experts, chosen = GEOMETRIES[geometry]
    touched = len(np.unique(batch(geometry, tokens, 0).ids))
    rate = limits["int8_TOPs" if precision in INT8 else "bf16_TFLOPs"]
    return max(
        nbytes * touched / experts / limits["read_GBps"] / 1e6,
        tokens * chosen * 6 * model * width / rate / 1e9,
    )


def compared(
    ms: float, geometry: str, precision: str, tokens: int, threads: int, nbytes: int, limits: dict
) -> dict[str, float]:
    """The comparison with the machine's limits, if measured; and with the bar for two threads, also as a share of its limits."""
    found = dict(limits)
    if limits:
        least = floor(geometry, precision, tokens, nbytes, limits)
        found |= {"floor": least, "share": least / ms}
    bars = dict(zip(TOKENS, BARS.get((geometry, precision), ()), strict=False))
    if threads == 2 and tokens in bars:
        share = floor(geometry, precision, tokens, nbytes, BAR_LIMITS) / bars[tokens]
        found |= {"bar": bars[tokens], "bar's share": share}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, default="v2-lite")
    parser.add_argument(
        "--precisions", nargs="+", choices=layout.FORMATS, default=["bf16", "int8", "int4_g32", "fp8_block"]
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--isa", default="best")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu, with --threads 1, is fair on a busy machine"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds for each number of tokens")
    parser.add_argument(
        "--peers",
        nargs="*",
        choices=peers.MODULES,
        default=list(peers.MODULES),
        help="peers to run, if installed",
    )
    parser.add_argument("--limits", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    threads = args.threads or len(os.sched_getaffinity(0))
    limits = Limits(args.limits, threads)
    print(f"{cpu_experts.isa()}, {threads} threads", limits())
    here, words = peers.found(args.peers)
    for name, what in words.items():
        print(f"{name}: {what}", flush=True)

    rows = []
    for precision in args.precisions:
        made = layers(args.geometry, precision, makers(precision, here, threads, args.isa))
        far, nbytes = errors(made, args.geometry, precision), made["ours"][0].experts.nbytes
        for tokens in args.tokens:
            ms, measured = milliseconds(made, args.geometry, tokens, args.seconds, CLOCKS[args.clock], limits)
            row = {"precision": precision, "tokens": tokens}
            for name, t in ms.items():
                keys = ("ms", "best", "error") if name == "ours" else (name, f"{name} best", f"{name} error")
                row |= zip(keys, (statistics.median(t), t[0], far[name]), strict=True)
            compared_with = compared(row["ms"], args.geometry, precision, tokens, threads, nbytes, measured)
            row |= compared_with
            rows.append(row)
            each = [
                f"{name} {statistics.median(t):.3g} (best {t[0]:.3g}, error {far[name]:.2%})"
                for name, t in ms.items()
            ]
            limit = [f"{name} {value:.3g}" for name, value in compared_with.items()]
            print(f"{precision}, tokens {tokens}", *each, *limit, sep=" | ", flush=True)
        del made
    if args.out:
        about = {"isa": cpu_experts.isa(), "threads": threads, "geometry": args.geometry, "peers": words}
        about["date"] = datetime.date.today().isoformat()
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
