"""A conversation as token ids, by the folder's chat template, which is untrusted.

It renders in a process of its own with limits of time and memory; a text that a client gives never becomes a control token."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_jax.base.errors import BadRequest, BadTemplate, printable
from mla_jax.base.files import read_bounded, read_json
from mla_jax.text.injection import Disguise, TemplateInput
from mla_jax.text.messages import (
    PROTECTED,
    ChatMessage,
    call_without_object,
    checked_messages,
    checked_tools,
    checked_variables,
    refuse_no_answer,
)
from mla_jax.text.tokenizer import MAX_TOKENIZER_CONFIG, Tokenizer

MAX_TEMPLATE = 1 << 20
LIMITS = {"seconds": 2, "memory": 256 << 20, "output": 16 << 20}
# `seconds` above are processor time; this limit is for a machine that is busy, or has no such limit
WALL_SECONDS = 10
KEPT_VARIABLES = ("TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")  # of the environment, in the process that renders
ASKS_FOR_NONE = re.compile(
    r"""(?<!_)\bcontent\b['")\]]*\s*(?:is\s+(?:not\s+)?|[!=]=\s*)none\b""", re.IGNORECASE
)
READS_TOOLS = re.compile(r"\btools\b")
# As an attribute, an item or an argument of get(): a template may also have a variable of this name
READS_CALL_ID = re.compile(r"""(?:\.|\[\s*['"]|\bget\(\s*['"])tool_call_id\b""")


@dataclass(frozen=True)
class ChatTemplate:
    """`source` is the template, `name` the file it comes from, `variables` the folder's own: bos_token and others."""

    source: str
    name: str
    variables: dict[str, str]

    @classmethod
    def from_folder(cls, folder: Path) -> "ChatTemplate | None":
        """The template in chat_template.jinja, or in tokenizer_config.json, None if there is none; it is not run yet."""
        path, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
        settings = read_json(config, MAX_TOKENIZER_CONFIG) if config.exists() else {}
        source = _read(path) if path.exists() else _default(settings.get("chat_template"))
        if source is None:
            return None
        return cls.of(source, path.name if path.exists() else config.name, _variables(settings))

    @classmethod
    def of(cls, source: str, name: str, variables: dict[str, str]) -> "ChatTemplate":
        """The template `source` of the file `name`; raises BadTemplate if it is too large."""
        if len(source.encode("utf-8", "surrogatepass")) > MAX_TEMPLATE:
            raise BadTemplate(
                f"the chat template in {name} is too large", f"the limit is {MAX_TEMPLATE:,} bytes"
            )
        return cls(source, name, variables)

    @property
    def reads_tools(self) -> bool:
        """Whether the template has a place for tools."""
        return READS_TOOLS.search(self.source) is not None

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids of a conversation, BOS once in front; raises BadRequest or BadTemplate.

        Messages and tools have the shapes of OpenAI's interface. `variables` are the client's own for the template.
        `add_generation_prompt` lets the model begin an answer; `continue_final_message` lets it go on with the last message, an
        answer, instead of that.

        Only the template writes control tokens: each text between them is encoded, and checked, as plain text."""
        given = self._given(checked_messages(messages, tokenizer), tools, variables)
        if given["tools"] and not self.reads_tools:
            warnings.warn("the chat template has no place for tools: the model sees none", stacklevel=2)
        if continue_final_message:
            refuse_no_answer(given["messages"][-1])
        prompted = add_generation_prompt and not continue_final_message
        disguise = Disguise(tokenizer, self.source, given, continue_final_message)
        plain, *variants = self._cut_texts(disguise, disguise.variants(), prompted)
        if plain is None:
            finding = "the chat template leaves out the last message, which is to be continued"
            raise BadRequest(finding, "continue_final_message needs a template that writes it")
        _warn_of_dropped(given["messages"], plain)

        def rendered(conversation: TemplateInput) -> str | None:
            return self._cut_texts(disguise, [conversation], prompted)[1]

        ids: list[int] = []
        for text, control in disguise.pieces(plain, variants, rendered):
            ids += [tokenizer.control_id(text)] if control else tokenizer.encode(text, bos=False)
        return tokenizer.with_bos(ids)

    def _given(self, messages: list[ChatMessage], tools: Any, variables: Any) -> TemplateInput:
        """All that the client gives, in the shape that this template reads."""
        own = checked_variables(variables, (*PROTECTED.split(), *self.variables))
        if not ASKS_FOR_NONE.search(self.source):
            # A template that tests for text alone would write "None"
            messages = [{**message, "content": message["content"] or ""} for message in messages]
        if READS_CALL_ID.search(self.source):
            _refuse_without_call_id(messages)
        return {**own, "messages": messages, "tools": checked_tools(tools)}

    def _cut_texts(
        self, disguise: Disguise, conversations: list[TemplateInput], add_generation_prompt: bool
    ) -> list[str | None]:
        """The texts of the plain conversation and of others, cut where the last message ends; None without that end."""
        try:
            texts = self._texts([disguise.plain, *conversations], add_generation_prompt)
        except BadTemplate as e:
            if where := call_without_object(disguise.plain["messages"]):
                finding = f"the arguments of {where} are no JSON object"
                raise BadRequest(finding, "the chat template cannot write them", *e.args) from e
            raise
        return [text if text is None else disguise.cut(text) for text in texts]

    def render(
        self, conversations: list[list[ChatMessage]], add_generation_prompt: bool = True
    ) -> list[str | None]:
        """The texts of conversations of checked messages, all rendered in one process.

        Raises BadTemplate if the template fails with the first; the text of another is None then."""
        return self._texts([{"messages": messages} for messages in conversations], add_generation_prompt)

    def _texts(self, conversations: list[TemplateInput], add_generation_prompt: bool) -> list[str | None]:
        variables = {
            **self.variables,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        request = {
            "template": self.source,
            "variables": variables,
            "conversations": conversations,
            "limits": LIMITS,
        }
        # Stand-ins take three times the bytes as ASCII
        text = json.dumps({"path": _jinja2_path(), **request}, ensure_ascii=False)
        answer = self._ask(text.encode("utf-8", "surrogatepass"))
        if "texts" in answer:
            return answer["texts"]
        line = f"line {answer['line']}: " if answer["line"] else ""
        raise BadTemplate(f"the chat template in {self.name} failed", line + printable(answer["cause"], 400))

    def _ask(self, request: bytes) -> dict:
        """One answer of `untrusted.py`, run by an interpreter with none of our environment, paths and modules."""
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("untrusted.py"))]
        environment = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
        try:
            done = subprocess.run(
                command,
                input=request,
                capture_output=True,
                timeout=WALL_SECONDS,
                env=environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self._failed(f"it takes more than {WALL_SECONDS} seconds") from None
        except OSError as e:
            raise BadTemplate(
                f"the process that renders {self.name} cannot be started", printable(str(e), 300)
            ) from e
        if done.returncode:
            raise self._failed(_cause(done))
        return json.loads(done.stdout.decode("utf-8", "surrogatepass"))

    def _failed(self, cause: str) -> BadTemplate:
        return BadTemplate(f"the chat template in {self.name} was ended", cause)


def _warn_of_dropped(messages: list[ChatMessage], plain: str) -> None:
    """Says which result of a tool the template has left out: the model would answer as if it had never been called."""
    for at, message in enumerate(messages):
        if message["role"] == "tool" and not _is_written(message["content"].strip(), plain):
            warnings.warn(f"the chat template leaves out message {at}, of the role tool", stacklevel=3)


def _is_written(text: str, plain: str) -> bool:
    """Whether a rendered text has this one, as it is or in JSON."""
    forms = (text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return any(form in plain for form in forms)


def _refuse_without_call_id(messages: list[ChatMessage]) -> None:
    for at, message in enumerate(messages):
        if message["role"] == "tool" and "tool_call_id" not in message:
            raise BadRequest(
                f"message {at} has no tool_call_id", "the chat template reads it from each result"
            )


def _cause(ended: subprocess.CompletedProcess[bytes]) -> str:
    """Why a process failed: its limits, or the last line of its traceback."""
    last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if ended.returncode in (-9, -24):  # SIGKILL, SIGXCPU
        return f"it takes more than {LIMITS['seconds']} seconds"
    if "MemoryError" in last or ended.returncode < 0:
        return f"it takes more than {LIMITS['memory'] >> 20} MB of memory"
    return printable(last, 200)


def _read(path: Path) -> str:
    try:
        return read_bounded(path, MAX_TEMPLATE, BadTemplate).decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadTemplate(f"{path.name} is not UTF-8", f"see byte {e.start:,}") from e


def _default(given) -> str | None:
    """A template, or the one called "default" of several."""
    if isinstance(given, list):
        named = [entry for entry in given if isinstance(entry, dict) and entry.get("name") == "default"]
        if not named:
            raise BadTemplate("tokenizer_config.json has several chat templates and none is called default")
        given = named[-1].get("template")
    if given is not None and not isinstance(given, str):
        raise BadTemplate(
            "the chat template in tokenizer_config.json is not text", f"found {type(given).__name__}"
        )
    return given


def _variables(settings: dict) -> dict[str, str]:
    """The named tokens of tokenizer_config.json, each a text or an object with `content`."""
    named = {
        key: value.get("content") if isinstance(value, dict) else value for key, value in settings.items()
    }
    return {key: value for key, value in named.items() if key.endswith("_token") and isinstance(value, str)}


def _jinja2_path() -> list[str]:
    """Where jinja2 and what it needs are installed; the new interpreter looks nowhere else."""
    specs = [importlib.util.find_spec(name) for name in ("jinja2", "markupsafe")]
    return list(dict.fromkeys(str(Path(spec.origin).parent.parent) for spec in specs if spec and spec.origin))
