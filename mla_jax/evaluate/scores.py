"""Log-probabilities of given tokens, by the engine's scoring of prompts: nothing is generated."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mla_jax.base.errors import BadRequest
from mla_jax.base.options import SamplingParams
from mla_jax.engine.llm import LLM

SCORING = SamplingParams(max_tokens=0, prompt_logprobs=1, temperature=0.0)

Tokens = Sequence[int]


class Score(NamedTuple):
    """The log-probability of some tokens behind others, and whether each is the likeliest in its place."""

    logprob: float
    greedy: bool


class Window(NamedTuple):
    """Tokens to read, of which the last `scored` count."""

    tokens: list[int]
    scored: int


def score(llm: LLM, pairs: Sequence[tuple[Tokens, Tokens]]) -> list[Score]:
    """Of each continuation behind its context. What is longer than the model's context loses tokens on the left.

    Raises BadRequest for a continuation without a context: a first token has no probability."""
    return score_windows(llm, [_window(llm, list(context), list(after)) for context, after in pairs])


def score_windows(llm: LLM, windows: Sequence[Window]) -> list[Score]:
    """Of the tokens of each window that count."""
    asked = [window for window in windows if window.scored]
    outputs = llm.generate([window.tokens for window in asked], SCORING, progress=False) if asked else []
    found = iter(outputs)
    return [_score(window, next(found)) if window.scored else Score(0.0, True) for window in windows]


def rolling(tokens: Tokens, length: int, least: int) -> Iterator[Window]:
    """Windows of at most `length` tokens, which count each token but the first once, with at least `least` tokens before it where
    there are as many."""
    if not 1 <= least < length:
        raise BadRequest(f"windows of {length:,} tokens cannot begin with {least:,} that were counted before")
    done = 1
    while done < len(tokens):
        begin = max(0, done - least) if done > 1 else 0
        end = min(begin + length, len(tokens))
        yield Window(list(tokens[begin:end]), end - done)
        done = end


def _window(llm: LLM, context: list[int], after: list[int]) -> Window:
    if not context and after:
        raise BadRequest("a text without a context cannot be scored", "begin with the model's BOS token")
    tokens = (context + after)[-llm.context :]
    return Window(tokens, min(len(after), len(tokens) - 1))


def _score(window: Window, output) -> Score:
    entries, tokens = output.prompt_logprobs[-window.scored :], window.tokens[-window.scored :]
    own = [entry[token] for entry, token in zip(entries, tokens, strict=True)]
    likeliest = [max(entry.values()) for entry in entries]
    return Score(float(sum(own)), own == likeliest)
