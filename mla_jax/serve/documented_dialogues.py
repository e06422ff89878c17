"""Answers of /v1/responses and /v1/messages as /openapi.json documents them."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from mla_jax.serve.documented import AnswerUsage, Documented


class ResponsePart(Documented):
    """A text of an item. Those of a message also have two empty lists."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[None] = Field(default_factory=list)
    logprobs: list[None] = Field(default_factory=list)


class ResponseItem(Documented):
    """Reasoning, a message, or a call with its arguments as JSON text."""

    id: str
    type: Literal["reasoning", "message", "function_call"]
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[ResponsePart] = Field(default_factory=list)
    summary: list[None] = Field(default_factory=list)
    encrypted_content: None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class ResponseCached(Documented):
    """`cached_tokens` were computed for earlier requests."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(Documented):
    """Tokens of the conversation and of the answer."""

    input_tokens: int
    input_tokens_details: ResponseCached
    output_tokens: int
    output_tokens_details: AnswerUsage
    total_tokens: int


class ResponseAnswer(BaseModel):
    """An answer in OpenAI's newer interface; settings of the request follow as further keys."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[ResponseItem]
    usage: ResponseUsage


class MessageBlock(Documented):
    """Thinking with its signature, a text, or the use of a tool with its input."""

    type: Literal["thinking", "text", "tool_use"]
    thinking: str = ""
    signature: str = ""
    text: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)


class ThinkingUsage(Documented):
    """Tokens of the answer that come before its content."""

    thinking_tokens: int


class MessageUsage(Documented):
    """Tokens; those of the prompt that were in the cache are counted apart."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingUsage


class MessageAnswer(Documented):
    """An answer in Anthropic's interface."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(Documented):
    """The number of tokens of a conversation."""

    input_tokens: int


class MessageErrorText(Documented):
    """The kind of an error, and the reason."""

    type: str
    message: str


class MessageError(Documented):
    """Any answer but 2XX."""

    type: Literal["error"]
    error: MessageErrorText
