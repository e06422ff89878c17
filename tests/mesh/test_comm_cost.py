"""Messages between devices: bytes counted by hand, traffic from another host, and the chosen exchange."""

import itertools

import pytest

from mla_jax.base.config import Config
from mla_jax.base.link_rates import LINKS, PLANNED, Links, links_of
from mla_jax.base.roofline import DEVICES, Device, device
from mla_jax.mesh.comm_cost import EXCHANGE_COSTS, ORDERING, ROUTING, Speech, exchange_messages, pick_exchange

V3, LITE = (Config.preset(name) for name in ("v3", "v2_lite"))
H200 = DEVICES["NVIDIA H200"]
LATENCY, TO_ALL = 26e-6, 160e9  # of an H200: seconds of a collective that carries nothing, and bytes/s that it receives of others


def test_an_all_to_all_sends_each_token_once_to_each_device_that_has_its_experts_and_their_sums_back():
    devices = 8 * (1 - (7 / 8) ** 8)  # 5.25 of eight have one of eight experts
    found = exchange_messages("all_to_all", V3, {"data": 8}, 8192, H200)
    assert found.bytes == pytest.approx(2 * 7 / 8 * devices * 8192 * 7168 * 2 + 7 / 8 * 4 * 8)
    ordered = ORDERING * 8 * 8192 * 7168 * 2 / H200.bandwidth  # there is room for the tokens of all
    assert found.seconds == pytest.approx(ROUTING + ordered + 3 * LATENCY + found.bytes / TO_ALL)
    shared = exchange_messages("all_to_all", V3, {"data": 2, "tensor": 4}, 8192, H200)  # of which a device sends its quarter
    own = 2048 * 7168 * 2
    assert shared.bytes == pytest.approx(2 * 7 / 8 * devices * own + 7 / 8 * 4 * 8 + 3 * own)


def test_what_comes_from_another_host_takes_the_network():
    speech = Speech({"data": 16}, Links(ring=100.0, to_all=100.0, island=8, far=1.0, latency=0.0))
    assert speech.gathered(1.0, ("data",)).seconds == pytest.approx(7 / 100 + 8 / 8)  # eight cards share the way
    assert speech.swapped(16.0, ("data",)).seconds == pytest.approx(7 / 100 + 8)
    inner = Speech({"data": 2, "tensor": 8}, speech.links)
    assert inner.gathered(1.0, ("tensor",)).seconds == pytest.approx(7 / 100)
    assert inner.gathered(1.0, ("data",)).seconds == pytest.approx(1)


@pytest.mark.parametrize("name", DEVICES)
def test_one_device_exchanges_nothing_and_few_tokens_are_gathered(name):
    on = DEVICES[name]
    assert pick_exchange(V3, {}, 1 << 20, on) == "gather"
    assert pick_exchange(V3, {"data": 8}, 1, on) == "gather"


def test_many_tokens_of_many_devices_go_to_their_experts_alone():
    for config, tokens, devices in ((LITE, 64, 8), (V3, 1024, 8), (V3, 1024, 16), (LITE, 64, 64)):
        assert pick_exchange(config, {"data": devices}, tokens, H200) == "gather"
    for config, tokens, devices in ((LITE, 1 << 16, 8), (V3, 64, 256), (LITE, 4096, 64)):
        assert pick_exchange(config, {"data": devices}, tokens, H200) == "all_to_all"
    assert pick_exchange(LITE, {"tensor": 2}, 1 << 16, H200) == "gather"  # these have all tokens already


def test_many_tokens_are_gathered_where_an_all_to_all_sends_about_as_many_bytes_in_more_messages():
    tokens = 40_000
    gathered, sent = (exchange_messages(name, V3, {"data": 2}, tokens, H200).bytes for name in ("gather", "all_to_all"))
    assert gathered == 2 * tokens * 7168 * 2 > 1 << 30
    assert sent == pytest.approx(gathered, rel=5e-3)
    assert pick_exchange(V3, {"data": 2}, tokens, H200) == "gather"


def test_the_exchange_that_is_taken_is_the_faster_one():
    for sizes in ({"data": 2}, {"data": 8}, {"data": 4, "tensor": 2}, {"data": 2, "context": 4}, {"tensor": 8}):
        for config, tokens in itertools.product((LITE, V3), (1, 64, 1024, 1 << 16)):
            taken = pick_exchange(config, sizes, tokens, H200)
            times = {name: exchange_messages(name, config, sizes, tokens, H200).seconds for name in EXCHANGE_COSTS}
            assert times[taken] == min(times.values())


def test_every_device_of_the_tables_has_links():
    assert {on.name for on in DEVICES.values()} == set(LINKS)
    assert links_of(device("NVIDIA H100 80GB HBM3", "gpu")) is LINKS["NVIDIA H100"]
    for unknown in (Device("NVIDIA X1", "gpu", 1.0, 1.0), Device("TPU v9", "tpu", 1.0, 1.0)):
        assert links_of(unknown) not in LINKS.values()
    for kind in PLANNED.values():
        assert kind.links is LINKS[kind.figures.name]
