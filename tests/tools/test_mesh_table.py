"""The table of predictions in the docs is the one that the tool prints, and says of each mesh what fits."""

import mesh_table
import pytest
from mesh_table import END, HEADER, PAGE, START

from mla_jax.base.config import Config
from mla_jax.base.link_rates import PLANNED

CASES = [(model, PLANNED[kind].figures.name) for model in mesh_table.MODELS for kind in mesh_table.KINDS]


@pytest.fixture(scope="module")
def lines():
    found = [dict(zip(HEADER, cells, strict=True)) for cells in mesh_table.rows()]
    return {(line["model"], line["8 of"]): line for line in found}


def test_a_line_of_the_table_in_the_docs_is_what_the_tool_prints():
    cells = mesh_table.cells(Config.preset("v2_lite"), PLANNED["h200"])
    assert f"| DeepSeek-V2-Lite (bf16) | NVIDIA H200 | {' | '.join(cells)} |\n" in PAGE.read_text(), (
        "python tools/mesh_table.py --write"
    )


@pytest.mark.deep
def test_the_table_in_the_docs_is_what_the_tool_prints():
    page = PAGE.read_text()
    assert page == mesh_table.written(page), "python tools/mesh_table.py --write"
    assert "redicted" in page[: page.index(START)]
    assert page.index(START) < page.index(END)


@pytest.mark.deep
def test_each_model_has_a_line_for_each_kind_of_device(lines):
    assert [*lines] == CASES
    assert len(mesh_table.rows()) == len(CASES)


@pytest.mark.deep
@pytest.mark.parametrize("case", CASES, ids=" on ".join)
def test_a_line_has_a_mesh_of_eight_and_figures_or_says_what_does_not_fit(lines, case):
    line = lines[case]
    axes = dict(part.split("=") for part in line["mesh"].split(","))
    assert int(axes.get("data", 1)) * int(axes.get("tensor", 1)) == 8
    assert all(line[name] == "" for name in ("decode", "prompts")) == line["tokens of cache"].startswith("does not fit")


@pytest.mark.deep
def test_smaller_devices_hold_the_small_model_alone(lines):
    fits = {case for case, line in lines.items() if line["decode"]}
    assert ("DeepSeek-V3, R1 (FP8)", "NVIDIA H200") in fits
    assert ("DeepSeek-V3, R1 (FP8)", "NVIDIA H100") not in fits  # 671 GB, of 640 there
    assert ("Kimi-K2 (FP8)", "NVIDIA B200") in fits
    assert ("Kimi-K2 (FP8)", "NVIDIA H200") not in fits  # 1,026 GB, of nine tenths of 1,128
    assert {device for model, device in fits if model == "DeepSeek-V2-Lite (bf16)"} == {device for _, device in CASES}
