"""The names table: where each of our parameters lies in a checkpoint. A new family is a row.

A row is (our path, source name, source axes, part): the axes give the source's expected shape, `part` cuts ours out of it.
`{l}` is a layer, `{x}` an expert. Several rows for one path are alternatives; the first is what `export` writes."""

import difflib
import re
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

from mla_jax.base import axes
from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, printable, shortened

Part = Callable[[Any, Config], Any]


def whole(w: Any, config: Config) -> Any:
    return w


def key_half(w: Any, config: Config) -> Any:
    """`uk` of kv_b_proj, whose rows are head by head the key's, then the value's."""
    return w.reshape(config.num_attention_heads, -1, w.shape[-1])[:, : config.qk_nope_head_dim]


def value_half(w: Any, config: Config) -> Any:
    return w.reshape(config.num_attention_heads, -1, w.shape[-1])[:, config.qk_nope_head_dim :]


def first_half(w: Any, config: Config) -> Any:
    return w[:, : w.shape[1] // 2]


def second_half(w: Any, config: Config) -> Any:
    return w[:, w.shape[1] // 2 :]


class Row(NamedTuple):
    ours: str
    theirs: str
    axes: str
    part: Part = whole


_BLOCK = (
    Row("attn_norm", "input_layernorm.weight", "model"),
    Row("mlp_norm", "post_attention_layernorm.weight", "model"),
    Row("attn.q_proj", "self_attn.q_proj.weight", "heads*query model"),
    Row("attn.q_a_proj", "self_attn.q_a_proj.weight", "q_rank model"),
    Row("attn.q_a_norm", "self_attn.q_a_layernorm.weight", "q_rank"),
    Row("attn.q_b_proj", "self_attn.q_b_proj.weight", "heads*query q_rank"),
    Row("attn.kv_a_proj", "self_attn.kv_a_proj_with_mqa.weight", "latent model"),
    Row("attn.kv_a_norm", "self_attn.kv_a_layernorm.weight", "kv_rank"),
    Row("attn.uk", "self_attn.kv_b_proj.weight", "heads*up kv_rank", key_half),
    Row("attn.uv", "self_attn.kv_b_proj.weight", "heads*up kv_rank", value_half),
    Row("attn.o_proj", "self_attn.o_proj.weight", "model heads*value"),
    Row("mlp.gate", "mlp.gate_proj.weight", "mlp model"),
    Row("mlp.up", "mlp.up_proj.weight", "mlp model"),
    Row("mlp.down", "mlp.down_proj.weight", "model mlp"),
    Row("mlp.router.weight", "mlp.gate.weight", "experts model"),
    Row("mlp.router.bias", "mlp.gate.e_score_correction_bias", "experts"),
    Row("mlp.experts.gate", "mlp.experts.{x}.gate_proj.weight", "expert_mlp model"),
    Row("mlp.experts.up", "mlp.experts.{x}.up_proj.weight", "expert_mlp model"),
    Row("mlp.experts.down", "mlp.experts.{x}.down_proj.weight", "model expert_mlp"),
    Row("mlp.experts.gate", "mlp.experts.gate_up_proj", "experts expert_pair model", first_half),  # transformers 5, in memory
    Row("mlp.experts.up", "mlp.experts.gate_up_proj", "experts expert_pair model", second_half),
    Row("mlp.experts.down", "mlp.experts.down_proj", "experts model expert_mlp"),
    Row("mlp.shared.gate", "mlp.shared_experts.gate_proj.weight", "shared_mlp model"),
    Row("mlp.shared.up", "mlp.shared_experts.up_proj.weight", "shared_mlp model"),
    Row("mlp.shared.down", "mlp.shared_experts.down_proj.weight", "model shared_mlp"),
)
_MTP = (
    Row("enorm", "enorm.weight", "model"),
    Row("hnorm", "hnorm.weight", "model"),
    Row("eh_proj", "eh_proj.weight", "model model_pair"),
    Row("norm", "shared_head.norm.weight", "model"),
)
HF = (
    Row("embed", "model.embed_tokens.weight", "vocab model"),
    Row("norm", "model.norm.weight", "model"),
    Row("head", "lm_head.weight", "vocab model"),
    *(Row("layers.{l}." + r.ours, "model.layers.{l}." + r.theirs, r.axes, r.part) for r in _BLOCK),
    *(Row("mtp.{l}.block." + r.ours, "model.layers.{l}." + r.theirs, r.axes, r.part) for r in _BLOCK),
    *(Row("mtp.{l}." + r.ours, "model.layers.{l}." + r.theirs, r.axes, r.part) for r in _MTP),
)
SCALE = "_scale_inv"  # what FP8 checkpoints add to the name of a weight
LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight")  # which of them they quantise


class Source(NamedTuple):
    """What fills one parameter: tensor names (one an expert if `stacked`), the shape each must have, the part to take."""

    names: tuple[str, ...]
    axes: str
    part: Part
    stacked: bool


def find(path: str, config: Config, present: Mapping[str, Any] | None = None) -> Source:
    """The source of our parameter `path`: of several rows the first whose tensors are all `present`."""
    layer = re.search(r"\.(\d+)\.", path)
    pattern = path if layer is None else path.replace(layer[0], ".{l}.", 1)
    number = 0 if layer is None else int(layer[1]) + (config.num_hidden_layers if path.startswith("mtp.") else 0)
    found = []
    for row in (r for r in HF if r.ours == pattern):
        stacked = "{x}" in row.theirs
        names = tuple(row.theirs.format(l=number, x=x) for x in range(config.n_routed_experts or 0 if stacked else 1))
        found.append(Source(names, row.axes, row.part, stacked))
    return next((s for s in found if present is not None and all(n in present for n in s.names)), found[0])


def resolve(paths: Iterable[str], config: Config, present: Mapping[str, Any]) -> dict[str, Source]:
    """The source of every path; raises BadFile with all tensors that are missing, not used, or of the wrong shape."""
    sources = {path: find(path, config, present) for path in paths}
    wanted = dict.fromkeys(name for source in sources.values() for name in source.names)
    missing = [name for name in wanted if name not in present]
    found = wanted.keys() & present.keys()
    unused = [name for name in present if name not in found and not _needless(name, config, found)]
    if missing or unused:
        raise BadFile("the tensors do not fit the model that config.json describes", *_listed(missing, unused))
    faults = [
        fault for source in sources.values() for name in source.names for fault in _shape_faults(name, source, config, present)
    ]
    if faults:
        raise BadFile("tensors have other shapes than config.json says", *shortened(list(dict.fromkeys(faults))))
    return sources


def _needless(name: str, config: Config, found: Container[str]) -> bool:
    """Tensors that releases hold and no model needs: rotary tables, MTP's copies of embedding and head, a tied head."""
    if name.endswith(SCALE):
        return name.removesuffix(SCALE) in found
    if re.fullmatch(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", name):
        return True
    extra = re.fullmatch(r"model\.layers\.(\d+)\.(embed_tokens|shared_head\.head)\.weight", name)
    if extra is not None:
        return int(extra[1]) >= config.num_hidden_layers
    return name == "lm_head.weight" and config.tie_word_embeddings


def refuse_other_counts(config: Config, present: Mapping[str, Any]):
    """A quick look at the counts of layers and experts, before building a model that could be a thousand times theirs."""
    numbers = [m.groups() for name in present if (m := re.match(r"model\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?", name))]
    layers, experts = {layer for layer, _ in numbers}, {expert for _, expert in numbers if expert is not None}
    faults = []
    if len(layers) < config.num_hidden_layers:
        faults.append(f"num_hidden_layers is {config.num_hidden_layers}, model.layers.* has {len(layers)}")
    if experts and len(experts) < (config.n_routed_experts or 0):
        faults.append(f"n_routed_experts is {config.n_routed_experts}, model.layers.*.mlp.experts.* has {len(experts)}")
    if faults:
        example = next(iter(present), None)
        faults += (
            [f"the files hold {len(present):,} tensors, such as {printable(example)}"]
            if example
            else ["the files hold no tensors"]
        )
        raise BadFile("the tensors do not fit the model that config.json describes", *faults)


def has_mtp(config: Config, present: Mapping[str, Any]) -> bool:
    """Whether the checkpoint holds the MTP layers that the config announces; transformers saves without them."""
    return config.num_nextn_predict_layers > 0 and any(n.startswith(f"model.layers.{config.num_hidden_layers}.") for n in present)


def _listed(missing: list[str], unused: list[str], most: int = 8) -> list[str]:
    lines = []
    for name in missing[:most]:
        near = difflib.get_close_matches(name, unused[:2000], n=1, cutoff=0.8)
        lines.append(f"missing: {name}" + (f" (not used, and near: {printable(near[0])})" if near else ""))
    lines += [f"missing: {len(missing) - most:,} more"] if len(missing) > most else []
    lines += [f"not used: {printable(name, 120)}" for name in unused[:most]]
    return lines + ([f"not used: {len(unused) - most:,} more"] if len(unused) > most else [])


def _shape_faults(name: str, source: Source, config: Config, present: Mapping[str, Any]) -> Iterable[str]:
    found, expected = tuple(present[name].shape), axes.merged(config, source.axes)
    if found == expected:
        return
    words = source.axes.split()
    differing = [word for i, word in enumerate(words) if found[i : i + 1] != expected[i : i + 1]]
    reasons = "; ".join(axes.why(config, word) for word in differing or words)
    yield f"{printable(name)}: found {list(found)}, config.json says {list(expected)} by {reasons}"


def export(paths: Mapping[str, Any], config: Config) -> Iterable[tuple[str, Any]]:
    """Our parameters as `(source name, array)`, one at a time: the inverse of loading."""
    for path, value in paths.items():
        source = find(path, config)
        if source.part is value_half:
            continue  # written with its other half
        if source.part is key_half:
            value = jnp.concatenate([value, paths[path.removesuffix("uk") + "uv"]], axis=1)
        pieces = value if source.stacked else [value]
        shape = axes.merged(config, source.axes)
        yield from ((name, piece.reshape(shape)) for name, piece in zip(source.names, pieces, strict=True))
