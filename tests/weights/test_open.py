"""One model in every kind of checkpoint: recognised from its content, and loaded as the same parameters."""

import jax
import ml_dtypes
import models
import numpy as np
import pytest
from weights import as_deepseek, as_gguf, fp8, parameters

from mla_jax import LLM
from mla_jax.base.config import Config
from mla_jax.base.errors import BadConfig, BadFile
from mla_jax.base.qtensor import QTensor
from mla_jax.weights import deepseek
from mla_jax.weights.load import load
from mla_jax.weights.open import open_source

V3 = models.FAMILIES["v3"]
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


# ---- GGUF


@pytest.mark.deep
@pytest.mark.parametrize("layout", ["new", "old", "fused"])
@pytest.mark.parametrize("family", models.IN_GGUF)
def test_a_gguf_file_loads_as_the_folder_it_was_made_of(tmp_path, family, layout):
    hf = as_gguf.full(family)
    weights = models.tensors(hf, mtp=True)
    if layout == "fused" and not hf.get("n_routed_experts"):
        pytest.skip("a model without experts")
    file = as_gguf.write(tmp_path / "m.gguf", as_gguf.keyed(hf, old=layout == "old"), as_gguf.gguf_tensors(hf, weights, layout))
    found, expected = load(file), load(models.write(tmp_path / "hf", hf, weights))
    assert len(found.mtp) == len(expected.mtp)
    parameters.assert_equal(found, expected)


@pytest.mark.deep
@pytest.mark.parametrize("layout", ["new", "fused"])
def test_a_quantised_file_stays_packed_and_gives_the_logits_of_its_unpacked_twin(tmp_path, layout):
    hf = {**as_gguf.full("v3"), "hidden_size": 64, "moe_intermediate_size": 32}
    tensors = as_gguf.gguf_tensors(hf, models.tensors(hf, mtp=True), layout)
    packed, plain = as_gguf.as_q8_0(tensors)
    files = [as_gguf.write(tmp_path / f"{i}.gguf", as_gguf.keyed(hf), t) for i, t in enumerate((packed, plain))]
    one, two = LLM(files[0]), LLM(files[1])
    experts = one.model.layers[1].mlp.experts.gate[...]
    assert isinstance(experts, QTensor)
    assert (experts.format, experts.shape, experts.parts[0].shape) == ("Q8_0", (8, 32, 64), (8, 32, 2, 34))
    tokens = np.random.default_rng(0).integers(0, 96, (2, 40))
    expected = two.logits(tokens)
    np.testing.assert_allclose(one.logits(tokens), expected, atol=1e-4 * np.abs(expected).max())
    parameters.assert_equal(load(files[0], dtype="float32"), load(files[1]))


def test_packed_weights_take_the_bytes_of_the_file(tmp_path):
    hf = {**as_gguf.full("v3"), "hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 4096}
    packed, _ = as_gguf.as_q8_0(as_gguf.gguf_tensors(hf, models.tensors(hf), "new"))
    file = as_gguf.write(tmp_path / "m.gguf", as_gguf.keyed({**hf, "num_nextn_predict_layers": 0}), packed)
    llm = LLM(file)
    held = sum(a.nbytes for a in jax.tree.leaves(parameters.state(llm.model)))
    assert llm.plan.weights == held
    assert held < 1.15 * file.stat().st_size  # uk and uv are unpacked


# ---- DeepSeek's own parts


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("family", ["v2_lite", "v3"])
def test_parts_for_several_devices_are_joined(tmp_path, family, count):
    hf, weights = models.FAMILIES[family], models.tensors(models.FAMILIES[family])
    found = load(as_deepseek.write(tmp_path / "own", hf, weights, count))
    parameters.assert_equal(found, load(models.write(tmp_path / "hf", hf, weights)))


@pytest.mark.parametrize("count", [1, 2])
def test_fp8_parts_are_joined_with_their_scales(tmp_path, count):
    hf = {**V3, "hidden_size": 256, "intermediate_size": 512, "v_head_dim": 64, "q_lora_rank": 128, "qk_nope_head_dim": 56}
    hf |= {"moe_intermediate_size": 256, "quantization_config": BLOCKS, "num_nextn_predict_layers": 0}
    weights = fp8.quantized(models.tensors(hf), (128, 128))
    found = load(as_deepseek.write(tmp_path / "own", hf, weights, count))
    kept = found.layers[1].mlp.experts.down[...]
    assert isinstance(kept, QTensor)
    assert kept.parts[0].dtype == ml_dtypes.float8_e4m3fn
    expected = load(models.write(tmp_path / "hf", hf, weights))
    for ours, theirs in zip(jax.tree.leaves(parameters.state(found)), jax.tree.leaves(parameters.state(expected)), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_inference_codes_own_config_is_understood(tmp_path):
    own = {"vocab_size": 129280, "dim": 7168, "inter_dim": 18432, "moe_inter_dim": 2048, "n_layers": 61, "n_dense_layers": 3}
    own |= {"n_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "n_activated_experts": 8, "n_expert_groups": 8}
    own |= {"n_limited_groups": 4, "route_scale": 2.5, "score_func": "sigmoid", "q_lora_rank": 1536, "kv_lora_rank": 512}
    own |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "dtype": "fp8"}
    found, expected = Config.from_hf(deepseek.hf_of_arguments(own)), Config.preset("v3")
    skipped = {"notes", "bos_token_id", "eos_token_id", "num_nextn_predict_layers"}
    assert {k: v for k, v in vars(found).items() if k not in skipped} == {
        k: v for k, v in vars(expected).items() if k not in skipped
    }


def test_a_config_with_an_argument_that_nobody_knows_is_refused(tmp_path):
    with pytest.raises(BadConfig, match="does not know\n  window"):
        deepseek.hf_of_arguments({"dim": 64, "window": 4})


# ---- recognition


def test_a_kind_is_recognised_by_content(tmp_path):
    weights = models.tensors(V3)
    file = as_gguf.write(
        tmp_path / "weights.bin",
        as_gguf.keyed({**as_gguf.full("v3"), "num_nextn_predict_layers": 0}),
        as_gguf.gguf_tensors(V3, weights, "new"),
    )
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "m.gguf").symlink_to(file)
    kinds = [file, folder, models.write(tmp_path / "hf", V3, weights), as_deepseek.write(tmp_path / "own", V3, weights, 2)]
    assert [open_source(path).kind for path in kinds] == ["gguf", "gguf", "safetensors", "deepseek"]


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"not at all")
    with pytest.raises(BadFile, match="is a file, but not a GGUF file"):
        open_source(tmp_path / "model.gguf")
