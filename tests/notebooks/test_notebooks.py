"""The notebooks run as they are, and the stored outputs of their last run may be published."""

import os
import re
import shutil
from itertools import groupby
from pathlib import Path

import compiling
import matplotlib.font_manager  # noqa: F401  (lists the fonts once, or a notebook's first figure says on stderr that it does)
import nbformat
import pytest
from nbclient import NotebookClient

from cpu_experts.build import find_cmake

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_BYTES = 600_000


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def outputs(path: Path) -> list:
    return [output for cell in read(path).cells if cell.cell_type == "code" for output in cell.outputs]


def kinds(notebook: nbformat.NotebookNode) -> list[list]:
    """The kinds and streams of each cell's outputs. A stream may come in pieces, which count once."""
    code = (cell for cell in notebook.cells if cell.cell_type == "code")
    return [[kind for kind, _ in groupby((output.output_type, output.get("name")) for output in cell.outputs)] for cell in code]


def said(output) -> str:
    """The text of an output, whatever its kind; pictures left out."""
    data = {kind: value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")}
    return "\n".join([output.get("text", ""), *map(str, data.values())])


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.deep("notebooks")
@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom_in_a_fresh_kernel(path, tmp_path):
    notebook = read(path)
    if "cpu_experts.build" in path.read_text() and not (find_cmake() and (shutil.which("c++") or os.environ.get("CXX"))):
        pytest.skip("no cmake or no C++ compiler to build cpu_experts with")
    environment = {"JAX_PLATFORMS": "cpu", "TMPDIR": str(tmp_path)}
    # Jupyter starts a notebook in its folder, where `figures` lies; here it starts in a folder that it may fill
    environment |= {"PYTHONPATH": f"{ROOT / 'notebooks'}{os.pathsep}{ROOT}", "IPYTHONDIR": str(tmp_path / "ipython")}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3"}  # XLA says on stderr what took it seconds, as on busy cores anything may
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=900, startup_timeout=300, kernel_name="python3", resources=where)
    client.execute(env=compiling.as_users() | environment)
    assert kinds(notebook) == kinds(read(path))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_holds_no_error_no_warning_and_no_path(path):
    assert outputs(path), "stored without its outputs: execute it before committing"
    for output in outputs(path):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text
        assert not re.search(r"(?<![\w.:/*])/\w[\w.-]*/|\b[A-Za-z]:\\|site-packages|Traceback|Warning", said(output)), said(
            output
        )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_whole_small_and_for_any_python_3(path):
    notebook = read(path)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert notebook.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < MOST_BYTES
