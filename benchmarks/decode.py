"""The decode loop of a V2-Lite-shaped model with random bf16 weights and 4k cached tokens, at batch 1, 8 and 64.

    python benchmarks/decode.py --out decode.json --profile

The floor is the bytes that a step must read (the experts touched, as counted; all other weights; the latents) divided by the
device's bandwidth. `bar` is the tokens/s of a hand-written step of the same shape in plain XLA on an H200. `--profile` sums the
kernels' time by part of the model."""

import dataclasses
import gzip
import json
import re
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from itertools import product
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import report
from flax import nnx

from cpu_experts import Experts
from mla_jax import Config, Transformer
from mla_jax.base.batch import Batch
from mla_jax.decode.loop import Programs, State
from mla_jax.decode.sampling import Sampling
from mla_jax.model.dispatch import Dispatch
from mla_jax.offload.experts import HostExperts

HELD, STEPS = 4096, 32
BARS = {1: 169, 8: 385, 64: 2120}
SCOPES = ("attention", "experts", "mlp", "unembed", "choose")


def random_model(config: Config, on_host: Mapping[int, Experts] | None = None) -> Transformer:
    """A model with random bf16 weights, made on the device one parameter at a time; experts of layers in `on_host` are given."""
    model = nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dispatch=Dispatch(device=report.device())))
    for number, layer in (on_host or {}).items():
        model.layers[number].mlp.experts = HostExperts(layer)
    graph, state = nnx.split(model)

    fill = jax.jit(lambda key, shape, mean: mean + 0.02 * jax.random.normal(key, shape, jnp.bfloat16), static_argnums=(1, 2))
    keys = jax.random.split(jax.random.key(0), len(nnx.to_flat_state(state)))
    for key, (_, variable) in zip(keys, nnx.to_flat_state(state), strict=True):
        variable.set_value(fill(key, variable.shape, float(len(variable.shape) == 1)))
    return nnx.merge(graph, state)


def held_state(model: Transformer, programs: Programs, rows: int) -> State:
    """`rows` sequences with random latents in all but the last slots of HELD."""
    greedy = {"temperature": 0.0, "top_p": 1.0, "min_p": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
    sampling = Sampling(
        top_k=jnp.zeros(rows, jnp.int32),
        seed=jnp.zeros((rows, 2), jnp.uint32),
        **{name: jnp.full(rows, value) for name, value in greedy.items()},
    )
    capacity = 8 * STEPS
    state = programs.new(HELD, capacity, 0, jnp.full(rows, capacity), jnp.full((rows, 4), -1), sampling)
    length, key = HELD - capacity, jax.random.key(1)

    def held(i: int, layer: dict) -> dict:
        seed, arrays = jax.random.fold_in(key, i), {k: v for k, v in layer.items() if v.ndim == 3}
        random = {k: jax.random.normal(seed, v.shape, jnp.bfloat16).astype(v.dtype) for k, v in arrays.items()}
        at = jnp.broadcast_to(jnp.arange(HELD), layer["positions"].shape)
        return random | {
            "positions": jnp.where(at < length, at, layer["positions"]),
            "length": jnp.full_like(layer["length"], length),
        }

    cache = tuple(held(i, layer) for i, layer in enumerate(state.cache))
    last = jax.random.normal(key, state.last.shape, state.last.dtype)
    return programs.begin(dataclasses.replace(state, cache=cache, last=last, position=jnp.full(rows, length)))


def floor_bytes(model: Transformer, state: State, rows: int) -> tuple[float, float]:
    """The bytes that one step must read, and the mean number of experts that it touches per layer."""
    tokens = state.tokens[jnp.arange(rows), state.count - 1][:, None]
    batch = Batch(state.position[:, None], jnp.ones((rows, 1), bool))
    graph, weights = nnx.split(model)
    count = jax.jit(lambda weights, *args: nnx.merge(graph, weights)(*args, collect=True)[2]["load"])
    load = count(weights, tokens, batch, state.cache)
    touched = sum(int((layer > 0).sum()) for layer in load)
    parameters = {".".join(map(str, p)): v for p, v in nnx.to_flat_state(nnx.state(model))}
    expert = 2 * 3 * prod(parameters["layers.1.mlp.experts.gate"].shape[1:])
    rest = sum(2 * prod(v.shape) for p, v in parameters.items() if ".mlp.experts." not in p and p != "embed")
    latents = sum(a.dtype.itemsize * prod(a.shape[1:]) * rows for layer in state.cache for a in layer.values() if a.ndim == 3)
    return expert * touched + rest + latents, touched / len(load)


def measure(model: Transformer, rows: int, profile: bool) -> dict:
    programs = Programs(model)
    state = held_state(model, programs, rows)
    bytes_needed, touched = floor_bytes(model, state, rows)
    start = time.perf_counter()
    state = jax.block_until_ready(programs.run(state, jnp.int32(1)))
    compiling, times = time.perf_counter() - start, []
    for _ in range(4):
        start = time.perf_counter()
        state = jax.block_until_ready(programs.run(state, jnp.int32(STEPS)))
        times.append((time.perf_counter() - start) / STEPS)
    ms, floor = min(times) * 1e3, bytes_needed / report.device().bandwidth * 1e3
    row = {
        "batch": rows,
        "attention": model.dispatch.attention,
        "ms a step": ms,
        "tokens/s": rows / ms * 1e3,
        "bar tokens/s": BARS[rows],
    }
    row |= {"experts touched": touched, "floor ms": floor, "of the floor %": 100 * floor / ms, "compile s": compiling}
    if profile:
        shares = profile_run(programs, state)
        row |= {f"{scope} %": share for scope, share in shares.items()}
    return row


def profile_run(programs: Programs, state: State) -> dict[str, float]:
    """The percentage of the wall time in the kernels of each part of the model, and in no kernel."""
    steps = jnp.int32(8)
    text = programs.run.lower(state, steps).compile().as_text()
    places = {name.replace(".", "_"): place for name, place in re.findall(r'%(\S+) = .*op_name="([^"]*)"', text)}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            start = time.perf_counter()
            jax.block_until_ready(programs.run(state, steps))
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
    options = parser.parse_args()
    model, rows = random_model(Config.preset("v2_lite")), []
    for batch, attention in product(options.batch, options.attention):
        model.dispatch = Dispatch(attention, kv_cache=options.kv_cache, device=report.device())
        rows.append(measure(model, batch, options.profile))
        print(rows[-1], flush=True)
    report.show(rows, options.out, benchmark="decode", model="V2-Lite shape, random bf16 weights", held=HELD)


if __name__ == "__main__":
    main()
