"""What a user may set, once for the API, the command line and a configuration file. No JAX here."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass

from mla_jax.base.errors import BadRequest, printable

MAX_STOPS = 64
MAX_LOGPROBS = 20


@dataclass(frozen=True)
class PromptOptions:
    """What to continue: an argument, a file, stdin, or a conversation."""

    prompt: str | None = None
    """Text to continue, as the plain argument; "-" reads stdin."""
    file: str | None = None
    """Read the prompt from this file."""
    chat: bool = False
    """Talk with the model, turn by turn."""
    config: str | None = None
    """TOML file with these settings, by group."""


@dataclass(frozen=True)
class ModelOptions:
    """Which model."""

    model: str | None = None
    """Folder, GGUF file or name in the Hub's cache; else the demo."""
    dtype: str | None = None
    """float32 or bfloat16; else quantised weights stay so."""
    context: int | None = None
    """Most tokens of prompt and output together."""


@dataclass(frozen=True)
class AttentionOptions:
    """How attention is computed."""

    attention: str = "auto"
    """naive, compressed, absorbed, move_elided, fused (one kernel) or auto."""
    kv_cache: str = "auto"
    """fp8 holds latents in E4M3, in half the bytes; auto as computed."""


@dataclass(frozen=True)
class ExpertOptions:
    """Where routed experts lie and how they are computed."""

    experts: str = "auto"
    """host, or on the device dense, loop, gather or ragged; else auto."""
    host_layers: int | None = None
    """Layers whose experts the CPU computes: MTP's, then the last."""
    host_precision: str | None = None
    """bf16, int8, int4_g32 ... on the CPU; else as they are stored."""
    host_folder: str | None = None
    """Keep packed experts here; the next start maps them."""
    defer: int = 0
    """Experts per token on the CPU added one layer later (inexact)."""
    stream_tokens: int | None = None
    """Tokens from which the device computes these; 0 for never."""
    routing_stats: str | None = None
    """File that counts which experts tokens choose; made if need be."""
    device_experts: int | None = None
    """Experts on the CPU that lie on the device, too; 0 for none."""


@dataclass(frozen=True)
class MemoryOptions:
    """What may be used, and whether it fits."""

    memory_fraction: float | None = None
    """Share of the device's memory to take (0.75 on a GPU)."""
    batch: int = 1
    """Answers side by side that memory and experts are planned for."""
    dry_run: bool = False
    """Say what would be needed and run; reads no weights."""


@dataclass(frozen=True)
class OutputOptions:
    """What is printed."""

    json: bool = False
    """One JSON object an event, on stdout."""
    quiet: bool = False
    """Text only: no notes, no statistics."""
    doctor: bool = False
    """Check this environment, then stop."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. None takes the model folder's own default, else greedy decoding."""

    temperature: float | None = None
    """Spread of the draw; 0 takes the likeliest token."""
    top_k: int | None = None
    """Draw among the k likeliest; 0 for all."""
    top_p: float | None = None
    """Draw among the likeliest that reach this probability."""
    min_p: float = 0.0
    """Drop tokens below this share of the likeliest one's."""
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens generated before."""
    repetition_penalty: float = 1.0
    """Weakens tokens of prompt and output; above 1."""
    max_tokens: int | None = None
    """Most tokens to generate (256, or what fits)."""
    stop: tuple[str, ...] | str = ()
    """Texts that end the output; not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, besides the model's."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    seed: int | None = None
    """Of the draw; drawn, and printed, if not given."""
    logprobs: int | None = None
    """Report each token's log-probability and this many more."""

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
