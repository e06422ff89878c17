"""The weights of a model at one time, as the matrices of a released folder: in the formats they are held in, or in others."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.qtensor import BY_COLUMN, REORDERED, QTensor, fp8_format, restore
from mla_jax.model.ops import plain
from mla_jax.model.trainable import refuse_apart
from mla_jax.model.transformer import Transformer
from mla_jax.weights.fill import PLAIN_DTYPES, Parts
from mla_jax.weights.masters import parameters_by_path
from mla_jax.weights.names import Origin, key_half
from mla_jax.weights.quantize import block_columns, quantizer_of
from mla_jax.weights.safetensors import STORED_DTYPES


class HeldWeights(NamedTuple):
    """`values` are arrays and QTensors by path; the `exact` ones are float32 in any folder."""

    config: Config
    values: Mapping[str, Any]
    exact: frozenset[str]

    @classmethod
    def of(cls, model: Transformer) -> "HeldWeights":
        """Raises Unsupported as `refuse_apart` does."""
        refuse_apart(model)
        found = parameters_by_path(model)
        exact = frozenset(path for path, v in found.items() if v.get_metadata()["exact"])
        return cls(model.config, {path: v.get_raw_value() for path, v in found.items()}, exact)

    def format(self, path: str) -> str:
        """The format of a parameter, as files name it; of `uk` that of kv_b_proj."""
        value = self.values[path]
        if not isinstance(value, QTensor):
            return next(name for name, dtype in STORED_DTYPES.items() if dtype == value.dtype)
        if value.format == BY_COLUMN:
            return fp8_format((value.shape[-2], self._columns))
        return value.format.removesuffix(REORDERED)

    @property
    def _columns(self) -> int:
        """Of kv_b_proj that share a scale in a file."""
        return block_columns(self.config.quantization_config)

    def matrices(self, path: str, origin: Origin, shape: tuple[int, ...], format: str) -> Iterator[Parts]:
        """The parts of each tensor `origin.names`, which has this shape, in `format`."""
        value = self.values[path]
        if origin.part is key_half:
            yield self._joined(path, shape, format)
        elif origin.stacked:
            yield from (_parts(value[i], format) for i in range(len(origin.names)))
        else:
            yield _parts(value, format)

    def _joined(self, path: str, shape: tuple[int, ...], format: str) -> Parts:
        """kv_b_proj of its halves."""
        halves = [self.values[path], self.values[path.removesuffix("uk") + "uv"]]
        if format in PLAIN_DTYPES or format != self.format(path):
            return _encoded(
                np.concatenate([_numbers(half) for half in halves], axis=1).reshape(shape), format
            )
        codes, scales = ([np.asarray(half.parts[i]) for half in halves] for i in (0, 1))
        of_blocks = np.stack(scales, axis=1)[..., :: self._columns]
        return np.concatenate(codes, axis=1).reshape(shape), of_blocks.reshape(-1, of_blocks.shape[-1])


def _parts(value: Any, format: str) -> Parts:
    """A matrix in a format: as it is, where that is its own."""
    if isinstance(value, QTensor) and (stored := restore(value)).format == format:
        return tuple(np.asarray(part) for part in stored.parts)
    return _encoded(_numbers(value), format)


def _numbers(value: Any) -> np.ndarray:
    return np.asarray(plain(value, jnp.dtype("float32")))


def _encoded(numbers: np.ndarray, format: str) -> Parts:
    if format in PLAIN_DTYPES:
        return (numbers.astype(STORED_DTYPES[format]),)
    return quantizer_of(format)(numbers)
