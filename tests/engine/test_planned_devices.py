"""`--dry-run --mesh data=8 --device h200`: the plan of absent devices, and their predicted rates."""

import json
import os
from pathlib import Path

import hollow
import jax
import pytest

from mla_jax.base.config import Config
from mla_jax.base.errors import BadRequest
from mla_jax.base.link_rates import PLANNED
from mla_jax.base.options import MEMORY_FRACTION, Options
from mla_jax.engine.llm import LLM
from mla_jax.engine.opening.opened import open_model
from mla_jax.generate import main
from mla_jax.mesh.devices import Devices

MESHES = ("data=8", "tensor=8", "data=2,tensor=2,context=2", "data=64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """DeepSeek-V3 with two of its layers and a quarter of its experts, of which the headers alone are there."""
    fewer = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 64, "num_nextn_predict_layers": 0}
    config = Config.preset("v3", **fewer)
    return hollow.folder(tmp_path_factory.mktemp("hollow"), config.to_hf())


@pytest.fixture(scope="module")
def whole(folder):
    """All of it on one device."""
    return open_model(Options.of(model=folder, device="h200"))


@pytest.fixture
def plan(folder, capsys):
    """The exit code and the words of a dry run."""

    def run(*arguments: object) -> tuple[int, str]:
        code = main(["--model", str(folder), "--dry-run", *map(str, arguments)])
        return code, capsys.readouterr().out

    return run


@pytest.mark.deep
@pytest.mark.parametrize("mesh", MESHES)
def test_the_bytes_are_those_of_one_device_of_the_mesh_and_of_the_table(folder, whole, monkeypatch, mesh):
    monkeypatch.setattr(Devices, "of", lambda *_: pytest.fail("devices were asked for"))
    opened = open_model(Options.of(model=folder, mesh=mesh, device="h200"))
    assert opened.plan.available == int(MEMORY_FRACTION * PLANNED["h200"].memory)
    assert opened.checkpoint.devices.count == opened.checkpoint.layout.devices >= 8
    experts = 64 * 3 * 7168 * 2048  # of one layer
    assert opened.plan.weights < whole.plan.weights - experts * (1 - 1 / 8) + 1e6
    assert opened.predicted().decode.messages.bytes > 0
    assert whole.predicted().decode.messages.bytes == 0


@pytest.mark.deep
def test_a_dry_run_says_what_one_device_holds_and_what_all_would_reach(plan):
    code, said = plan("--mesh", "data=8", "--device", "h200", "--memory-fraction", 0.9, "--context", 8192, "--batch", 64)
    assert code == 0
    assert "computed in bfloat16 on NVIDIA H200" in said
    assert "mesh data=8: per device" in said
    assert "118.18 GiB" in said  # nine tenths of 141 GB
    assert "tokens/s of all devices at batch 64 x 8,192 held, prompts " in said
    assert "exchange of tokens with experts: gather in a step" in said


@pytest.mark.deep
def test_the_same_as_json(plan):
    code, said = plan("--mesh", "data=8", "--device", "b200", "--json")
    found = json.loads(said)
    assert code == 0
    assert (found["fits"], found["shards"], found["mesh"]) == (True, 8, "data=8")
    assert found["predicted"]["tokens_per_second"] > 0
    assert found["predicted"]["exchange"] == "gather"


@pytest.mark.deep
def test_what_does_not_fit_such_devices_says_so(plan):
    code, said = plan("--device", "v6e", "--memory-fraction", 0.1)
    assert code == 4
    assert "it does not fit" in said


@pytest.mark.deep
@pytest.mark.parametrize(("device", "kernel"), [("h100", "mosaic_gpu"), ("v5p", "mosaic_tpu"), ("b200", "")])
def test_the_kernels_that_would_run_there_are_named(folder, device, kernel):
    said = "\n".join(open_model(Options.of(model=folder, mesh="data=8", device=device)).explain())
    assert ("mosaic" in said) == bool(kernel)
    assert kernel in said


@pytest.mark.deep
def test_afterwards_kernels_answer_for_the_device_that_is_here(folder):
    said = [open_model(Options.of(model=folder, device=device)).explain() for device in (None, "h200", None)]
    assert "mosaic" in "\n".join(said[1])
    assert "mosaic" not in "\n".join(said[0] + said[2])
    assert jax.devices()[0].platform == "cpu"


@pytest.mark.deep
def test_devices_that_are_not_here_run_nothing(folder, capsys):
    with pytest.raises(BadRequest, match="no device h200"):
        open_model(Options.of(model=folder, device="h200")).load()
    with pytest.raises(BadRequest, match="no device h200"):
        LLM(folder, device="h200", mesh="data=2")
    assert main(["AB", "--model", str(folder), "--device", "h200"]) == 2
    assert "--device h200 needs --dry-run" in capsys.readouterr().err


def test_the_share_of_their_memory_changes_nothing_here(folder, monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    before = dict(os.environ)
    opened = open_model(Options.of(model=folder, device="h200", memory_fraction=0.9))
    assert opened.plan.available == int(0.9 * PLANNED["h200"].memory)
    assert os.environ == before


def test_a_device_needs_sizes_and_is_of_a_known_kind():
    with pytest.raises(BadRequest, match="device") as found:
        Options.of(device="h300")
    assert all(kind in str(found.value) for kind in PLANNED)
    with pytest.raises(BadRequest, match="sizes"):
        Options.of(mesh="auto", device="h200")


def test_experts_on_the_cpu_cannot_be_planned_for_with_it(folder):
    with pytest.raises(BadRequest, match="exclude each other"):
        open_model(Options.of(model=folder, device="h200", experts="host"))


def test_one_device_that_is_here_has_no_prediction(folder):
    assert open_model(Options.of(model=folder)).predicted() is None
