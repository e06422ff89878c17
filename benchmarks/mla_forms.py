"""The four forms of MLA and the fused kernel: a decode step of a DeepSeek-V2 attention layer with its projections, bf16, jitted.

    python benchmarks/mla_forms.py --out mla_forms.json

Steps run in one program, compiled with the options of the library's decode loop, over one donated pool of random data. Every
lap writes the same free slots. `bar` is the time in ms of deepseekv2-profile's eager torch on an H200 in the same form; for the
kernel it is the time of torch's fastest form."""

import functools

import jax
import jax.numpy as jnp
import report
from flax import nnx

from mla_jax import Config
from mla_jax.base import roofline
from mla_jax.base.batch import Batch
from mla_jax.cache import paged
from mla_jax.decode.loop import LOOP_OPTIONS
from mla_jax.model import dispatch, rope
from mla_jax.model.mla import FORMS, MLA

SHAPES = [(1, held) for held in (512, 4096, 16384, 65536, 131072)] + [
    (32, held) for held in (512, 2048, 8192, 32768)
]
# (rows, held): ms of naive, compressed, absorbed, move-elided; None where the peer ran out of memory
BARS = {
    (1, 4096): (0.491, 0.943, 1.492, 0.632),
    (1, 16384): (0.739, 2.520, 3.865, 0.995),
    (1, 65536): (1.686, 8.884, 14.62, 2.439),
    (1, 131072): (3.385, 17.35, 28.63, 5.012),
    (32, 512): (0.738, 3.303, 3.949, 9.270),
    (32, 2048): (1.680, 11.99, 14.39, 33.6),
    (32, 8192): (6.021, 47.69, 47.29, 128.5),
    (32, 32768): (21.76, None, None, 547.0),
}


NAMES = (*FORMS, "kernel_latents")


def bar_of(rows: int, held: int, name: str) -> float | None:
    bars = dict(zip(FORMS, BARS.get((rows, held), (None,) * len(FORMS)), strict=True))
    return bars[name] if name in bars else min((bar for bar in bars.values() if bar), default=None)


def random_pool(config: Config, form: str, pages: int) -> paged.Pool:
    """One layer's pool with random tokens in all slots."""
    up = tuple(
        jax.ShapeDtypeStruct((config.num_attention_heads, n, config.kv_lora_rank), jnp.bfloat16)
        for n in (128, 128)
    )
    remembers = dispatch.form_named(form).remembers
    one = [
        jax.ShapeDtypeStruct((1, 1, n), jnp.bfloat16) for n in (config.kv_lora_rank, config.qk_rope_head_dim)
    ]
    pool = jax.eval_shape(lambda: paged.init(jax.eval_shape(remembers, *one, up), 1, pages))
    fill = jax.jit(
        lambda key: {name: jax.random.uniform(key, a.shape, a.dtype, -1, 1) for name, a in pool.items()}
    )
    return fill(jax.random.key(1))


def measure(config: Config, weights, graph, form: str, rows: int, slots: int) -> dict:
    on = report.device()
    cost = roofline.step_cost(config, form, rows, 1, slots)
    steps = max(4, min(64, int(0.05 / cost.seconds(on) / 4)))
    laps = max(1, int(0.25 / cost.seconds(on) / 4 / steps))  # enough that the program's start does not matter
    run = laps_of(config, graph, form, rows, slots, steps, laps)
    x = jnp.ones((rows, 1, config.hidden_size), jnp.bfloat16)
    holder = [random_pool(config, form, rows * slots // paged.PAGE)]
    compiled = run.lower(weights, holder[0], x).compile()

    def once():
        y, pool = compiled(weights, holder.pop(), x)
        holder.append(pool)
        return y

    ms = report.best_seconds(once) / (laps * steps) * 1e3
    bar = bar_of(rows, slots, form)
    return {
        "rows": rows,
        "held": slots,
        "form": form,
        "ms": ms,
        "bar": bar,
        "times faster": bar / ms if bar else None,
        "GB": cost.bytes / 1e9,
        "GFLOP": cost.flops / 1e9,
        "of bandwidth %": 100 * cost.bytes / on.bandwidth / ms * 1e3,
        "of arithmetic %": 100 * cost.flops / on.flops / ms * 1e3,
        "floor ms": cost.seconds(on) * 1e3,
        "temporaries MB": compiled.memory_analysis().temp_size_in_bytes / 1e6,
    }


def laps_of(config: Config, graph, form: str, rows: int, slots: int, steps: int, laps: int):
    """The jitted `(weights, pool, x) -> (y, pool)` of `laps` times the last `steps` of `slots` tokens."""
    taken, options = dispatch.form_named(form), LOOP_OPTIONS.get(jax.default_backend())
    block = roofline.block_slots(config, jax.default_backend(), rows, 1, 2)

    @functools.partial(jax.jit, donate_argnums=1, compiler_options=options)
    def run(weights, pool, x):
        table = paged.in_order(rows, slots)

        def one(step, carry):
            x, pool = carry
            batch = Batch.after(jnp.full(rows, slots - steps + step), jnp.ones((rows, 1), bool), table)
            shared, turns = taken.prepare(batch, pool, config, block), rope.turns(batch.positions, config)
            x, layer = nnx.merge(graph, weights)(x, paged.Layer(pool, jnp.int32(0)), taken, shared, turns)
            return x, layer.pool

        return jax.lax.fori_loop(0, laps, lambda _, carry: jax.lax.fori_loop(0, steps, one, carry), (x, pool))

    return run


def main():
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--forms", nargs="+", choices=NAMES, default=NAMES, metavar="FORM", help=", ".join(NAMES)
    )
    options = parser.parse_args()
    config = Config.preset("v2")
    graph, abstract = nnx.split(nnx.eval_shape(lambda: MLA(config, nnx.Rngs(0))))
    make = jax.jit(
        lambda key: jax.tree.map(lambda w: 0.02 * jax.random.normal(key, w.shape, jnp.bfloat16), abstract)
    )
    weights, rows = make(jax.random.key(0)), []
    for batch, held in SHAPES:
        for form in options.forms:
            try:
                rows.append(measure(config, weights, graph, form, batch, held))
            except Exception as e:
                if "RESOURCE_EXHAUSTED" not in str(e):
                    raise
                rows.append({"rows": batch, "held": held, "form": form, "ms": "out of memory"})
            print({k: rows[-1][k] for k in ("rows", "held", "form", "ms")}, flush=True)
    report.show(
        rows, options.out, benchmark="mla_forms", layer="DeepSeek-V2 attention, bf16, one decode step"
    )


if __name__ == "__main__":
    main()
