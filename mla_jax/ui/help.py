"""The help of the command line, made of the option dataclasses: a line per flag, in groups, with examples."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Mapping

EXAMPLES = """\
examples:
  python -m mla_jax.generate "def read_lines(path):"
  python -m mla_jax.generate --model moonshotai/Moonlight-16B-A3B-Instruct --chat
  python -m mla_jax.generate --model ./model --batch-file prompts.jsonl --out answers.jsonl"""
VALUES = {"Mapping": " ID X ...", "bool": "", "int": " N", "float": " X", "str": " TEXT"}  # of a flag, by its field's type


def help_text(usage: str, groups: Mapping[str, type]) -> str:
    """`usage`, then each group's flags with what they do."""
    flags = "\n".join(_group(name, options) for name, options in groups.items())
    return f"usage: {usage}\n\n{flags}\n\n{EXAMPLES}"


def _group(name: str, options: type) -> str:
    """A title and a line per flag."""
    docs = _field_docs(options)
    title = (inspect.getdoc(options) or "").splitlines()[0]
    lines = [f"  {_flag(field.name, str(field.type)):<28}{docs[field.name]}" for field in dataclasses.fields(options)]
    return "\n".join([f"{name}: {title}", *lines])


def _field_docs(options: type) -> dict[str, str]:
    """The text below each field in the source of the class."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[ast.unparse(field.target)] = str(text.value.value)
    return docs


def _flag(name: str, kind: str) -> str:
    """`--max-tokens N`, or `--stop TEXT ...` for several values."""
    value = next(shown for word, shown in VALUES.items() if word in kind)
    several = " ..." if "tuple" in kind else ""
    return f"--{name.replace('_', '-')}{value}{several}"
