"""python -m mla_jax.generate: parses, then runs. Nothing heavy is imported before the command line is known to be sound."""

import dataclasses
import json
import os
import sys
import tomllib
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from mla_jax import __version__
from mla_jax.base.errors import BadRequest, MlaJaxError, printable
from mla_jax.base.files import explained
from mla_jax.base.names import ABSENT, MEANT, nearest
from mla_jax.base.options import GROUPS as OPENING
from mla_jax.base.options import Options, OutputOptions, PromptOptions, SamplingParams, names
from mla_jax.ui.help import asked_groups, help_text

if TYPE_CHECKING:
    from mla_jax.engine.opening.opened import Opened
    from mla_jax.ui.console import Console

USAGE = "python -m mla_jax.generate [PROMPT] [--flag VALUE ...]      (-p: --prompt, -h: --help; --version)"
MAX_PROMPT_BYTES = 64 << 20
MAX_CONFIG_BYTES = 1 << 20
DONE, ERROR, INTERRUPTED = 0, 1, 130
# The settings by group, as in the help and in a configuration file
COMMAND_GROUPS: dict[str, Any] = {
    "prompt": PromptOptions,
    "sampling": SamplingParams,
    **OPENING,
    "output": OutputOptions,
}


@dataclass(frozen=True)
class Command:
    """Continue a prompt with a DeepSeek-style model."""

    argument: tyro.conf.Positional[str] = ""
    prompt: PromptOptions = field(default_factory=PromptOptions)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    options: Options = field(default_factory=Options)
    output: OutputOptions = field(default_factory=OutputOptions)


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 logits not finite, 2 usage or bad request, 3 bad file, 4 does not fit, 5 another process is lost,
    130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of memory that its programs do not take
    if "--version" in arguments:
        print(f"mla-jax {__version__}")
        return DONE
    try:
        if {"-h", "--help"} & set(arguments):
            print(help_text(USAGE, COMMAND_GROUPS, asked_groups(arguments, COMMAND_GROUPS)))
            return DONE
        return run_command(parse(arguments))
    except MlaJaxError as error:
        if "--debug" in arguments:
            raise
        print(f"error: {error}", file=sys.stderr)
        _tell_others(error, error.exit_code)
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        print("interrupted", file=sys.stderr)
        _tell_others(interrupt, INTERRUPTED)
        return INTERRUPTED


def _tell_others(error: BaseException, code: int) -> None:
    """That this process ends, if it is one of several."""
    if "mla_jax.hosts.distributed" in sys.modules:
        from mla_jax.hosts import distributed

        distributed.fail(error, code)


def parse(arguments: list[str]) -> Command:
    """The command line over the TOML file it names, over the defaults."""
    arguments = ["--prompt" if a == "-p" else a for a in arguments]
    refuse_words_of_others(arguments)
    config = _config_path(arguments)
    defaults = Command() if config is None else from_toml(config)
    return tyro.cli(
        Command,
        args=arguments,
        default=defaults,
        prog="python -m mla_jax.generate",
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )


def refuse_words_of_others(arguments: list[str]) -> None:
    """Raises BadRequest with our flag for one that other engines have."""
    for argument in arguments:
        flag = argument.partition("=")[0]
        word = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and word in (*MEANT, *ABSENT):
            raise BadRequest(
                f"there is no flag {flag}", ABSENT.get(word) or f"did you mean {_as_flag(MEANT[word])}?"
            )


def _as_flag(setting: str) -> str:
    """`mesh="data=N"` as `--mesh data=N`."""
    name, _, value = setting.replace('"', "").partition("=")
    return f"--{name.replace('_', '-')} {value}".rstrip()


def _config_path(arguments: list[str]) -> Path | None:
    """The value of `--config`, which must be read before the other flags are parsed."""
    for flag, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = flag.partition("=")
        if name == "--config" and (equals or following):
            return Path(value if equals else following)
    return None


def from_toml(path: Path) -> Command:
    """Settings by group, `[sampling]` and so on; raises BadRequest for an unknown name or a wrong type."""
    groups = {name: _group(path, name, values) for name, values in _read_toml(path).items()}
    options = Options(**{name: groups.pop(name) for name in OPENING if name in groups})
    return Command(options=options, **groups)


def _group(path: Path, name: str, values: Any) -> Any:
    """The settings of a group."""
    if name not in COMMAND_GROUPS or not isinstance(values, dict):
        raise BadRequest(f"{path} has no known group {printable(name)}", nearest(name, COMMAND_GROUPS))
    known = names(COMMAND_GROUPS[name])
    unknown = next((key for key in values if key not in known), None)
    if unknown is not None:
        found = f"{path} has no known setting {printable(unknown)} in [{name}]"
        raise BadRequest(found, nearest(unknown, known))
    try:
        return COMMAND_GROUPS[name](**values)
    except BadRequest as e:
        raise BadRequest(f"{path} has a value in [{name}] that cannot be used", *e.args[1:]) from e


def _read_toml(path: Path) -> dict:
    with explained(path, "read as TOML"):  # a decoding error is a ValueError
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
        if len(data) > MAX_CONFIG_BYTES:
            hint = f"the limit of a configuration file is {MAX_CONFIG_BYTES:,} bytes"
            raise BadRequest(f"{path} is too large", hint)
        try:
            return tomllib.loads(data.decode("utf-8-sig"))
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


def run_command(command: Command) -> int:
    if command.output.doctor:
        from mla_jax.ui.doctor import doctor

        print(*doctor(), sep="\n")
        return DONE
    refuse_contradictions(command)
    if command.options.processes.several:
        text_alone_on_stdout()
    if command.options.processes.follows:
        return run_follower(command)
    needs_prompt = not (command.output.dry_run or command.prompt.chat or command.prompt.batch_file)
    return answer_with_model(command, read_prompt(command) if needs_prompt else None)


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
    """Sends the output of libraries to stderr, such as that of the CPU collectives."""
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


def open_closed_streams() -> None:
    """Opens stdin, stdout and stderr that the shell has closed, as `>&-` does: Python has None for them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 it stays open


def script() -> None:
    """The entry point: exit code, and a quiet end when the reader of a pipe goes away."""
    open_closed_streams()
    try:
        sys.exit(main())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    script()
