"""From a checkpoint to the placement of its experts, to its plan, its model without weights, and the lines about it."""

import dataclasses

import jax.numpy as jnp
import models
import numpy as np
import pytest

from mla_jax.base import roofline
from mla_jax.base.options import ExpertOptions
from mla_jax.base.roofline import DEVICES
from mla_jax.engine.opening.explain import explain
from mla_jax.mesh.host_cost import HostRates
from mla_jax.model.dispatch import Dispatch
from mla_jax.offload.place import Placement, place
from mla_jax.offload.routing import Routing
from mla_jax.offload.streaming import scratch_bytes
from mla_jax.weights import placement_inputs as module
from mla_jax.weights import plan as planning
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.placement_inputs import figures
from mla_jax.weights.plan import memory_plan

HF = {**models.FAMILIES["v3"], "num_hidden_layers": 5, "first_k_dense_replace": 1}  # experts in 1 to 4, and MTP's


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.write(tmp_path_factory.mktemp("model"), HF, models.tensors(HF, mtp=True))


@pytest.fixture
def checkpoint(folder) -> Checkpoint:
    """As a GPU's process opens it."""
    return Checkpoint(folder, dispatch=Dispatch(device=DEVICES["NVIDIA H200"]))


def rates(*formats: str) -> HostRates:
    return HostRates("a CPU", 1e11, 1e12, 2e-5, 5e10)


def test_figures_are_those_of_the_headers_and_the_plan(checkpoint, monkeypatch):
    monkeypatch.setattr(module, "free_memory", lambda: 12345)
    found = figures(checkpoint, ExpertOptions(), 64, 2)
    everything = memory_plan(checkpoint, 64, 2)
    assert (found.needed, found.available) == (everything.needed, pytest.approx(everything.available, rel=0.1))
    assert (found.context, found.held, found.batch, found.host_free) == (64, 64, 2, 12345)
    assert [layer.number for layer in found.layers] == [1, 2, 3, 4, 5]
    each = 8 * 3 * HF["hidden_size"] * HF["moe_intermediate_size"] * 2
    assert {layer.device_bytes for layer in found.layers} == {each}
    assert {layer.packing[3:] for layer in found.layers} == {("bf16", "bf16")}
    int8 = figures(checkpoint, ExpertOptions(host_precision="int8"), 64)
    assert {layer.packing[3:] for layer in int8.layers} == {("int8", "int8")}
    without = figures(checkpoint, ExpertOptions())
    assert (without.context, without.held) == (512, 512)  # the model's longest, which is less than what is assumed
    assert not found.quantized


@pytest.mark.parametrize("less", [1, 1.5, 3.5])
def test_what_is_placed_fits_the_plan(checkpoint, monkeypatch, tmp_path, less):
    """With as many layers on the host as must be, and with replicas in the memory they leave."""
    for name in ("MAX_ROWS", "MOST_OF_SHARD"):  # or fewer would run where there is less memory
        monkeypatch.setattr(planning, name, 64)
    each = figures(checkpoint, ExpertOptions(), 64).layers[0].device_bytes
    monkeypatch.setattr("mla_jax.offload.place.SPARE", 0)  # of the memory, most of which these small layers do not take
    room = int(memory_plan(checkpoint, 64).needed - less * each)
    monkeypatch.setattr(planning, "available", lambda devices: room)
    assert not memory_plan(checkpoint, 64).fits
    routing = Routing.open(tmp_path / "routing.json", checkpoint.config)
    routing.counts += np.arange(8)
    routing.save()
    stats = str(routing.path)
    for wanted in (ExpertOptions(stream_tokens=0), ExpertOptions(stream_tokens=0, routing_stats=stats, host_layers=5)):
        placement = place(wanted, figures(checkpoint, wanted, 64), rates)
        planned = memory_plan(checkpoint, 64, placement=placement)
        assert planned.fits
        assert planned.host == len(placement.host) * each
        assert planned.weights == checkpoint.bytes(placement)
        assert checkpoint.model(placement).replicated == sum(map(len, placement.replicated.values()))
        assert sorted(checkpoint.model(placement).on_host()) == [layer for layer in placement.host if layer < 5]
    assert placement.replicated


def test_a_streamed_step_is_planned_with_its_scratch_memory(checkpoint):
    on_host = Placement((4, 5))
    before = memory_plan(checkpoint, 64, placement=on_host).temporaries
    after = memory_plan(checkpoint, 64, placement=dataclasses.replace(on_host, stream=1)).temporaries
    assert after - before >= scratch_bytes(checkpoint.config, checkpoint.dtype.itemsize, roofline.STREAMED)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "experts: loop for"),
        (1, "experts: those of MTP's layers on the CPU, which only drafts run; loop for"),
        (2, "experts: those of 1 layer and of MTP's on the CPU; loop for"),
        (3, "experts: those of 2 layers and of MTP's on the CPU; loop for"),
        (5, "experts: those of all layers on the CPU: as asked"),
    ],
)
def test_what_is_on_the_host_is_told_with_mtps_layers_apart(folder, count, said):
    checkpoint, wanted = Checkpoint(folder), ExpertOptions(host_layers=count)
    placement = place(wanted, figures(checkpoint, wanted), rates)
    planned = memory_plan(checkpoint, 64, placement=placement)
    lines = explain(checkpoint.model(placement), checkpoint.formats(placement), planned, placement)
    assert any(line.startswith(said) for line in lines)
    assert any(line.startswith("a CPU: 100.0 GB/s of experts") for line in lines) == (count > 0)


def test_what_a_placement_says_is_what_the_model_does(checkpoint):
    placement = Placement((3, 4, 5), defer=2, stream=300, replicated={3: (1, 6)})
    model = checkpoint.model(placement)
    assert (model.dispatch.defer, model.dispatch.stream, model.replicated) == (2, 300, 2)
    assert [*model.on_host()] == [3, 4]
    assert model.layers[3].mlp.experts.replicated.gate.shape == (2, HF["moe_intermediate_size"], HF["hidden_size"])
    assert model.layers[4].mlp.experts.replicated is None
    assert model.dtype == jnp.bfloat16
    untouched = checkpoint.model()
    assert (untouched.dispatch, untouched.replicated, untouched.on_host()) == (checkpoint.dispatch, 0, {})
