"""A model with random weights on meshes of the GPUs that are here: decoding, drafts and prompts, compared with the predictions.

    python benchmarks/meshes.py --out meshes.json
    python benchmarks/meshes.py --meshes data=1 data=2 tensor=2 --rows 64 256 --exchange all_to_all
    python benchmarks/meshes.py --model v3 --rows 1 32 512 --drafts                   (eight H200: FP8, 61 layers)
    python benchmarks/meshes.py --model v3 --rows 1 32 512 --part-of 8 --layers 27    (a part of these, on fewer GPUs)
    python benchmarks/meshes.py --small                  (a tiny model on simulated CPU devices: does the script work?)

Rows and tokens/s are of all devices together. Each row holds `--held` tokens, or will have read a prompt of that length. Steps
are sent ahead of one another, 32 at a time. Random weights guess nothing right, so a coin says which guesses stand
(drafts.py).

- `of the floor %`: the time to read what a step must read from the memory of a device with most rows, or to compute what prompts
  need, in percent of the time. Of routed experts it reads its share of those that all rows choose.
- `messages %`: the part of the time that kernels of messages run on a device, in which it may wait for others.
- `predicted`: what mesh/cost.py says of the same.
- `tokens that fit`: of cache, on all devices, beside weights and what the programs take; no row where rows do not fit.
- `of the first`: tokens/s by those of the first mesh.

`--part-of 8` makes the devices a part of eight: they have their part of the routed experts, so that each has as many as on eight,
and their part of the rows. Then an expert gets as many tokens as on eight devices, and messages go to fewer."""

import argparse
import dataclasses
import gc
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
import report
from decode import DISPATCHES, STEPS, Sequences, admitted, entry, seconds_per_step, sequences
from drafts import Forced, Measured, is_odd, measured_rows, restart
from random_models import random_model

from mla_jax import Config
from mla_jax.base.axes import parse_mesh
from mla_jax.cache.paged import PAGE
from mla_jax.decode import speculative
from mla_jax.decode.loop import Programs, ProgramShape
from mla_jax.decode.packing import of_shards
from mla_jax.mesh.cost import Predicted
from mla_jax.mesh.devices import Devices
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.parts import cost_of, page_bytes
from mla_jax.weights.temporaries import ROWS, temporaries

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "n_routed_experts": 16,
    "vocab_size": 1024,
    "kv_lora_rank": 64,
}
# What is in the names of kernels that send messages
MESSAGES = re.compile("nccl|psum|pmax|all_gather|all_?to_?all|MultiGpuBarrier|all-|reduce-scatter", re.I)
PROMPTS = 6  # dispatches that are timed


class Bench:
    """A model on a mesh, and rows that hold something."""

    def __init__(self, config: Config, mesh: str, exchange: str, held: int, drafts: bool):
        self.config, self.held = config, held
        self.devices = Devices.of(parse_mesh(mesh), report.device())
        format = "fp8_block" if config.quantization_config else "bf16"
        dispatch = Dispatch(device=report.device(), exchange=exchange)
        self.model = random_model(config, format, dispatch, mtp=drafts, devices=self.devices)
        self.plain = Programs(self.model)
        self.drafted = Programs(self.model, drafter=Forced(1)) if drafts else None
        self.cost = cost_of(self.model)
        self.chunk = self.model.dispatch.chunk(self.model)
        self.found: Sequences | None = None

    @property
    def shards(self) -> int:
        return self.devices.sizes["data"]

    @property
    def pieces(self) -> int:
        """Prompts in one dispatch of a shard."""
        return max(self.chunk // self.held, 1)

    def each(self, rows: int) -> int:
        """Rows of a shard."""
        return -(-rows // self.shards)

    def prepare(self, counts: list[int]) -> list[int]:
        """Compiles everything and makes the cache; the numbers of rows that fit."""
        tokens = self.tokens_that_fit()
        fitting = [
            count
            for count in counts
            if tokens is None or self.each(count) * self.shards * self.held <= tokens
        ]
        most = max([*fitting, self.pieces * self.shards])
        each = [self.each(count) for count in fitting]
        self.found = sequences(self.plain, most, held=self.held)
        pool, width = self.found.pool, self.held // PAGE
        line = ProgramShape("prefill", width, line=self.chunk, pieces=self.pieces)
        started = [(self.plain, [line, *(ProgramShape("run", width, rows) for rows in each)])]
        if self.drafted is not None:
            started.append((self.drafted, [ProgramShape("run_with_drafts", width, rows) for rows in each]))
        with ThreadPoolExecutor(len(started)) as together:
            list(together.map(lambda one: one[0].prepare(pool, self.found.rows, one[1]), started))
        return fitting

    def tokens_that_fit(self) -> int | None:
        """Of cache, on all devices, if programs take what is predicted; None where a device does not tell."""
        stats = self.devices.first.memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        free = stats["bytes_limit"] - stats["bytes_in_use"] - temporaries(self.model, ROWS)
        return free // page_bytes(self.model) * PAGE * self.shards

    def decoding(self, rows: int, profile: bool) -> dict:
        found = self.rows(rows)
        restart(found, 0.0)
        seconds = seconds_per_step(found, DISPATCHES - 2)
        traced = report.traced(lambda: found.run(2)) if profile else None
        predicted = self.cost.predicted(self.cost.shared(rows, held=self.held))
        row = figures("decode", rows, rows, seconds, predicted, traced)
        return row | {"exchange": self.exchange(self.each(rows))}

    def drafting(self, rows: int, acceptance: float) -> dict:
        """A pass over a token and one guess."""
        assert self.drafted is not None
        measured: Measured = measured_rows(self.rows(rows), self.drafted, 1, acceptance)
        row = {
            "what": f"decode, drafts {acceptance}",
            "rows": rows,
            "ms": 1e3 * measured.seconds / measured.passes,
        }
        return row | {"tokens/s": measured.rate}

    def reading(self, profile: bool) -> dict:
        """Prompts, as many in each shard as a dispatch reads."""
        found, shards = self.rows(self.pieces * self.shards), self.shards
        new = min(self.chunk, self.held)
        rng, counts = np.random.default_rng(0), np.full(self.pieces, new, np.int32)
        lines = [rng.integers(2, self.config.vocab_size, self.chunk, np.int32) for _ in range(shards)]
        sent = found.at, of_shards(lines), of_shards([counts] * shards), found.page_table

        def run() -> Any:
            """From the beginning, one dispatch after the other."""
            rows = admitted(self.plain, found.rows, self.pieces, lambda first: entry(first, 0, 0.0, 1.0))
            found.pool, found.rows, _ = self.plain.prefill(found.pool, rows, *sent)
            return found.rows

        seconds = report.best_seconds(lambda: [run() for _ in range(PROMPTS)][-1], 2) / PROMPTS
        traced = report.traced(run) if profile else None
        rows, tokens = self.pieces * shards, self.pieces * new * shards
        row = figures("prompts", rows, tokens, seconds, self.cost.prompts(new), traced)
        return row | {"exchange": self.exchange(self.pieces * new)}

    def exchange(self, tokens: int) -> str | None:
        """How this number of tokens of each shard reach their experts."""
        return self.model.dispatch.exchange_name(self.model, tokens) if self.devices.count > 1 else None

    def rows(self, count: int) -> Sequences:
        assert self.found is not None
        self.found.take(count)
        return self.found


def figures(
    what: str, rows: int, tokens: int, seconds: float, predicted: Predicted, traced: report.Traced | None
) -> dict:
    row = {"what": what, "rows": rows, "ms": 1e3 * seconds, "tokens/s": tokens / seconds}
    row |= {"predicted ms": 1e3 * predicted.seconds, "of the floor %": 100 * predicted.floor / seconds}
    row["predicted messages %"] = 100 * predicted.share
    if traced is not None:
        spent = sum(time for name, time in traced.kernels.items() if MESSAGES.search(name))
        row["messages %"] = 100 * spent / traced.wall
    return row


def measured(config: Config, mesh: str, options: argparse.Namespace, rows: list[int]) -> Iterator[dict]:
    bench = Bench(config, mesh, options.exchange, options.held, options.drafts)
    used = (bench.devices.first.memory_stats() or {}).get("bytes_in_use", 0)
    about = {"mesh": mesh, "weights GiB": used / 2**30, "tokens that fit": bench.tokens_that_fit()}
    start = time.perf_counter()
    fitting = bench.prepare(rows)
    print(f"{mesh}: compiled in {time.perf_counter() - start:.0f} s", flush=True)
    for count in fitting:
        yield about | bench.decoding(count, options.profile)
        if options.drafts:
            yield about | bench.drafting(count, options.acceptance)
    yield about | bench.reading(options.profile)


def config_of(options: argparse.Namespace) -> Config:
    """The model, or the part of it that its devices have of `--part-of`."""
    changes: dict[str, Any] = dict(SMALL) if options.small else {}
    if options.layers:
        changes["num_hidden_layers"] = options.layers
    if options.drafts:
        changes["num_nextn_predict_layers"] = 1
    config = Config.preset(options.model, **changes)
    if not options.part_of:
        return config
    devices = Devices.of(parse_mesh(options.meshes[0])).count
    return dataclasses.replace(
        config, n_routed_experts=(config.n_routed_experts or 0) * devices // options.part_of
    )


def main() -> None:
    parser = report.arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="v2_lite", choices=["v2_lite", "v3"])
    parser.add_argument("--meshes", nargs="+", default=[], help="the first is compared with")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64, 512])
    parser.add_argument("--held", type=int, default=4096, help="tokens of each row")
    parser.add_argument("--exchange", default="auto", help="gather, all_to_all or auto")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--part-of", type=int, help="devices of which the mesh is a part")
    parser.add_argument("--drafts", action="store_true", help="also with one guess a pass")
    parser.add_argument("--acceptance", type=float, default=0.85, help="of a guess")
    parser.add_argument("--profile", action="store_true", help="also the time in messages")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.small:
        jax.config.update("jax_num_cpu_devices", 8)
        options.held, options.rows = DISPATCHES * STEPS + PAGE, options.rows[:2]
    count = len(jax.devices())
    options.meshes = options.meshes or ["data=1", f"data={count}", f"tensor={count}", f"context={count}"]
    config, rows, first = config_of(options), [], {}
    speculative.stands = is_odd if options.drafts else speculative.stands
    share = Devices.of(parse_mesh(options.meshes[0])).count / options.part_of if options.part_of else 1
    for mesh in options.meshes:
        for row in measured(config, mesh, options, [max(int(count * share), 1) for count in options.rows]):
            alike = row["what"], row["rows"] if row["what"] != "prompts" else None
            row["of the first"] = row["tokens/s"] / first.setdefault(alike, row["tokens/s"])
            rows.append(row)
            print(row, flush=True)
        gc.collect()  # the model, for the next one's memory
    report.show(rows, options.out, asked=vars(options) | {"out": None})


if __name__ == "__main__":
    main()
