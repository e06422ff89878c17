"""The cost model against measured passes of benchmarks/results: V2-Lite and parts of V3, on one, two and four GPUs."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mla_jax.base.axes import parse_mesh
from mla_jax.base.config import Config
from mla_jax.base.link_rates import PLANNED
from mla_jax.decode.speculative import Mtp
from mla_jax.engine.core.drafting import Drafting
from mla_jax.mesh.cost import MeshCost
from mla_jax.model import kernels
from mla_jax.model.parts import cost_of, released

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
HELD = 4096  # tokens of each row, and of each prompt
NEAR = 0.25  # of a measured time
# Models of the results, and the layers and experts of a part where a row does not name them
MESHES = {
    "meshes_h100": ("v2_lite", None, None),
    "meshes_h200_x4": ("v2_lite", None, None),
    "meshes_v3_h100": ("v3", 27, 64),
    "meshes_v3_h200": ("v3", 61, 64),
    "meshes_v3_h200_x4": ("v3", 61, 128),
}


def stored(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


@functools.cache
def cost(model: str, mesh: str, device: str, layers: int | None, experts: int | None, exchange: str, mtp=False) -> MeshCost:
    kind = PLANNED["h200" if "H200" in device else "h100"]
    changes = {"num_hidden_layers": layers, "n_routed_experts": experts, "num_nextn_predict_layers": int(mtp)}
    config = dataclasses.replace(Config.preset(model), **{name: value for name, value in changes.items() if value})
    with kernels.as_if_on(kind.kind, "gpu", kind.capability):
        found = cost_of(released(config, kind.figures, parse_mesh(mesh), mtp))
    return dataclasses.replace(found, parts=dataclasses.replace(found.parts, exchange=exchange))


def passes(name: str) -> Iterator[tuple[dict, float]]:
    """Each measured pass with its predicted seconds."""
    model, usual, experts = MESHES[name]
    found = stored(name)
    for row in found["rows"]:
        layers = int(str(row.get("layers", usual)).split()[0]) if usual else None
        known = cost(model, row["mesh"], found["device"], layers, experts, row.get("exchange") or "auto")
        if row["what"] == "decode":
            yield row, known.predicted(known.shared(row["rows"], held=HELD)).seconds
        elif row["what"] == "prompts":
            yield row, known.prompts(HELD).seconds


@pytest.mark.deep
@pytest.mark.parametrize("name", MESHES)
def test_passes_on_meshes_are_predicted_within_a_quarter(name):
    found = [(row["mesh"], row["what"], row["rows"], round(1e3 * seconds / row["ms"], 2)) for row, seconds in passes(name)]
    assert len(found) >= 4
    assert [case for case in found if abs(case[-1] - 1) > NEAR] == []


def test_layers_of_v3_on_one_device_are_predicted_within_a_quarter():
    for row in stored("v3_layer_h200")["steps"]:
        known = cost("v3", "data=1", "NVIDIA H200", row["layers"], 32, "auto")
        assert 1e3 * known.decode(row["rows"], HELD).seconds == pytest.approx(row["ms"], rel=NEAR)


@pytest.mark.parametrize("name", ["decode_h100", "decode_h200"])
def test_steps_of_v2_lite_on_one_device_are_predicted_within_a_quarter(name):
    found = stored(name)
    known = cost("v2_lite", "data=1", found["device"], None, None, "auto")
    rows = [row for row in found["rows"] if row.get("weights", "bf16") == "bf16"]
    assert len(rows) >= 3
    for row in rows:
        assert 1e3 * known.decode(row["batch"], HELD).seconds == pytest.approx(row["ms a step"], rel=NEAR)


def test_passes_with_drafts_are_predicted_within_a_quarter():
    found = stored("drafts_h100")
    known = cost("v2_lite", "data=1", found["device"], None, None, "auto", mtp=True)
    rows = [row for row in found["rows"] if row["weights"] == "bf16"]
    assert {row["k"] for row in rows} == {0, 1, 2, 3}
    for row in rows:
        predicted = Drafting(known, Mtp(max(row["k"], 1))).predicted(row["batch"], HELD, row["k"])
        assert 1e3 * predicted == pytest.approx(row["ms a pass"], rel=NEAR)
