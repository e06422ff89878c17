"""Prints the table of docs/meshes.md: what eight devices of several kinds would hold and reach, all of it predicted.

python tools/mesh_table.py            # to the screen
python tools/mesh_table.py --write    # into docs/meshes.md, between its markers"""

import sys
from collections.abc import Iterator
from pathlib import Path

from mla_jax.base.axes import shown_mesh
from mla_jax.base.config import Config
from mla_jax.base.link_rates import PLANNED, Planned
from mla_jax.mesh.cost import HELD, PREDICTED_ROWS, MeshCost, about, meshes, packed, preferred

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


def rows() -> Iterator[tuple[str, ...]]:
    """The lines of the table, cell by cell; R1 has the sizes of V3."""
    for model, preset in MODELS.items():
        for kind in KINDS:
            yield model, PLANNED[kind].figures.name, *cells(Config.preset(preset), PLANNED[kind])


def cells(config: Config, kind: Planned) -> tuple[str, ...]:
    """The mesh that "auto" prefers and its predicted rates, or why none would do."""
    available, how = SHARE * kind.memory, packed(config)
    cost = preferred(config, COUNT, kind.figures, available, how=how)
    if cost is None:
        return _lacking(MeshCost(config, meshes(config, COUNT)[-1], kind.figures, how), available)
    decode, prompts, held = cost.decode(), cost.prompts(), cost.tokens(available) * cost.of("data")
    reached = about(decode.tokens), about(prompts.tokens), f"{decode.share:.0%}"
    return shown_mesh(cost.sizes), _gb(cost.weight_bytes), about(held), *reached


def _lacking(cost: MeshCost, available: float) -> tuple[str, ...]:
    """The mesh that comes closest."""
    tokens = cost.tokens(available)
    why = (
        f"does not fit: room for {about(tokens)} tokens"
        if tokens
        else f"does not fit: {_gb(available)} there"
    )
    return shown_mesh(cost.sizes), _gb(cost.weight_bytes), why, "", "", ""


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
