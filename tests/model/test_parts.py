"""One device's part of a model, counted from its parameters, against numbers worked out by hand."""

import dataclasses

import jax
import pytest
from costs import H200, released_cost
from flax import nnx

from mla_jax.base.config import Config
from mla_jax.base.roofline import DEVICES
from mla_jax.mesh.cost import Pass
from mla_jax.model.parts import cost_of, packed_shapes, page_bytes, released
from mla_jax.model.transformer import Transformer

# DeepSeek-V2-Lite as published: 27 layers of width 2048, the first one dense with 10,944; 16 heads of 128 + 64 and values of 128
# over latents of 512 + 64; of 64 experts with 1,408 six are chosen, two more are shared; 102,400 words.
LITE = Config.preset("v2_lite")
LITE_ATTENTION = 2048 * 16 * (128 + 64) + 2048 * (512 + 64) + 512 * 16 * (128 + 128) + 16 * 128 * 2048  # 13.8 million
LITE_DENSE, LITE_EXPERT, LITE_ROUTER = 3 * 2048 * 10_944, 3 * 2048 * 1408, 2048 * 64
LITE_HEAD = 102_400 * 2048

# DeepSeek-V3 as released: FP8 with a float32 scale for each 128 x 128, but embedding, head, router and norms; the two halves of
# kv_b_proj have, here, a scale for each column of a head.
V3 = Config.preset("v3")
FP8 = 1 + 4 / 128**2
HALVES = 2 * 128 * 512 * (128 + 4)
ATTENTION = FP8 * (1536 * 7168 + 128 * 192 * 1536 + 576 * 7168 + 7168 * 128 * 128) + HALVES
ROUTER = 2 * 256 * 7168
EXPERT = FP8 * 3 * 7168 * 2048  # 44 MB; the shared one is as large
DENSE = FP8 * 3 * 7168 * 18432
VOCAB = 2 * 129_280 * 7168  # of the embedding, and of the head

SMALL = Config(
    hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8,
    kv_lora_rank=10, q_lora_rank=None, qk_nope_head_dim=3, qk_rope_head_dim=4, v_head_dim=5,
)  # fmt: skip


def lite_weights(experts: float) -> float:
    """Weights of a pass that reads so many routed experts in each layer: embeddings are looked up, a few rows of them."""
    layers = 27 * LITE_ATTENTION + LITE_DENSE + 26 * ((experts + 2) * LITE_EXPERT + LITE_ROUTER)
    return layers + LITE_HEAD


def touched(tokens: int) -> float:
    """Each of 64 experts is left out by a token with a probability of 58 / 64."""
    return 64 - 64 * (58 / 64) ** tokens


def active_weights(config: Config) -> float:
    """Weights that one token is multiplied by: of a pass of one token over none."""
    costs = released_cost(config).costs(Pass(1, 1, 0))
    return sum(cost.flops for cost in costs.values()) / 2


def test_v3_on_eight_data_shards_has_an_eighth_of_the_experts_on_each_device_and_all_of_the_rest():
    by_hand = 61 * ATTENTION + 3 * DENSE + 58 * (32 * EXPERT + EXPERT + ROUTER) + 2 * VOCAB
    found = released_cost(V3, {"data": 8}).parts.weight_bytes
    assert found == pytest.approx(by_hand, rel=1e-4)
    assert round(found / 1e9) == 101


def test_v3_on_a_mesh_of_eight_along_tensor_has_an_eighth_of_nearly_everything():
    by_heads = FP8 * (128 * 192 * 1536 + 7168 * 128 * 128) + HALVES
    whole = FP8 * (1536 * 7168 + 576 * 7168)
    by_hand = 61 * (by_heads / 8 + whole) + 3 * DENSE / 8 + 58 * (32 * EXPERT + EXPERT / 8 + ROUTER) + 2 * VOCAB / 8
    found = released_cost(V3, {"tensor": 8}).parts.weight_bytes
    assert found == pytest.approx(by_hand, rel=1e-4)
    assert round(found / 1e9) == 85


def test_weights_that_have_no_equal_parts_are_whole_on_each_device():
    """18,432 - 512 is cut in eight inside of a block of 128, and 102,401 words have no eighth."""
    config = Config.preset("v3", num_hidden_layers=3, intermediate_size=18432 - 512)
    shared, alone = (released_cost(config, sizes).parts.weights["dense"] for sizes in ({"tensor": 8}, {}))
    assert shared == alone
    odd = Config.preset("v2_lite", num_hidden_layers=2, vocab_size=102_401)
    assert released_cost(odd, {"tensor": 8}).parts.weights["head"].numbers == 102_401 * 2048


def test_a_tied_head_is_counted_once():
    tied = Config.preset("v2_lite", num_hidden_layers=2, tie_word_embeddings=True)
    weights = released_cost(tied).parts.weights
    assert weights["head"].numbers == LITE_HEAD
    assert weights["embedding"].numbers == 0


@pytest.mark.deep
def test_fewer_bytes_of_weights_lie_on_a_device_the_more_devices_share_them():
    for axis in ("data", "tensor", "context"):
        sizes = [released_cost(V3, {axis: n}).parts.weight_bytes for n in (1, 2, 4, 8)]
        assert sizes == sorted(sizes, reverse=True)
    by_axis = [released_cost(V3, {axis: 8}).parts.weight_bytes for axis in ("tensor", "data", "context")]
    assert by_axis[0] < by_axis[1] == by_axis[2]  # heads are cut along tensor alone


def test_a_token_of_v3_takes_1152_bytes_a_layer_on_each_device_of_its_shard_and_less_along_context_alone():
    for sizes, size in (({"data": 8}, 1152), ({"tensor": 8}, 1152), ({"context": 8}, 1152 / 8)):
        model = released(V3, H200, sizes)
        assert page_bytes(model) / 64 == 61 * size
        assert cost_of(model).parts.latent == 1152
    fp8 = released(V3, H200)
    fp8.dispatch = dataclasses.replace(fp8.dispatch, kv_cache="fp8")
    assert page_bytes(fp8) / 64 == 61 * 656


def test_packed_weights_are_those_of_the_released_format():
    assert (129_280, 7168) not in packed_shapes(released(V3, H200))
    assert (256, 2048, 7168) in packed_shapes(released(V3, H200))
    assert packed_shapes(released(V3, H200, packed=False)) == packed_shapes(released(LITE, H200)) == []


def test_a_token_of_v2_lite_is_multiplied_by_the_published_2_4_billion_weights():
    by_hand = lite_weights(experts=6)
    assert by_hand == 371_589_120 + 67_239_936 + 26 * (69_206_016 + 131_072) + 209_715_200
    assert active_weights(LITE) == pytest.approx(by_hand, rel=1e-3)
    assert 2.4e9 < active_weights(LITE) < 2.5e9


@pytest.mark.parametrize(("preset", "billions"), [("v2", 21), ("v3", 37), ("kimi_k2", 32)])
def test_a_token_is_multiplied_by_as_many_weights_as_the_papers_say(preset, billions):
    assert round(active_weights(Config.preset(preset)) / 1e9) == billions


def test_all_weights_of_a_dense_model_are_active():
    # query 8 x 14, latents 8 x 14, keys and values 10 x 16, output 10 x 8; then 3 x 8 x 8, the head 8 x 8, norms 10 + 2 x 8 + 8
    assert active_weights(SMALL) == 112 + 112 + 160 + 80 + 192 + 64 + 34


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "itemsize"), [("NVIDIA H200", 2), ("TPU v5", 2), ("cpu", 4)])
@pytest.mark.parametrize(("rows", "held", "drafts"), [(1, 0, 0), (1, 1024, 3), (8, 4096, 1)])
def test_a_pass_reads_weights_the_experts_that_its_tokens_touch_and_the_latents(rows, held, drafts, kind, itemsize):
    numbers = lite_weights(touched(rows * (1 + drafts))) + 27 * rows * held * (512 + 64)
    cost = released_cost(LITE, device=DEVICES[kind])
    assert cost.read_bytes(Pass(rows, 4, held, choosing=1 + drafts)) == pytest.approx(itemsize * numbers, rel=1e-3)


@pytest.mark.parametrize("rows", [1, 4, 64])
def test_a_draft_of_the_layer_for_multi_token_prediction_reads_that_layer_and_the_head(rows):
    config = dataclasses.replace(LITE, num_nextn_predict_layers=1)
    guess = released_cost(config, mtp=True).parts.guess
    joined = 2 * 2048 * 2048  # a hidden state and an embedding to one width
    numbers = joined + LITE_ATTENTION + (touched(rows) + 2) * LITE_EXPERT + LITE_ROUTER + LITE_HEAD
    found = dataclasses.replace(released_cost(config), parts=guess).read_bytes(Pass(rows, 1, 0))
    assert found == pytest.approx(2 * numbers, rel=1e-3)


def test_a_draft_of_v3_takes_a_twentieth_of_a_pass():
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    numbers = 2 * 7168**2 + attention + 9 * 3 * 7168 * 2048 + 7168 * 256 + 129_280 * 7168  # 1.6 billion, the head most of them
    cost = released_cost(V3, mtp=True, packed=False)
    guess = dataclasses.replace(cost, parts=cost.parts.guess).read_bytes(Pass(1, 1, 0))
    assert guess == pytest.approx(2 * numbers, rel=2e-3)
    assert guess / cost.read_bytes(Pass(1, 1, 0)) == pytest.approx(1.6 / 36.5, rel=0.02)


def test_the_parts_of_a_model_with_weights_are_the_bytes_of_its_arrays():
    model = Transformer(Config.preset("tiny"), nnx.Rngs(0))
    arrays = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert cost_of(model).parts.weight_bytes == sum(array.nbytes for array in arrays)
