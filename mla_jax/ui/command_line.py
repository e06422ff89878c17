"""A command line over the TOML file that it names, over the defaults; each group of settings is a dataclass. No JAX here."""

import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tyro

from mla_jax import __version__
from mla_jax.base.errors import BadRequest, MlaJaxError, printable
from mla_jax.base.files import explained
from mla_jax.base.names import ABSENT, MEANT, nearest
from mla_jax.base.options import GROUPS as OPENING
from mla_jax.base.options import Options, names
from mla_jax.ui.help import About, asked_groups, help_text

MAX_CONFIG_BYTES = 1 << 20
DONE, INTERRUPTED = 0, 130
C = TypeVar("C")


def exit_code_of(run: Callable[[], int], arguments: Sequence[str], about: About) -> int:
    """The exit code of `run`, or of an error that it raises, which is printed; `--help` and `--version` run nothing."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of memory that its programs do not take
    try:
        if "--version" in arguments:
            print(f"mla-jax {__version__}")
            return DONE
        if {"-h", "--help"} & set(arguments):
            print(help_text(about, asked_groups(arguments, about.groups)))
            return DONE
        return run()
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


def exit_with(main: Callable[[], int]) -> None:
    """Ends the process with the exit code of `main`, quietly where the reader of a pipe has gone away."""
    open_closed_streams()
    try:
        sys.exit(main())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def parse_command(kind: type[C], about: About, arguments: Sequence[str]) -> C:
    """A `kind`: a dataclass with a field for each group of settings that is not of `Options`, and `options`.

    Raises BadRequest for flags of other engines and for a bad configuration file; exits for other bad flags."""
    refuse_words_of_others(arguments)
    config = _config_path(arguments)
    defaults = kind() if config is None else from_toml(config, kind, about.groups)
    return tyro.cli(
        kind,
        args=list(arguments),
        default=defaults,
        prog=about.name,
        config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes),
    )


def refuse_words_of_others(arguments: Sequence[str]) -> None:
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


def _config_path(arguments: Sequence[str]) -> Path | None:
    """The value of `--config`, which must be read before the other flags are parsed."""
    for flag, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = flag.partition("=")
        if name == "--config" and (equals or following):
            return Path(value if equals else following)
    return None


def from_toml(path: Path, kind: Callable[..., C], groups: Mapping[str, Any]) -> C:
    """Settings by group, `[sampling]` and so on; raises BadRequest for an unknown name or a wrong type."""
    given = {name: _group(path, name, values, groups) for name, values in _read_toml(path).items()}
    options = Options(**{name: given.pop(name) for name in OPENING if name in given})
    return kind(options=options, **given)


def _group(path: Path, name: str, values: Any, groups: Mapping[str, Any]) -> Any:
    """The settings of a group."""
    if name not in groups or not isinstance(values, dict):
        raise BadRequest(f"{path} has no known group {printable(name)}", nearest(name, groups))
    known = names(groups[name])
    unknown = next((key for key in values if key not in known), None)
    if unknown is not None:
        found = f"{path} has no known setting {printable(unknown)} in [{name}]"
        raise BadRequest(found, nearest(unknown, known))
    try:
        return groups[name](**values)
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


def open_closed_streams() -> None:
    """Opens stdin, stdout and stderr that the shell has closed, as `>&-` does: Python has None for them."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 it stays open
