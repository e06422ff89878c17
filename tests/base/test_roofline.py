"""The cost model against numbers worked out by hand, and the choice of form that follows from it."""

import math

import pytest

from mla_jax.base.config import Config
from mla_jax.base.roofline import (
    BLOCK,
    BLOCK_ELSEWHERE,
    DEVICES,
    Device,
    attention_cost,
    block_bytes,
    block_slots,
    break_even,
    chunk,
    device,
    pick_form,
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


@pytest.mark.parametrize(
    ("preset", "kind", "tokens"),
    [
        ("v2_lite", "cpu", 512),
        ("v2_lite", "NVIDIA H100", 4096),
        ("v3", "NVIDIA H200", 8192),  # 178 operations a byte, 32 tokens for each that an expert computes: 5,692
        ("kimi_k2", "NVIDIA H100", 16384),  # 293 and 48: 14,044
    ],
)
def test_a_chunk_has_so_many_tokens_that_experts_compute_while_they_are_read(preset, kind, tokens):
    assert chunk(Config.preset(preset), DEVICES[kind]) == tokens


@pytest.mark.parametrize(
    ("preset", "shards", "tokens"), [("v3", 1, 8192), ("v3", 2, 4096), ("v3", 8, 1024), ("v3", 3, 2048), ("v3", 64, 512)]
)
def test_data_shards_share_a_chunk_for_an_expert_gets_the_tokens_of_all(preset, shards, tokens):
    assert chunk(Config.preset(preset), DEVICES["NVIDIA H200"], shards) == tokens
    assert chunk(Config.preset(preset), DEVICES["cpu"], shards) == 512


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


@pytest.mark.parametrize(("new", "held"), [(1, 4096), (64, 0), (512, 0), (512, 7600)])
def test_on_a_cpu_no_form_rebuilds_heads(new, held):
    for preset in ("v2_lite", "v3"):
        assert pick_form(Config.preset(preset), DEVICES["cpu"], 1, new, held + new) == "move_elided"


def test_the_slower_of_arithmetic_and_memory_takes_the_time():
    cost = attention_cost(SMALL, "naive", 1, 1, 100)
    assert cost.seconds(Device("", "gpu", cost.flops, cost.bytes / 3)) == pytest.approx(3)
    assert cost.seconds(Device("", "gpu", cost.flops / 5, cost.bytes)) == pytest.approx(5)


def test_the_reason_names_both_forms_and_what_bounds_them():
    said = why_form(Config.preset("v3"), DEVICES["NVIDIA H200"], "move_elided", 1, 1, 4096)
    assert said.startswith("move_elided ")
    assert "; compressed " in said
    assert "by memory" in said


def test_devices_are_known_by_the_start_of_their_kind_and_others_never_take_another_ones_figures():
    assert device("NVIDIA H100 80GB HBM3", "gpu") is DEVICES["NVIDIA H100"]
    assert device("TPU v5 lite", "tpu") is DEVICES["TPU v5 lite"]
    assert device("cpu", "cpu") is DEVICES["cpu"]
    assert device("EPYC", "cpu") == DEVICES["cpu"]._replace(name="EPYC")
    for name, platform in (("NVIDIA X1", "gpu"), ("TPU v9", "tpu")):
        unknown = device(name, platform)
        assert (unknown.name, unknown.platform, unknown.known) == (name, platform, False)
        assert unknown.flops not in {known.flops for known in DEVICES.values()}
        assert unknown.bandwidth not in {known.bandwidth for known in DEVICES.values()}


def test_the_bytes_of_a_block_are_those_worked_out_by_hand():
    # 3 rows, 7 new tokens, 20 slots, 2 heads: scores and weights in float32, keys of 7 and values of 5 numbers, made and joined
    assert block_bytes(SMALL, 3, 7, 20, 2) == 2 * 4 * 3 * 2 * 7 * 20 + 2 * 2 * 3 * 2 * 20 * 12


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("rows", [1, 8, 64, 1024])
@pytest.mark.parametrize("new", [1, 8, 64, 512, 8192])
def test_blocks_are_powers_of_two_whose_bytes_stay_below_a_bound(platform, rows, new):
    config = Config.preset("v3")
    most, budget = BLOCK.get(platform, BLOCK_ELSEWHERE)
    block = block_slots(config, platform, rows, new, 2)
    assert block in [2**n for n in range(6, 13)]
    assert block <= most
    if block > 64:
        assert block_bytes(config, rows, new, block, 2) <= budget
    if block < most:
        assert block_bytes(config, rows, new, 2 * block, 2) > budget
