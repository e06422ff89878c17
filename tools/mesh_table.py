"""Prints the table of docs/meshes.md: what eight devices of several kinds would hold and reach, all of it predicted.

python tools/mesh_table.py            # to the screen
python tools/mesh_table.py --write    # into docs/meshes.md, between its markers"""

import functools
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path

from mla_jax.base.axes import DATA, shown_mesh
from mla_jax.base.config import Config
from mla_jax.base.link_rates import PLANNED, Planned
from mla_jax.mesh.cost import HELD, PREDICTED_ROWS, about
from mla_jax.model import kernels
from mla_jax.model.parts import cost_of, released
from mla_jax.weights.auto_mesh import choose_mesh
from mla_jax.weights.temporaries import tokens_that_fit

PAGE = Path(__file__).resolve().parents[1] / "docs" / "meshes.md"
START, END = "<!-- what follows is printed by tools/mesh_table.py -->", "<!-- end of what is printed -->"
COUNT = 8
SHARE = 0.9  # of a device's memory, as --memory-fraction
MODELS = {"DeepSeek-V2-Lite (bf16)": "v2_lite", "DeepSeek-V3, R1 (FP8)": "v3", "Kimi-K2 (FP8)": "kimi_k2"}
KINDS = ("h100", "h200", "b200", "v5p", "v6e")
HEADER = (
    "model",
    f"{COUNT} of",
    "mesh",
    "weights of a device",
    "tokens of cache",
    "decode",
    "prompts",
    "messages",
)


@functools.cache
def rows() -> tuple[tuple[str, ...], ...]:
    """The lines of the table, cell by cell; R1 has the sizes of V3."""
    cases = itertools.product(MODELS.items(), (PLANNED[kind] for kind in KINDS))
    return tuple(
        (model, kind.figures.name, *cells(Config.preset(preset), kind)) for (model, preset), kind in cases
    )


def cells(config: Config, kind: Planned) -> tuple[str, ...]:
    """The mesh that "auto" takes and its predicted rates, or why none would do."""
    available, room, needed = SHARE * kind.memory, {}, PREDICTED_ROWS * HELD

    def fits(sizes: Mapping[str, int]) -> bool:
        model = released(config, kind.figures, sizes)
        room[shown_mesh(sizes)] = tokens_that_fit(model, available, PREDICTED_ROWS), model
        return room[shown_mesh(sizes)][0] >= needed

    with kernels.as_if_on(kind.kind, kind.figures.platform, kind.capability):
        sizes, _ = choose_mesh(config, COUNT, fits)
        tokens, model = room[shown_mesh(sizes)]
        cost = cost_of(model)
    weights = _gb(cost.parts.weight_bytes)
    if not tokens:
        return shown_mesh(sizes), weights, f"does not fit: {_gb(available)} there", "", "", ""
    if tokens < needed:
        return shown_mesh(sizes), weights, f"does not fit: room for {about(tokens)} tokens", "", "", ""
    decode, prompts = cost.decode(), cost.prompts()
    reached = about(decode.tokens), about(prompts.tokens), f"{decode.share:.0%}"
    return shown_mesh(sizes), weights, about(tokens * cost.of(DATA)), *reached


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"


def table() -> str:
    """All of it; figures to the right."""
    lines = [HEADER, ("---", "---", "---", "--:", "--:", "--:", "--:", "--:"), *rows()]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def written(page: str) -> str:
    """The page with the table in it."""
    before, rest = page.split(START)
    return f"{before}{START}\n\n{table()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(written(PAGE.read_text()))
    else:
        print(
            f"Predicted for {PREDICTED_ROWS} rows of each data shard that hold {HELD:,} tokens each.\n\n{table()}"
        )
