"""Checks prompts and sampling parameters, and makes requests of them with every default filled in. No weights are needed."""

import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest, TooLong, printable, shown
from mla_jax.base.grammar import Grammar
from mla_jax.base.options import MAX_ENDS, SamplingParams
from mla_jax.engine.core.compressed import CompressedContext
from mla_jax.engine.core.request import Request
from mla_jax.engine.text import Text
from mla_jax.text.grammar import Grammars

DEFAULT_MAX_TOKENS = 256
MAX_PROMPTS = 100_000  # in one call


@dataclass
class InputProcessor:
    """Makes requests of prompts, checked against the vocabulary, the tokenizer and the context length."""

    config: Config
    text: Text
    context: int
    _has_warned: bool = False  # of control tokens in a prompt

    def __post_init__(self):
        self.grammars = Grammars(self.text.tokenizer, self.config.vocab_size, self.text.end_ids)

    def requests(self, prompts: Any, params: Any, context: CompressedContext | None = None) -> list[Request]:
        """`n` requests per prompt, as its parameters say, each behind a compressed context if one is given; raises BadRequest."""
        prompts = _as_list(prompts)
        params = self._params_of(params, len(prompts))
        total = sum(one.n for one in params)
        if total > MAX_PROMPTS:
            raise BadRequest(
                f"{total:,} answers in one call", f"the limit is {MAX_PROMPTS:,}; give prompts in parts"
            )
        requests = []
        for prompt, one in zip(prompts, params, strict=True):
            request = self.request(prompt, one, context)
            requests += [request.fork(i) for i in range(one.n)]
        return requests

    def request(
        self, prompt: Any, params: SamplingParams | None = None, context: CompressedContext | None = None
    ) -> Request:
        """A request for one prompt, behind a compressed context if one is given; raises BadRequest if it does not fit the model's
        context."""
        params = params or SamplingParams()
        self._refuse_params(params)
        tokens = self.tokens(prompt, context is None)
        if context is not None:
            _refuse_reading(params, tokens)
            tokens = context.tokens + tokens
        limit = self._limit(tokens, params.max_tokens)
        if params.min_tokens > limit:
            found = f"min_tokens is {params.min_tokens:,}"
            raise BadRequest(found, f"an answer to this prompt has at most {limit:,} tokens")
        ends = () if params.ignore_eos else self.text.end_ids
        return Request(tokens, self._filled(params, limit), ends, context)

    def _refuse_params(self, params: SamplingParams) -> None:
        """Raises BadRequest for parameters that this model cannot follow."""
        if params.stop and self.text.tokenizer is None:
            hint = "use stop_token_ids"
            raise BadRequest("stop texts need a tokenizer, which this model folder lacks", hint)
        if params.grammar is not None:
            self._refuse_grammar(params.grammar, params)
        wrong = next((t for t in params.logit_bias or {} if t >= self.config.vocab_size), None)
        if wrong is not None:
            expected = f"expected 0 to {self.config.vocab_size - 1:,}"
            raise BadRequest(f"logit_bias names token id {wrong:,}", expected)
        ends = 0 if params.ignore_eos else len(self.text.end_ids)
        if ends + len(params.stop_token_ids) > MAX_ENDS:
            given = f"the model has {ends}, stop_token_ids {len(params.stop_token_ids)}"
            raise BadRequest(f"more than {MAX_ENDS} token ids end an answer", given)

    def _refuse_grammar(self, grammar: Grammar, params: SamplingParams) -> None:
        """Raises BadRequest for a grammar that no answer can follow."""
        if params.logits is not None:
            raise BadRequest("logits and grammar exclude each other", "a grammar's masks come from the host")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(params, name):
                raise BadRequest(
                    f"{name} and grammar exclude each other", "a grammar says where an answer ends"
                )
        self.grammars.matcher(grammar)

    def _limit(self, tokens: list[int], asked: int | None) -> int:
        """The most tokens that may follow a prompt; raises BadRequest if the context has no room for as many as are asked for."""
        room = self.check_prompt(tokens, needed=0 if asked == 0 else 1)
        if asked is None:
            return min(DEFAULT_MAX_TOKENS, room)
        if asked > room:
            raise TooLong(
                f"max_tokens {asked:,} does not fit the context",
                f"{len(tokens):,} prompt tokens leave room for {room:,} of {self.context:,}",
                context=self.context,
            )
        return asked

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids of a conversation up to where the model answers; raises BadRequest or BadTemplate.

        `chat_template_kwargs` are variables of the template, such as {"thinking": True}."""
        template, tokenizer = self.text.chat_template, self.text.tokenizer
        if template is None or tokenizer is None:
            missing = "tokenizer" if tokenizer is None else "chat template"
            raise BadRequest(
                f"this model folder has no {missing}, which chat needs", "give a prompt as text or token ids"
            )
        return template.encode(
            messages,
            tokenizer,
            tools=tools,
            variables=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def check_prompt(self, tokens: list[int], needed: int) -> int:
        """The tokens of context that a prompt leaves free; raises BadRequest unless there are at least `needed`."""
        if not tokens:
            raise BadRequest("the prompt is empty", "give at least one token")
        wrong = next((t for t in tokens if not 0 <= t < self.config.vocab_size), None)
        if wrong is not None:
            raise BadRequest(
                f"token id {shown(wrong)} is not in the vocabulary",
                f"expected 0 to {self.config.vocab_size - 1:,}",
            )
        room = self.context - len(tokens)
        if room < needed:
            output = ", one of them for the output" if needed else ""
            raise TooLong(
                f"the prompt is too long: {len(tokens):,} tokens",
                f"the context holds {self.context:,}{output}",
                context=self.context,
            )
        return room

    def token_block(self, tokens: Any) -> np.ndarray:
        """Token ids as an array `[B T]`; raises BadRequest for anything else."""
        try:
            array = np.asarray(tokens)
        except (ValueError, OverflowError) as e:
            raise BadRequest("the token lists are not of one length") from e
        if array.ndim != 2 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
            raise BadRequest(
                "expected token ids of shape [B, T]", f"found shape {array.shape}, dtype {array.dtype}"
            )
        for row in array.tolist():
            self.check_prompt(row, needed=0)
        return array

    def _params_of(self, params: Any, prompts: int) -> list[SamplingParams]:
        """One set of parameters per prompt."""
        several = list(params) if isinstance(params, list | tuple) else [params] * prompts
        if len(several) != prompts:
            raise BadRequest(
                f"{len(several)} sets of sampling parameters for {prompts} prompts",
                "give one, or one per prompt",
            )
        wrong = [p for p in several if not isinstance(p, SamplingParams | None)]
        if wrong:
            raise BadRequest("the sampling parameters are no SamplingParams", f"found {shown(wrong[0])}")
        return [params or SamplingParams() for params in several]

    def tokens(self, prompt: Any, bos: bool = True) -> list[int]:
        """The token ids of a prompt; those of a text begin with BOS if `bos`."""
        if isinstance(prompt, str):
            if self.text.tokenizer is None:
                raise BadRequest("this model folder has no tokenizer", "give token ids instead of text")
            ids = self.text.tokenizer.encode(prompt, bos)
            self._warn_of_control(prompt)
            return ids
        prompt = _plain(prompt)
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise BadRequest(
                "a prompt is neither text nor a list of token ids", f"found {shown(prompt)}", *_hints(prompt)
            )
        return prompt

    def _warn_of_control(self, prompt: str) -> None:
        """Says once that control tokens in a prompt are plain text."""
        assert self.text.tokenizer is not None
        found = None if self._has_warned else self.text.tokenizer.control_pattern.search(prompt)
        if found is not None:
            self._has_warned = True
            means = "chat() writes a conversation's, BOS is put in front, and token ids may hold any"
            warnings.warn(
                f"the prompt has {printable(found[0])}, which is read as plain text: {means}", stacklevel=4
            )

    def _filled(self, params: SamplingParams, limit: int) -> SamplingParams:
        """`params` with the model's defaults, its limit of tokens and a seed."""
        seed = secrets.randbits(32) if params.seed is None else params.seed
        given = {name: value for name, value in vars(params).items() if value is not None}
        return SamplingParams(**{**self.text.defaults, **given, "max_tokens": limit, "seed": seed})


def _refuse_reading(params: SamplingParams, tokens: list[int]) -> None:
    """Raises BadRequest for parameters that need all tokens of a compressed context, and for nothing behind it."""
    if not tokens:
        raise BadRequest("the prompt is empty", "a compressed context needs at least one token behind it")
    if params.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs of a compressed context", "its tokens are not read again")
    if params.repetition_penalty not in (None, 1):
        raise BadRequest(
            "repetition_penalty behind a compressed context", "it counts tokens as they are read"
        )


def _as_list(prompts: Any) -> list:
    """A list of prompts, however many were given; their number is checked before any of them is converted."""
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise BadRequest(
            "the prompts are neither text nor token ids, nor lists of them",
            f"found {shown(prompts)}",
            *_hints(prompts),
        )
    if prompts and _is_scalar(prompts[0]):
        return [prompts]
    if len(prompts) > MAX_PROMPTS:
        raise BadRequest(
            f"{len(prompts):,} prompts in one call", f"the limit is {MAX_PROMPTS:,}; give them in parts"
        )
    return list(prompts)


def _hints(prompt: Any) -> list[str]:
    """The right call for a dictionary as other engines take it: a prompt with a name, or a message of a chat."""
    if not isinstance(prompt, Mapping):
        return []
    if "role" in prompt or "messages" in prompt:
        return ["chat(messages) answers a conversation, encode_chat(messages) gives its token ids"]
    named = [key for key in ("prompt_token_ids", "input_ids", "prompt") if key in prompt]
    return [f"give the value of {named[0]!r} alone"] if named else []


def _is_scalar(value: Any) -> bool:
    """A number, or an array without dimensions."""
    return isinstance(value, Integral) or getattr(value, "ndim", None) == 0


def _plain(value: Any) -> Any:
    """Arrays, alone or in lists, as lists of plain numbers."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value
