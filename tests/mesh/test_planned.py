"""Devices that are not here: a mesh with a table's figures and memory, which no program can use."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.base.link_rates import PLANNED
from mla_jax.base.options import MEMORY_FRACTION
from mla_jax.mesh.devices import Devices
from mla_jax.mesh.planned import planned


def test_a_mesh_of_more_devices_than_there_are_can_be_planned_for():
    devices = planned("h200", {"data": 64, "tensor": 2})
    assert isinstance(devices, Devices)
    assert devices.count == 128
    assert devices.sizes == {"data": 64, "tensor": 2, "context": 1}
    assert devices.platform == "gpu"
    assert devices.figures.name == "NVIDIA H200"


@pytest.mark.parametrize("kind", PLANNED)
def test_the_memory_is_a_fraction_of_the_table_s(kind):
    assert planned(kind, {}).free_bytes() == int(MEMORY_FRACTION * PLANNED[kind].memory)
    assert planned(kind, {}, 0.9).free_bytes() == int(0.9 * PLANNED[kind].memory)


def test_parts_of_arrays_follow_from_the_mesh_without_any_device(monkeypatch):
    for asked in ("devices", "local_devices"):
        monkeypatch.setattr(jax, asked, lambda *_: pytest.fail("a device was asked for"))
    sharding = NamedSharding(planned("b200", {"data": 8}).mesh, PartitionSpec("data"))
    assert sharding.shard_shape((256, 7)) == (32, 7)
    array = jax.ShapeDtypeStruct((256, 7), jnp.bfloat16, sharding=sharding)
    assert array.sharding == sharding


def test_a_kind_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(BadRequest, match="h300") as found:
        planned("h300", {})
    for kind in PLANNED:
        assert kind in str(found.value)


def test_a_program_for_them_is_refused():
    with pytest.raises(Unsupported, match="no NVIDIA H100 here"):
        _ = planned("h100", {"data": 2}).first
