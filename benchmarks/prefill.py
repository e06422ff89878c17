"""Reading prompts of a V2-Lite-shaped model with random weights, through the engine, until each has its first token.

    python benchmarks/prefill.py --out prefill.json
    python benchmarks/prefill.py --formats bf16 Q4_K --shapes 1x4096 8x2048
    python benchmarks/prefill.py --small            (a tiny model, on a CPU: does the script work?)

TFLOP/s count what prompts need: the matrices of the layers, the experts that are chosen, attention to the tokens before, and the
last token's logits; no padding, and nothing that is computed twice. The rate beside is a matmul of 8,192 x 8,192 x 8,192 in
bf16, measured in the same run."""

import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import report
from drive import Bench, Scale, request
from engine import FULL, SMALL

from mla_jax import Config
from mla_jax.base import roofline
from mla_jax.engine.core.size import Size

SHAPES = ("1x512", "1x4096", "1x16384", "1x65536", "8x2048", "32x1024")
SIZE = Size(rows=64, pages=2048, context=65_600, chunk=4096)
MATMUL = 8192  # of each side


def prompt_flops(config: Config, tokens: int) -> float:
    """FLOPs of one prompt. A query attends to half of the tokens on average."""
    attention = roofline.step_cost(config, "naive", 1, tokens, (tokens + 1) // 2).flops
    expert = 2 * 3 * config.hidden_size * (config.moe_intermediate_size or 0)
    chosen = (config.num_experts_per_tok or 0) + (config.n_shared_experts or 0)
    moe = chosen * expert + 2 * config.hidden_size * (config.n_routed_experts or 0)
    dense = 2 * 3 * config.hidden_size * config.intermediate_size
    layers = sum(moe if config.is_moe(i) else dense for i in range(config.num_hidden_layers))
    return config.num_hidden_layers * attention + tokens * layers + 2 * config.hidden_size * config.vocab_size


def matmul_rate() -> float:
    """FLOP/s."""
    side = MATMUL if report.device().platform == "gpu" else 512
    a, b = (jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    repeats = 10

    @jax.jit
    def products(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, repeats, lambda _, x: (x @ b) * jnp.bfloat16(1 / side), a)

    return repeats * 2 * side**3 / report.best_seconds(lambda: products(a, b))


def seconds_to_read(bench: Bench, rows: int, tokens: int) -> float:
    """The faster of two times, in each of which all prompts come at once and none has been seen before."""
    found = []
    for _ in range(3):
        bench.engine.reset()
        prompts = [bench.prompt(tokens) for _ in range(rows)]
        start = time.perf_counter()
        jobs = [bench.engine.submit(request(prompt, 1)) for prompt in prompts]
        while any(job.times.first is None for job in jobs):
            bench.engine.step()
        found.append(time.perf_counter() - start)
        bench.finish()
    return min(found[1:])  # the first compiles


def measured(format: str, scale: Scale, shapes: list[str], rate: float) -> Iterator[dict]:
    bench = Bench(scale, format)
    for shape in shapes:
        rows, tokens = map(int, shape.split("x"))
        seconds = seconds_to_read(bench, rows, tokens)
        flops = rows * prompt_flops(scale.model, tokens) / seconds
        row = {
            "weights": format,
            "prompts": shape,
            "ms": 1e3 * seconds,
            "tokens/s": round(rows * tokens / seconds),
        }
        yield row | {"TFLOP/s": flops / 1e12, "of the matmul rate": flops / rate}


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8_block", "Q4_K"], help="of the weights")
    parser.add_argument("--shapes", nargs="+", default=[*SHAPES], help="rows x tokens")
    parser.add_argument("--small", action="store_true", help="a tiny model and short prompts")
    options = parser.parse_args()
    scale, shapes = (
        (SMALL, ["1x64", "2x128"]) if options.small else (FULL._replace(size=SIZE), options.shapes)
    )
    rate, rows = matmul_rate(), []
    print(f"matmul: {rate / 1e12:.4g} TFLOP/s", flush=True)
    for format in options.formats:
        for row in measured(format, scale, shapes, rate):
            rows.append(row)
            print(row, flush=True)
    report.show(rows, options.out, benchmark="prefill", small=options.small, matmul=rate)


if __name__ == "__main__":
    main()
