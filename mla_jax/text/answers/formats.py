# ruff: noqa: RUF001 DeepSeek's control tokens are written with such letters
"""Formats of answers, one row each, and the format of a model by what its folder has."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mla_jax.text.answers.grammars import (
    CallGrammar,
    DsmlCalls,
    GlmCalls,
    JsonCalls,
    Tags,
    function_header,
    id_header,
    name_header,
)
from mla_jax.text.tokenizer import Tokenizer

THINK_TAGS = ("<think>", "</think>")
MOST_TAIL = 32  # tokens of a prompt in which an open <think> that is no control token is looked for

_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_DEEPSEEK_END = "<｜tool▁call▁end｜>"
_V3 = JsonCalls(
    section=_DEEPSEEK,
    begin="<｜tool▁call▁begin｜>",
    separators=("<｜tool▁sep｜>", "```json"),
    ends=(f"```{_DEEPSEEK_END}", f"```\n{_DEEPSEEK_END}", _DEEPSEEK_END),
    header=function_header,
)
_V31 = replace(_V3, separators=("<｜tool▁sep｜>",), ends=(_DEEPSEEK_END,), header=name_header)
_KIMI = JsonCalls(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    begin="<|tool_call_begin|>",
    separators=("<|tool_call_argument_begin|>",),
    ends=("<|tool_call_end|>",),
    header=id_header,
)


@dataclass(frozen=True)
class AnswerFormat:
    """`think` are the tags around reasoning, `calls` the grammar of tool calls; None where the model has none.

    A folder has the format if each of `signs` is a control token or in its chat template, or if it has no template and one of
    `model_types`."""

    name: str
    think: tuple[str, str] | None = THINK_TAGS
    calls: CallGrammar | None = None
    signs: Tags = ()
    model_types: Tags = ()

    @property
    def tags(self) -> Tags:
        """Texts that may be control tokens."""
        return (*(self.think or ()), *(self.calls.tags if self.calls else ()))

    def without_calls(self) -> "AnswerFormat":
        """The same format for a request that allows no calls: what looks like one is content."""
        return replace(self, calls=None)


PLAIN_ANSWER = AnswerFormat("plain", think=None)
ANSWER_FORMATS = (  # the first that a folder has
    AnswerFormat("dsml", THINK_TAGS, DsmlCalls(), ("｜DSML｜",), ("deepseek_v32", "deepseek_v4")),
    AnswerFormat("kimi_k2", THINK_TAGS, _KIMI, ("<|tool_call_argument_begin|>",)),
    AnswerFormat("glm", THINK_TAGS, GlmCalls(), ("<tool_call>", "<arg_key>", "<arg_value>")),
    AnswerFormat("deepseek_v3", THINK_TAGS, _V3, ("<｜tool▁sep｜>", "```json")),
    AnswerFormat("deepseek_v31", THINK_TAGS, _V31, ("<｜tool▁sep｜>",)),
    AnswerFormat("reasoning", THINK_TAGS, None, ("</think>",)),
)


def answer_format_of(
    tokenizer: Tokenizer | None, template_source: str | None, model_type: str
) -> AnswerFormat:
    """The format of a folder with this tokenizer, chat template (None: it has none) and `model_type`; else `PLAIN_ANSWER`."""
    controls = tokenizer.control if tokenizer else {}

    def has(sign: str) -> bool:
        return sign in controls or sign in (template_source or "")

    for row in ANSWER_FORMATS:
        if all(map(has, row.signs)) or (template_source is None and model_type in row.model_types):
            return row
    return PLAIN_ANSWER


def starts_in_reasoning(prompt: Sequence[int], tokenizer: Tokenizer, form: AnswerFormat) -> bool:
    """Whether the token ids of `prompt` end within reasoning, so that the answer goes on with it.

    The last control token of the prompt tells: text of its messages never becomes one. Where <think> is none, the prompt must
    end with its text."""
    if form.think is None:
        return False
    begin = tokenizer.control.get(form.think[0])
    controls = frozenset(tokenizer.control.values())
    last = next((at for at in reversed(range(len(prompt))) if prompt[at] in controls), None)
    if begin is not None:
        return last is not None and prompt[last] == begin
    tail = list(prompt[0 if last is None else last + 1 :])[-MOST_TAIL:]
    return tokenizer.decode(tail).rstrip().endswith(form.think[0])
