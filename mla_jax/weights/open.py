"""Opens any checkpoint as a Source. The format is recognised from the files' content, never from the path's name."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, printable
from mla_jax.base.files import allowed
from mla_jax.weights import deepseek, gguf_about, gguf_config
from mla_jax.weights.boxes import Box
from mla_jax.weights.gguf import open_gguf
from mla_jax.weights.gguf_names import GGUF
from mla_jax.weights.hf import open_hf
from mla_jax.weights.hub import NEEDS
from mla_jax.weights.layouts import SCALE_DTYPES
from mla_jax.weights.orbax_manifest import COPY_AGAIN, MANIFEST
from mla_jax.weights.orbax_names import STORE
from mla_jax.weights.orbax_store import is_store, open_store
from mla_jax.weights.source import Source, TensorEntry


class FromGGUF:
    """A GGUF file as a Source."""

    kind, table, scales = "gguf", GGUF, "F32"
    made_of: Mapping[str, Any] | None = None

    def __init__(self, path: Path):
        self.file = open_gguf(path)
        self.path, self.metadata = self.file.path, self.file.metadata
        gguf_about.refuse_other_kinds(self.metadata, self.file.tensors, printable(self.path.name))
        self.config = gguf_config.config(self.file.metadata, self.file.tensors)
        self.tensors: Mapping[str, TensorEntry] = {
            n: TensorEntry(t.type, t.shape, t.nbytes) for n, t in self.file.tensors.items()
        }

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(sorted({tensor.file for tensor in self.file.tensors.values()}))

    def read(self, name: str, index: int | None = None, box: Box | None = None) -> tuple[np.ndarray, ...]:
        return (self.file.read(name, index, box),)

    def close(self) -> None:
        self.file.close()


class FromStore:
    """A folder that mla-convert wrote, as a Source."""

    kind, table = "orbax", STORE
    metadata: Mapping[str, Any] | None = None

    def __init__(self, path: Path):
        self.store, self.path, self.config = open_store(path), path, Config.from_hf(path)
        self.made_of: Mapping[str, Any] | None = self.store.metadata
        self.scales = self.store.metadata.get("scales", "F32")
        copies = self.store.metadata.get("copies", {})
        if self.scales not in SCALE_DTYPES or not isinstance(copies, dict):
            raise BadFile(
                f"{path / MANIFEST} has invalid metadata",
                f"scales are {printable(str(self.scales))}",
                COPY_AGAIN,
            )
        self.tensors: Mapping[str, TensorEntry] = {
            n: TensorEntry(t.format, t.shape, t.nbytes) for n, t in self.store.tensors.items()
        }

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path / MANIFEST,)

    def read(self, name: str, index: int | None = None, box: Box | None = None) -> tuple[np.ndarray, ...]:
        return self.store.read(name, index, box)

    def close(self) -> None:
        pass  # no file stays open


def open_source(path: Path) -> Source:
    """Reads headers only; raises BadFile, BadConfig or Unsupported if no model can be read from `path`."""
    with allowed(path):
        return _opened(path)


def _opened(path: Path) -> Source:
    if path.is_file():
        if _begins(path, b"GGUF"):
            return FromGGUF(path)
        shown = printable(str(path), 200)
        folder = printable(str(path.parent), 200)
        raise BadFile(f"{shown} is a file, but not a GGUF file", NEEDS, f"did you mean the folder {folder}?")
    if is_store(path):
        return FromStore(path)
    names = [p.name for p in path.iterdir()] if path.is_dir() else []
    if any(deepseek.RANK_FILE.fullmatch(name) for name in names):
        return deepseek.open_deepseek(path)
    if _any_ends(names, ".gguf") and not _any_ends(names, ".safetensors"):
        return FromGGUF(path)
    return open_hf(path)


def _any_ends(names: list[str], suffix: str) -> bool:
    return any(name.endswith(suffix) for name in names)


def _begins(path: Path, magic: bytes) -> bool:
    with open(path, "rb") as file:
        return file.read(len(magic)) == magic
