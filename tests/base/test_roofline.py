"""The cost model against numbers worked out by hand, and the choice of form that follows from it."""

import math

import pytest

from mla_jax.base.config import Config
from mla_jax.base.roofline import (
    BLOCK,
    BLOCK_ELSEWHERE,
    DEVICES,
    Device,
    active_weights,
    attention_cost,
    block_bytes,
    block_slots,
    break_even,
    chunk,
    device,
    mtp_seconds,
    pass_seconds,
    pick_form,
    why_form,
)

SMALL = Config(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8,
    kv_lora_rank=10, q_lora_rank=None, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=5,
)  # fmt: skip
FREE_MEMORY = Device("infinite bandwidth", "gpu", 1e12, math.inf)
ONLY_MEMORY = Device("infinite arithmetic, a gigabyte a second", "gpu", math.inf, 1e9, 0.0)
ONLY_ARITHMETIC = Device("infinite bandwidth, a teraflop a second", "gpu", 1e12, math.inf, 0.0)

# DeepSeek-V2-Lite as published: 27 layers of width 2048, the first one dense with 10,944; 16 heads of 128 + 64 and values of 128
# over latents of 512 + 64; of 64 experts with 1,408 six are chosen, two more are shared; 102,400 words.
LITE = Config.preset("v2_lite")
LITE_ATTENTION = 2048 * 16 * (128 + 64) + 2048 * (512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048  # 13.8 million
LITE_DENSE, LITE_EXPERT, LITE_ROUTER = 3 * 2048 * 10_944, 3 * 2048 * 1408, 2048 * 64
LITE_HEAD = 102_400 * 2048


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


def lite_weights(experts: float) -> float:
    """Weights of a pass that reads so many routed experts in each layer: embeddings are looked up, a few rows of them."""
    layers = 27 * LITE_ATTENTION + LITE_DENSE + 26 * ((experts + 2) * LITE_EXPERT + LITE_ROUTER)
    return layers + LITE_HEAD


def touched(tokens: int) -> float:
    """Each of 64 experts is left out by a token with a probability of 58 / 64."""
    return 64 - 64 * (58 / 64) ** tokens


def test_a_token_of_v2_lite_is_multiplied_by_the_published_2_4_billion_weights():
    by_hand = lite_weights(experts=6)
    assert by_hand == 371_589_120 + 67_239_936 + 26 * (69_206_016 + 131_072) + 209_715_200
    assert active_weights(LITE) == pytest.approx(by_hand, rel=2e-3)  # a router is not worth a term
    assert 2.4e9 < active_weights(LITE) < 2.5e9


@pytest.mark.parametrize(("preset", "billions"), [("v2", 21), ("v3", 37), ("kimi_k2", 32)])
def test_a_token_is_multiplied_by_as_many_weights_as_the_papers_say(preset, billions):
    assert round(active_weights(Config.preset(preset)) / 1e9) == billions


def test_all_weights_of_a_dense_model_are_active():
    # query 8 x 14, latents 8 x 14, keys and values 10 x 16, output 10 x 8; then 3 x 8 x 8, and the head 8 x 8
    assert active_weights(SMALL) == 112 + 112 + 160 + 80 + 192 + 64


@pytest.mark.parametrize(("platform", "itemsize"), [("gpu", 2), ("tpu", 2), ("cpu", 4)])
@pytest.mark.parametrize(("rows", "held", "drafts"), [(1, 0, 0), (1, 1024, 3), (8, 4096, 1)])
def test_a_pass_reads_weights_the_experts_that_its_tokens_touch_and_the_latents(rows, held, drafts, platform, itemsize):
    numbers = lite_weights(touched(rows * (1 + drafts))) + 27 * rows * held * (512 + 64)
    on = ONLY_MEMORY._replace(platform=platform)
    assert pass_seconds(LITE, on, rows, held, drafts, most=3) == pytest.approx(itemsize * numbers / 1e9)


def test_at_batch_1_a_pass_with_guesses_reads_more_experts_and_nothing_else_more():
    plain = pass_seconds(LITE, ONLY_MEMORY, 1, 4096, 0, 0)
    for drafts in (1, 3, 7):
        more = pass_seconds(LITE, ONLY_MEMORY, 1, 4096, drafts, drafts) - plain
        assert more == pytest.approx(2 * 26 * (touched(1 + drafts) - 6) * LITE_EXPERT / 1e9)
    assert touched(2) - 6 == pytest.approx(5.4375)  # of the second token's six half a one is there already
    assert pass_seconds(SMALL, ONLY_MEMORY, 1, 4096, 7, 7) == pass_seconds(SMALL, ONLY_MEMORY, 1, 4096, 0, 0)


@pytest.mark.parametrize(("rows", "held", "most"), [(1, 0, 0), (1, 4096, 3), (64, 1024, 7)])
def test_the_most_guesses_decide_the_arithmetic_however_many_there_are(rows, held, most):
    over_latents = 27 * 16 * held * ((512 + 64) + 512)  # scores of a token with each held one, and their mean
    by_hand = 2 * rows * (1 + most) * (over_latents + lite_weights(experts=6)) / 1e12
    times = {pass_seconds(LITE, ONLY_ARITHMETIC, rows, held, drafts, most) for drafts in range(1 + most)}
    assert len(times) == 1
    assert times.pop() == pytest.approx(by_hand, rel=0.002)


def test_a_pass_takes_the_slower_of_memory_and_arithmetic_and_what_goes_beside_them_in_each_layer():
    on = DEVICES["NVIDIA H200"]
    for rows in (1, 1024):
        bytes = pass_seconds(LITE, ONLY_MEMORY, rows, 1024, 3, 3) * 1e9
        flops = pass_seconds(LITE, ONLY_ARITHMETIC, rows, 1024, 3, 3) * 1e12
        assert (flops / on.flops > bytes / on.bandwidth) == (rows == 1024)
        slower = max(flops / on.flops, bytes / on.bandwidth)
        assert pass_seconds(LITE, on, rows, 1024, 3, 3) == pytest.approx(slower + 27 * on.between)


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_a_guess_of_the_layer_for_multi_token_prediction_reads_that_layer_and_the_head(rows):
    joined = 2 * 2048 * 2048  # a hidden state and an embedding to one width
    numbers = joined + LITE_ATTENTION + (touched(rows) + 2) * LITE_EXPERT + LITE_ROUTER + LITE_HEAD
    assert mtp_seconds(LITE, ONLY_MEMORY, rows) == pytest.approx(2 * numbers / 1e9, rel=1e-3)
    late = ONLY_MEMORY._replace(between=0.5)
    assert mtp_seconds(LITE, late, rows) == pytest.approx(mtp_seconds(LITE, ONLY_MEMORY, rows) + 1)


def test_a_guess_of_v3_takes_a_twentieth_of_a_pass():
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    numbers = 2 * 7168**2 + attention + 9 * 3 * 7168 * 2048 + 7168 * 256 + 129_280 * 7168  # 1.6 billion, the head most of them
    guess, plain = (
        f(Config.preset("v3"), ONLY_MEMORY, *given) for f, given in ((mtp_seconds, (1,)), (pass_seconds, (1, 0, 0, 0)))
    )
    assert guess == pytest.approx(2 * numbers / 1e9, rel=2e-3)
    assert guess / plain == pytest.approx(1.6 / 36.5, rel=0.02)


def test_the_layer_of_a_dense_model_has_the_network_that_its_layers_have():
    assert mtp_seconds(SMALL, ONLY_MEMORY, 3) == pytest.approx(2 * (2 * 64 + 464 + 192 + 64) / 1e9)
