"""What every kind of checkpoint is to the loader and the converter: named tensors, the config they fit, and their names table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from mla_jax.base.config import Config
from mla_jax.weights.names import Table


class Entry(NamedTuple):
    """A tensor as it is stored: `format` is a plain dtype by its name in safetensors, or a format of base/qtensor.py."""

    format: str
    shape: tuple[int, ...]
    nbytes: int


@runtime_checkable
class Source(Protocol):
    """`metadata` is what a GGUF file says of itself, its tokenizer included; other kinds have files beside the weights."""

    @property
    def kind(self) -> str: ...
    @property
    def path(self) -> Path: ...
    @property
    def config(self) -> Config: ...
    @property
    def table(self) -> Table: ...
    @property
    def tensors(self) -> Mapping[str, Entry]: ...
    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        ...

    @property
    def metadata(self) -> Mapping[str, Any] | None: ...

    @property
    def scales(self) -> str:
        """The dtype in which FP8 scales lie, by its name in safetensors; they are read as float32."""
        ...

    @property
    def made_of(self) -> Mapping[str, Any] | None:
        """What mla-convert wrote down when it made this; None of what comes from elsewhere."""
        ...

    def read(self, name: str, index: int | None = None) -> tuple[np.ndarray, ...]:
        """The parts of a tensor, or of one entry of its first axis; those of a plain one are itself."""
        ...

    def close(self) -> None:
        """Closes the files; raises BadFile if one changed while it was open."""
        ...
