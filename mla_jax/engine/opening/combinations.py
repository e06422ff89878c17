"""Which features work together: one table of those that do not, read before anything is allocated.

docs/combinations.md is made from it (`python -m mla_jax.engine.opening.combinations`)."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from mla_jax.base.axes import shown_mesh
from mla_jax.base.errors import Unsupported
from mla_jax.base.options import Options
from mla_jax.mesh.partition import Layout

Condition = Callable[[Options, Layout], bool]

# When each feature is in use, by its name in messages and docs.
FEATURES: dict[str, Condition] = {
    'attention="naive"': lambda options, layout: options.attention.attention == "naive",
    'attention="fused"': lambda options, layout: options.attention.attention == "fused",
    'kv_cache="fp8"': lambda options, layout: options.attention.kv_cache == "fp8",
    'draft="mtp"': lambda options, layout: options.drafts.draft == "mtp",
    'draft="lookup"': lambda options, layout: options.drafts.draft == "lookup",
    "evict": lambda options, layout: options.eviction.evict != "off",
    "retrieve": lambda options, layout: options.retrieval.retrieve != "off",
    'retrieve="infllm"': lambda options, layout: options.retrieval.retrieve == "infllm",
    "retrieve_window": lambda options, layout: options.retrieval.retrieve_window is not None,
    "host_cache": lambda options, layout: options.memory.host_cache > 0,
    "mesh data": lambda options, layout: layout.data > 1,
    "mesh tensor": lambda options, layout: layout.tensor > 1,
    "mesh context": lambda options, layout: layout.context > 1,
    'experts="host"': lambda options, layout: (
        options.experts.experts == "host" or bool(options.experts.host_layers)
    ),
    "several processes": lambda options, layout: options.processes.several,
}

HOST_EXPERTS, INDEXER = 'experts="host"', "lightning indexer"
# Features that no option tells: a model has them.
OF_MODELS = (INDEXER,)


class Refusal(NamedTuple):
    """Features that exclude each other, all of which must be in use, and the reason."""

    features: tuple[str, ...]
    reason: str


REFUSED = (
    Refusal(('attention="naive"', 'kv_cache="fp8"'), "that form caches heads, and only latents are packed"),
    Refusal(("evict", "retrieve"), "both decide what a step reads; keep one of them"),
    Refusal(("evict", 'draft="mtp"'), 'the layer that drafts has a cache of its own; take draft="lookup"'),
    Refusal(
        ("evict", 'attention="naive"', "mesh tensor"),
        "heads are cut over tensor, and share out what is kept; leave tensor out of the mesh, or take another form",
    ),
    Refusal(
        ("retrieve", 'attention="naive"'),
        "that form caches heads, and pages are chosen by latents; take another form",
    ),
    Refusal(
        ('retrieve="infllm"', 'draft="mtp"'),
        'it counts what queries ask of a page, and rejected drafts would count; take retrieve="quest"',
    ),
    Refusal(
        ('retrieve="infllm"', 'draft="lookup"'),
        'it counts what queries ask of a page, and rejected drafts would count; take retrieve="quest"',
    ),
    Refusal(
        ("retrieve_window", 'attention="fused"'),
        'kernels take keys that are turned already, and these are turned as they are read; take attention="auto"',
    ),
    Refusal(
        ("retrieve", "mesh context"),
        "a page is cut over context, and pages are chosen whole; leave context out of the mesh",
    ),
    Refusal(
        ('attention="fused"', 'kv_cache="fp8"', "mesh context"),
        'that kernel attends to whole pages; take attention="auto", or leave context out of the mesh',
    ),
    Refusal(
        ('experts="host"', "mesh tensor"),
        "devices along tensor have the same tokens, and the host would compute them again; take a mesh of data",
    ),
    Refusal(
        ('experts="host"', "mesh context"),
        "devices along context have the same tokens, and the host would compute them again; take a mesh of data",
    ),
    Refusal(('experts="host"', "several processes"), "a host has the experts of its own devices only"),
    Refusal(("host_cache", "several processes"), "pages of other hosts cannot be read here; leave it out"),
    Refusal(("evict", INDEXER), "the model was trained to choose tokens among all that came before"),
    Refusal(("retrieve", INDEXER), "the model chooses single tokens by itself"),
    Refusal(
        ("mesh context", INDEXER),
        "tokens are chosen among all pages, which are cut over context; leave context out of the mesh",
    ),
)


def refuse(options: Options, layout: Layout, further: Collection[str] = ()) -> None:
    """Raises Unsupported for features that exclude each other. `further` ones are in use without being asked for."""
    used = {name for name, is_used in FEATURES.items() if is_used(options, layout)}.union(further)
    for features, reason in REFUSED:
        if used.issuperset(features):
            first, *others = features
            where = f" (mesh {shown_mesh(layout.sizes)})" if layout.devices > 1 else ""
            raise Unsupported(f"{first} does not work with {' and '.join(others)}{where}", reason)


def matrix() -> str:
    """The table of docs/combinations.md: a row and a column for each feature."""
    names = [*FEATURES, *OF_MODELS]
    notes = {refusal.features: number for number, refusal in enumerate(REFUSED, 1)}
    lines = ["| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {row} | " + " | ".join(_cell(row, column, notes) for column in names) + " |" for row in names
    ]
    reasons = [f"{n}. {' with '.join(features)}: {REFUSED[n - 1].reason}." for features, n in notes.items()]
    return "\n".join([*lines, "", *reasons, ""])


def _cell(row: str, column: str, notes: dict[tuple[str, ...], int]) -> str:
    if row == column:
        return ""
    marks = [
        f"no ({number})" if len(features) == 2 else f"yes, see {number}"
        for features, number in notes.items()
        if {row, column} <= set(features)
    ]
    return ", ".join(marks) or _exclusive(row, column)


def _exclusive(row: str, column: str) -> str:
    """Two values of one setting cannot meet."""
    return "" if "=" in row and row.split("=", maxsplit=1)[0] == column.split("=", maxsplit=1)[0] else "yes"


if __name__ == "__main__":
    print(matrix(), end="")
