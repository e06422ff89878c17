"""One MoE layer on the CPU, by tokens and precision, beside torch's bf16 (oneDNN, packed weights) in the same run.

    python benchmarks/cpu_experts.py --out cpu_experts.json --limits build/limits

Several layers are taken in turn, so that no cache holds what the next forward reads; ours and the peer's forwards are interleaved
and the medians compared, for other load on the machine comes and goes. Random routing. `--limits` is a program of csrc/tests
(cmake -DCPU_EXPERTS_TESTS=ON): the larger of bytes over its bandwidth and operations over its rate is the floor."""

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
from pathlib import Path

import numpy as np

# this file has the package's name, and its folder comes first in sys.path
sys.path[:] = [str(Path(__file__).parent.parent)] + [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).parent]
cpu_experts = importlib.import_module("cpu_experts")
layout = importlib.import_module("cpu_experts.layout")
blocks = importlib.import_module("cpu_experts.blocks")

GEOMETRIES = {"v2-lite": (2048, 1408, 64, 6), "v3": (7168, 2048, 32, 8)}  # D, F, X, K
TOKENS = (1, 16, 64, 256, 1024)
# ms with two AMX cores of 29 GB/s and 6.1 TFLOP/s in bf16; None: none stated
BARS = {
    ("v2-lite", "bf16"): (4.3, 36, 45, 48, 70),
    ("v2-lite", "int8"): (2.4, 20, 25, 30, 50),
    ("v2-lite", "int4_g32"): (1.6, 13, 17, 25, 55),
    ("v3", "bf16"): (28, 105, 112, 135, 240),
    ("v3", "int8"): (15, 55, 60, 85, 170),
    ("v3", "int4_g32"): (8.5, 36, 40, 60, 170),
}
ROTATED = 2.4 * 2**30
PAUSE = 0.02  # the peer's workers spin for some milliseconds after their work, on cores that ours need

Forward = Callable[[np.ndarray, np.ndarray, np.ndarray], object]


def down_precision(geometry: str, precision: str) -> str:
    """Q8_0 where the width is no multiple of Q4_K's and Q6_K's blocks: GGUF files do the like."""
    return "q8_0" if precision in blocks.BYTES and GEOMETRIES[geometry][1] % blocks.VALUES else precision


def random_parts(geometry: str, precision: str, seed: int) -> list[layout.Parts]:
    """gate, up and down: a few experts' random weights, as often as there are experts."""
    model, width, experts, _ = GEOMETRIES[geometry]
    rng = np.random.default_rng(seed)
    matrices = []
    down = down_precision(geometry, precision)
    for n, k, name in ((width, model, precision), (width, model, precision), (model, width, down)):
        few = [layout.quantize(rng.standard_normal((n, k), np.float32) / np.float32(k**0.5), name) for _ in range(2)]
        matrices.append(tuple(np.stack([few[e % 2][i] for e in range(experts)]) for i in range(len(few[0]))))
    return matrices


def ours(geometry: str, precision: str, threads: int, isa: str) -> list[cpu_experts.Experts]:
    layers, held = [], 0
    while held < ROTATED:
        parts, down = random_parts(geometry, precision, len(layers)), down_precision(geometry, precision)
        layers.append(cpu_experts.Experts(*parts, precision, threads, down_precision=down, isa=isa))
        held += layers[-1].nbytes
    return layers


def torch_layer(parts: list[layout.Parts], tokens: int) -> Forward:
    """Experts in a loop over oneDNN's linear, gate and up as one matrix, each packed for the rows it will see."""
    import torch

    experts = parts[0][0].shape[0]
    gate, up, down = (torch.from_numpy(p[0].view(np.int16)).view(torch.bfloat16) for p in parts)
    rows = max(1, tokens * 6 // experts)
    pack, linear = torch.ops.mkldnn._reorder_linear_weight, torch.ops.mkldnn._linear_pointwise
    packed = [(pack(torch.cat([gate[e], up[e]]), rows), pack(down[e].contiguous(), rows)) for e in range(experts)]

    def forward(x: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> object:
        x = torch.from_numpy(x).to(torch.bfloat16)
        ids, weights = torch.from_numpy(ids), torch.from_numpy(weights)
        out = torch.zeros(x.shape)
        for e in ids.unique().tolist():
            token, k = torch.where(ids == e)
            both = linear(x[token], packed[e][0], None, "none", [], "")
            g, u = both.chunk(2, dim=-1)
            y = linear(torch.nn.functional.silu(g) * u, packed[e][1], None, "none", [], "")
            out.index_add_(0, token, y.float() * weights[token, k, None])
        return out

    return forward


def inputs(geometry: str, tokens: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    model, _, experts, chosen = GEOMETRIES[geometry]
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :chosen].astype(np.int32)
    return rng.standard_normal((tokens, model), np.float32), ids, rng.random((tokens, chosen), np.float32)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def milliseconds(
    forwards: dict[str, list[Forward]], geometry: str, tokens: int, seconds: float, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Of each, sorted: interleaved in changing order, never two in a row on one layer."""
    times = {name: [] for name in forwards}
    start, i, order = time.perf_counter(), 0, list(forwards)
    while i < 5 or (time.perf_counter() - start < seconds and i < 200):
        given = inputs(geometry, tokens, i)
        for at, name in enumerate(order):
            layer = forwards[name][(i + at) % len(forwards[name])]
            time.sleep(PAUSE)
            begin = clock()
            layer(*given)
            times[name].append((clock() - begin) * 1e3)
        order, i = order[1:] + order[:1], i + 1
    return {name: sorted(t[2:]) for name, t in times.items()}


def floor(geometry: str, precision: str, tokens: int, nbytes: int, limits: dict) -> float | None:
    """Milliseconds: what is touched at the bandwidth, or what is computed at the rate."""
    if not limits:
        return None
    model, width, experts, chosen = GEOMETRIES[geometry]
    touched = len(np.unique(inputs(geometry, tokens, 0)[1]))
    rate = limits["int8_TOPs"] if precision == "int8" else limits["bf16_TFLOPs"]
    return max(nbytes * touched / experts / limits["read_GBps"] / 1e6, tokens * chosen * 6 * model * width / rate / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, default="v2-lite")
    parser.add_argument("--precisions", nargs="+", choices=layout.FORMATS, default=["bf16", "int8", "int4_g32", "fp8_block"])
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--isa", default="best")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="cpu with --threads 1: fair where other work has the cores"
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="for each number of tokens")
    parser.add_argument("--peer", action=argparse.BooleanOptionalAction, default=True, help="torch, where it is installed")
    parser.add_argument("--limits", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    threads = args.threads or len(os.sched_getaffinity(0))
    limits = json.loads(subprocess.check_output([str(args.limits), str(threads)])) if args.limits else {}
    print(f"{cpu_experts.isa()}, {threads} threads", limits)

    rows = []
    for precision in args.precisions:
        layers = ours(args.geometry, precision, threads, args.isa)
        for tokens in args.tokens:
            forwards = {"ours": [layer.forward for layer in layers]}
            if args.peer and precision == "bf16":
                import torch

                torch.set_num_threads(threads)
                forwards["torch"] = [torch_layer(random_parts(args.geometry, "bf16", i), tokens) for i in range(len(layers))]
            ms = milliseconds(forwards, args.geometry, tokens, args.seconds, CLOCKS[args.clock])
            middle = {name: statistics.median(t) for name, t in ms.items()}
            row = {"precision": precision, "tokens": tokens, "ms": middle["ours"], "best": ms["ours"][0]}
            row["torch bf16"], row["torch best"] = middle.get("torch"), ms["torch"][0] if "torch" in ms else None
            lower = floor(args.geometry, precision, tokens, layers[0].nbytes, limits)
            bars = dict(zip(TOKENS, BARS.get((args.geometry, precision), ()), strict=False))
            row |= {"floor": lower, "share": lower and lower / middle["ours"], "bar": bars.get(tokens)}
            rows.append(row)
            print(" | ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if v), flush=True)
        for layer in layers:
            layer.close()
    if args.out:
        about = {"isa": cpu_experts.isa(), "threads": threads, "geometry": args.geometry, "limits": limits}
        about["date"] = datetime.date.today().isoformat()
        args.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
