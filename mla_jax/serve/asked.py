"""A body as requests to the engine, with all that its answer depends on."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mla_jax.base.errors import BadRequest
from mla_jax.base.grammar_keys import FORM_KEYS
from mla_jax.base.options import SamplingParams
from mla_jax.base.request_fields import CHAT, Fields, read_fields
from mla_jax.engine.core.request import Request
from mla_jax.engine.llm import LLM
from mla_jax.engine.reader import TokenReading
from mla_jax.serve.bodies import ChatBody, CompletionBody, SamplingBody, StreamOptions
from mla_jax.serve.conversations import Variables, answer_grammar, answer_reading, encode_conversation
from mla_jax.serve.options import MAX_WAITING
from mla_jax.serve.tool_choice import take_tool_choice

COMPLETION_TOKENS = 16  # of a completion whose request names no number: OpenAI's rule


@dataclass(frozen=True)
class AnswerForm:
    """How an answer comes."""

    stream: bool
    usage: bool  # at the end of a stream
    running_usage: bool  # in each event of it
    ids: bool  # token ids in the answer


@dataclass(frozen=True)
class Asked:
    """`requests` are `n` of each prompt, one after the other; `echo` are the prompts' texts, if the answer has them, too.

    `reading` makes what reads an answer, if that is no plain text."""

    requests: list[Request]
    n: int
    model: str
    form: AnswerForm
    echo: list[str] | None = None
    reading: Callable[[Request], TokenReading] | None = None

    @property
    def prompts(self) -> list[Request]:
        """The first request of each prompt."""
        return self.requests[:: self.n]


def read_completion(body: CompletionBody, llm: LLM, defaults: SamplingParams, model: str) -> Asked:
    """Raises BadRequest for what cannot be served. Texts are encoded here, which may take a while."""
    given = body.given()
    echo, prompt = given.pop("echo", False), given["prompt"]
    if echo and given.get("logprobs") is not None:
        given["prompt_logprobs"] = given["logprobs"]
    params = _fields(given, replace(defaults, max_tokens=COMPLETION_TOKENS)).params
    _refuse_grammar(llm, given, params)
    requests = llm.inputs.requests(_listed(prompt, params.n), params)
    texts = [_text(llm, request) for request in requests[:: params.n]] if echo else None
    return Asked(requests, params.n, model, _streaming(body), echo=texts)


def read_chat(
    body: ChatBody, llm: LLM, defaults: SamplingParams, model: str, variables: Variables, *, cut: bool = False
) -> Asked:
    """Raises as `read_completion`, and BadTemplate. Without a number of tokens an answer may be as long as the context allows.

    `variables` are the server's own for the chat template. `cut`: so is one whose number is larger than that."""
    given = body.given()
    forced = take_tool_choice(given)
    one_call = given.pop("parallel_tool_calls", True) is False or (forced is not None and forced.once)
    fields = _fields(given, defaults)
    _refuse_grammar(llm, given, fields.params)
    prompt = encode_conversation(llm, fields, variables)
    params = replace(fields.params, grammar=answer_grammar(llm, fields, prompt, forced, one_call))
    room = max(min(llm.context, llm.plan.tokens) - len(prompt), 1)
    if params.max_tokens is None or (cut and params.max_tokens > room):
        params = replace(params, max_tokens=room)
    requests = llm.inputs.requests([prompt], params)
    reading = answer_reading(llm, fields, prompt, one_call)
    return Asked(requests, params.n, model, _streaming(body), reading=reading)


def tokens_of_chat(given: dict[str, Any], llm: LLM, variables: Variables) -> list[int]:
    """The prompt of the conversation in a body; raises as `read_chat`."""
    asked = {key: given[key] for key in ("messages", *CHAT) if key in given}
    return encode_conversation(llm, read_fields(asked, SamplingParams()), variables)


def _fields(given: dict[str, Any], defaults: SamplingParams) -> Fields:
    """The prompt or messages, and parameters over `defaults`; nobody gets more time than these have."""
    for key in ("stop", "stop_token_ids"):
        if isinstance(given.get(key), list):
            given[key] = tuple(given[key])
    fields = read_fields(given, defaults, strict=False)
    most, asked = defaults.timeout, fields.params.timeout
    if most is None or asked is None or asked <= most:
        return fields
    return fields._replace(params=replace(fields.params, timeout=most))


def _refuse_grammar(llm: LLM, given: dict[str, Any], params: SamplingParams) -> None:
    """Raises BadRequest, which names the key, for a grammar that cannot be compiled."""
    if params.grammar is None:
        return
    key = next((key for key in FORM_KEYS if key in given and given[key] != {"type": "text"}), "grammar")
    try:
        llm.inputs.grammars.matcher(params.grammar)
    except BadRequest as e:
        raise BadRequest(f"{key} cannot be followed", *e.args) from e


def _streaming(body: SamplingBody) -> AnswerForm:
    options = body.stream_options
    if options is not None and not body.stream:
        raise BadRequest("stream_options is given, but stream is not true")
    options = options or StreamOptions()
    return AnswerForm(
        stream=bool(body.stream),
        usage=bool(options.include_usage),
        running_usage=bool(options.continuous_usage_stats),
        ids=bool(body.return_token_ids),
    )


def _listed(prompt: Any, n: int) -> list[Any]:
    """The prompts of a request; raises BadRequest for too many of them, or none."""
    is_one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    prompts: list[Any] = [prompt] if is_one else list(prompt)
    if not prompts:
        raise BadRequest("prompt is an empty list", "give at least one prompt")
    if len(prompts) * n > MAX_WAITING:
        raise BadRequest(
            f"prompt and n ask for {len(prompts) * n:,} answers",
            f"the limit is {MAX_WAITING:,} in one request",
        )
    return prompts


def _text(llm: LLM, request: Request) -> str:
    """A prompt as text, without the BOS token."""
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise BadRequest("echo needs a tokenizer, which this model folder lacks")
    return tokenizer.decode(request.prompt)
