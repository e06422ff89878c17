"""A model's answer, read while it arrives: its reasoning, its content and its calls of tools."""

from mla_jax.text.answers.formats import (
    ANSWER_FORMATS,
    PLAIN_ANSWER,
    AnswerFormat,
    answer_format_of,
    starts_in_reasoning,
)
from mla_jax.text.answers.parts import (
    Answer,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Part,
    Reasoning,
    ToolCall,
    answer_of,
)
from mla_jax.text.answers.reading import AnswerStream, parse_answer

__all__ = [
    "ANSWER_FORMATS",
    "PLAIN_ANSWER",
    "Answer",
    "AnswerFormat",
    "AnswerStream",
    "CallArguments",
    "CallBegin",
    "CallEnd",
    "Content",
    "Part",
    "Reasoning",
    "ToolCall",
    "answer_format_of",
    "answer_of",
    "parse_answer",
    "starts_in_reasoning",
]
