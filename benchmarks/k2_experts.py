"""The routed experts of a layer of Kimi-K2 in packed formats, beside bf16: random weights, one GPU.

    python benchmarks/k2_experts.py --out k2_experts.json
    python benchmarks/k2_experts.py --formats int4_g32 --rows 1
    python benchmarks/k2_experts.py --small          (few and small experts, on a CPU: does the script work?)

In Kimi's INT4 files only these are packed, and they are nine tenths of a model. The backend is the one that a model takes. Calls
rotate over other choices of 8 of the 384 experts; 64 rows touch three quarters of all."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import report
from ops import timing
from random_models import random_model

from mla_jax import Config
from mla_jax.model.moe import BACKENDS

LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "vocab_size": 4096}
FEW = {"hidden_size": 256, "moe_intermediate_size": 256, "n_routed_experts": 16, "num_experts_per_tok": 4}
SETS, CALLS = 8, 16  # choices of experts, and calls in a program


def measured(config: Config, format: str, counts: list[int]) -> Iterator[dict]:
    model, rng = random_model(config, format), np.random.default_rng(0)
    moe: Any = model.layers[0].mlp
    stacks = tuple(each[...] for each in (moe.experts.gate, moe.experts.up, moe.experts.down))
    number, each = config.n_routed_experts or 0, config.num_experts_per_tok or 0
    of_expert = sum(leaf.nbytes for leaf in jax.tree.leaves(stacks)) / number
    for rows in counts:
        chosen = rng.random((SETS, rows, number)).argsort(-1)[..., :each].astype(np.int32)
        touched = float(np.mean([np.unique(ids).size for ids in chosen]))
        x = jax.random.normal(jax.random.key(rows), (rows, config.hidden_size), model.dtype)
        sets = [(x, ids, jnp.full((rows, each), 1 / each), stacks) for ids in jnp.asarray(chosen)]
        backend = model.dispatch.backend_name(model, rows)
        us = timing.Program(BACKENDS[backend], sets, CALLS).microseconds()
        yield {
            "format": format,
            "rows": rows,
            "backend": backend,
            "experts touched": touched,
            "us": us,
            "GB/s": touched * of_expert / us / 1e3,
        }


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--formats", nargs="+", default=["int4_g32", "Q4_K"], help="of random_models.py")
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--small", action="store_true", help="few and small experts")
    options = parser.parse_args()
    config = Config.preset("kimi_k2", **LAYER, **(FEW if options.small else {}))
    found, us_in_bf16 = [], {}
    for format in ("bf16", *options.formats):
        for row in measured(config, format, options.rows):
            us_in_bf16.setdefault(row["rows"], row["us"])  # bf16 comes first
            found.append(row | {"of bf16": us_in_bf16[row["rows"]] / row["us"]})
            print(found[-1], flush=True)
    report.show(found, options.out, benchmark="k2_experts", small=options.small)


if __name__ == "__main__":
    main()
