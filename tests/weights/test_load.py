"""Checkpoints of every layout and number format become the same parameters."""

import gc
import itertools
import weakref

import jax.numpy as jnp
import ml_dtypes
import models
import numpy as np
import pytest
from flax import nnx
from weights import fp8, parameters

from mla_jax.base.batch import Batch
from mla_jax.base.qtensor import QTensor, dequantize
from mla_jax.weights import safetensors
from mla_jax.weights.fill import IN_FLIGHT
from mla_jax.weights.load import Checkpoint, load

V3 = models.FAMILIES["v3"]
BLOCK = (16, 24)
QUANTIZED = {**V3, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(BLOCK)}}


def loaded(folder, hf, weights, **options):
    return load(models.write(folder, hf, weights), **options)


def packed(weight, scale):
    return QTensor("fp8_block", (jnp.asarray(weight), jnp.asarray(scale.astype(np.float32))), weight.shape)


@pytest.fixture
def reads(monkeypatch):
    """The names of the tensors that were read."""
    found, read = [], safetensors.TensorFiles.read
    monkeypatch.setattr(
        safetensors.TensorFiles, "read", lambda self, name, *rest, **box: (found.append(name), read(self, name, *rest, **box))[1]
    )
    return found


def test_progress_counts_every_byte_once_and_ends_at_the_total(tmp_path):
    hf, heard = models.FAMILIES["v2"], []
    Checkpoint(models.write(tmp_path, hf, models.tensors(hf))).load(progress=lambda done, total: heard.append((done, total)))
    (total,) = {total for _, total in heard}
    assert [done for done, _ in heard] == sorted({done for done, _ in heard})
    assert heard[-1] == (total, total)


@pytest.mark.parametrize("family", [family for family in models.FAMILIES if family != "longcat_flash"])
def test_every_tensor_lies_where_it_belongs(tmp_path, family):
    hf = models.FAMILIES[family]
    w, n, p = models.tensors(hf), hf["num_attention_heads"], hf["qk_nope_head_dim"]
    found = parameters.of(loaded(tmp_path, hf, w))
    np.testing.assert_array_equal(found["embed"], w["model.embed_tokens.weight"])
    assert ("head" in found) == (not hf["tie_word_embeddings"])
    for layer in range(3):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        up = w[theirs + "self_attn.kv_b_proj.weight"].reshape(n, p + hf["v_head_dim"], -1)
        np.testing.assert_array_equal(found[ours + "attn.uk"], up[:, :p])
        np.testing.assert_array_equal(found[ours + "attn.uv"], up[:, p:])
        o_proj = w[theirs + "self_attn.o_proj.weight"]
        np.testing.assert_array_equal(found[ours + "attn.o_proj"].reshape(o_proj.shape), o_proj)
        for part in ("gate", "up", "down"):
            if models.is_moe(hf, layer):
                stack = [w[f"{theirs}mlp.experts.{x}.{part}_proj.weight"] for x in range(8)]
                np.testing.assert_array_equal(found[ours + "mlp.experts." + part], stack)
                np.testing.assert_array_equal(
                    found[ours + "mlp.shared." + part], w[f"{theirs}mlp.shared_experts.{part}_proj.weight"]
                )
            else:
                np.testing.assert_array_equal(found[ours + "mlp." + part], w[f"{theirs}mlp.{part}_proj.weight"])


def test_a_layer_of_two_attentions_becomes_two_layers(tmp_path):
    hf = models.FAMILIES["longcat_flash"]
    w = models.tensors(hf) | {"model.mtp.norm.weight": np.ones(hf["hidden_size"], np.float32)}  # of another kind, not read
    found = parameters.of(loaded(tmp_path, hf, w))
    for pair, half in itertools.product(range(2), range(2)):
        ours, theirs = f"layers.{2 * pair + half}.", f"model.layers.{pair}."
        np.testing.assert_array_equal(found[ours + "attn_norm"], w[f"{theirs}input_layernorm.{half}.weight"])
        np.testing.assert_array_equal(found[ours + "attn.q_b_proj"], w[f"{theirs}self_attn.{half}.q_b_proj.weight"])
        dense = "mlp." if half else "mlp.dense."
        np.testing.assert_array_equal(found[ours + dense + "down"], w[f"{theirs}mlps.{half}.down_proj.weight"])
        assert (ours + "mlp.experts.gate" in found) == (half == 0)
    stack = [w[f"model.layers.1.mlp.experts.{x}.up_proj.weight"] for x in range(8)]
    np.testing.assert_array_equal(found["layers.2.mlp.experts.up"], stack)
    np.testing.assert_array_equal(found["layers.2.mlp.router.weight"], w["model.layers.1.mlp.router.classifier.weight"])


def test_shards_load_as_one_file_does(tmp_path):
    weights = models.tensors(V3)
    one = loaded(tmp_path / "one", V3, weights)
    parameters.assert_equal(load(models.write(tmp_path / "three", V3, weights, shards=3)), one)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64], ids=lambda d: np.dtype(d).name)
def test_weights_of_other_number_formats_are_converted(tmp_path, dtype):
    weights = {name: w.astype(dtype) for name, w in models.tensors(V3).items()}
    expected = loaded(tmp_path / "f32", V3, {name: w.astype(np.float32) for name, w in weights.items()})
    parameters.assert_equal(loaded(tmp_path / "other", V3, weights), expected)


def test_weights_are_float32_on_a_cpu_unless_asked(tmp_path):
    weights = models.tensors(V3)
    assert {value.dtype for value in parameters.of(loaded(tmp_path / "a", V3, weights)).values()} == {np.dtype("float32")}


def test_router_biases_stay_float32_in_a_bfloat16_model(tmp_path):
    weights = models.tensors(V3)
    found = parameters.of(loaded(tmp_path, V3, weights, dtype="bfloat16"))
    biases = {path for path, value in found.items() if value.dtype == np.float32}
    assert biases == {"layers.1.mlp.router.bias", "layers.2.mlp.router.bias"}
    bias = weights["model.layers.1.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(found["layers.1.mlp.router.bias"], bias)
    assert (bias.astype(ml_dtypes.bfloat16).astype(np.float32) != bias).any()


@pytest.mark.parametrize("powers_of_two", [False, True], ids=["float32 scales", "ue8m0 scales"])
@pytest.mark.parametrize(("shape", "scales"), [((576, 300), (5, 3)), ((128, 128), (1, 1)), ((1, 129), (1, 2))])
def test_fp8_blocks_are_multiplied_out_as_numpy_does(shape, scales, powers_of_two):
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    stored, scale = fp8.quantize(weight, (128, 128), powers_of_two=powers_of_two)
    assert scale.shape == scales
    found = np.asarray(dequantize(packed(stored, scale)))
    np.testing.assert_array_equal(found, fp8.dequantize(stored, scale, (128, 128)))
    assert (np.abs(found - weight) <= np.abs(weight) / 16 + 1e-2).all()


def test_a_row_of_blocks_has_its_own_scale():
    scale = np.arange(1, 16, dtype=np.float32).reshape(5, 3)
    found = np.asarray(dequantize(packed(np.ones((576, 300), ml_dtypes.float8_e4m3fn), scale)))
    assert (found[0, 0], found[127, 128], found[128, 127], found[575, 299]) == (1, 2, 4, 15)


@pytest.mark.parametrize("powers_of_two", [False, True], ids=["float32 scales", "ue8m0 scales"])
def test_an_fp8_model_loads_as_its_dequantised_twin(tmp_path, powers_of_two):
    stored = fp8.quantized(models.tensors(V3, mtp=True), BLOCK, powers_of_two=powers_of_two)
    kinds = {np.dtype(value.dtype).name for value in stored.values()}
    assert kinds == {"float8_e4m3fn", "bfloat16", "float32"} | ({"float8_e8m0fnu"} if powers_of_two else set())
    model = loaded(tmp_path / "fp8", QUANTIZED, stored, dtype="float32")
    parameters.assert_equal(model, loaded(tmp_path / "f32", V3, fp8.dequantized(stored, BLOCK)))


def test_fp8_scales_may_be_bfloat16(tmp_path):
    stored = fp8.quantized(models.tensors(V3), BLOCK)
    stored |= {name: value.astype(ml_dtypes.bfloat16) for name, value in stored.items() if name.endswith(fp8.SCALE)}
    model = loaded(tmp_path / "fp8", QUANTIZED, stored, dtype="float32")
    parameters.assert_equal(model, loaded(tmp_path / "f32", V3, fp8.dequantized(stored, BLOCK)))


def joined_experts(weights: dict, layers: range) -> dict:
    """The layout that transformers 5 holds in memory: one tensor for all experts' gates and ups, one for their downs."""
    found = {name: w for name, w in weights.items() if ".mlp.experts." not in name}
    for at in (f"model.layers.{layer}.mlp.experts." for layer in layers):
        gate, up, down = (np.stack([weights[f"{at}{x}.{p}_proj.weight"] for x in range(8)]) for p in ("gate", "up", "down"))
        found |= {at + "gate_up_proj": np.concatenate([gate, up], axis=1), at + "down_proj": down}
    return found


def test_experts_joined_by_transformers_5_load_as_single_ones(tmp_path):
    weights = models.tensors(V3)
    joined = joined_experts(weights, range(1, 3))
    assert joined["model.layers.1.mlp.experts.gate_up_proj"].shape == (8, 48, 48)
    parameters.assert_equal(loaded(tmp_path / "joined", V3, joined), loaded(tmp_path / "single", V3, weights))


def test_the_mtp_layer_loads_and_its_copies_are_not_read(tmp_path, reads):
    weights = models.tensors(V3, mtp=True)
    model = loaded(tmp_path, V3, weights)
    found, at = parameters.of(model), "model.layers.3."
    assert len(model.mtp) == 1
    np.testing.assert_array_equal(found["mtp.0.eh_proj"], weights[at + "eh_proj.weight"])
    np.testing.assert_array_equal(found["mtp.0.norm"], weights[at + "shared_head.norm.weight"])
    np.testing.assert_array_equal(found["mtp.0.block.mlp.router.weight"], weights[at + "mlp.gate.weight"])
    assert set(reads) == set(weights) - {at + "embed_tokens.weight", at + "shared_head.head.weight"}


def test_a_checkpoint_without_its_mtp_layer_loads_without_one(tmp_path):
    assert V3["num_nextn_predict_layers"] == 1
    assert len(loaded(tmp_path, V3, models.tensors(V3)).mtp) == 0


def test_rotary_tables_are_not_read(tmp_path, reads):
    weights = models.tensors(V3)
    tables = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.full(4, np.nan, np.float32) for i in range(3)}
    loaded(tmp_path, V3, weights | tables)
    assert set(reads) == set(weights)


def test_the_head_of_a_model_that_ties_it_is_not_read(tmp_path, reads):
    hf = models.FAMILIES["youtu"]
    weights = models.tensors(hf)
    assert "lm_head.weight" not in weights
    model = loaded(tmp_path, hf, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    assert model.head is None
    assert "lm_head.weight" not in reads


def test_loading_goes_through_a_hub_cache(tmp_path):
    weights = models.tensors(V3)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    models.write(blobs, V3, weights)
    snapshot.mkdir(parents=True)
    for file in list(blobs.iterdir()):
        blob = file.rename(blobs / (file.name.encode().hex()))
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    parameters.assert_equal(load(snapshot), loaded(tmp_path / "plain", V3, weights))


@pytest.mark.deep
def test_few_tensors_are_in_host_memory_at_a_time(tmp_path, monkeypatch):
    weights = {name: w.astype(ml_dtypes.bfloat16) for name, w in models.tensors(V3, mtp=True).items()}
    alive, most, read = weakref.WeakSet(), [], safetensors.TensorFiles.read

    class Held(np.ndarray):
        """An array that can be counted."""

        __hash__ = object.__hash__

    def counted(self, name, *rest, **box):
        value = read(self, name, *rest, **box).view(Held)
        alive.add(value)
        most.append(len(alive))
        return value

    gc.collect()
    monkeypatch.setattr(safetensors.TensorFiles, "read", counted)
    loaded(tmp_path, V3, weights)
    assert len(most) > 100
    assert 1 < max(most) <= 3 * IN_FLIGHT


def test_an_indexers_projections_stay_packed_and_its_weights_stay_float32(tmp_path):
    hf, block = models.FAMILIES["glm_5"], (8, 8)
    packed = fp8.quantized(models.tensors(hf), block)
    settings = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [*block]}
    models.write(tmp_path / "packed", hf | {"quantization_config": settings}, packed)
    models.write(tmp_path / "plain", hf, fp8.dequantized(packed, block))
    found = load(tmp_path / "packed", dtype="bfloat16").layers[0].attn.indexer
    kinds = {path[0]: value.get_value() for path, value in nnx.to_flat_state(nnx.state(found, nnx.Param))}
    assert {name: value.dtype.name for name, value in kinds.items()} == {
        "wq_b": "bfloat16", "wk": "bfloat16", "weights_proj": "float32", "k_norm": "bfloat16", "k_norm_bias": "bfloat16"
    }  # fmt: skip
    logits = [load(tmp_path / name) for name in ("packed", "plain")]
    assert logits[0].layers[0].attn.indexer.wq_b.get_value().format == "fp8_block_8x8"
    assert logits[0].layers[0].attn.indexer.wk.get_value().format == "fp8_block_8x8"
    tokens = jnp.asarray(np.random.default_rng(0).integers(2, 96, (2, 60)), jnp.int32)
    one, other = (np.asarray(m.unembed(m(tokens, Batch.dense(2, 60))[0])) for m in logits)
    np.testing.assert_allclose(one, other, atol=1e-4 * other.std())
