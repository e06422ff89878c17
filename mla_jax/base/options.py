"""What a user may set, declared once for the API, the command line and a configuration file. No JAX here."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mla_jax.base.errors import BadRequest, printable, shown
from mla_jax.base.link_rates import PLANNED
from mla_jax.base.rules import (
    biases,
    check,
    flag,
    mesh,
    named_or,
    nearest,
    number,
    one_of,
    option,
    optional,
    path,
    text,
    texts,
    token_ids,
    whole,
)

MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_ROWS = 1024  # sequences computed together
MAX_BIASES = 300  # as in OpenAI's interface
MAX_ENDS = 96  # token ids that end an answer: the model's and the user's
MAX_FORKS = 128
ATTENTION = ("auto", "naive", "compressed", "absorbed", "move_elided", "fused")
KV_CACHE = ("auto", "fp8")
DTYPES = ("float32", "bfloat16")
DRAFT = ("auto", "off", "mtp", "lookup")
EVICT = ("off", "snapkv", "h2o", "tova", "keydiff", "critical", "streaming", "random")
EVERY = 512  # tokens of output after which some are dropped again
RETRIEVE = ("off", "quest", "infllm")
# Tokens that are read of a row: the first page, the newest two, and one that is chosen
FEWEST_RETRIEVED = 256
BUDGETS = ("uniform", "pyramid", "ada")
DRAFTS = 3  # tokens that are guessed at a time at most, unless a number is asked for
# Tokens that are guessed behind a chosen one: a kernel over latents takes eight tokens of a row
MOST_DRAFTS = 7
MAX_HOST = 2**20  # GiB
MOST_PROCESSES = 4096
EXPERTS = ("auto", "host", "dense", "loop", "gather", "ragged")


class Checked:
    """Base of option groups: values are checked against the rules of their fields when an object is made."""

    def __post_init__(self):
        check(self, "an option has a value that cannot be used")


@dataclass(frozen=True)
class PromptOptions(Checked):
    """What to continue."""

    prompt: str | None = option(None, optional(text))
    """Prompt text, the same as the plain argument; "-" reads stdin."""
    file: str | Path | None = option(None, optional(path))
    """Read the prompt from this file."""
    batch_file: str | Path | None = option(None, optional(path))
    """Answer a JSONL file, a prompt or chat per line; "-" reads stdin."""
    chat: bool = option(False, flag)
    """Interactive chat; /help lists its commands."""
    system: str | None = option(None, optional(text))
    """System prompt for --chat."""
    config: str | Path | None = option(None, optional(path))
    """TOML file with these settings, one table per group."""


@dataclass(frozen=True)
class ModelOptions(Checked):
    """Which model to run."""

    model: str | Path | None = option(None, optional(path))
    """Model folder, GGUF file, or name in the Hugging Face cache (demo)."""
    dtype: str | None = option(None, optional(one_of(*DTYPES)))
    """float32 or bfloat16; by default quantised weights stay quantised."""
    context: int | None = option(None, optional(whole(1)))
    """Maximum tokens of prompt and output together."""


@dataclass(frozen=True)
class AttentionOptions(Checked):
    """How attention is computed."""

    attention: str = option("auto", one_of(*ATTENTION))
    """auto, naive, compressed, absorbed, move_elided, fused (GPU kernel)."""
    kv_cache: str = option("auto", one_of(*KV_CACHE))
    """auto (the compute dtype) or fp8 (E4M3, half the bytes)."""


@dataclass(frozen=True)
class ExpertOptions(Checked):
    """Where routed experts are computed (MoE offload to the CPU)."""

    experts: str = option("auto", one_of(*EXPERTS))
    """auto, host (CPU), or a GPU backend: dense, loop, gather, ragged."""
    host_layers: int | None = option(None, optional(whole(0)))
    """Number of layers, from the last, whose experts run on the CPU."""
    host_precision: str | None = option(None, optional(text))
    """CPU expert weights: bf16, int8, int4_g32, ... (as stored)."""
    host_folder: str | Path | None = option(None, optional(path))
    """Keep packed CPU experts here; the next start maps them."""
    defer: int = option(0, whole(0))
    """CPU experts per token whose result is added one layer late (inexact)."""
    stream_tokens: int | None = option(None, optional(whole(0)))
    """Prompt chunks of this size run CPU experts on the GPU; 0: never."""
    routing_stats: str | Path | None = option(None, optional(path))
    """JSON file that counts expert usage; created if missing."""
    device_experts: int | None = option(None, optional(whole(0)))
    """Most used CPU experts to replicate on the GPU; 0: none."""


@dataclass(frozen=True)
class DraftOptions(Checked):
    """Speculative decoding: guess several tokens, read them together; the output stays the same."""

    draft: str = option("auto", one_of(*DRAFT))
    """auto, off, mtp (the model's own layer), lookup (in the text so far)."""
    draft_tokens: int | None = option(None, optional(whole(0, MOST_DRAFTS)))
    """Tokens guessed at a time (as many as pay, up to 3)."""


@dataclass(frozen=True)
class EvictOptions(Checked):
    """Long contexts: drop tokens from the cache (inexact)."""

    evict: str = option("off", named_or("of_block", *EVICT))  # in Python also a policy, see Evict
    """off, snapkv, h2o, tova, keydiff, critical, streaming, random."""
    evict_budget: str = option("ada", one_of(*BUDGETS))
    """How layers (with naive, heads) share what is kept: uniform, pyramid, ada."""
    evict_keep: float = option(0.25, number(0, 1, above=True))
    """Fraction of the tokens that is kept."""


@dataclass(frozen=True)
class Evict(Checked):
    """The same settings as one value: `LLM(model, evict=Evict("snapkv", budget="ada", keep=0.25))`."""

    policy: Any = option("snapkv", named_or("of_block", *EVICT))
    """A name, or a policy of one's own: an object of a class like those of `mla_jax.cache.evict`."""
    budget: str = option("ada", one_of(*BUDGETS))
    """How layers, or heads where they are cached, share what is kept."""
    keep: float = option(0.25, number(0, 1, above=True))
    """Fraction of the tokens that is kept."""

    def fields(self) -> dict[str, Any]:
        """These settings by the names of EvictOptions."""
        return {"evict": self.policy, "evict_budget": self.budget, "evict_keep": self.keep}


@dataclass(frozen=True)
class RetrieveOptions(Checked):
    """Long contexts: keep all tokens, read some of them in each decode step (inexact)."""

    retrieve: str = option("off", one_of(*RETRIEVE))
    """off, quest, infllm: who chooses what is read."""
    retrieve_tokens: int = option(4096, whole(FEWEST_RETRIEVED))
    """Tokens of context that a decode step reads in each layer."""


@dataclass(frozen=True)
class MemoryOptions(Checked):
    """What to reserve."""

    memory_fraction: float | None = option(None, optional(number(0, 1, above=True)))
    """Fraction of GPU memory to use (0.75)."""
    batch: int = option(1, whole(1, MAX_ROWS))
    """Sequences of the whole context that the KV cache must hold at once."""
    cache_tokens: int | None = option(None, optional(whole(64)))
    """Tokens of KV cache for all sequences together (as many as fit)."""
    host_cache: float = option(0.0, number(0, MAX_HOST))
    """GiB of host memory for cached prefixes that the KV cache forgets."""


@dataclass(frozen=True)
class MeshOptions(Checked):
    """Several devices."""

    mesh: str | None = option(None, optional(mesh))  # in Python also sizes by axis, or a jax.sharding.Mesh
    """data=4,tensor=2 (also context=N), or auto: all devices that JAX has."""
    device: str | None = option(None, optional(one_of(*PLANNED)))
    """With --dry-run, for others than are here: h100, h200, b200, a100, v5p, v6e."""

    def __post_init__(self):
        super().__post_init__()
        if self.device is not None and (self.mesh == "auto" or not isinstance(self.mesh, str | None)):
            raise BadRequest(
                "device needs a mesh of given sizes",
                f"{self.device} need not be here; give a mesh such as data=8",
            )


@dataclass(frozen=True)
class ProcessOptions(Checked):
    """Several hosts: the same command on each, but for --process-id."""

    coordinator: str | None = option(None, optional(text))
    """HOST:PORT of process 0, on which it listens."""
    processes: int | None = option(None, optional(whole(1, MOST_PROCESSES)))
    """Number of processes that share the devices of --mesh."""
    process_id: int | None = option(None, optional(whole(0, MOST_PROCESSES - 1)))
    """0 answers the prompt; the others follow it."""

    def __post_init__(self):
        super().__post_init__()
        given = {name: getattr(self, name) is not None for name in names(ProcessOptions)}
        if any(given.values()) and not all(given.values()):
            missing = next(name for name, is_given in given.items() if not is_given)
            raise BadRequest(
                f"{missing} is not given", "several processes need coordinator, processes and process_id"
            )
        if self.processes is not None and self.process_id is not None and self.process_id >= self.processes:
            raise BadRequest(f"process_id is {self.process_id}", f"expected 0 to {self.processes - 1}")

    @property
    def several(self) -> bool:
        return self.processes is not None and self.processes > 1

    @property
    def follows(self) -> bool:
        """Whether another process has the prompts."""
        return bool(self.several and self.process_id)


@dataclass(frozen=True)
class OutputOptions(Checked):
    """What is printed."""

    json: bool = option(False, flag)
    """One JSON object per event, on stdout."""
    out: str | Path | None = option(None, optional(path))
    """JSONL file for the answers of --batch-file; the same command resumes."""
    quiet: bool = option(False, flag)
    """Print the text only: no notes, no statistics."""
    dry_run: bool = option(False, flag)
    """Print the memory plan and what would run; load no weights."""
    doctor: bool = option(False, flag)
    """Check this environment, then exit."""
    debug: bool = option(False, flag)
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Options:
    """Everything that a model is opened with, in the groups of the flags and of the TOML file.

    Raises BadRequest for a value of a wrong type or out of range, before JAX is imported."""

    model: ModelOptions = field(default_factory=ModelOptions)
    attention: AttentionOptions = field(default_factory=AttentionOptions)
    experts: ExpertOptions = field(default_factory=ExpertOptions)
    drafts: DraftOptions = field(default_factory=DraftOptions)
    eviction: EvictOptions = field(default_factory=EvictOptions)
    retrieval: RetrieveOptions = field(default_factory=RetrieveOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    mesh: MeshOptions = field(default_factory=MeshOptions)
    processes: ProcessOptions = field(default_factory=ProcessOptions)

    def __post_init__(self):
        for group in dataclasses.fields(self):
            value, kind = getattr(self, group.name), GROUPS[group.name]
            if not isinstance(value, kind):
                hint = "Options.of(...) takes single settings by name"
                raise BadRequest(f"{group.name} is {shown(value)}, expected {kind.__name__}", hint)

    @classmethod
    def of(cls, **fields: Any) -> "Options":
        """Options from single settings, such as `Options.of(attention="absorbed", batch=8)`."""
        return cls().replace(**fields)

    def replace(self, **fields: Any) -> "Options":
        """These options with single settings changed; raises BadRequest with a suggestion for an unknown name."""
        fields = _spelled_out(fields)
        group_of = {setting: group for group, kind in GROUPS.items() for setting in names(kind)}
        changes: dict[str, dict[str, Any]] = {}
        for name, value in fields.items():
            if name not in group_of:
                raise BadRequest(f"there is no option {printable(name)}", nearest(name, group_of))
            changes.setdefault(group_of[name], {})[name] = value
        groups = {
            group: dataclasses.replace(getattr(self, group), **values) for group, values in changes.items()
        }
        return dataclasses.replace(self, **groups)


def _spelled_out(fields: dict[str, Any]) -> dict[str, Any]:
    """With single settings in the place of an Evict; raises BadRequest where it and a setting say the same."""
    evict = fields.get("evict")
    if not isinstance(evict, Evict):
        return fields
    own = evict.fields()
    twice = [name for name in own if name in fields and name != "evict"]
    if twice:
        raise BadRequest(f"{twice[0]} is given twice", "once as a part of evict=Evict(...)")
    return fields | own


GROUPS: dict[str, type] = {
    "model": ModelOptions,
    "attention": AttentionOptions,
    "experts": ExpertOptions,
    "drafts": DraftOptions,
    "eviction": EvictOptions,
    "retrieval": RetrieveOptions,
    "memory": MemoryOptions,
    "mesh": MeshOptions,
    "processes": ProcessOptions,
}


def names(group: type) -> list[str]:
    """The settings of a group."""
    return [setting.name for setting in dataclasses.fields(group)]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; by default as the model folder says, else greedily.

    None stands for that default."""

    temperature: float | None = option(None, optional(number(0, 1e3)))
    """Sampling temperature; 0 is greedy."""
    top_k: int | None = option(None, optional(whole(0)))
    """Sample from the k most likely tokens; 0: all."""
    top_p: float | None = option(None, optional(number(0, 1)))
    """Nucleus sampling: the most likely tokens that add up to this."""
    min_p: float = option(0.0, number(0, 1))
    """Drop tokens below this fraction of the most likely one's probability."""
    presence_penalty: float = option(0.0, number(-100, 100))
    """Subtracted from the logits of tokens already generated."""
    frequency_penalty: float = option(0.0, number(-100, 100))
    """Subtracted from the logit of a token for each time it was generated."""
    repetition_penalty: float = option(1.0, number(1e-3, 1e3))
    """Above 1 penalises tokens of the prompt and the output."""
    max_tokens: int | None = option(None, optional(whole(0)))
    """Maximum tokens to generate (256, or what the context allows)."""
    stop: tuple[str, ...] | str = option((), texts(MAX_STOPS))
    """Strings that end the output; not part of it."""
    stop_token_ids: tuple[int, ...] = option((), token_ids(MAX_STOPS))
    """Further token ids that end the output."""
    ignore_eos: bool = option(False, flag)
    """Continue after the model's end tokens."""
    seed: int | None = option(None, optional(whole(0, 2**64 - 1)))
    """Random seed; drawn and printed if not given."""
    logprobs: int | None = option(None, optional(whole(0, MAX_LOGPROBS)))
    """Print log-probabilities of tokens and this many alternatives, to stderr."""
    prompt_logprobs: int | None = option(None, optional(whole(0, MAX_LOGPROBS)))
    """The same for the tokens of the prompt."""
    logit_bias: Mapping[int, float] | None = option(None, optional(biases(MAX_BIASES)))
    """Added to the logits of these token ids."""
    n: int = option(1, whole(1, MAX_FORKS))
    """Answers to each prompt, with seeds that follow each other."""

    def __post_init__(self):
        check(self, "the sampling parameters are out of range")

    def or_default(self, defaults: "SamplingParams") -> "SamplingParams":
        """The same with every None replaced by what `defaults` says."""
        unset = {
            name: getattr(defaults, name) for name in names(SamplingParams) if getattr(self, name) is None
        }
        return dataclasses.replace(self, **unset)
