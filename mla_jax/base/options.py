"""What a user may set, once for the API, the command line and a configuration file. No JAX here."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from mla_jax.base.errors import BadRequest, printable

MAX_STOPS = 64
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class LLMOptions:
    """Which model, and how it runs."""

    model: str | None = None
    """A folder with config.json, *.safetensors and, for text, tokenizer.json."""
    attention: str = "auto"
    """naive, compressed, absorbed, move_elided, or auto: the fastest for each phase."""
    dtype: str | None = None
    """float32 or bfloat16; by default float32 on a CPU, bfloat16 elsewhere."""
    context: int | None = None
    """The most tokens of prompt and output together; by default what the model allows."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. None takes the model folder's own default, else greedy decoding."""

    temperature: float | None = None
    """0 takes the likeliest token; above, the spread of the draw."""
    top_k: int | None = None
    """Draw among the k likeliest only; 0 for all."""
    top_p: float | None = None
    """Draw among the likeliest that together reach this probability."""
    min_p: float = 0.0
    """Drop tokens below this share of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens already generated."""
    repetition_penalty: float = 1.0
    """Divides the positive, multiplies the negative logits of tokens in prompt or output."""
    max_tokens: int | None = None
    """Tokens to generate at most; by default 256, or what fits the context."""
    stop: tuple[str, ...] | str = ()
    """Texts that end the output; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, besides the model's own."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    seed: int | None = None
    """Of the draw, which depends on it and on the position alone; drawn if not given."""
    logprobs: int | None = None
    """Report the log-probability of each token, and of this many likeliest ones."""

    def __post_init__(self):
        for name in ("stop", "stop_token_ids"):
            given = getattr(self, name)
            several = isinstance(given, Iterable) and not isinstance(given, str)
            object.__setattr__(self, name, tuple(given) if several else (given,))
        if faults := _faults(self):
            raise BadRequest("the sampling parameters are out of range", *faults)

    def or_default(self, defaults: "SamplingParams") -> "SamplingParams":
        """The same with every None replaced by what `defaults` says."""
        unset = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) is None}
        return dataclasses.replace(self, **unset)


def _faults(p: SamplingParams) -> list[str]:
    faults = []

    def check(name: str, low: float, high: float, integer: bool = False):
        value = getattr(p, name)
        if value is None:
            return
        kind = int if integer else (int, float)
        if not isinstance(value, kind) or isinstance(value, bool) or not (low <= value <= high):
            shown = f"{low:g} to {high:g}" if high < 1e9 else f"{low:g} or more"
            faults.append(f"{name} is {printable(repr(value))}, expected {'a whole number ' if integer else ''}{shown}")

    check("temperature", 0, 1e3)
    check("top_k", 0, math.inf, integer=True)
    check("top_p", 0, 1)
    check("min_p", 0, 1)
    check("presence_penalty", -100, 100)
    check("repetition_penalty", 1e-3, 1e3)
    check("max_tokens", 0, math.inf, integer=True)
    check("seed", 0, 2**64 - 1, integer=True)
    check("logprobs", 0, MAX_LOGPROBS, integer=True)
    if not all(isinstance(s, str) and s for s in p.stop):
        faults.append("stop holds an empty text or something that is no text")
    if len(p.stop) > MAX_STOPS:
        faults.append(f"stop holds {len(p.stop):,} texts, the limit is {MAX_STOPS}")
    if not all(isinstance(t, int) and not isinstance(t, bool) and 0 <= t < 2**31 for t in p.stop_token_ids):
        faults.append("stop_token_ids holds something that is no token id")
    if len(p.stop_token_ids) > MAX_STOPS:
        faults.append(f"stop_token_ids holds {len(p.stop_token_ids):,} ids, the limit is {MAX_STOPS}")
    return faults
