"""Checkpoints of DeepSeek's own inference code as a Source: `model{i}-mp{n}.safetensors`, sharded for n devices.

Each routed expert is in one of the files. Other matrices are split along their outputs, or along their inputs where those are
the heads or the MLP's width. config.json is the released folder's or one of the inference code's. MTP layers are not in these
files. Source: `convert.py` and `model.py` in `inference/` of deepseek-ai/DeepSeek-V3."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import BadConfig, BadFile, printable, shortened
from mla_jax.base.files import read_json
from mla_jax.base.quantization import OF_MATRIX, Quantization, Scheme
from mla_jax.weights import boxes
from mla_jax.weights.boxes import Box
from mla_jax.weights.hf import Safetensors
from mla_jax.weights.names import NameRule, NameTable, key_half, layered, value_half
from mla_jax.weights.safetensors import TensorFiles, TensorSpan, inside, read_header

RANK_FILE = re.compile(r"model(\d+)-mp(\d+)\.safetensors")
MAX_LISTED = 4096  # that are listed as missing

_LAYER_RULES = (
    NameRule("attn_norm", "attn_norm.weight", "model"),
    NameRule("mlp_norm", "ffn_norm.weight", "model"),
    NameRule("attn.q_proj", "attn.wq.weight", "heads*query model"),
    NameRule("attn.q_a_proj", "attn.wq_a.weight", "q_rank model"),
    NameRule("attn.q_a_norm", "attn.q_norm.weight", "q_rank"),
    NameRule("attn.q_b_proj", "attn.wq_b.weight", "heads*query q_rank"),
    NameRule("attn.kv_a_proj", "attn.wkv_a.weight", "latent model"),
    NameRule("attn.kv_a_norm", "attn.kv_norm.weight", "kv_rank"),
    NameRule("attn.uk", "attn.wkv_b.weight", "heads*up kv_rank", key_half),
    NameRule("attn.uv", "attn.wkv_b.weight", "heads*up kv_rank", value_half),
    NameRule("attn.o_proj", "attn.wo.weight", "model heads*value"),
    NameRule("mlp.gate", "ffn.w1.weight", "mlp model"),
    NameRule("mlp.up", "ffn.w3.weight", "mlp model"),
    NameRule("mlp.down", "ffn.w2.weight", "model mlp"),
    NameRule("mlp.router.weight", "ffn.gate.weight", "scores model"),
    NameRule("mlp.router.bias", "ffn.gate.bias", "scores"),
    NameRule("mlp.experts.gate", "ffn.experts.{x}.w1.weight", "expert_mlp model"),
    NameRule("mlp.experts.up", "ffn.experts.{x}.w3.weight", "expert_mlp model"),
    NameRule("mlp.experts.down", "ffn.experts.{x}.w2.weight", "model expert_mlp"),
    NameRule("mlp.shared.gate", "ffn.shared_experts.w1.weight", "shared_mlp model"),
    NameRule("mlp.shared.up", "ffn.shared_experts.w3.weight", "shared_mlp model"),
    NameRule("mlp.shared.down", "ffn.shared_experts.w2.weight", "model shared_mlp"),
)
_MODEL_RULES = (
    NameRule("embed", "embed.weight", "vocab model"),
    NameRule("norm", "norm.weight", "model"),
    NameRule("head", "head.weight", "vocab model"),
)
DEEPSEEK = NameTable(
    (*_MODEL_RULES, *layered(_LAYER_RULES, (), "layers.{l}.")),
    layer=r"layers\.(\d+)\.",
    expert=r"layers\.\d+\.ffn\.experts\.(\d+)\.",
    needless=lambda name, config, found: False,
)

_CUT = {  # the axis along which matrices are split, by name; every part holds a full copy of other tensors
    0: re.compile(r"(embed|head|.*\.(wq|wq_b|wkv_b|w1|w3))\.(weight|scale)"),
    1: re.compile(r".*\.(wo|w2)\.(weight|scale)"),
}
_EXPERT = re.compile(r".*\.experts\.\d+\..*")


class Joined:
    """The tensors of all parts, joined."""

    def __init__(self, path: Path, parts: list[TensorFiles]):
        self.path, self.parts = path, parts
        names = dict.fromkeys(name for part in parts for name in part.tensors)
        self.holders = {name: [part for part in parts if name in part.tensors] for name in names}
        faults = [fault for name in names if (fault := self._fault(name)) is not None]
        if faults:
            raise BadFile(
                "the parts are not those of one model",
                *shortened(faults),
                "fetch or convert all of them again",
            )
        self.tensors: Mapping[str, TensorSpan] = {name: self._joined(name) for name in names}
        self.files = tuple(file for part in parts for file in part.files)

    def read(self, name: str, index: int | None = None, box: Box | None = None) -> np.ndarray:
        box = box or boxes.whole_box(self.tensors[name].shape[index is not None :])
        box = box if index is None else ((index, index + 1), *box)
        pieces = [part.read(name, None, own) for part, own in self._within(name, box)]
        joined = pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=_axis(name))
        return joined if index is None else joined[0]

    def _within(self, name: str, box: Box) -> Iterator[tuple[TensorFiles, Box]]:
        """The parts that hold some of a box, and what of themselves that is."""
        axis, parts = _axis(name), self._read_from(name)
        if axis is None:
            yield parts[0], box
            return
        each = parts[0].tensors[name].shape[axis]
        for i, part in enumerate(parts):
            start, end = (min(max(at - i * each, 0), each) for at in box[axis])
            if start < end:
                yield part, (*box[:axis], (start, end), *box[axis + 1 :])

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def _read_from(self, name: str) -> list[TensorFiles]:
        """The parts that hold a piece of a split tensor, else the first that holds a copy."""
        return self.holders[name] if _axis(name) is not None else self.holders[name][:1]

    def _joined(self, name: str) -> TensorSpan:
        first = self.holders[name][0].tensors[name]
        axis = _axis(name)
        count = len(self._read_from(name))
        shape = tuple(n * count if i == axis else n for i, n in enumerate(first.shape))
        return replace(first, shape=shape, size=first.size * count)

    def _fault(self, name: str) -> str | None:
        holders = self.holders[name]
        expected = 1 if _EXPERT.fullmatch(name) else len(self.parts)
        if len(holders) != expected:
            return f"{printable(name)} is in {len(holders)} of {len(self.parts)} parts, expected {expected}"
        kinds = {(part.tensors[name].dtype, part.tensors[name].shape) for part in holders}
        return f"{printable(name)} has {len(kinds)} shapes or dtypes in its parts" if len(kinds) > 1 else None


def _axis(name: str) -> int | None:
    """The axis along which a tensor is split; None for routed experts and tensors that every part holds."""
    if _EXPERT.fullmatch(name):
        return None
    return next((axis for axis, names in _CUT.items() if names.fullmatch(name)), None)


def open_deepseek(path: Path) -> Safetensors:
    """Opens a folder with config.json and `model{i}-mp{n}.safetensors`."""
    config = _config(path)
    block = (config.quantization_config or Quantization()).weight_block_size or OF_MATRIX
    return Safetensors("deepseek", Joined(path, _parts(path)), config, DEEPSEEK, [Scheme("deepseek", block)])


def _parts(path: Path) -> list[TensorFiles]:
    """The tensors of every part, in order."""
    count = _count(path)
    files = [inside(path, _part_name(i, count)) for i in range(count)]
    return [TensorFiles(path, {tensor.name: tensor for tensor in read_header(file)}) for file in files]


def _count(path: Path) -> int:
    """The number of parts; raises BadFile unless the folder holds all parts of one conversion, and no others."""
    found = {p.name: m for p in sorted(path.iterdir()) if (m := RANK_FILE.fullmatch(p.name))}
    counts = {int(m[2]) for m in found.values()}
    if len(counts) != 1:
        raise BadFile(
            f"{path} holds parts of several conversions", *shortened(list(found)), "keep those of one"
        )
    (count,) = counts
    names = [_part_name(i, count) for i in range(min(count, MAX_LISTED))]
    missing = [name for name in names if name not in found]
    if missing:
        raise BadFile(
            f"{path} lacks {len(missing)} of its {count} weight files",
            *shortened(missing),
            "fetch them again",
        )
    if len(found) > count:
        raise BadFile(
            f"{path} holds {len(found)} parts of {count}",
            *shortened(list(found)),
            "keep those of one conversion",
        )
    return count


def _part_name(rank: int, count: int) -> str:
    return f"model{rank}-mp{count}.safetensors"


# key of config.json -> (argument of the inference code, its default there)
_ARGUMENTS = {
    "vocab_size": ("vocab_size", 102400),
    "hidden_size": ("dim", 2048),
    "intermediate_size": ("inter_dim", 10944),
    "moe_intermediate_size": ("moe_inter_dim", 1408),
    "num_hidden_layers": ("n_layers", 27),
    "first_k_dense_replace": ("n_dense_layers", 1),
    "num_attention_heads": ("n_heads", 16),
    "n_routed_experts": ("n_routed_experts", 64),
    "n_shared_experts": ("n_shared_experts", 2),
    "num_experts_per_tok": ("n_activated_experts", 6),
    "n_group": ("n_expert_groups", 1),
    "topk_group": ("n_limited_groups", 1),
    "scoring_func": ("score_func", "softmax"),
    "routed_scaling_factor": ("route_scale", 1.0),
    "q_lora_rank": ("q_lora_rank", 0),
    "kv_lora_rank": ("kv_lora_rank", 512),
    "qk_nope_head_dim": ("qk_nope_head_dim", 128),
    "qk_rope_head_dim": ("qk_rope_head_dim", 64),
    "v_head_dim": ("v_head_dim", 128),
    "rope_theta": ("rope_theta", 10000.0),
}
_YARN = {
    "original_max_position_embeddings": ("original_seq_len", 4096),
    "factor": ("rope_factor", 40),
    "beta_fast": ("beta_fast", 32),
    "beta_slow": ("beta_slow", 1),
    "mscale": ("mscale", 1.0),
    "mscale_all_dim": ("mscale", 1.0),
}
_V3_ROUTING = {"model_type": "deepseek_v3", "norm_topk_prob": True, "topk_method": "noaux_tc"}
_V2_ROUTING = {"model_type": "deepseek_v2", "norm_topk_prob": False, "topk_method": "group_limited_greedy"}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
_OTHERS = {"max_batch_size", "max_seq_len", "dtype", "scale_fmt"}


def _config(path: Path) -> Config:
    file = path / "config.json"
    if not file.exists():
        raise BadConfig(
            f"{path} has no config.json",
            "copy the released model's there, or inference/configs/config_*.json",
        )
    found = read_json(file, 1 << 20, BadConfig)
    return (
        Config.from_hf(path)
        if "hidden_size" in found or "dim" not in found
        else Config.from_hf(hf_of_arguments(found))
    )


def hf_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The inference code's arguments as the content of a config.json; raises BadConfig for unknown ones."""
    known = {theirs for theirs, _ in (*_ARGUMENTS.values(), *_YARN.values())} | _OTHERS
    unknown = [key for key in arguments if key not in known]
    if unknown:
        raise BadConfig(
            "config.json has arguments that the inference code does not know", *map(printable, unknown[:8])
        )
    hf = {ours: arguments.get(theirs, default) for ours, (theirs, default) in _ARGUMENTS.items()}
    yarn = {ours: arguments.get(theirs, default) for ours, (theirs, default) in _YARN.items()}
    hf |= _V3_ROUTING if hf["scoring_func"] == "sigmoid" else _V2_ROUTING
    if hf["topk_method"] == "group_limited_greedy" and hf["n_group"] == 1:
        hf["topk_method"] = "greedy"
    hf |= {"rope_scaling": {"type": "yarn", **yarn}, "max_position_embeddings": _context(yarn)}
    hf |= {"rms_norm_eps": 1e-6, "hidden_act": "silu", "moe_layer_freq": 1, "tie_word_embeddings": False}
    if arguments.get("dtype") == "fp8":
        hf["quantization_config"] = _FP8
    return hf


def _context(yarn: Mapping[str, Any]) -> int:
    """The longest context in tokens: YaRN's factor times the original one."""
    factor, original = yarn["factor"], yarn["original_max_position_embeddings"]
    if not all(isinstance(n, int | float) and 0 < n < 2**31 for n in (factor, original)):
        raise BadConfig(
            "config.json has no possible original_seq_len and rope_factor", f"found {original} and {factor}"
        )
    return int(factor * original)
