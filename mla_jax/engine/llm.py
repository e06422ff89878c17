"""LLM: a checkpoint as an object that answers prompts."""

import contextlib
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base.batch import bucket
from mla_jax.base.errors import BadRequest, DoesNotFit, Unsupported, printable
from mla_jax.base.files import cache_folder
from mla_jax.base.options import AttentionOptions, ExpertOptions, SamplingParams
from mla_jax.cache.latent import slots_for
from mla_jax.decode import store
from mla_jax.decode.loop import Programs
from mla_jax.engine.batch import Batch
from mla_jax.engine.explain import explain
from mla_jax.engine.request import Chunk, FinishReason, Output, Request
from mla_jax.engine.stats import Stats
from mla_jax.engine.text import open_text
from mla_jax.model import packed_latents
from mla_jax.model.mla import FORMS
from mla_jax.model.moe import BACKENDS
from mla_jax.weights import measure
from mla_jax.weights.hub import resolve
from mla_jax.weights.load import Checkpoint, Progress
from mla_jax.weights.placement import Placement, place
from mla_jax.weights.plan import gib, plan, slot_bytes
from mla_jax.weights.routing import Routing

DEFAULT_MAX_TOKENS = 256
MAX_ROWS = 64  # prompts computed together
MAX_PROMPTS = 100_000  # in one call
STOP_CHECK = 16  # tokens between two looks for stop texts
STREAM_EVERY = 8  # tokens between two chunks of a stream
DTYPES = ("float32", "bfloat16")


class LLM:
    """A model on the default device. `notes` says what a user of the folder should know."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        attention: str = "auto",
        kv_cache: str = "auto",
        dtype: str | None = None,
        context: int | None = None,
        experts: str = "auto",
        host_layers: int | None = None,
        host_precision: str | None = None,
        host_folder: str | Path | None = None,
        defer: int = 0,
        stream_tokens: int | None = None,
        routing_stats: str | Path | None = None,
        device_experts: int | None = None,
        memory_fraction: float | None = None,
        batch: int = 1,
        progress: Progress | None = None,
    ):
        """`model` is a folder of safetensors or from mla-convert, a GGUF file, or a name in the Hub's local cache (None: the
        bundled demo model), `attention` a form of MLA or "auto", `kv_cache` "fp8" to hold latents in E4M3, `dtype` "float32" or
        "bfloat16" (None: quantised weights stay as they are, others are float32 on a CPU, else bfloat16), `context` the most
        tokens of prompt and output together.
        `experts` "host" has the CPU compute all routed experts, "auto" those of as many layers, `host_layers` overriding how
        many, as do not fit the device; else it names a backend on the device. `host_precision` is theirs there (None: as they
        are stored, floats in bf16), `host_folder` keeps them packed and maps them at the next start, and `defer` of a token's
        (-1: as many as are predicted to gain) are added a layer later while decoding, which is not exact. Chunks of a prompt
        with `stream_tokens` tokens or more (None: as predicted from measured rates, 0: none) have these experts brought to the
        device instead, and computed there. `routing_stats` is a JSON file of how often each expert of each layer was chosen, made
        if it is not there and added to after each answer: at the next start what memory the device has left is spent on copies
        of the hottest of these experts. `device_experts` overrides how many (0: none).
        `batch` answers side by side are what the memory plan and the choice of experts to move count on; others run, too.
        `progress` hears of the bytes loaded and of all there are. Raises BadFile, BadConfig, Unsupported, BadRequest or
        DoesNotFit before any large allocation."""
        folder, counts = (None if path is None else str(path) for path in (host_folder, routing_stats))
        checkpoint, self.placement = open_checkpoint(
            model,
            attention=AttentionOptions(attention, kv_cache),
            dtype=dtype,
            context=context,
            experts=ExpertOptions(experts, host_layers, host_precision, folder, defer, stream_tokens, counts, device_experts),
            memory_fraction=memory_fraction,
            batch=batch,
        )
        self.config, text = checkpoint.config, open_text(checkpoint.source)
        self.tokenizer, self.chat_template, self.defaults, self.end_ids, notes = text
        self.notes = (*self.config.notes, *notes)
        self.context = check_context(context, self.config.max_position_embeddings)
        self.plan = plan(checkpoint, self.context, batch)
        self.plan.refuse()
        self._formats, self._routing = checkpoint.formats(), None
        if routing_stats is not None:
            self._routing = Routing.open(Path(routing_stats), self.config)
            self._routing.save()  # if that fails, then not after all the work
        with self._memory_explained():
            self.model = checkpoint.read(progress, None if host_folder is None else Path(host_folder))
        self.last_stats: Stats | None = None  # of the newest stream
        self._programs = Programs(self.model, counts=self._routing is not None, folder=store.default_folder())

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Continues each prompt, a text or a list of token ids; always a list, in the order given."""
        requests, outputs = self._requests(prompts, params), []
        for start in range(0, len(requests), MAX_ROWS):
            part = requests[start : start + MAX_ROWS]
            steps = STOP_CHECK if any(r.params.stop for r in part) else self.context
            with self._memory_explained():
                batch = self._batch(part)
                while not batch.done:
                    batch.advance(steps)
            self._count(batch)
            outputs += batch.outputs()
        return outputs

    def stream(self, prompt: str | Sequence[int] | np.ndarray, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Continues one prompt and yields text as soon as it is final; the last chunk has a finish reason.

        The same program as `generate`, a few tokens at a time. `last_stats` tells of the stream so far."""
        (request,) = self._requests([prompt], params)
        return self._stream(request)

    def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None) -> Output:
        """Answers a conversation, `[{"role": "user", "content": ...}, ...]`, by the folder's chat template."""
        return self.generate([self.encode_chat(messages)], params)[0]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The token ids of a conversation up to where the model answers; control tokens in messages stay plain text."""
        if self.chat_template is None or self.tokenizer is None:
            missing = "chat template" if self.tokenizer is not None else "tokenizer"
            raise BadRequest(f"this model folder has no {missing}, which chat needs", "give a prompt as text or token ids")
        return self.chat_template.encode([dict(m) if isinstance(m, Mapping) else m for m in messages], self.tokenizer)

    def logits(self, tokens: Sequence[Sequence[int]] | np.ndarray) -> np.ndarray:
        """float32 logits `[B T W]` of whole sequences of one length; nothing is added to them."""
        try:
            array = np.asarray(tokens)
        except ValueError as e:
            raise BadRequest("the token lists are not of one length") from e
        if array.ndim != 2 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise BadRequest("logits takes token ids of shape [B, T]", f"found shape {array.shape}, dtype {array.dtype}")
        for row in array:
            self._check_prompt([int(token) for token in row], 0)
        with self._memory_explained():
            found = np.asarray(self._programs.logits(jnp.asarray(array, jnp.int32)))
        self._programs.check()
        return found

    def explain(self) -> str:
        """What runs where, and why, in words."""
        lines = explain(self.model, self._formats, self.context, self.placement)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _stream(self, request: Request) -> Iterator[Chunk]:
        with self._memory_explained():
            batch = self._batch([request])
            try:
                while True:
                    self.last_stats = batch.stats(batch.rows[0])
                    if (chunk := batch.news[0]) is not None:
                        yield chunk
                    elif not request.limit:
                        yield Chunk("", [], FinishReason.LENGTH)
                    if batch.done:
                        return
                    batch.advance(STREAM_EVERY)
            finally:  # also of a stream that nobody reads to its end
                self._count(batch)

    def _count(self, batch: Batch) -> None:
        """Adds what experts a batch chose to the statistics; that these cannot be written is no reason to lose an answer."""
        if self._routing is None:
            return
        self._routing.counts += batch.load
        try:
            self._routing.save()
        except BadRequest as e:
            warnings.warn(f"routing statistics: {e}", RuntimeWarning, stacklevel=3)

    def _batch(self, requests: list[Request]) -> Batch:
        tokens, room = max(len(r.prompt) + r.limit for r in requests), self.plan.available - self.plan.weights
        held = slot_bytes(self.model, bucket(len(requests))) * slots_for(tokens)
        if held > room:
            raise DoesNotFit(
                f"the cache of {len(requests)} prompts of up to {tokens:,} tokens does not fit",
                f"it takes {gib(held)} (rows and slots are rounded up, so that programs repeat); beside the weights there is "
                f"room for {gib(room)}",
                "give fewer prompts at once, or lower max_tokens",
            )
        return Batch(self._programs, self.config, self.tokenizer, requests, self.plan.scores)

    @contextlib.contextmanager
    def _memory_explained(self):
        """Out of memory on the device becomes DoesNotFit with the plan."""
        try:
            yield
        except jax.errors.JaxRuntimeError as e:
            if "RESOURCE_EXHAUSTED" not in str(e) and "Out of memory" not in str(e):
                raise
            raise DoesNotFit(
                "the device ran out of memory",
                *self.plan.lines(),
                "is another process on the device? it can share: --memory-fraction; or lower --context and --max-tokens",
            ) from e

    def _requests(self, prompts: Any, params: Any) -> list[Request]:
        prompts = _plain(prompts)
        if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not isinstance(prompts, list):
            raise BadRequest("the prompts are neither text nor token ids, nor lists of them", f"found {printable(repr(prompts))}")
        if len(prompts) > MAX_PROMPTS:
            raise BadRequest(f"{len(prompts):,} prompts in one call", f"the limit is {MAX_PROMPTS:,}; give them in parts")
        many = list(params) if isinstance(params, list | tuple) else [params] * len(prompts)
        if len(many) != len(prompts):
            raise BadRequest(f"{len(many)} sets of sampling parameters for {len(prompts)} prompts", "give one, or one a prompt")
        if wrong := [p for p in many if not isinstance(p, SamplingParams | None)]:
            raise BadRequest("the sampling parameters are no SamplingParams", f"found {printable(repr(wrong[0]))}")
        return [self._request(prompt, one or SamplingParams()) for prompt, one in zip(prompts, many, strict=True)]

    def _request(self, prompt: Any, params: SamplingParams) -> Request:
        if params.stop and self.tokenizer is None:
            raise BadRequest("stop texts need a tokenizer, which this model folder lacks", "use stop_token_ids")
        tokens = self._tokens(prompt)
        room = self._check_prompt(tokens, 0 if params.max_tokens == 0 else 1)
        chosen = params.max_tokens if params.max_tokens is not None else min(DEFAULT_MAX_TOKENS, room)
        if chosen > room:
            raise BadRequest(
                f"max_tokens {chosen:,} does not fit the context",
                f"{len(tokens):,} prompt tokens leave room for {room:,} of {self.context:,}",
            )
        seed = secrets.randbits(32) if params.seed is None else params.seed
        defaults = SamplingParams(**{**self.defaults, "max_tokens": chosen, "seed": seed})
        filled = SamplingParams(**{**vars(params.or_default(defaults)), "logprobs": params.logprobs})
        return Request(tokens, filled, () if params.ignore_eos else self.end_ids)

    def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise BadRequest("this model folder has no tokenizer", "give token ids instead of text")
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise BadRequest("a prompt is neither text nor a list of token ids", f"found {printable(repr(prompt))}")
        return prompt

    def _check_prompt(self, tokens: list[int], needed: int) -> int:
        """The room a prompt leaves in the context; raises BadRequest unless that is at least `needed`."""
        if not tokens:
            raise BadRequest("the prompt is empty", "give at least one token")
        if wrong := next((t for t in tokens if not 0 <= t < self.config.vocab_size), None):
            raise BadRequest(f"token id {wrong} is not in the vocabulary", f"expected 0 to {self.config.vocab_size - 1:,}")
        room = self.context - len(tokens)
        if room < needed:
            output = ", one of them for the output" if needed else ""
            raise BadRequest(f"the prompt is too long: {len(tokens):,} tokens", f"the context holds {self.context:,}{output}")
        return room


def open_checkpoint(
    model: str | Path | None,
    *,
    attention: AttentionOptions,
    dtype: str | None,
    context: int | None,
    experts: ExpertOptions,
    memory_fraction: float | None,
    batch: int = 1,
) -> tuple[Checkpoint, Placement]:
    """The model's headers, checked, and its experts placed; raises before its weights take any memory of the device."""
    for name, value, known in (
        ("attention", attention.attention, ("auto", *FORMS, "fused")),
        ("kv_cache", attention.kv_cache, ("auto", "fp8")),
        ("experts", experts.experts, ("auto", "host", *BACKENDS)),
        ("dtype", dtype, (None, *DTYPES)),
    ):
        if value not in known:
            raise BadRequest(f"{name} {printable(str(value))} is not known", "known: " + ", ".join(filter(None, known)))
    if not (isinstance(batch, int) and 1 <= batch <= MAX_ROWS):
        raise BadRequest(f"batch is {batch}, expected 1 to {MAX_ROWS}", "more prompts are computed one batch after the other")
    if memory_fraction is not None:
        if not 0 < memory_fraction <= 1:
            raise BadRequest(f"memory_fraction is {memory_fraction}, expected more than 0, at most 1")
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory_fraction)  # read when JAX first uses the device
    _cache_compiled_programs()
    backend = "auto" if experts.experts == "host" else experts.experts
    forms = {"attention": attention.attention, "kv_cache": attention.kv_cache}
    checkpoint = Checkpoint(resolve(model), experts=backend, dtype=dtype, device=measure.device(), **forms)
    if attention.kv_cache == "fp8" and (reason := packed_latents.why_not(checkpoint.config, attention.attention)):
        raise Unsupported('kv_cache "fp8" cannot be had here', reason)
    check_context(context, checkpoint.config.max_position_embeddings)
    return checkpoint, place(checkpoint, experts, context, batch)


def check_context(context: int | None, longest: int) -> int:
    """`context`, or the longest that the model allows."""
    if context is not None and not (isinstance(context, int) and 1 <= context <= longest):
        raise BadRequest(f"context is {context}, expected 1 to {longest:,}", "the model's max_position_embeddings is the limit")
    return context or longest


def _plain(value):
    """Arrays, alone or in lists, as lists of plain numbers."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _cache_compiled_programs():
    """Turns on JAX's persistent compilation cache, unless the user has set one."""
    if jax.config.values["jax_compilation_cache_dir"] is None and (folder := cache_folder()) is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
