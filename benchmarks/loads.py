"""The user's way: `LLM(folder)` with no options, V2-Lite's shape, random weights, greedy, one GPU.

    python benchmarks/loads.py --out loads.json
    python benchmarks/loads.py --only 64x4096+128 mixed arrivals
    python benchmarks/loads.py --format Q4_K --only crowds memory       (or fp8)
    python benchmarks/loads.py --small               (a tiny model, on a CPU: does the script work?)

The loads are those of other engines' benchmarks: N x prompt + output tokens, at once, through `LLM.generate`; 1,000 mixed
requests, lengths as LENGTHS in drive.py says; and such requests that arrive at random (Poisson) at 80 % of that rate, read along
by `AsyncLLM.stream`. Each runs once so that programs are compiled, and is then timed. `crowds` are requests that take the most
memory, and `memory` compares the peak with the plan.

The checkpoint is of zeros, which take no room on the disk; in bf16 random numbers are put in their place on the device."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import hollow
import jax
import numpy as np
import report
from drive import LENGTHS, SHORTEST
from flax import nnx
from random_models import numbers

from mla_jax import LLM, Config, SamplingParams, Transformer
from mla_jax.engine.async_llm import AsyncLLM
from mla_jax.engine.core.stats import peak_bytes

LOADS = (
    "1x256+256",
    "8x256+256",
    "64x256+256",
    "256x256+256",
    "mixed",
    "1x4096+1",
    "8x2048+1",
    "1x4096+128",
    "64x4096+128",
)
SMALL_LOADS = ("1x20+8", "4x20+8", "mixed")
FURTHER = ("arrivals", "crowds", "memory")
CROWDS = (1, 64, 512, 1000)  # requests
SHARE = 0.8  # of the rate of `mixed`, at which requests arrive


Row = dict[str, Any]
Piece = tuple[float, int]  # when it came, and its tokens


class Scale(NamedTuple):
    model: Config
    mixed: int  # requests
    longest: int  # tokens of a prompt, and of its output
    seconds: float  # of arrivals


FULL = Scale(Config.preset("v2_lite"), 1000, 1024, 20)
SMALL = Scale(Config.preset("tiny", num_hidden_layers=2, quantization_config=None), 8, 24, 1)


def randomise(model: Transformer) -> None:
    """Writes random numbers over each parameter, where it is: elsewhere they would leave no room for the cache in one piece."""
    over = jax.jit(_over, donate_argnums=0, keep_unused=True)
    for seed, (_, variable) in enumerate(nnx.to_flat_state(nnx.state(model))):
        variable.set_value(jax.block_until_ready(over(variable.get_value(), seed)))


def _over(old: jax.Array, seed: int) -> jax.Array:
    return numbers(old.shape, old.dtype, seed)


@contextlib.contextmanager
def random_llm(scale: Scale, config: dict[str, Any] | None = None, **settings: Any) -> Iterator[LLM]:
    """Of random bf16 weights and a tokenizer of random words; `config` has fields of the model's that differ."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        hollow.write(dataclasses.replace(scale.model, **(config or {})), folder, "bf16")
        hollow.write_tokenizer(folder, scale.model.vocab_size)
        with LLM(folder, **settings) as llm:
            randomise(llm.model)
            yield llm


def settled(llm: LLM, run: Callable[[], Row]) -> Row:
    """The row of a run in which nothing was compiled."""
    engine, compiled = llm.engine, -1
    while engine.programs.compiled != compiled:
        compiled, found = engine.programs.compiled, run()
        while engine.device.compiles:
            time.sleep(0.1)
    return found


class Bench:
    """An LLM with no options but those that a user of this machine cannot do without."""

    def __init__(self, scale: Scale, folder: Path, format: str, settings: dict[str, Any]):
        self.scale, self.rng = scale, np.random.default_rng(0)
        path = hollow.write(scale.model, folder, format)
        start = time.perf_counter()
        self.llm = LLM(path, **settings)
        self.loading = time.perf_counter() - start
        if format == "bf16":
            randomise(self.llm.model)
        self.rate = 0.0  # requests a second of `mixed`

    def prompt(self, tokens: int) -> list[int]:
        return self.rng.integers(10, self.scale.model.vocab_size - 10, tokens).tolist()

    def lengths(self, count: int) -> list[list[int]]:
        """Tokens of prompts, and of outputs."""
        drawn = (self.rng.lognormal(np.log(median), spread, count) for median, spread in LENGTHS.values())
        return [
            np.clip(tokens.round().astype(int), SHORTEST, self.scale.longest).tolist() for tokens in drawn
        ]

    def seconds(self, prompts: list[int], outputs: list[int]) -> float:
        """From the call to the last token; no two prompts begin alike."""
        asked, params = [self.prompt(n) for n in prompts], [greedy(n) for n in outputs]
        start = time.perf_counter()
        answers = self.llm.generate(asked, params, progress=False)
        seconds = time.perf_counter() - start
        assert [len(answer.token_ids) for answer in answers] == outputs
        return seconds

    def load(self, name: str) -> Iterator[dict]:
        """A row of the table."""
        found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", name)
        if found is None:
            prompts, outputs = self.lengths(self.scale.mixed)
        else:
            count, prompt, output = map(int, found.groups())
            prompts, outputs = [prompt] * count, [output] * count
        first = self.seconds(prompts, outputs)
        best = min(self.seconds(prompts, outputs) for _ in range(3 if first < 5 else 1))
        if found is None:
            self.rate = len(prompts) / best
        rates = {"output tokens/s": sum(outputs) / best, "all tokens/s": sum(outputs + prompts) / best}
        yield {"load": name, "first time, s": first, "s": best} | {
            what: round(rate) for what, rate in rates.items()
        }

    def arrivals(self) -> Iterator[dict]:
        """Percentiles of what somebody waits who reads along."""
        rate = SHARE * (self.rate or 1.0)
        for _ in range(2):  # the second time counts
            seen = asyncio.run(self._arrive(rate))
        times = {
            "first token": [pieces[0][0] - due for due, pieces in seen],
            "between tokens": [gap for _, pieces in seen for gap in gaps(pieces)],
        }
        for what, found in times.items():
            middle, late = (1e3 * float(np.percentile(found, percent)) for percent in (50, 99))
            name = f"{len(seen):,} arrivals, {rate:.3g} a second, {what}, ms"
            yield {"load": name, "p50": middle, "p99": late, "p99 / p50": late / middle}

    async def _arrive(self, rate: float) -> list[tuple[float, list[Piece]]]:
        """When each request was due, and its pieces."""
        llm, start = AsyncLLM(self.llm), time.perf_counter()
        count = max(2, int(rate * self.scale.seconds))
        prompts, outputs = self.lengths(count)
        due = start + np.cumsum(self.rng.exponential(1 / rate, count))

        async def read(due: float, prompt: list[int], limit: int) -> tuple[float, list[Piece]]:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            chunks = llm.stream(prompt, greedy(limit))
            return due, [(time.perf_counter(), len(chunk.token_ids)) async for chunk in chunks]

        asked = (read(at, self.prompt(n), limit) for at, n, limit in zip(due, prompts, outputs, strict=True))
        return await asyncio.gather(*asked)

    def crowds(self) -> Iterator[dict]:
        """Sampled requests with log-probabilities, by ever more callers, and a prompt at the context's limit."""
        params = SamplingParams(
            temperature=1.0, top_p=0.9, logprobs=5, max_tokens=32, ignore_eos=True, seed=0
        )
        for count in CROWDS:
            prompts = [self.prompt(min(128, self.scale.longest)) for _ in range(count)]
            start = time.perf_counter()
            self.llm.generate(prompts, params, progress=False)
            yield self.peak(f"{count:,} sampled, with log-probabilities", start)
        longest = self.llm.context - 32
        start = time.perf_counter()
        self.llm.generate([self.prompt(longest)], params, progress=False)
        yield self.peak(f"a prompt of {longest:,} tokens", start)

    def peak(self, load: str, start: float) -> dict:
        """A row: the seconds since `start`, and the most memory so far."""
        seconds = time.perf_counter() - start
        return {"load": load, "s": seconds, "peak so far, GiB": (peak_bytes() or 0) / 2**30}

    def memory(self) -> Iterator[dict]:
        plan, peak = self.llm.plan, peak_bytes() or 0
        planned = plan.weights + plan.temporaries + plan.tokens / plan.context * plan.cache / plan.held
        whole = (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)
        yield {"load": "peak, GiB", "s": peak / 2**30}
        yield {"load": "planned, GiB", "s": planned / 2**30}
        yield {"load": "temporaries planned, GiB", "s": plan.temporaries / 2**30}
        yield {"load": "temporaries by XLA's account, GiB", "s": self.llm._programs.temporaries / 2**30}
        yield {"load": "of, GiB", "s": whole / 2**30}
        yield {"load": "rows", "s": plan.rows}
        yield {"load": "tokens of the cache", "s": plan.tokens}


def gaps(pieces: list[Piece]) -> list[float]:
    """The time between two pieces, divided by the tokens of the second, for each of these."""
    pairs = itertools.pairwise(pieces)
    return [(now - before) / count for (before, _), (now, count) in pairs for _ in range(count)]


def greedy(limit: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=limit, ignore_eos=True, seed=0)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", help=f"{' '.join([*LOADS, *FURTHER])}, or others of the form 8x256+32"
    )
    parser.add_argument(
        "--rate", type=float, default=0.0, help="requests a second of `mixed`, where it is not run"
    )
    parser.add_argument("--format", default="bf16", choices=("bf16", "fp8", "Q4_K"), help="of the weights")
    parser.add_argument("--small", action="store_true", help="a tiny model and few requests")
    parser.add_argument("--set", nargs="*", default=[], help="settings of the LLM, such as max_rows=256")
    options = parser.parse_args()
    scale, loads = (SMALL, SMALL_LOADS) if options.small else (FULL, LOADS)
    settings = {name: json.loads(value) for name, value in (each.split("=") for each in options.set)}
    rows: list[dict] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(scale, Path(folder), options.format, settings)
        bench.rate = options.rate
        rows.append({"load": "loading", "s": bench.loading})
        for name in options.only or [*loads, *FURTHER]:
            for row in getattr(bench, name)() if name in FURTHER else bench.load(name):
                rows.append(row)
                print(row, flush=True)
        bench.llm.close()
    report.show(rows, options.out, benchmark="loads", format=options.format, small=options.small)


if __name__ == "__main__":
    main()
