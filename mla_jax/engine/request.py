"""What is asked of the engine and what it answers."""

from dataclasses import dataclass
from enum import StrEnum

from mla_jax.base.options import SamplingParams
from mla_jax.engine.stats import Stats


class FinishReason(StrEnum):
    END = "end"  # one of the model's end tokens
    LENGTH = "length"  # max_tokens, or the context is full
    STOP = "stop"  # a stop text or stop token id
    ERROR = "error"  # the model's logits were not finite


@dataclass(frozen=True)
class Request:
    """A prompt with its parameters, every default filled in."""

    prompt: list[int]
    params: SamplingParams
    ends: tuple[int, ...]  # the model's end tokens, none if ignored

    @property
    def limit(self) -> int:
        return self.params.max_tokens or 0


@dataclass(frozen=True)
class Output:
    """`token_ids` are the generated ids, the end token included; `text` is None for a model without a tokenizer.

    `logprobs`, if asked for, holds a `{token id: log-probability}` a token: the chosen one first, then the likeliest."""

    text: str | None
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[dict[int, float]] | None
    stats: Stats
