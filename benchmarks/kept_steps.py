"""A decode step that attends to a part of what is cached, compared with full attention: V2-Lite's shape, random weights, one GPU.

    python benchmarks/kept_steps.py --out kept_steps.json
    python benchmarks/kept_steps.py --ways full kept --rows 8
    python benchmarks/kept_steps.py --small          (a tiny model, on a CPU: does the script work?)

Ways: latents in full, a tenth of them kept by eviction (each layer other ones), a tenth chosen for each token by Quest; heads in
full, and a tenth of them kept (each head other ones). Rows read random pages of one pool of POOL bytes, so that of long rows each
page is read by several: no machine holds 64 rows of 128k tokens of heads. The attention's time is the step's less the time of a
step with one page cached; it includes the choice of pages. The floor is the bytes that attention reads over the bandwidth."""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np
import report
from decode import entry, randomized
from random_models import random_model

from mla_jax import Config
from mla_jax.base.batch import Tables
from mla_jax.cache.evict import EVICTION_POLICIES
from mla_jax.cache.paged import PAGE
from mla_jax.cache.retrieve import RETRIEVAL_POLICIES, Retrieval
from mla_jax.decode.evict_programs import Selection
from mla_jax.decode.loop import Programs, ProgramShape
from mla_jax.decode.rows import ADMITTED
from mla_jax.model.dispatch import Dispatch

SHARE, POOL = 10, 40e9  # what is kept or chosen is a tenth; bytes
STEPS, DISPATCHES = 32, 4
LONG, FEW = 3e11, 8  # bytes that attention reads in a step, from which FEW steps are timed
Row = dict[str, Any]


class Scale(NamedTuple):
    config: Config
    rows: tuple[int, ...]
    held: tuple[int, ...]
    pool: float


class Way(NamedTuple):
    caches: str  # "latents" or "heads"
    keeps: bool = False  # a part by eviction
    chooses: bool = False  # a part for each token
    kv_cache: str = "auto"  # the format of latents


WAYS = {
    "full": Way("latents"),
    "kept": Way("latents", keeps=True),
    "quest": Way("latents", chooses=True),
    "heads": Way("heads"),
    "heads kept": Way("heads", keeps=True),
}
FULL = Scale(Config.preset("v2_lite"), (8, 64), (8_192, 32_768, 131_072), POOL)
SMALL = Scale(Config.preset("tiny"), (2, 3), (1280, 5120), 1e7)


class Steps:
    """The programs of one way, and a pool of random numbers."""

    def __init__(self, model: Any, way: Way, scale: Scale):
        retrieval = Retrieval(RETRIEVAL_POLICIES["quest"], max(scale.held) // SHARE) if way.chooses else None
        attention = "naive" if way.caches == "heads" else "auto"
        model.dispatch = Dispatch(
            attention, kv_cache=way.kv_cache, retrieval=retrieval, device=report.device()
        )
        self.model, self.way, self.rng = model, way, np.random.default_rng(0)
        evicts = Selection(EVICTION_POLICIES["snapkv"]) if way.keeps else None
        self.programs = Programs(model, evicts=evicts)
        page = sum(one.size * one.dtype.itemsize for one in self.programs.page.values())
        self.bytes, self.pages = page / PAGE, int(scale.pool / page)  # bytes of a token
        pool, self.rows = self.programs.new(max(scale.rows), self.pages)
        self.pool = randomized(self.programs.spread, pool)

    def width(self, held: int) -> int:
        """Pages of a row's table."""
        return -(-(self.read(held) + STEPS * (DISPATCHES + 1)) // PAGE) + 1

    def start(self, rows: int, held: int) -> Future:
        """Begins to compile."""
        return self.programs.start(self.pool, self.rows, ProgramShape("run", self.width(held), rows))

    def seconds(self, rows: int, width: int, held: int) -> float:
        """Of a step of `rows` rows that hold `held` tokens each, by the program for this width."""
        at = np.arange(rows, dtype=np.int32)
        for first in range(0, self.rows.seen.shape[0], ADMITTED):
            them = first + np.arange(ADMITTED, dtype=np.int32)
            self.rows = self.programs.admit(self.rows, them, entry(first, held, 0.0, 1.0))
        table = self._table(rows, width, held)
        count = FEW if rows * self.read(held) * self.bytes > LONG else STEPS
        jax.block_until_ready(self._run(at, table, 1))
        start = time.perf_counter()
        for _ in range(DISPATCHES):
            found = self._run(at, table, count)
        jax.block_until_ready(found)
        return (time.perf_counter() - start) / DISPATCHES / count

    def read(self, held: int) -> int:
        """Tokens of a row that full attention, or attention to what is kept, reads."""
        return held // SHARE if self.way.keeps else held

    def _run(self, at: np.ndarray, table: Any, steps: int) -> Any:
        self.pool, self.rows, found = self.programs.run(self.pool, self.rows, at, table, np.int32(steps))
        return found

    def _table(self, rows: int, width: int, held: int) -> Any:
        """Random pages; of what is kept, the rest of `held` tokens is dropped."""
        if not self.way.keeps:
            return self.rng.integers(0, self.pages, (rows, width), np.int32)
        layers, lanes = len(self.model.layers), self.model.lanes
        page = self.rng.integers(0, self.pages, (layers, lanes, rows, width), np.int32)
        parts = page * lanes + np.arange(lanes, dtype=np.int32)[:, None, None]
        return Tables(parts, np.full((layers, lanes, rows), held - held // SHARE, np.int32))


def measured(
    model: Any, name: str, scale: Scale, counts: Sequence[int], lengths: Sequence[int]
) -> Iterator[Row]:
    way = WAYS[name]
    steps = Steps(model, way, scale)
    widest = max(lengths)
    for rows in counts:
        for held in lengths if way.keeps or way.chooses else [widest]:
            steps.start(rows, held)
    for rows in counts:
        for held in lengths:
            width = steps.width(held if way.keeps or way.chooses else widest)
            ms, empty = (1e3 * steps.seconds(rows, width, tokens) for tokens in (held, PAGE))
            layers = len(model.layers)
            floor = rows * steps.read(held) * steps.bytes / report.device().bandwidth * 1e3
            found = {
                "way": name,
                "rows": rows,
                "cached tokens": held,
                "ms a step": ms,
                "attention, us a layer": 1e3 * (ms - empty) / layers,
            }
            yield found | ({} if way.chooses else {"floor, us a layer": 1e3 * floor / layers})


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--held", nargs="+", type=int, help="cached tokens of a row")
    parser.add_argument("--layers", type=int, help="of the model")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    options = parser.parse_args()
    scale = SMALL if options.small else FULL
    layers = options.layers or scale.config.num_hidden_layers
    config, found = dataclasses.replace(scale.config, num_hidden_layers=layers), []
    model = random_model(config, "bf16")
    for name in options.ways:
        for row in measured(model, name, scale, options.rows or scale.rows, options.held or scale.held):
            found.append(row)
            print(row, flush=True)
    report.show(found, options.out, benchmark="kept_steps", layers=layers, small=options.small)


if __name__ == "__main__":
    main()
