"""A released folder converted to Orbax and back is unchanged, byte for byte."""

import json
import os

import models
import numpy as np
import pytest
from checkpoints import NUMBERS, convert, raw, released
from safetensors.numpy import save_file

from convert import export
from mla_jax.weights.load import load
from mla_jax.weights.orbax_store import open_store
from mla_jax.weights.safetensors import open_folder

BESIDE = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


def there_and_back(source, tmp_path):
    assert convert(source, tmp_path / "orbax") == 0
    assert convert(tmp_path / "orbax", tmp_path / "back", "--to", "hf") == 0
    return tmp_path / "back"


def assert_same_folder(back, source):
    assert raw(back) == raw(source)
    for name in BESIDE:
        assert (back / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.deep
@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_family_comes_back(tmp_path, family):
    source = released(tmp_path / "hf", family)
    assert_same_folder(there_and_back(source, tmp_path), source)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "orbax"]


@pytest.mark.deep
@pytest.mark.parametrize("numbers", [numbers for numbers in NUMBERS if numbers != "bf16"])
def test_every_number_format_comes_back_with_its_scales_as_they_were(tmp_path, numbers):
    source = released(tmp_path / "hf", "v3", numbers)
    assert_same_folder(there_and_back(source, tmp_path), source)


@pytest.mark.deep
def test_a_folder_of_several_files_comes_back_as_one_and_in_other_files(tmp_path, monkeypatch):
    source = released(tmp_path / "hf", "glm_4_7_flash", "fp8", shards=3)
    assert convert(source, tmp_path / "orbax") == 0
    for limit, several in ((1 << 30, False), (30_000, True)):
        monkeypatch.setattr(export, "FILE_BYTES", limit)
        back = tmp_path / f"back{limit}"
        assert convert(tmp_path / "orbax", back, "--to", "hf") == 0
        assert_same_folder(back, source)
        files = sorted(path.name for path in back.glob("*.safetensors"))
        assert (len(files) > 1) == several
        assert {file.name for file in open_folder(back).files} == {*files}
        if several:
            index = json.loads((back / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in raw(back).values())
            assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
        load(back)


def test_a_folder_is_written_again_without_orbax_between(tmp_path):
    source = released(tmp_path / "hf", "v3", "fp8_bf16", shards=2)
    assert convert(source, tmp_path / "back", "--to", "hf") == 0
    assert_same_folder(tmp_path / "back", source)


@pytest.mark.deep
def test_files_are_for_all_who_may_read_the_folder(tmp_path):
    source = released(tmp_path / "hf")
    back = there_and_back(source, tmp_path)
    mask = os.umask(0)
    os.umask(mask)
    for path in (*back.iterdir(), *(p for p in (tmp_path / "orbax").rglob("*") if p.is_file())):
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask, path


@pytest.mark.deep
def test_a_copy_that_is_no_copy_is_left_out_and_a_tied_heads_is_kept(tmp_path):
    hf = models.FAMILIES["youtu"]
    weights = models.tensors(hf)
    models.write(tmp_path / "tied", hf, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]})
    there_and_back(tmp_path / "tied", tmp_path)
    assert raw(tmp_path / "back") == raw(tmp_path / "tied")
    other = released(tmp_path / "other", "v3", "f32")
    name = "model.layers.3.shared_head.head.weight"
    found = {n: np.frombuffer(data, np.float32).reshape(shape).copy() for n, (_, shape, data) in raw(other).items()}
    found[name][3, 3] += 1
    save_file(found, other / "model.safetensors")
    assert convert(other, tmp_path / "orbax2") == 0
    assert [*open_store(tmp_path / "orbax2").metadata["copies"]] == ["model.layers.3.embed_tokens.weight"]
    assert convert(tmp_path / "orbax2", tmp_path / "back2", "--to", "hf") == 0
    assert raw(tmp_path / "back2") == {n: value for n, value in raw(other).items() if n != name}


@pytest.mark.deep
def test_values_that_are_not_numbers_come_back_bit_for_bit_if_they_are_allowed(tmp_path):
    source = released(tmp_path / "hf", "v3", "f32")
    found = {n: np.frombuffer(data, np.uint32).reshape(shape).copy() for n, (_, shape, data) in raw(source).items()}
    found["model.layers.1.mlp.experts.3.up_proj.weight"].reshape(-1)[:4] = 0x7FC12345, 0xFFFFFFFF, 0x80000000, 0x7F800000
    save_file({name: value.view(np.float32) for name, value in found.items()}, source / "model.safetensors")
    assert convert(source, tmp_path / "orbax", "--allow-nonfinite") == 0
    assert convert(tmp_path / "orbax", tmp_path / "back", "--to", "hf", "--allow-nonfinite") == 0
    assert raw(tmp_path / "back") == raw(source)
