"""Requests to the engine and their outputs."""

from dataclasses import dataclass, replace
from enum import StrEnum

from mla_jax.base.options import SamplingParams
from mla_jax.engine.core.compressed import CompressedContext
from mla_jax.engine.core.stats import Stats
from mla_jax.text.answers.parts import Part

Logprobs = list[dict[int, float]]  # one entry per token: the chosen id first, then the most likely ones


class FinishReason(StrEnum):
    END = "end"  # one of the model's end tokens
    LENGTH = "length"  # max_tokens, or the context is full
    STOP = "stop"  # a stop text or stop token id
    ERROR = "error"  # the model's logits were not finite
    TIMEOUT = "timeout"  # its time was up
    CANCELLED = "cancelled"  # nobody wanted the rest


@dataclass(frozen=True)
class Request:
    """A prompt with its parameters, every default filled in."""

    prompt: list[int]
    params: SamplingParams
    ends: tuple[int, ...]  # the model's end tokens, none if ignored
    context: CompressedContext | None = None  # what the prompt begins with, if that was read before
    # Where the compressed context alone is wanted: the number of the prompt's last tokens, which score the others and do not stay
    asking: int | None = None

    def fork(self, index: int) -> "Request":
        """The same with a seed that is `index` further, modulo 2^64."""
        seed = ((self.params.seed or 0) + index) % 2**64
        return self if not index else replace(self, params=replace(self.params, seed=seed))

    @property
    def begin(self) -> int:
        """Tokens of the prompt that were read before."""
        return 0 if self.context is None else len(self.context.tokens)

    @property
    def limit(self) -> int:
        return self.params.max_tokens or 0

    @property
    def all_ends(self) -> tuple[int, ...]:
        """Every token id that ends the output."""
        return (*self.ends, *self.params.stop_token_ids)


@dataclass(frozen=True)
class Chunk:
    """Output since the previous chunk: text that is final, and the generated ids. The last chunk has a finish reason."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: Logprobs | None = None
    # In the first chunk, if the request wanted them
    prompt_logprobs: list[dict[int, float] | None] | None = None
    # Of an answer that is read in a format; `text` is their content
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Output:
    """`token_ids` are the generated ids, the end token included; `text` is None for a model without a tokenizer.

    `logprobs` has one entry per generated token if the request wanted them: `{token id: log-probability}`."""

    text: str | None
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: FinishReason
    logprobs: Logprobs | None
    stats: Stats
    # One entry per token of the prompt, None for the first
    prompt_logprobs: list[dict[int, float] | None] | None = None
