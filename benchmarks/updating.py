"""Seconds until other weights are served, of a model with random weights on one device.

    python benchmarks/updating.py --out updating.json
    python benchmarks/updating.py --formats fp8_block --masters float32
    python benchmarks/updating.py --small          (a tiny model, on a CPU: does the script work?)

A trainer's weights, of the dtype `--masters`, are checked, converted, and taken by the programs, as `LLM.update` does while no
request is under way. The first time compiles the conversions. Packed formats are quantised on the host."""

import time

import jax
import report
from flax import nnx
from random_models import random_model

from mla_jax import Config
from mla_jax.decode.model_weights import Weights
from mla_jax.model.trainable import trainable
from mla_jax.weights.masters import as_held, parameters_by_path


def measured(config: Config, format: str, masters: str) -> dict:
    model = random_model(config, format)
    served, parameters = Weights(model), parameters_by_path(model)
    weights = jax.tree.map(lambda w: w.astype(masters), nnx.state(trainable(model), nnx.Param))

    def update() -> tuple[jax.Array, ...]:
        for path, value in as_held(model, weights).items():
            parameters[path].set_raw_value(value)
        assert served.refresh()
        return served.flat

    start = time.perf_counter()
    jax.block_until_ready(update())
    first = time.perf_counter() - start
    size = sum(array.nbytes for array in served.flat)
    return {
        "format": format,
        "masters": masters,
        "GB": size / 1e9,
        "first s": first,
        "s": report.best_seconds(update),
    }


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--config", default="v2_lite", help="a preset")
    parser.add_argument("--formats", nargs="+", default=["bf16"], help="of random_models.py")
    parser.add_argument("--masters", nargs="+", default=["bfloat16", "float32"], help="dtypes")
    parser.add_argument("--small", action="store_true", help="a tiny model")
    options = parser.parse_args()
    config = Config.preset("tiny" if options.small else options.config)
    rows = [measured(config, format, masters) for format in options.formats for masters in options.masters]
    report.show(rows, options.out, benchmark="updating", small=options.small)


if __name__ == "__main__":
    main()
