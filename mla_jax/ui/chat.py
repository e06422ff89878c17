"""A conversation on the command line: turns, commands, and a line editor where stdin is a terminal."""

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mla_jax.base.errors import BadRequest, MlaJaxError, printable
from mla_jax.base.files import explained, read_json, write_json
from mla_jax.base.names import nearest
from mla_jax.base.options import SamplingParams
from mla_jax.engine.inputs import DEFAULT_MAX_TOKENS
from mla_jax.engine.llm import LLM
from mla_jax.ui.console import Console, answer

MAX_MESSAGE = 16 << 20  # bytes of one message
MAX_FILE = 64 << 20  # bytes of a saved conversation
PROMPT_SIGN = "> "
FULL = "/drop forgets the oldest turn, /clear all of them"


@dataclass
class Conversation:
    """Messages that alternate between user and assistant, behind an optional system prompt. It holds complete turns only."""

    system: str | None = None
    turns: list[dict[str, str]] = field(default_factory=list)

    @property
    def messages(self) -> list[dict[str, str]]:
        start = [] if self.system is None else [_message("system", self.system)]
        return [*start, *self.turns]

    def asking(self, question: str) -> list[dict[str, str]]:
        """The messages with one more question."""
        return [*self.messages, _message("user", question)]

    def add(self, question: str, reply: str) -> None:
        self.turns += [_message("user", question), _message("assistant", reply)]

    def drop(self, turns: int) -> int:
        """Forgets the oldest turns and returns how many there were."""
        dropped = min(turns, len(self.turns) // 2)
        del self.turns[: 2 * dropped]
        return dropped

    def save(self, path: Path, model: str) -> None:
        """Writes JSON; raises BadRequest rather than overwrite a file that is no conversation."""
        with explained(path, "written"):
            if path.exists():
                Conversation.load(path)
            write_json(path, {"model": model, "messages": self.messages}, indent=2)

    @staticmethod
    def load(path: Path) -> "Conversation":
        """The conversation in a file; raises BadRequest if it is not one."""
        messages = read_json(path, MAX_FILE, BadRequest).get("messages")
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            expected = 'expected {"messages": [{"role": "user", "content": ...}, ...]}'
            raise BadRequest(f"{path} is not a conversation", expected)
        system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
        turns = messages if system is None else messages[1:]
        roles = [message["role"] for message in turns]
        if roles != ["user", "assistant"] * (len(roles) // 2):
            raise BadRequest(
                f"{path} is not a conversation",
                "user and assistant do not alternate, or the last answer is missing",
            )
        return Conversation(system, turns)


class Chat:
    """The state that commands act on."""

    def __init__(
        self,
        llm: LLM,
        sampling: SamplingParams,
        console: Console,
        system: str | None,
        variables: Mapping[str, Any] | None = None,
    ):
        """`variables` are those of the chat template."""
        self.llm, self.sampling, self.console = llm, sampling, console
        self.conversation, self.open = Conversation(system), False
        self.variables = variables

    def run(self, read: Callable[[], str]) -> int:
        """Turn by turn until the end of input; Ctrl-C at the prompt clears the line."""
        # Fails at once if there is no template, or none for a system prompt
        self.encode(self.conversation.asking(""))
        self.console.note(f"{self.llm.name}: /help lists commands, Ctrl-D ends")
        self.open = True
        while self.open:
            try:
                self.take(read())
            except EOFError:
                self.open = False
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
            except MlaJaxError as error:
                self.console.error(error)
        return 0

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        return self.llm.encode_chat(messages, chat_template_kwargs=self.variables)

    def take(self, line: str) -> None:
        """One line of input: a command, or a message. A message may begin with a slash if that is doubled."""
        if line.startswith("/") and not line.startswith("//"):
            return self.command(*line[1:].strip().partition(" ")[::2])
        message = line[1:] if line.startswith("//") else line
        return self.ask(message) if message.strip() else None

    def command(self, name: str, argument: str) -> None:
        if name not in COMMANDS:
            raise BadRequest(
                f"there is no command /{printable(name)}",
                nearest(name, COMMANDS),
                "// sends a line that begins with /",
            )
        COMMANDS[name].action(self, argument.strip())

    def ask(self, question: str) -> None:
        """One turn. It joins the conversation if anything was answered; an interrupted answer does as far as it came."""
        prompt = self.encode(self.conversation.asking(question))
        text, reason = answer(self.llm, prompt, self._fitting(len(prompt)), self.console)
        if text and reason != "error":
            self.conversation.add(question, text)
        else:
            self.console.note("this turn is not part of the conversation")
        stats = self.llm.last_stats
        if stats is not None and stats.prompt_tokens + stats.generated_tokens >= self.llm.context:
            self.console.note(f"the context is full: {FULL}")

    def _fitting(self, prompt: int) -> SamplingParams:
        """Sampling with no more tokens than a prompt of `prompt` tokens leaves room for; raises BadRequest if it leaves none."""
        room = self.llm.context - prompt
        if room < 1:
            found = f"the prompt has {prompt:,} tokens, the context holds {self.llm.context:,}"
            raise BadRequest("the context is full", found, FULL)
        wanted = self.sampling.max_tokens
        return dataclasses.replace(
            self.sampling, max_tokens=min(DEFAULT_MAX_TOKENS if wanted is None else wanted, room)
        )

    def help(self, _: str) -> None:
        usages = [(f"/{name} {command.argument}", command.help) for name, command in COMMANDS.items()]
        self.console.note(*(f"  {usage:<15} {words}" for usage, words in usages))

    def clear(self, _: str) -> None:
        self.conversation.turns.clear()
        self.console.note("the conversation is empty")

    def drop(self, argument: str) -> None:
        if argument and not (argument.isdecimal() and len(argument) < 10):
            raise BadRequest(f"/drop {printable(argument)}", "expected a number of turns")
        dropped = self.conversation.drop(int(argument or 1))
        self.console.note(f"turns forgotten: {dropped}, left: {len(self.conversation.turns) // 2}")

    def system(self, argument: str) -> None:
        if argument:
            self.encode(Conversation(argument).asking(""))  # a template may refuse system prompts
            self.conversation.system = argument
        self.console.note(f"system prompt: {self.conversation.system or 'none'}")

    def save(self, argument: str) -> None:
        path = _path(argument)
        self.conversation.save(path, self.llm.name)
        self.console.note(f"saved to {path}")

    def load(self, argument: str) -> None:
        loaded = Conversation.load(_path(argument))
        self.encode(loaded.asking(""))
        self.conversation = loaded
        self.console.note(f"turns loaded: {len(loaded.turns) // 2}")

    def exit(self, _: str) -> None:
        self.open = False


class ChatCommand(NamedTuple):
    argument: str
    help: str
    action: Callable[[Chat, str], None]


COMMANDS = {
    "help": ChatCommand("", "list the commands", Chat.help),
    "clear": ChatCommand("", "forget all turns; the system prompt stays", Chat.clear),
    "drop": ChatCommand("[N]", "forget the oldest turn, or the N oldest", Chat.drop),
    "system": ChatCommand("[TEXT]", "show or set the system prompt", Chat.system),
    "save": ChatCommand("FILE", "write the conversation as JSON", Chat.save),
    "load": ChatCommand("FILE", "continue a saved conversation", Chat.load),
    "exit": ChatCommand("", "end, as Ctrl-D does", Chat.exit),
}


def chat(
    llm: LLM,
    sampling: SamplingParams,
    console: Console,
    system: str | None = None,
    variables: Mapping[str, Any] | None = None,
) -> int:
    """Talks until the end of input; returns the exit code."""
    return Chat(llm, sampling, console, system, variables).run(line_reader())


def line_reader() -> Callable[[], str]:
    """A function that reads the next message: a line editor on a terminal, plain lines elsewhere. It raises EOFError."""
    terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if not terminal or os.environ.get("TERM", "dumb") in ("", "dumb"):
        return plain_line
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))  # Alt-Enter
    session: PromptSession[str] = PromptSession(output=create_output(stdout=sys.stderr), key_bindings=keys)
    return lambda: session.prompt(PROMPT_SIGN)


def plain_line() -> str:
    """One line of stdin, without editing."""
    terminal = sys.stdin.isatty()
    if terminal:
        print(PROMPT_SIGN, end="", file=sys.stderr, flush=True)
    try:
        data = sys.stdin.buffer.readline(MAX_MESSAGE + 1)
    except KeyboardInterrupt:
        if terminal:
            print(file=sys.stderr, flush=True)
        raise
    if not data:
        raise EOFError
    if len(data) > MAX_MESSAGE:
        raise BadRequest(
            "the message is too long", f"the limit is {MAX_MESSAGE:,} bytes; the rest of the line follows"
        )
    try:
        return data.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as e:
        raise BadRequest("the message is not UTF-8", f"byte {e.start:,} is {data[e.start]:#x}") from e


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"role", "content"}
        and all(isinstance(v, str) for v in value.values())
    )


def _path(argument: str) -> Path:
    if not argument:
        raise BadRequest("no file given", "name one, such as /save talk.json")
    try:
        return Path(argument).expanduser()
    except RuntimeError:  # ~nobody
        return Path(argument)
