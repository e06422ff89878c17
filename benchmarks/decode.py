"""The decode loop of a V2-Lite-shaped model with random weights and 4k cached tokens, at batch 1, 8 and 64, greedy and sampled.

    python benchmarks/decode.py --out decode.json --profile
    python benchmarks/decode.py --formats bf16 fp8_block int4_g32 Q4_K

A dispatch is 32 steps, and is sent before the tokens of the one before are read, as in the engine. The floor is the bytes that
a step must read (the experts touched, as counted; all other weights; the latents) divided by the device's bandwidth. `bar` is the
tokens/s of a hand-written step of the same shape in plain XLA on an H200. `--profile` sums the kernels' time by part of the
model."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable
from itertools import product
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from flax import nnx
from jax.sharding import PartitionSpec
from random_models import random_model

from mla_jax import Config, Transformer
from mla_jax.base.axes import DATA, MESH_AXES
from mla_jax.base.batch import Batch
from mla_jax.cache import paged
from mla_jax.decode.loop import Programs
from mla_jax.decode.outputs import STEPS, Found
from mla_jax.decode.packing import of_shards
from mla_jax.decode.program_sharding import Spread
from mla_jax.decode.rows import ADMITTED, Entry, Rows, default_entries, taken
from mla_jax.mesh import across
from mla_jax.model.dispatch import Dispatch

HELD, DISPATCHES = 4096, 8  # tokens in a row's pages once it has run so often
BARS = {1: 169, 8: 385, 64: 2120}
SAMPLED = 0.6, 0.95  # temperature and top-p
SCOPES = ("attention", "experts", "mlp", "unembed", "choose")


@dataclasses.dataclass
class Sequences:
    """Rows of a table, the pool with their tokens, and where these are; on a mesh with an axis of data shards in front."""

    programs: Programs
    pool: paged.Pool
    rows: Rows
    tables: np.ndarray  # the pages of all rows
    at: np.ndarray  # of each row that runs; past the table where a shard has fewer rows than others
    count: int  # of rows that run

    @property
    def page_table(self) -> np.ndarray:
        return self.tables[..., : self.at.shape[-1], :]

    def take(self, count: int) -> None:
        """From now on the first `count` rows run, as many in each shard."""
        shards = self.programs.spread.shards
        each = -(-count // shards)
        row = np.arange(each, dtype=np.int32)
        runs = np.arange(shards)[:, None] * each + row < count
        self.at, self.count = of_shards(list(np.where(runs, row, self.tables.shape[-2]))), count

    def run(self, steps: int) -> Found:
        """Sends one dispatch."""
        same = of_shards([np.int32(steps)] * self.programs.spread.shards)
        self.pool, self.rows, found = self.programs.run(self.pool, self.rows, self.at, self.page_table, same)
        return found

    def copy(self) -> "Sequences":
        """A run takes the memory of pool and table."""
        pool, rows = jax.block_until_ready(jax.tree.map(jnp.copy, (self.pool, self.rows)))
        return dataclasses.replace(self, pool=pool, rows=rows)


def sequences(
    programs: Programs, count: int, temperature: float = 0.0, top_p: float = 1.0, held: int = HELD
) -> Sequences:
    """`count` rows with random latents in all but the last slots of `held`; each has a seed of its own."""
    shards, left = programs.spread.shards, held - DISPATCHES * STEPS
    each = -(-count // shards)
    table = np.asarray(paged.in_order(each, held))
    pool, rows = programs.new(each, table.size)
    rows = admitted(programs, rows, each, lambda first: entry(first, left, temperature, top_p))
    rows = dataclasses.replace(rows, last=randomized(programs.spread, rows.last))
    found = Sequences(
        programs,
        randomized(programs.spread, pool),
        rows,
        of_shards([table] * shards),
        np.zeros(0, np.int32),
        0,
    )
    found.take(count)
    return found


def admitted(programs: Programs, rows: Rows, each: int, of_rows: Callable[[int], Entry]) -> Rows:
    """The table with new requests in `each` rows of every data shard; `of_rows(first)` are some, from this row of all on."""
    shards = programs.spread.shards
    for first in range(0, each, ADMITTED):
        at = first + np.arange(ADMITTED, dtype=np.int32)
        given = [of_rows(shard * each + first) for shard in range(shards)]
        rows = programs.admit(rows, of_shards([at] * shards), of_shards(given))
    return rows


def entry(first: int, held: int, temperature: float, top_p: float) -> Entry:
    """Requests that hold so many tokens and never end."""
    new = default_entries(ADMITTED)
    seeds = np.arange(2 * first, 2 * (first + ADMITTED), dtype=np.uint32).reshape(ADMITTED, 2)
    warm = np.full(ADMITTED, temperature, np.float32), np.full(ADMITTED, top_p, np.float32)
    sampling = dataclasses.replace(new.sampling, temperature=warm[0], top_p=warm[1], seed=seeds)
    return dataclasses.replace(
        new, held=new.held + held, prompt=new.prompt + held, limit=new.limit + HELD, sampling=sampling
    )


def randomized(spread: Spread, arrays: Any) -> Any:
    """Random numbers in the place of these arrays, which are taken; devices of one data shard have the same."""

    def of_device(arrays: Any, key: jax.Array) -> Any:
        return jax.tree.map(lambda array: random(array, jax.random.fold_in(key, across.index(DATA))), arrays)

    def random(array: jax.Array, key: jax.Array) -> jax.Array:
        value = jax.random.normal(key, array.shape, jnp.bfloat16).astype(
            paged.NUMBERS.get(array.dtype, array.dtype)
        )
        return jax.lax.bitcast_convert_type(value, array.dtype)

    if spread.mesh is not None:
        own = PartitionSpec(MESH_AXES)
        of_device = jax.shard_map(
            of_device, mesh=spread.mesh, in_specs=(own, PartitionSpec()), out_specs=own, check_vma=False
        )
    # keep_unused: JAX would drop unused arguments, and their memory would not be taken
    in_place = jax.jit(of_device, donate_argnums=0, keep_unused=True)
    return in_place(arrays, jax.random.key(1))


def floor_bytes(model: Transformer, found: Sequences) -> tuple[float, float]:
    """The bytes that one step must read, and the mean number of experts that it touches per layer."""
    graph, weights = nnx.split(model)
    count = found.count

    @jax.jit
    def loads(
        weights: nnx.State, pool: paged.Pool, rows: Rows, at: jax.Array, page_table: jax.Array
    ) -> list[jax.Array]:
        model = nnx.merge(graph, weights)
        _, is_open, last = taken(rows, at)
        tokens = jnp.argmax(model.unembed(last), axis=-1)[:, None]
        batch = Batch.behind(is_open.held, is_open.position, jnp.ones(count, jnp.int32), 1, page_table)
        return model(tokens, batch, pool, collect=True)[2]["load"]

    load = loads(weights, found.pool, found.rows, found.at, found.page_table)
    touched = [int((layer > 0).sum()) for layer in load]
    sizes = {
        path: sum(leaf.nbytes for leaf in jax.tree.leaves(v))
        for path, v in nnx.to_flat_state(nnx.state(model))
    }
    stacks: Counter[int] = Counter()  # bytes of each layer's experts
    for path, size in sizes.items():
        if "experts" in path:
            stacks[path[1]] += size
    others = sum(size for path, size in sizes.items() if "experts" not in path and path[0] != "embed")
    token = sum(a.dtype.itemsize * prod(a.shape[2:]) for a in found.pool.values()) * model.cached_layers
    total = model.config.n_routed_experts or 1
    experts = sum(
        number * stacks[layer] / total for number, layer in zip(touched, sorted(stacks), strict=True)
    )
    return experts + others + token * HELD * count, sum(touched) / len(touched)


def measure(model: Transformer, rows: int, profile: bool, sampled: bool) -> dict:
    found = sequences(Programs(model), rows)
    start = time.perf_counter()
    jax.block_until_ready(found.run(1))
    compiling = time.perf_counter() - start
    bytes_needed, touched = floor_bytes(model, found)
    ms, floor = seconds_per_step(found) * 1e3, bytes_needed / report.device().bandwidth * 1e3
    row = {
        "batch": rows,
        "attention": model.dispatch.attention,
        "ms a step": ms,
        "tokens/s": rows / ms * 1e3,
        "bar tokens/s": BARS.get(rows),
    }
    row |= {
        "experts touched": touched,
        "floor ms": floor,
        "of the floor %": 100 * floor / ms,
        "compile s": compiling,
    }
    if sampled:
        warm = sequences(found.programs, rows, *SAMPLED)
        row["sampled / greedy"] = seconds_per_step(warm) * 1e3 / ms
    if profile:
        shares = profile_run(found)
        row |= {f"{scope} %": share for scope, share in shares.items()}
    return row


def seconds_per_step(found: Sequences, count: int = 5) -> float:
    """Of `count` dispatches that are sent ahead of one another."""
    jax.block_until_ready(found.run(STEPS))
    start = time.perf_counter()
    last = [found.run(STEPS) for _ in range(count)][-1]
    jax.block_until_ready(last)
    seconds = time.perf_counter() - start
    assert last.tokens().count.sum() == found.count * STEPS, "a row has ended"
    return seconds / count / STEPS


def places_of(text: str) -> dict[str, str]:
    """Where in the model each of a compiled program's kernels is. No pattern searches a line: a kernel's code may be one."""
    places = {}
    for line in text.splitlines():
        name, equals, _ = line[:500].strip().removeprefix("ROOT ").removeprefix("%").partition(" = ")
        _, op_name, place = line[line.rfind('op_name="') :].partition('op_name="')
        if equals and op_name:
            places[name.replace(".", "_")] = place.partition('"')[0]
    return places


def profile_run(found: Sequences) -> dict[str, float]:
    """The percentage of the wall time in the kernels of each part of the model, and in no kernel."""
    steps = 8
    program = found.programs.run.lower(found.pool, found.rows, found.at, found.page_table, np.int32(steps))
    places = places_of(program.compile().as_text() or "")
    traced, spent = report.traced(lambda: found.run(steps)), Counter[str]()
    for kernel, seconds in traced.kernels.items():
        place = places.get(kernel, "")
        spent[next((s for s in SCOPES if f"/{s}/" in place), "other")] += seconds
    shares = {scope: 100 * seconds / traced.wall for scope, seconds in spent.most_common()}
    return shares | {"no kernel": 100 * (1 - sum(spent.values()) / traced.wall)}


def main():
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--profile", action="store_true", help="report the share of the time per part of the model"
    )
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--attention", nargs="+", default=["auto", "fused"], metavar="FORM")
    parser.add_argument("--kv-cache", default="auto", help="fp8: latents in E4M3")
    parser.add_argument(
        "--formats", nargs="+", default=["bf16"], help="of the weights, as random_models.py makes them"
    )
    parser.add_argument(
        "--sampled", action="store_true", help="also sampled steps, as a share of greedy ones"
    )
    options = parser.parse_args()
    rows = []
    for format in options.formats:
        model = random_model(Config.preset("v2_lite"), format)
        for batch, attention in product(options.batch, options.attention):
            model.dispatch = Dispatch(attention, kv_cache=options.kv_cache, device=report.device())
            rows.append({"weights": format} | measure(model, batch, options.profile, options.sampled))
            print(rows[-1], flush=True)
    report.show(rows, options.out, benchmark="decode", model="V2-Lite shape, random weights", held=HELD)


if __name__ == "__main__":
    main()
