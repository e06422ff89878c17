"""The figures of number formats show the values given, all of them, with nothing in the way of anything."""

import functools
import io

import numpy as np
import pytest
from figures import assert_readable

from mla_jax.base.qtensor import dequantize
from mla_jax.ui import plots_weights
from mla_jax.weights.quantize import QUANTIZERS, quantize

WEIGHTS = np.random.default_rng(0).standard_normal((1, 128)).astype(np.float32)
MADE = {name: np.asarray(dequantize(quantize(WEIGHTS, name)))[0] for name in QUANTIZERS}
ROWS = [
    {"format": "fp8_block", "bits": 8.0, "error": 0.0, "kl": 0.0},
    {"format": "int8", "bits": 8.03, "error": 0.0071, "kl": 4e-4},
    {"format": "int4_g32", "bits": 4.5, "error": 0.0856, "kl": 0.0168},
    {"format": "int4_g128", "bits": 4.125, "error": 0.104, "kl": 0.0243},
    {"format": "Q8_0", "bits": 8.5, "error": 0.0055, "kl": 3e-4},
    {"format": "Q5_1", "bits": 6.0, "error": 0.0378, "kl": 0.0035},
    {"format": "Q5_0", "bits": 5.5, "error": 0.0426, "kl": 0.0044},
    {"format": "Q4_1", "bits": 5.0, "error": 0.0786, "kl": 0.0133},
    {"format": "Q4_0", "bits": 4.5, "error": 0.087, "kl": 0.017},
]
PARTS = {
    "bfloat16": {"experts": 1_300_000_000_000, "attention": 20_000_000_000, "other": 9_000_000_000},
    "int4_g32": {"experts": 366_000_000_000, "attention": 6_000_000_000, "other": 9_000_000_000},
}
FIGURES = {
    "rounded": lambda: plots_weights.rounded(WEIGHTS[0], MADE),
    "errors": lambda: plots_weights.errors(ROWS),
    "errors of our formats alone": lambda: plots_weights.errors(ROWS[:4]),
    "sizes": lambda: plots_weights.sizes(PARTS),
}


@functools.cache
def drawn(name: str):
    figure = FIGURES[name]()
    figure.savefig(io.BytesIO(), format="png")
    return figure


@pytest.mark.parametrize("name", FIGURES)
def test_every_word_is_on_the_page_and_touches_no_other(name):
    assert_readable(drawn(name))


def test_a_mark_stands_at_every_value_that_a_format_has():
    lines = drawn("rounded").axes[0].collections
    for line, values in zip(lines, (WEIGHTS[0], *MADE.values()), strict=True):
        assert [segment[0][0] for segment in line.get_segments()] == pytest.approx(np.unique(values))


def test_the_title_and_the_words_count_what_is_kept_apart():
    ax = drawn("rounded").axes[0]
    fewest = min(MADE, key=lambda name: len(np.unique(MADE[name])))
    assert ax.get_title(loc="left") == f"Of 128 different weights {fewest} keeps {len(np.unique(MADE[fewest]))} apart"
    error = np.linalg.norm(MADE["int8"] - WEIGHTS[0]) / np.linalg.norm(WEIGHTS)
    assert any(f"error {100 * error:.2g} %" in text.get_text() for text in ax.texts)


def test_a_marker_stands_at_every_error_and_every_divergence():
    for ax, field in zip(drawn("errors").axes, ("error", "kl"), strict=True):
        points = {tuple(point) for line in ax.lines for point in line.get_xydata()}
        assert points == {(row["bits"], row[field]) for row in ROWS[1:]}
        assert [text.get_text() for text in ax.texts] == [row["format"] for row in ROWS[1:]]
        assert ax.get_yscale() == "log"


def test_the_titles_say_what_falls_and_what_moves_most():
    left, right = drawn("errors").axes
    assert left.get_title(loc="left") == "4.4 bits more a weight:\n19 times less error"
    assert right.get_title(loc="left").startswith("int4_g128 moves") and "0.024 bits" in right.get_title(loc="left")  # noqa: PT018


def test_bars_are_the_parts_bytes_the_largest_first():
    ax = drawn("sizes").axes[0]
    for bars, name in zip(ax.containers, ("experts", "attention", "other"), strict=True):
        assert [bar.get_width() for bar in bars] == [parts[name] for parts in PARTS.values()]
    assert [text.get_text() for text in ax.texts] == ["1.33 TB", "381 GB"]
    assert ax.get_title(loc="left") == "int4_g32 takes 3.5 times fewer bytes than bfloat16"


def test_figures_can_be_drawn_on_axes_that_are_given():
    from matplotlib.figure import Figure

    first, second, *pair = Figure().subplots(1, 4)
    assert plots_weights.rounded(WEIGHTS[0], MADE, ax=first) is first.figure
    assert plots_weights.sizes(PARTS, ax=second) is first.figure
    assert plots_weights.errors(ROWS, ax=pair) is first.figure


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (1.34e12, "1.34 TB")])
def test_bytes_get_three_digits_and_a_prefix(size, text):
    assert plots_weights._bytes(size) == text
