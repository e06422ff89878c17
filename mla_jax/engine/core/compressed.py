"""A compressed context: what stays of a text that many prompts begin with, on the host."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np


@dataclass(frozen=True, eq=False)
class CompressedContext:
    """Made by `LLM.compress`; `LLM.generate(.., context=..)` puts it in front of prompts.

    `arrays` are those of the cache: the tokens that stay of all layers and heads, one behind the other, `[sum(counts) ..]`."""

    tokens: list[int]  # of the text, those that were dropped included
    counts: np.ndarray  # int32 `[layers heads]`, or `[layers 1]` for latents: tokens that stay
    arrays: dict[str, np.ndarray]
    made_by: dict[str, str] = field(
        default_factory=dict
    )  # what must be the same where it is used: see `LLM.maker`

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())

    def save(self, path: str | Path) -> None:
        """Writes it to a file of its own, which `LLM.open_context` opens. Raises BadRequest where that cannot be written."""
        from mla_jax.engine.context_file import write

        write(self, Path(path))

    def __repr__(self) -> str:
        share = self.counts.mean() / max(len(self.tokens), 1)
        return f"CompressedContext({len(self.tokens):,} tokens, {share:.1%} kept, {self.nbytes / 2**20:,.1f} MiB)"
