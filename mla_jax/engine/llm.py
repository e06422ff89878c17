"""LLM: a model folder as an object that answers prompts."""

import bisect
import dataclasses
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mla_jax.base import roofline
from mla_jax.base.errors import BadConfig, BadRequest, printable
from mla_jax.base.files import read_json
from mla_jax.base.options import SamplingParams
from mla_jax.decode.loop import Programs, State
from mla_jax.decode.sampling import Sampling
from mla_jax.engine.request import FinishReason, Output, Request
from mla_jax.engine.stats import Stats, Stopwatch
from mla_jax.model.mla import FORMS
from mla_jax.text.tokenizer import Tokenizer
from mla_jax.weights.load import load

DEFAULT_MAX_TOKENS = 256
MAX_ROWS = 64  # prompts computed together
SCORE_BYTES = 1 << 30  # the attention scores of a prompt's chunk stay below
STOP_CHECK = 16  # tokens between two looks for stop texts
DTYPES = ("float32", "bfloat16")


class Written(NamedTuple):
    """What a batch has generated, on the host; the rest of its state stays on the device."""

    tokens: np.ndarray
    count: np.ndarray
    finite: np.ndarray
    logprobs: np.ndarray
    top_logprobs: np.ndarray
    top_ids: np.ndarray

    @classmethod
    def of(cls, state: State) -> "Written":
        return cls(*jax.device_get([getattr(state, name) for name in cls._fields]))


class LLM:
    """A model on the default device. See `generate`, `logits`, `explain`; `notes` says what a user of the folder should know."""

    def __init__(
        self, model: str | Path | None = None, *, attention: str = "auto", dtype: str | None = None, context: int | None = None
    ):
        """`attention` is a form of MLA or "auto", `dtype` "float32" or "bfloat16" (None: float32 on a CPU), `context` the most
        tokens of prompt and output together. Raises BadFile, BadConfig, Unsupported or BadRequest before any large allocation."""
        if model is None:
            raise BadRequest(
                "no model given", "name a folder with config.json and *.safetensors; `make demo` writes a small one to .demo"
            )
        if attention not in ("auto", *FORMS):
            raise BadRequest(f"attention {printable(str(attention))} is not known", "known: auto, " + ", ".join(FORMS))
        if dtype not in (None, *DTYPES):
            raise BadRequest(f"dtype {printable(str(dtype))} is not known", "known: " + ", ".join(DTYPES))
        _cache_compiled_programs()
        folder = Path(model)
        self.model = load(folder, attention=attention, dtype=dtype)
        self.config = self.model.config
        longest = self.config.max_position_embeddings
        if context is not None and not (isinstance(context, int) and 1 <= context <= longest):
            raise BadRequest(
                f"context is {context}, expected 1 to {longest:,}", "the model's max_position_embeddings is the limit"
            )
        self.context = context or longest
        self.tokenizer = Tokenizer.from_folder(folder, self.config.vocab_size, self.config.bos_token_id)
        self.defaults, self.end_ids = _generation_defaults(folder, self.config.eos_token_id)
        self.notes = self.config.notes
        self._programs = Programs(self.model)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | np.ndarray,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Output]:
        """Continues each prompt, a text or a list of token ids; always a list, in the order given."""
        requests = self._requests(prompts, params)
        batches = [requests[i : i + MAX_ROWS] for i in range(0, len(requests), MAX_ROWS)]
        return [output for batch in batches for output in self._generate(batch)]

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
        return np.asarray(self._programs.logits(jnp.asarray(array, jnp.int32)))

    def explain(self) -> str:
        """What runs where, and why, in words."""
        config, device = self.config, self.model.device
        dtype, prompt = self.model.embed[...].dtype, min(1024, self.context)
        phases = {
            "prefill": (1, prompt, prompt),
            "chunk of 64 on a long prefix": (1, 64, self.context),
            "decode": (1, 1, self.context),
        }
        size = f"{config.num_hidden_layers} layers, {config.num_attention_heads} heads"
        lines = [f"{config.model_type}: {size}, {dtype} on {device.name}"]
        said = "chosen" if self.model.attention == "auto" else "as asked"
        for phase, (rows, new, attended) in phases.items():
            form = self.model.form_name(rows, new, attended)
            why = roofline.why_form(config, device, form, rows, new, attended)
            lines.append(f"{phase} ({new} new tokens over {attended:,}): {form}, {said}: {why}")
        lines.append(f"on a long prefix, rebuilding heads takes fewer FLOPs from {roofline.break_even(config):.0f} new tokens")
        if config.n_routed_experts:
            lines.append(f"experts: {self.model.backend_name(1)} for one token, {self.model.backend_name(prompt)} for {prompt}")
        if self.model.mtp:
            lines.append(f"{len(self.model.mtp)} MTP layer is loaded; decoding does not draft with it yet")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def _requests(self, prompts: Any, params: Any) -> list[Request]:
        prompts = _plain(prompts)
        if isinstance(prompts, str) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        if not isinstance(prompts, list):
            raise BadRequest("the prompts are neither text nor token ids, nor lists of them", f"found {printable(repr(prompts))}")
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
                raise BadRequest("this model folder has no tokenizer.json", "give token ids instead of text")
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

    def _generate(self, requests: list[Request]) -> list[Output]:
        watch = Stopwatch()
        stops: dict[int, int] = {}  # row -> tokens up to its stop text
        state = self._end_at_stop_texts(requests, self._begin(requests), stops)
        first, compiling = watch.look()
        while not jax.device_get(state.done).all():
            steps = STOP_CHECK if any(r.params.stop for r in requests) else 2**30
            state = self._programs.run(state, jnp.int32(steps))
            state = self._end_at_stop_texts(requests, state, stops)
        decoding, more = watch.look()
        return self._outputs(requests, Written.of(state), stops, (first, decoding, compiling + more))

    def _begin(self, requests: list[Request]) -> State:
        """Prompts read chunk by chunk, first tokens chosen. Shapes are powers of two, so that they repeat."""
        rows, longest = bucket(len(requests)), max(len(r.prompt) for r in requests)
        slots = bucket(max(len(r.prompt) + r.limit for r in requests), 64)
        limit, ends = np.zeros(rows, np.int32), np.full((rows, bucket(max(len(_ends(r)) for r in requests), 4)), -1, np.int32)
        tokens, mask = np.zeros((rows, slots), np.int32), np.zeros((rows, slots), bool)
        for i, request in enumerate(requests):
            limit[i] = request.limit
            ends[i, : len(_ends(request))] = _ends(request)
            tokens[i, : len(request.prompt)] = request.prompt
            mask[i, : len(request.prompt)] = True
        alternatives = max((r.params.logprobs or 0 for r in requests), default=0)
        capacity = bucket(int(limit.max()), 16)
        state = self._programs.new(
            slots, capacity, alternatives, jnp.asarray(limit), jnp.asarray(ends), _sampling(requests, rows)
        )
        chunk = roofline.chunk_tokens(self.config, rows, slots, SCORE_BYTES)
        for start in range(0, longest, chunk):
            end = start + bucket(min(chunk, longest - start), 16)
            state = self._programs.prefill(state, tokens[:, start:end], mask[:, start:end], span=bucket(end))
        return jax.block_until_ready(self._programs.begin(state))

    def _end_at_stop_texts(self, requests: list[Request], state: State, stops: dict[int, int]) -> State:
        if not any(r.params.stop for r in requests):
            return state
        tokens, count, done = jax.device_get((state.tokens, state.count, state.done))
        done = done.copy()
        for i, request in enumerate(requests):
            if request.params.stop and i not in stops:
                needed = self._tokens_to_stop(_shown(tokens[i, : count[i]].tolist(), request), request.params.stop)
                if needed is not None:
                    stops[i], done[i] = needed, True
        return dataclasses.replace(state, done=jnp.asarray(done))

    def _tokens_to_stop(self, ids: list[int], stop: Sequence[str]) -> int | None:
        """How many of `ids` it takes until their text holds a stop text, None if it never does."""
        assert self.tokenizer is not None
        decode = self.tokenizer.decode

        def stopped(n: int) -> bool:
            return any(s in decode(ids[:n]) for s in stop)

        return bisect.bisect_left(range(len(ids) + 1), True, key=stopped) if stopped(len(ids)) else None

    def _outputs(
        self, requests: list[Request], written: Written, stops: dict[int, int], seconds: tuple[float, float, float]
    ) -> list[Output]:
        outputs = []
        for i, request in enumerate(requests):
            ids = written.tokens[i, : stops.get(i, written.count[i])].tolist()
            reason = FinishReason.STOP if i in stops else _finish_reason(ids, request, bool(written.finite[i]))
            stats = Stats(len(request.prompt), len(ids), *seconds, seed=request.params.seed or 0)
            logprobs = None if request.params.logprobs is None else _logprobs(written, i, ids, request.params.logprobs)
            outputs.append(Output(self._text(ids, request, i in stops), ids, request.prompt, reason, logprobs, stats))
        return outputs

    def _text(self, ids: list[int], request: Request, stopped: bool) -> str | None:
        if self.tokenizer is None:
            return None
        text = self.tokenizer.decode(_shown(ids, request))
        return text[: min(text.find(s) for s in request.params.stop if s in text)] if stopped else text


def bucket(n: int, least: int = 1) -> int:
    """The power of two that holds `n`, `least` at least."""
    return max(least, 1 << max(n - 1, 0).bit_length())


def _plain(value):
    """Arrays, alone or in lists, as lists of plain numbers."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _shown(ids: list[int], request: Request) -> list[int]:
    """`ids` without the end token."""
    return ids[:-1] if ids and ids[-1] in _ends(request) else ids


def _ends(request: Request) -> tuple[int, ...]:
    return (*request.ends, *request.params.stop_token_ids)


def _finish_reason(ids: list[int], request: Request, finite: bool) -> FinishReason:
    if not finite:
        return FinishReason.ERROR
    if ids and ids[-1] in request.ends:
        return FinishReason.END
    return FinishReason.STOP if ids and ids[-1] in request.params.stop_token_ids else FinishReason.LENGTH


def _logprobs(written: Written, row: int, ids: list[int], alternatives: int) -> list[dict[int, float]]:
    found = []
    for at, token in enumerate(ids):
        likeliest = zip(
            written.top_ids[row, at, :alternatives].tolist(), written.top_logprobs[row, at, :alternatives].tolist(), strict=True
        )
        found.append({token: float(written.logprobs[row, at])} | {i: p for i, p in likeliest if i != token})
    return found


def _sampling(requests: list[Request], rows: int) -> Sampling:
    padded = [r.params for r in requests] + [requests[0].params] * (rows - len(requests))

    def column(name: str, dtype: type) -> jax.Array:
        most = np.iinfo(np.int32).max if dtype is np.int32 else np.inf
        return jnp.asarray([min(getattr(p, name), most) for p in padded], dtype)

    floats = ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty")
    seeds = jnp.asarray([[(p.seed or 0) >> 32, (p.seed or 0) & 0xFFFFFFFF] for p in padded], jnp.uint32)
    return Sampling(top_k=column("top_k", np.int32), seed=seeds, **{name: column(name, np.float32) for name in floats})


def _generation_defaults(folder: Path, end_ids: tuple[int, ...]) -> tuple[dict, tuple[int, ...]]:
    """Sampling defaults and every end token: generation_config.json, where the folder has one, over config.json."""
    path = folder / "generation_config.json"
    given = read_json(path, 1 << 20, BadConfig) if path.exists() else {}
    ends = given.get("eos_token_id")
    ends = end_ids if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)
    if not all(type(e) is int and -1 <= e < 2**31 for e in ends):
        raise BadConfig("the folder names an eos_token_id that is no token id", f"found {printable(str(ends))} in {folder}")
    sampled = given.get("do_sample") is True  # transformers leaves out a temperature of 1, its default
    defaults = {"temperature": 1.0 if sampled else 0.0, "top_k": 0, "top_p": 1.0}
    if given.get("do_sample", True):
        defaults |= {name: given[name] for name in defaults if given.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except BadRequest as e:
        raise BadConfig(f"{path.name} has sampling defaults out of range", *e.args[1:]) from e
    return defaults, ends


def _cache_compiled_programs():
    """Turns on JAX's persistent compilation cache, unless the user has set one."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(Path.home() / ".cache" / "mla_jax" / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
