"""The decode loop of a V2-Lite-shaped model with random weights and 4k cached tokens, at batch 1, 8 and 64, greedy and sampled.

    python benchmarks/decode.py --out decode.json --profile
    python benchmarks/decode.py --formats bf16 fp8_block int4_g32 Q4_K

A dispatch is 32 steps, and is sent before the tokens of the one before are read, as in the engine. The floor is the bytes that
a step must read (the experts touched, as counted; all other weights; the latents) divided by the device's bandwidth. `bar` is the
tokens/s of a hand-written step of the same shape in plain XLA on an H200. `--profile` sums the kernels' time by part of the
model."""

import dataclasses
import functools
import gzip
import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from itertools import product
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import report
from flax import nnx

from cpu_experts import Experts
from mla_jax import Config, Transformer
from mla_jax.base.batch import Batch
from mla_jax.cache import paged
from mla_jax.decode.chosen import STEPS, Found
from mla_jax.decode.loop import Programs
from mla_jax.decode.rows import ADMITTED, Entry, Rows, blank, taken
from mla_jax.model.dispatch import Dispatch
from mla_jax.offload.experts import HostExperts

HELD, DISPATCHES = 4096, 8  # tokens in a row's pages once it has run so often
BARS = {1: 169, 8: 385, 64: 2120}
SAMPLED = 0.6, 0.95  # temperature and top-p
SCOPES = ("attention", "experts", "mlp", "unembed", "choose")


def random_model(config: Config, on_host: Mapping[int, Experts] | None = None, mtp: bool = False) -> Transformer:
    """A model with random bf16 weights, made on the device one parameter at a time; experts of layers in `on_host` are given."""
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dispatch=Dispatch(device=report.device()), mtp=mtp))
    for number, layer in (on_host or {}).items():
        model.layers[number].mlp.experts = HostExperts(layer)
    graph, state = nnx.split(model)

    fill = jax.jit(lambda key, shape, mean: mean + 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(0), len(nnx.to_flat_state(state)))
    for key, (_, variable) in zip(keys, nnx.to_flat_state(state), strict=True):
        variable.set_value(fill(key, variable.shape, float(len(variable.shape) == 1)))
    return nnx.merge(graph, state)


@dataclasses.dataclass
class Sequences:
    """Rows of a table, the pool with their tokens, and where these are."""

    programs: Programs
    pool: paged.Pool
    rows: Rows
    page_table: np.ndarray

    @property
    def at(self) -> np.ndarray:
        return np.arange(self.page_table.shape[0], dtype=np.int32)

    def run(self, steps: int) -> Found:
        """Sends one dispatch."""
        self.pool, self.rows, found = self.programs.run(self.pool, self.rows, self.at, self.page_table, np.int32(steps))
        return found

    def copy(self) -> "Sequences":
        """A run takes the memory of pool and table."""
        pool, rows = jax.block_until_ready(jax.tree.map(jnp.copy, (self.pool, self.rows)))
        return dataclasses.replace(self, pool=pool, rows=rows)


def sequences(programs: Programs, count: int, temperature: float = 0.0, top_p: float = 1.0) -> Sequences:
    """`count` rows with random latents in all but the last slots of HELD; each has a seed of its own."""
    capacity, key = DISPATCHES * STEPS, jax.random.key(1)
    table = np.asarray(paged.in_order(count, HELD))
    pool, rows = programs.new(count, table.size)
    for first in range(0, count, ADMITTED):
        some = entry(first, HELD - capacity, temperature, top_p)
        rows = programs.admit(rows, first + np.arange(ADMITTED, dtype=np.int32), some)
    rows = dataclasses.replace(rows, last=jax.random.normal(key, rows.last.shape, rows.last.dtype))
    return Sequences(programs, random_pool(pool, key), rows, table)


def entry(first: int, held: int, temperature: float, top_p: float) -> Entry:
    """Requests that hold so many tokens and never end."""
    new = blank(ADMITTED)
    seeds = np.arange(2 * first, 2 * (first + ADMITTED), dtype=np.uint32).reshape(ADMITTED, 2)
    warm = np.full(ADMITTED, temperature, np.float32), np.full(ADMITTED, top_p, np.float32)
    sampling = dataclasses.replace(new.sampling, temperature=warm[0], top_p=warm[1], seed=seeds)
    return dataclasses.replace(new, held=new.held + held, prompt=new.prompt + held, limit=new.limit + HELD, sampling=sampling)


@functools.partial(jax.jit, donate_argnums=0)
def random_pool(pool: paged.Pool, key: jax.Array) -> paged.Pool:
    def random(array: jax.Array) -> jax.Array:
        numbers = paged.NUMBERS.get(array.dtype, array.dtype)
        value = jax.random.normal(key, array.shape, jnp.bfloat16).astype(numbers)
        return jax.lax.bitcast_convert_type(value, array.dtype)

    return {name: random(array) for name, array in pool.items()}


def floor_bytes(model: Transformer, found: Sequences) -> tuple[float, float]:
    """The bytes that one step must read, and the mean number of experts that it touches per layer."""
    graph, weights = nnx.split(model)
    count = found.page_table.shape[0]

    @jax.jit
    def loads(weights: nnx.State, pool: paged.Pool, rows: Rows, at: jax.Array, page_table: jax.Array) -> list[jax.Array]:
        model = nnx.merge(graph, weights)
        _, is_open, last = taken(rows, at)
        tokens = jnp.argmax(model.unembed(last), axis=-1)[:, None]
        batch = Batch.behind(is_open.held, is_open.position, jnp.ones(count, jnp.int32), 1, page_table)
        return model(tokens, batch, pool, collect=True)[2]["load"]

    load = loads(weights, found.pool, found.rows, found.at, found.page_table)
    touched = [int((layer > 0).sum()) for layer in load]
    sizes = {path: sum(leaf.nbytes for leaf in jax.tree.leaves(v)) for path, v in nnx.to_flat_state(nnx.state(model))}
    stacks: Counter[int] = Counter()  # bytes of each layer's experts
    for path, size in sizes.items():
        if "experts" in path:
            stacks[path[1]] += size
    others = sum(size for path, size in sizes.items() if "experts" not in path and path[0] != "embed")
    token = sum(a.dtype.itemsize * prod(a.shape[2:]) for a in found.pool.values()) * model.cached_layers
    total = model.config.n_routed_experts or 1
    experts = sum(number * stacks[layer] / total for number, layer in zip(touched, sorted(stacks), strict=True))
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
    row |= {"experts touched": touched, "floor ms": floor, "of the floor %": 100 * floor / ms, "compile s": compiling}
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
    assert (last.tokens().count == STEPS).all(), "a row has ended"
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
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            start = time.perf_counter()
            jax.block_until_ready(found.run(steps))
            wall = time.perf_counter() - start
        (file,) = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    streams = {(e["pid"], e.get("tid")) for e in events if e.get("ph") == "M" and "Stream" in str(e.get("args", {}).get("name"))}
    spent: Counter[str] = Counter()
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            place = places.get(event["name"], "")
            spent[next((s for s in SCOPES if f"/{s}/" in place), "other")] += event["dur"] / 1e6
    busy = sum(spent.values())
    return {scope: 100 * seconds / wall for scope, seconds in spent.most_common()} | {"no kernel": 100 * (1 - busy / wall)}


def main():
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--profile", action="store_true", help="report the share of the time per part of the model")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--attention", nargs="+", default=["auto", "fused"], metavar="FORM")
    parser.add_argument("--kv-cache", default="auto", help="fp8: latents in E4M3")
    parser.add_argument("--formats", nargs="+", default=["bf16"], help="of the weights, as packed_models.py makes them")
    parser.add_argument("--sampled", action="store_true", help="also sampled steps, as a share of greedy ones")
    options = parser.parse_args()
    rows = []
    for format in options.formats:
        model = model_in(format, Config.preset("v2_lite"))
        for batch, attention in product(options.batch, options.attention):
            model.dispatch = Dispatch(attention, kv_cache=options.kv_cache, device=report.device())
            rows.append({"weights": format} | measure(model, batch, options.profile, options.sampled))
            print(rows[-1], flush=True)
    report.show(rows, options.out, benchmark="decode", model="V2-Lite shape, random weights", held=HELD)


def model_in(format: str, config: Config, mtp: bool = False) -> Transformer:
    """A model with random weights in bf16, or in a format of packed_models.py."""
    if format == "bf16":
        return random_model(config, mtp=mtp)
    import packed_models  # needs a JAX that has the kernels

    return packed_models.random_model(config, format, mtp=mtp)


if __name__ == "__main__":
    main()
