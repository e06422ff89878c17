"""Conversion of numbers: --dtype, and weights that are no numbers."""

import json

import jax
import ml_dtypes
import models
import numpy as np
import pytest
from checkpoints import BLOCK, assert_same_model, convert, packed_gguf, raw, released
from safetensors.numpy import load_file, save_file
from weights import fp8, parameters

from mla_jax.weights.load import load
from mla_jax.weights.orbax_store import open_store

pytestmark = pytest.mark.deep

HF = models.FAMILIES["v3"]
WIDE = HF | dict.fromkeys(("hidden_size", "moe_intermediate_size", "intermediate_size"), 256) | {"num_nextn_predict_layers": 0}
WIDE |= {"num_hidden_layers": 2, "q_lora_rank": 128, "v_head_dim": 32}


def unpacked(folder, dtype=np.float32):
    """The folder that `released(numbers="fp8")` stands for."""
    weights = fp8.dequantized(fp8.quantized(models.tensors(HF, mtp=True), BLOCK), BLOCK)
    return models.write(folder, HF, {n: w if n.endswith("bias") else w.astype(dtype) for n, w in weights.items()})


@pytest.mark.parametrize(("dtype", "numpy"), [("f32", np.float32), ("bf16", ml_dtypes.bfloat16)])
def test_packed_weights_are_unpacked_and_rounded_once(tmp_path, dtype, numpy):
    source = released(tmp_path / "hf", "v3", "fp8")
    assert convert(source, tmp_path / "out", "--dtype", dtype) == 0
    assert_same_model(tmp_path / "out", unpacked(tmp_path / "plain", numpy))
    formats = {name: entry.format for name, entry in open_store(tmp_path / "out").tensors.items()}
    biases = {name for name in formats if name.endswith("router.bias")}
    assert {formats[name] for name in biases} == {"F32"}
    assert {formats[name] for name in formats.keys() - biases} == {dtype.upper()}
    assert convert(tmp_path / "out", tmp_path / "back", "--to", "hf") == 0
    assert raw(tmp_path / "back") == raw(tmp_path / "plain")
    assert "quantization_config" not in (tmp_path / "back" / "config.json").read_text()


@pytest.mark.parametrize("numbers", ["fp8", "f32"])
def test_int8_is_for_the_matrices_of_linear_layers_and_errs_by_half_a_step(tmp_path, numbers):
    source = released(tmp_path / "hf", "v3", numbers)
    assert convert(source, tmp_path / "out", "--dtype", "int8") == 0
    formats = {name: entry.format for name, entry in open_store(tmp_path / "out").tensors.items()}
    linear = {name for name in formats if name.endswith(("proj", "gate", "up", "down")) and "kv_b_proj" not in name}
    assert {name for name, format in formats.items() if format == "int8"} == linear
    assert {formats[name] for name in formats.keys() - linear} == ({"BF16", "F32"} if numbers == "fp8" else {"F32"})
    found, expected = (parameters.of(load(path, dtype="float32")) for path in (tmp_path / "out", source))
    for path, value in expected.items():
        if any(path.endswith(name.rpartition(".")[2]) for name in linear):
            error, step = np.abs(found[path] - value), np.abs(value).max(axis=-1, keepdims=True) / 127
            assert (error <= 0.5001 * step).all(), path
            assert error.any(), path
        else:
            np.testing.assert_allclose(found[path], value, rtol=2**-8 if path.endswith(("uk", "uv")) else 0, err_msg=path)


WRITTEN = {"int4_g32": ("int4_g32", 0.14), "int4_g128": ("int4_g128", 0.16), "fp8": ("fp8_block", 0.04), "q4_k": ("Q4_K", 0.12)}


@pytest.mark.parametrize("dtype", WRITTEN)
def test_linear_layers_are_quantised_without_calibration_and_the_plan_says_so(tmp_path, capfd, dtype):
    format, most = WRITTEN[dtype]
    source = models.write(tmp_path / "hf", WIDE, models.tensors(WIDE))
    assert convert(source, tmp_path / "out", "--dtype", dtype) == 0
    assert "without calibration" in capfd.readouterr().err
    formats = {name: entry.format for name, entry in open_store(tmp_path / "out").tensors.items()}
    linear = {name for name in formats if name.endswith(("proj", "gate", "up", "down")) and "kv_b_proj" not in name}
    ragged = {name for name in linear if name.endswith(("q_b_proj", "o_proj"))} if dtype == "q4_k" else set()
    assert {name for name, written in formats.items() if written == format} == linear - ragged
    assert {formats[name] for name in ragged} <= {"int4_g32"}
    found, expected = (parameters.of(load(path, dtype="float32")) for path in (tmp_path / "out", source))
    for path, value in expected.items():
        error = np.sqrt(np.mean(np.square(found[path] - value)) / np.mean(np.square(value)))
        assert error <= (most if path in linear else 0), path
        assert path not in linear or error > 0
    if dtype == "q4_k":
        assert convert(tmp_path / "out", tmp_path / "back", "--to", "hf") == 3
        assert "a Hugging Face folder cannot hold" in capfd.readouterr().err
        return
    assert convert(tmp_path / "out", tmp_path / "back", "--to", "hf") == 0
    assert_same_model(tmp_path / "back", tmp_path / "out")
    method = json.loads((tmp_path / "back" / "config.json").read_text())["quantization_config"]["quant_method"]
    assert method == ("fp8" if dtype == "fp8" else "compressed-tensors")


def test_int8_is_no_format_of_a_released_folder(tmp_path, capfd):
    source = released(tmp_path / "hf", "v3")
    assert convert(source, tmp_path / "out", "--dtype", "int8") == 0
    for arguments in ((tmp_path / "out",), (source, "--dtype", "int8")):
        assert convert(arguments[0], tmp_path / "back", "--to", "hf", *arguments[1:]) == 3
        assert "a Hugging Face folder cannot hold int8\n  as " in capfd.readouterr().err
    assert convert(tmp_path / "out", tmp_path / "back", "--to", "hf", "--dtype", "bf16") == 0
    assert_same_model(tmp_path / "back", tmp_path / "out", dtype="bfloat16")


def test_gguf_blocks_become_int8_by_way_of_their_values(tmp_path):
    source = packed_gguf(tmp_path / "m.gguf", "fused")
    assert convert(source, tmp_path / "out", "--dtype", "int8") == 0
    found, expected = (parameters.of(load(path, dtype="float32")) for path in (tmp_path / "out", source))
    gate = "layers.1.mlp.experts.gate"
    step = np.abs(expected[gate]).max(axis=-1, keepdims=True) / 127
    assert (np.abs(found[gate] - expected[gate]) <= 0.5001 * step).all()
    assert jax.tree.leaves(parameters.state(load(tmp_path / "out")))


def spoil(source, values: dict[str, float], at: int = 5) -> None:
    found = load_file(source / "model.safetensors")
    for name, value in values.items():
        found[name] = found[name].copy()
        found[name].reshape(-1)[:at] = value
    save_file(found, source / "model.safetensors")


UP, NORM = "model.layers.1.mlp.experts.3.up_proj.weight", "model.norm.weight"


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_weights_that_are_no_numbers_are_counted_and_refused(tmp_path, capfd, dtype):
    source = released(tmp_path / "hf", "v3", "f32")
    spoil(source, {UP: float("nan")})
    assert convert(source, tmp_path / "out", "--dtype", dtype) == 3
    said = capfd.readouterr().err
    assert "weights hold NaN or infinity\n  layers.1.mlp.experts.up: 5\n" in said
    assert "--allow-nonfinite converts it nevertheless" in said
    assert not (tmp_path / "out").exists()
    assert convert(source, tmp_path / "out", "--allow-nonfinite", "--dtype", dtype) == 0
    (value,) = open_store(tmp_path / "out").read("layers.1.mlp.experts.up")
    assert np.isnan(value.astype(np.float32)).sum() == 5


@pytest.mark.parametrize("dtype", ["keep", "bf16"])
def test_weights_that_are_no_numbers_are_no_released_folder(tmp_path, capfd, dtype):
    source = released(tmp_path / "hf", "v3", "f32")
    spoil(source, {UP: float("nan")})
    assert convert(source, tmp_path / "out", "--to", "hf", "--dtype", dtype) == 3
    assert "weights hold NaN or infinity\n  layers.1.mlp.experts.up: 5\n" in capfd.readouterr().err
    assert not list(tmp_path.glob("out*/*.safetensors*"))
    assert convert(source, tmp_path / "out", "--to", "hf", "--allow-nonfinite", "--dtype", dtype) == 0
    assert sum(np.isnan(value.astype(np.float32)).sum() for value in load_file(tmp_path / "out/model.safetensors").values()) == 5


def test_every_tensor_of_a_step_that_is_not_finite_is_named(tmp_path, capfd):
    source = released(tmp_path / "hf", "v3", "f32")
    spoil(source, {NORM: float("inf"), "lm_head.weight": float("-inf")}, 7)
    assert convert(source, tmp_path / "out") == 3
    assert "\n  head: 7\n  norm: 7\n" in capfd.readouterr().err


def test_a_code_of_fp8_that_is_no_number_is_refused(tmp_path, capfd):
    source = released(tmp_path / "hf", "v3", "fp8")
    name = "model.layers.0.self_attn.o_proj.weight"
    data = bytearray((source / "model.safetensors").read_bytes())
    (_, _, stored), start = raw(source)[name], data.index(raw(source)[name][2])
    assert len(stored) > 9
    data[start + 3] = data[start + 9] = 0x7F
    (source / "model.safetensors").write_bytes(data)
    assert convert(source, tmp_path / "out") == 3
    assert "layers.0.attn.o_proj: 2\n" in capfd.readouterr().err
