"""Decoding and prompt processing with the routed experts on the CPU: measured, and predicted from the host's rates.

    python -m cpu_experts.build && python benchmarks/offload.py --out offload.json

The models are V2-Lite's shape and some layers of V3's, with random weights: a few random experts of each layer are packed, and
repeated under different numbers, so that each has memory of its own. `waited` computes the shared experts after the routed ones
instead of concurrently; the difference is the gain of overlapping. Deferred experts are added one layer later, which changes
the sums, so rows then decode other tokens, and no time is predicted. Tokens are sampled, because greedy ones soon repeat, and
their experts with them. `touched` is the number of experts per layer that a timed step read from the host, `expected` the number
in the prediction. Lines with ok and FAIL report checks.

`--replicas 0 0.25 0.5` decodes with a router that prefers some experts of each layer by Zipf's law, with these shares of all
experts replicated on the device: the ones that a previous run chose most often."""

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
from random_models import random_model

from cpu_experts import Experts, ffi, packed
from mla_jax import Config, Transformer
from mla_jax.cache import paged
from mla_jax.decode.loop import Programs
from mla_jax.mesh.cost import MeshCost, Pass
from mla_jax.mesh.host_cost import OnHost, Routed
from mla_jax.model import kernels, parts
from mla_jax.model.moe import ExpertPlan, MoE, Router, rule_of
from mla_jax.offload import calibrate
from mla_jax.offload.experts import HostExperts
from mla_jax.offload.place import most_chosen
from mla_jax.offload.replicated import replicate

PACKED = 4  # random experts of a layer, repeated
STEPS = 16
SHAPES = {  # config, and the steps' rows, deferred experts, tokens of prompts
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
    """Nothing is concurrent: the shared experts come after the routed ones."""

    def __call__(
        self,
        x: jax.Array,
        topk_ids: jax.Array,
        topk_weights: jax.Array,
        plan: ExpertPlan,
        concurrent: Callable,
    ) -> tuple:
        ticket = ffi.submit(self.layer, x, topk_ids, topk_weights)
        y = ffi.collect(ticket)
        return y, concurrent(jnp.where(jnp.isnan(y), y, ticket.x)), None  # only data orders kernels


class Skewed(Router):
    """The expert of rank n is e to the minus log n less likely; ranks are another order in each layer."""

    def __init__(self, router: Router, seed: int):
        self.config, self.weight = router.config, router.weight
        ranks = np.random.default_rng(seed).permutation(router.config.n_routed_experts or 0) + 1
        self.tilt = nnx.Variable(jnp.asarray(-np.log(ranks), jnp.float32))

    def __call__(self, x: jax.Array, some: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        rule = rule_of(self.config) | {"scoring_func": "softmax", "n_group": 1, "topk_group": 1}
        return kernels.router(self.logits(x) + self.tilt[...], None, some, **rule)


def layers(config: Config, precision: str, folder: Path) -> Iterator[tuple[int, Experts]]:
    """Each layer's experts, mapped from a file of its own."""
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
        (folder / "one").unlink()  # its memory stays as long as it is mapped


def touch(layer: Experts, chosen: int) -> None:
    """Reads all experts once: a page of a mapped file costs more at its first use."""
    ids = np.resize(np.arange(layer.experts, dtype=np.int32), (-(-layer.experts // chosen), chosen))
    layer.forward(np.ones((len(ids), layer.model), np.float32), ids, np.ones(ids.shape, np.float32))


class Timed(NamedTuple):
    """The fastest run of STEPS steps: seconds of one, the state before, the tokens chosen, and whether all logits were finite."""

    seconds: float
    before: decode.Sequences
    tokens: np.ndarray
    finite: bool


def timed_steps(found: decode.Sequences) -> Timed:
    jax.block_until_ready(found.run(1))
    runs = []
    for _ in range(3):
        before, start = found.copy(), time.perf_counter()
        said, end = jax.block_until_ready(found.run(STEPS)), time.perf_counter()
        chosen = said.tokens()
        runs.append(Timed((end - start) / STEPS, before, chosen.tokens[:, :STEPS], bool(chosen.finite.all())))
    found.programs.check()
    return min(runs, key=lambda run: run.seconds)._replace(finite=all(run.finite for run in runs))


def touched(timed: Timed, replicated: np.ndarray) -> float:
    """Experts per layer without a replica ([L X]) that a step chose on average, from the same steps with the same tokens."""
    pool, at, table, found = timed.before.pool, timed.before.at, timed.before.page_table, []
    rows = dataclasses.replace(timed.before.rows, load=jnp.zeros(replicated.shape, jnp.int32))
    for i in range(STEPS):
        load = np.array(rows.load)
        pool, rows, _ = timed.before.programs.prefill(
            pool, rows, at, timed.tokens[:, i], np.ones_like(at), table
        )
        found.append(((np.asarray(rows.load) > load) & ~replicated).sum(1).mean())
    return float(np.mean(found))


def varied(programs: Programs, rows: int) -> decode.Sequences:
    """Tokens are drawn, by a seed of each row's own."""
    return decode.sequences(programs, rows, temperature=1.0)


def chosen(model: Transformer, rows: int = 16) -> np.ndarray:
    """How likely a token is to choose each expert of each layer, by some steps."""
    found = varied(Programs(model, counts=True), rows)
    found.run(2 * STEPS)
    assert found.rows.load is not None
    counts = np.asarray(found.rows.load, float)
    return (model.config.num_experts_per_tok or 1) * counts / counts.sum(1, keepdims=True)


def expert_bytes(layer: Experts) -> float:
    return layer.nbytes / layer.experts


def on_host(model: Transformer, rates: calibrate.HostRates, routed: Routed | None = None) -> OnHost:
    """The prediction's inputs for a model's layers on the host; without `routed` all experts are equally likely."""
    layers = [*model.on_host().values()]
    return OnHost(rates, len(layers), expert_bytes(layers[0]), routed or Routed.evenly(model.config))


def cost(model: Transformer, host: OnHost, stream: int = 0) -> MeshCost:
    """The cost model, with the layers of `host` there."""
    released = parts.released(model.config, model.dispatch.device, packed=False)
    return dataclasses.replace(parts.cost_of(released), on_host=host, stream=stream)


def replicated_rows(name: str, precision: str, folder: Path, shares: list[float]) -> Iterator[dict]:
    config, batches, *_ = SHAPES[name]
    model = random_model(config, on_host=dict(layers(config, precision, folder)))
    for seed, mlp in enumerate(mixed(model)):
        mlp.router = Skewed(mlp.router, seed)
    likely, rates = chosen(model), calibrate.host(precision)
    for share in shares:
        found = most_chosen(likely, [1] * len(likely), share * likely.size)
        for mlp, row in zip(mixed(model), found, strict=True):
            ids, layer = np.flatnonzero(row).tolist(), mlp.experts.layer
            mlp.experts = HostExperts(
                layer, replicate(layer, ids, model.dtype, jax.devices()[0]) if ids else None
            )
        routed = Routed(likely, found)
        about = {"replicas": int(found.sum()), "of the choices %": 100 * (1 - routed.host_share)}
        for rows in batches:
            yield decoded(f"{name}, skewed", model, rows, 0, on_host(model, rates, routed)) | about


def decoded(name: str, model: Transformer, rows: int, defer: int, host: OnHost) -> dict:
    """One row of the table: a decode step of some rows."""
    model.dispatch = dataclasses.replace(model.dispatch, defer=defer, stream=0)
    config, timed = model.config, timed_steps(varied(Programs(model), rows))
    print(
        f"{'ok' if timed.finite else 'FAIL'}: {name}, {rows} rows, {defer} deferred: logits are finite",
        flush=True,
    )
    seconds = timed.seconds
    replicated = np.broadcast_to(host.routed.replicated, (host.layers, config.n_routed_experts or 0))
    row = {
        "model": name,
        "rows": rows,
        "new": 1,
        "defer": defer,
        "ms": seconds * 1e3,
        "tokens/s": rows / seconds,
    }
    if not defer:
        predicted = cost(model, host).decode(rows, decode.HELD).seconds
        row |= {"predicted tokens/s": rows / predicted, "measured / predicted": predicted / seconds}
    return row | {"touched": touched(timed, replicated), "expected": host.routed.touched(rows)[0]}


def read(name: str, model: Transformer, tokens: int, stream: int, host: OnHost) -> dict:
    """One row of the table: a prompt, whose experts are streamed with `stream` tokens or more, 0 for never."""
    model.dispatch = dataclasses.replace(model.dispatch, defer=0, stream=stream)
    programs, table = Programs(model), np.asarray(paged.in_order(1, tokens))
    # random tokens: equal ones would all choose the same experts
    prompt = np.random.default_rng(0).integers(0, model.config.vocab_size, tokens, np.int32)
    first, count = np.zeros(1, np.int32), np.full(1, tokens, np.int32)

    def run() -> tuple:
        return programs.prefill(*programs.new(1, table.size), first, prompt, count, table)

    seconds = report.best_seconds(run, 2)
    programs.check()
    predicted = cost(model, host, stream).predicted(Pass(1, tokens, tokens)).seconds
    row = {"model": name + (", streamed" if stream else ""), "rows": 1, "new": tokens, "ms": seconds * 1e3}
    row |= {"tokens/s": tokens / seconds, "predicted tokens/s": tokens / predicted}
    return row | {"measured / predicted": predicted / seconds}


def mixed(model: Transformer) -> list[MoE]:
    return [block.mlp for block in model.layers if isinstance(block.mlp, MoE)]


def measured(name: str, precision: str, folder: Path, prompts: bool) -> Iterator[dict]:
    config, batches, defers, lengths = SHAPES[name]
    start = time.perf_counter()
    packed_layers = dict(layers(config, precision, folder))
    model = random_model(config, on_host=packed_layers)
    print(
        f"{name}: {len(packed_layers)} layers of experts in {precision}, made in {time.perf_counter() - start:.0f} s",
        flush=True,
    )
    host = on_host(model, calibrate.host(precision))
    print(host.rates, flush=True)
    for rows in batches:
        for defer in defers:
            yield decoded(name, model, rows, defer, host)
    for mlp in mixed(model):
        mlp.experts = Waited(mlp.experts.layer)
    for rows in batches:
        yield decoded(name + ", waited", model, rows, 0, host)
    for mlp in mixed(model):
        mlp.experts = HostExperts(mlp.experts.layer)
    for tokens, stream in itertools.product(lengths if prompts else (), (0, 1)):
        yield read(name, model, tokens, stream, host)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["v2_lite", "v3 slice"])
    parser.add_argument("--precision", default="int8", help="of the experts, as cpu_experts names it")
    parser.add_argument(
        "--folder", type=Path, default=Path("/dev/shm"), help="whose files are memory, for the packed experts"
    )
    parser.add_argument("--no-prompts", action="store_true", help="decoding alone")
    parser.add_argument(
        "--replicas",
        nargs="+",
        type=float,
        metavar="SHARE",
        help="only decoding with replicas of such shares of all experts",
    )
    options = parser.parse_args()
    rows = []
    for name in options.models:
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            about = name, options.precision, Path(folder)
            decoding_only = options.replicas is not None
            found = (
                replicated_rows(*about, options.replicas)
                if decoding_only
                else measured(*about, not options.no_prompts)
            )
            for row in found:
                rows.append(row)
                print(row, flush=True)
    report.show(rows, options.out, benchmark="offload", precision=options.precision, held=decode.HELD)


if __name__ == "__main__":
    main()
