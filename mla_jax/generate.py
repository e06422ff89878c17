"""python -m mla_jax.generate: continues one prompt. Text goes to stdout, everything else to stderr."""

import dataclasses
import os
import sys
from dataclasses import dataclass
from typing import Annotated

import tyro

from mla_jax.base.errors import BadRequest, MlaJaxError
from mla_jax.base.options import LLMOptions, SamplingParams


@dataclass(frozen=True)
class Command:
    """Continue a prompt with a DeepSeek-style model."""

    prompt: Annotated[str, tyro.conf.Positional] = ""
    """What to continue; "-" reads stdin."""
    llm: tyro.conf.OmitArgPrefixes[LLMOptions] = dataclasses.field(default_factory=LLMOptions)
    sampling: tyro.conf.OmitArgPrefixes[SamplingParams] = dataclasses.field(default_factory=SamplingParams)
    explain: bool = False
    """Say what would run and why, then stop."""
    quiet: bool = False
    """No notes and no statistics."""
    debug: bool = False
    """Show the traceback of an error."""


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 logits not finite, 2 usage or bad request, 3 bad file, 4 does not fit, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        return run(tyro.cli(Command, prog="python -m mla_jax.generate", args=arguments))
    except MlaJaxError as error:
        if "--debug" in arguments:
            raise
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run(command: Command) -> int:
    prompt = sys.stdin.buffer.read().decode("utf-8", "surrogateescape") if command.prompt == "-" else command.prompt
    if not prompt and not command.explain:
        raise BadRequest("no prompt given", 'give one as an argument, or "-" to read stdin')
    from mla_jax.engine.llm import LLM  # after the command line is known to be sound: JAX takes a second to import

    llm = LLM(**dataclasses.asdict(command.llm))
    if command.explain:
        print(llm.explain())
        return 0
    if not command.quiet:
        print("".join(f"note: {note}\n" for note in llm.notes), end="", file=sys.stderr)
    output = llm.generate(prompt, command.sampling)[0]
    print(output.token_ids if output.text is None else output.text, flush=True)
    if not command.quiet:
        s = output.stats
        print(
            f"\n stop: {output.finish_reason} · {s.prompt_tokens}+{s.generated_tokens} tokens · "
            f"first {s.first_token_seconds:.2f} s · {s.tokens_per_second:.1f} tok/s · "
            f"compile {s.compile_seconds:.1f} s · seed {s.seed}",
            file=sys.stderr,
        )
    if output.finish_reason == "error":
        print("error: the model's logits were not finite, the text ends before them", file=sys.stderr)
    return 0 if output.finish_reason != "error" else 1


if __name__ == "__main__":
    try:
        code = main()
    except BrokenPipeError:  # the reader of a pipe went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
