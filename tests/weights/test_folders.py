"""Folders as they are released: indices that lack tensors, files of their own for some, formats that other files name."""

import json
import os
from pathlib import Path

import models
import numpy as np
import pytest
from checkpoints import BLOCK, assert_same_model, released
from safetensors.numpy import load_file, save_file
from weights import fp8

from mla_jax import LLM
from mla_jax.base.config import Config
from mla_jax.base.errors import BadConfig, BadFile, Unsupported
from mla_jax.base.qtensor import dequantize
from mla_jax.weights.hub import resolve
from mla_jax.weights.load import load
from mla_jax.weights.open import open_source

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """The same model twice."""
    return released(tmp_path / "one", shards=2), released(tmp_path / "other", shards=2)


def weight_map(folder: Path) -> dict[str, str]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def write_map(folder: Path, files: dict[str, str]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))


def test_a_layer_for_drafts_in_a_file_that_the_index_does_not_name_is_read(folders):
    folder, other = folders
    mtp = {}
    for file in sorted(folder.glob("*.safetensors")):
        found = load_file(file)
        mine = {name: found.pop(name) for name in list(found) if ".layers.3." in name}
        mtp |= mine
        save_file(found, file)
    assert mtp
    save_file(mtp, folder / "mtp.safetensors")
    write_map(folder, {name: file for name, file in weight_map(folder).items() if name not in mtp})
    assert_same_model(folder, other)


def test_an_index_that_lacks_tensors_of_its_files_is_read(folders):
    folder, other = folders
    files = weight_map(folder)
    write_map(folder, {name: files[name] for name in sorted(files)[::2]} | {sorted(files)[1]: files[sorted(files)[1]]})
    assert_same_model(folder, other)


def test_a_second_copy_in_the_folder_is_refused_by_name(folders):
    folder, _ = folders
    save_file(load_file(next(folder.glob("model-*.safetensors"))), folder / "copy.safetensors")
    with pytest.raises(BadFile, match=r"is in copy\.safetensors and in model-"):
        open_source(folder)


@pytest.mark.parametrize(("scale", "is_read"), [(0, True), (-1, False), (np.nan, False)])
def test_a_block_of_zeros_may_have_the_scale_0(tmp_path, scale, is_read):
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
    hf = {**models.FAMILIES["v3"], "quantization_config": quantization}
    weights = fp8.quantized(models.tensors(hf), BLOCK)
    name = "model.layers.0.self_attn.o_proj.weight"
    weights[name][: BLOCK[0], : BLOCK[1]] = 0
    weights[name + fp8.SCALE][0, 0] = scale
    folder = models.write(tmp_path, hf, weights)
    if is_read:
        out = load(folder).layers[0].attn.o_proj[...]
        assert not np.asarray(dequantize(out))[: BLOCK[0], : BLOCK[1]].any()
    else:
        with pytest.raises(BadFile, match="not positive and finite"):
            load(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"kv_lora_rank": None, "text_config": {"kv_lora_rank": 512}, "model_type": "kimi_vl"},
            "kimi_vl has an MLA model inside",
        ),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' cannot be read"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}}, "quant_algo = 'W4A8_AWQ'"),
    ],
)
def test_what_is_not_read_is_called_by_its_name(config, words):
    with pytest.raises(Unsupported, match=words):
        Config.from_hf({**models.FAMILIES["v3"], **config})


def test_a_format_that_only_the_quantisers_own_file_names_is_named(tmp_path):
    folder = released(tmp_path)
    (folder / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "W4A8_AWQ", "kv_cache_quant_algo": "FP8"}})
    )
    with pytest.raises(Unsupported, match="quant_algo = 'W4A8_AWQ'; known: None, 'NVFP4'"):
        open_source(folder)


@pytest.mark.parametrize("name", ["config.json", INDEX, "model-00001-of-00002.safetensors", "tokenizer.json", ""])
def test_what_may_not_be_read_is_one_error(folders, monkeypatch, name):
    """Root may read everything, so the system's refusal is made here."""
    forbidden, stat, opened = str(folders[0] / name), os.stat, open

    def refuse(path) -> None:
        if isinstance(path, str | os.PathLike) and os.fspath(path).startswith(forbidden):
            raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "stat", lambda path, *given, **asked: (refuse(path), stat(path, *given, **asked))[1])
    monkeypatch.setattr("builtins.open", lambda path, *given, **asked: (refuse(path), opened(path, *given, **asked))[1])
    with pytest.raises((BadFile, BadConfig), match=r"(may not|cannot) be read"):
        LLM(folders[0])


def test_a_path_that_may_not_be_looked_at_is_not_called_missing(monkeypatch):
    def refuse(self):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(BadFile, match="/secret/model may not be read"):
        resolve("/secret/model")
