"""The notebooks' figures: every word can be read, and marks stand at the values of the cost model and of the rows given."""

import itertools

import jaxtyping
import numpy as np
import pytest
from figures import drafts, drawing, forms, host_experts, inside, long_contexts, mesh_rates, number_formats, serving, steps

from mla_jax.base.config import Config
from mla_jax.base.link_rates import PLANNED
from mla_jax.base.options import MOST_DRAFTS
from mla_jax.base.roofline import DEVICES, attention_cost, break_even, pick_form
from mla_jax.decode.speculative import Mtp
from mla_jax.engine.core import drafting
from mla_jax.engine.core.drafting import Drafting
from mla_jax.engine.core.stats import EngineStats, Sample
from mla_jax.mesh.cost import HELD, Pass
from mla_jax.mesh.host_cost import HostRates, host_seconds
from mla_jax.model.mla import FORMS
from mla_jax.model.parts import cost_of, released
from mla_jax.weights.temporaries import tokens_that_fit

V3, LITE, H200, CPU = Config.preset("v3"), Config.preset("v2_lite"), DEVICES["NVIDIA H200"], DEVICES["cpu"]
LITE_WITH_MTP = Config.preset("v2_lite", num_nextn_predict_layers=1)
RELEASED = {name: Config.preset(name) for name in ("v2_lite", "v2", "v3", "kimi_k2", "glm_4_7_flash", "tiny")}
WITH_EXPERTS = {name: config for name, config in RELEASED.items() if config.n_routed_experts}
SERVER = HostRates("8 channels of DDR5-4800, AMX", 245e9, 21e12, 33e-6, 50e9)
FP8 = 44.1e6  # bytes of an expert of V3
RATES = {
    "bf16": HostRates("2 cores with avx512, bf16", 11e9, 1e11, 0, 1e9),
    "int8": HostRates("2 cores, int8", 9e9, 3e11, 0, 1e9),
}
LITE_EXPERT = {"bf16": 17.3e6, "int8": 8.7e6}
CALLS = {"bf16": {1: 0.010, 8: 0.051, 64: 0.12}, "int8": {1: 0.004, 8: 0.03, 64: 0.071}}  # seconds by tokens
ENGINE = EngineStats(rows=8, pages=64)
ENGINE.samples.extend(
    Sample(5 + 0.1 * i, min(8, i), max(0, 30 - i), min(48, 6 * i), 9, max(0, 64 - 7 * i), 8 * i) for i in range(40)
)


def counts(*places: int) -> np.ndarray:
    return np.array([*places, *[0] * (MOST_DRAFTS - len(places))])


DRAFTED = {
    "mtp": EngineStats(8, 64, drafted=counts(100, 80, 60), stood=counts(80, 60, 45), passes=100),
    "lookup": EngineStats(8, 64, drafted=counts(40, 20), stood=counts(20, 19), passes=100),
}
DRAFTING = {
    "DeepSeek-V3": Drafting(cost_of(released(V3, H200, mtp=True)), Mtp()),
    "DeepSeek-V2-Lite on a CPU": Drafting(cost_of(released(LITE_WITH_MTP, CPU, mtp=True)), Mtp()),
}
RNG = np.random.default_rng(0)
NEEDED, OF_HEADS = RNG.uniform(0.01, 0.6, (7, 8)), RNG.integers(20, 400, (7, 8))
BOUNDS = {name: (bound := RNG.uniform(0.1, 2, 20), 0.5 * bound) for name in ("uniform", "Ada-KV")}
DIVERGENCE = [
    {"name": "snapkv, ada", "kept": 0.2, "kl": 0.05, "low": 0.04, "high": 0.07},
    {"name": "snapkv, ada", "kept": 0.1, "kl": 0.11, "low": 0.08, "high": 0.15},
    {"name": "snapkv, uniform", "kept": 0.1, "kl": 0.14, "low": 0.1, "high": 0.2},
]
FOUND = RNG.uniform(0, 1, (10, 10))
TIMES = [
    {"way": "full", "held": 8192, "attention ms": 1.0},
    {"way": "full", "held": 32768, "attention ms": 4.0},
    {"way": "quest", "held": 8192, "attention ms": 2.0},
    {"way": "quest", "held": 32768, "attention ms": 3.0},
    {"way": "a short one", "held": 8192, "attention ms": 0.5},
]
WEIGHTS = np.random.default_rng(0).standard_normal(128).astype(np.float32)
ROUNDED = {"halves": np.round(2 * WEIGHTS) / 2, "whole": np.round(WEIGHTS)}
TOKENS = ["def", "add", "(a"]
ANSWERS = [["x", "y", "z"], ["x", "y", "b"], ["x", "add", "b"]]  # by layer
CHANCES = RNG.uniform(0, 1, (3, 3))
HEADS = np.tril(np.ones((4, 3, 3))) / np.arange(1, 4)[:, None]
CHOSEN = np.array([[[0, 1], [0, 2], [0, 3]], [[4, 5], [6, 7], [4, 7]]])  # of eight experts
ERRORS = [
    {"format": "fp8_block", "bits": 8.0, "error": 0.0, "kl": 0.0},
    {"format": "int8", "bits": 8.03, "error": 0.0071, "kl": 4e-4},
    {"format": "int4_g32", "bits": 4.5, "error": 0.0856, "kl": 0.0168},
    {"format": "int4_g128", "bits": 4.125, "error": 0.104, "kl": 0.0243},
    {"format": "Q8_0", "bits": 8.5, "error": 0.0055, "kl": 3e-4},
    {"format": "Q4_0", "bits": 4.5, "error": 0.087, "kl": 0.017},
]
PARTS = {
    "bfloat16": {"experts": 1_300_000_000_000, "attention": 20_000_000_000, "other": 9_000_000_000},
    "int4_g32": {"experts": 366_000_000_000, "attention": 6_000_000_000, "other": 9_000_000_000},
}


def rates(kind: str, available: float):
    meshes = ({"data": 8}, {"data": 4, "tensor": 2}, {"tensor": 8})
    models = [released(V3, PLANNED[kind].figures, sizes) for sizes in meshes]
    return mesh_rates.decode_rates(models, available)


DRAWN = {
    "roofline of a step on a GPU": lambda: forms.roofline(V3, H200, 32, 4096),
    "roofline of a step on a CPU": lambda: forms.roofline(V3, CPU, 1, 4096),
    "roofline of a prompt": lambda: forms.roofline(V3, DEVICES["TPU v6 lite"], 1, 1024, 1024),
    "dispatch on a GPU": lambda: forms.dispatch(V3, H200),
    "dispatch on a CPU": lambda: forms.dispatch(RELEASED["glm_4_7_flash"], CPU),
    "cache_bytes": lambda: forms.cache_bytes(RELEASED),
    "costs": lambda: forms.costs(V3, 4096),
    "step_times": lambda: forms.step_times(V3, H200, 1, 4096),
    "experts_touched": lambda: steps.experts_touched(WITH_EXPERTS),
    "decode_floor": lambda: steps.decode_floor(LITE, H200, [4096, 32768], {1: 339.0, 8: 969.0, 64: 4286.0}),
    "where": lambda: host_experts.where(V3, H200, SERVER, FP8),
    "where copying never pays": lambda: host_experts.where(V3, H200, SERVER._replace(link=1e6), FP8, octaves=6),
    "calls": lambda: host_experts.calls(LITE, CALLS, RATES, LITE_EXPERT),
    "pool": lambda: serving.pool(ENGINE),
    "pool of an engine that has done nothing": lambda: serving.pool(EngineStats(rows=8, pages=65_536)),
    "acceptance": lambda: drafts.acceptance(DRAFTED),
    "expected_gain": lambda: drafts.expected_gain(DRAFTING, (0.8, 0.7, 0.6)),
    "concentration": lambda: long_contexts.concentration(NEEDED),
    "counts": lambda: long_contexts.counts(OF_HEADS, OF_HEADS.sum(1), 154),
    "bound_and_change": lambda: long_contexts.bound_and_change(BOUNDS),
    "divergence": lambda: long_contexts.divergence(DIVERGENCE),
    "needles": lambda: long_contexts.needles(FOUND, [*range(1000, 8000, 700)], np.linspace(0, 1, 10), "snapkv, a tenth kept"),
    "attention_time": lambda: long_contexts.attention_time(TIMES),
    "decode_rates": lambda: rates("h200", 0.9 * PLANNED["h200"].memory),
    "decode_rates where nothing fits": lambda: rates("h100", 0.9 * PLANNED["h100"].memory),
    "lens": lambda: inside.lens(ANSWERS, CHANCES, TOKENS),
    "attention": lambda: inside.attention(HEADS, TOKENS, 1),
    "experts": lambda: inside.experts(CHOSEN % 4, 4),
    "rotary_share": lambda: inside.rotary_share(np.array([0.5, 2.0, 1.0]), np.array([1.0, 1.0, 1.5])),
    "rounded": lambda: number_formats.rounded(WEIGHTS, ROUNDED),
    "errors": lambda: number_formats.errors(ERRORS),
    "sizes": lambda: number_formats.sizes(PARTS),
}


@pytest.fixture(autouse=True)
def _without_checked_types(monkeypatch):
    """The checks of the many calls of the cost model take longer than all else."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def words(figure) -> list:
    """Every text that a reader sees, ticks left out."""
    texts = [figure._supxlabel] if figure._supxlabel else []
    for ax in figure.axes:
        texts += [*ax.texts, ax.title, ax._left_title, ax.xaxis.label, ax.yaxis.label]
        texts += ax.get_legend().get_texts() if ax.get_legend() else []
    return [text for text in texts if text.get_text()]


def lines_of(ax) -> dict:
    return {line.get_label(): line for line in ax.lines}


def points(line) -> list[tuple]:
    return [*zip(line.get_xdata(), line.get_ydata(), strict=True)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", DRAWN)
def test_it_draws_without_a_warning_and_every_word_is_on_the_page_and_touches_no_other(name):
    figure = DRAWN[name]()
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in words(figure)]
    for said, box in boxes:
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, said
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, said
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        in_markers = one.isdecimal() and other.isdecimal()  # of lines that meet
        assert in_markers or not a.overlaps(b), (one, other)


@pytest.mark.parametrize("device", [H200, CPU])
def test_each_form_stands_at_its_intensity_under_the_roof(device):
    lines = lines_of(forms.roofline(V3, device, rows=2, held=4096, new=3).axes[0])
    for form in FORMS:
        cost = attention_cost(V3, form, 2, 3, 4096, device.itemsize)
        ((x, y),) = points(lines[form])
        assert (x, y) == (pytest.approx(cost.flops / cost.bytes), pytest.approx(min(device.flops, x * device.bandwidth)))


def test_the_map_has_the_picked_form_of_every_cell_and_its_title_the_change_on_the_longest_prefix():
    ax = forms.dispatch(V3, H200, octaves=(10, 12)).axes[0]
    cells = ax.collections[0].get_array()
    for i, j in itertools.product(range(0, 12 * forms.OCTAVE, 5), range(10 * forms.OCTAVE)):
        new, prefix = (round(2 ** ((n + 0.5) / forms.OCTAVE)) for n in (j, i))
        assert [*forms.ALTERNATE][cells[i, j]] == pick_form(V3, H200, 1, new, prefix + new)
    change = next(new for new in itertools.count(1) if pick_form(V3, H200, 1, new, 2**12 + new) == "compressed")
    assert f"from {change} new tokens" in ax.get_title(loc="left")
    assert lines_of(ax)["break-even"].get_xdata()[0] == break_even(V3)


def test_the_forms_times_are_thick_where_arithmetic_decides():
    lines = lines_of(forms.step_times(V3, H200, 2, 4096).axes[0])
    for form in forms.ALTERNATE:
        for (new, time), (_, busy) in zip(points(lines[form]), points(lines[f"{form}, busy"]), strict=True):
            cost = attention_cost(V3, form, 2, int(new), 4096 + int(new))
            assert time == pytest.approx(cost.seconds(H200) / (2 * new))
            assert (busy == time) == (cost.flops / H200.flops > cost.bytes / H200.bandwidth)


def test_the_floor_is_what_a_step_reads_at_the_devices_bandwidth_and_marks_say_their_share_of_it():
    ax, cost = DRAWN["decode_floor"]().axes[0], cost_of(released(LITE, H200))
    for line, held in zip(ax.lines, (4096, 32768, 0), strict=False):
        for rows, rate in points(line):
            assert rate == pytest.approx(rows * H200.bandwidth / cost.read_bytes(Pass(int(rows), 1, held)))
    assert [text.get_text() for text in ax.texts if "%" in text.get_text()] == ["339 (37%)", "969 (50%)", "4,286 (57%)"]


def test_copying_experts_pays_from_where_the_link_is_faster_than_the_cpu():
    crossing = host_experts.crossover(V3, H200, SERVER, FP8)
    before, after = (host_experts.parts_of_a_layer(V3, H200, SERVER, FP8, n) for n in (crossing - 1, crossing))
    assert before["routed, copied over the link"] >= before["routed, computed on the CPU"]
    assert after["routed, copied over the link"] < after["routed, computed on the CPU"]
    ax = host_experts.where(V3, H200, SERVER, FP8).axes[0]
    assert lines_of(ax)["crossing"].get_xdata()[0] == crossing
    assert f"from {crossing:,} tokens" in ax.get_title(loc="left")


def test_calls_are_marked_where_they_were_measured_over_what_was_expected():
    lines = lines_of(host_experts.calls(LITE, CALLS, RATES, LITE_EXPERT).axes[0])
    for name, times in CALLS.items():
        assert dict(points(lines[name])) == times
        for n, seconds in points(lines[f"{name}, expected"]):
            assert seconds == pytest.approx(host_seconds(LITE, RATES[name], int(n), LITE_EXPERT[name]))


def test_the_pools_pages_are_stacked_to_all_of_them_from_the_time_that_is_asked_for():
    pages, requests = serving.pool(ENGINE, since=7.95).axes
    assert len(lines_of(requests)["running"].get_xdata()) == 10
    last, seconds = ENGINE.samples[-1], ENGINE.samples[-1].seconds - ENGINE.samples[-10].seconds
    tops = [max(y for x, y in area.get_paths()[0].vertices if x == pytest.approx(seconds)) for area in pages.collections]
    assert tops == [last.held, 64 - last.unused, 64]


def test_the_gain_is_that_of_the_number_of_guesses_that_the_engine_would_take():
    shares = (0.8, 0.7, 0.6)
    ax = drafts.expected_gain(DRAFTING, shares, octaves=5).axes[0]
    said = iter(int(text.get_text()) for text in ax.texts if text.get_text().isdecimal())
    for line, one in zip(ax.lines, DRAFTING.values(), strict=False):
        for rows, gain in points(line):
            guesses = one._best(int(rows), drafting.ASSUMED_HELD, np.array(shares))
            assert next(said) == guesses
            tokens = 1 + sum(np.prod(shares[:n]) for n in range(1, guesses + 1))
            plain, drafted = (one.seconds(int(rows), drafting.ASSUMED_HELD, n) for n in (0, guesses))
            assert gain == pytest.approx(tokens * plain / drafted)


def test_divergences_have_their_intervals_and_the_title_names_the_closest():
    ax = long_contexts.divergence(DIVERGENCE).axes[0]
    line, _, (intervals,) = next(one.lines for one in ax.containers if one.get_label() == "snapkv, ada")
    assert points(line) == [(10, 0.11), (20, 0.05)]
    assert [(low[1], high[1]) for low, high in intervals.get_segments()] == [
        pytest.approx((0.08, 0.15)),
        pytest.approx((0.04, 0.07)),
    ]
    assert ax.get_title(loc="left").endswith("snapkv, ada")


def test_a_map_of_needles_has_lengths_across_and_depths_down():
    image = long_contexts.needles(FOUND, [*range(10)], [*range(10)], "").axes[0].images[0].get_array()
    np.testing.assert_allclose(image, 100 * FOUND.T)


def test_attention_times_are_compared_for_the_longest_rows():
    assert long_contexts.attention_time(TIMES).axes[0].get_title(loc="left").startswith("75% of full attention's time at 32,768")


def test_a_meshs_line_has_the_predicted_rates_of_all_rows_that_fit():
    available = 0.9 * PLANNED["h200"].memory
    model = released(V3, PLANNED["h200"].figures, {"data": 4, "tensor": 2})
    cost = cost_of(model)
    line = points(lines_of(mesh_rates.decode_rates([model], available).axes[0])["data=4,tensor=2"])
    assert line == [(n, pytest.approx(cost.decode(n // 4, HELD).tokens)) for n, _ in line]
    counts = [int(n) for n, _ in [*line, (2 * line[-1][0], 0)]]
    fitting = [tokens_that_fit(model, available, n // 4) >= n // 4 * HELD for n in counts]
    assert fitting == [True] * len(line) + [False]


def test_the_lens_names_the_layer_from_which_the_last_tokens_answer_stands():
    (ax,) = inside.lens(ANSWERS, CHANCES, TOKENS).axes
    assert ax.get_title("left") == "The last token's answer stands before layer 1 and after"


def test_experts_are_counted_by_layer():
    (ax,) = inside.experts(CHOSEN, 8).axes
    said = [int(text.get_text()) for text in ax.texts if text.get_text().isdecimal()]
    assert said == [3, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 1, 1, 2]
    assert "4.0 times its even share" in ax.get_title("left")


def test_marks_stand_at_all_values_of_a_format_and_at_all_errors_but_zeros():
    for line, values in zip(DRAWN["rounded"]().axes[0].collections, (WEIGHTS, *ROUNDED.values()), strict=True):
        assert [segment[0][0] for segment in line.get_segments()] == pytest.approx(np.unique(values))
    for ax, field in zip(DRAWN["errors"]().axes, ("error", "kl"), strict=True):
        assert {point for line in ax.lines for point in points(line)} == {(row["bits"], row[field]) for row in ERRORS[1:]}


@pytest.mark.parametrize(
    ("value", "text"),
    [(9.31e-6, "9.31 µs"), (0.34449, "344 ms"), (999.6, "1 ks"), (1, "1 s"), (2e12, "2 Ts"), (1e-12, "0.001 ns"), (0, "0 s")],
)
def test_numbers_get_three_digits_and_a_prefix(value, text):
    assert drawing.si(value, "s") == text
