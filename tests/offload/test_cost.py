"""The cost model of experts on the host against numbers worked out by hand."""

import math

import numpy as np
import pytest

from mla_jax.base.config import Config
from mla_jax.base.roofline import DEVICES, Cost, Device, decode_bytes
from mla_jax.offload.cost import (
    HostRates,
    OnHost,
    Routed,
    decode_seconds,
    fewest,
    host_seconds,
    prefill_seconds,
    stream_seconds,
    stream_tokens,
)

V2_LITE, H200 = Config.preset("v2_lite"), DEVICES["NVIDIA H200"]  # 26 layers with 64 experts, of which 6 are chosen
SERVER = HostRates("a server", 245e9, 21e12, 33e-6, 50e9)
EXPERT = 3 * 2048 * 1408  # numbers
ONE = 1_000_000  # bytes of an expert that takes a millisecond
CALLED = HostRates("", 1e9, math.inf, 2e-3, 1e9)
EVENLY = Routed.evenly(V2_LITE)
HALF = Routed(np.full((26, 64), 6 / 64), np.arange(64) % 2 == np.zeros((26, 1)))  # a half of all is replicated


def test_a_call_takes_the_slower_of_memory_and_arithmetic_and_its_own_time():
    rates = HostRates("", 10.0, 100.0, 0.5, 1.0)
    assert rates.seconds(Cost(flops=200, bytes=50)) == 5.5
    assert rates.seconds(Cost(flops=2000, bytes=50)) == 20.5


def test_one_token_reads_its_experts_and_many_tokens_all_of_them_once():
    assert host_seconds(V2_LITE, CALLED, 1, ONE) == pytest.approx(2e-3 + 6e-3)
    assert host_seconds(V2_LITE, CALLED, 10_000, ONE) == pytest.approx(2e-3 + 64e-3)
    assert host_seconds(V2_LITE, CALLED, 8, ONE) == pytest.approx(2e-3 + 64e-3 * (1 - (58 / 64) ** 8))


def test_many_tokens_are_bound_by_arithmetic():
    assert host_seconds(V2_LITE, SERVER, 4096, EXPERT) == pytest.approx(33e-6 + 2 * 4096 * 6 * EXPERT / 21e12)


def test_replicas_take_work_from_the_host_and_a_call_without_experts_takes_nothing():
    assert host_seconds(V2_LITE, CALLED, 1, ONE, HALF) == pytest.approx(2e-3 + 3e-3)
    half = host_seconds(V2_LITE, SERVER, 4096, EXPERT, HALF)
    assert half == pytest.approx(33e-6 + 2 * 4096 * 3 * EXPERT / 21e12)
    everything = Routed(HALF.chosen, np.ones((26, 64), bool))
    assert host_seconds(V2_LITE, CALLED, 1, ONE, everything) == 0


def test_streaming_takes_the_link_then_memory_then_arithmetic():
    seconds = stream_seconds(V2_LITE, H200, SERVER, 4096, 2 * EXPERT)
    packed, flops = 64 * 2 * EXPERT, 2 * 4096 * 6 * EXPERT
    assert seconds == pytest.approx(packed / 50e9 + 2 * packed / 4.56e12 + flops / 811e12)


@pytest.mark.parametrize("size", [2 * EXPERT, EXPERT, EXPERT / 2])
def test_experts_are_streamed_from_the_fewest_tokens_with_which_that_is_faster(size):
    def gains(n: int) -> bool:
        return stream_seconds(V2_LITE, H200, SERVER, n, size) < host_seconds(V2_LITE, SERVER, n, size)

    tokens = stream_tokens(V2_LITE, H200, SERVER, size)
    assert [gains(n) for n in (tokens - 1, tokens)] == [False, True]
    assert 64 < tokens < 8192


def test_over_a_link_that_is_too_slow_experts_are_never_streamed():
    assert stream_tokens(V2_LITE, H200, SERVER._replace(link=1.0), EXPERT) == 0


@pytest.mark.parametrize(("first", "most"), [(1, 1), (1, 8), (5, 8), (8, 8), (1000, 1 << 20)])
def test_the_fewest_is_found(first, most):
    assert fewest(lambda n: n >= first, most) == first
    assert fewest(lambda n: False, most) == 0


@pytest.mark.parametrize(("rows", "measured"), [(1, 2.39), (8, 5.94), (64, 11.14)])
def test_steps_of_v2_lite_on_an_h200_are_predicted_within_ten_percent(rows, measured):
    assert 1e3 * decode_seconds(V2_LITE, H200, rows, 4096) == pytest.approx(measured, rel=0.1)


def test_a_step_waits_in_each_layer_for_what_the_host_takes_longer_than_the_shared_experts():
    """Of a device whose memory takes no time: 27 layers of 1 ms, in 26 of which 6 experts take 6 ms and a call 2."""
    device = Device("", "gpu", math.inf, math.inf, 1e-3)
    assert decode_seconds(V2_LITE, device, 1, 1024, OnHost(CALLED, 26, ONE, EVENLY)) == pytest.approx(27e-3 + 26 * 8e-3)
    assert decode_seconds(V2_LITE, device, 1, 1024, OnHost(CALLED, 26, ONE, HALF)) == pytest.approx(27e-3 + 26 * 5e-3)
    assert decode_seconds(V2_LITE, device, 1, 1024, OnHost(CALLED, 0, ONE, EVENLY)) == pytest.approx(27e-3)


def test_a_host_that_is_fast_enough_hides_behind_the_shared_experts():
    """Then a step reads all but the routed experts, of which replicas are read on the device."""
    endless = HostRates("", math.inf, math.inf, 0.0, 1e9)
    fixed, total = 27 * H200.between, decode_bytes(V2_LITE, 1, 1024)
    for routed, moved in ((EVENLY, 6), (HALF, 3)):
        expected = fixed + (total - 26 * moved * 2 * EXPERT) / H200.bandwidth
        assert decode_seconds(V2_LITE, H200, 1, 1024, OnHost(endless, 26, ONE, routed)) == pytest.approx(expected)


def test_a_prompt_takes_the_time_of_where_its_experts_are_computed():
    def seconds(stream: int, layers: int = 26) -> float:
        return prefill_seconds(V2_LITE, H200, 4096, OnHost(SERVER, layers, EXPERT, EVENLY), stream)

    streamed, computed = stream_seconds(V2_LITE, H200, SERVER, 4096, EXPERT), host_seconds(V2_LITE, SERVER, 4096, EXPERT)
    shared = 2 * 4096 * 2 * EXPERT / 811e12  # while the host computes
    assert seconds(0) - seconds(4096) == pytest.approx(26 * (computed - shared - streamed))
    assert seconds(4097) == seconds(0)
    assert prefill_seconds(V2_LITE, H200, 4096) == seconds(1, layers=0) < seconds(1)


def test_a_prompt_has_the_device_compute_the_replicas_while_the_host_computes():
    """A half of all, so 3 of a token's 6: with many tokens by arithmetic, with few by their bytes."""
    endless = HostRates("", math.inf, math.inf, 0, 1e9)

    def seconds(new: int, rates: HostRates, routed: Routed = EVENLY) -> float:
        return prefill_seconds(V2_LITE, H200, new, OnHost(rates, 26, EXPERT, routed))

    assert seconds(4096, endless, HALF) - seconds(4096, endless) == pytest.approx(26 * 2 * 4096 * 3 * EXPERT / 811e12)
    assert seconds(64, endless, HALF) - seconds(64, endless) == pytest.approx(26 * 2 * 31.942 * EXPERT / 4.56e12, rel=1e-4)
    shared, computed = 2 * 4096 * 2 * EXPERT / 811e12, host_seconds(V2_LITE, SERVER, 4096, EXPERT, HALF)
    assert seconds(4096, SERVER, HALF) - seconds(4096, endless) == pytest.approx(26 * (computed - shared))
