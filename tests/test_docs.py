"""The code of pages that are one script: it runs as it stands there, on simulated devices where it asks for some."""

import re
from pathlib import Path
from typing import Any

import pytest
from weights import parameters

from mla_jax.weights.load import load

DOCS = Path(__file__).parents[1] / "docs"
LINES = 60  # of such a page, at most


def test_a_model_is_trained_serves_its_new_weights_and_is_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = script("finetuning.md")
    loss, answer = capsys.readouterr().out.split("\n", 1)
    assert float(loss) < 0.5
    assert "return 'good morning, ' + name" in answer
    parameters.assert_equal(load(tmp_path / "greeting"), names["llm"].model)


@pytest.mark.parametrize("page", ["looking_inside.md", "your_own_logits.md"])
def test_the_code_of_a_page_runs(page):
    script(page)


def script(page: str) -> dict[str, Any]:
    """The names that the Python of a page, which is short, leaves."""
    text = (DOCS / page).read_text("utf-8")
    assert len(text.splitlines()) <= LINES
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), names)
    return names
