"""Safetensors as a Source: an FP8 weight and its tensor of scales become one tensor of a block format."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, Unsupported, printable
from mla_jax.base.files import read_json
from mla_jax.base.qtensor import fp8_format
from mla_jax.weights import boxes
from mla_jax.weights.boxes import Box
from mla_jax.weights.hf_names import HF, SCALE
from mla_jax.weights.names import NameTable
from mla_jax.weights.safetensors import TensorSpan, open_folder
from mla_jax.weights.source import TensorEntry

FP8 = "F8_E4M3"
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


@runtime_checkable
class Files(Protocol):
    """Tensors in files: TensorFiles, or a class that joins the pieces of sharded ones."""

    path: Path
    tensors: Mapping[str, TensorSpan]

    @property
    def files(self) -> tuple[Path, ...]: ...
    def read(self, name: str, index: int | None = None, box: Box | None = None) -> np.ndarray: ...
    def close(self) -> None: ...


class Safetensors:
    """A folder of safetensors as a Source; `scale_of` maps a weight's name to the name of its scales, or to an empty text."""

    metadata: Mapping[str, Any] | None = None
    made_of: Mapping[str, Any] | None = None

    def __init__(
        self, kind: str, files: Files, config: Config, table: NameTable, scale_of: Callable[[str], str]
    ):
        self.kind, self.path, self.raw = kind, files.path, files
        self.config, self.table, self.scale_of = config, table, scale_of
        quantization = config.quantization_config
        self.block = block = quantization.weight_block_size if quantization else (128, 128)
        scales = {scale for name in files.tensors if (scale := scale_of(name)) in files.tensors}
        dtypes = {files.tensors[name].dtype for name in scales}
        self.scales = dtypes.pop() if len(dtypes) == 1 else "F32"
        self.tensors: Mapping[str, TensorEntry] = {
            name: _entry(name, tensor, files.tensors.get(scale_of(name)), scale_of(name), block)
            for name, tensor in files.tensors.items()
            if name not in scales
        }

    @property
    def files(self) -> tuple[Path, ...]:
        return self.raw.files

    def read(self, name: str, index: int | None = None, box: Box | None = None) -> tuple[np.ndarray, ...]:
        weight, entry = self.raw.read(name, index, box), self.tensors[name]
        if entry.format == self.raw.tensors[name].dtype:
            return (weight,)
        scales = self._scales(
            name, self.scale_of(name), box and boxes.of_parts(entry.format, entry.shape, box)[1]
        )
        return weight, scales

    def close(self) -> None:
        self.raw.close()

    def _scales(self, name: str, scale: str, box: Box | None) -> np.ndarray:
        found = self.raw.read(scale, None, box).astype(np.float32)
        is_fine = (np.isfinite(found) & (found >= 0)).all() and (
            found.all() or self._zeros_alone(name, scale)
        )
        if not is_fine:
            raise BadFile(
                f"{printable(scale)} holds a scale that is not positive and finite",
                f"it scales {printable(name)}; only a block of zeros may have the scale 0",
            )
        return found

    def _zeros_alone(self, name: str, scale: str) -> bool:
        """Whether only zeros have the scale 0."""
        weight, scales = self.raw.read(name), self.raw.read(scale)
        rows, columns = (np.arange(n) // block for n, block in zip(weight.shape, self.block, strict=True))
        is_zeroed = (scales == 0)[rows[:, None], columns]
        return not weight[is_zeroed].any()


def open_hf(path: Path) -> Safetensors:
    """Opens a released folder: config.json, and safetensors with the names that transformers writes."""
    _refuse_modelopt(path / "hf_quant_config.json")
    config = Config.from_hf(path)
    return Safetensors("safetensors", open_folder(path), config, HF, lambda name: name + SCALE)


def _refuse_modelopt(path: Path) -> None:
    """Raises Unsupported for a format that only NVIDIA's quantiser names, in a file of its own."""
    quantization = read_json(path, 1 << 20).get("quantization") if path.exists() else None
    algorithm = quantization.get("quant_algo") if isinstance(quantization, dict) else None
    if algorithm is not None:
        raise Unsupported(
            f"quantization {printable(str(algorithm))} cannot be read",
            f"{path.name} names it; known: fp8 e4m3 with block scales, as config.json of DeepSeek-V3 has it",
        )


def _entry(
    name: str, tensor: TensorSpan, scale: TensorSpan | None, scale_name: str, block: tuple[int, int]
) -> TensorEntry:
    """A tensor with its scales, if any; raises BadFile for FP8 without scales, scales without FP8, a wrong number of scales."""
    if scale is None:
        if tensor.dtype == FP8:
            raise BadFile(
                f"{printable(name)} is FP8 without scales", f"expected a tensor {printable(scale_name)}"
            )
        return TensorEntry(tensor.dtype, tensor.shape, tensor.size)
    if tensor.dtype != FP8:
        raise BadFile(
            f"{printable(scale_name)} scales a weight that is not FP8", f"{printable(name)} is {tensor.dtype}"
        )
    expected = tuple(-(-n // b) for n, b in zip(tensor.shape, block, strict=False))
    if len(tensor.shape) != 2 or scale.shape != expected or scale.dtype not in SCALE_DTYPES:
        needed = f"{list(tensor.shape)} in blocks of {list(block)} needs {list(expected)} scales"
        found = f"found {scale.dtype} {list(scale.shape)}"
        raise BadFile(f"{printable(scale_name)} does not fit {printable(name)}", f"{needed}, {found}")
    return TensorEntry(fp8_format(block), tensor.shape, tensor.size + scale.size)
