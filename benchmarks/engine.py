"""The engine beside the programs it sends: V2-Lite's shape, random bf16 weights, greedy, one GPU.

    python benchmarks/engine.py --out engine.json
    python benchmarks/engine.py --only a,calls --peer
    python benchmarks/engine.py --small              (a tiny model, on a CPU: does the script work?)

`bare` is the same programs for the same requests, sent back to back, without an engine.

- a: decoding 64 requests, and one, that hold 4,096 tokens each. Also the engine's time on the host as a share of all time.
- b: 1,000 requests at once; lengths as LENGTHS in drive.py says. The floor is the time of the bare programs for as many tokens:
  prompts in full chunks, output at 64 rows that hold what a row holds on average. The share is the floor divided by the time.
- c: the same kind of requests, arriving at random (Poisson) at 50 and 80 % of b's rate, whether or not others are done. The time
  to the first token counts from the arrival. Tokens come in pieces: "between tokens" is the time between two pieces, divided by
  the tokens of the second; "between pieces" is what somebody who reads along waits.
- d: requests with 64 tokens of their own behind 8,192 that all share, at once. "not shared": the first token differs, so that
  the prefix index finds nothing. There are fewer requests then, and as few in the run that it is compared with.
- e: a step of one request that holds 1k to 128k tokens, beside the time to read the weights and latents. Latents are zeros.
- calls: a call of `run` without any steps, sent many times ahead; also for 61 layers as in V3, with tiny widths.
- peer (--peer): 64 requests of 256 + 64 tokens at once, here and in transformers: see peer_transformers.py."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import report
from drive import Bare, Bench, Scale, open_loop
from peer_transformers import REQUESTS, SMALLEST

from mla_jax import Config
from mla_jax.decode.outputs import STEPS
from mla_jax.engine.core.size import Size
from mla_jax.mesh.cost import Pass
from mla_jax.model.parts import cost_of

_TINY_V3 = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 16,
    "q_lora_rank": 128,
    "n_routed_experts": 16,
    "vocab_size": 1024,
    "quantization_config": None,
}
FULL = Scale(
    model=Config.preset("v2_lite"),
    deep=Config.preset("v3", **_TINY_V3),
    size=Size(rows=64, pages=6000, context=16_384, chunk=4096),
    held=4096,
    rounds=8,
    requests=1000,
    longest=1024,
    seconds=20,
    prefix=8192,
    sharing=256,
    unshared=64,
    grown=(1024, 8192, 32_768, 131_072),
    calls=200,
    peer=REQUESTS,
)
SMALL = Scale(
    model=Config.preset("tiny", num_hidden_layers=2),
    deep=Config.preset("tiny"),
    size=Size(rows=2, pages=48, context=512, chunk=16),
    held=128,
    rounds=2,
    requests=8,
    longest=24,
    seconds=1,
    prefix=256,
    sharing=4,
    unshared=2,
    grown=(64, 256),
    calls=5,
    peer=SMALLEST,
)
OWN, OUTPUT = 64, 16  # tokens behind the prefix, and of output, d


def row(
    part: str,
    what: str,
    figure: float,
    unit: str,
    beside: float | None = None,
    ratio: float | None = None,
    bar: str = "",
):
    """A line of the table; `bar` is for the ratio where there is one."""
    # Rounded: a table would show 1.23e+03 otherwise
    shown = [round(n) if n is not None and n >= 1000 else n for n in (figure, beside)]
    return {
        "part": part,
        "what": what,
        "figure": shown[0],
        "unit": unit,
        "beside": shown[1],
        "ratio": ratio,
        "bar": bar,
    }


def bare_rate(bench: Bench, prompts: list[list[int]]) -> float:
    """Tokens/s of the bare programs that continue these prompts."""
    bench.engine.reset()  # its pool makes room
    bare = Bare(bench.programs, bench.size, prompts, (bench.scale.rounds + 2) * STEPS)
    rounds = bench.scale.rounds
    bare.read()
    bare.run(1)
    return len(prompts) * rounds * STEPS / bare.run(rounds)[1]


def engine_rate(bench: Bench, prompts: list[list[int]]) -> tuple[float, float]:
    """Tokens/s of the engine while all these prompts are continued, and its share of the time on the host.

    First the prompts are read into the prefix index, for otherwise some would end before others begin."""
    bench.engine.reset()
    bench.serve(prompts, [1] * len(prompts))
    jobs = [bench.submit(prompt, (bench.scale.rounds + 1) * STEPS) for prompt in prompts]
    while any(job.times.first is None for job in jobs):
        bench.engine.step()
    stats, start = bench.engine.stats, time.perf_counter()
    generated, host = stats.generated, stats.host_seconds
    bench.finish()
    seconds = time.perf_counter() - start
    return (stats.generated - generated) / seconds, (stats.host_seconds - host) / seconds


def decoding(bench: Bench) -> Iterator[dict]:
    """a"""
    for count, bar, aim in ((bench.size.rows, ">= 0.95", 2), (1, "", 5)):
        prompts = [bench.prompt(bench.scale.held) for _ in range(count)]
        bare, (rate, host) = bare_rate(bench, prompts), engine_rate(bench, prompts)
        name = f"{count} x {bench.scale.held:,} held"
        yield row("a", f"{name}; beside: bare", rate, "tokens/s", bare, rate / bare, bar)
        yield row("a", f"{name}, on the host", 100 * host, "% of the time", bar=f"<= {aim}")


def bare_reading(bench: Bench) -> float:
    """Tokens/s of the bare program that reads full chunks of prompts."""
    bench.engine.reset()
    count, size = min(16, bench.size.rows), bench.size
    Bare(bench.programs, size, [bench.prompt(size.chunk)], 1).read()
    prompts = [bench.prompt(size.chunk) for _ in range(count)]
    return count * size.chunk / Bare(bench.programs, size, prompts, 1).read()


def many(bench: Bench) -> Iterator[dict]:
    """b"""
    served, size = bench.at_once, bench.size
    before = max(1, served.held - (bench.scale.rounds // 2 + 1) * STEPS)
    reading = bare_reading(bench)
    continuing = bare_rate(bench, [bench.prompt(before) for _ in range(size.rows)])
    floor = float(served.prompts.sum() / reading + served.outputs.sum() / continuing)
    name, seconds = f"{len(served.outputs):,} requests at once", served.seconds
    yield row("b", "bare: prompts", reading, "tokens/s")
    yield row("b", f"bare: output, {size.rows} rows that hold {served.held:,}", continuing, "tokens/s")
    both = served.tokens / seconds, "tokens/s", served.tokens / floor
    yield row("b", f"{name}; beside: floor", *both, ratio=floor / seconds, bar=">= 0.75")
    yield row("b", f"{name}, output alone", float(served.outputs.sum()) / seconds, "tokens/s")
    yield row("b", f"{name}, requests", served.rate, "1/s")
    yield row("b", f"{name}, on the host", 100 * served.host, "% of the time")


def arrivals(bench: Bench) -> Iterator[dict]:
    """c"""
    for share in (0.5, 0.8):
        rate = share * bench.at_once.rate
        seen, waiting = open_loop(bench, rate)
        gaps = [gap for one in seen for gap in one.gaps]
        times = {
            "first token": [one.first for one in seen],
            "between tokens": [seconds / tokens for seconds, tokens in gaps for _ in range(tokens)],
            "between pieces": [seconds for seconds, _ in gaps],
        }
        name = f"{len(seen):,} requests, {rate:.3g} a second ({share:.0%})"
        for what, found in times.items():
            for percent in (50, 99):
                yield row(
                    "c", f"{name}, {what}, p{percent}", 1e3 * float(np.percentile(found, percent)), "ms"
                )
        yield row("c", f"{name}, without a row when the last came", waiting, "requests")


def first_tokens(bench: Bench, count: int, shared: bool) -> np.ndarray:
    """Seconds to the first token of each of `count` requests at once."""
    bench.engine.reset()
    prefix = bench.prompt(bench.scale.prefix)
    beginnings = [prefix if shared else [i, *prefix[1:]] for i in range(count)]
    jobs = [bench.submit(beginning + bench.prompt(OWN), OUTPUT, streams=True) for beginning in beginnings]
    bench.finish()
    return np.array([(job.times.first or np.inf) - job.times.submitted for job in jobs])


def prefixes(bench: Bench) -> Iterator[dict]:
    """d"""
    scale = bench.scale
    runs = ((scale.unshared, False), (scale.unshared, True), (scale.sharing, True))
    (alone, few, all_of_them) = (first_tokens(bench, *run) for run in runs)
    name = f"a prefix of {scale.prefix:,}, first token"
    for what, mean in (("mean", np.mean), ("p50", np.median)):
        slow, fast = float(mean(alone)), float(mean(few))
        bar = ">= 5" if what == "mean" else ""
        yield row(
            "d",
            f"{name}, {what} of {len(few)}; beside: not shared",
            1e3 * fast,
            "ms",
            1e3 * slow,
            slow / fast,
            bar,
        )
        yield row("d", f"{name}, {what} of {len(all_of_them)}", 1e3 * float(mean(all_of_them)), "ms")


def growing(bench: Bench) -> Iterator[dict]:
    """e"""
    bench.engine.reset()
    rounds, cost = bench.scale.rounds, cost_of(bench.programs.model)
    for held in bench.scale.grown:
        bare = Bare(bench.programs, bench.long, [[0]], (rounds + 1) * STEPS, held)
        bare.run(1)
        ms = 1e3 * bare.run(rounds)[1] / rounds / STEPS
        floor = 1e3 * cost.read_bytes(Pass(1, 1, held)) / report.device().bandwidth
        yield row("e", f"1 x {held:,} held; beside: floor", ms, "ms a token", floor, floor / ms)


def calls(bench: Bench) -> Iterator[dict]:
    """calls"""
    bench.engine.reset()
    count = bench.size.rows
    models = (
        ("the model", bench.programs, bench.size, "<= 0.4"),
        ("as deep as V3", bench.deep(), bench.few, "<= 0.8"),
    )
    for name, programs, size, bar in models:
        bare = Bare(programs, size, [[0]] * count, 1, held=1)
        bare.run(1, steps=0)
        sent, done = (1e3 * seconds / bench.scale.calls for seconds in bare.run(bench.scale.calls, steps=0))
        layers, weights = programs.model.config.num_hidden_layers, len(programs.weights.flat)
        yield row(
            "calls",
            f"{name}, {layers} layers, {weights} arrays; beside: until sent",
            done,
            "ms",
            sent,
            bar=bar,
        )


PARTS: dict[str, Callable[[Bench], Iterator[dict]]] = {
    "a": decoding,
    "b": many,
    "c": arrivals,
    "d": prefixes,
    "e": growing,
    "calls": calls,
}


def peer_rates(small: bool) -> dict[str, float]:
    """Tokens/s of transformers, in a process of its own that gives the GPU back: call it before JAX takes the memory."""
    script = Path(__file__).with_name("peer_transformers.py")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "peer.json")
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, script, "--out", out, *["--small"] * small], check=False, timeout=200
            )
        return json.loads(out.read_text()) if out.exists() else {"transformers": float("nan")}


def beside_peers(bench: Bench, rates: dict[str, float]) -> Iterator[dict]:
    """peer"""
    count, tokens, limit = bench.scale.peer
    for _ in range(2):  # the second time counts
        bench.engine.reset()
        seconds = bench.serve([bench.prompt(tokens) for _ in range(count)], [limit] * count)
    ours = count * limit / seconds
    for name, rate in rates.items():
        yield row(
            "peer",
            f"{count} x {tokens} + {limit}, output; beside: {name}",
            ours,
            "tokens/s",
            rate,
            ours / rate,
        )


def measured(bench: Bench, parts: Sequence[str], peers: dict[str, float]) -> Iterator[dict]:
    """The rows of these parts, and of the peers if there are any."""
    start = time.perf_counter()
    bench.compile([*parts, *["peer"] * bool(peers)])
    yield row("all", "compiling", time.perf_counter() - start, "s")
    steps = {part: PARTS[part](bench) for part in parts} | (
        {"peer": beside_peers(bench, peers)} if peers else {}
    )
    for name, rows in steps.items():
        start, compiled = time.perf_counter(), bench.programs.compiled
        yield from rows
        took = time.perf_counter() - start
        print(
            f"# {name}: {took:.1f} s, {bench.programs.compiled - compiled} programs compiled in it",
            flush=True,
        )


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--only", type=lambda text: text.split(","), default=[*PARTS], help=", ".join(PARTS))
    parser.add_argument("--small", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--peer", action="store_true", help="also transformers, on the same shapes")
    options = parser.parse_args()
    peers = peer_rates(options.small) if options.peer else {}
    rows = []
    for found in measured(Bench(SMALL if options.small else FULL), options.only, peers):
        rows.append(found)
        print(found, flush=True)
    report.show(rows, options.out, benchmark="engine", small=options.small)


if __name__ == "__main__":
    main()
