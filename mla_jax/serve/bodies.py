"""The bodies of requests, as the interface's document has them. A key that is null is absent; unknown keys are let through."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Ids = list[int]


class Body(BaseModel):
    """Keys of any request. What they mean to sampling is checked where sampling parameters are made."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None

    def given(self) -> dict[str, Any]:
        """The keys that are not null."""
        return {key: value for key, value in self.model_dump(exclude_unset=True).items() if value is not None}


class StreamOptions(BaseModel):
    """Figures in a stream: at its end, or cumulative ones in each event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingBody(Body):
    """Keys of completions and chats alike: OpenAI's, and vLLM's further ones."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    timeout: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | Ids | list[str] | list[Ids]
    echo: bool | None = None
    logprobs: int | None = None


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Ids
