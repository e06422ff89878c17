"""A user's function that changes logits before a token is drawn from them. No JAX here; `decode/processed.py` traces it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class LogitsProcessor:
    """`function(logits, tokens, state) -> (logits, state)`, pure, of JAX arrays of one row; it becomes a part of the decode loop.

    `logits` are float32 `[W]`. `tokens` are the row's so far: `tokens.ids` int32 `[C]`, of which the first `tokens.count` are
    known, the prompt's `tokens.prompt` among them. `state` is a tree of arrays or numbers, whose shapes and dtypes stay; a
    request begins with the one given here."""

    function: Callable[[Any, Any, Any], tuple[Any, Any]]
    state: Any = ()
