"""The cost model against numbers worked out by hand, and the choice of form that follows from it."""

import math

import numpy as np
import pytest

from mla_jax.base.config import Config
from mla_jax.base.roofline import (
    DEVICES,
    Device,
    Host,
    Part,
    Routed,
    attention_cost,
    best_defer,
    break_even,
    chunk_tokens,
    decode_seconds,
    device,
    host_calls,
    host_seconds,
    pick_form,
    prefill_seconds,
    stream_seconds,
    stream_tokens,
    why_form,
)

SMALL = Config(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8,
    kv_lora_rank=10, q_lora_rank=None, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=5,
)  # fmt: skip
FREE_MEMORY = Device("infinite bandwidth", "gpu", 1e12, math.inf)


@pytest.mark.parametrize(
    ("preset", "tokens"), [("v3", 171), ("kimi_k2", 171), ("v2", 171), ("v2_lite", 171), ("glm_4_7_flash", 398)]
)
def test_break_even_is_where_the_papers_put_it(preset, tokens):
    assert round(break_even(Config.preset(preset))) == tokens


def test_absorbing_always_wins_where_heads_are_wider_than_the_latent():
    assert break_even(Config.preset("v3", kv_lora_rank=128)) == math.inf


@pytest.mark.parametrize(
    ("form", "flops", "size"),
    [  # 3 rows, 7 new tokens, 20 attended to, 2 bytes a number; weights 2*10*(3+5) = 160, scores 8*3*2*7*20 = 6720 bytes
        ("naive", 2 * 3 * 2 * 7 * 20 * 12 + 2 * 3 * 7 * 160, 2 * (3 * 20 * 2 * 12 + 160) + 6720),
        ("compressed", 2 * 3 * 2 * 7 * 20 * 12 + 2 * 3 * 20 * 160, 2 * (3 * 20 * 14 + 2 * 3 * 20 * 2 * 12 + 160) + 6720),
        ("absorbed", 2 * 3 * 2 * 7 * 20 * 24 + 2 * 3 * 7 * 160, 2 * (3 * 20 * 14 + 160 + 2 * 3 * 20 * 2 * 14) + 6720),
        ("move_elided", 2 * 3 * 2 * 7 * 20 * 24 + 2 * 3 * 7 * 160, 2 * (3 * 20 * 14 + 160) + 6720),
    ],
)
def test_costs_of_a_small_case_are_those_worked_out_by_hand(form, flops, size):
    assert attention_cost(SMALL, form, rows=3, new=7, attended=20) == (flops, size)


@pytest.mark.parametrize("preset", ["v3", "glm_4_7_flash"])
def test_with_free_memory_the_form_changes_at_break_even_on_a_long_prefix(preset):
    config, held = Config.preset(preset), 10_000_000
    tokens = math.ceil(break_even(config))
    assert pick_form(config, FREE_MEMORY, 1, tokens - 1, held) == "move_elided"
    assert pick_form(config, FREE_MEMORY, 1, tokens + 1, held) == "compressed"


def test_whole_prompts_rebuild_heads_and_single_tokens_absorb():
    config = Config.preset("v3")
    for kind in DEVICES.values():
        assert pick_form(config, kind, 1, 1, 4096) == "move_elided"
    assert pick_form(config, FREE_MEMORY, 1, 1024, 1024) == "compressed"


def test_the_slower_of_arithmetic_and_memory_takes_the_time():
    cost = attention_cost(SMALL, "naive", 1, 1, 100)
    assert cost.seconds(Device("", "gpu", cost.flops, cost.bytes / 3)) == pytest.approx(3)
    assert cost.seconds(Device("", "gpu", cost.flops / 5, cost.bytes)) == pytest.approx(5)


def test_the_reason_names_both_forms_and_what_bounds_them():
    said = why_form(Config.preset("v3"), DEVICES["NVIDIA H200"], "move_elided", 1, 1, 4096)
    assert said.startswith("move_elided ")
    assert "; compressed " in said
    assert "by memory" in said


def test_devices_are_known_by_the_start_of_their_kind_and_others_take_a_balance_of_their_platform():
    assert device("NVIDIA H100 80GB HBM3", "gpu") is DEVICES["NVIDIA H100"]
    assert device("TPU v5 lite", "tpu") is DEVICES["TPU v5 lite"]
    assert device("cpu", "cpu") is DEVICES["cpu"]
    unknown = device("NVIDIA X1", "gpu")
    assert (unknown.name, unknown.flops) == ("NVIDIA X1", DEVICES["NVIDIA H200"].flops)
    assert device("TPU v9", "tpu").flops == DEVICES["TPU v5 lite"].flops


@pytest.mark.parametrize("budget", [0, 10**6, 10**9, 10**12])
def test_chunks_are_powers_of_two_whose_scores_fit_the_budget(budget):
    config = Config.preset("v3")
    chunk = chunk_tokens(config, 2, 8192, budget)
    assert chunk in [2**n for n in range(4, 13)]
    if chunk > 16:
        assert 3 * 4 * 2 * 128 * chunk * 8192 <= budget
    if chunk < 4096:
        assert 3 * 4 * 2 * 128 * 2 * chunk * 8192 > budget


# experts of the host that are brought to the device

V2_LITE, H200 = Config.preset("v2_lite"), DEVICES["NVIDIA H200"]
SERVER = Host("a server", 245e9, 21e12, 10e-6, 33e-6, 50e9)
EXPERT = 3 * 2048 * 1408  # numbers


def test_bringing_experts_takes_the_link_then_memory_then_arithmetic():
    seconds = stream_seconds(V2_LITE, H200, SERVER, 4096, 2 * EXPERT)
    packed, flops = 64 * 2 * EXPERT, 2 * 4096 * 6 * EXPERT
    assert seconds == pytest.approx(packed / 50e9 + 2 * packed / 4.56e12 + flops / 811e12)


@pytest.mark.parametrize("size", [2 * EXPERT, EXPERT, EXPERT / 2])
def test_experts_are_brought_from_the_fewest_tokens_with_which_that_is_faster(size):
    tokens = stream_tokens(V2_LITE, H200, SERVER, size)
    gains = [
        stream_seconds(V2_LITE, H200, SERVER, n, size) < host_seconds(V2_LITE, SERVER, n, size) for n in (tokens - 1, tokens)
    ]
    assert gains == [False, True]
    assert 64 < tokens < 8192


def test_over_a_link_that_is_too_slow_experts_are_never_brought():
    assert stream_tokens(V2_LITE, H200, SERVER._replace(link=1.0), EXPERT) == 0


# experts on the host, in milliseconds: an expert takes one, each call 0.5 and one that is waited for alone 2

CALLED = Host("", 1e9, math.inf, 0.5e-3, 2e-3, 1e9)
ONE = 1_000_000  # bytes


def ms(seconds: float) -> float:
    return 1e3 * seconds


def waiting(layer: float, host: Host, defer: int, rows: int = 1) -> float:
    """Of a step of V2-Lite on a device that needs so many ms for each of the 27 layers, 26 of which the host computes for."""
    on = Device("memory takes no time", "gpu", math.inf, math.inf, layer / 1e3)
    return ms(decode_seconds(V2_LITE, on, rows, 1024, host, 26, ONE, defer))


@pytest.mark.parametrize(
    ("defer", "alone", "now", "later"), [(0, 2 + 6, 0.5 + 6, 0), (2, 2 + 4, 0.5 + 4, 0.5 + 2), (9, 2 + 1, 0.5 + 1, 0.5 + 5)]
)
def test_a_call_takes_its_experts_bytes_and_what_each_call_takes(defer, alone, now, later):
    """The last one stays, whatever is asked for; one alone also has the way there and back."""
    assert [ms(t) for t in host_calls(V2_LITE, CALLED, 1, ONE, defer)] == pytest.approx([alone, now, later])
    assert ms(host_seconds(V2_LITE, CALLED, 1, ONE)) == pytest.approx(8)


@pytest.mark.parametrize(("exposed", "expected"), [(1, 64 + 32), (0.5, 64 / 2 + 32), (0.25, 64)])
def test_arithmetic_hides_no_more_of_the_bytes_time_than_measured(exposed, expected):
    """64 experts take 64 ms, and the arithmetic of all rows but their first 32."""
    host = CALLED._replace(call=0, latency=0, exposed=exposed, flops=2 * (4096 * 6 - 64) * EXPERT / 32e-3)
    assert ms(host_seconds(V2_LITE, host, 4096, ONE)) == pytest.approx(expected)


@pytest.mark.parametrize(("tokens", "rows"), [(64, 6), (256, 24), (341, 32), (352, 33), (1024, 96)])
def test_an_experts_time_rises_evenly_to_that_of_some_tokens(tokens, rows):
    """64 experts of 1 ms by their bytes, and by arithmetic 0.1 a row; where codes are converted, which takes half as long."""
    host = CALLED._replace(call=0, latency=0, exposed=1.5, flops=2 * EXPERT / 0.1e-3)
    expected = 1 + (rows - 1) / 31 * (1.5 + 3.1 - 1) if rows < 32 else 1.5 + 0.1 * (rows - 1)
    assert ms(host_seconds(V2_LITE, host, tokens, ONE)) == pytest.approx(64 * expected, rel=0.01)


def test_two_calls_of_several_rows_read_more_than_one():
    """64 experts; a row misses one with chances of 58, 60 and 62 in 64 by 6, 4 and 2 choices. 8 rows."""
    free = CALLED._replace(call=0, latency=0)
    whole, now, later = 34.881, 25.810, 14.355
    assert ms(host_seconds(V2_LITE, free, 8, ONE)) == pytest.approx(whole, abs=1e-3)
    assert [ms(t) for t in host_calls(V2_LITE, free, 8, ONE, 2)[1:]] == pytest.approx([now, later], abs=1e-3)
    slow = free._replace(bandwidth=1e30, flops=1e9)
    sums = [ms(t) for t in host_calls(V2_LITE, slow, 8, ONE, 2)[1:]]
    assert sums == pytest.approx([1e3 * 2 * (8 * 4 - now) * EXPERT / 1e9, 1e3 * 2 * (8 * 2 - later) * EXPERT / 1e9], rel=1e-3)


@pytest.mark.parametrize(
    ("defer", "expected"),
    [
        (0, 27 + 26 * 8),
        (1, 27 + 25 * 7 + (7 + 1.5)),
        (2, 27 + 25 * 6 + (6 + 2.5)),  # 4.5 + 2.5 of the host, less a layer's time; as long as that until its answer
        (3, 27 + 25 * 6 + (5 + 3.5)),
    ],
)
def test_a_step_waits_for_the_host_which_computes_one_call_after_the_other(defer, expected):
    """A layer of the device takes 1 ms; what the last one defers has no layer to hide behind."""
    assert waiting(1, CALLED, defer) == pytest.approx(expected)


@pytest.mark.parametrize("defer", range(6))
@pytest.mark.parametrize("layer", [0.1, 1, 3, 20])
@pytest.mark.parametrize("rows", [1, 8])
def test_a_step_takes_as_long_as_its_calls_one_by_one(defer, layer, rows):
    """Followed through the layers. The host's answer is there after its way, or once the host is free."""
    alone, now, later = (ms(t) for t in host_calls(V2_LITE, CALLED, rows, ONE, defer))
    clock = free = 0.0
    for _ in range(26):
        answer = max(clock + alone, free + now)
        clock, free = answer + layer, answer + later
    end = max(clock, free + layer)  # the last layer's is waited for at once
    assert waiting(layer, CALLED, defer, rows) == pytest.approx(end + layer, rel=0.01)


def test_what_is_deferred_is_the_least_that_is_fastest_within_what_predictions_are_worth():
    def best(layer: float, host: Host, rows: int = 1) -> int:
        on = Device("", "gpu", math.inf, math.inf, layer / 1e3)
        return best_defer(V2_LITE, on, rows, 1024, host, 26, ONE)

    free = CALLED._replace(call=0, latency=0)
    assert best(1, CALLED) == 2  # 235, 210.5, 185.5, 185.5, ..
    assert best(0.2, free) == 1  # 161.4, 156.4, 156.4, ..: 3.2 %
    assert best(0.15, free) == 0  # 160.1, 156.3, ..: 2.4 %
    assert best(1, CALLED._replace(call=2e-3)) == 0  # a second call takes more than a layer hides
    assert best(1, free, rows=8) == 0  # two calls of 8 rows read more than that


@pytest.mark.parametrize(("rows", "measured"), [(1, 2.39), (8, 5.94), (64, 11.14)])
def test_steps_of_v2_lite_on_an_h200_are_predicted_within_ten_percent(rows, measured):
    assert ms(decode_seconds(V2_LITE, H200, rows, 4096)) == pytest.approx(measured, rel=0.1)


# hot experts: two of four on the device; a token chooses two, each as likely as any other

HALF = Routed(np.full((1, 4), 0.5), np.array([[True, True, False, False]]))


@pytest.mark.parametrize(
    ("tokens", "defer", "now", "later"),
    [  # none, one or two of a token's are the host's, with chances of a quarter, a half and a quarter
        (1, 0, Part(1, 0.75), Part(0, 0)),
        (1, 1, Part(0.25, 0.25), Part(0.75, 0.75)),
        (1, 2, Part(0, 0), Part(1, 0.75)),
        (2, 1, Part(0.25, 1 - 0.75**2), Part(0.75, 1 - 0.25**2)),
    ],
)
def test_of_what_the_host_computes_of_a_token_the_last_are_later(tokens, defer, now, later):
    found = HALF.parts(tokens, 2, defer)
    for part, expected in zip(found, (now, later), strict=True):
        assert part == pytest.approx(expected)


def test_a_call_without_experts_takes_nothing():
    config = Config.preset("v2_lite", n_routed_experts=4, num_experts_per_tok=2)
    found = [ms(t) for t in host_calls(config, CALLED, 1, ONE, 1, HALF)]
    assert found == pytest.approx([0.25 * 2 + 0.25, 0.25 * 0.5 + 0.25, 0.75 * 0.5 + 0.75])


def test_a_prompt_takes_the_time_of_where_its_experts_are_computed():
    def seconds(stream: int, layers: int = 26) -> float:
        return prefill_seconds(V2_LITE, H200, 4096, SERVER, layers, EXPERT, stream)

    brought, computed = stream_seconds(V2_LITE, H200, SERVER, 4096, EXPERT), host_seconds(V2_LITE, SERVER, 4096, EXPERT)
    shared = 2 * 4096 * 2 * EXPERT / 811e12  # beside the host
    assert seconds(0) - seconds(4096) == pytest.approx(26 * (computed - shared - brought))
    assert seconds(4097) == seconds(0)
    assert prefill_seconds(V2_LITE, H200, 4096) == seconds(1, layers=0) < seconds(1)


def test_a_prompt_has_the_device_compute_the_experts_that_it_holds_beside_the_host():
    """A half of all, so 3 of a token's 6: with many tokens by arithmetic, with few by their bytes."""
    half = Routed(np.full((26, 64), 6 / 64), np.arange(64) % 2 == np.zeros((26, 1)))
    endless = Host("", math.inf, math.inf, 0, 0, 1e9)

    def seconds(new: int, host: Host, routed: Routed | None = None) -> float:
        return prefill_seconds(V2_LITE, H200, new, host, 26, EXPERT, routed=routed)

    assert seconds(4096, endless, half) - seconds(4096, endless) == pytest.approx(26 * 2 * 4096 * 3 * EXPERT / 811e12)
    assert seconds(64, endless, half) - seconds(64, endless) == pytest.approx(26 * 2 * 31.942 * EXPERT / 4.56e12, rel=1e-4)
    shared, computed = 2 * 4096 * 2 * EXPERT / 811e12, host_seconds(V2_LITE, SERVER, 4096, EXPERT, half)
    slow = seconds(4096, SERVER, half) - seconds(4096, endless)
    assert slow == pytest.approx(26 * (computed - shared))
    assert computed == pytest.approx(33e-6 + 32 * EXPERT / 245e9 + 2 * (4096 * 3 - 32) * EXPERT / 21e12)
