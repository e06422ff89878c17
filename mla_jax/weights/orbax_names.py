"""The names table of folders that mla-convert writes: our own paths, except that kv_b_proj and the experts stay as in the source.

`uk` and `uv` are sliced from kv_b_proj when they are loaded, because one FP8 block of it can hold rows of both."""

from mla_jax.base.config import Config
from mla_jax.weights.gguf_names import transposed
from mla_jax.weights.hf_names import LAYER_RULES, MODEL_RULES, MTP_RULES, PAIRED_RULES
from mla_jax.weights.names import NameRule, NameTable, Origin, key_half, layered, value_half

_RULES = (*LAYER_RULES, *(rule for rule in PAIRED_RULES if rule.ours.startswith("mlp.dense.")))
_KEPT = tuple(
    NameRule(r.ours, r.ours, "experts " + r.axes if "{x}" in r.theirs else r.axes)
    for r in _RULES
    # Without uk and uv, whose rules follow, and without stacked experts, which have three axes
    if not r.ours.startswith(("attn.uk", "attn.uv")) and len(r.axes.split()) < 3
)
_UP = (
    NameRule("attn.uk", "attn.kv_b_proj", "heads*up kv_rank", key_half),
    NameRule("attn.uv", "attn.kv_b_proj", "heads*up kv_rank", value_half),
    NameRule("attn.uk", "attn.k_b", "heads kv_rank nope", transposed),  # as in newer GGUF files
    NameRule("attn.uv", "attn.v_b", "heads value kv_rank"),
)
STORE = NameTable(
    (
        *(NameRule(r.ours, r.ours, r.axes) for r in MODEL_RULES),
        *layered((*_KEPT, *_UP), tuple(NameRule(r.ours, r.ours, r.axes) for r in MTP_RULES), "layers.{l}."),
    ),
    layer=r"layers\.(\d+)\.",
    expert=None,
    needless=lambda name, config, found: False,
    cuts_stacks=False,
)


def stored_as(path: str, source: Origin, config: Config) -> tuple[str, tuple[str, ...]] | None:
    """The name and axes under which our parameter `path` is stored; None if it is stored inside another tensor."""
    if source.part is value_half:
        return None
    if source.part is key_half:
        wanted = "attn.kv_b_proj"
    elif source.part is transposed:
        wanted = "attn.k_b"
    elif path.endswith("attn.uv"):
        wanted = "attn.v_b"
    else:
        wanted = ""  # the only candidate
    found = next(
        candidate for candidate in STORE.candidates(path, config) if candidate.names[0].endswith(wanted)
    )
    return found.names[0], found.axes
