"""Answers as /openapi.json documents them. They are written elsewhere; tests compare both."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

ERRORS = {"4XX": "The request is refused.", "5XX": "The server cannot answer; with 503 it may later."}
EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
STREAM = {
    "description": "The answer; with `stream`, server-sent events with its pieces as JSON, the last of them `[DONE]`.",
    "content": {"text/event-stream": {"itemSchema": EVENT}},
}
NAMED_STREAM = {**STREAM, "description": "The answer; with `stream`, server-sent events, each with its type."}
METRICS_TEXT = {"content": {"text/plain": {"schema": {"type": "string"}}}}


class Documented(BaseModel):
    """All keys that can come; those with a default come where they are asked for."""

    model_config = ConfigDict(extra="forbid")


class ErrorText(Documented):
    """`param` is the key of the request that caused it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(Documented):
    """Any answer but 2XX."""

    error: ErrorText


class ModelEntry(Documented):
    """A name of the model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    root: str
    parent: None


class ModelEntries(Documented):
    """All names of the model."""

    object: Literal["list"]
    data: list[ModelEntry]


class VersionAnswer(Documented):
    """The version of mla-jax."""

    version: str


class TokenizeAnswer(Documented):
    """Token ids, their number, the longest context, and the tokens as texts."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeAnswer(Documented):
    """The text of token ids."""

    prompt: str


class TokenizerAnswer(Documented):
    """Control tokens and the chat template."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    chat_template: str | None


class PromptUsage(Documented):
    """`cached_tokens` were computed for earlier requests."""

    cached_tokens: int


class AnswerUsage(Documented):
    """`reasoning_tokens` come before the content."""

    reasoning_tokens: int


class Usage(Documented):
    """Tokens of prompts and answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptUsage
    completion_tokens_details: AnswerUsage


class PromptScore(Documented):
    """A token in a place of a prompt; rank 1 is the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionScores(Documented):
    """Lists with an entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Documented):
    """An answer to a prompt; `index` is the prompt's number times `n`, plus the answer's."""

    index: int
    text: str
    logprobs: CompletionScores | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | None
    prompt_logprobs: list[dict[str, PromptScore] | None] = []
    token_ids: list[int] = []
    prompt_token_ids: list[int] = []


class CompletionAnswer(Documented):
    """Answers to the prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CalledFunction(Documented):
    """`arguments` are JSON, as text."""

    name: str
    arguments: str


class MessageCall(Documented):
    """A call of a tool."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AnswerMessage(Documented):
    """`content` is null where there are calls alone; reasoning has two names."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[MessageCall] = []


class TokenScore(Documented):
    """A token that could have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenScore(TokenScore):
    """A token, and the likeliest ones in its place."""

    top_logprobs: list[TokenScore]


class ChatScores(Documented):
    """An entry for each token."""

    content: list[ChosenScore]
    refusal: None


class ChatChoice(Documented):
    """An answer to a conversation."""

    index: int
    message: AnswerMessage
    logprobs: ChatScores | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | None
    token_ids: list[int] = []


class ChatAnswer(Documented):
    """Answers to a conversation."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptScore] | None] = []
    prompt_token_ids: list[int] = []


def documented(
    answer: type[BaseModel] | None, error: type[BaseModel] = ErrorAnswer, /, **further: Any
) -> dict[str, Any]:
    """Keywords of a route: its answer, with `further` keys of OpenAPI, and its errors. FastAPI documents them; it checks none."""
    whole = further if answer is None else {"model": answer, **further}
    errors = {status: {"model": error, "description": text} for status, text in ERRORS.items()}
    return {"response_model": None, "responses": {200: whole, **errors}}
