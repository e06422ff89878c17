"""The help of the command line, made of the option dataclasses: a line per flag, in groups, with examples.

`--help` has the flags of the groups that most users need, and names the other groups; `--help mesh experts` has the flags of
these, `--help all` those of all."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mla_jax.base.errors import BadRequest, printable
from mla_jax.base.names import nearest

FIRST_GROUPS = ("prompt", "serve", "model", "sampling", "memory", "output")  # without a group, alone
ALL = "all"
# How a flag's value is shown, by the type of its field
VALUES = {"Mapping": " ID X ...", "bool": "", "int": " N", "float": " X", "str": " TEXT"}


class About(NamedTuple):
    """A command: how it is called, its groups of settings (dataclasses, by name), and examples for its help."""

    name: str
    usage: str
    groups: Mapping[str, Any]
    examples: str


def asked_groups(arguments: Sequence[str], groups: Mapping[str, type]) -> list[str]:
    """The groups that are named after `--help`; raises BadRequest for other names."""
    after = list(arguments)[next(i for i, word in enumerate(arguments) if word in ("-h", "--help")) + 1 :]
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), after))
    for name in names:
        if name not in (*groups, ALL):
            raise BadRequest(
                f"--help {printable(name)}: there is no such group", nearest(name, [*groups, ALL])
            )
    return list(groups) if ALL in names else names


def help_text(about: About, asked: Sequence[str] = ()) -> str:
    """How it is called, then the flags of the groups that are `asked` for.

    Without any: of FIRST_GROUPS, then how to ask for the others, and examples."""
    groups = about.groups
    ordered = [name for name in dict.fromkeys([*FIRST_GROUPS, *groups]) if name in groups]
    flags = "\n".join(_group(name, groups[name]) for name in ordered if name in (asked or FIRST_GROUPS))
    if asked:
        return f"usage: {about.usage}\n{flags}"
    more = "\n".join(
        f"--help {name:<12}{_title(options)}" for name, options in groups.items() if name not in FIRST_GROUPS
    )
    return f"usage: {about.usage}\n{flags}\n{more}\n{about.examples}"


def _group(name: str, options: type) -> str:
    """A title and a line per flag. What can be any object has none."""
    docs = _field_docs(options)
    lines = [
        f"  {_flag(field.name, str(field.type)):<28}{docs[field.name]}"
        for field in dataclasses.fields(options)
        if field.type is not Any
    ]
    return "\n".join([f"{name}: {_title(options)}", *lines])


def _title(options: type) -> str:
    return (inspect.getdoc(options) or "").splitlines()[0]


def _field_docs(options: type) -> dict[str, str]:
    """The first line of the text below each field in the source of the class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            docs[ast.unparse(field.target)] = str(text.value.value).partition("\n")[0]
    return docs


def _flag(name: str, kind: str) -> str:
    """`--max-tokens N`, or `--stop TEXT ...` for several values."""
    value = next(shown for word, shown in VALUES.items() if word in kind)
    several = " ..." if "tuple" in kind else ""
    return f"--{name.replace('_', '-')}{value}{several}"
