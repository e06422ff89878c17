"""The devices of a model as one object."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from mla_jax.base.errors import BadRequest, DoesNotFit
from mla_jax.base.roofline import DEVICES
from mla_jax.mesh.devices import Devices


class FakeDevice:
    def __init__(self, stats: dict | None):
        self.stats = stats

    def memory_stats(self) -> dict | None:
        return self.stats


@pytest.fixture
def telling(monkeypatch):
    """`telling(stats, ...)` are devices whose runtimes say this of their memory."""

    def devices(*stats: dict | None) -> Devices:
        whole = Devices.default()
        monkeypatch.setitem(vars(whole.mesh), "local_devices", [FakeDevice(each) for each in stats])
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


def test_of_several_devices_the_fullest_counts(telling):
    devices = telling({"bytes_limit": 100, "bytes_in_use": 30}, {"bytes_limit": 100, "bytes_in_use": 80})
    assert devices.free_bytes() == 20


@pytest.mark.parametrize(
    ("asked", "sizes"),
    [
        ({}, (1, 1, 1)),
        ({"data": 4, "tensor": 2}, (4, 2, 1)),
        ({"context": 2}, (1, 1, 2)),
        ({"tensor": 2, "data": 2, "context": 2}, (2, 2, 2)),
    ],
)
def test_an_axis_that_is_left_out_has_one_device(asked, sizes):
    devices = Devices.of(asked)
    assert devices.mesh.devices.shape == sizes == tuple(devices.sizes.values())
    assert list(devices.mesh.devices.flat) == jax.devices()[: devices.count]
    assert devices.platform == "cpu"


def test_a_mesh_of_ones_own_gets_the_axes_that_it_lacks_and_their_order():
    own = np.array(jax.devices()).reshape(4, 2)
    devices = Devices.of(Mesh(own, ("tensor", "data")))
    assert devices.sizes == {"data": 2, "tensor": 4, "context": 1}
    assert devices.mesh.devices[1, 2, 0] == own[2, 1]


def test_a_mesh_with_another_axis_is_refused():
    with pytest.raises(BadRequest, match="the mesh has an axis model\n  expected data, tensor, context"):
        Devices.of(Mesh(np.array(jax.devices()[:2]), ("model",)))


def test_more_devices_than_there_are_are_refused_with_what_there_is():
    with pytest.raises(DoesNotFit, match="the mesh data=8,tensor=2 needs 16 devices\n  8 are here: cpu\n  XLA_FLAGS"):
        Devices.of({"data": 8, "tensor": 2})
