"""The cost of uneven data shards: DeepSeek-V3 on 8 x H200, predicted, without a device.

    python benchmarks/balance.py --loads chat --out balance_chat.json
    python benchmarks/balance.py --loads chat --rates 0.8 --seed 1 --out balance_chat_second.json
    python benchmarks/balance.py --loads documents --requests 1000 --rates 0.8 --out balance_documents.json

The engine is the real one, with its scheduler and its pages. Its programs are pretended: they choose tokens until a request has
its length, and take the seconds that mla_jax/mesh/cost.py predicts for the shard with most to do. Each prompt differs from
all others in its first token. The engine does not know where an answer ends before it has ended. The host takes no time.

- Loads: `chat` has the lengths of drive.py, which are fitted to ShareGPT. In `documents` one prompt in ten has 4,096 to 32,768
  tokens instead. All come at once, or at random (Poisson) at a share of the rate at which those are served at once.
  They are streamed then, so a row that has just been read gets its first token in a step of its own.
- Ways: see WAYS. `even` is one shard with the rows and pages of all, whose work each device does an eighth of: about what any
  way could reach.
- tokens/s, and time lost, are of the time until the last request has a row; after it shards run empty in any way. Lost is what
  the fullest shard takes, less what the mean of all shards takes in the smallest program for it, as a share of all time."""

import argparse
import copy
import dataclasses
import datetime
import json
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from drive import LENGTHS, SHORTEST, request

from mla_jax import Config
from mla_jax.base.batch import bucket
from mla_jax.base.link_rates import PLANNED
from mla_jax.cache.paged import PAGE
from mla_jax.decode.loop import Programs
from mla_jax.decode.outputs import Chosen, Found, nothing_chosen
from mla_jax.decode.program_sharding import Spread
from mla_jax.decode.programs import Waits
from mla_jax.decode.speculative import NOBODY
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.scheduler import Limits, Plan, Running, Waiting, agreed
from mla_jax.engine.core.size import Size
from mla_jax.mesh.cost import MeshCost, Work, packed
from mla_jax.mesh.partition import Layout

SHARDS, ROWS, LONGEST, DOCUMENT = 8, 64, 1024, (4096, 32_768)
KIND, MEMORY = PLANNED["h200"], 0.9
LOADS = {"chat": 0.0, "documents": 0.1}  # the share of documents
RATES = (0.6, 0.8)  # of what is served when all come at once
COST = MeshCost(Config.preset("v3"), {"data": SHARDS}, KIND.figures, packed(Config.preset("v3")))
FORM = "kernel_heads"  # of attention over prompts

Shards = Sequence[Sequence[Running]]
Assign = Callable[[Engine, Shards], list[list[Waiting]]]


def round_robin(engine: Engine, running: Shards) -> list[list[Waiting]]:
    """Each in its turn when it comes, whatever shards have to do, as where each shard has a queue of its own."""
    mine = (
        [job for job in engine.waiting if job.id % len(running) == shard.number] for shard in engine.shards
    )
    each = zip(engine.shards, mine, strict=True)
    return [
        [engine._as_waiting(job, shard) for job in jobs[: 2 * len(shard.free_rows)]] for shard, jobs in each
    ]


def by_rows(engine: Engine, running: Shards) -> list[list[Waiting]]:
    """To the shard with the fewest requests, once there is a row."""
    rows, found = [len(some) for some in running], [[] for _ in running]
    for job in engine.waiting:
        best = min(range(len(rows)), key=lambda n: rows[n])
        if rows[best] == engine.limits.rows:
            break
        found[best].append(engine._as_waiting(job, engine.shards[best]))
        rows[best] += 1
    return found


class Way(NamedTuple):
    """How requests, and work, find their shards."""

    assign: Assign | None = None  # None: as the engine does
    reading: int = Limits.reading
    moves: bool = False  # decode steps take what the mean of all shards takes
    # Prompts are read by all shards: each that has some is helped by as many that have none
    helps: bool = False
    # Reading waits for one dispatch of decode steps, while at most half of the shards have prompts
    waits: bool = False
    is_even: bool = False  # one shard, of which each device does its part


WAYS = {
    "round robin": Way(round_robin),
    "fewest requests": Way(by_rows),
    "fewest tokens": Way(reading=1),
    "reads at once": Way(),
    "decode work moves": Way(moves=True),
    "idle shards help reading": Way(helps=True),
    "as it is": Way(waits=True),
    "even": Way(is_even=True),
}


class Reading(NamedTuple):
    """The prompt tokens that one shard prefills in a pass."""

    new: float = 0.0  # tokens
    attended: float = 0.0  # tokens that each new one attends to, on average, of all prompts together
    pairs: float = 0.0  # of tokens of which one attends to the other

    def __add__(self, other: "Reading") -> "Reading":
        return Reading(*map(sum, zip(self, other, strict=True)))

    def over(self, parts: float) -> "Reading":
        return Reading(*(figure / parts for figure in self))


def piece(held: int, new: int) -> Reading:
    """Of a prompt."""
    mean = held + new / 2
    return Reading(new, mean, new * mean)


def reading_seconds(line: float, what: Reading) -> float:
    """A pass over a line of so many tokens in each shard, with what one of them reads in it.

    The cost model has equal prompts: so many that they attend to as much, each with its part of the line."""
    if not what.new:
        return 0.0
    prompts = max(round(what.attended * line / what.pairs), 1)
    new, attended = max(round(line / prompts), 1), max(round(what.pairs / line), 1)
    return COST.predicted(Work(FORM, prompts, new, cached=attended + new // 2)).seconds


def step_seconds(rows: float, held: float) -> float:
    """A decode step of so many rows in each shard, which hold so many tokens together."""
    count = bucket(max(round(rows), 1))
    return COST.decode(count, max(round(held / count), 1)).seconds


class Clock:
    """When the host and the devices are, in seconds, and what these have done and lost."""

    def __init__(self):
        self.now = self.free = 0.0  # the host, and when the devices will have done all that was sent
        self.seconds, self.lost, self.uneven = Counter(), Counter(), Counter()

    def send(self, kind: str, seconds: float, even: float, imbalance: float) -> float:
        """When it is done. `even` are the seconds of the mean; `imbalance` what the fullest shard has, over the mean."""
        self.free = max(self.free, self.now) + seconds
        self.seconds[kind] += seconds
        self.lost[kind] += max(seconds - even, 0.0)
        self.uneven[kind] += imbalance * seconds
        return self.free


class Sent(Found):
    """The tokens of a dispatch; to look at them is to wait."""

    is_there = True

    def tokens(self) -> Chosen:
        clock, done, chosen = self.likely
        clock.now = max(clock.now, done)
        return chosen


class Pretended(Programs):
    """Programs that take the time of the real ones. `lengths` are the tokens that each job is to generate, by its id."""

    def __init__(self, shards: int, parts: int, way: Way):
        """Each of `shards` is of `parts` devices that have equally much to do."""
        self.drafter, self.device, self.parts, self.way = NOBODY, KIND.figures, parts, way
        self.model: Any = types.SimpleNamespace(
            dispatch=types.SimpleNamespace(reach=lambda _: 1 << 30), dtype=types.SimpleNamespace(itemsize=2)
        )
        self.spread, self.waits, self.clock = Spread(layout=Layout(shards, 1, 1)), Waits(), Clock()
        self.lengths: dict[int, int] = {}
        self.generated: Counter[int] = Counter()
        self.engine: Any = None  # that sends
        self.help = 1  # shards that read what one of them has
        self.lines: list[float] = []  # tokens of a device

    @property
    def compiled(self) -> int:
        return 0

    def new(self, *_: Any) -> tuple[None, None]:
        return None, None

    def admit(self, *_: Any) -> None:
        return None

    def prepare(self, *_: Any) -> None:
        return None

    def check(self) -> None:
        return None

    def _jobs(self, at: np.ndarray) -> list[list[Job]]:
        """Those in these rows, by shard."""
        of_row = {(job.shard.number, job.row): job for job in self.engine.running}
        return [
            [of_row[n, row] for row in rows if (n, row) in of_row]
            for n, rows in enumerate(_by_shard(at).tolist())
        ]

    def prefill(self, pool: Any, rows: Any, at: np.ndarray, tokens: np.ndarray, read: np.ndarray, *_: Any):
        jobs, line = self._jobs(at), tokens.shape[-1] / self.parts / self.help
        counts = zip(jobs, _by_shard(read).tolist(), strict=True)
        pieces = [
            [piece(job.read, new) for job, new in zip(mine, some, strict=False)] for mine, some in counts
        ]
        each = [sum(mine, Reading()).over(self.parts) for mine in pieces]
        mean, most = sum(each, Reading()).over(len(each)), max(one.new for one in each)
        seconds = max(reading_seconds(line, one.over(self.help)) for one in each)
        smallest = min(n for n in self.lines if n >= min(mean.new, line))
        self.clock.send("reading", seconds, reading_seconds(smallest, mean), most / mean.new)
        return pool, rows, None

    def run(self, pool: Any, rows: Any, at: np.ndarray, table: Any, steps: np.ndarray):
        jobs, count = self._jobs(at), at.shape[-1]
        left = {job: self.lengths[job.id] - self.generated[job.id] for mine in jobs for job in mine}
        passes = min(int(np.min(steps)), max(left.values()))
        held = np.array([sum(self._held(job) + passes / 2 for job in mine) for mine in jobs]) / self.parts
        mean = step_seconds(len(left) / len(jobs) / self.parts, held.mean())
        fullest = step_seconds(count / self.parts, held.max())
        taken = passes * (min(mean, fullest) if self.way.moves else fullest)
        done = self.clock.send("decode", taken, passes * mean, held.max() / held.mean())
        chosen = nothing_chosen(len(jobs) * count)[0]
        chosen = chosen._replace(count=chosen.count.copy(), done=chosen.done.copy(), finite=~chosen.finite)
        for place, job in ((n * count + i, job) for n, mine in enumerate(jobs) for i, job in enumerate(mine)):
            chosen.count[place] = min(passes, left[job])
            chosen.done[place] = left[job] <= passes
            self.generated[job.id] += int(chosen.count[place])
        sent: Any = types.SimpleNamespace(copy_to_host_async=lambda: None)
        return pool, rows, Sent(sent, (self.clock, done, chosen))

    def _held(self, job: Job) -> int:
        return len(job.request.prompt) + self.generated[job.id]


def _by_shard(array: np.ndarray) -> np.ndarray:
    """With an axis of shards, also where there is only one."""
    return array if array.ndim == 2 else array[None]


class Simulated(Engine):
    """An engine whose requests find their shards in another way."""

    def __init__(self, way: Way, size: Size):
        shards, parts = (1, SHARDS) if way.is_even else (SHARDS, 1)
        each = {name: parts * getattr(size, name) for name in ("rows", "pages", "chunk")}
        self.pretended = Pretended(shards, parts, way)
        super().__init__(self.pretended, COST.config, None, dataclasses.replace(size, **each))
        self.way, self.pretended.engine = way, self
        if way.is_even:  # as many tokens of each device as on a mesh
            self.limits = dataclasses.replace(self.limits, lines=tuple(parts * line for line in size.lines()))
        self.limits = dataclasses.replace(self.limits, reading=way.reading)
        self._unhelped = self.limits
        self.pretended.lines = [line / parts for line in self.limits.lines]

    @property
    def clock(self) -> Clock:
        return self.pretended.clock

    def _decide(self) -> list[Plan]:
        self.limits, self.pretended.help = self._unhelped, 1
        if self.way.assign is not None:
            running = [[self._as_running(job) for job in shard.running] for shard in self.shards]
            waiting = self.way.assign(self, running)
            return agreed([self._plan(*each) for each in zip(self.shards, waiting, running, strict=True)])
        plans = super()._decide()
        readers = sum(bool(one.read) for one in plans)
        if not readers or 2 * readers > len(plans):
            return plans
        if not self.way.helps:
            return plans
        self.pretended.help = help = len(plans) // readers
        lines, dispatch = tuple(help * line for line in self.limits.lines), help * self.limits.dispatch
        self.limits = dataclasses.replace(self.limits, lines=lines, dispatch=dispatch)
        return super()._decide()

    def _read_together(self, plans: list[Plan]) -> list[Plan]:
        return super()._read_together(plans) if self.way.waits else plans


class Load(NamedTuple):
    """Requests in the order in which they come: tokens of prompts and answers, and when."""

    prompts: np.ndarray
    outputs: np.ndarray
    due: np.ndarray

    @classmethod
    def drawn(cls, documents: float, count: int, rate: float | None, seed: int = 0) -> "Load":
        """At `rate` requests a second on average, or at once."""
        rng = np.random.default_rng(seed)
        drawn = (rng.lognormal(np.log(median), spread, count) for median, spread in LENGTHS.values())
        prompts, outputs = (np.clip(tokens.round().astype(int), SHORTEST, LONGEST) for tokens in drawn)
        long = rng.random(count) < documents
        prompts[long] = rng.integers(*DOCUMENT, long.sum())
        due = np.zeros(count) if rate is None else np.cumsum(rng.exponential(1, count)) / rate
        return cls(prompts, outputs, due)


class Result(NamedTuple):
    """The outcome of a load: `until` are seconds until the last request had a row, `generated` the tokens by then."""

    first: np.ndarray  # seconds to each request's first token
    until: float
    generated: int
    total: int  # tokens that were generated in all,
    read: int  # and read
    preempted: int  # requests
    clock: Clock  # then,
    end: Clock  # and when all was done

    def row(self) -> dict[str, Any]:
        clock, p50, p99 = self.clock, *np.percentile(self.first, (50, 99))
        found = {"tokens/s": round(self.generated / self.until), "first token p50, s": p50, "p99, s": p99}
        of_all = {f"lost in {kind}, %": 100 * clock.lost[kind] / self.until for kind in ("decode", "reading")}
        spent = {f"{kind}, %": 100 * clock.seconds[kind] / self.until for kind in ("decode", "reading")}
        fullest = {
            f"fullest over mean, {kind}": clock.uneven[kind] / clock.seconds[kind]
            for kind in ("decode", "reading")
        }
        return {name: round(float(figure), 3) for name, figure in (found | of_all | spent | fullest).items()}


def serve(way: Way, load: Load, size: Size) -> Result:
    engine = Simulated(way, size)
    engine.warm_up()  # or only programs for as many rows as have started so far could be chosen
    clock, first, waiting = engine.clock, np.full(len(load.due), np.nan), {}
    coming, at_once, until = 0, not load.due.any(), None
    while coming < len(load.due) or engine.busy:
        if not engine.busy:
            clock.now = max(clock.now, load.due[coming])
        while coming < len(load.due) and load.due[coming] <= clock.now:
            prompt = [coming] * load.prompts[coming]
            job = engine.submit(request(prompt, LONGEST), streams=not at_once)
            engine.pretended.lengths[job.id] = int(load.outputs[coming])
            waiting[job] = coming
            coming += 1
        engine.step()
        for job in [job for job in waiting if job.ids]:
            first[waiting[job]] = clock.now - load.due[waiting[job]]
            del waiting[job]
        if until is None and coming == len(load.due) and not engine.waiting:
            until = clock.now, engine.stats.generated, copy.deepcopy(clock)
    assert until is not None
    stats, (seconds, generated, then) = engine.stats, until
    return Result(first, seconds, generated, stats.generated, stats.read, stats.preemptions, then, clock)


def size_of(documents: float, rows: int = ROWS) -> Size:
    """The engine's reservation on each device."""
    context = LONGEST + (DOCUMENT[1] if documents else LONGEST)
    return Size(
        rows=rows, pages=COST.tokens(MEMORY * KIND.memory, rows) // PAGE, context=context, chunk=COST.chunk
    )


def measured(
    loads: Sequence[str], rates: Sequence[float], requests: int, rows: int, seed: int
) -> Iterator[dict[str, Any]]:
    for name in loads:
        size, served = size_of(LOADS[name], rows), None
        for share in (None, *rates):
            if share is None:
                load = Load.drawn(LOADS[name], requests, None, seed)
            else:
                assert served is not None
                load = Load.drawn(LOADS[name], requests, share * served, seed)
            for way, how in WAYS.items():
                result = serve(how, load, size)
                if share is None and way == "reads at once":
                    served = result.generated / result.until / load.outputs.mean()
                yield {
                    "load": name,
                    "arrivals": "at once" if share is None else f"{share:.0%}",
                    "way": way,
                    **result.row(),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the rows as JSON to this file")
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument(
        "--rates", nargs="*", type=float, default=RATES, help="requests a second, of what is served at once"
    )
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of lengths and arrivals")
    parser.add_argument("--rows", type=int, default=ROWS, help="of each shard")
    options = parser.parse_args()
    about = {
        "benchmark": "balance",
        "device": f"{SHARDS} x {KIND.figures.name}, predicted",
        "model": "DeepSeek-V3 (FP8)",
    }
    about |= {
        "date": datetime.date.today().isoformat(),
        "requests": options.requests,
        "rows of a shard": options.rows,
        "seed": options.seed,
    }
    rows = []
    for row in measured(options.loads, options.rates, options.requests, options.rows, options.seed):
        rows.append(row)
        print(row, flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
