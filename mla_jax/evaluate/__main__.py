"""python -m mla_jax.evaluate COMMAND: perplexity of a text, or rates as llama-bench prints them."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from mla_jax.base.errors import BadRequest, printable
from mla_jax.base.names import nearest
from mla_jax.base.options import GROUPS as OPENING
from mla_jax.base.options import Options
from mla_jax.evaluate.options import BenchOptions, PerplexityOptions
from mla_jax.ui.command_line import DONE, exit_code_of, exit_with, parse_command
from mla_jax.ui.download import DownloadOptions, fetched
from mla_jax.ui.help import About

PROGRAM = "python -m mla_jax.evaluate"
WINDOW = 2048  # tokens, where the context holds as many


@dataclass(frozen=True)
class PerplexityCommand:
    """Perplexity of a text, and bits per byte."""

    prompt: PerplexityOptions = field(default_factory=PerplexityOptions)
    options: Options = field(default_factory=Options)
    download: DownloadOptions = field(default_factory=DownloadOptions)


@dataclass(frozen=True)
class BenchCommand:
    """Tokens a second of prompts and of generation."""

    prompt: BenchOptions = field(default_factory=BenchOptions)
    options: Options = field(default_factory=Options)
    download: DownloadOptions = field(default_factory=DownloadOptions)


class Evaluation(NamedTuple):
    """A command: its dataclass, its help and its function."""

    kind: Any
    about: About
    run: Callable[[Any], int]


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 usage, 3 bad file, 4 does not fit, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in EVALUATIONS:
        command = EVALUATIONS[name]
        return exit_code_of(
            lambda: command.run(parse_command(command.kind, command.about, rest)), rest, command.about
        )
    return exit_code_of(lambda: _refuse(name), arguments or [name], ABOUT_EVALUATE)


def _refuse(name: str) -> int:
    raise BadRequest(f"there is no command {printable(name)}", nearest(name, EVALUATIONS))


def _perplexity(command: PerplexityCommand) -> int:
    asked = command.prompt
    if asked.file is None:
        raise BadRequest("no text is given", "name a file in UTF-8: --file FILE")
    from mla_jax.engine.llm import LLM  # only now: JAX takes a second to import
    from mla_jax.evaluate.perplexity import perplexity, read_text

    text = read_text(Path(asked.file))
    with LLM(options=fetched(command.options, command.download)) as llm:
        window = asked.window or min(WINDOW, llm.context)
        found = perplexity(llm, text, window, asked.overlap or max(1, window // 2))
    print(
        f"perplexity {found.perplexity:.4f}, {found.bits_per_byte:.4f} bits per byte, {found.tokens:,} tokens"
    )
    return DONE


def _bench(command: BenchCommand) -> int:
    from mla_jax.engine.llm import LLM
    from mla_jax.evaluate.bench import bench, loads

    asked = command.prompt
    wanted = loads(asked.prompts, asked.outputs, asked.both, asked.rows)
    with LLM(options=fetched(command.options, command.download)) as llm:
        described = f"{llm.name} ({llm.config.model_type}) on {llm.model.dispatch.device.name}"
        lines = _as_json if asked.form == "jsonl" else _as_table
        for line in lines(described, bench(llm, wanted, asked.repeats)):
            print(line, flush=True)
    return DONE


def _as_table(model: str, rates: Iterable[Any]) -> Iterator[str]:
    yield "| model | test | tokens/s |\n|---|---|--:|"
    for rate in rates:
        yield f"| {model} | {rate.load.name} | {rate.mean:.2f} ± {rate.deviation:.2f} |"


def _as_json(model: str, rates: Iterable[Any]) -> Iterator[str]:
    for rate in rates:
        load = {"rows": rate.load.rows, "prompt": rate.load.prompt, "output": rate.load.output}
        yield json.dumps(
            {"model": model, "test": rate.load.name, **load, "mean": rate.mean, "deviation": rate.deviation}
        )


def evaluate_script() -> None:
    """The entry point."""
    exit_with(main)


EVALUATE_EXAMPLES = f"""\
examples:
  {PROGRAM} perplexity --file README.md
  {PROGRAM} bench --model ./model --prompts 512 4096 --outputs 128 --rows 1 64
  {PROGRAM} bench --help all"""
EVALUATIONS = {
    "perplexity": Evaluation(
        PerplexityCommand,
        About(
            f"{PROGRAM} perplexity",
            f"{PROGRAM} perplexity --file FILE [--flag VALUE ...]",
            {"prompt": PerplexityOptions, **OPENING, "download": DownloadOptions},
            EVALUATE_EXAMPLES,
        ),
        _perplexity,
    ),
    "bench": Evaluation(
        BenchCommand,
        About(
            f"{PROGRAM} bench",
            f"{PROGRAM} bench [--flag VALUE ...]",
            {"prompt": BenchOptions, **OPENING, "download": DownloadOptions},
            EVALUATE_EXAMPLES,
        ),
        _bench,
    ),
}
ABOUT_EVALUATE = About(
    PROGRAM, f"{PROGRAM} {'|'.join(EVALUATIONS)} [--flag VALUE ...]", {}, EVALUATE_EXAMPLES
)

if __name__ == "__main__":
    evaluate_script()
