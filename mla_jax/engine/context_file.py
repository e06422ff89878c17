"""A compressed context as a safetensors file: the cache's arrays of the tokens that stay, the text's token ids, what made it."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save_file

from mla_jax.base.errors import BadFile
from mla_jax.base.files import explained, json_value
from mla_jax.engine.core.compressed import CompressedContext
from mla_jax.weights.safetensors import TensorFiles, read_header
from mla_jax.weights.save import complete

FORMAT = "mla-jax compressed context 1"
CACHE = "cache."  # what the names of the cache's arrays begin with


def write(context: CompressedContext, path: Path) -> None:
    """Writes a file whole or not at all; raises BadRequest where it cannot be written."""
    arrays = {CACHE + name: np.ascontiguousarray(array) for name, array in context.arrays.items()}
    arrays |= {"tokens": np.asarray(context.tokens, np.int32), "counts": np.asarray(context.counts, np.int32)}
    metadata = {"format": FORMAT, "made_by": json.dumps(context.made_by)}
    with explained(path, "written"):
        if not path.parent.is_dir():  # of which safetensors has an error of its own
            raise NotADirectoryError(f"{path.parent} is no folder")
        complete(path, partial(save_file, arrays, metadata=metadata))


def read(path: Path) -> CompressedContext:
    """Reads a file; raises BadFile for one that is damaged, or something else."""
    files = TensorFiles(path, {tensor.name: tensor for tensor in read_header(path)})
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        found = f"its format is {metadata.get('format')!r}, expected {FORMAT!r}"
        raise BadFile(f"{path} is no compressed context", found, "CompressedContext.save writes one")
    try:
        arrays = {name: files.read(name) for name in files.tensors}
    finally:
        files.close()
    made_by = json_value(metadata.get("made_by", "").encode(), f"what made {path.name}")
    tokens, counts = arrays.pop("tokens", None), arrays.pop("counts", None)
    cache = {name.removeprefix(CACHE): array for name, array in arrays.items() if name.startswith(CACHE)}
    context = None
    if tokens is not None and counts is not None and isinstance(made_by, dict):
        context = CompressedContext(tokens.tolist(), counts, cache, made_by)
    if context is None or not _is_whole(context):
        raise BadFile(f"{path} is damaged", "its arrays do not belong together", "compress the text again")
    return context


def _is_whole(context: CompressedContext) -> bool:
    counts, most = context.counts, len(context.tokens)
    if counts.ndim != 2 or not counts.size or not context.arrays:
        return False
    fits = bool((counts > 0).all() and (counts <= most).all())
    return fits and all(array.ndim > 1 and len(array) == counts.sum() for array in context.arrays.values())
