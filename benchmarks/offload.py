"""Decoding and prompt processing with the routed experts on the CPU: measured, and predicted from the host's rates.

    python -m cpu_experts.build && python benchmarks/offload.py --out offload.json

The models are V2-Lite's shape and some layers of V3's, with random weights: a few random experts of each layer are packed, and
repeated under different numbers, so that each has memory of its own. `waited` computes the shared experts after the routed ones
instead of concurrently; the difference is the gain of overlapping. Deferred experts are added one layer later, which changes
the sums, so rows then decode other tokens. Tokens are sampled, because greedy ones soon repeat, and their experts with them.
`touched` is the number of experts per layer that a timed step read from the host, `expected` the number in the prediction. The
prediction uses the host's rates, measured by mla_jax/weights/measure.py for a single layer. Lines with ok and FAIL report
checks.

`--hot 0 0.25 0.5` decodes with a router that prefers some experts of each layer by Zipf's law, with these shares of all experts
replicated on the device: the ones that a previous run chose most often."""

import argparse
import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import decode
import jax
import jax.numpy as jnp
import numpy as np
import report
from flax import nnx

from cpu_experts import Experts, ffi, packed
from mla_jax import Config, Transformer
from mla_jax.base import roofline
from mla_jax.decode.loop import Programs, State
from mla_jax.model.moe import HostExperts, How, MoE, Router, weigh
from mla_jax.weights import measure
from mla_jax.weights.host import copies, packed_bytes
from mla_jax.weights.hottest import hottest

PACKED = 4  # random experts per layer, repeated
STEPS = 16
SHAPES = {  # config; rows of steps, deferred experts, tokens of prompts
    "v2_lite": (Config.preset("v2_lite"), (1, 8), (0, 2), (64, 1024, 4096)),
    "v3 slice": (
        dataclasses.replace(Config.preset("v3"), num_hidden_layers=7, num_nextn_predict_layers=0),
        (1, 8),
        (0, 3),
        (64, 1024),
    ),
    "tiny": (Config.preset("tiny"), (1, 8), (0, 1), (64,)),
}


class Waited(HostExperts):
    """Without overlap: the shared experts run after the routed ones."""

    def __call__(self, x: jax.Array, topk_ids: jax.Array, topk_weights: jax.Array, how: How, beside: Callable) -> tuple:
        ticket = ffi.submit(self.layer, x, topk_ids, topk_weights)
        y = ffi.collect(ticket)
        # a data dependency, which alone keeps kernels from running concurrently
        return y, beside(jnp.where(jnp.isnan(y), y, ticket.x)), None


class Skewed(Router):
    """The expert of rank n is n times less likely than the first; each layer has another order of ranks."""

    def __init__(self, router: Router, seed: int):
        self.config, self.weight = router.config, router.weight
        ranks = np.random.default_rng(seed).permutation(router.config.n_routed_experts or 0) + 1
        self.tilt = nnx.Variable(jnp.asarray(-np.log(ranks), jnp.float32))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jax.nn.softmax(x.astype(jnp.float32) @ self.weight[...].astype(jnp.float32).T + self.tilt[...])
        chosen, topk_ids = jax.lax.top_k(scores, self.config.num_experts_per_tok or 1)
        return topk_ids, weigh(chosen, self.config)


def layers(config: Config, precision: str, folder: Path) -> Iterator[tuple[int, Experts]]:
    """Each layer's experts, memory-mapped from a file per layer."""
    rng = np.random.default_rng(0)
    model, width, count = config.hidden_size, config.moe_intermediate_size or 0, config.n_routed_experts or 0
    shapes = [(PACKED, width, model), (PACKED, width, model), (PACKED, model, width)]
    with Experts(*(rng.standard_normal(s, np.float32) * np.float32(0.02) for s in shapes), precision) as few:
        few.save(folder / "few")
    found = packed.read(folder / "few")
    sections = tuple(np.tile(section, (-(-count // PACKED), 1, 1))[:count] for section in found.sections)
    for number in filter(config.is_moe, range(config.num_hidden_layers)):
        packed.write(folder / "one", found._replace(shape=(count, *found.shape[1:]), sections=sections))
        layer = Experts.open(folder / "one")
        touch(layer, config.num_experts_per_tok or 1)
        yield number, layer
        (folder / "one").unlink()  # its memory exists as long as it is mapped


def touch(layer: Experts, chosen: int) -> None:
    """Reads all experts once, because a page of a mapped file costs more at its first use."""
    ids = np.resize(np.arange(layer.experts, dtype=np.int32), (-(-layer.experts // chosen), chosen))
    layer.forward(np.ones((len(ids), layer.model), np.float32), ids, np.ones(ids.shape, np.float32))


class Timed(NamedTuple):
    """The fastest run of STEPS steps: seconds per step, the state before it, and the state after the last run."""

    seconds: float
    before: State
    after: State


def timed_steps(programs: Programs, state: State) -> Timed:
    state, runs = jax.block_until_ready(programs.run(state, jnp.int32(1))), []
    for _ in range(3):
        before = jax.block_until_ready(jax.tree.map(jnp.copy, state))  # a run consumes its state
        start = time.perf_counter()
        state = jax.block_until_ready(programs.run(state, jnp.int32(STEPS)))
        runs.append(((time.perf_counter() - start) / STEPS, before))
    programs.check()
    return Timed(*min(runs, key=lambda run: run[0]), state)


def touched(programs: Programs, timed: Timed, held: np.ndarray) -> float:
    """The mean number of experts per layer that a step chose and the device does not hold (`held` [L X]).

    Repeats the steps with the same tokens."""
    state, found = dataclasses.replace(timed.before, load=jnp.zeros(held.shape, jnp.int32)), []
    for _ in range(STEPS):
        before = np.array(state.load)
        state = dataclasses.replace(state, tokens=jnp.copy(timed.after.tokens))
        state = programs.run(state, jnp.int32(1))
        found.append(((np.asarray(state.load) > before) & ~held).sum(1).mean())
    return float(np.mean(found))


def varied(model: Transformer, programs: Programs, rows: int) -> State:
    """Settings that sample tokens, with a seed per row."""
    state = decode.held_state(model, programs, rows)
    seeds = jnp.arange(2 * rows, dtype=jnp.uint32).reshape(rows, 2)
    warm = dataclasses.replace(state.sampling, temperature=jnp.ones(rows), seed=seeds)
    return dataclasses.replace(state, sampling=warm)


def chosen(model: Transformer, rows: int = 16) -> np.ndarray:
    """The share of tokens that choose each expert of each layer, from some steps."""
    programs = Programs(model, counts=True)
    state = programs.run(varied(model, programs, rows), jnp.int32(2 * STEPS))
    counts = np.asarray(state.load, float)
    return (model.config.num_experts_per_tok or 1) * counts / counts.sum(1, keepdims=True)


def hot_rows(name: str, precision: str, folder: Path, shares: list[float]) -> Iterator[dict]:
    config, batches, *_ = SHAPES[name]
    on_host, target = dict(layers(config, precision, folder)), jax.devices()[0]
    model = decode.random_model(config, on_host)
    for seed, mlp in enumerate(mixed(model)):
        mlp.router = Skewed(mlp.router, seed)
    likely, rates, expert = chosen(model), measure.host(precision), packed_bytes(config, precision)
    for share in shares:
        held = hottest(likely, [1] * len(likely), share * likely.size)
        for mlp, row in zip(mixed(model), held, strict=True):
            ids, layer = np.flatnonzero(row).tolist(), mlp.experts.layer
            mlp.experts = HostExperts(layer, hot=copies(layer, ids, model.dtype, target) if ids else None)
        routed = roofline.Routed(likely, held)
        about = {"hot experts": int(held.sum()), "of the tokens %": 100 * (1 - routed.left)}
        for rows in batches:
            yield decoded(f"{name}, skewed", model, rows, 0, rates, expert, routed) | about


def decoded(
    name: str,
    model: Transformer,
    rows: int,
    defer: int,
    rates: roofline.Host,
    expert: int,
    routed: roofline.Routed | None = None,
) -> dict:
    """A row of the table: a decode step of some rows."""
    model.defer, programs, config = defer, Programs(model), model.config
    timed = timed_steps(programs, varied(model, programs, rows))
    finite = bool(timed.after.finite.all())
    print(f"{'ok' if finite else 'FAIL'}: {name}, {rows} rows, {defer} deferred: logits are finite", flush=True)
    layers, seconds = len(model.on_host()), timed.seconds
    predicted = roofline.decode_seconds(config, model.dispatch.device, rows, decode.HELD, rates, layers, expert, defer, routed)
    held = np.zeros((layers, config.n_routed_experts or 0), bool) if routed is None else routed.held
    expected = roofline.experts_touched(config, rows) if routed is None else routed.touched(rows)[0]
    row = {"model": name, "rows": rows, "new": 1, "defer": defer, "ms": seconds * 1e3, "tokens/s": rows / seconds}
    row |= {"predicted tokens/s": rows / predicted, "measured / predicted": predicted / seconds}
    return row | {"touched": touched(programs, timed, held), "expected": expected}


def read(name: str, model: Transformer, tokens: int, stream: int, rates: roofline.Host, expert: int) -> dict:
    """A row of the table: a prompt; its experts are streamed to the device from `stream` tokens on, 0 for never."""
    for mlp in mixed(model):
        mlp.experts = HostExperts(mlp.experts.layer, stream=stream)
    model.defer, programs = 0, Programs(model)
    # random tokens, because equal ones would choose the same experts
    prompt = jax.random.randint(jax.random.key(0), (1, tokens), 0, model.config.vocab_size, jnp.int32)
    mask = jnp.ones((1, tokens), bool)
    arguments = (4 * tokens, 16, 0, jnp.full(1, 16), jnp.full((1, 4), -1), decode.held_state(model, programs, 1).sampling)

    def run() -> State:
        return programs.prefill(programs.new(*arguments), prompt, mask, span=tokens)

    seconds = report.best_seconds(run, 2)
    programs.check()
    predicted = roofline.prefill_seconds(model.config, model.dispatch.device, tokens, rates, len(model.on_host()), expert, stream)
    row = {"model": name + (", streamed" if stream else ""), "rows": 1, "new": tokens, "ms": seconds * 1e3}
    row |= {"tokens/s": tokens / seconds, "predicted tokens/s": tokens / predicted}
    return row | {"measured / predicted": predicted / seconds}


def mixed(model: Transformer) -> list[MoE]:
    return [block.mlp for block in model.layers if isinstance(block.mlp, MoE)]


def measured(name: str, precision: str, folder: Path, prompts: bool) -> Iterator[dict]:
    config, batches, defers, lengths = SHAPES[name]
    start = time.perf_counter()
    on_host = dict(layers(config, precision, folder))
    model = decode.random_model(config, on_host)
    print(f"{name}: {len(on_host)} layers of experts in {precision}, made in {time.perf_counter() - start:.0f} s", flush=True)
    rates, expert = measure.host(precision), packed_bytes(config, precision)
    print(rates, flush=True)
    for rows in batches:
        for defer in defers:
            yield decoded(name, model, rows, defer, rates, expert)
    for mlp in mixed(model):
        mlp.experts = Waited(mlp.experts.layer)
    for rows in batches:
        yield decoded(name + ", waited", model, rows, 0, rates, expert)
    for tokens, stream in itertools.product(lengths if prompts else (), (0, 1)):
        yield read(name, model, tokens, stream, rates, expert)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["v2_lite", "v3 slice"])
    parser.add_argument("--precision", default="int8", help="precision of the experts, as in cpu_experts")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="folder in memory for the packed experts")
    parser.add_argument("--no-prompts", action="store_true", help="decode only")
    parser.add_argument(
        "--hot", nargs="+", type=float, metavar="SHARE", help="only decode with these shares of experts replicated on the device"
    )
    options = parser.parse_args()
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = measured(name, options.precision, Path(folder), not options.no_prompts)
            for row in found if options.hot is None else hot_rows(name, options.precision, Path(folder), options.hot):
                rows.append(row)
                print(row, flush=True)
    report.show(rows, options.out, benchmark="offload", precision=options.precision, held=decode.HELD)


if __name__ == "__main__":
    main()
