"""An export of LLM.export runs without mla-jax, and answers as LLM does; platforms and meshes need not be there."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import compiling
import jax
import jaxtyping
import numpy as np
import pytest
from checkpoints import released

from mla_jax import LLM, SamplingParams
from mla_jax.base.errors import BadRequest, DoesNotFit, Unsupported
from mla_jax.base.options import Options
from mla_jax.engine import export
from mla_jax.engine.opening.opened import open_model
from mla_jax.mesh import comm_cost

PROMPTS = [[0, 5, 9, 33], [0, 44], [0, *range(2, 30)], [0, 7, 7, 7, 7], [0, 80, 3]]
TOKENS = 40
# Another process has none of our packages: importing one there is an error.
ALONE = """
import runpy, sys
sys.modules |= dict.fromkeys(("mla_jax", "pallas_kernels", "cpu_experts", "flax", "orbax", "jaxtyping"))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return released(tmp_path_factory.mktemp("model") / "v3", "v3", "fp8")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder)


@pytest.fixture
def opened(folder):
    return open_model(Options().replace(model=str(folder)))


def answers(out: Path, *arguments: str, prompts=PROMPTS) -> list[list[int]]:
    """The output of run.py, in a process of its own."""
    compiling.settle()
    given = [word for prompt in prompts for word in ("--prompt", ",".join(map(str, prompt)))]
    command = [sys.executable, "-P", "-c", ALONE, str(out / "run.py"), *given, "--max-tokens", str(TOKENS), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out.parent, env=os.environ, timeout=600)
    assert done.returncode == 0, done.stderr
    return [[int(word) for word in line.split(",")] for line in done.stdout.splitlines()]


def generated(llm: LLM) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS))]


def manifest(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


def test_an_export_answers_without_mla_jax_as_the_model_does(llm, tmp_path):
    llm.export(tmp_path / "out", prompt=16, rows=2)  # prompts are read in pieces, and wait for rows
    assert answers(tmp_path / "out") == generated(llm)


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "data=2,tensor=2,context=2"])
def test_an_export_for_a_mesh_answers_as_one_device_does(llm, tmp_path, mesh):
    llm.export(tmp_path / "out", prompt=16, rows=2, mesh=mesh)
    assert answers(tmp_path / "out") == generated(llm)


@pytest.mark.deep
def test_a_model_on_a_mesh_is_exported_for_that_mesh(folder, tmp_path):
    llm = LLM(folder, mesh="data=2,tensor=2")
    llm.export(tmp_path / "out", prompt=16, rows=2)
    assert manifest(tmp_path / "out")["mesh"] == {"data": 2, "tensor": 2, "context": 1}
    assert answers(tmp_path / "out") == generated(llm)


@pytest.mark.deep
def test_weights_may_be_those_of_another_export(llm, opened, tmp_path):
    llm.export(tmp_path / "weights", prompt=16, rows=2)
    opened.export(tmp_path / "programs", prompt=16, rows=2)
    assert not list((tmp_path / "programs").glob("*.safetensors"))
    assert answers(tmp_path / "programs", "--weights", str(tmp_path / "weights")) == generated(llm)


def test_a_mesh_that_does_not_fit_the_model_is_refused(opened, tmp_path):
    with pytest.raises(Unsupported, match="8 experts cannot be shared by the 64 devices"):
        opened.export(tmp_path / "out", mesh="data=64")


def test_tokens_may_be_exchanged_without_padding_on_gpus(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(comm_cost, "pick_exchange", lambda *_: "all_to_all")
    opened.export(tmp_path / "out", platforms="cuda", mesh="data=8", prompt=64, rows=8)
    program = jax.export.deserialize(bytearray((tmp_path / "out" / "cuda" / "prefill.bin").read_bytes()))
    assert "@ragged_all_to_all" in program.mlir_module()


@pytest.mark.parametrize("mesh", [None, "data=4,tensor=2"])
def test_programs_are_exported_for_platforms_and_devices_that_are_not_there(opened, tmp_path, mesh):
    opened.export(tmp_path / "out", platforms=("cuda", "tpu"), mesh=mesh, prompt=16, rows=2)
    found = manifest(tmp_path / "out")
    assert list(found["platforms"]) == ["cuda", "tpu"]
    for platform, entry in found["platforms"].items():
        assert entry["kernels"] == "xla"
        assert [one["dtype"] for one in entry["kept"][:2]] == ["float32"] * 2
        assert [one["name"] for one in entry["kept"]] == entry["programs"]["run"]["kept"]  # in the order that a call takes
        for name in ("admit", "prefill", "run"):
            program = jax.export.deserialize(bytearray((tmp_path / "out" / platform / f"{name}.bin").read_bytes()))
            assert program.platforms == (platform,)
            assert program.nr_devices == (1 if mesh is None else 8)


def test_what_is_planned_for_a_device_is_exported_for_it(folder, tmp_path):
    opened = open_model(Options().replace(model=str(folder), device="h200", mesh="data=8"))
    opened.export(tmp_path / "out", prompt=16, rows=2)
    found = manifest(tmp_path / "out")
    assert list(found["platforms"]) == ["cuda"]
    assert found["mesh"]["data"] == 8
    assert {one["dtype"] for one in found["platforms"]["cuda"]["kept"][:2]} == {"bfloat16"}


def test_the_manifest_tells_the_shapes_that_the_programs_take(llm, tmp_path):
    llm.export(tmp_path / "out", prompt=16, rows=2, weights=False)
    found = manifest(tmp_path / "out")
    mine = found["platforms"]["cpu"]
    kept = {one["name"]: one for one in mine["kept"]}
    assert (found["sizes"]["width"], found["sizes"]["pages"]) == (8, 16)
    for name, entry in mine["programs"].items():
        program = jax.export.deserialize(bytearray((tmp_path / "out" / entry["file"]).read_bytes()))
        arrays = [*found["weights"], *(kept[one] for one in entry["kept"])]
        expected = [(tuple(one["shape"]), one["dtype"]) for one in arrays]
        sent = sum(int(np.prod(one["shape"])) for one in entry["sent"])
        assert [(one.shape, one.dtype.name) for one in program.in_avals] == [*expected, ((sent,), "int32")], name
        returned = [(tuple(one["shape"]), one["dtype"]) for one in entry["returned"]]
        assert [(one.shape, one.dtype.name) for one in program.out_avals] == [*expected[len(found["weights"]) :], *returned]


def test_weights_are_cut_into_files(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(export, "FILE", 100_000)
    llm.export(tmp_path / "out", prompt=16, rows=1)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files == manifest(tmp_path / "out")["weight_files"]


def test_weights_of_another_model_are_refused(llm, tmp_path):
    llm.export(tmp_path / "out", prompt=16, rows=1)
    shapes = manifest(tmp_path / "out")
    shapes["weights"][0]["shape"][0] += 1
    (tmp_path / "out" / "manifest.json").write_text(json.dumps(shapes))
    with pytest.raises(AssertionError, match=r"embed is float32 \(96, 48\) in .*, the programs take float32 \(97, 48\)"):
        answers(tmp_path / "out", prompts=PROMPTS[:1])


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"prompt": 0}, "prompt is 0, expected"),
        ({"rows": True}, "rows is True, expected"),
        ({"context": 513}, "context is 513, expected 1 to 512"),
        ({"platforms": ("metal",)}, "platforms is"),
        ({"platforms": ()}, "platforms is"),
        ({"mesh": "data=0"}, "mesh data=0 is no mesh"),
        ({"mesh": {"rows": 2}}, "mesh {'rows': 2} is no mesh"),
        ({"mesh": {"data": "2"}}, "mesh {'data': '2'} is no mesh"),
        ({"mesh": {"data": 10**5000}}, "is no mesh"),
        ({"mesh": 8}, "mesh is 8"),
    ],
)
def test_what_is_no_export_is_refused_and_nothing_is_left(llm, tmp_path, monkeypatch, asked, found):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checks of the tests
    with pytest.raises(BadRequest, match=found):
        llm.export(tmp_path / "out", **asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "found"), [("there", "exists already"), ("nowhere/out", "there is no folder")])
def test_a_path_that_cannot_be_written_is_refused(llm, tmp_path, name, found):
    (tmp_path / "there").mkdir()
    with pytest.raises(BadRequest, match=found):
        llm.export(tmp_path / name)


def test_a_full_disk_is_refused_and_nothing_is_left(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "total used free")(1000, 0, 1000))
    with pytest.raises(DoesNotFit, match="does not fit the disk"):
        llm.export(tmp_path / "out", prompt=16, rows=1)
    assert not list(tmp_path.iterdir())


def test_a_missing_flatbuffers_is_named(llm, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    with pytest.raises(Unsupported, match=r"(?s)flatbuffers.*\.\[export\]"):
        llm.export(tmp_path / "out")


def test_kernels_of_a_device_that_is_not_here_are_refused(llm, tmp_path):
    with pytest.raises(Unsupported, match="kernels for cuda cannot be exported here"):
        llm.export(tmp_path / "out", platforms=("cuda",), kernels=True)


def test_what_drops_or_chooses_tokens_is_not_exported(folder, tmp_path):
    for options, found in (({"evict": "snapkv"}, "eviction"), ({"retrieve": "quest"}, "retrieval")):
        opened = open_model(Options().replace(model=str(folder), **options))
        with pytest.raises(Unsupported, match=f"{found} cannot be exported"):
            opened.export(tmp_path / "out")
