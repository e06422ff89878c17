"""The tensors of a parameter in a released folder: one of numbers, or those of a packed weight in the layout of its quantiser."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import Unsupported
from mla_jax.base.qtensor import format_of
from mla_jax.base.quantization import read_quantization
from mla_jax.weights.fill import PLAIN_DTYPES
from mla_jax.weights.layouts import Field, FileLayout, layout_of
from mla_jax.weights.safetensors import STORED_DTYPES

Spec = tuple[str, tuple[int, ...]]  # dtype and shape


@dataclass(frozen=True)
class Stored:
    """A parameter, or each matrix of a stack: packed ones have a `layout`, others the dtype `format`."""

    format: str
    shape: tuple[int, ...]
    layout: FileLayout | None

    def specs(self, name: str, scales: str = "F32") -> Iterator[tuple[str, Spec]]:
        """The name, dtype and shape of each tensor of the weight `name`; `scales` is the dtype of scales where a layout leaves it
        open."""
        if self.layout is None:
            yield name, (self.format, self.shape)
            return
        module = name.removesuffix(".weight")
        for field in self.layout.fields:
            yield f"{module}.{field.name}", (_dtype(field, scales), field.shape(self.shape))
        if self.layout.sizes is not None:
            yield f"{module}.{self.layout.sizes}", ("I64", (2,))

    def keeps(self, parts: tuple[np.ndarray, ...]) -> bool:
        """Whether the layout holds these parts of a matrix to the bit: some have one scale where parts have several."""
        if self.layout is None:
            return True
        again = self.layout.unpack(self.layout.pack(parts, self.shape), self.shape)
        return all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))

    def tensors(
        self, name: str, parts: tuple[np.ndarray, ...], scales: str = "F32"
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The tensors themselves, of a matrix with these parts."""
        if self.layout is None:
            yield name, parts[0]
            return
        module, arrays = name.removesuffix(".weight"), self.layout.pack(parts, self.shape)
        for field, array in zip(self.layout.fields, arrays, strict=True):
            array = array.T if field.transposed else array
            yield f"{module}.{field.name}", array.astype(STORED_DTYPES[_dtype(field, scales)], copy=False)
        if self.layout.sizes is not None:
            yield f"{module}.{self.layout.sizes}", np.array(self.shape)


def as_stored(config: Config, format: str, shape: tuple[int, ...], path: str, advice: str) -> Stored:
    """The parameter `path` in this format, by the config's schemes, or where it has none by those of SETTINGS.

    Raises Unsupported, with the `advice`, for a format that none of them has. Codes that were quantised here and do not fill
    their groups are refused too: compressed-tensors has none such."""
    if format in PLAIN_DTYPES:
        return Stored(format, shape, None)
    found, columns = config.quantization_config, format_of(format).block[1] or shape[-1]
    if found is None and (format == "fp8_block" or shape[-1] % columns == 0):
        found = read_quantization(SETTINGS.get(format))
    layouts = map(layout_of, found.schemes if found else ())
    layout = next((layout for layout in layouts if layout.format == format), None)
    if layout is None:
        raise refusal_of(format, path, advice)
    return Stored(format, shape, layout)


def refusal_of(format: str, path: str, advice: str) -> Unsupported:
    return Unsupported(f"a Hugging Face folder cannot hold {format}", f"as {path} is", advice)


def _dtype(field: Field, scales: str) -> str:
    return scales if scales in field.dtypes else field.dtypes[0]


def _compressed(group: int) -> dict[str, Any]:
    """The settings of compressed-tensors for symmetric codes of four bits, as mla-convert makes them."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    form = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
    }
    return {**form, "config_groups": groups, "ignore": ["lm_head", "re:.*(kv_b_proj|eh_proj|mlp\\.gate)$"]}


SETTINGS = {  # of weights that were quantised here, for which the config has none
    "fp8_block": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
    },
    "int4_g32": _compressed(32),
    "int4_g128": _compressed(128),
}
