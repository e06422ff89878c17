"""The interface of every checkpoint format for the loader and the converter: named tensors, their config, their names table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mla_jax.base.config import Config
from mla_jax.weights.boxes import Box
from mla_jax.weights.names import NameTable


class TensorEntry(NamedTuple):
    """A tensor as it is stored: `format` is the safetensors name of a plain dtype, or a format of base/qtensor.py.

    Reading a part of it takes `copies` times its bytes of memory besides."""

    format: str
    shape: tuple[int, ...]
    nbytes: int
    copies: int = 0


@runtime_checkable
class Source(Protocol):
    """A checkpoint. `metadata` is a GGUF file's metadata, tokenizer included; other formats keep these in files and have None."""

    @property
    def kind(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> Config: ...
    @property
    def table(self) -> NameTable: ...
    @property
    def tensors(self) -> Mapping[str, TensorEntry]: ...
    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any] | None: ...

    @property
    def scales(self) -> str:
        """The safetensors name of the dtype in which FP8 scales are stored; `read` returns float32."""
        ...

    @property
    def made_of(self) -> Mapping[str, Any] | None:
        """The record that mla-convert left when it made this checkpoint; None for others."""
        ...

    def read(self, name: str, index: int | None = None, box: Box | None = None) -> tuple[np.ndarray, ...]:
        """The parts of a tensor, or of one entry of its first axis; a plain tensor is its own single part.

        With a `box`, of that part of the tensor or entry alone: it is counted in values, and parts no block of a packed one."""
        ...

    def close(self) -> None:
        """Closes the files; raises BadFile if one changed while it was open."""
        ...
