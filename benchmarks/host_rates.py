"""Layers of experts on the CPU: measured time, and the time that the planner predicts.

    python -m cpu_experts.build && python benchmarks/host_rates.py --out host_rates.json

The planner measures a CPU's rates with a layer of its own (mla_jax/offload/calibrate.py). This benchmark measures them again, and
compares the predictions for layers of V2-Lite and of V3 (with 32 of its experts) with medians of forwards, without the time of a
call from the device. Routing is random, with other tokens in every forward; in int4 V2-Lite's 64 experts take 0.3 GB."""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterator

import numpy as np
import report

from cpu_experts import Experts
from mla_jax import Config
from mla_jax.mesh.host_cost import HostRates, host_seconds
from mla_jax.offload import calibrate

SHAPES = {
    "v2_lite": Config.preset("v2_lite"),
    "v3, 32 experts": dataclasses.replace(Config.preset("v3"), n_routed_experts=32, n_group=1, topk_group=1),
}
PRECISIONS = ["bf16", "int8", "int4_g32", "fp8_block"]
TOKENS = [1, 8, 64, 256, 1024, 4096]
REPEATS = 9


def layer(config: Config, precision: str) -> Experts:
    return calibrate.repeated(
        config.hidden_size, config.moe_intermediate_size or 0, config.n_routed_experts or 0, precision
    )


def seconds(experts: Experts, tokens: int, chosen: int) -> float:
    """The median time of a forward in seconds, each with other tokens."""
    rng, times = np.random.default_rng(tokens), []
    x = rng.standard_normal((tokens, experts.model), np.float32)
    weights = np.full((tokens, chosen), 1 / chosen, np.float32)
    for _ in range(1 + REPEATS):
        ids = np.argsort(rng.random((tokens, experts.experts)), axis=1)[:, :chosen].astype(np.int32)
        start = time.perf_counter()
        experts.forward(x, ids, weights)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def compared(name: str, precision: str, tokens: list[int], rates: HostRates) -> Iterator[dict]:
    config = SHAPES[name]
    with layer(config, precision) as experts:
        for n in tokens:
            taken = seconds(experts, n, config.num_experts_per_tok or 1)
            expected = host_seconds(config, rates, n, experts.nbytes / experts.experts) - rates.call
            row = {
                "model": name,
                "precision": precision,
                "tokens": n,
                "ms": taken * 1e3,
                "predicted ms": expected * 1e3,
            }
            yield row | {"predicted / measured": expected / taken}


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument(
        "--precisions", nargs="+", choices=[*PRECISIONS, "int4_g128", "q8_0"], default=PRECISIONS
    )
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    options = parser.parse_args()
    rows, reached = [], {}
    for precision in options.precisions:
        rates = calibrate.measure_host(precision)
        reached[precision] = rates._asdict()
        print(rates, flush=True)
        for name in options.models:
            for row in compared(name, precision, options.tokens, rates):
                rows.append(row)
                print(row, flush=True)
    report.show(rows, options.out, benchmark="host_rates", rates=reached)


if __name__ == "__main__":
    main()
