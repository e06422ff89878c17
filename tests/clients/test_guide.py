"""The guide's lines for other clients run as they are written, but for the server's address."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[2] / "docs" / "serving.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)


def block_with(name: str) -> str:
    (found,) = [block for block in BLOCKS if f"import {name}" in block]
    return found


@pytest.mark.parametrize("name", ["ChatOpenAI", "litellm"])
def test_the_guides_lines_run(demo, name, capsys):
    lines = block_with(name)
    assert "http://127.0.0.1:8000" in lines
    exec(lines.replace("http://127.0.0.1:8000", demo.url), {})
    said = capsys.readouterr().out
    assert "return" in said or "self" in said, said
    if name == "ChatOpenAI":
        assert re.search(r"weather \{'city': '(Oslo|Bergen)'\}", said)
