"""The devices of a model as one object."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mla_jax.base.devices import Devices
from mla_jax.base.roofline import DEVICES


class FakeDevice:
    def __init__(self, stats: dict | None):
        self.stats = stats

    def memory_stats(self) -> dict | None:
        return self.stats


@pytest.fixture
def telling(monkeypatch):
    """`telling(stats)` are devices whose runtime says this of its memory."""

    def devices(stats: dict | None) -> Devices:
        whole = Devices.default()
        monkeypatch.setattr(Devices, "first", FakeDevice(stats))
        return dataclasses.replace(whole, figures=DEVICES["NVIDIA H200"])

    return devices


def test_the_default_is_a_mesh_of_the_first_device():
    devices = Devices.default()
    assert devices.first == jax.devices()[0]
    assert devices.mesh.size == 1
    assert devices.figures == DEVICES["cpu"]


def test_arrays_are_put_on_all_devices_of_the_mesh():
    devices = Devices.default()
    x = jax.device_put(jnp.arange(3.0), devices.replicated)
    assert x.sharding.device_set == set(devices.mesh.devices.flat)


def test_free_memory_is_what_the_limit_leaves(telling):
    assert telling({"bytes_limit": 100, "bytes_in_use": 30}).free_bytes() == 70
    assert telling(None).free_bytes() is None
    assert telling({}).free_bytes() is None


def test_a_peak_that_the_device_does_not_tell_is_unknown_not_zero(telling):
    assert telling({"peak_bytes_in_use": 5}).peak_bytes() == 5
    assert telling({"peak_bytes_in_use": 0}).peak_bytes() is None
    assert telling(None).peak_bytes() is None
