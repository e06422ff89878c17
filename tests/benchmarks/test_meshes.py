"""The benchmark of meshes: its random models lie as a checkpoint's do, its cache is made in place, and its rows are sane."""

import argparse
import math

import jax
import jax.numpy as jnp
import meshes
import numpy as np
import pytest
from decode import randomized
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from random_models import random_model

from mla_jax import Config
from mla_jax.base.axes import MESH_AXES, parse_mesh
from mla_jax.base.qtensor import QTensor
from mla_jax.decode.program_sharding import Spread
from mla_jax.mesh.devices import Devices
from mla_jax.mesh.partition import Layout

TINY = meshes.SMALL | {"num_hidden_layers": 2}


@pytest.mark.parametrize("mesh", ["data=2", "data=2,tensor=2", "context=2"])
@pytest.mark.parametrize("model", ["v2_lite", "v3"])
def test_each_device_has_its_part_of_a_random_model(model, mesh):
    config, devices = Config.preset(model, **TINY), Devices.of(parse_mesh(mesh))
    plan = Layout(**devices.sizes)
    state = nnx.state(random_model(config, "fp8_block" if model == "v3" else "bf16", devices=devices))
    packed = 0
    for _, variable in nnx.to_flat_state(state):
        value, local = variable.get_value(), plan.local(variable.get_metadata()["axes"], variable.get_value())
        parts = jax.tree.leaves(local)
        assert [leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(value)] == [part.shape for part in parts]
        packed += isinstance(value, QTensor)
    assert (packed > 0) == (model == "v3")


def test_a_cache_is_filled_where_it_is_and_alike_on_devices_of_one_shard():
    spread = Spread(Devices.of({"data": 2, "tensor": 2}).mesh)
    empty = jax.device_put(jnp.zeros((8, 64)), NamedSharding(spread.mesh, PartitionSpec(MESH_AXES)))
    places = [shard.data.unsafe_buffer_pointer() for shard in empty.addressable_shards]
    found = randomized(spread, {"c_kv": empty})["c_kv"]
    assert [shard.data.unsafe_buffer_pointer() for shard in found.addressable_shards] == places
    one, same, other, _ = (np.asarray(shard.data) for shard in found.addressable_shards)
    assert (one == same).all()
    assert (one != other).any()


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["data=2", "tensor=2"])
def test_there_are_rows_for_decoding_drafts_and_prompts(mesh):
    options = argparse.Namespace(exchange="all_to_all", held=320, drafts=True, acceptance=0.85, profile=False)
    config = Config.preset("v2_lite", **TINY, num_nextn_predict_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meshes.speculative, "stands", meshes.is_odd)
        rows = list(meshes.measured(config, mesh, options, [1, 3]))
    plain, drafts = "decode", "decode, drafts 0.85"
    assert [row["what"] for row in rows] == [plain, drafts, plain, drafts, "prompts"]
    assert [row["rows"] for row in rows[:4]] == [1, 1, 3, 3]
    assert {row["exchange"] for row in rows if "exchange" in row} == {"all_to_all"}
    for row in rows:
        assert row["mesh"] == mesh
        assert all(math.isfinite(figure) and figure >= 0 for figure in row.values() if isinstance(figure, float))
        assert row["tokens/s"] > 0


def test_a_part_of_the_devices_has_that_part_of_the_experts():
    asked = {"small": False, "layers": 5, "drafts": True, "model": "v3", "part_of": 8, "meshes": ["data=2"]}
    config = meshes.config_of(argparse.Namespace(**asked))
    assert (config.n_routed_experts, config.num_hidden_layers, config.num_nextn_predict_layers) == (64, 5, 1)


@pytest.mark.parametrize(
    ("kernel", "is_message"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096>)", True),
        ("void stream_executor::gpu::RaggedAllToAllKernelImpl<8l>(void const*)", True),
        ("void stream_executor::gpu::MultiGpuBarrierKernelImpl<(stream_executor::gpu::Kind)0>()", True),
        ("anonymous_mosaic_gpu_kernel", False),
        ("input_reduce_fusion_93", False),
        ("loop_gather_fusion_5", False),
    ],
)
def test_kernels_of_messages_are_told_by_their_names(kernel, is_message):
    """As two GPUs have named them."""
    assert bool(meshes.MESSAGES.search(kernel)) == is_message
