"""Is "auto" the fastest form of attention? Passes of V2-Lite-shaped layers over new and held tokens, in each form, side by side.

    python benchmarks/forms.py --out forms.json          (two layers; float32 on a CPU, else bf16)
    python benchmarks/forms.py --small

A pass reads a line of one prompt, or decodes rows, all of which hold as many tokens. Page tables are as wide as a context of
CONTEXT tokens needs. Forms take turns, and each time is the least of REPEATS."""

import dataclasses
import itertools
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import report
from flax import nnx
from random_models import numbers

from mla_jax import Config, Transformer
from mla_jax.cache import paged
from mla_jax.decode.loop import Programs
from mla_jax.decode.rows import ADMITTED, default_entries
from mla_jax.model.dispatch import Dispatch

FORMS = ("auto", "compressed", "absorbed", "move_elided")  # those that may take turns over one cache
CONTEXT, REPEATS = 8192, 3


class Scale(NamedTuple):
    config: Config
    lines: tuple[int, ...]  # new tokens of one prompt
    rows: tuple[int, ...]  # that decode a token each
    held: tuple[int, ...]


FULL = Scale(
    Config.preset("v2_lite", num_hidden_layers=2, n_routed_experts=8, vocab_size=4096),
    lines=(16, 64, 512),
    rows=(1, 8),
    held=(0, 64, 256, 1024, 4096, 7600),
)
SMALL = Scale(Config.preset("tiny", num_hidden_layers=2), lines=(16,), rows=(1,), held=(0, 200))


class Model:
    """The programs of one form."""

    def __init__(self, config: Config, form: str, dtype: jnp.dtype):
        dispatch = Dispatch(form, device=report.device())
        graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, nnx.Rngs(0), dispatch=dispatch)))
        for seed, (_, variable) in enumerate(nnx.to_flat_state(state)):
            variable.set_value(numbers(variable.shape, dtype, seed))
        self.programs = Programs(nnx.merge(graph, state))

    def timed(self, line: int, rows: int, held: int) -> float:
        """Seconds of a pass that reads a line of one row, or has all rows choose a token."""
        table = paged.in_order(rows, CONTEXT)
        pool, state = self.programs.new(rows, table.size)
        counts = {"held": held, "prompt": held + line, "limit": CONTEXT}
        filled = {name: np.full(ADMITTED, count, np.int32) for name, count in counts.items()}
        admitted = dataclasses.replace(default_entries(ADMITTED), **filled)
        state = self.programs.admit(state, np.arange(ADMITTED, dtype=np.int32), admitted)
        at = np.arange(rows, dtype=np.int32)
        tokens, counts = np.full(line, 5, np.int32), np.array([line], np.int32)
        start = time.perf_counter()
        if line:
            found = self.programs.prefill(pool, state, at[:1], tokens, counts, np.asarray(table[:1]), None)
        else:
            found = self.programs.run(pool, state, at, np.asarray(table), np.int32(1))
        jax.block_until_ready(found)
        return time.perf_counter() - start


def main() -> None:
    parser = report.arguments(__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model")
    options = parser.parse_args()
    scale = SMALL if options.small else FULL
    dtype = jnp.dtype("float32" if jax.default_backend() == "cpu" else "bfloat16")
    models = {form: Model(scale.config, form, dtype) for form in FORMS}
    passes = [(line, 1) for line in scale.lines] + [(0, rows) for rows in scale.rows]
    rows = []
    for (line, count), held in itertools.product(passes, scale.held):
        times = {form: [] for form in FORMS}
        for _, form in itertools.product(range(REPEATS + 1), FORMS):
            times[form].append(models[form].timed(line, count, held))
        best = {form: 1e3 * min(found[1:]) for form, found in times.items()}
        fastest = min(FORMS[1:], key=best.__getitem__)
        row = {"new": line or 1, "rows": count, "held": held} | {
            f"{form}, ms": ms for form, ms in best.items()
        }
        rows.append(row | {"fastest": fastest, "auto / fastest": best["auto"] / best[fastest]})
        print(rows[-1], flush=True)
    report.show(rows, options.out, benchmark="forms", small=options.small)


if __name__ == "__main__":
    main()
