"""The Python of the docs' pages runs as it is written: the blocks of a page one after the other, in one namespace."""

import re
from pathlib import Path
from typing import Any

import pytest
from own_names import own_names_go
from weights import parameters

from mla_jax import LLM, AsyncLLM, Grammar  # noqa: F401  (the pages import these: what they compute decides)
from mla_jax.weights.load import load

DOCS = Path(__file__).parents[1] / "docs"
BLOCKS = re.compile(r"```python\n(.*?)```", re.DOTALL)
QUICK = ("kernels", "your_own_experts")
GENERATE = (
    "looking_inside",
    "many_callers",
    "speculative_decoding",
    "structured_answers",
    "your_own_form",
    "your_own_logits",
    "your_own_policy",
)
YOUR_OWN = [page.stem for page in sorted(DOCS.glob("your_own_*.md"))]


def blocks_of(page: str) -> list[str]:
    return BLOCKS.findall((DOCS / f"{page}.md").read_text("utf-8"))


def run(page: str) -> dict[str, Any]:
    """The names that the Python of a page leaves."""
    blocks, names = blocks_of(page), dict[str, Any](__name__="__main__")
    assert blocks
    with own_names_go():
        for number, block in enumerate(blocks, 1):
            exec(compile(block, f"{page}.md, block {number}", "exec"), names)
    return names


@pytest.mark.parametrize("page", [*QUICK, *(pytest.param(page, marks=pytest.mark.deep("docs")) for page in GENERATE)])
def test_the_python_of_a_page_runs(page):
    run(page)


@pytest.mark.deep("docs")
def test_a_model_is_trained_serves_its_new_weights_and_is_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run("finetuning")
    loss, answer = capsys.readouterr().out.split("\n", 1)
    assert float(loss) < 0.5
    assert "return 'good morning, ' + name" in answer
    parameters.assert_equal(load(tmp_path / "greeting"), names["llm"].model)


@pytest.mark.parametrize("page", YOUR_OWN)
def test_a_page_on_your_own_part_is_short_runs_here_and_is_in_the_index(page):
    assert len((DOCS / f"{page}.md").read_text("utf-8").splitlines()) <= 60
    assert page in QUICK + GENERATE
    assert f"{page}.md" in (DOCS.parent / "mkdocs.yml").read_text("utf-8")
