"""Perplexity of a text: each token behind as many of those before it as a window has."""

import math
from dataclasses import dataclass
from pathlib import Path

from mla_jax.base.errors import BadRequest
from mla_jax.base.files import explained
from mla_jax.engine.llm import LLM
from mla_jax.evaluate.scores import rolling, score_windows

WINDOWS_AT_ONCE = 64  # windows whose log-probabilities are held at a time


@dataclass(frozen=True)
class Perplexity:
    """`bits_per_byte` is of the text that the counted tokens are, whichever tokenizer; `tokens` are those counted."""

    perplexity: float
    bits_per_byte: float
    tokens: int


def perplexity(llm: LLM, text: str, window: int = 2048, overlap: int = 1024) -> Perplexity:
    """Of a text, in windows of `window` tokens of which `overlap` were counted before.

    Raises BadRequest for a text of fewer than two tokens, or a window that the model's context does not hold."""
    if llm.tokenizer is None:
        raise BadRequest("the model has no tokenizer", "perplexity is of a text")
    if window > llm.context:
        raise BadRequest(f"a window has {window:,} tokens", f"the model's context holds {llm.context:,}")
    tokens = llm.tokenizer.encode(text)
    if len(tokens) < 2:
        raise BadRequest("the text is too short", "its second token is the first that has a probability")
    windows, total = list(rolling(tokens, window, overlap)), 0.0
    for first in range(0, len(windows), WINDOWS_AT_ONCE):
        total += sum(found.logprob for found in score_windows(llm, windows[first : first + WINDOWS_AT_ONCE]))
    counted = len(tokens) - 1
    counted_bytes = len(text.encode()) - len(llm.tokenizer.decode(tokens[:1]).encode())
    return Perplexity(math.exp(-total / counted), -total / math.log(2) / max(1, counted_bytes), counted)


def read_text(path: Path) -> str:
    """A file's text; raises BadFile with the place where it is not UTF-8."""
    with explained(path, "read as text"):
        return path.read_text(encoding="utf-8")
