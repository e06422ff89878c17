"""The settings of a user, declared once for the API, the command line, a configuration file and the docs. No JAX here.

The text below a field describes it: its first line is the help of the flag, the others are for the docs alone."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Unpack

from mla_jax.base.errors import BadRequest, shown
from mla_jax.base.link_rates import PLANNED
from mla_jax.base.names import OwnNames, only_known_names, refuse_unknown
from mla_jax.base.rules import (
    biases,
    check,
    dtype_name,
    flag,
    grammar,
    json_object,
    logits_processor,
    mesh,
    named_or,
    number,
    one_of,
    option,
    optional,
    path,
    share_or_count,
    text,
    texts,
    token_ids,
    whole,
)
from mla_jax.base.settings import SettingsOfModel

MAX_STOPS = 64
MAX_LOGPROBS = 20
MAX_ROWS = 1024  # sequences computed together
MEMORY_FRACTION = 0.93  # of a GPU; in the rest CUDA has its context, graphs and kernels
MAX_BIASES = 300  # as in OpenAI's interface
MAX_ENDS = 96  # token ids that end an answer: the model's and the user's
MAX_FORKS = 128
MAX_TIMEOUT = 1e6  # seconds
ATTENTION = ("auto", "naive", "compressed", "absorbed", "move_elided", "fused")
KV_CACHE = ("auto", "fp8")
DTYPES = ("float32", "bfloat16")
DRAFT = ("auto", "off", "mtp", "lookup")
EVICT = ("off", "snapkv", "h2o", "tova", "keydiff", "critical", "kvzip", "streaming", "random")
EVERY = 512  # tokens of output after which some are dropped again
RETRIEVE = ("off", "quest", "infllm")
FEWEST_RETRIEVED = 256  # tokens of a row: the first page, the newest two, and one that is chosen
BUDGETS = ("uniform", "pyramid", "ada", "ada_floor", "ada_pyramid")
DRAFTS = 3  # draft tokens at most, unless a number is asked for
MOST_DRAFTS = 7  # behind a chosen token: a kernel over latents takes eight tokens of a row
MAX_HOST = 2**20  # GiB
MOST_PROCESSES = 4096
EXPERTS = ("auto", "host", "dense", "loop", "gather", "ragged")
# Further names: of forms and expert backends that a program has registered
OWN_ATTENTION, OWN_EXPERTS = OwnNames(ATTENTION), OwnNames(EXPERTS)


class Checked:
    """Base of option groups: values are checked against the rules of their fields when an object is made."""

    finding: ClassVar[str] = "an option has a value that cannot be used"

    def __post_init__(self):
        check(self, self.finding)


@dataclass(frozen=True)
class PromptOptions(Checked):
    """The text to continue."""

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
    chat_template_kwargs: str | None = option(None, optional(json_object))
    """Variables of the chat template for --chat, as JSON: '{"thinking": true}'."""
    json_schema: str | None = option(None, optional(text))
    """Answer in JSON of this schema: '{"type": "object"}', or @FILE."""
    config: str | Path | None = option(None, optional(path))
    """TOML file with these settings, one table per group."""


@dataclass(frozen=True)
class ModelOptions(Checked):
    """The model, its number format and its context."""

    model: str | Path | None = option(None, optional(path), alters=False)  # its files are compared
    """Model folder, GGUF file, or name in the Hugging Face cache (demo)."""
    dtype: str | None = option(None, optional(dtype_name(*DTYPES)))
    """float32 or bfloat16; by default quantised weights stay quantised.

    Weights that are not quantised are float32 on a CPU, else bfloat16. In Python also `jnp.bfloat16` and the like."""
    context: int | None = option(None, optional(whole(1)))
    """Maximum tokens of prompt and output together (the model's own limit)."""


@dataclass(frozen=True)
class AttentionOptions(Checked):
    """The form of attention, and the number format of its cache."""

    attention: str = option(
        "auto", one_of(*ATTENTION, further=OWN_ATTENTION)
    )  # alters: naive heads evict one by one
    """auto, naive, compressed, absorbed, move_elided, fused (GPU kernel)."""
    kv_cache: str = option("auto", one_of(*KV_CACHE))
    """auto (the compute dtype) or fp8 (E4M3, half the bytes)."""


@dataclass(frozen=True)
class ExpertOptions(Checked):
    """Where routed experts are computed (MoE offload to the CPU)."""

    experts: str = option("auto", one_of(*EXPERTS, further=OWN_EXPERTS))
    """auto, host (CPU), or a GPU backend: dense, loop, gather, ragged.

    auto moves the experts of as many layers to the CPU as do not fit the device, host moves all."""
    host_layers: int | None = option(None, optional(whole(0)))
    """Number of layers, from the last, whose experts run on the CPU."""
    host_precision: str | None = option(None, optional(text))
    """CPU expert weights: bf16, int8, int4_g32, ... (as stored; floats as bf16)."""
    host_folder: str | Path | None = option(None, optional(path), alters=False)
    """Keep packed CPU experts here; the next start maps them."""
    defer: int = option(0, whole(0))
    """CPU experts per token whose result is added one layer late (inexact)."""
    stream_tokens: int | None = option(None, optional(whole(0)), alters=False)
    """Prompt chunks of this size run CPU experts on the GPU; 0: never.

    The default is predicted from measured rates."""
    routing_stats: str | Path | None = option(None, optional(path), alters=False)
    """JSON file that counts expert usage; created if missing.

    The next start replicates the most used CPU experts on the device."""
    device_experts: int | None = option(None, optional(whole(0)), alters=False)
    """Most used CPU experts to replicate on the GPU; 0: none (as many as fit).

    On a mesh, copies of the most used experts of each layer that a device has in addition to its own; by default an eighth
    of these."""


@dataclass(frozen=True)
class DraftOptions(Checked):
    """Speculative decoding: draft tokens, verify them in one pass; the output stays the same."""

    draft: str = option("auto", one_of(*DRAFT), alters=False)
    """auto, off, mtp (the model's own layer), lookup (in the text so far).

    auto is the model's layer for multi-token prediction, if it has one, but off on a CPU. mtp needs one. off and lookup do
    not load it."""
    draft_tokens: int | None = option(None, optional(whole(0, MOST_DRAFTS)), alters=False)
    """Draft tokens per step, at most 7 (adaptive, at most 3)."""


@dataclass(frozen=True)
class EvictOptions(Checked):
    """Long contexts: evict tokens from the cache (inexact)."""

    evict: Any = option("off", named_or("of_block", *EVICT))  # in Python also a policy, see Evict
    """off, snapkv, h2o, tova, keydiff, critical, kvzip, streaming, random."""
    evict_budget: Any = option("uniform", named_or("counts", *BUDGETS))  # in Python also an object, see Evict
    """How layers share the tokens that are kept: uniform, pyramid, ada, ada_floor, ada_pyramid.

    With naive attention each head keeps tokens of its own, and ada shares over the heads of a layer."""
    evict_keep: float = option(0.25, share_or_count(2**20))
    """Fraction of the tokens that is kept, or, above 1, their number."""
    evict_chunk: int | None = option(None, optional(whole(64, 2**20)))
    """Tokens of a prompt after which some are dropped (default: the whole prompt)."""
    evict_sinks: int = option(4, whole(0, 4096))
    """First tokens that are always kept."""
    evict_recent: int = option(64, whole(1, 4096))
    """Newest tokens that are always kept."""


@dataclass(frozen=True)
class Evict(Checked):
    """The same settings as one value: `LLM(model, evict=Evict("snapkv", budget="ada", keep=0.1))`."""

    policy: Any = option("snapkv", named_or("of_block", *EVICT))
    """A name, or an object of a class like those of `mla_jax.cache.evict`."""
    budget: Any = option("uniform", named_or("counts", *BUDGETS))
    """A name, or an object of a class like those of `mla_jax.cache.evict`, such as `Ada(safeguard=0.5)`."""
    keep: float = option(0.25, share_or_count(2**20))
    """Fraction of the tokens that is kept, or, above 1, their number."""
    chunk: int | None = option(None, optional(whole(64, 2**20)))
    """As `evict_chunk`: a prompt may be longer than the cache then."""
    sinks: int = option(4, whole(0, 4096))
    """First tokens that are always kept."""
    recent: int = option(64, whole(1, 4096))
    """Newest tokens that are always kept."""

    def fields(self) -> dict[str, Any]:
        """These settings by the names of EvictOptions."""
        return {
            "evict": self.policy,
            "evict_budget": self.budget,
            "evict_keep": self.keep,
            "evict_chunk": self.chunk,
            "evict_sinks": self.sinks,
            "evict_recent": self.recent,
        }


@dataclass(frozen=True)
class RetrieveOptions(Checked):
    """Long contexts: keep all tokens, attend to some pages in each decode step (inexact)."""

    retrieve: str = option("off", one_of(*RETRIEVE))
    """Page selection policy: off, quest, infllm."""
    retrieve_tokens: int = option(4096, whole(FEWEST_RETRIEVED))
    """Tokens of context that a decode step attends to in each layer."""
    retrieve_window: int | None = option(None, optional(whole(1)))
    """InfLLM's local window, tokens: all before it are as far as its edge.

    So a model meets no distance that it was not trained for. By default each token is at its own distance. It is computed without
    kernels, which takes longer."""

    def __post_init__(self):
        super().__post_init__()
        window = self.retrieve_window
        if window is None:
            return
        if self.retrieve != "infllm":
            raise BadRequest("retrieve_window is InfLLM's", 'give retrieve="infllm" with it')
        least = window + FEWEST_RETRIEVED
        if self.retrieve_tokens < least:
            raise BadRequest(
                f"retrieve_tokens is {self.retrieve_tokens:,}, with a window of {window:,}",
                f"the window and a few pages before it are always read: give at least {least:,}",
            )


@dataclass(frozen=True)
class MemoryOptions(Checked):
    """Memory to reserve, and the requests that share it."""

    memory_fraction: float | None = option(None, optional(number(0, 1, above=True)), alters=False)
    """Fraction of GPU memory to use (0.93)."""
    batch: int = option(1, whole(1, MAX_ROWS), alters=False)
    """Check that this many full-length sequences fit the KV cache.

    More requests than these run at a time if they are shorter."""
    max_rows: int | None = option(None, optional(whole(1, MAX_ROWS)), alters=False)
    """Requests that run at a time (64 on a CPU, else by the cache, at most 1,024)."""
    max_waiting: int | None = option(None, optional(whole(0)), alters=False)
    """Requests that wait for these at most; more are refused (any number)."""
    cache_tokens: int | None = option(None, optional(whole(64)), alters=False)
    """Tokens of KV cache for all sequences together (as many as fit)."""
    host_cache: float = option(0.0, number(0, MAX_HOST), alters=False)
    """Host memory for evicted prefix pages, GiB (0: none)."""


@dataclass(frozen=True)
class MeshOptions(Checked):
    """Several devices."""

    mesh: str | None = option(None, optional(mesh), alters=False)  # in Python also sizes by axis, or a Mesh
    """data=4,tensor=2 (also context=N), or auto: all devices that JAX has.

    data shards requests and their latents, tensor heads, MLPs and the vocabulary, context the tokens of each request; all
    three shard experts. In Python also sizes by axis, `{"data": 4}`, or a `jax.sharding.Mesh`."""
    device: str | None = option(None, optional(one_of(*PLANNED)), alters=False)
    """With --dry-run, plan for another device: h100, h200, b200, a100, v5p, v6e."""

    def __post_init__(self):
        super().__post_init__()
        if self.device is not None and (self.mesh == "auto" or not isinstance(self.mesh, str | None)):
            raise BadRequest(
                "device needs a mesh of given sizes",
                f"{self.device} need not be here; give a mesh such as data=8",
            )


@dataclass(frozen=True)
class ProcessOptions(Checked):
    """Several hosts: the same command on each, except --process-id."""

    coordinator: str | None = option(None, optional(text), alters=False)
    """HOST:PORT of process 0, on which it listens."""
    processes: int | None = option(None, optional(whole(1, MOST_PROCESSES)), alters=False)
    """Number of processes that share the devices of --mesh."""
    process_id: int | None = option(None, optional(whole(0, MOST_PROCESSES - 1)), alters=False)
    """0 answers the prompt; the others follow it.

    In Python, make the LLM in each process; all but process 0 call `LLM.follow`."""

    def __post_init__(self):
        super().__post_init__()
        missing = [name for name in names(ProcessOptions) if getattr(self, name) is None]
        if 0 < len(missing) < len(names(ProcessOptions)):
            raise BadRequest(
                f"{missing[0]} is not given", "several processes need coordinator, processes and process_id"
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
    """Output and its place."""

    json: bool = option(False, flag)
    """One JSON object per event, on stdout."""
    out: str | Path | None = option(None, optional(path))
    """JSONL file for the answers of --batch-file; the same command resumes."""
    quiet: bool = option(False, flag)
    """Print the text only: no notes, no statistics."""
    dry_run: bool = option(False, flag)
    """Print the memory plan and the chosen forms; load no weights."""
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
        for name, kind in GROUPS.items():
            if not isinstance(value := getattr(self, name), kind):
                hint = "Options.of(...) takes single settings by name"
                raise BadRequest(f"{name} is {shown(value)}, expected {kind.__name__}", hint)

    @classmethod
    def of(cls, **settings: Unpack[SettingsOfModel]) -> "Options":
        """Options from single settings, such as `Options.of(attention="absorbed", batch=8)`."""
        return cls().replace(**settings)

    def replace(self, **settings: Unpack[SettingsOfModel]) -> "Options":
        """These options with single settings changed; raises BadRequest with a suggestion for an unknown name."""
        given = _spelled_out(dict(settings))
        refuse_unknown("LLM", given, OPENING, HOMES)
        groups = {}
        for name, kind in GROUPS.items():
            changes = {setting: given[setting] for setting in names(kind) if setting in given}
            groups[name] = dataclasses.replace(getattr(self, name), **changes)
        return dataclasses.replace(self, **groups)

    def altering(self) -> dict[str, Any]:
        """The settings of which another value may change answers by more than rounding, by name.

        The model is not among them: its files decide, not their path."""
        groups = [getattr(self, name) for name in GROUPS]
        return {
            setting.name: getattr(group, setting.name)
            for group in groups
            for setting in dataclasses.fields(group)
            if setting.metadata["alters"]
        }


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


def names(group: type) -> list[str]:
    """The settings of a group."""
    return [setting.name for setting in dataclasses.fields(group)]


# Groups by name, as the command line and a configuration file have them, and all of their settings
GROUPS: dict[str, Any] = {group.name: group.default_factory for group in dataclasses.fields(Options)}
OPENING = [setting for group in GROUPS.values() for setting in names(group)]


@dataclass(frozen=True)
class SamplingParams(Checked):
    """How tokens are chosen; by default as the model folder says, else greedily.

    None stands for that default."""

    finding = "the sampling parameters are out of range"

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
    """Maximum tokens to generate (256, or as the context allows)."""
    min_tokens: int = option(0, whole(0))
    """Tokens before which no end token comes and no stop text ends the output."""
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
    # What follows has no flags, as its type is Any
    include_stop_str_in_output: Any = option(False, flag)
    """Whether the string that ends the output is a part of it."""
    grammar: Any = option(None, optional(grammar))
    """The form of the answer: a `Grammar`, or an object such as {"regex": "[0-9]+"}."""
    logits: Any = option(None, optional(logits_processor))
    """A function that changes the logits before a token is drawn: `(logits, tokens, state) -> (logits, state)`, or a
    `LogitsProcessor`."""
    n: int = option(1, whole(1, MAX_FORKS))
    """Answers to each prompt, with seeds that follow each other."""
    timeout: float | None = option(None, optional(number(0, MAX_TIMEOUT, above=True)))
    """Seconds after which an answer ends with the tokens it has."""


HOMES = {"SamplingParams": names(SamplingParams), "LLM": OPENING}
_takers: list[Any] = [*Checked.__subclasses__(), Options]
for _group in _takers:
    _group.__init__ = only_known_names(_group.__init__, HOMES)
