"""A conversation as token ids, by the folder's chat template, which is untrusted.

It renders in a process of its own with limits of time and memory; the text of a message never becomes a control token."""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mla_jax.base.errors import BadRequest, BadTemplate, printable, shown
from mla_jax.base.files import read_bounded, read_json
from mla_jax.text.injection import Disguise, Message
from mla_jax.text.tokenizer import MAX_TOKENIZER_CONFIG, Tokenizer, check_text

MAX_TEMPLATE = 1 << 20
LIMITS = {"seconds": 2, "memory": 256 << 20, "output": 16 << 20}
# `seconds` above are processor time; this limit is for a machine that is busy, or has no such limit
WALL_SECONDS = 10
ROLES = ("system", "developer", "user", "assistant", "tool")
KEPT_VARIABLES = ("TZ", "LD_LIBRARY_PATH", "SYSTEMROOT")  # of the environment, in the process that renders

Messages = Sequence[Mapping[str, str]]


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

    def encode(
        self, messages: Sequence[Mapping[str, str]], tokenizer: Tokenizer, add_generation_prompt: bool = True
    ) -> list[int]:
        """The token ids of a conversation, BOS once in front; raises BadRequest or BadTemplate.

        Only the template writes control tokens: each text between them is encoded, and checked, as plain text."""
        messages = checked(messages, tokenizer)
        disguise = Disguise(tokenizer, self.source, messages)
        plain, *variants = self.render([messages, *disguise.variants()], add_generation_prompt)
        _warn_of_dropped(messages, plain)
        ids: list[int] = []
        for text, control in disguise.pieces(plain, variants, self._rendered_or_none):
            ids += [tokenizer.control_id(text)] if control else tokenizer.encode(text, bos=False)
        return tokenizer.with_bos(ids)

    def _rendered_or_none(self, messages: list[Message]) -> str | None:
        try:
            return self.render([messages])[0]
        except BadTemplate:
            return None

    def render(self, conversations: list[list[Message]], add_generation_prompt: bool = True) -> list[str]:
        """The text of each conversation, all rendered in one process."""
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
        answer = self._ask(json.dumps({"path": _jinja2_path(), **request}).encode())
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


def _warn_of_dropped(messages: list[Message], plain: str) -> None:
    """Says which result of a tool the template has left out: the model would answer as if it had never been called."""
    for at, message in enumerate(messages):
        content = message["content"].strip()
        written = (content, json.dumps(content)[1:-1], json.dumps(content, ensure_ascii=False)[1:-1])
        if message["role"] == "tool" and not any(text in plain for text in written):
            warnings.warn(f"the chat template leaves out message {at}, of the role tool", stacklevel=3)


def _cause(ended: subprocess.CompletedProcess[bytes]) -> str:
    """Why a process failed: its limits, or the last line of its traceback."""
    last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if ended.returncode in (-9, -24):  # SIGKILL, SIGXCPU
        return f"it takes more than {LIMITS['seconds']} seconds"
    if "MemoryError" in last or ended.returncode < 0:
        return f"it takes more than {LIMITS['memory'] >> 20} MB of memory"
    return printable(last, 200)


def checked(messages: Any, tokenizer: Tokenizer) -> list[Message]:
    """The messages as plain dicts.

    Raises BadRequest unless each is a role and a content, both text, and no role is part of a control token."""
    if not isinstance(messages, list | tuple) or not messages:
        raise BadRequest(
            "the conversation is not a list of messages", 'expected [{"role": "user", "content": ...}, ...]'
        )
    for at, message in enumerate(messages):
        _check_shape(at, message)
        _check_role(at, message["role"], tokenizer)
        check_text(message["content"])
    return [dict(message) for message in messages]


def _check_shape(at: int, message: Any):
    if not isinstance(message, Mapping):
        raise BadRequest(f"message {at} is not a role and a content", f"found {type(message).__name__}")
    if set(message) != {"role", "content"}:
        raise BadRequest(f"message {at} is not a role and a content", f"found the keys {shown([*message])}")
    for key in ("role", "content"):
        if not isinstance(message[key], str):
            raise BadRequest(f"the {key} of message {at} is not text", f"found {type(message[key]).__name__}")


def _check_role(at: int, role: str, tokenizer: Tokenizer):
    check_text(role)
    if role in ROLES:
        return
    if not role.strip() or any(role in text or text in role for text in tokenizer.control):
        raise BadRequest(
            f"the role of message {at} is refused", f"found {printable(role)}, known: " + ", ".join(ROLES)
        )


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
