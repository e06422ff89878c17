"""Docstrings state things: none begins with "What", and few clauses with "what" stand where a noun would do."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("mla_jax", "pallas_kernels", "cpu_experts", "convert", "benchmarks", "tools", "tests")
CLAUSE = re.compile(r"\bwhat (is|are|was|it|they|has|have|a|each|comes?|there)\b", re.IGNORECASE)
MOST = 10  # clauses in 10,000 words


def docstrings() -> list[tuple[Path, str]]:
    files = (file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py")))
    return [(file, text) for file in files for text in re.findall(r'"""([\s\S]*?)"""', file.read_text("utf-8"))]


def test_no_docstring_begins_with_what():
    found = [f"{file.relative_to(ROOT)}: {text[:60]}" for file, text in docstrings() if text.lstrip().startswith("What")]
    assert not found, "state the thing by a noun or a verb:\n" + "\n".join(found)


def test_docstrings_name_things_by_nouns_instead_of_clauses():
    texts = docstrings()
    words = sum(len(text.split()) for _, text in texts)
    found = [f"{file.relative_to(ROOT)}: {clause[0]}" for file, text in texts for clause in CLAUSE.finditer(text)]
    assert words > 10_000, "no docstrings were found"
    assert len(found) * 10_000 <= MOST * words, "replace some of these clauses by nouns:\n" + "\n".join(found)
