"""How linear layers are packed in a checkpoint, as its `quantization_config` says: one small function for each quantiser.

_Settings become the schemes that layers can be packed in. Which layers are packed, and in which scheme, their tensors say: lists
of names (`ignore`, `targets`, `modules_to_not_convert`) are not needed. Knows no files and no arrays."""

from __future__ import annotations  # field types as text: the checks of type read them

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, no_type_check

from mla_jax.base.config_checks import MAX_FIELD
from mla_jax.base.errors import BadConfig, Unsupported, printable, shortened, shown

NO_INPUT_SCALES = "activations are not quantised: input scales of the checkpoint are not used"
# Of FP8 by tensor. NVFP4's scale of an input only brings those of its groups, which each pass computes, into range.
FIXED_INPUT_SCALES = "activations are rounded by fixed scales (input_scale) there, which is not computed here"
NO_CACHE_SCALES = "the cache is not quantised as the checkpoint says: its k_scale and v_scale are not used"


class Scheme(NamedTuple):
    """A way to pack a matrix: `layout` is a row of weights/layouts.py, `block` the rows and columns of a scale, 0 for all."""

    layout: str
    block: tuple[int, int]


@no_type_check  # its values come from a file: `type_faults` checks them all at once
@dataclass(frozen=True)
class Quantization:
    """FP8 weights with one scale per block, as DeepSeek-V3 is released; or the settings of another quantiser, as `stated`."""

    quant_method: str = "fp8"
    fmt: str = "e4m3"
    weight_block_size: tuple[int, int] | None = (128, 128)
    scale_fmt: str | None = None  # "ue8m0": scales are powers of two
    stated: str | None = None  # as JSON

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """The schemes that layers can be packed in. A layer has the first that its tensors fit."""
        if self.stated is not None:
            return METHODS[self.quant_method](json.loads(self.stated))
        if self.weight_block_size is None:
            return Scheme("fp8", OF_MATRIX), Scheme("fp8", OF_ROW)
        return (Scheme("fp8", self.weight_block_size),)

    def to_hf(self) -> dict[str, Any]:
        """The content of `quantization_config`."""
        if self.stated is not None:
            return json.loads(self.stated)
        size = self.weight_block_size
        found = {"quant_method": self.quant_method, "fmt": self.fmt, "scale_fmt": self.scale_fmt}
        return found | {"weight_block_size": size and list(size)}


OF_MATRIX, OF_ROW = (0, 0), (1, 0)  # blocks of one scale
LEAST_GROUP = 32  # values of a row; longer groups are made of these, with the same scale
_Settings = Mapping[str, Any]


def read_quantization(given: object) -> Quantization | None:
    """The content of `quantization_config`. Raises BadConfig, or Unsupported with every setting that cannot be read."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise BadConfig("quantization_config is not an object", f"found {shown(given)}")
    method = given.get("quant_method")
    if method == "fp8":
        return _deepseek(given)
    if not isinstance(method, str) or method not in METHODS:
        known = "known: fp8 e4m3, " + ", ".join(METHODS)
        raise Unsupported(f"quantization {shown(method)} cannot be read", known)
    METHODS[method](given)
    try:
        return Quantization(method, "", None, None, json.dumps(given, sort_keys=True))
    except (TypeError, ValueError, RecursionError) as e:
        raise BadConfig("quantization_config cannot be written as JSON", printable(str(e), 200)) from e


def quantization_notes(given: object) -> Iterator[str]:
    """The parts of the settings that are not used, which a reader of the folder should know."""
    if not isinstance(given, Mapping):
        return
    groups = [group for group in _object(given.get("config_groups")).values() if isinstance(group, Mapping)]
    if any(group.get("input_activations") for group in groups) or given.get("quant_algo"):
        yield NO_INPUT_SCALES
    if given.get("kv_cache_scheme") or given.get("kv_cache_quant_algo"):
        yield NO_CACHE_SCALES


def _object(found: object) -> Mapping:
    return found if isinstance(found, Mapping) else {}


def _others(settings: _Settings, where: str = "", **known: tuple) -> list[str]:
    """The settings that have none of the values that are known; the first is that of absent ones."""
    return [
        f"{where}{key} = {shown(settings[key])}; known: {', '.join(map(repr, values))}"
        for key, values in known.items()
        if settings.get(key, values[0]) not in values
    ]


def _refuse(method: str, faults: list[str]) -> None:
    if faults:
        raise Unsupported(f"quantization {printable(method)} cannot be read", *shortened(faults))


def _deepseek(given: _Settings) -> Quantization:
    """FP8 as DeepSeek releases it, or with one scale for each tensor or row, as transformers writes it."""
    faults = _others(given, fmt=("e4m3",), quant_algo=(None, "e4m3"))
    if given.get("activation_scheme") == "static":
        faults.append(f"activation_scheme = 'static': {FIXED_INPUT_SCALES}")
    _refuse("fp8", faults)
    found = given.get("weight_block_size", (128, 128))
    block = _block(found)
    if found is not None and block is None:
        raise BadConfig("weight_block_size is not two positive numbers", f"found {shown(found)}")
    return Quantization(weight_block_size=block, scale_fmt=given.get("scale_fmt"))


def _block(found: object) -> tuple[int, int] | None:
    """Two positive numbers, if it is that."""
    if not isinstance(found, list | tuple) or len(found) != 2:
        return None
    rows, columns = found
    sizes = [type(n) is int and 0 < n <= MAX_FIELD for n in found]
    return (rows, columns) if all(sizes) else None


# ---- compressed-tensors


def _compressed(given: _Settings) -> tuple[Scheme, ...]:
    """Layers in groups, each with a format; rotations and sparsity would change the arithmetic."""
    faults = _others(given, transform_config=(None, {}), moe_sparsity_config=(None,))
    faults += _others(_object(given.get("sparsity_config")), "sparsity_config.", format=("dense",))
    groups = _object(given.get("config_groups"))
    found: list[Scheme] = []
    for name, group in groups.items():
        more, schemes = _of_group(group, f"config_groups.{printable(str(name))}", given.get("format"))
        faults += more
        found += schemes
    if not groups:
        faults.append(f"config_groups = {shown(given.get('config_groups'))}; known: groups with weights")
    _refuse("compressed-tensors", faults)
    return tuple(found)


_Found = tuple[list[str], list[Scheme]]  # faults, and the schemes if there are none


def _of_group(group: object, where: str, format: object) -> _Found:
    """The schemes of a group, in its own format or that of all."""
    if not isinstance(group, Mapping):
        return [f"{where} = {shown(group)}; known: an object with weights"], []
    if group.get("weights") is None:
        return [], []  # it quantises activations alone
    format = group.get("format") or format
    if not isinstance(format, str) or format not in COMPRESSED:
        return [f"{where}.format = {shown(format)}; known: {', '.join(COMPRESSED)}"], []
    weights = _object(group["weights"])
    strategy = "group" if weights.get("group_size") else "tensor"
    defaults = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy}  # the library's
    faults, schemes = COMPRESSED[format](defaults | {**weights}, where + ".weights.")
    if COMPRESSED[format] is _float_quantized and _has_fixed_scales(group.get("input_activations")):
        faults.append(f"{where}.input_activations.dynamic = False: {FIXED_INPUT_SCALES}")
    return faults, schemes


def _has_fixed_scales(activations: object) -> bool:
    return bool(activations) and not _object(activations).get("dynamic", False)  # the library's default


def _pack_quantized(weights: _Settings, where: str) -> _Found:
    faults = _others(
        weights,
        where,
        num_bits=(4,),
        type=("int",),
        strategy=("group", "channel"),
        symmetric=(True, False),
        actorder=(None, "static", "weight"),
    )
    block = OF_ROW
    if weights["strategy"] == "group":
        block = _group(weights, where, faults)
    return faults, [Scheme(layout, block) for layout in _PACKED[weights["symmetric"] is not False]]


# By symmetry; the dtype of the scales says which of two it is
_PACKED = {True: ("pack-quantized", "pack-quantized f16"), False: ("pack-quantized asymmetric",)}


def _group(settings: _Settings, where: str, faults: list[str], usual: int = 128) -> tuple[int, int]:
    """The block of a group of a row; `faults` gets a size that is none."""
    size = settings.get("group_size", usual)
    if size == -1:
        return OF_ROW
    if type(size) is int and 0 < size <= MAX_FIELD and size % LEAST_GROUP == 0:
        return 1, size
    faults.append(f"{where}group_size = {shown(size)}; known: multiples of {LEAST_GROUP}, -1")
    return OF_ROW


def _float_quantized(weights: _Settings, where: str) -> _Found:
    faults = _others(
        weights,
        where,
        num_bits=(8,),
        type=("float",),
        strategy=("tensor", "channel", "block"),
        symmetric=(True,),
    )
    blocks = {
        "tensor": OF_MATRIX,
        "channel": OF_ROW,
        "block": _block(weights.get("block_structure")),
    }
    block = blocks.get(str(weights["strategy"]), OF_MATRIX)
    if block is None:
        found = shown(weights.get("block_structure"))
        faults.append(f"{where}block_structure = {found}; known: two positive numbers")
    return faults, [Scheme("float-quantized", block or OF_MATRIX)]


def _fp4(layout: str, group: int, strategy: str) -> Callable[[_Settings, str], _Found]:
    def read(weights: _Settings, where: str) -> _Found:
        known = {"num_bits": (4,), "type": ("float",), "symmetric": (True,)}
        faults = _others(weights, where, **known, group_size=(group,), strategy=(strategy,))
        return faults, [Scheme(layout, (1, group))]

    return read


COMPRESSED = {  # by format
    "pack-quantized": _pack_quantized,
    "float-quantized": _float_quantized,
    "naive-quantized": _float_quantized,
    "nvfp4-pack-quantized": _fp4("nvfp4-pack-quantized", 16, "tensor_group"),
    "mxfp4-pack-quantized": _fp4("mxfp4-pack-quantized", 32, "group"),
}


# ---- others


def _awq(given: _Settings) -> tuple[Scheme, ...]:
    faults = _others(given, bits=(4,), zero_point=(True,), version=("gemm", "GEMM"), format=("gemm", "GEMM"))
    block = _group(given, "", faults)
    _refuse("awq", faults)
    return (Scheme("awq", block),)


def _gptq(given: _Settings) -> tuple[Scheme, ...]:
    """Columns in the order of their activations (`desc_act`) have groups that are no neighbours."""
    version = given.get("checkpoint_format") or given.get("format") or "gptq"
    faults = _others(given, bits=(4,), desc_act=(False, None), is_marlin_format=(False, None))
    faults += _others({"checkpoint_format": version}, checkpoint_format=("gptq", "gptq_v2"))
    overrides = [name for name in _object(given.get("dynamic")) if not str(name).startswith("-:")]
    faults += [f"dynamic = {shown(name)}; known: patterns that begin with -:" for name in overrides]
    block = _group(given, "", faults)
    _refuse("gptq", faults)
    return (Scheme(version, block),)


def _auto_round(given: _Settings) -> tuple[Scheme, ...]:
    formats = {"auto_round:auto_gptq": _gptq, "auto_round:auto_awq": _awq}
    _refuse(
        "auto-round",
        _others(given, data_type=("int",), packing_format=tuple(formats), extra_config=(None, {})),
    )
    return formats[given.get("packing_format", "auto_round:auto_gptq")](given)


def _modelopt(given: _Settings) -> tuple[Scheme, ...]:
    """NVIDIA's quantiser; in a mixture each layer has an algorithm."""
    layers = [_object(layer) for layer in _object(given.get("quantized_layers")).values()]
    settings = layers if given.get("quant_algo") == "MIXED_PRECISION" else [given]
    known = {"quant_algo": (None, *MODELOPT, BY_TENSOR), "group_size": (16, None)}
    faults = dict.fromkeys(fault for layer in settings for fault in _others(layer, **known))
    if any(layer.get("quant_algo") == BY_TENSOR for layer in settings):
        faults[f"quant_algo = {BY_TENSOR!r}: {FIXED_INPUT_SCALES}"] = None
    algorithms = dict.fromkeys(str(layer["quant_algo"]) for layer in settings if layer.get("quant_algo"))
    if not algorithms:
        found = shown(given.get("quant_algo"))
        faults[f"quant_algo = {found}; known: {', '.join(MODELOPT)}, MIXED_PRECISION"] = None
    _refuse("modelopt", list(faults))
    return tuple(MODELOPT[name] for name in algorithms)


BY_TENSOR = "FP8"  # ModelOpt's name of it; the scales of its activations are fixed
MODELOPT = {  # by algorithm
    "NVFP4": Scheme("nvfp4", (1, 16)),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("float-quantized", OF_ROW),
}
METHODS: dict[str, Callable[[_Settings], tuple[Scheme, ...]]] = {
    "compressed-tensors": _compressed,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
}
