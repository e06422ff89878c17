"""The help of the command line, made of the option dataclasses themselves: a line a flag, in groups, with examples."""

import ast
import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Iterable, Mapping

EXAMPLES = """\
examples:
  python -m mla_jax.generate "def read_lines(path):"
  python -m mla_jax.generate --model moonshotai/Moonlight-16B-A3B-Instruct --chat
  git diff | python -m mla_jax.generate - --model ./model --max-tokens 200 --json"""


def help_text(usage: str, groups: Mapping[str, type]) -> str:
    """`usage`, then each group's flags with what they do."""
    parts = [f"usage: {usage}"]
    for name, options in groups.items():
        docs, kinds = _field_docs(options), {f.name: str(f.type) for f in dataclasses.fields(options)}
        title = f"{name}: {(inspect.getdoc(options) or '').splitlines()[0]}"
        parts.append("\n".join([title, *(f"  {_flag(field, kinds[field]):<28}{doc}" for field, doc in docs.items())]))
    return "\n\n".join([*parts, EXAMPLES])


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint at the known word that `word` may have meant."""
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {found[0]}?" if found else "known: " + ", ".join(known)


def _field_docs(options: type) -> dict[str, str]:
    """What the text under each field says, in order."""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(options))).body
    assert isinstance(body, ast.ClassDef)
    docs = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            docs[ast.unparse(field.target)] = str(text.value.value)
    return docs


def _flag(name: str, kind: str) -> str:
    value = "" if "bool" in kind else " N" if "int" in kind else " X" if "float" in kind else " TEXT"
    return f"--{name.replace('_', '-')}{value}{' ...' if 'tuple' in kind else ''}"
