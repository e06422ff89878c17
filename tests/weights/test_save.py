"""A saved model is a released folder again."""

import json
import os
import shutil

import ml_dtypes
import models
import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save_file
from weights import fp8, parameters

from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, DoesNotFit
from mla_jax.weights.load import load
from mla_jax.weights.safetensors import STORED_DTYPES, read_header
from mla_jax.weights.save import save, write_tensors

V3 = models.FAMILIES["v3"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load(models.write(tmp_path_factory.mktemp("v3"), V3, models.tensors(V3, mtp=True)))


@pytest.mark.parametrize("family", models.FAMILIES)
def test_float32_weights_come_back_under_their_names_bit_for_bit(tmp_path, family):
    hf = models.FAMILIES[family]
    weights = models.tensors(hf, mtp=True)
    save(load(models.write(tmp_path / "in", hf, weights)), tmp_path / "out", dtype="float32")
    found, at = load_file(tmp_path / "out" / "model.safetensors"), f"model.layers.{hf['num_hidden_layers']}."
    copies = {at + "embed_tokens.weight", at + "shared_head.head.weight"}
    assert found.keys() == weights.keys() - copies
    for name, value in found.items():
        assert value.dtype == np.float32
        np.testing.assert_array_equal(value, weights[name], err_msg=name)


def test_the_config_comes_back(tmp_path, model):
    save(model, tmp_path)
    assert Config.from_hf(tmp_path) == model.config


def test_bfloat16_is_the_default_and_router_biases_stay_float32(tmp_path, model):
    weights = models.tensors(V3, mtp=True)
    save(model, tmp_path)
    for name, value in load_file(tmp_path / "model.safetensors").items():
        dtype = np.float32 if name.endswith("bias") else ml_dtypes.bfloat16
        assert value.dtype == dtype, name
        np.testing.assert_array_equal(value, weights[name].astype(dtype), err_msg=name)


@pytest.mark.deep
def test_a_model_read_from_fp8_is_written_without_a_claim_of_fp8(tmp_path):
    block = (16, 24)
    hf = {**V3, "quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    model = load(models.write(tmp_path / "in", hf, fp8.quantized(models.tensors(V3), block)))
    save(model, tmp_path / "out", dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    parameters.assert_equal(load(tmp_path / "out"), load(tmp_path / "in", dtype="float32"))


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_folder_that_holds_a_model_or_a_part_of_one_is_left_alone(tmp_path, model, file):
    (tmp_path / file).write_text("mine")
    with pytest.raises(BadFile, match="is there already and not empty"):
        save(model, tmp_path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(file, "mine")]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path, model, monkeypatch):
    def full(path, specs, tensors):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mla_jax.weights.save.write_tensors", full)
    with pytest.raises(OSError, match="No space left"):
        save(model, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_its_disk_has_no_room_for_is_refused_before_anything_is_written(tmp_path, model, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(DoesNotFit, match="does not fit on its disk"):
        save(model, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_large_models_are_several_files_with_an_index(tmp_path, model, monkeypatch):
    save(model, tmp_path / "one", dtype="float32")
    monkeypatch.setattr("mla_jax.weights.save.FILE_BYTES", 40_000)
    save(model, tmp_path / "many", dtype="float32")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = {path.name: load_file(path) for path in (tmp_path / "many").glob("*.safetensors")}
    assert len(files) > 2
    assert {name: file for file, some in files.items() for name in some} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(value.nbytes for some in files.values() for value in some.values())
    parameters.assert_equal(load(tmp_path / "many"), load(tmp_path / "one"))


def test_files_are_readable_as_the_umask_says(tmp_path, model):
    before = os.umask(0o027)
    try:
        save(model, tmp_path / "new")
    finally:
        os.umask(before)
    assert {p.name: p.stat().st_mode & 0o777 for p in (tmp_path / "new").iterdir()} == {
        "config.json": 0o640,
        "model.safetensors": 0o640,
    }


def test_tensors_that_come_one_by_one_in_any_order_are_what_the_library_would_have_written(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "odd": rng.integers(0, 256, 7, np.uint8).view(ml_dtypes.float8_e4m3fn),
        "wide": rng.standard_normal((3, 5)),
        "a stack's": rng.standard_normal((4, 6, 2), np.float32)[:, ::2],
        "half": rng.standard_normal(9).astype(ml_dtypes.bfloat16),
        "scalar": np.array(3, np.float32),
        "empty": np.zeros((0, 4), np.int32),
    }
    names = {np.dtype(dtype): name for name, dtype in STORED_DTYPES.items()}
    specs = {name: (names[tensor.dtype], tensor.shape) for name, tensor in tensors.items()}
    write_tensors(tmp_path / "ours", specs, reversed(tensors.items()))
    save_file({name: tensor.copy("C") for name, tensor in tensors.items()}, tmp_path / "theirs")
    ours, theirs = (dict(safetensors.deserialize((tmp_path / name).read_bytes())) for name in ("ours", "theirs"))
    assert ours == theirs
    assert all(tensor.start % tensors[tensor.name].itemsize == 0 for tensor in read_header(tmp_path / "ours"))
