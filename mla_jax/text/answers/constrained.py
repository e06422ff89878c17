"""Grammars of whole answers: reasoning first, where the model writes some, and behind it text of a form, or calls of tools."""

import json
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

from mla_jax.base.errors import BadRequest
from mla_jax.base.grammar import MAX_GRAMMAR, Grammar
from mla_jax.text.answers.call_rules import add_calls
from mla_jax.text.answers.formats import AnswerFormat, starts_in_reasoning
from mla_jax.text.answers.lark_rules import MAYBE_LINE, LarkRules, json_item, slashed
from mla_jax.text.tokenizer import Tokenizer

GAP = r"/\n{0,2}/"  # between the parts of an answer, where newlines are no text


class Thinking(Enum):
    """The reasoning at the beginning of an answer."""

    NONE = "none"  # the prompt has ended it, or the model writes none
    MAYBE = "maybe"  # the model may begin it itself
    OPEN = "open"  # the prompt has begun it


def thinking_of(prompt: Sequence[int], tokenizer: Tokenizer, form: AnswerFormat) -> Thinking:
    """The reasoning of an answer to `prompt`.

    Only a tag that is a control token may begin it: one of text could be the beginning of the answer's own text."""
    if starts_in_reasoning(prompt, tokenizer, form):
        return Thinking.OPEN
    if form.think is None or not all(tag in tokenizer.control for tag in form.think):
        return Thinking.NONE
    controls = frozenset(tokenizer.control.values())
    last = next((token for token in reversed(prompt) if token in controls), None)
    return Thinking.NONE if last == tokenizer.control[form.think[1]] else Thinking.MAYBE


def constrained_answer(
    tokenizer: Tokenizer,
    form: AnswerFormat,
    thinking: Thinking,
    *,
    text: Grammar | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    one_call: bool = False,
) -> Grammar:
    """The grammar of an answer that is, behind its reasoning, `text` or calls of `tools`: of both, the model chooses one.

    `tools` are checked ones. With `one_call` there is exactly one call. Raises BadRequest where no grammar can say that."""
    if text is not None and thinking is Thinking.NONE and not tools:
        return text
    rules = LarkRules(tokenizer, form.tags)
    bodies = [] if text is None else [rules.add("text", _item_of(text))]
    if tools:
        if form.calls is None:
            raise BadRequest(
                "tool_choice cannot force a call", "the format of this model's calls is not known"
            )
        bodies.append(add_calls(rules, form.calls, tools, one_call))
    rules.add("start", f"{_reasoning(rules, form, thinking)} {GAP} ({' | '.join(bodies)})")
    return _of_size(str(rules), len(tools))


def _reasoning(rules: LarkRules, form: AnswerFormat, thinking: Thinking) -> str:
    """Reasoning up to its end, as far as the answer has some."""
    if thinking is Thinking.NONE or form.think is None:
        return ""
    begin, end = form.think
    thought = rules.up_to("thought", end)
    return thought if thinking is Thinking.OPEN else f"({MAYBE_LINE} {rules.tag(begin)} {thought})?"


def _item_of(text: Grammar) -> str:
    """A grammar within a rule."""
    if text.kind == "json_schema":
        return json_item(json.loads(text.definition))
    return f"%lark {{\n{text.definition}\n}}" if text.kind == "lark" else slashed(text.definition)


def _of_size(lark: str, tools: int) -> Grammar:
    if len(lark) > MAX_GRAMMAR and tools:
        raise BadRequest(
            f"tools have schemas that make a grammar of {len(lark):,} characters",
            f"the limit is {MAX_GRAMMAR:,}: give fewer tools, or shorter schemas",
        )
    return Grammar.lark(lark)
