"""The figures show the cost model's values, all of them, with nothing in the way of anything."""

import functools
import itertools
import sys

import jaxtyping
import pytest
from figures import assert_readable, words

from mla_jax.base.config import Config
from mla_jax.base.errors import Unsupported
from mla_jax.base.families import PRESETS
from mla_jax.base.roofline import (
    DEVICES,
    attention_cost,
    break_even,
    decode_bytes,
    experts_touched,
    held_bytes,
    pick_form,
    step_cost,
)
from mla_jax.engine.core.stats import EngineStats, Sample
from mla_jax.model.mla import FORMS
from mla_jax.offload.cost import HostRates, host_seconds
from mla_jax.ui import plots, plots_decode, plots_engine, plots_host

V3, LITE, H200, CPU = Config.preset("v3"), Config.preset("v2_lite"), DEVICES["NVIDIA H200"], DEVICES["cpu"]
RELEASED = {name: Config.preset(name) for name in PRESETS}
MEASURED = {1: 339.0, 8: 969.0, 64: 4286.0}
WITH_EXPERTS = {name: config for name, config in RELEASED.items() if config.n_routed_experts}
SERVER = HostRates("8 channels of DDR5-4800, AMX", 245e9, 21e12, 33e-6, 50e9)
LARGER = HostRates("two sockets of 12 channels of DDR5-6400, AMX", 982e9, 42e12, 33e-6, 50e9)
EXPERT = {"fp8_block": 44.1e6, "int4_g32": 24.8e6}  # bytes of one of V3's
RATES = {
    "bf16": HostRates("2 cores with avx512, bf16", 11e9, 1e11, 0, 1e9),
    "int8": HostRates("2 cores, int8", 9e9, 3e11, 0, 1e9),
}
LITE_EXPERT = {"bf16": 17.3e6, "int8": 8.7e6}
CALLS = {"bf16": {1: 0.010, 8: 0.051, 64: 0.12}, "int8": {1: 0.004, 8: 0.03, 64: 0.071}}  # seconds by tokens
STEPS = [(1, 4096, 1), (32, 4096, 1), (1, 8192, 1024), (1, 1024, 1024), (64, 131072, 1)]  # rows, held, new
ENGINE = EngineStats(rows=8, pages=64)
ENGINE.samples.extend(
    Sample(5 + 0.1 * i, min(8, i), max(0, 30 - i), min(48, 6 * i), 9, max(0, 64 - 7 * i), 8 * i) for i in range(40)
)
FIGURES = {
    **{
        f"roofline-{device}-{step}": lambda device=device, step=step: plots.roofline(V3, DEVICES[device], *step)
        for device, step in itertools.product(("cpu", "NVIDIA H200", "TPU v6 lite"), STEPS)
    },
    **{
        f"dispatch-{device}-{preset}": lambda device=device, preset=preset: plots.dispatch(RELEASED[preset], DEVICES[device])
        for device, preset in itertools.product(("cpu", "NVIDIA H200", "TPU v6 lite"), ("tiny", "v3", "glm_4_7_flash"))
    },
    "cache_bytes": lambda: plots.cache_bytes(RELEASED),
    "costs": lambda: plots.costs(V3, 4096),
    "costs of a prompt": lambda: plots.costs(V3, 1024, new=1024),
    **{
        f"step_times-{device}-{preset}": lambda device=device, preset=preset: plots.step_times(
            RELEASED[preset], DEVICES[device], 1, 4096
        )
        for device, preset in itertools.product(("cpu", "NVIDIA H200", "TPU v6 lite"), ("tiny", "v3", "glm_4_7_flash"))
    },
    "experts_touched": lambda: plots_decode.experts_touched(WITH_EXPERTS),
    "decode_floor": lambda: plots_decode.decode_floor(V3, H200, [4096, 131072]),
    "decode_floor with what was measured": lambda: plots_decode.decode_floor(LITE, H200, [4096, 32768], MEASURED),
    **{
        f"where-{precision}-{host.name}": lambda host=host, precision=precision: plots_host.where(
            V3, H200, host, EXPERT[precision]
        )
        for host, precision in itertools.product((SERVER, LARGER), EXPERT)
    },
    "pool": lambda: plots_engine.pool(ENGINE),
    "pool of an engine that has done nothing": lambda: plots_engine.pool(EngineStats(rows=8, pages=65_536)),
    "calls": lambda: plots_host.calls(LITE, CALLS, RATES, LITE_EXPERT),
}


@functools.cache
def drawn(name: str):
    """The figure, laid out as it would be written. Types are checked where tests draw figures for their contents: the checks of
    the many calls of the cost model take longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        figure = FIGURES[name]()
    figure.draw_without_rendering()
    return figure


def markers(figure) -> dict:
    return {line.get_label(): line for line in figure.axes[0].lines if line.get_label() in FORMS}


@pytest.mark.parametrize("name", FIGURES)
def test_every_word_is_on_the_page_and_touches_no_other(name):
    assert_readable(drawn(name))


@pytest.mark.parametrize("name", [name for name in FIGURES if name.startswith("roofline")])
def test_no_word_covers_a_marker_and_the_markers_look_different(name):
    figure = drawn(name)
    points = {form: figure.axes[0].transData.transform(line.get_xydata()[0]) for form, line in markers(figure).items()}
    for text, (form, (x, y)) in itertools.product(words(figure), points.items()):
        assert not text.get_window_extent().padded(3).contains(x, y), (text.get_text(), form)
    assert len({line.get_marker() for line in markers(figure).values()}) == len(FORMS)
    assert len({line.get_color() for line in markers(figure).values()}) == len(FORMS)


@pytest.mark.parametrize("device", [H200, CPU])
def test_a_marker_stands_at_a_forms_intensity_and_under_the_roof(device):
    figure = plots.roofline(V3, device, rows=2, held=4096, new=3)
    said = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert {*markers(figure)} == {*FORMS}
    for form, line in markers(figure).items():
        cost = attention_cost(V3, form, 2, 3, 4096, device.itemsize)
        (x, y), intensity = line.get_xydata()[0], cost.flops / cost.bytes
        assert x == pytest.approx(intensity)
        assert y == pytest.approx(min(device.flops, intensity * device.bandwidth))
        assert f"{form}\n" in said


def test_the_rooflines_title_names_the_form_that_needs_least_time():
    for rows, held, new in STEPS:
        cost = {form: attention_cost(V3, form, rows, new, held).seconds(H200) for form in FORMS}
        title = plots.roofline(V3, H200, rows, held, new).axes[0].get_title(loc="left")
        assert f": {min(cost, key=cost.__getitem__)} " in title


def test_cache_bars_are_what_a_token_leaves():
    heads, latents = plots.cache_bytes(RELEASED).axes[0].containers
    assert [bar.get_width() for bar in heads] == [held_bytes(config, "naive") for config in RELEASED.values()]
    assert [bar.get_width() for bar in latents] == [held_bytes(config, "absorbed") for config in RELEASED.values()]
    assert (held_bytes(V3, "naive"), held_bytes(V3, "compressed")) == (81920, 1152)


def test_the_map_holds_the_picked_form_of_every_cell():
    ax = plots.dispatch(V3, H200, octaves=(10, 12)).axes[0]
    cells = ax.collections[0].get_array()
    for i, j in itertools.product(range(0, 12 * plots.OCTAVE, 5), range(10 * plots.OCTAVE)):
        new, prefix = (round(2 ** ((n + 0.5) / plots.OCTAVE)) for n in (j, i))
        assert ["move_elided", "compressed"][cells[i, j]] == pick_form(V3, H200, 1, new, prefix + new)


@pytest.mark.parametrize("preset", ["v3", "glm_4_7_flash"])
def test_break_even_is_drawn_and_named(preset):
    ax = plots.dispatch(RELEASED[preset], H200).axes[0]
    (line,) = (line for line in ax.lines if line.get_label() == "break-even")
    assert line.get_xdata()[0] == break_even(RELEASED[preset])
    assert any(f"n* = {break_even(RELEASED[preset]):.0f}" in text.get_text() for text in ax.texts)


def test_a_model_that_never_breaks_even_gets_no_line_and_a_title_that_says_so():
    ax = plots.dispatch(Config.preset("v3", kv_lora_rank=128), CPU).axes[0]
    assert not ax.lines
    assert "does not pay" in ax.get_title(loc="left")


def test_the_maps_title_says_where_the_form_changes_on_the_longest_prefix():
    title = plots.dispatch(V3, H200).axes[0].get_title(loc="left")
    new = next(new for new in itertools.count(1) if pick_form(V3, H200, 1, new, 2**17 + new) == "compressed")
    assert f"from {new} new tokens" in title


def test_cost_bars_are_the_models_flops_and_bytes():
    for ax, field in zip(plots.costs(V3, 4096, rows=2, new=3).axes, ("flops", "bytes"), strict=True):
        expected = [getattr(attention_cost(V3, form, 2, 3, 4096), field) for form in FORMS]
        assert [bar.get_width() for bar in ax.containers[0]] == expected
        assert ax.get_xscale() == "log"


def test_figures_can_be_drawn_on_axes_that_are_given():
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plots.roofline(V3, H200, 1, 4096, ax=left) is figure
    assert plots.dispatch(V3, H200, ax=right) is figure
    assert left.lines
    assert right.collections
    pair = Figure().subplots(1, 2)
    assert plots.costs(V3, 4096, ax=pair) is pair[0].figure
    alone = Figure().subplots()
    assert plots.cache_bytes(RELEASED, ax=alone) is alone.figure


def test_every_form_has_a_style():
    assert [*plots.STYLES] == [*FORMS]


@pytest.mark.parametrize(
    ("value", "text"),
    [(9.31e-6, "9.31 µs"), (0.34449, "344 ms"), (999.6, "1 ks"), (1, "1 s"), (2e12, "2 Ts"), (1e-12, "0.001 ns")],
)
def test_numbers_get_three_digits_and_a_prefix(value, text):
    assert plots._si(value, "s") == text


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"pip install mla-jax\[plot\]"):
        plots.costs(V3, 4096)


@pytest.mark.parametrize("device", [H200, CPU])
def test_the_forms_times_are_the_models_and_thick_where_arithmetic_decides(device):
    ax = plots.step_times(V3, device, 2, 4096).axes[0]
    lines = {line.get_label(): line for line in ax.lines}
    for form in ("compressed", "move_elided"):
        thin, thick = lines[form], lines[f"{form}, busy"]
        for new, time, busy in zip(thin.get_xdata(), thin.get_ydata(), thick.get_ydata(), strict=True):
            cost = attention_cost(V3, form, 2, int(new), 4096 + int(new), device.itemsize)
            assert time == pytest.approx(cost.seconds(device) / (2 * new))
            assert (busy == time) == (cost.flops / device.flops > cost.bytes / device.bandwidth)


def test_the_times_title_says_where_the_two_lines_cross():
    ax = plots.step_times(V3, H200, 1, 4096).axes[0]
    lines = {line.get_label(): line for line in ax.lines}
    times = zip(*(lines[form].get_ydata() for form in ("compressed", "move_elided")), strict=True)
    crossed = next(new for new, (rebuilt, held) in zip(lines["compressed"].get_xdata(), times, strict=True) if rebuilt < held)
    assert "rebuilding pays from 296 new tokens" in ax.get_title(loc="left")
    assert 296 <= crossed < 296 * 2 ** (1 / plots.OCTAVE)


def test_the_experts_touched_and_their_bytes_are_those_of_the_decode_floor():
    share, read = plots_decode.experts_touched(WITH_EXPERTS).axes
    for config, touched, weights in zip(WITH_EXPERTS.values(), share.lines, read.lines, strict=True):
        layers = sum(config.is_moe(i) for i in range(config.num_hidden_layers))
        tokens, bytes_read = touched.get_xdata(), weights.get_xdata() * weights.get_ydata()
        assert touched.get_ydata()[0] == pytest.approx(100 * config.num_experts_per_tok / config.n_routed_experts)
        floors = [decode_bytes(config, int(n), 0) for n in tokens]
        assert [(b - bytes_read[0]) * layers for b in bytes_read] == pytest.approx([floor - floors[0] for floor in floors])


def test_the_experts_titles_span_all_configs():
    share, read = plots_decode.experts_touched({"v3": V3}).axes
    assert share.get_title(loc="left").startswith("22 tokens touch\nhalf")
    assert "32 times less" in read.get_title(loc="left")


def test_the_floor_is_what_a_step_reads_at_the_devices_bandwidth():
    ax = plots_decode.decode_floor(LITE, H200, [4096, 32768], MEASURED).axes[0]
    for line, held in zip(ax.lines, (4096, 32768, 0), strict=False):
        for rows, rate in zip(line.get_xdata(), line.get_ydata(), strict=True):
            assert rate == pytest.approx(rows * H200.bandwidth / decode_bytes(LITE, int(rows), held))
    (points,) = (line for line in ax.lines if line.get_label().startswith("measured over 4,096"))
    assert dict(zip(points.get_xdata(), points.get_ydata(), strict=True)) == MEASURED
    assert [text.get_text() for text in ax.texts if "%" in text.get_text()] == ["339 (37%)", "969 (50%)", "4,286 (57%)"]


def test_figures_of_decoding_can_be_drawn_on_axes_that_are_given():
    from matplotlib.figure import Figure

    first, second, *pair = Figure().subplots(1, 4)
    assert plots.step_times(V3, H200, 1, 4096, ax=first) is first.figure
    assert plots_decode.decode_floor(V3, H200, [4096], ax=second) is first.figure
    assert plots_decode.experts_touched(WITH_EXPERTS, ax=pair) is first.figure
    assert all(ax.lines for ax in (first, second, *pair))


def lines_of(ax) -> dict:
    return {line.get_label(): line for line in ax.lines}


def test_the_lines_of_where_experts_belong_are_the_cost_models():
    ax = plots_host.where(V3, H200, SERVER, EXPERT["fp8_block"], held=1000).axes[0]
    found, tokens = lines_of(ax), ax.lines[0].get_xdata()
    assert ax.get_yscale() == "log"
    for i, n in enumerate(map(int, tokens)):
        routed = experts_touched(V3, n) * EXPERT["fp8_block"]
        arithmetic = 2 * n * 8 * 3 * 7168 * 2048 / H200.flops
        form = pick_form(V3, H200, 1, n, 1000 + n)
        expected = {
            "attention": step_cost(V3, form, 1, n, 1000 + n).seconds(H200),
            "shared experts": max(2 * 3 * 7168 * 2048 / H200.bandwidth, arithmetic / 8),
            "routed, from the device's memory": max(routed / H200.bandwidth, arithmetic),
            "routed, copied over the link": max(routed / SERVER.link, arithmetic),
            "routed, computed on the CPU": host_seconds(V3, SERVER, n, EXPERT["fp8_block"]),
        }
        for name, seconds in expected.items():
            assert found[name].get_ydata()[i] == pytest.approx(seconds), (name, n)


def test_where_bringing_experts_starts_to_pay_is_drawn_and_said():
    size = EXPERT["fp8_block"]
    crossing = plots_host.crossover(V3, H200, SERVER, size)
    before, after = (plots_host.parts_of_a_layer(V3, H200, SERVER, size, n) for n in (crossing - 1, crossing))
    assert before["routed, copied over the link"] >= before["routed, computed on the CPU"]
    assert after["routed, copied over the link"] < after["routed, computed on the CPU"]
    ax = plots_host.where(V3, H200, SERVER, size).axes[0]
    assert lines_of(ax)["crossing"].get_xdata()[0] == crossing
    assert f"from {crossing:,} tokens" in ax.get_title(loc="left")


def test_where_bringing_never_pays_no_line_is_drawn():
    slow = SERVER._replace(link=1e6)
    ax = plots_host.where(V3, H200, slow, EXPERT["fp8_block"], octaves=6).axes[0]
    assert "crossing" not in lines_of(ax)
    assert "not up to 64 tokens" in ax.get_title(loc="left")
    assert plots_host.crossover(V3, H200, slow, EXPERT["fp8_block"], most=64) > 64
    assert plots_host.crossover(V3, H200, SERVER._replace(link=1e15), EXPERT["fp8_block"]) == 1


def test_calls_are_marked_where_they_were_measured_over_what_was_expected():
    ax = plots_host.calls(LITE, CALLS, RATES, LITE_EXPERT).axes[0]
    found = lines_of(ax)
    for name, times in CALLS.items():
        assert dict(zip(found[name].get_xdata(), found[name].get_ydata(), strict=True)) == times
        line = found[f"{name}, expected"]
        for n, seconds in zip(line.get_xdata(), line.get_ydata(), strict=True):
            assert seconds == pytest.approx(host_seconds(LITE, RATES[name], int(n), LITE_EXPERT[name]))
        assert max(line.get_xdata()) == 64
    assert len({found[name].get_marker() for name in CALLS}) == len({found[name].get_color() for name in CALLS}) == 2
    assert ax.get_title(loc="left") == "1 token: int8 takes 2.5 times less than bf16"


def test_figures_of_the_host_can_be_drawn_on_axes_that_are_given():
    from matplotlib.figure import Figure

    one, two = Figure().subplots(1, 2)
    assert plots_host.where(V3, H200, SERVER, EXPERT["fp8_block"], ax=one) is one.figure
    assert plots_host.calls(LITE, CALLS, RATES, LITE_EXPERT, ax=two) is one.figure
    assert all(ax.lines for ax in (one, two))


def test_the_pool_is_stacked_to_all_of_its_pages_and_requests_are_lines():
    pages, requests = plots_engine.pool(ENGINE).axes
    last, seconds = ENGINE.samples[-1], ENGINE.samples[-1].seconds - ENGINE.samples[0].seconds
    tops = [max(y for x, y in area.get_paths()[0].vertices if x == pytest.approx(seconds)) for area in pages.collections]
    assert tops == [last.held, 64 - last.unused, 64]
    assert [text.get_text() for text in pages.get_legend().get_texts()] == [
        "held by requests",
        "kept for later prompts",
        "unused",
    ]
    for name in ("running", "waiting"):
        assert lines_of(requests)[name].get_ydata().tolist() == [getattr(sample, name) for sample in ENGINE.samples]
    assert "48 of 64 pages" in pages.get_title(loc="left")
    assert "8 requests ran at once,\n312 tokens" in requests.get_title(loc="left")


def test_the_pool_can_be_drawn_from_a_time_on_and_on_axes_that_are_given():
    from matplotlib.figure import Figure

    pair = Figure().subplots(1, 2)
    assert plots_engine.pool(ENGINE, since=7.95, ax=pair) is pair[0].figure
    assert lines_of(pair[1])["running"].get_xdata()[0] == 0
    assert len(lines_of(pair[1])["running"].get_xdata()) == 10
