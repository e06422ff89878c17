"""A client's JSON object as prompt, messages and sampling parameters. No JAX here.

Its keys are those of SamplingParams, of OpenAI's interface and of vLLM. null is absent, for every key."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from mla_jax.base.errors import BadRequest, printable, shown
from mla_jax.base.grammar_keys import FORM_KEYS, take_grammar
from mla_jax.base.names import nearest
from mla_jax.base.options import SamplingParams, names

PROMPTS = ("prompt", "messages")
# Keywords of `encode_chat` other than messages, and the values that ask for nothing
CHAT = {
    "tools": [],
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
    "continue_final_message": False,
}
TOKENS = ("max_tokens", "max_completion_tokens")
KEYS = (*PROMPTS, *CHAT, *names(SamplingParams))
# Settings of whole numbers, which some clients write as 2.0
WHOLE = [f.name for f in dataclasses.fields(SamplingParams) if f.type in (int, int | None, tuple[int, ...])]
OFF = {"top_k": (-1, 0), "seed": (-1, None)}  # a value that other engines have for "off", and ours
IGNORED = """
    cache_salt metadata modalities model parallel_tool_calls prediction priority prompt_cache_key reasoning_effort
    return_token_ids safety_identifier service_tier store stream stream_options user verbosity web_search_options
"""  # keys that do not change an answer here
# Keys for features that are not there, and the values that do not ask for them
NEUTRAL: dict[str, tuple] = {
    "best_of": (1,),
    "echo": (False,),
    "functions": ([],),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "use_beam_search": (False,),
}


class Fields(NamedTuple):
    """One of `prompt` and `messages` is None; `unknown` are keys without a meaning here.

    `messages`, `tools` and `chat_template_kwargs` are as the client gave them: whoever renders them checks them."""

    prompt: Any
    messages: Any
    params: SamplingParams
    unknown: tuple[str, ...] = ()
    tools: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @property
    def chat(self) -> dict[str, Any]:
        """The keywords of `encode_chat`."""
        return {key: getattr(self, key) for key in CHAT}


def read_fields(body: Mapping[str, Any], defaults: SamplingParams, strict: bool = True) -> Fields:
    """The request in `body`, its parameters over `defaults`.

    Raises BadRequest for a wrong value or one that cannot be served, and if `strict` for an unknown key."""
    given = _asking(body)
    _take_tokens(given)
    _take_logprobs(given)
    take_grammar(given)
    unknown = tuple(key for key in given if key not in KEYS)
    if strict and unknown:
        raise BadRequest(f"unknown key {printable(unknown[0])}", nearest(unknown[0], (*KEYS, *FORM_KEYS)))
    _refuse_none_or_two(given)
    prompt, params = as_whole(given.get("prompt")), _params(given, defaults)
    return Fields(prompt, given.get("messages"), params, unknown, **_chat(given))


def _asking(body: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that ask for something; raises BadRequest for a feature that is not there."""
    ignored = IGNORED.split()
    given = {key: value for key, value in body.items() if value is not None and key not in ignored}
    for key in [key for key in given if key in NEUTRAL]:
        _refuse_unserved(key, given.pop(key))
    return given


def _refuse_none_or_two(given: dict[str, Any]) -> None:
    if len(given.keys() & set(PROMPTS)) != 1:
        found = ", ".join(map(printable, given)) or "an empty object"
        raise BadRequest('expected either "prompt" or "messages"', f"found {found}")


def _chat(given: dict[str, Any]) -> dict[str, Any]:
    """The keywords of `encode_chat` other than messages; raises BadRequest where there are none."""
    asked = {key: given[key] for key, neutral in CHAT.items() if key in given and given[key] != neutral}
    for key, value in asked.items():
        if isinstance(CHAT[key], bool) and not isinstance(value, bool):
            raise BadRequest(f"{key} is {shown(value)}", "expected true or false")
    if asked and "messages" not in given:
        raise BadRequest(f"{next(iter(asked))} needs messages", "a plain prompt has no chat template")
    return asked


def _params(given: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    settings = {key: _setting(key, given[key]) for key in names(SamplingParams) if key in given}
    return dataclasses.replace(defaults, **{k: v for k, v in settings.items() if v is not None})


def _refuse_unserved(key: str, value: Any) -> None:
    if value not in NEUTRAL[key]:
        expected = " or ".join([*map(shown, NEUTRAL[key]), "no such key"])
        raise BadRequest(f"{key} is not supported", f"found {shown(value)}, expected {expected}")


def _take_tokens(given: dict[str, Any]) -> None:
    """Leaves `max_tokens` of the two names for it."""
    limits = [given.pop(key) for key in TOKENS if key in given]
    if len(limits) == 2 and limits[0] != limits[1]:
        raise BadRequest("max_tokens and max_completion_tokens differ", f"found {shown(limits)}; give one")
    if limits:
        given["max_tokens"] = limits[0]


def _take_logprobs(given: dict[str, Any]) -> None:
    """Leaves `logprobs` as a number: OpenAI's chats have a boolean, with the number in `top_logprobs`."""
    most, asked = given.pop("top_logprobs", None), given.get("logprobs")
    if isinstance(asked, bool):
        del given["logprobs"]
    if asked is True:
        given["logprobs"] = most or 0
    elif most:
        raise BadRequest(f"top_logprobs is {shown(most)}", 'expected "logprobs": true beside it')


def _setting(key: str, value: Any) -> Any:
    """A value of a sampling parameter as we write it."""
    value = as_whole(value) if key in WHOLE else value
    other, ours = OFF.get(key, (None, None))
    return ours if other is not None and value == other else value


def as_whole(value: Any) -> Any:
    """A number such as 2.0, or those of a list, as 2; anything else as it is."""
    if isinstance(value, list):
        return [as_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
