"""Which layers choose the tokens that they attend to (DeepSeek Sparse Attention), from the keys of config.json.

A "full" layer has a lightning indexer. A "shared" one takes the choice of the nearest full layer below it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mla_jax.base.errors import BadConfig, printable, shown

if TYPE_CHECKING:
    from mla_jax.base.config import Config

OWN_CHOICE, TAKEN_CHOICE = "full", "shared"
_WORDS = {"F": OWN_CHOICE, "S": TAKEN_CHOICE}  # the letters of index_topk_pattern
INDEXER_FIELDS = ("index_topk", "index_n_heads", "index_head_dim", "indexer_types", "indexer_rope_interleave")
# From these indexer_types follow, where they are not given
_SCHEDULE = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
# The last one is about drafts alone, and these are verified
INDEXER_KEYS = frozenset({*INDEXER_FIELDS, *_SCHEDULE, "index_share_for_mtp_iteration"})
# The words for such layers in `layer_types`; the second is the older one
INDEXED_LAYERS = ("indexed_attention", "deepseek_sparse_attention")


def types_of_layers(hf: Mapping[str, Any], layers: Any) -> tuple[Any, ...] | None:
    """`indexer_types` as a config gives them, or as they follow from its pattern or its frequency; None: all are full."""
    given = hf.get("indexer_types")
    if given is None:
        given = hf.get("index_topk_pattern")
    if isinstance(given, str):
        given = [_WORDS.get(letter, letter) for letter in given]
    if given is not None:
        return tuple(given)[:layers] if isinstance(given, list | tuple) else (given,)
    frequency = hf.get("index_topk_freq")
    return None if frequency is None else _by_frequency(hf, frequency, layers)


def _by_frequency(hf: Mapping[str, Any], frequency: Any, layers: int) -> tuple[str, ...] | None:
    """The first layers are full, and then one of `frequency`."""
    offset = hf.get("index_skip_topk_offset", 2)
    for name, value in {"index_topk_freq": frequency, "index_skip_topk_offset": offset}.items():
        if type(value) is not int:
            raise BadConfig(f"{name} is not a whole number", f"found {shown(value)}")
    if frequency <= 1:
        return None
    return tuple(
        OWN_CHOICE if max(layer - offset + 1, 0) % frequency == 0 else TAKEN_CHOICE for layer in range(layers)
    )


def indexer_faults(c: "Config") -> list[str]:
    """Of a config whose sizes are right."""
    if c.index_topk is None:
        return []
    found = []
    if c.q_lora_rank is None:
        found.append("q_lora_rank is not set, but an indexer reads the latent of the query")
    if c.index_head_dim is not None and c.index_head_dim < c.qk_rope_head_dim:
        found.append(
            f"index_head_dim is {c.index_head_dim}, expected at least qk_rope_head_dim {c.qk_rope_head_dim}"
        )
    return [*found, *_faults_of_types(c)]


def _faults_of_types(c: "Config") -> list[str]:
    if c.indexer_types is None:
        return []
    found, entries = [], len(c.indexer_types)
    if entries != c.num_hidden_layers:
        found.append(f"indexer_types has {entries} entries for {shown(c.num_hidden_layers)} layers")
    if other := sorted({*c.indexer_types} - {OWN_CHOICE, TAKEN_CHOICE}):
        found.append(f"indexer_types holds {printable(other[0])}, expected full or shared")
    if c.indexer_types[:1] == (TAKEN_CHOICE,):
        found.append("indexer_types begins with shared, but below the first layer there is no choice")
    return found
