"""A public name means one thing: few top-level names of mla_jax are defined in more than one module."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "mla_jax"
MOST = 10  # names with several meanings, such as `main`


def defined(node: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement defines; imports define none."""
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    for target in targets:
        yield from (one.id for one in ast.walk(target) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))


def shared_names() -> dict[str, set[str]]:
    """Public names with more than one defining module, and the modules."""
    places: dict[str, set[str]] = defaultdict(set)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(file.read_text("utf-8")).body:
            for name in defined(node):
                places[name].add(str(file.relative_to(PACKAGE)))
    return {name: files for name, files in places.items() if len(files) > 1 and not name.startswith("_")}


def test_few_public_names_are_defined_in_several_modules():
    shared = shared_names()
    lines = [f"{name}: {', '.join(sorted(files))}" for name, files in sorted(shared.items())]
    assert len(shared) <= MOST, "take the field's word for the second of these:\n" + "\n".join(lines)
