"""A model on the meshes of the GPUs that are here: prompts and decoding through the engine, V2-Lite's shape, random bf16 weights.

    python benchmarks/meshes.py --out meshes.json
    python benchmarks/meshes.py --meshes data=1 data=2 tensor=2 --rows 64 256
    python benchmarks/meshes.py --small                    (a tiny model on simulated CPU devices: does the script work?)

All rows have prompts of one length, and outputs of one length. "prompts" are tokens a second until each row has its first token,
"decode" those of the same requests once more, whose prompts are in the cache. Both are of all devices together, and nothing is
compiled meanwhile. "predicted" is what base/mesh_cost.py says of the same mesh and rows. "times" compares with the first mesh."""

import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import report
from flax import nnx
from jax.sharding import NamedSharding

from mla_jax import Config, SamplingParams, Transformer
from mla_jax.base.axes import MESH_AXES, parse_mesh
from mla_jax.base.devices import Devices
from mla_jax.base.mesh_cost import MeshCost
from mla_jax.cache.paged import PAGE
from mla_jax.decode.loop import Programs
from mla_jax.engine.engine import Engine
from mla_jax.engine.request import Request
from mla_jax.engine.size import Size
from mla_jax.model import layout
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.layout import Layout
from mla_jax.model.ops import Shapes

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "n_routed_experts": 16,
    "vocab_size": 1024,
    "kv_lora_rank": 64,
}


def random_model(config: Config, mesh: str, exchange: str) -> Transformer:
    """Random bf16 weights, of which each device makes its own part."""
    devices = Devices.of(parse_mesh(mesh), report.device())
    plan = Layout(*(devices.sizes[axis] for axis in MESH_AXES))
    dispatch = Dispatch(device=report.device(), layout=plan, exchange=exchange)
    graph, state = nnx.split(Transformer(config, Shapes(), dispatch=dispatch))
    keys = iter(jax.random.split(jax.random.key(0), len(nnx.to_flat_state(state))))

    def filled(words: tuple[str, ...], value: jax.ShapeDtypeStruct) -> jax.Array:
        sharding = NamedSharding(devices.mesh, plan.specs(words, value))
        return random(value.shape, sharding)(next(keys))

    return nnx.merge(graph, layout.of_parameters(state, filled))


@functools.cache
def random(shape: tuple[int, ...], sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """Makes weights of this shape; norms are around 1."""
    mean = float(len(shape) == 1)
    return jax.jit(lambda key: mean + 0.02 * jax.random.normal(key, shape, jnp.bfloat16), out_shardings=sharding)


def serve(engine: Engine, prompts: list[list[int]], output: int) -> float:
    """Seconds until all have their answers."""
    params = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, max_tokens=output, seed=0)
    start = time.perf_counter()
    jobs = [engine.submit(Request(prompt, params, ())) for prompt in prompts]
    while not all(job.done for job in jobs):
        engine.step()
    return time.perf_counter() - start


def measure(model: Transformer, mesh: str, rows: int, prompt: int, output: int) -> dict:
    config = model.config
    programs, shards = Programs(model), parse_mesh(mesh).get("data", 1)
    each = -(-rows // shards)
    pages = each * -(-(prompt + 1 + output) // PAGE)
    engine = Engine(programs, config, None, Size(each, pages, prompt + 1 + output, model.dispatch.chunk(model)), 0)
    start, rng = time.perf_counter(), np.random.default_rng(0)
    engine.warm_up()
    compiling = time.perf_counter() - start
    first, second = rng.integers(2, config.vocab_size, (2, rows, prompt + 1)).tolist()
    serve(engine, first, output)
    reading, decoding = serve(engine, second, 1), serve(engine, second, output)  # which finds its prompts in the cache
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    return {
        "mesh": mesh,
        "rows": rows,
        "weights a device, GiB": held / 2**30,
        "prompts, tokens/s": rows * prompt / reading,
        "decode, tokens/s": rows * output / decoding,
        "ms a step": decoding / output * 1e3,
        "compile, s": compiling,
    }


def predicted(config: Config, mesh: str, rows: int, held: int) -> float:
    """Tokens a second of decoding."""
    sizes = dict.fromkeys(MESH_AXES, 1) | parse_mesh(mesh)
    return MeshCost(config, sizes, report.device()).decode(-(-rows // sizes["data"]), held).tokens


def main() -> None:
    parser = report.arguments((__doc__ or "").splitlines()[0])
    parser.add_argument("--meshes", nargs="+", default=None, help="the first is compared with")
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each row's prompt")
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--exchange", default="auto", help="gather, all_to_all or auto")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    if options.small:
        jax.config.update("jax_num_cpu_devices", 8)
        options.prompt, options.output = 64, 16
    config = Config.preset("v2_lite", **(SMALL if options.small else {}))
    count = len(jax.devices())
    meshes = options.meshes or ["data=1", f"data={count}", f"tensor={count}", f"context={count}"]
    rows, first = [], {}
    for mesh in meshes:
        model = random_model(config, mesh, options.exchange)
        for number in options.rows:
            found = measure(model, mesh, number, options.prompt, options.output)
            before = first.setdefault(number, found)
            found["times"] = found["decode, tokens/s"] / before["decode, tokens/s"]
            found["predicted tokens/s"] = predicted(config, mesh, number, options.prompt + options.output // 2)
            rows.append(found)
            print(found, flush=True)
    report.show(rows, options.out, prompt=options.prompt, output=options.output, exchange=options.exchange)


if __name__ == "__main__":
    main()
