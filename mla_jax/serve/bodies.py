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
    include_stop_str_in_output: bool | None = None
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
    guided_choice: Any = shapes.key(shapes.or_null(shapes.CHOICE_TEXTS))
    guided_grammar: Any = shapes.key(shapes.or_null(shapes.TEXT_VALUE))
    grammar: Any = None


# Keys that other routes have under the names of chats
SAMPLING_KEYS = SamplingBody.model_fields.keys() - {
    "max_tokens",
    "n",
    "prompt_logprobs",
    "response_format",
    "return_token_ids",
    "stream_options",
}


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


class ResponseBody(SamplingBody):
    """POST /v1/responses."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PromptedBody(Body):
    """POST /v1/messages/count_tokens: the keys of a message that its prompt depends on."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class MessageBody(PromptedBody, SamplingBody):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)  # pyright: ignore[reportIncompatibleVariableOverride]  it is required here
    stop_sequences: list[str] | None = None


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
