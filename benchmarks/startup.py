"""How long a start takes, phase by phase: of the demo model, with nothing cached and then with all cached, and of 61 layers.

    python benchmarks/startup.py --out startup.json

A start is a process of its own, with a home of its own for the caches. Seconds are wall time, except `CPU s`, the processor time
of that process until its second piece of text. `compile s` is the sum over the programs, which are compiled concurrently. The
model of 61 layers has V3's structure and tiny widths; its weights are constants."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

PROMPT = "def fibonacci(n):"
LAYERS = 61
TRACING = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration")
COMPILING = "backend_compile_duration"


class Compiler:
    """JAX's events of tracing, lowering and compiling; tracing within a function is part of it."""

    def __init__(self, jax):
        self.traced: list[tuple[float, float]] = []
        self.compiled: list[float] = []
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, seconds: float, **_) -> None:
        name, end = event.rsplit("/", 1)[-1], time.perf_counter()
        if name in TRACING:
            while self.traced and self.traced[-1][0] >= end - seconds:
                self.traced.pop()
            self.traced.append((end - seconds, end))
        if name == COMPILING:
            self.compiled.append(seconds)

    def figures(self) -> dict[str, float]:
        return {
            "trace + lower s": sum(end - start for start, end in self.traced),
            "compile s": sum(self.compiled),
        }


def demo() -> dict:
    """One start of the demo model up to its second piece of text, in this process."""
    start = time.perf_counter()
    import jax

    from mla_jax.base.options import SamplingParams
    from mla_jax.engine.llm import LLM

    jax.devices()
    imported, opened, compiler = time.perf_counter(), [], Compiler(jax)
    llm = LLM(progress=lambda done, total: opened.append(time.perf_counter()))
    loaded = time.perf_counter()
    stream = llm.stream(PROMPT, SamplingParams(seed=1, temperature=0.0))
    chunks = [next(stream)]
    first = time.perf_counter()
    chunks.append(next(stream))
    used = os.times()
    return {
        "import s": imported - start,
        "open s": opened[0] - imported,
        "load s": loaded - opened[0],
        **compiler.figures(),
        "first text s": first - loaded,
        "start to second text s": time.perf_counter() - start,
        "CPU s": used.user + used.system,
        "tokens": [token for chunk in chunks for token in chunk.token_ids],
    }


def many_layers() -> dict:
    """Tracing, lowering and compiling the programs of one request for a model of many layers, and running them once."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import report
    from flax import nnx

    from mla_jax.base.config import Config
    from mla_jax.decode.loop import Programs, ProgramShape
    from mla_jax.decode.rows import ADMITTED, default_entries
    from mla_jax.model.dispatch import Dispatch
    from mla_jax.model.ops import Shapes
    from mla_jax.model.transformer import Transformer

    sizes = {
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_attention_heads": 4,
    }
    ranks = {
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 32,
    }
    experts = {
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "num_key_value_heads": 4,
    }
    config = Config.preset("v3", vocab_size=1024, num_hidden_layers=LAYERS, **sizes, **ranks, **experts)
    graph, state = nnx.split(Transformer(config, Shapes(), dispatch=Dispatch(device=report.device())))
    dtype = jnp.float32 if report.device().platform == "cpu" else jnp.bfloat16
    programs = Programs(nnx.merge(graph, jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, dtype), state)))
    pool, rows = programs.new(1, 8)
    at, table = np.zeros(1, np.int32), np.arange(8, dtype=np.int32)[None]
    entry, tokens = default_entries(ADMITTED), np.zeros(16, np.int32)
    entry = dataclasses.replace(entry, limit=entry.limit + 256)
    first = np.resize(np.int32([0, *[1] * (ADMITTED - 1)]), ADMITTED)  # the others are past the table
    start, cpu, compiler = time.perf_counter(), time.process_time(), Compiler(jax)
    programs.admit.lower(rows, first, entry)
    programs.prefill.lower(pool, rows, at, tokens, at + 16, table, None)
    programs.run.lower(pool, rows, at, table, np.int32(8))
    lowered = {
        "trace + lower s": time.perf_counter() - start,
        "trace + lower CPU s": time.process_time() - cpu,
    }
    compiler.compiled.clear()
    start = time.perf_counter()
    shapes = [
        ProgramShape("run", 8, 1),
        ProgramShape("prefill", 8, line=16, pieces=1),
        ProgramShape("admit", rows=ADMITTED),
    ]
    programs.prepare(pool, rows, shapes)
    compiled = {"compile s": sum(compiler.compiled), "compile wall s": time.perf_counter() - start}
    start = time.perf_counter()
    pool, rows, _ = programs.prefill(
        pool, programs.admit(rows, first, entry), at, tokens, at + 16, table, None
    )
    jax.block_until_ready(programs.run(pool, rows, at, table, np.int32(1)))
    return {**lowered, **compiled, "first text s": time.perf_counter() - start}


STARTS: dict[str, Callable[[], dict]] = {"demo": demo, "layers": many_layers}


def started(name: str, home: str) -> dict:
    """The figures of one start in a process whose caches are in `home`."""
    command = [sys.executable, __file__, "--start", name]
    environment = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(
        command, env={**environment, "HOME": home}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    import report

    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--start", choices=STARTS, help="measure this in the present process and print the figures as JSON"
    )
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps(STARTS[arguments.start]()))
        return
    with tempfile.TemporaryDirectory() as home:
        rows = [
            {"start": f"demo, {caches}", **started("demo", home)}
            for caches in ("nothing cached", "all cached")
        ]
        rows.append({"start": f"{LAYERS} layers, nothing cached", **started("layers", home)})
    cold, warm = (row.pop("tokens") for row in rows[:2])
    if cold != warm:
        raise SystemExit(f"stored programs chose other tokens: {warm} instead of {cold}")
    report.show(rows, arguments.out)


if __name__ == "__main__":
    main()
