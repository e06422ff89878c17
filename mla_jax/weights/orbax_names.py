"""The names table of what mla-convert writes: our own paths, with kv_b_proj and the experts as the source had them.

`uk` and `uv` are cut from kv_b_proj when they are loaded, for a block of its FP8 may hold rows of both."""

from mla_jax.base.config import Config
from mla_jax.weights.gguf_names import transposed
from mla_jax.weights.hf_names import LAYER_RULES, MODEL_RULES, MTP_RULES
from mla_jax.weights.names import Origin, Rule, Table, key_half, layered, value_half

_KEPT = tuple(
    Rule(r.ours, r.ours, "experts " + r.axes if "{x}" in r.theirs else r.axes)
    for r in LAYER_RULES
    if not r.ours.startswith(("attn.uk", "attn.uv")) and len(r.axes.split()) < 3  # stacks are made of single experts' rows
)
_UP = (
    Rule("attn.uk", "attn.kv_b_proj", "heads*up kv_rank", key_half),
    Rule("attn.uv", "attn.kv_b_proj", "heads*up kv_rank", value_half),
    Rule("attn.uk", "attn.k_b", "heads kv_rank nope", transposed),  # as newer GGUF files have them
    Rule("attn.uv", "attn.v_b", "heads value kv_rank"),
)
STORE = Table(
    (
        *(Rule(r.ours, r.ours, r.axes) for r in MODEL_RULES),
        *layered((*_KEPT, *_UP), tuple(Rule(r.ours, r.ours, r.axes) for r in MTP_RULES), "layers.{l}."),
    ),
    layer=r"layers\.(\d+)\.",
    expert=None,
    needless=lambda name, config, found: False,
    cuts_stacks=False,
)


def stored(path: str, source: Origin, config: Config) -> tuple[str, tuple[str, ...]] | None:
    """The name and the axes under which our parameter `path` is stored; None for what is stored with another."""
    if source.part is value_half:
        return None
    if source.part is key_half:
        wanted = "attn.kv_b_proj"
    else:
        wanted = "attn.k_b" if source.part is transposed else "attn.v_b" if path.endswith("attn.uv") else ""
    found = next(row for row in STORE.candidates(path, config) if row.names[0].endswith(wanted))
    return found.names[0], found.axes
