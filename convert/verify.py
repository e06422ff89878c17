"""Reads a converted folder back: every checksum, and that names, shapes and formats make the model its config describes."""

from collections.abc import Callable
from pathlib import Path

from mla_jax.base.errors import BadFile
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.orbax_store import is_store, open_store


def verify(folder: Path, progress: Callable[[int, int, str], None]) -> int:
    """How many bytes were found sound; raises BadFile for the first that is not."""
    if not is_store(folder):
        raise BadFile(f"{folder} is not what mla-convert writes", "expected manifest.json and weights/ in it")
    source, store = Checkpoint(folder).source, open_store(folder)
    done, total = 0, sum(tensor.nbytes for tensor in source.tensors.values())
    for name, tensor in source.tensors.items():
        store.check(name)
        done += tensor.nbytes
        progress(done, total, name)
    return total
