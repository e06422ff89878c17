"""A conversation of a body as a prompt, the form of the answer to it, and how that is read."""

from collections.abc import Callable, Mapping
from typing import Any

from mla_jax.base.errors import BadRequest, printable
from mla_jax.base.grammar import Grammar
from mla_jax.base.request_fields import Fields
from mla_jax.engine.core.request import Request
from mla_jax.engine.llm import LLM
from mla_jax.serve.tool_choice import ForcedCalls
from mla_jax.text.answers import AnswerFormat, AnswerStream, answer_format_of, starts_in_reasoning
from mla_jax.text.answers.constrained import constrained_answer, thinking_of
from mla_jax.text.messages import KEYS_OF, MESSAGE_KEYS, THINKING

Variables = Mapping[str, Any]  # of chat templates


def encode_conversation(llm: LLM, fields: Fields, variables: Variables) -> list[int]:
    """The prompt of a conversation. The template's `variables` are the server's; those of the request stand above them.

    Keys of messages that the library does not know are left out. Raises BadRequest or BadTemplate."""
    if fields.tools:
        _refuse_without_tools(llm)
    messages, chat = [_with_known_keys(message) for message in fields.messages], fields.chat
    chat["chat_template_kwargs"] = _over(variables, fields.chat_template_kwargs or {})
    return llm.encode_chat(messages, **chat)


def answer_reading(
    llm: LLM, fields: Fields, prompt: list[int], one_call: bool
) -> Callable[[Request], AnswerStream]:
    """Makes what reads the answers to `prompt`. Without tools, what looks like a call is content."""
    form, tokenizer = _format_of(llm), llm.tokenizer
    assert tokenizer is not None, "a conversation was encoded"
    form = form if fields.tools else form.without_calls()
    inside = starts_in_reasoning(prompt, tokenizer, form)

    def reading(request: Request) -> AnswerStream:
        params = request.params
        return AnswerStream(
            tokenizer,
            form,
            stop=params.stop,
            least=params.min_tokens,
            kept=params.include_stop_str_in_output,
            tools=fields.tools or (),
            in_reasoning=inside,
            one_call=one_call,
        )

    return reading


def answer_grammar(
    llm: LLM, fields: Fields, prompt: list[int], forced: ForcedCalls | None, one_call: bool
) -> Grammar | None:
    """The grammar of the answers to `prompt`; None where they may be any.

    Reasoning comes before it. Where the request gives a grammar and tools, the model follows the one or calls the others; a call
    that is `forced` leaves no place for the request's own grammar. Raises BadRequest where no grammar can say that."""
    text = None if forced else fields.params.grammar
    if text is None and forced is None:
        return None
    form, tokenizer = _format_of(llm), llm.tokenizer
    assert tokenizer is not None, "a conversation was encoded"
    tools = [*(fields.tools or ())] if forced is None else forced.of(fields.tools)
    thinking = thinking_of(prompt, tokenizer, form)
    try:
        grammar = constrained_answer(tokenizer, form, thinking, text=text, tools=tools, one_call=one_call)
    except BadRequest as e:
        raise BadRequest("tools cannot be held to a grammar", *e.args) from e
    _refuse_uncompiled(llm, grammar, tools)
    return grammar


def _refuse_uncompiled(llm: LLM, grammar: Grammar, tools: list[dict[str, Any]]) -> None:
    """Raises BadRequest for a grammar that cannot be compiled."""
    try:
        llm.inputs.grammars.matcher(grammar)
    except BadRequest as e:
        for tool in tools:
            _refuse_schema(llm, tool["function"])
        raise BadRequest("tools cannot be held to one grammar", *e.args) from e


def _refuse_schema(llm: LLM, function: Mapping[str, Any]) -> None:
    """Raises BadRequest, with the tool's name, for a schema that alone cannot be compiled."""
    try:
        llm.inputs.grammars.matcher(Grammar.json_schema(function.get("parameters") or {}))
    except BadRequest as e:
        name = printable(function["name"])
        raise BadRequest(f"tools has {name}, whose calls cannot be held to its parameters", *e.args) from e


def _format_of(llm: LLM) -> AnswerFormat:
    template = llm.chat_template
    source = None if template is None else template.source
    return answer_format_of(llm.tokenizer, source, llm.config.model_type)


def _refuse_without_tools(llm: LLM) -> None:
    """Raises BadRequest for a model that is told of no tools, or whose calls nobody can read."""
    template = llm.chat_template
    if template is not None and not template.reads_tools:
        raise BadRequest("tools cannot be given to this model", f"{template.name} has no place for them")
    if template is not None and _format_of(llm).calls is None:
        raise BadRequest("tools cannot be given to this model", "the format of its calls is not known")


def _with_known_keys(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the keys that its role has not: clients send such as annotations, audio and refusal."""
    role = message.get("role")
    known = (*MESSAGE_KEYS, *(KEYS_OF.get(role, ()) if isinstance(role, str) else ()))
    return {key: value for key, value in message.items() if key in known}


def _over(variables: Variables, asked: Variables) -> dict[str, Any]:
    """The server's variables below those that a request asks for; two names of one variable are one."""
    if any(name in asked for name in THINKING):
        variables = {name: value for name, value in variables.items() if name not in THINKING}
    return {**variables, **asked}
