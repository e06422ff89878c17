"""python -m mla_jax.serve: parses, then serves. Nothing heavy is imported before the command line is known to be sound."""

import dataclasses
import importlib.util
import sys
from dataclasses import dataclass, field
from typing import Any

from mla_jax.base.errors import Unsupported
from mla_jax.base.options import GROUPS as OPENING
from mla_jax.base.options import Options
from mla_jax.serve.options import ServeOptions
from mla_jax.ui.command_line import exit_code_of, exit_with, parse_command
from mla_jax.ui.download import DownloadOptions, fetched
from mla_jax.ui.help import About

SERVE_GROUPS: dict[str, Any] = {"serve": ServeOptions, **OPENING, "download": DownloadOptions}
ABOUT_SERVE = About(
    "python -m mla_jax.serve",
    "python -m mla_jax.serve [--flag VALUE ...]      (-h: --help, --help all; --version)",
    SERVE_GROUPS,
    """\
examples:
  python -m mla_jax.serve
  python -m mla_jax.serve --model moonshotai/Moonlight-16B-A3B-Instruct --port 8001
  python -m mla_jax.serve --model ./model --host 0.0.0.0 --api-key-file keys.txt""",
)
REQUIRED = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class ServeCommand:
    """Serve a DeepSeek-style model to OpenAI's clients."""

    serve: ServeOptions = field(default_factory=ServeOptions)
    options: Options = field(default_factory=Options)
    download: DownloadOptions = field(default_factory=DownloadOptions)


def main(arguments: list[str] | None = None) -> int:
    """Exit codes: 0 ended by a signal, 2 usage, 3 bad file or a missing package, 4 does not fit, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return exit_code_of(
        lambda: _run(parse_command(ServeCommand, ABOUT_SERVE, arguments)), arguments, ABOUT_SERVE
    )


def _run(command: ServeCommand) -> int:
    missing = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
    if missing:
        hint = 'install the extra "serve", as in: pip install -e ".[serve]"'
        raise Unsupported(f"the server needs the package {missing[0]}, which is not installed", hint)
    options = fetched(command.options, command.download)
    from mla_jax.serve.server import serve

    return serve(_named(command), options)


def _named(command: ServeCommand) -> ServeOptions:
    """The server's settings: requests name a model of the Hub without its revision."""
    names, model = command.serve.model_name, command.options.model.model
    if names or command.download.revision is None:
        return command.serve
    return dataclasses.replace(command.serve, model_name=(str(model),))


def serve_script() -> None:
    """The entry point."""
    exit_with(main)


if __name__ == "__main__":
    serve_script()
