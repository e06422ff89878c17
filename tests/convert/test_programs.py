"""An export runs without mla-jax and answers as LLM does; platforms and meshes need not be there; damaged exports are refused."""

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

from convert import programs, programs_run
from convert.__main__ import main
from convert.programs import export
from mla_jax import LLM, SamplingParams
from mla_jax.base.errors import BadRequest, DoesNotFit, Unsupported
from mla_jax.base.options import Options
from mla_jax.engine.opening.opened import open_model
from mla_jax.mesh import comm_cost

PROMPTS = [[0, 5, 9, 33], [0, 44], [0, *range(2, 30)], [0, 7, 7, 7, 7], [0, 80, 3]]
TOKENS = 40
# Another process has none of our packages: importing one there is an error.
ALONE = """
import runpy, sys
sys.modules |= dict.fromkeys(("mla_jax", "convert", "pallas_kernels", "cpu_experts", "flax", "orbax", "jaxtyping"))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(autouse=True)
def no_shared_cache():
    """In the place of the fixture of conftest.py: nothing is killed here."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return released(tmp_path_factory.mktemp("model") / "v3", "v3", "fp8")


@pytest.fixture(scope="module")
def llm(folder):
    return LLM(folder)


@pytest.fixture
def opened(folder):
    return open_model(Options().replace(model=str(folder)))


@pytest.fixture(scope="module")
def exported(llm, tmp_path_factory):
    """An export that tests do not change."""
    out = tmp_path_factory.mktemp("exported") / "out"
    export(llm, out, prompt=16, rows=2)
    return out


def answers(out: Path, *arguments: str, prompts=PROMPTS) -> list[list[int]]:
    """The output of run.py, in a process of its own."""
    compiling.settle()
    given = [word for prompt in prompts for word in ("--prompt", ",".join(map(str, prompt)))]
    command = [sys.executable, "-P", "-c", ALONE, str(out / "run.py"), *given, "--max-tokens", str(TOKENS), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out.parent, env=os.environ, timeout=600)
    assert done.returncode == 0, done.stderr
    return [[int(word) for word in line.split(",")] for line in done.stdout.splitlines()]


def model(out: Path, weights: Path | None = None) -> programs_run.Model:
    """The model of run.py, in this process."""
    return programs_run.Model(out, programs_run.read_manifest(out), "cpu", weights)


def generated(llm: LLM) -> list[list[int]]:
    return [list(output.token_ids) for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS))]


def manifest(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


@pytest.mark.deep
def test_an_export_answers_without_mla_jax_as_the_model_does(llm, exported):
    assert answers(exported) == generated(llm)  # prompts are read in pieces, and there are more of them than rows


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "data=2,tensor=2,context=2"])
def test_an_export_for_a_mesh_answers_as_one_device_does(llm, tmp_path, mesh):
    export(llm, tmp_path / "out", prompt=16, rows=2, mesh=mesh)
    assert answers(tmp_path / "out") == generated(llm)


@pytest.mark.deep
def test_a_model_on_a_mesh_is_exported_for_that_mesh(folder, tmp_path):
    llm = LLM(folder, mesh="data=2,tensor=2")
    export(llm, tmp_path / "out", prompt=16, rows=2)
    assert manifest(tmp_path / "out")["mesh"] == {"data": 2, "tensor": 2, "context": 1}
    assert answers(tmp_path / "out") == generated(llm)


@pytest.mark.deep
def test_weights_may_be_those_of_another_export(llm, opened, exported, tmp_path):
    export(opened, tmp_path / "programs", prompt=16, rows=2, weights=False)
    assert not list((tmp_path / "programs").glob("*.safetensors"))
    found = answers(tmp_path / "programs", "--weights", str(exported), prompts=PROMPTS[:1])
    assert found == generated(llm)[:1]


@pytest.mark.deep
def test_the_weights_of_an_opened_model_are_loaded_and_written(opened, exported, tmp_path):
    export(opened, tmp_path / "out", prompt=16, rows=2)
    (name,) = manifest(exported)["weight_files"]
    assert manifest(tmp_path / "out")["files"][name] == manifest(exported)["files"][name]


@pytest.mark.deep
def test_the_command_exports_a_model(folder, tmp_path, capfd):
    sizes = ["--prompt", "16", "--rows", "2", "--context", "100"]
    assert main(["export", str(folder), str(tmp_path / "out"), *sizes, "--dtype", "bfloat16"]) == 0
    assert manifest(tmp_path / "out")["sizes"] | {"prompt": 16, "rows": 2, "context": 100} == manifest(tmp_path / "out")["sizes"]
    assert "bfloat16" in {one["dtype"] for one in manifest(tmp_path / "out")["weights"]}
    assert main(["export", str(folder), str(tmp_path / "out")]) == 2
    assert "exists already" in capfd.readouterr().err
    planned = ["--programs-only", "--device", "h200", "--mesh", "data=4,tensor=2"]
    assert main(["export", str(folder), str(tmp_path / "mesh"), *sizes, *planned]) == 0
    assert manifest(tmp_path / "mesh")["mesh"] == {"data": 4, "tensor": 2, "context": 1}
    assert not manifest(tmp_path / "mesh")["weight_files"]


def test_a_mesh_that_does_not_fit_the_model_is_refused(opened, tmp_path):
    with pytest.raises(Unsupported, match="8 experts cannot be shared by the 64 devices"):
        export(opened, tmp_path / "out", mesh="data=64")


def test_tokens_may_be_exchanged_without_padding_on_gpus(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(comm_cost, "pick_exchange", lambda *_: "all_to_all")
    export(opened, tmp_path / "out", platforms="cuda", mesh="data=8", prompt=64, rows=8, weights=False)
    program = jax.export.deserialize(bytearray((tmp_path / "out" / "cuda" / "prefill.bin").read_bytes()))
    assert "@ragged_all_to_all" in program.mlir_module()


@pytest.mark.deep
def test_programs_are_exported_for_platforms_and_devices_that_are_not_there(opened, tmp_path):
    export(opened, tmp_path / "out", platforms=("cuda", "tpu"), mesh="data=4,tensor=2", prompt=16, rows=2, weights=False)
    found = manifest(tmp_path / "out")
    assert list(found["platforms"]) == ["cuda", "tpu"]
    for platform, entry in found["platforms"].items():
        assert entry["kernels"] == "xla"
        assert [one["name"] for one in entry["kept"]] == entry["programs"]["run"]["kept"]  # in the order that a call takes
        for name in ("admit", "prefill", "run"):
            program = jax.export.deserialize(bytearray((tmp_path / "out" / platform / f"{name}.bin").read_bytes()))
            assert program.platforms == (platform,)
            assert program.nr_devices == 8


@pytest.mark.deep
def test_a_model_that_is_planned_for_a_device_is_exported_for_it(folder, tmp_path):
    opened = open_model(Options().replace(model=str(folder), device="h200", mesh="data=8"))
    export(opened, tmp_path / "out", prompt=16, rows=2, weights=False)
    found = manifest(tmp_path / "out")
    assert list(found["platforms"]) == ["cuda"]
    assert found["mesh"]["data"] == 8
    assert {one["dtype"] for one in found["platforms"]["cuda"]["kept"][:2]} == {"bfloat16"}


def test_the_manifest_tells_the_shapes_that_the_programs_take(exported):
    found = manifest(exported)
    mine = found["platforms"]["cpu"]
    kept = {one["name"]: one for one in mine["kept"]}
    assert (found["sizes"]["width"], found["sizes"]["pages"]) == (8, 16)
    for name, entry in mine["programs"].items():
        program = jax.export.deserialize(bytearray((exported / entry["file"]).read_bytes()))
        arrays = [*found["weights"], *(kept[one] for one in entry["kept"])]
        expected = [(tuple(one["shape"]), one["dtype"]) for one in arrays]
        sent = sum(int(np.prod(one["shape"])) for one in entry["sent"])
        assert [(one.shape, one.dtype.name) for one in program.in_avals] == [*expected, ((sent,), "int32")], name
        returned = [(tuple(one["shape"]), one["dtype"]) for one in entry["returned"]]
        assert [(one.shape, one.dtype.name) for one in program.out_avals] == [*expected[len(found["weights"]) :], *returned]


def test_weights_are_cut_into_files(llm, exported, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "FILE", 100_000)
    export(llm, tmp_path / "out", prompt=16, rows=2)
    files = sorted(file.name for file in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files == manifest(tmp_path / "out")["weight_files"]
    assert answers(exported, "--weights", str(tmp_path / "out"), prompts=PROMPTS[:1]) == generated(llm)[:1]


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"prompt": 0}, "prompt is 0, expected"),
        ({"rows": True}, "rows is True, expected"),
        ({"rows": 10**20}, "rows is 10+, expected a whole number from 1 to 16,777,216"),
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
def test_a_wrong_argument_is_refused_and_nothing_is_left(llm, tmp_path, monkeypatch, asked, found):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checks of the tests
    with pytest.raises(BadRequest, match=found):
        export(llm, tmp_path / "out", **asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "found"), [("there", "exists already"), ("nowhere/out", "there is no folder")])
def test_a_path_that_cannot_be_written_is_refused(llm, tmp_path, name, found):
    (tmp_path / "there").mkdir()
    with pytest.raises(BadRequest, match=found):
        export(llm, tmp_path / name)


def test_a_full_disk_is_refused_and_nothing_is_left(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "total used free")(1000, 0, 1000))
    with pytest.raises(DoesNotFit, match="does not fit the disk"):
        export(llm, tmp_path / "out", prompt=16, rows=1)
    assert not list(tmp_path.iterdir())


def test_a_missing_flatbuffers_is_named(llm, tmp_path, monkeypatch):
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    with pytest.raises(Unsupported, match=r"(?s)flatbuffers.*\.\[export\]"):
        export(llm, tmp_path / "out")


def test_kernels_of_a_device_that_is_not_here_are_refused(llm, tmp_path):
    with pytest.raises(Unsupported, match="kernels for cuda cannot be exported here"):
        export(llm, tmp_path / "out", platforms=("cuda",), kernels=True)


def test_models_that_drop_or_choose_tokens_are_not_exported(folder, tmp_path):
    for options, found in (({"evict": "snapkv"}, "eviction"), ({"retrieve": "quest"}, "retrieval")):
        opened = open_model(Options().replace(model=str(folder), **options))
        with pytest.raises(Unsupported, match=f"{found} cannot be exported"):
            export(opened, tmp_path / "out")


@pytest.fixture
def copy(exported, tmp_path):
    """An export that may be damaged, and a function that changes its manifest."""
    out = tmp_path / "copy"
    shutil.copytree(exported, out)

    def change(*path, value) -> Path:
        found = manifest(out)
        at = found
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        (out / "manifest.json").write_text(json.dumps(found))
        return out

    return change


@pytest.mark.parametrize("value", [0, -1, 10**6 + 0.5, "2", True, None, 10**9, 10**4000, [2]], ids=lambda value: str(value)[:8])
@pytest.mark.parametrize("path", [("mesh", "data"), ("sizes", "rows"), ("sizes", "steps"), ("weights", 0, "shape", 0)])
def test_a_number_of_the_manifest_is_checked_before_it_is_used(copy, path, value):
    if path[0] == "weights" and value in (0, 10**9):
        return  # a size that an array may have; it is compared with the file
    out = copy(*path, value=value)
    with pytest.raises(SystemExit, match=r"expected a whole number|is damaged"):
        programs_run.read_manifest(out)


def test_a_million_devices_end_run_py_at_once(copy):
    with pytest.raises(AssertionError, match="the number of devices is 1000000, expected a whole number from 1 to 256"):
        answers(copy("mesh", "data", value=10**6), prompts=PROMPTS[:1])


@pytest.mark.parametrize("content", ["", "[]", "{}", "[" * 100_000, '{"format": "mla-jax export 1"}', "\x00"])
def test_a_file_that_is_no_manifest_is_refused(tmp_path, content):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(SystemExit, match=r"damaged|another format"):
        programs_run.read_manifest(tmp_path)


@pytest.mark.parametrize("path", [("weights", 0, "name"), ("files",), ("platforms", "mps"), ("platforms", "cpu", "kernels")])
def test_a_part_of_another_form_is_refused(copy, path):
    with pytest.raises(SystemExit, match="is damaged"):
        programs_run.read_manifest(copy(*path, value=[None]))


@pytest.mark.parametrize("missing", ["mesh", "sizes", "config", "platforms", "weights"])
def test_a_manifest_without_one_of_its_parts_is_refused(copy, missing):
    out = copy("format", value=programs_run.FORMAT)
    found = manifest(out)
    del found[missing]
    (out / "manifest.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit, match=f"damaged: KeyError '{missing}'"):
        programs_run.read_manifest(out)


def test_files_outside_the_folder_are_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (tmp_path / "secret").write_text("x")
    (out / "link").symlink_to(tmp_path / "secret")
    (out / "folder").symlink_to(tmp_path)
    for name in ("../secret", str(tmp_path / "secret"), "link", "folder/secret", "a/../../secret", "", ".", "a\0", 3, None):
        with pytest.raises(SystemExit, match="is not in"):
            programs_run.inside(out, name)
    with pytest.raises(SystemExit, match="there is no file"):
        programs_run.inside(out, "cpu/run.bin")


@pytest.mark.parametrize("name", ["cpu/run.bin", "weights-00001-of-00001.safetensors"])
@pytest.mark.parametrize("damage", ["a bit", "a byte less", "no checksum"])
def test_a_file_is_read_only_if_its_checksum_is_that_of_the_manifest(copy, name, damage):
    out = copy("ends", value=[]) if damage != "no checksum" else copy("files", value={})
    content = bytearray((out / name).read_bytes())
    if damage == "a bit":
        content[len(content) // 2] ^= 1
    (out / name).write_bytes(content[:-1] if damage == "a byte less" else content)
    with pytest.raises(SystemExit, match="is damaged: its size or its SHA-256"):
        programs_run.checked(out, programs_run.read_manifest(out), name)


def test_programs_that_take_other_arrays_than_the_manifest_says_are_refused(copy):
    with pytest.raises(SystemExit, match="takes other arrays than manifest"):
        model(copy("weights", 0, "shape", 0, value=97))
    with pytest.raises(SystemExit, match="takes other arrays than manifest"):
        model(copy("platforms", "cpu", "programs", "run", "sent", 0, "shape", 0, value=3))


def test_weights_of_another_model_are_refused(llm, exported, tmp_path):
    shutil.copytree(exported, tmp_path / "other")
    file = tmp_path / "other" / "weights-00001-of-00001.safetensors"
    file.write_bytes(file.read_bytes().replace(b'"embed"', b'"ember"'))
    found = manifest(tmp_path / "other")
    found["files"][file.name] = programs._digest(file)
    (tmp_path / "other" / "manifest.json").write_text(json.dumps(found))
    with pytest.raises(SystemExit, match=r"has no weights embed; --weights names"):
        model(exported, tmp_path / "other")


@pytest.mark.parametrize(
    ("prompt", "tokens", "ends", "found"),
    [
        ([0, 96], 1, [], "a token is 96, expected a whole number from 0 to 95"),
        ([0] * 500, 40, [], "prompt and new tokens together is 540, expected a whole number from 2 to 512"),
        ([], 2, [], "the length of a prompt is 0"),
        ([0, 1], 0, [], "the number of new tokens is 0"),
        ([0, 1], 1, [0] * 1000, "the number of end tokens is 1000"),
    ],
)
def test_a_request_that_a_row_cannot_hold_is_refused(exported, prompt, tokens, ends, found):
    with pytest.raises(SystemExit, match=found):
        model(exported).generate([prompt], tokens, ends)
