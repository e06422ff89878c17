"""The requests of benchmarks/soak.py: greedy ones with the library's own answers, and bodies that a server has to refuse."""

import argparse
import inspect
import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import report  # noqa: F401  (it puts this folder last)

from mla_jax import LLM, Grammar, SamplingParams
from mla_jax.engine.core.request import Output
from mla_jax.serve.asked import read_chat
from mla_jax.serve.bodies import ChatBody
from mla_jax.text.answers import answer_format_of, parse_answer
from mla_jax.weights.hub import DEMO

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
NAME = "demo"
TOKENS = (8, 24, 48)  # of answers
LEAST_LEAD = 0.001  # of a chosen token's log-probability before the second: what batches of other sizes do not turn around
LONG = 1500  # characters of prompts that share a beginning
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer"},
        "is_open": {"type": "boolean"},
    },
    "required": ["name", "size", "is_open"],
    "additionalProperties": False,
}
PATTERN = "[a-z]{3,8}(_[a-z]{2,6}){0,2} = [0-9]{1,4}"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("open_file", "close_file")
]
# Further keys of a body, by the form of the answer; chats have other ones for log-probabilities
KEYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop texts": {"stop": ["\n\n", "return"]},
    "n": {"n": 3},
    "logprobs": {"logprobs": 2},
    "regex": {"structured_outputs": {"regex": PATTERN}},
    "JSON schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "file", "schema": SCHEMA}}
    },
}
KEYS_OF_CHATS = {**KEYS, "logprobs": {"logprobs": True, "top_logprobs": 2}}
# The same for the library
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "stop texts": {"stop": ("\n\n", "return")},
    "n": {"n": 3},
    "logprobs": {"logprobs": 2},
    "regex": {"grammar": Grammar.regex(PATTERN)},
    "JSON schema": {"grammar": Grammar.json_schema(SCHEMA)},
}


class Answer(NamedTuple):
    """One answer: token ids, text, calls of tools as names and arguments, and log-probabilities if they were asked for."""

    ids: list[int]
    text: str
    calls: list[tuple[str, str]] = []  # noqa: RUF012
    logprobs: list[float] = []  # noqa: RUF012

    def equals(self, other: "Answer") -> bool:
        """Log-probabilities may differ by rounding."""
        close = all(abs(a - b) < LEAST_LEAD for a, b in zip(self.logprobs, other.logprobs, strict=False))
        return self[:3] == other[:3] and len(self.logprobs) == len(other.logprobs) and close


class Case(NamedTuple):
    """A request, and its answers by the library."""

    kind: str
    path: str
    body: dict[str, Any]
    answers: list[Answer]


class Refusal(NamedTuple):
    """A request that gets this status."""

    path: str
    body: bytes
    status: int


def folder_with_tools(folder: Path) -> Path:
    """The demo model with a chat template that has a place for tools, whose calls are those of DeepSeek-V3.2."""
    copy = Path(shutil.copytree(DEMO, folder / NAME))
    file = copy / "tokenizer_config.json"
    settings = json.loads(file.read_text("utf-8"))
    place = "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{# ｜DSML｜ #}"  # noqa: RUF001
    settings["chat_template"] = settings["chat_template"].replace("{{ bos_token }}", place)
    file.write_text(json.dumps(settings), "utf-8")
    return copy


def cases(llm: LLM, each: int) -> list[Case]:
    """`each` requests of every form to both routes, long ones, and forced calls."""
    found = []
    for path in (COMPLETIONS, CHATS):
        prompts = _settled(llm, path, _pieces(1000, 300))
        for kind in KEYS:
            found += [_case(llm, kind, path, next(prompts), TOKENS[i % 3]) for i in range(each)]
        long = itertools.islice(_settled(llm, path, _long()), each)
        found += [_case(llm, "long prompt", path, text, TOKENS[i % 3]) for i, text in enumerate(long)]
    return [*found, *(_forced(llm, text) for text in _pieces(each, 40))]


def refusals(context: int) -> dict[str, list[Refusal]]:
    """Bodies that are wrong, and prompts that are too long for a context."""

    def body(**keys: Any) -> bytes:
        return json.dumps({"max_tokens": 4, **keys}).encode()

    words, said = "for x in y:\n" * context, [{"role": "user", "content": "x"}]
    wrong = [
        Refusal(COMPLETIONS, b'{"prompt": "a', 400),
        Refusal(COMPLETIONS, b"\xff\xfe\x00", 400),
        Refusal(COMPLETIONS, b"[" * 50_000, 400),
        Refusal(COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400),
        Refusal(COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
        Refusal(COMPLETIONS, b'{"prompt": "' + b"a" * (2 << 20) + b'"}', 413),
        Refusal(COMPLETIONS, body(prompt={"a": 1}), 400),
        Refusal(COMPLETIONS, body(prompt=[10**9]), 400),
        Refusal(COMPLETIONS, body(prompt="a", model="other"), 404),
        Refusal(COMPLETIONS, body(prompt="a", n=10**6), 400),
        Refusal(COMPLETIONS, body(prompt="a", structured_outputs={"regex": "("}), 400),
        Refusal(CHATS, body(messages=[]), 400),
        Refusal(CHATS, body(messages=[{"role": "user", "content": 5}]), 400),
        Refusal(CHATS, body(messages=said, response_format={"type": "json_schema"}), 400),
        Refusal(
            CHATS,
            body(messages=said, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "other"}}),
            400,
        ),
        Refusal("/v1/embeddings", body(input="x"), 404),
    ]
    long = [
        Refusal(COMPLETIONS, body(prompt=words), 400),
        Refusal(CHATS, body(messages=[{"role": "user", "content": words}]), 400),
    ]
    return {"malformed": wrong, "too long": long}


def answer_of(choice: dict[str, Any]) -> Answer:
    """A choice of a whole answer, as a client reads it."""
    message = choice.get("message") or {"content": choice.get("text")}
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])
    ]
    return Answer(choice["token_ids"], message["content"] or "", calls, _logprobs(choice))


def answers_of_stream(pieces: list[dict[str, Any]]) -> list[Answer]:
    """The answers that the choices in the events of a stream make."""
    found: dict[int, Answer] = {}
    for choice in pieces:
        ids, text, calls, logprobs = found.setdefault(choice["index"], Answer([], "", [], []))
        delta = choice.get("delta") or {"content": choice.get("text")}
        for call in delta.get("tool_calls", []):
            name, arguments = calls.pop() if call["index"] < len(calls) else (call["function"]["name"], "")
            calls.append((name, arguments + call["function"]["arguments"]))
        joined = Answer(
            ids + choice.get("token_ids", []),
            text + (delta.get("content") or ""),
            calls,
            logprobs + _logprobs(choice),
        )
        found[choice["index"]] = joined
    return [found[index] for index in sorted(found)]


def _logprobs(choice: dict[str, Any]) -> list[float]:
    """Of the tokens of a choice, as completions or as chats have them."""
    scores = choice.get("logprobs") or {}
    return scores.get("token_logprobs") or [entry["logprob"] for entry in scores.get("content") or []]


def _case(llm: LLM, kind: str, path: str, prompt: str, tokens: int) -> Case:
    """A request with the answers that the library gives to it alone."""
    form, keys = kind if kind in KEYS else "greedy", KEYS if path == COMPLETIONS else KEYS_OF_CHATS
    asked = {"prompt": prompt} if path == COMPLETIONS else {"messages": _said(prompt)}
    body = {**asked, "temperature": 0, "max_tokens": tokens, "return_token_ids": True, **keys[form]}
    params = SamplingParams(temperature=0, max_tokens=tokens, **PARAMS[form])
    outputs = llm.generate([_prompt(llm, path, prompt)], params)
    return Case(kind, path, body, [_answer_of_library(output) for output in outputs])


def _forced(llm: LLM, prompt: str) -> Case:
    """A request that has to call a tool. The library has no word for that: the server's own reading of the body makes the
    grammar, and the answer is the library's."""
    body = {
        "messages": _said(prompt),
        "tools": TOOLS,
        "tool_choice": "required",
        "temperature": 0,
        "max_tokens": 200,
    }
    (request,) = read_chat(ChatBody(**body), llm, SamplingParams(), NAME, {}).requests
    (output,) = llm.generate([request.prompt], request.params)
    assert llm.chat_template is not None
    assert llm.tokenizer is not None
    form = answer_format_of(llm.tokenizer, llm.chat_template.source, llm.config.model_type)
    ids = output.token_ids[:-1] if output.token_ids[-1] in request.all_ends else output.token_ids
    found = parse_answer(ids, llm.tokenizer, form, tools=TOOLS)
    calls = [(call.name, call.arguments) for call in found.calls]
    return Case(
        "forced call",
        CHATS,
        {**body, "return_token_ids": True},
        [Answer(output.token_ids, found.content, calls)],
    )


def _answer_of_library(output: Output) -> Answer:
    scores = output.logprobs or []
    return Answer(
        output.token_ids,
        output.text or "",
        [],
        [entry[i] for i, entry in zip(output.token_ids, scores, strict=False)],
    )


def _prompt(llm: LLM, path: str, text: str) -> Any:
    return text if path == COMPLETIONS else llm.encode_chat(_said(text))


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def _settled(llm: LLM, path: str, texts: Iterator[str]) -> Iterator[str]:
    """Those of some prompts whose greedy tokens lead so far that rounding does not turn them around."""
    params = SamplingParams(temperature=0, max_tokens=max(TOKENS), logprobs=2)
    for text in texts:
        (output,) = llm.generate([_prompt(llm, path, text)], params)
        entries = zip(output.token_ids, output.logprobs or [], strict=True)
        if all(
            entry[token] - max(p for i, p in entry.items() if i != token) > LEAST_LEAD
            for token, entry in entries
        ):
            yield text


def _pieces(count: int, longest: int) -> Iterator[str]:
    """Pieces of a module of Python's library."""
    source, rng = inspect.getsource(argparse), random.Random(0)
    for _ in range(count):
        start = rng.randrange(len(source) - longest)
        yield source[start : start + rng.randrange(10, longest)]


def _long() -> Iterator[str]:
    """Prompts that begin alike."""
    source = inspect.getsource(argparse)
    return (source[: LONG + 50 * i] for i in range(100))
