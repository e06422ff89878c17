"""python -m mla_jax.generate: parses, then runs. Nothing heavy is imported before the command line is known to be sound."""

import dataclasses
import os
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from mla_jax.base.errors import BadRequest, MlaJaxError, printable
from mla_jax.base.options import (
    AttentionOptions,
    ExpertOptions,
    MemoryOptions,
    ModelOptions,
    OutputOptions,
    PromptOptions,
    SamplingParams,
)
from mla_jax.ui.help import help_text, nearest

if TYPE_CHECKING:
    from mla_jax.engine.llm import LLM
    from mla_jax.ui.console import Console

USAGE = "python -m mla_jax.generate [PROMPT] [--flag VALUE ...]      (-p is short for --prompt, -h for --help)"
MAX_PROMPT_BYTES = 64 << 20
ERROR, INTERRUPTED = 1, 130
Flat = tyro.conf.OmitArgPrefixes


@dataclass(frozen=True)
class Command:
    """Continue a prompt with a DeepSeek-style model."""

    argument: tyro.conf.Positional[str] = ""
    prompt: Flat[PromptOptions] = field(default_factory=PromptOptions)
    model: Flat[ModelOptions] = field(default_factory=ModelOptions)
    sampling: Flat[SamplingParams] = field(default_factory=SamplingParams)
    attention: Flat[AttentionOptions] = field(default_factory=AttentionOptions)
    experts: Flat[ExpertOptions] = field(default_factory=ExpertOptions)
    memory: Flat[MemoryOptions] = field(default_factory=MemoryOptions)
    output: Flat[OutputOptions] = field(default_factory=OutputOptions)

    def llm_options(self) -> dict:
        """The keyword arguments of LLM."""
        options = dataclasses.asdict(self.model) | dataclasses.asdict(self.attention) | dataclasses.asdict(self.experts)
        return options | {"memory_fraction": self.memory.memory_fraction, "batch": self.memory.batch}


GROUPS: dict[str, type] = {
    "prompt": PromptOptions,
    "model": ModelOptions,
    "sampling": SamplingParams,
    "attention": AttentionOptions,
    "experts": ExpertOptions,
    "memory": MemoryOptions,
    "output": OutputOptions,
}


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 logits not finite, 2 usage or bad request, 3 bad file, 4 does not fit, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(help_text(USAGE, GROUPS))
        return 0
    try:
        return run(parse(arguments))
    except MlaJaxError as error:
        if "--debug" in arguments:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def parse(arguments: list[str]) -> Command:
    """The command line over the TOML file it names, over the defaults."""
    arguments = ["--prompt" if a == "-p" else a for a in arguments]
    defaults = Command()
    if "--config" in arguments[:-1]:
        defaults = from_toml(Path(arguments[arguments.index("--config") + 1]))
    return tyro.cli(
        Command, args=arguments, default=defaults, prog="python -m mla_jax.generate", config=(tyro.conf.FlagCreatePairsOff,)
    )


def from_toml(path: Path) -> Command:
    """Settings by group, `[sampling]` and so on; raises BadRequest for what is not known."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
        raise BadRequest(f"{path} cannot be read as TOML", printable(str(e), 200)) from e
    groups = {}
    for name, values in content.items():
        if name not in GROUPS or not isinstance(values, dict):
            raise BadRequest(f"{path} has no known group {printable(name)}", nearest(name, GROUPS))
        known = {f.name for f in dataclasses.fields(GROUPS[name])}
        if strange := [key for key in values if key not in known]:
            raise BadRequest(
                f"{path} has no known setting {printable(strange[0])} in [{name}]", nearest(strange[0], sorted(known))
            )
        groups[name] = GROUPS[name](**values)
    return Command(**groups)


def run(command: Command) -> int:
    if command.output.doctor:
        from mla_jax.ui.doctor import doctor

        print(*doctor(), sep="\n")
        return 0
    text = None if command.memory.dry_run or command.prompt.chat else read_prompt(command)
    from mla_jax.ui.console import Console  # only now: JAX takes a second to import

    console = Console(command.output.json, command.output.quiet)
    if command.memory.dry_run:
        return dry_run(command, console)
    from mla_jax.engine.llm import LLM

    llm = LLM(**command.llm_options(), progress=console.loading)
    console.note(*(f"note: {note}" for note in llm.notes))
    if text is None:
        return chat(llm, command.sampling, console)
    return answer(llm, text, command.sampling, console)[1]


def read_prompt(command: Command) -> str:
    """The prompt from the argument, `--prompt`, a file or stdin; exactly one of them."""
    sources = [s for s in (command.argument, command.prompt.prompt, command.prompt.file) if s]
    if len(sources) != 1:
        found = "no prompt given" if not sources else "several prompts given"
        raise BadRequest(found, 'give one: as an argument, with --file, or "-" to read stdin; or talk with --chat')
    if command.prompt.file:
        try:
            with open(command.prompt.file, "rb") as file:
                data = file.read(MAX_PROMPT_BYTES + 1)
        except OSError as e:
            raise BadRequest(f"{command.prompt.file} cannot be read", e.strerror or str(e)) from e
    elif sources == ["-"]:
        data = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    else:
        return sources[0]
    if len(data) > MAX_PROMPT_BYTES:
        raise BadRequest("the prompt is too large", f"found more than {MAX_PROMPT_BYTES:,} bytes, which is the limit")
    if not data:
        raise BadRequest("no prompt given", "the file or stdin is empty")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadRequest("the prompt is not UTF-8", f"byte {e.start:,} is {data[e.start]:#x}") from e


def answer(llm: "LLM", prompt: str | list[int], sampling: SamplingParams, console: "Console") -> tuple[str, int]:
    """Streams one answer; Ctrl-C ends it cleanly, with its figures. Returns the text and the exit code."""
    pieces, reason, code = [], "interrupted", 0
    try:
        for chunk in llm.stream(prompt, sampling):
            console.chunk(chunk, llm.tokenizer is not None)
            pieces.append(chunk.text)
            reason = chunk.finish_reason or reason
    except KeyboardInterrupt:
        if llm.last_stats is None:
            raise
        code = INTERRUPTED
    assert llm.last_stats is not None
    console.done(llm.last_stats, reason)
    if reason == "error":
        print("error: the model's logits were not finite, the text ends before them", file=sys.stderr)
        code = ERROR
    return "".join(pieces), code


def chat(llm: "LLM", sampling: SamplingParams, console: "Console") -> int:
    """Turn by turn until the end of input; Ctrl-C ends an answer, not the conversation."""
    messages: list[dict[str, str]] = []
    llm.encode_chat([{"role": "user", "content": "?"}])  # fails at once where there is no template
    console.note("end with Ctrl-D")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        if line.strip():
            messages.append({"role": "user", "content": line})
            text, _ = answer(llm, llm.encode_chat(messages), sampling, console)
            messages.append({"role": "assistant", "content": text})


def dry_run(command: Command, console: "Console") -> int:
    """What the model would need and how it would run; exits with 4 if it does not fit."""
    from mla_jax.engine.explain import explain
    from mla_jax.engine.llm import check_context, open_checkpoint
    from mla_jax.weights.plan import plan

    context = command.model.context
    checkpoint, placement = open_checkpoint(
        command.model.model,
        attention=command.attention,
        dtype=command.model.dtype,
        context=context,
        experts=command.experts,
        memory_fraction=command.memory.memory_fraction,
        batch=command.memory.batch,
    )
    needed = plan(checkpoint, check_context(context, checkpoint.config.max_position_embeddings), command.memory.batch, placement)
    if command.output.json:
        console.event("plan", **dataclasses.asdict(needed), fits=needed.fits)
    else:
        model, formats = checkpoint.model(placement), checkpoint.formats(placement)
        console.say([*explain(model, formats, needed.context, placement), "", *needed.lines()])
    return 0 if needed.fits else 4


def script() -> None:
    """The entry point: exit code, and a quiet end when the reader of a pipe goes away."""
    try:
        sys.exit(main())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


if __name__ == "__main__":
    script()
