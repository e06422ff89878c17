"""The settings of the two commands. No JAX here."""

from dataclasses import dataclass
from pathlib import Path

from mla_jax.base.options import Checked
from mla_jax.base.rules import flag, one_of, option, optional, path, texts, token_ids, whole

MOST_LOADS = 32  # loads of one kind


@dataclass(frozen=True)
class PerplexityOptions(Checked):
    """The text whose perplexity is computed."""

    file: str | Path | None = option(None, optional(path))
    """The text, in UTF-8."""
    window: int | None = option(None, optional(whole(2)))
    """Tokens that are read together (2048, or the context)."""
    overlap: int | None = option(None, optional(whole(1)))
    """Tokens of a window that were counted before (half)."""
    config: str | Path | None = option(None, optional(path))
    """TOML file with these settings, one table per group."""
    debug: bool = option(False, flag)
    """Show the traceback of an error."""


@dataclass(frozen=True)
class BenchOptions(Checked):
    """The loads that are timed, as llama-bench names them."""

    prompts: tuple[int, ...] = option((512,), token_ids(MOST_LOADS))
    """Prompts with this number of tokens: pp512."""
    outputs: tuple[int, ...] = option((128,), token_ids(MOST_LOADS))
    """Outputs with this number of tokens behind one: tg128."""
    both: tuple[str, ...] | str = option((), texts(MOST_LOADS))
    """Prompt and output of one request, such as 512,128."""
    rows: tuple[int, ...] = option((1,), token_ids(MOST_LOADS))
    """Requests at a time, each in turn."""
    repeats: int = option(5, whole(1, 1000))
    """Runs of each, after one that is not timed."""
    form: str = option("markdown", one_of("markdown", "jsonl"))
    """markdown or jsonl."""
    config: str | Path | None = option(None, optional(path))
    """TOML file with these settings, one table per group."""
    debug: bool = option(False, flag)
    """Show the traceback of an error."""
