"""Verifies a converted folder: all checksums, and that names, shapes and formats are those that its config.json requires."""

from collections.abc import Callable
from pathlib import Path

from mla_jax.base.errors import BadFile
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.orbax_store import is_store, open_store


def verify(folder: Path, progress: Callable[[int, int, str], None]) -> int:
    """The number of bytes that were verified; raises BadFile for the first damaged tensor."""
    if not is_store(folder):
        raise BadFile(f"{folder} is no output of mla-convert", "expected manifest.json and weights/ in it")
    source, store = Checkpoint(folder).source, open_store(folder)
    done, total = 0, sum(tensor.nbytes for tensor in source.tensors.values())
    for name, tensor in source.tensors.items():
        store.check(name)
        done += tensor.nbytes
        progress(done, total, name)
    return total
