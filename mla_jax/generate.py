"""python -m mla_jax.generate: parses, then runs. Nothing heavy is imported before the command line is known to be sound."""

import dataclasses
import json
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from mla_jax.base.errors import BadRequest
from mla_jax.base.files import explained
from mla_jax.base.grammar import Grammar
from mla_jax.base.options import GROUPS as OPENING
from mla_jax.base.options import Options, OutputOptions, PromptOptions, SamplingParams
from mla_jax.ui.command_line import DONE, INTERRUPTED, exit_code_of, exit_with, parse_command
from mla_jax.ui.download import DownloadOptions, fetched
from mla_jax.ui.help import About

if TYPE_CHECKING:
    from mla_jax.engine.opening.opened import Opened
    from mla_jax.ui.console import Console

USAGE = "python -m mla_jax.generate [PROMPT] [--flag VALUE ...]   (-p: --prompt; --help all; --version)"
MAX_PROMPT_BYTES = 64 << 20
ERROR = 1  # the exit code where logits are not finite
# The settings by group, as in the help and in a configuration file
COMMAND_GROUPS: dict[str, Any] = {
    "prompt": PromptOptions,
    "sampling": SamplingParams,
    **OPENING,
    "download": DownloadOptions,
    "output": OutputOptions,
}


EXAMPLES = """\
examples:
  python -m mla_jax.generate "def read_lines(path):"
  python -m mla_jax.generate --model moonshotai/Moonlight-16B-A3B-Instruct --chat
  python -m mla_jax.generate --model ./model --batch-file prompts.jsonl --out answers.jsonl"""
ABOUT = About("python -m mla_jax.generate", USAGE, COMMAND_GROUPS, EXAMPLES)


@dataclass(frozen=True)
class Command:
    """Continue a prompt with a DeepSeek-style model."""

    argument: tyro.conf.Positional[str] = ""
    prompt: PromptOptions = field(default_factory=PromptOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: Options = field(default_factory=Options)
    download: DownloadOptions = field(default_factory=DownloadOptions)
    output: OutputOptions = field(default_factory=OutputOptions)


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 logits not finite, 2 usage or bad request, 3 bad file, 4 does not fit, 5 another process is lost,
    130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return exit_code_of(lambda: run_command(parse(arguments)), arguments, ABOUT)


def parse(arguments: list[str]) -> Command:
    """The command line over the TOML file it names, over the defaults."""
    arguments = ["--prompt" if a == "-p" else a for a in arguments]
    return parse_command(Command, ABOUT, arguments)


def run_command(command: Command) -> int:
    if command.output.doctor:
        from mla_jax.ui.doctor import doctor

        print(*doctor(), sep="\n")
        return DONE
    refuse_contradictions(command)
    command = with_schema(command)
    if command.options.processes.several:
        text_alone_on_stdout()
    if command.options.processes.follows:
        return run_follower(with_model(command))
    needs_prompt = not (command.output.dry_run or command.prompt.chat or command.prompt.batch_file)
    prompt = read_prompt(command) if needs_prompt else None
    return answer_with_model(with_model(command), prompt)


def answer_with_model(command: Command, prompt: str | None) -> int:
    """Opens the model, then plans, answers a file or a prompt, or talks."""
    from mla_jax.engine.opening.opened import open_model  # only now: JAX takes a second to import
    from mla_jax.ui.console import Console

    console = Console(command.output.json, command.output.quiet)
    warnings.showwarning = lambda message, *_, **__: console.note(f"note: {message}")
    opened, batch, out = open_model(command.options), command.prompt.batch_file, command.output.out
    if command.output.dry_run:
        return dry_run(opened, console)
    if batch:
        from mla_jax.ui.batch_file import answer_file

        return answer_file(opened, str(batch), out, command.sampling, console)
    return reply(opened, prompt, command, console)


def refuse_contradictions(command: Command) -> None:
    """Raises BadRequest for settings that exclude each other."""
    prompt, device, processes = command.prompt, command.options.mesh.device, command.options.processes
    if prompt.system is not None and not prompt.chat:
        hint = "a plain prompt has no roles; write the whole text for the model"
        raise BadRequest("--system needs --chat", hint)
    if prompt.chat_template_kwargs is not None and not prompt.chat:
        hint = "a plain prompt has no template; a line of --batch-file has its own chat_template_kwargs"
        raise BadRequest("--chat-template-kwargs needs --chat", hint)
    if prompt.chat and (n := command.sampling.n) > 1:
        raise BadRequest(f"--n {n} and --chat exclude each other", "a conversation has one answer per turn")
    if prompt.batch_file and (prompt.chat or prompt.prompt or prompt.file or command.argument):
        raise BadRequest("several prompts given", "--batch-file excludes a prompt, --file and --chat")
    if device is not None and not command.output.dry_run:
        raise BadRequest(f"--device {device} needs --dry-run", "it plans for devices that are not here")
    if processes.several and command.output.dry_run:
        found = f"--dry-run is for one process, but --processes is {processes.processes}"
        raise BadRequest(found, "--mesh and --device plan for devices of other hosts, too")
    if command.output.out and not prompt.batch_file:
        hint = "a single answer goes to stdout; write it to a file with > FILE"
        raise BadRequest("--out needs --batch-file", hint)


def with_schema(command: Command) -> Command:
    """The command with the grammar that --json-schema names: JSON text, or @ and the path of a file with it."""
    given = command.prompt.json_schema
    if given is None:
        return command
    schema = _decoded(_read_file(given[1:])) if given.startswith("@") else given
    grammar = Grammar.json_schema(schema)
    return dataclasses.replace(command, sampling=dataclasses.replace(command.sampling, grammar=grammar))


def with_model(command: Command) -> Command:
    """The command with its model in the Hub's local cache, where --download asks for that."""
    options = fetched(command.options, command.download, command.output.quiet)
    return dataclasses.replace(command, options=options)


def read_prompt(command: Command) -> str:
    """The prompt from the argument, `--prompt`, a file or stdin; exactly one of them."""
    sources = [s for s in (command.argument, command.prompt.prompt, command.prompt.file) if s]
    if len(sources) != 1:
        found = "no prompt given" if not sources else "several prompts given"
        raise BadRequest(
            found, 'give one: as an argument, with --file, or "-" to read stdin; or talk with --chat'
        )
    if command.prompt.file:
        return _decoded(_read_file(command.prompt.file))
    if sources == ["-"]:
        return _decoded(sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1))
    return command.argument or command.prompt.prompt or ""


def _read_file(path: str | Path) -> bytes:
    with explained(path, "read"), open(path, "rb") as file:
        return file.read(MAX_PROMPT_BYTES + 1)


def _decoded(data: bytes) -> str:
    if len(data) > MAX_PROMPT_BYTES:
        raise BadRequest(
            "the prompt is too large", f"found more than {MAX_PROMPT_BYTES:,} bytes, which is the limit"
        )
    if not data:
        raise BadRequest("no prompt given", "the file or stdin is empty")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise BadRequest("the prompt is not UTF-8", f"byte {e.start:,} is {data[e.start]:#x}") from e


def reply(opened: "Opened", prompt: str | None, command: Command, console: "Console") -> int:
    """Loads the model and answers `prompt`, or talks if that is None. A prompt is checked before any weights are read."""
    from mla_jax.engine.llm import LLM
    from mla_jax.ui.chat import chat
    from mla_jax.ui.console import answers

    request = None if prompt is None else opened.inputs.request(prompt, command.sampling)
    llm = LLM(opened, progress=console.loading)
    console.note(*(f"note: {note}" for note in llm.notes))
    if request is None:
        variables = json.loads(command.prompt.chat_template_kwargs or "{}")
        return chat(llm, command.sampling, console, command.prompt.system, variables)
    reason = answers(llm, request.prompt, command.sampling, console)
    return {"error": ERROR, "interrupted": INTERRUPTED}.get(reason, DONE)


def run_follower(command: Command) -> int:
    """Computes this process's part of the requests of process 0, until that ends."""
    from mla_jax.engine.llm import LLM
    from mla_jax.engine.opening.opened import open_model
    from mla_jax.ui.console import Console
    from mla_jax.ui.interrupt import second_interrupt

    console = Console(command.output.json, command.output.quiet)
    llm = LLM(open_model(command.options), progress=console.loading)
    own = command.options.processes
    console.note(f"process {own.process_id} of {own.processes} follows process 0")
    with second_interrupt(
        lambda: console.note("process 0 decides when to end; Ctrl-C once more ends all processes now")
    ):
        llm.follow()
    return DONE


def text_alone_on_stdout() -> None:
    """Sends the output of libraries to stderr, such as the CPU collectives'."""
    try:
        own, encoding = os.dup(sys.stdout.fileno()), sys.stdout.encoding
    except (OSError, ValueError):  # no file
        return
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = open(own, "w", encoding=encoding, errors=sys.stdout.errors)  # noqa: SIM115 it stays open


def dry_run(opened: "Opened", console: "Console") -> int:
    """Prints the memory plan and the chosen forms; the exit code is 4 if the model does not fit."""
    needed, predicted = opened.plan, opened.predicted()
    if console.as_json:
        further = {} if predicted is None else {"predicted": predicted.fields()}
        console.event("plan", **dataclasses.asdict(needed), fits=needed.fits, **further)
    else:
        console.say(
            [*opened.explain(), "", *needed.lines(), *([] if predicted is None else predicted.lines())]
        )
    return DONE if needed.fits else 4


def script() -> None:
    """The entry point."""
    exit_with(main)


if __name__ == "__main__":
    script()
