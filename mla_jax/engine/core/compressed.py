"""A compressed context: what stays of a text that many prompts begin with, on the host or in a safetensors file."""

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import safetensors
from safetensors.numpy import save_file

from mla_jax.base.errors import BadFile
from mla_jax.base.files import explained, json_value
from mla_jax.weights.safetensors import TensorFiles, read_header
from mla_jax.weights.save import complete

FORMAT = "mla-jax compressed context 1"
CACHE = "cache."  # what the names of the cache's arrays begin with


@dataclass(frozen=True, eq=False)
class CompressedContext:
    """Made by `LLM.compress`; `LLM.generate(.., context=..)` puts it in front of prompts.

    `arrays` are those of the cache: the tokens that stay of all layers and heads, one behind the other, `[sum(counts) ..]`."""

    tokens: list[int]  # of the text, those that were dropped included
    counts: np.ndarray  # int32 `[layers heads]`, or `[layers 1]` for latents: tokens that stay
    arrays: dict[str, np.ndarray]
    made_by: dict[str, str] = field(
        default_factory=dict
    )  # must be the same where it is used: see `Compressing`

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def save(self, path: str | Path) -> None:
        """Writes it to a file of its own, which `LLM.open_context` opens. Raises BadRequest where that cannot be written."""
        arrays = {CACHE + name: np.ascontiguousarray(array) for name, array in self.arrays.items()}
        arrays |= {"tokens": np.asarray(self.tokens, np.int32), "counts": np.asarray(self.counts, np.int32)}
        metadata = {"format": FORMAT, "made_by": json.dumps(self.made_by)}
        path = Path(path)
        with explained(path, "written"):
            if not path.parent.is_dir():  # of which safetensors has an error of its own
                raise NotADirectoryError(f"{path.parent} is no folder")
            complete(path, partial(save_file, arrays, metadata=metadata))

    def __repr__(self) -> str:
        share = self.counts.mean() / max(len(self.tokens), 1)
        return f"CompressedContext({len(self.tokens):,} tokens, {share:.1%} kept, {self.nbytes / 2**20:,.1f} MiB)"


def read_context(path: Path) -> CompressedContext:
    """Reads a file that `CompressedContext.save` has written; raises BadFile for one that is damaged, or something else."""
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
