"""The cost model against numbers worked out by hand, and the choice of form that follows from it."""

import math

import pytest

from mla_jax.base import roofline
from mla_jax.base.config import Config
from mla_jax.base.roofline import (
    DEVICES,
    Device,
    Host,
    attention_cost,
    break_even,
    chunk_tokens,
    device,
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
SERVER = Host("a server", 245e9, 21e12, 13e-6, 50e9)
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


def test_no_more_experts_are_deferred_than_hide_behind_the_next_layer():
    config, device = Config.preset("v3"), roofline.device("NVIDIA H200", "gpu")
    experts, size = 58, 44e6
    times = {}
    for bandwidth in (1e11, 1e12, 1e13):
        host = roofline.Host("", bandwidth, 1e15, 0, 1)
        times[bandwidth] = [roofline.decode_seconds(config, device, 1, 1024, host, experts, size, d) for d in range(8)]
        found = roofline.best_defer(config, device, 1, 1024, host, experts, size)
        assert times[bandwidth][found] <= 1.01 * min(times[bandwidth])
        assert found == 0 or times[bandwidth][found - 1] > 1.01 * min(times[bandwidth])
    assert roofline.best_defer(config, device, 1, 1024, roofline.Host("", 1e15, 1e18, 0, 1), experts, size) == 0


def test_a_prompt_takes_the_time_of_where_its_experts_are_computed():
    def seconds(stream: int, layers: int = 26) -> float:
        return prefill_seconds(V2_LITE, H200, 4096, SERVER, layers, EXPERT, stream)

    brought, computed = stream_seconds(V2_LITE, H200, SERVER, 4096, EXPERT), host_seconds(V2_LITE, SERVER, 4096, EXPERT)
    assert seconds(0) - seconds(4096) == pytest.approx(26 * (computed - brought))
    assert seconds(4097) == seconds(0)
    assert prefill_seconds(V2_LITE, H200, 4096) == seconds(1, layers=0) < seconds(1)
