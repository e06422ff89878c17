"""The figure of meshes shows the cost model's values as far as they fit the memory, with nothing in the way of anything."""

import functools
import io

import pytest
from figures import assert_readable

from mla_jax.base.config import Config
from mla_jax.base.link_rates import PLANNED
from mla_jax.mesh.cost import HELD, MeshCost, packed
from mla_jax.ui import plots_mesh

H200 = PLANNED["h200"]
AVAILABLE = 0.9 * H200.memory
SIZES = {"data=8": {"data": 8}, "data=4,tensor=2": {"data": 4, "tensor": 2}, "tensor=8": {"tensor": 8}}


def costs(preset: str, kind: str = "h200") -> list[MeshCost]:
    config = Config.preset(preset)
    return [MeshCost(config, sizes, PLANNED[kind].figures, packed(config)) for sizes in SIZES.values()]


FIGURES = {
    "V3": lambda: plots_mesh.decode_rates(costs("v3"), AVAILABLE),
    "V3 in a small memory": lambda: plots_mesh.decode_rates(costs("v3"), 96e9),
    "V2-Lite, longer than the figure": lambda: plots_mesh.decode_rates(costs("v2_lite"), AVAILABLE, octaves=9),
    "one mesh": lambda: plots_mesh.decode_rates(costs("v3")[:1], AVAILABLE, held=1024),
    "nothing fits": lambda: plots_mesh.decode_rates(costs("v3", "h100"), 0.9 * PLANNED["h100"].memory),
}


@functools.cache
def drawn(name: str):
    figure = FIGURES[name]()
    figure.savefig(io.BytesIO(), format="png")
    return figure


@pytest.mark.parametrize("name", FIGURES)
def test_every_word_is_on_the_page_and_touches_no_other(name):
    assert_readable(drawn(name))


def test_lines_are_the_predicted_rates_of_all_rows_that_fit():
    ax = drawn("V3").axes[0]
    for line, name, cost in zip(ax.lines, SIZES, costs("v3"), strict=True):
        assert line.get_label() == name
        shards, rows = cost.of("data"), [int(n) for n in line.get_xdata()]
        assert rows == [shards * 2**n for n in range(len(rows))]
        assert list(line.get_ydata()) == [pytest.approx(cost.decode(n // shards, HELD).tokens) for n in rows]
        fitting = [cost.tokens(AVAILABLE, n // shards) >= n // shards * HELD for n in (*rows, 2 * rows[-1])]
        assert fitting == [True] * len(rows) + [False]


def test_the_title_says_which_mesh_gives_most_and_from_how_many_rows_on_it_does():
    ax = drawn("V3").axes[0]
    data, both, tensor = (dict(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in ax.lines)
    assert ax.get_title(loc="left") == "data=8: 14,000 tokens/s with 512 rows, ahead from 64 rows on"
    assert data[512] == max(*data.values(), *both.values(), *tensor.values()) == pytest.approx(14_000, abs=500)
    assert data[64] > max(both[64], tensor[64])
    assert data[32] < max(both[32], tensor[32])
    assert drawn("one mesh").axes[0].get_title(loc="left").endswith(" rows")


def test_a_line_may_end_with_the_figure_and_then_the_memory_is_not_said_to_be_full():
    ax = drawn("V2-Lite, longer than the figure").axes[0]
    assert max(ax.lines[0].get_xdata()) == 512
    assert not any("memory is full" in text.get_text() for text in ax.texts)
    assert any("memory is full" in text.get_text() for text in drawn("V3").axes[0].texts)


def test_a_mesh_that_does_not_fit_has_no_line_and_says_so():
    ax = drawn("nothing fits").axes[0]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [f"{name}: does not fit" for name in SIZES]
    assert all(not len(line.get_xdata()) for line in ax.lines)
    assert ax.get_title(loc="left") == "None of these meshes has the memory"
    some = [text.get_text() for text in drawn("V3 in a small memory").axes[0].get_legend().get_texts()]
    assert some == ["data=8: does not fit", "data=4,tensor=2: does not fit", "tensor=8"]


def test_the_figure_of_meshes_can_be_drawn_on_axes_that_are_given():
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    assert plots_mesh.decode_rates(costs("v3"), AVAILABLE, ax=ax) is ax.figure
    assert ax.lines
