"""Predictions for meshes: bytes and messages of a pass counted by hand, and how they follow sizes and rates."""

import math

import pytest
from costs import H200, released_cost

from mla_jax.base.config import Config
from mla_jax.base.roofline import DEVICES, Device
from mla_jax.mesh.comm_cost import pick_exchange
from mla_jax.mesh.cost import ARITHMETIC, MEMORY, Pass

V3, LITE, KIMI = (Config.preset(name) for name in ("v3", "v2_lite", "kimi_k2"))
RING, TO_ALL = 0.4 * 450e9, 160e9  # bytes/s that an H200 receives of others
LATENCY = 26e-6  # seconds of a collective that carries nothing
AGREED = 2 * 7 / 8 * 4  # bytes by which eight devices agree whether any row goes on
EXPERT = (1 + 4 / 128**2) * 3 * 7168 * 2048  # bytes of one of DeepSeek-V3's in FP8
ONLY_MEMORY = Device("endless arithmetic, a gigabyte a second", "gpu", 1e21, 1e9, 0.0)
ONLY_ARITHMETIC = Device("infinite bandwidth, a teraflop a second", "gpu", 1e12, math.inf, 0.0)


def test_a_step_of_v3_on_eight_data_shards_sends_tokens_to_all_devices_and_their_sums_back():
    sent, exchange = released_cost(V3, {"data": 8}).messages(tokens=32, unembedded=32)
    a_layer = 2 * 7 * 32 * 7168 * 2  # seven other shards' tokens, and seven others' sums of its own
    assert exchange == "gather"
    assert sent.bytes == 58 * a_layer + AGREED
    assert sent.seconds == pytest.approx(58 * (2 * LATENCY + a_layer / RING) + LATENCY, rel=1e-6)


@pytest.mark.deep
def test_a_step_of_v3_along_tensor_sums_after_heads_and_mlps_and_swaps_rows_of_logits():
    sent, _ = released_cost(V3, {"tensor": 8}).messages(tokens=32, unembedded=32)
    one = 2 * 7 / 8 * 32 * 7168 * 2
    sums = 61 + 3 + 58 + 1  # o_proj, dense layers, routed and shared experts together, the embedding
    logits = 7 / 8 * 4 * 32 * 129_280 / 8
    chosen = 7 * (4 + 1) * 32 / 8  # tokens, and whether their logits are fit
    assert sent.bytes == pytest.approx(sums * one + logits + chosen + AGREED, abs=1e-3)
    assert sent.seconds == pytest.approx((sums + 1 + 2 + 1) * LATENCY + (sent.bytes - logits) / RING + logits / TO_ALL)


def test_a_step_of_v3_along_context_merges_heads_over_latents_and_sums_experts():
    sent, _ = released_cost(V3, {"context": 8}).messages(tokens=32, unembedded=32)
    merged = 2 * 7 / 8 * 4 * 32 * 128 * (1 + 1 + 512)  # the largest score, the weights' sum and the latent's, in float32
    assert sent.bytes == pytest.approx(61 * merged + 58 * 2 * 7 / 8 * 32 * 7168 * 2 + AGREED, abs=1e-3)
    collectives = 2 * 61 + 58 + 1
    assert sent.seconds == pytest.approx(collectives * LATENCY + sent.bytes / RING)


def test_prompts_along_context_gather_latents_where_that_is_less_than_merging():
    cost = released_cost(V3, {"context": 8})
    merging, few, many = (cost.messages(tokens=4096, unembedded=1, prefilled=held)[0] for held in (0, 4096, 10**9))
    assert few.bytes == pytest.approx(61 * 7 / 8 * 4096 * 1152 + 58 * 2 * 7 / 8 * 4096 * 7168 * 2 + AGREED, abs=1e-3)
    assert many == merging
    assert merging.bytes > 10 * few.bytes


@pytest.mark.deep
@pytest.mark.parametrize("config", [LITE, V3, KIMI], ids=lambda config: config.model_type)
def test_a_mesh_of_one_sends_nothing_and_takes_its_parts_after_each_other(config):
    """Each part takes the slower of its arithmetic and its bytes, at the shares of the rates that kernels reach."""
    cost, work = released_cost(config), Pass(32)
    found = cost.predicted(work)
    each = [
        max(part.flops / (ARITHMETIC * H200.flops), part.bytes / (MEMORY * H200.bandwidth)) for part in cost.costs(work).values()
    ]
    assert found.messages.bytes == found.messages.seconds == found.host == 0
    assert 0 < found.seconds - sum(each) - config.num_hidden_layers * H200.between < 0.03 * sum(each)  # activations
    assert found.tokens == pytest.approx(32 / found.seconds)
    assert found.floor < sum(each)


@pytest.mark.parametrize(("rows", "held", "most"), [(1, 0, 0), (1, 4096, 3), (64, 1024, 7)])
def test_the_most_drafts_decide_the_arithmetic_however_many_there_are(rows, held, most):
    cost = released_cost(LITE, device=ONLY_ARITHMETIC)
    passes = [Pass(rows, 1 + most, held, choosing=1 + drafts) for drafts in range(1 + most)]
    (taken,) = {cost.predicted(work).seconds for work in passes}
    over_latents = 27 * 16 * held * ((512 + 64) + 512)  # scores of a token with each held one, and their mean
    attention = 2048 * 16 * (128 + 64) + 2048 * (512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048
    weights = 27 * attention + 3 * 2048 * 10_944 + 26 * (8 * 3 * 2048 * 1408 + 2048 * 64) + 102_400 * 2048
    assert taken == pytest.approx(2 * rows * (1 + most) * (over_latents + weights) / (ARITHMETIC * 1e12), rel=2e-3)


def test_at_batch_1_a_pass_with_drafts_reads_more_experts_and_hardly_anything_else_more():
    cost = released_cost(LITE, device=ONLY_MEMORY)
    plain, drafted = (cost.read_bytes(Pass(1, new, 4096)) for new in (1, 2))
    assert drafted - plain == pytest.approx(2 * 26 * 5.4375 * 3 * 2048 * 1408)  # of the second's six half a one is there already
    more = cost.predicted(Pass(1, 2, 4096)).seconds - cost.predicted(Pass(1, 1, 4096)).seconds
    assert more == pytest.approx((drafted - plain) / (MEMORY * 1e9), rel=0.02)


def test_experts_are_read_unevenly_so_the_device_with_most_of_them_is_waited_for():
    """Of 32 experts on each of eight devices: with one row in all one or two are touched there, with many all."""
    few, many = (released_cost(V3, {"data": 8}, device=ONLY_MEMORY).predicted(Pass(n, every=8 * n)) for n in (1, 64))
    assert few.seconds > 1.2 * (few.floor / MEMORY + few.messages.seconds)
    assert many.seconds < 1.1 * (many.floor / MEMORY + many.messages.seconds)


@pytest.mark.deep
def test_more_of_anything_costs_more_and_faster_devices_take_less():
    cost = released_cost(V3, {"data": 8})
    assert cost.decode(32, 8192).seconds > cost.decode(32, 4096).seconds > cost.decode(16, 4096).seconds
    assert cost.decode(64, 4096).tokens > cost.decode(32, 4096).tokens
    assert released_cost(V3, {"data": 8}, packed=False).decode().seconds > cost.decode().seconds
    faster = released_cost(V3, {"data": 8}, DEVICES["NVIDIA B200"])
    assert faster.decode().seconds < cost.decode().seconds
    assert faster.prompts().seconds / faster.prompts().tokens < cost.prompts().seconds / cost.prompts().tokens


def test_data_shards_decode_more_than_heads_that_all_hold_the_same_latents():
    """With as many rows in all: along tensor each device reads the latents of all rows."""
    by_data, by_tensor = (released_cost(LITE, {axis: 8}) for axis in ("data", "tensor"))
    assert by_data.decode(32, 16384).tokens > 1.5 * by_tensor.decode(8 * 32, 16384).tokens


def test_a_row_alone_touches_its_own_experts_on_all_devices_together():
    cost = released_cost(V3, {"data": 8})
    one_each, alone = cost.decode(1), cost.decode(1, every=1)
    touched = 256 * (1 - (1 - 8 / 256) ** 8)  # of eight rows; a row alone has eight, one on each device
    assert (one_each.floor - alone.floor) * H200.bandwidth == pytest.approx(58 * EXPERT * (touched - 8) / 8, rel=1e-6)
    assert alone.tokens == pytest.approx(1 / alone.seconds)
    assert one_each.tokens == pytest.approx(8 / one_each.seconds)


def test_along_context_a_device_reads_its_share_of_a_long_row():
    alone, shared = (released_cost(LITE, sizes).decode(1, 1 << 20).seconds for sizes in ({}, {"context": 8}))
    assert shared < 0.55 * alone


def test_prompts_take_their_arithmetic_and_what_is_written_between_matmuls():
    cost, expert = released_cost(LITE), 3 * 2048 * 1408
    dense = 2048 * (16 * 192 + 576) + 16 * 512 * 256 + 16 * 128 * 2048  # of attention, for each token
    numbers = 27 * dense + 26 * (8 * expert + 2048 * 64) + 3 * 2048 * 10944
    attended = 27 * 2 * 16 * (192 + 128) * 4096 / 2  # operations of a token
    flops = sum(part.flops for part in cost.costs(Pass(1, 4096, 4096)).values())
    assert flops == pytest.approx(4096 * (2 * numbers + attended), rel=0.03)
    written = 4096 * 2 * 2048 * (27 * 24 + 26 * 6 * (8 + 6 * 1408 / 2048))  # of each token, and of each with one of its experts
    by_hand = flops / (ARITHMETIC * H200.flops) + written / (MEMORY * H200.bandwidth) + 27 * H200.between
    assert cost.prompts(4096).seconds == pytest.approx(by_hand, rel=0.02)


def test_data_shards_of_a_model_without_experts_say_only_whether_any_row_goes_on():
    dense = Config.preset("v3", n_routed_experts=None, n_shared_experts=None, num_experts_per_tok=None)
    assert pick_exchange(dense, {"data": 8}, 1 << 20, H200) == "gather"
    assert released_cost(dense, {"data": 8}).decode().messages.bytes == AGREED
