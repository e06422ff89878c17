"""The cost model of experts on the host against numbers worked out by hand."""

import dataclasses
import functools
import math

import numpy as np
import pytest
from costs import H200, released_cost

from mla_jax.base.config import Config
from mla_jax.base.roofline import Cost
from mla_jax.mesh.cost import ARITHMETIC, MEMORY, MeshCost, Pass
from mla_jax.mesh.host_cost import (
    HostRates,
    OnHost,
    Routed,
    fewest,
    host_seconds,
    stream_seconds,
    stream_tokens,
)

V2_LITE = Config.preset("v2_lite")  # 26 layers with 64 experts, of which 6 are chosen
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


@functools.cache
def on_device() -> MeshCost:
    return released_cost(V2_LITE)


def cost(rates: HostRates, routed: Routed = EVENLY, layers: int = 26, size: int = EXPERT, stream: int = 0, **changes) -> MeshCost:
    """The model on an H200 with these layers' experts on a host; `changes` are of the device."""
    device = on_device().device._replace(**changes)
    return dataclasses.replace(on_device(), device=device, on_host=OnHost(rates, layers, size, routed), stream=stream)


def test_a_step_waits_in_each_layer_for_what_the_host_takes_longer_than_the_shared_experts():
    """Of a device whose memory takes no time: 27 layers of 1 ms, in 26 of which 6 experts take 6 ms and a call 2."""
    free = {"flops": math.inf, "bandwidth": math.inf, "between": 1e-3}
    for routed, layers, waited in ((EVENLY, 26, 26 * 8e-3), (HALF, 26, 26 * 5e-3), (EVENLY, 0, 0.0)):
        found = cost(CALLED, routed, layers, ONE, **free).decode(1, 1024)
        assert found.seconds == pytest.approx(27e-3 + waited)
        assert found.host == pytest.approx(waited)


def test_a_host_that_is_fast_enough_hides_behind_the_shared_experts():
    """Then a step reads all but the routed experts, of which replicas are read on the device."""
    endless, work = HostRates("", math.inf, math.inf, 0.0, 1e9), Pass(1, 1, 1024)
    everything = on_device().read_bytes(work)
    for routed, moved in ((EVENLY, 6), (HALF, 3)):
        found = cost(endless, routed)
        assert found.read_bytes(work) == pytest.approx(everything - 26 * moved * 2 * EXPERT)
        saved = 26 * moved * 2 * EXPERT / (MEMORY * H200.bandwidth)
        assert on_device().decode(1, 1024).seconds - found.decode(1, 1024).seconds == pytest.approx(saved)


def test_a_prompt_takes_the_time_of_where_its_experts_are_computed():
    def seconds(stream: int, layers: int = 26) -> float:
        return cost(SERVER, layers=layers, stream=stream).predicted(Pass(1, 4096, 4096)).seconds

    streamed, computed = stream_seconds(V2_LITE, H200, SERVER, 4096, EXPERT), host_seconds(V2_LITE, SERVER, 4096, EXPERT)
    shared = 2 * 4096 * 2 * EXPERT / (ARITHMETIC * 811e12)  # while the host computes
    assert seconds(0) - seconds(4096) == pytest.approx(26 * (computed - shared - streamed))
    assert seconds(4097) == seconds(0)
    assert on_device().predicted(Pass(1, 4096, 4096)).seconds == pytest.approx(seconds(1, layers=0))
    assert seconds(1, layers=0) < seconds(1)


def test_the_device_computes_replicas_while_the_host_computes():
    """A half of all, so 3 of a token's 6: with many tokens by arithmetic, with few by their bytes."""
    endless = HostRates("", math.inf, math.inf, 0, 1e9)

    def more(new: int) -> float:
        half, none = (cost(endless, routed).predicted(Pass(1, new, new)).seconds for routed in (HALF, EVENLY))
        return half - none

    assert more(4096) == pytest.approx(26 * 2 * 4096 * 3 * EXPERT / (ARITHMETIC * 811e12))
    assert more(64) == pytest.approx(26 * 2 * 31.942 * EXPERT / (MEMORY * 4.56e12), rel=1e-4)
