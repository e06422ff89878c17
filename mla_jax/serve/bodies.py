"""The bodies of requests, as the interface's document has them. A key that is null is absent; unknown keys are let through."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from mla_jax.serve import shapes

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

    temperature: float | None = shapes.key({"minimum": 0, "maximum": 1000})
    top_p: float | None = shapes.key(shapes.PROBABILITY)
    top_k: int | None = shapes.key({"minimum": -1})
    min_p: float | None = shapes.key(shapes.PROBABILITY)
    presence_penalty: float | None = shapes.key(shapes.PENALTY)
    frequency_penalty: float | None = shapes.key(shapes.PENALTY)
    repetition_penalty: float | None = shapes.key({"minimum": 1e-3, "maximum": 1000})
    max_tokens: int | None = shapes.key(shapes.TOKEN_COUNT)
    min_tokens: int | None = shapes.key(shapes.TOKEN_COUNT)
    stop: str | list[str] | None = shapes.key(shapes.STOPS)
    stop_token_ids: Ids | None = shapes.key(shapes.STOP_IDS)
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = shapes.key(shapes.BIASES)
    seed: int | None = shapes.key({"minimum": -1, "maximum": 2**64 - 1})
    n: int | None = shapes.key(shapes.ANSWER_COUNT)
    timeout: float | None = shapes.key(shapes.TIME_LIMIT)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = shapes.key(shapes.SCORES)
    return_token_ids: bool | None = None
    response_format: Any = shapes.key(shapes.RESPONSE_FORMAT)
    structured_outputs: Any = shapes.key(shapes.STRUCTURED_OUTPUTS)
    guided_json: Any = shapes.key(shapes.or_null(shapes.SCHEMA, shapes.TEXT_VALUE))
    guided_regex: Any = shapes.key(shapes.or_null(shapes.TEXT_VALUE))
    guided_choice: Any = shapes.key(shapes.or_null(shapes.CHOICES))
    guided_grammar: Any = shapes.key(shapes.or_null(shapes.TEXT_VALUE))
    grammar: Any = None


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: str | Ids | list[str] | list[Ids] = Field(json_schema_extra=shapes.PROMPT_KEY)
    echo: bool | None = None
    logprobs: int | None = shapes.key(shapes.SCORES)


class ChatBody(SamplingBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1, json_schema_extra={"items": shapes.MESSAGE})
    tools: list[dict[str, Any]] | None = shapes.key(shapes.TOOLS)
    tool_choice: str | dict[str, Any] | None = shapes.key(shapes.TOOL_CHOICE)
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    max_completion_tokens: int | None = shapes.key(shapes.TOKEN_COUNT)
    logprobs: bool | None = None
    top_logprobs: int | None = shapes.key(shapes.SCORES)


class TokenizeBody(Body):
    """POST /tokenize: a text, or a conversation."""

    model_config = ConfigDict(json_schema_extra=shapes.TEXT_OR_MESSAGES)

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = shapes.key(shapes.MESSAGES)
    tools: list[dict[str, Any]] | None = shapes.key(shapes.TOOLS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: Ids = Field(json_schema_extra={"items": shapes.TOKEN_ID})
