"""Written weights are read back; a byte that changes afterwards is found, and its tensor and folder are named."""

import json
import os

import pytest
from checkpoints import convert, released


@pytest.fixture
def out(tmp_path, capfd):
    source = released(tmp_path / "hf", "v3", "fp8")
    assert convert(source, tmp_path / "out") == 0
    assert capfd.readouterr().err.endswith(f"{tmp_path / 'out'} is sound: 0.2 MiB\n")
    return tmp_path / "out"


def chunk(folder, name: str):
    (leaf,) = (folder / "weights").glob(f"*/state/{name}")
    return next(path for path in (leaf / "c").rglob("*") if path.is_file())


def flip(file) -> None:
    data = bytearray(file.read_bytes())
    data[8] ^= 128
    file.write_bytes(data)


DAMAGE = {
    "a byte of weights": (
        "layers.2.mlp.experts.up.0.0",
        flip,
        "layers.2.mlp.experts.up is damaged\n  layers.2.mlp.experts.up.0.0 has",
    ),
    "a byte of scales": (
        "layers.2.mlp.experts.up.1.0",
        flip,
        "layers.2.mlp.experts.up is damaged\n  layers.2.mlp.experts.up.1.0 has",
    ),
    "a missing chunk": ("norm.0.0", lambda file: file.unlink(), "norm cannot be read\n  a file is missing, cut short or damaged"),
    "a short chunk": (
        "norm.0.0",
        lambda file: os.truncate(file, 50),
        "norm cannot be read\n  a file is missing, cut short or damaged",
    ),
}


@pytest.mark.deep
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_said_in_our_words(out, capfd, damage):
    name, act, words = DAMAGE[damage]
    act(chunk(out, name))
    assert convert(out, "--verify") == 3
    said = capfd.readouterr().err
    assert f"error: {words}" in said
    assert f"\n  in {out}/weights/0000" in said
    assert said.endswith("\n  copy that folder again, or convert again\n")
    assert "Traceback" not in said


@pytest.mark.deep
def test_what_is_sound_is_said_to_be(out, capfd):
    assert convert(out, "--verify") == 0
    assert f"\n{out} is sound: 0.2 MiB\n" in capfd.readouterr().err


@pytest.mark.deep
def test_weights_that_are_not_those_of_the_config_are_found(out, capfd):
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    assert convert(out, "--verify") == 3
    assert "tensors have other shapes than config.json says" in capfd.readouterr().err


def test_what_is_no_folder_of_ours_cannot_be_verified(tmp_path, capfd):
    source = released(tmp_path / "hf")
    assert convert(source, "--verify") == 3
    assert f"error: {source} is no output of mla-convert\n  expected manifest.json and weights/ in it" in capfd.readouterr().err


def test_a_folder_that_is_not_finished_is_not_sound(out, capfd):
    manifest = json.loads((out / "manifest.json").read_text())
    (out / "manifest.json").write_text(json.dumps({**manifest, "complete": False}))
    assert convert(out, "--verify") == 3
    assert "is not complete\n  its conversion was stopped: run the same command again" in capfd.readouterr().err
