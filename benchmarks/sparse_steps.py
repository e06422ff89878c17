"""A decode step that attends to tokens that an indexer chooses, beside attention to all: V3.2's shape, one GPU.

    python benchmarks/sparse_steps.py --out sparse_steps.json
    python benchmarks/sparse_steps.py --format bf16 --kv-cache fp8 --rows 8
    python benchmarks/sparse_steps.py --small          (a tiny model, on a CPU: does the script work?)

Layers have the widths of DeepSeek-V3.2, random weights, and a dense MLP that is as wide as the nine experts of a token, 18,432.
The vocabulary is small, so that a step is its layers. The dense way has the same layers without indexers. Rows read random
pages, and keys are random, so chosen tokens are all over a row. As in an engine, rows of up to an eighth of the longest have a
program of their own. What is cached takes the step's time less that of a step with one page. The floor is the bytes that must
be read over the bandwidth."""

import dataclasses
from collections.abc import Iterator
from concurrent.futures import wait
from itertools import product
from typing import Any

import report
from kept_steps import Row, Scale, Steps, Way
from random_models import random_model

from mla_jax import Config
from mla_jax.cache.paged import PAGE
from mla_jax.engine.core.size import NARROWER
from mla_jax.mesh.cost import Pass
from mla_jax.model.parts import cost_of

LAYERS, WORDS, POOL = 4, 4096, 8e9  # bytes of each way's pool
OF_V3_2 = {"num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS, "vocab_size": WORDS}
OF_TINY = {
    "model_type": "deepseek_v32",
    "index_topk": 128,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "first_k_dense_replace": 2,
}
FULL = Scale(Config.preset("v3_2", **OF_V3_2), (1, 8), (4_096, 16_384, 65_536, 131_072), POOL)
SMALL = Scale(Config.preset("tiny", **OF_TINY), (1, 2), (256, 2048), 1e7)
WITHOUT_INDEXERS = dict.fromkeys(("index_topk", "index_n_heads", "index_head_dim", "indexer_rope_interleave"))


def started(scale: Scale, format: str, kv_cache: str) -> dict[str, Steps]:
    """Both ways, once all their programs are compiled."""
    dense = dataclasses.replace(scale.config, **WITHOUT_INDEXERS)
    ways = {
        name: Steps(random_model(config, format), Way("latents", kv_cache=kv_cache), scale)
        for name, config in {"dense": dense, "sparse": scale.config}.items()
    }
    lengths = {width_of(scale, held) for held in scale.held}
    wait([steps.start(rows, most) for steps in ways.values() for rows in scale.rows for most in lengths])
    return ways


def width_of(scale: Scale, held: int) -> int:
    """The most cached tokens in the program that takes a row of `held`, of the two programs that an engine would have."""
    widest = max(scale.held)
    return widest if held > widest // NARROWER else widest // NARROWER


def measured(ways: dict[str, Steps], scale: Scale) -> Iterator[Row]:
    layers = scale.config.num_hidden_layers
    for rows, held in product(scale.rows, scale.held):
        most = width_of(scale, held)
        us = {name: us_of_layer(steps, rows, most, held) for name, steps in ways.items()}
        empty = {name: us_of_layer(steps, rows, most, PAGE) for name, steps in ways.items()}
        for name, steps in ways.items():
            cost = cost_of(steps.model)
            yield {
                "way": name,
                "rows": rows,
                "cached tokens": held,
                "us a layer": us[name],
                "floor, us": 1e6 * cost.read_bytes(Pass(rows, 1, held)) / cost.device.bandwidth / layers,
                "for what is cached, us": us[name] - empty[name],
                "index keys, MB": rows * held * cost.parts.index_key / 1e6,
                "of dense": us[name] / us["dense"],
            }


def us_of_layer(steps: Steps, rows: int, most: int, held: int) -> float:
    """Of a step of the program for rows of up to `most` cached tokens."""
    return 1e6 * steps.seconds(rows, steps.width(most), held) / len(steps.model.layers)


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument(
        "--format", default="fp8_block", help="of the weights, as random_models.py makes them"
    )
    parser.add_argument("--kv-cache", default="auto", help="fp8: latents in E4M3")
    parser.add_argument("--rows", nargs="+", type=int)
    parser.add_argument("--held", nargs="+", type=int, help="cached tokens of a row")
    parser.add_argument("--small", action="store_true", help="a tiny model in bf16")
    options = parser.parse_args()
    scale, format = (SMALL, "bf16") if options.small else (FULL, options.format)
    scale = scale._replace(rows=options.rows or scale.rows, held=options.held or scale.held)
    found: list[dict[str, Any]] = []
    for row in measured(started(scale, format, options.kv_cache), scale):
        found.append(row)
        print(row, flush=True)
    about = {"format": format, "kv_cache": options.kv_cache, "small": options.small}
    report.show(found, options.out, benchmark="sparse_steps", **about)


if __name__ == "__main__":
    main()
