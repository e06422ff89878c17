"""Predictions for meshes: bytes and messages of a pass counted by hand, and the predictions for a mesh of one."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mla_jax.base import qtensor
from mla_jax.base.config import Config
from mla_jax.base.roofline import DEVICES, pass_seconds
from mla_jax.mesh.comm_cost import pick_exchange
from mla_jax.mesh.cost import READING, MeshCost, PackedWeights, even, meshes, packed, preferred
from mla_jax.mesh.partition import Layout
from mla_jax.model.ops import Shapes
from mla_jax.model.transformer import Transformer

V3, LITE, KIMI = (Config.preset(name) for name in ("v3", "v2_lite", "kimi_k2"))
H200 = DEVICES["NVIDIA H200"]
RING, TO_ALL = 0.4 * 450e9, 160e9  # bytes/s that an H200 receives of others
LATENCY = 18e-6  # seconds of a collective that carries nothing
GOES_ON = 2 * 7 / 8 * 4  # bytes by which eight devices agree whether any row goes on

# DeepSeek-V3 as released: FP8 with a float32 scale for each 128 x 128, but embedding, head, router, norms and, here, the two
# halves of kv_b_proj, which are unpacked to bf16.
FP8 = 1 + 4 / 128**2
ATTENTION = FP8 * (1536 * 7168 + 128 * 192 * 1536 + 576 * 7168 + 7168 * 128 * 128) + 2 * 2 * 128 * 128 * 512
ROUTER = 2 * 256 * 7168
EXPERT = FP8 * 3 * 7168 * 2048  # 44 MB; the shared one is as large
DENSE = FP8 * 3 * 7168 * 18432
VOCAB = 2 * 129_280 * 7168  # of the embedding, and of the head


def test_v3_on_eight_data_shards_has_an_eighth_of_the_experts_on_each_device_and_all_of_the_rest():
    by_hand = 61 * ATTENTION + 3 * DENSE + 58 * (32 * EXPERT + EXPERT + ROUTER) + 2 * VOCAB
    found = MeshCost(V3, {"data": 8}, H200, packed(V3)).weight_bytes
    assert found == pytest.approx(by_hand, rel=1e-4)
    assert round(found / 1e9) == 102


def test_v3_on_a_mesh_of_eight_along_tensor_has_an_eighth_of_nearly_everything():
    by_heads = FP8 * (128 * 192 * 1536 + 7168 * 128 * 128) + 2 * 2 * 128 * 128 * 512
    whole = FP8 * (1536 * 7168 + 576 * 7168)
    by_hand = 61 * (by_heads / 8 + whole) + 3 * DENSE / 8 + 58 * (32 * EXPERT + EXPERT / 8 + ROUTER) + 2 * VOCAB / 8
    found = MeshCost(V3, {"tensor": 8}, H200, packed(V3)).weight_bytes
    assert found == pytest.approx(by_hand, rel=1e-4)
    assert round(found / 1e9) == 85


@pytest.mark.parametrize("sizes", [{}, {"data": 8}, {"tensor": 8}, {"context": 8}, {"data": 2, "tensor": 2, "context": 2}])
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("v3", {"num_hidden_layers": 5}),
        ("v2_lite", {}),
        ("kimi_k2", {"num_hidden_layers": 3}),
        ("glm_4_7_flash", {"num_attention_heads": 24}),
        ("v3", {"num_hidden_layers": 5, "intermediate_size": 18432 - 512}),  # cut in eight inside of a block: so it is whole
        ("v2_lite", {"tie_word_embeddings": True, "vocab_size": 102_401}),
    ],
)
def test_a_device_has_the_bytes_of_its_parts_of_the_model_s_own_parameters(preset, changes, sizes):
    config, layout = Config.preset(preset, **changes), Layout(**sizes)
    fp8, found = packed(config) is not None, 0
    for path, variable in nnx.to_flat_state(nnx.state(Transformer(config, Shapes()))):
        data, value = variable.get_metadata(), variable.get_value()
        released = fp8 and data["packs"] and path[0] not in ("embed", "head")
        shape = qtensor.abstract("fp8_block", value.shape) if released else jax.ShapeDtypeStruct(value.shape, jnp.bfloat16)
        found += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(layout.local(data["axes"], shape)))
    assert MeshCost(config, sizes, H200, packed(config)).weight_bytes == pytest.approx(found, rel=2e-4)


def test_a_token_of_v3_takes_1152_bytes_a_layer_on_each_device_of_its_shard_and_less_along_context_alone():
    assert MeshCost(V3, {"data": 8}, H200).token_bytes == 61 * 1152
    assert MeshCost(V3, {"tensor": 8}, H200).token_bytes == 61 * 1152
    assert MeshCost(V3, {"context": 8}, H200).token_bytes == 61 * 1152 / 8
    assert MeshCost(V3, {"data": 2, "context": 4}, H200, latent=656).token_bytes == 61 * 656 / 4


def test_the_cache_takes_what_weights_and_passes_leave_in_whole_pages():
    cost = MeshCost(V3, {"data": 8}, H200, packed(V3))
    taken = cost.weight_bytes + cost.working_bytes()
    assert cost.tokens(taken + 1000.5 * 61 * 1152) == 960
    assert cost.tokens(taken - 1) == 0


def test_a_step_of_v3_on_eight_data_shards_sends_tokens_to_all_devices_and_their_sums_back():
    sent, exchange = MeshCost(V3, {"data": 8}, H200).messages(tokens=32, unembedded=32)
    a_layer = 2 * 7 * 32 * 7168 * 2  # seven other shards' tokens, and seven others' sums of its own
    assert exchange == "gather"
    assert sent.bytes == 58 * a_layer + GOES_ON
    assert sent.seconds == pytest.approx(58 * (2 * LATENCY + a_layer / RING) + LATENCY, rel=1e-6)


def test_a_step_of_v3_along_tensor_sums_after_heads_and_mlps_and_swaps_rows_of_logits():
    sent, _ = MeshCost(V3, {"tensor": 8}, H200).messages(tokens=32, unembedded=32)
    one = 2 * 7 / 8 * 32 * 7168 * 2
    sums = 61 + 3 + 58 + 1  # o_proj, dense layers, routed and shared experts together, the embedding
    logits = 7 / 8 * 4 * 32 * 129_280 / 8
    chosen = 7 * (4 + 1) * 32 / 8  # tokens, and whether their logits are fit
    assert sent.bytes == pytest.approx(sums * one + logits + chosen + GOES_ON, abs=1e-3)
    assert sent.seconds == pytest.approx((sums + 1 + 2 + 1) * LATENCY + (sent.bytes - logits) / RING + logits / TO_ALL)


def test_a_step_of_v3_along_context_merges_heads_over_latents_and_sums_experts():
    sent, _ = MeshCost(V3, {"context": 8}, H200).messages(tokens=32, unembedded=32)
    merged = 2 * 7 / 8 * 4 * 32 * 128 * (1 + 1 + 512)  # the largest score, the weights' sum and the latent's, in float32
    assert sent.bytes == pytest.approx(61 * merged + 58 * 2 * 7 / 8 * 32 * 7168 * 2 + GOES_ON, abs=1e-3)
    collectives = 2 * 61 + 58 + 1
    assert sent.seconds == pytest.approx(collectives * LATENCY + sent.bytes / RING)


def test_prompts_along_context_gather_latents_where_that_is_less_than_merging():
    cost = MeshCost(V3, {"context": 8}, H200)
    merging, few, many = (cost.messages(tokens=4096, unembedded=1, prefilled=held)[0] for held in (0, 4096, 10**9))
    assert few.bytes == pytest.approx(61 * 7 / 8 * 4096 * 1152 + 58 * 2 * 7 / 8 * 4096 * 7168 * 2 + GOES_ON, abs=1e-3)
    assert many == merging
    assert merging.bytes > 10 * few.bytes


@pytest.mark.parametrize(("rows", "held"), [(1, 4096), (32, 4096), (64, 16384)])
@pytest.mark.parametrize("config", [LITE, V3, KIMI], ids=lambda config: config.model_type)
def test_a_mesh_of_one_predicts_a_step_as_one_device_alone(config, rows, held):
    cost = MeshCost(config, {}, H200)
    found = cost.decode(rows, held)
    assert found.messages.bytes == found.messages.seconds == 0
    assert found.seconds == pytest.approx(pass_seconds(config, H200, rows, held, 0, 0), rel=2e-3)
    assert found.tokens == pytest.approx(rows / found.seconds)


def test_a_pass_has_room_for_the_tokens_of_all_shards_and_a_pair_for_each_of_their_experts():
    alone, shared = (MeshCost(V3, {"data": n}, H200).working_bytes(rows=64) for n in (1, 8))
    pairs = 2 * 8192 * 8 * (2 * 7168 + 3 * 2048)  # 8,192 tokens of all shards: 1,024 of each of eight
    logits = (4 * 4 + 2) * 64 * 129_280
    assert alone == pairs + logits + (1 << 30)
    assert shared == alone + 2 * 2 * 8192 * 7168


def test_more_of_anything_costs_more_and_faster_devices_take_less():
    cost = MeshCost(V3, {"data": 8}, H200, packed(V3))
    assert cost.decode(32, 8192).seconds > cost.decode(32, 4096).seconds > cost.decode(16, 4096).seconds
    assert cost.decode(64, 4096).tokens > cost.decode(32, 4096).tokens
    assert MeshCost(V3, {"data": 8}, H200).decode().seconds > cost.decode().seconds  # unpacked weights
    faster = MeshCost(V3, {"data": 8}, DEVICES["NVIDIA B200"], packed(V3))
    assert faster.decode().seconds < cost.decode().seconds
    assert faster.prompts().seconds / faster.prompts().tokens < cost.prompts().seconds / cost.prompts().tokens


def test_fewer_bytes_of_weights_lie_on_a_device_the_more_devices_share_them():
    for axis in ("data", "tensor", "context"):
        sizes = [MeshCost(V3, {axis: n}, H200, packed(V3)).weight_bytes for n in (1, 2, 4, 8)]
        assert sizes == sorted(sizes, reverse=True)
    by_axis = [MeshCost(V3, {axis: 8}, H200, packed(V3)).weight_bytes for axis in ("tensor", "data", "context")]
    assert by_axis[0] < by_axis[1] == by_axis[2]  # heads are cut along tensor alone


def test_data_shards_decode_more_than_heads_that_all_hold_the_same_latents():
    """With as many rows in all: along tensor each device reads the latents of all rows."""
    by_data, by_tensor = (MeshCost(LITE, {axis: 8}, H200) for axis in ("data", "tensor"))
    assert by_data.decode(32, 16384).tokens > 1.5 * by_tensor.decode(8 * 32, 16384).tokens


def test_a_row_alone_touches_its_own_experts_on_all_devices_together():
    cost = MeshCost(V3, {"data": 8}, H200, packed(V3))
    one_each, alone = cost.decode(1), cost.decode(1, every=1)
    touched = 256 * (1 - (1 - 8 / 256) ** 8)  # of eight rows; a row alone has eight, one on each device
    assert (one_each.floor - alone.floor) * H200.bandwidth == pytest.approx(58 * EXPERT * (touched - 8) / 8, rel=1e-6)
    assert alone.tokens == pytest.approx(1 / alone.seconds)
    assert one_each.tokens == pytest.approx(8 / one_each.seconds)


def test_along_context_a_device_reads_its_share_of_a_long_row():
    alone, shared = (MeshCost(LITE, sizes, H200).decode(1, 1 << 20).seconds for sizes in ({}, {"context": 8}))
    assert shared < alone / 2


def test_prompts_take_what_their_arithmetic_takes_at_the_rate_that_they_reach():
    alone, layers = MeshCost(LITE, {}, H200), LITE.num_hidden_layers
    found, expert = alone.prompts(4096), 3 * 2048 * 1408
    dense = 2048 * (16 * 192 + 576) + 16 * 512 * 256 + 16 * 128 * 2048  # of attention, for each token
    numbers = layers * dense + 26 * (8 * expert + 2048 * 64) + 3 * 2048 * 10944
    attended = 2 * 16 * (192 + 128) * 4096 / 2  # operations of a token
    by_hand = 4096 * (2 * numbers + layers * attended) / H200.flops / READING
    assert found.seconds - layers * H200.between == pytest.approx(by_hand, rel=0.03)


def test_data_shards_of_a_model_without_experts_say_only_whether_any_row_goes_on():
    dense = Config.preset("v3", n_routed_experts=None, n_shared_experts=None, num_experts_per_tok=None)
    assert pick_exchange(dense, {"data": 8}, 1 << 20, H200) == "gather"
    assert MeshCost(dense, {"data": 8}, H200).decode().messages.bytes == GOES_ON


def test_auto_prefers_data_shards_and_takes_tensor_where_the_weights_need_it():
    available = 0.9 * 141e9
    assert meshes(V3, 8)[0] == {"data": 8, "tensor": 1}
    assert preferred(V3, 8, H200, available, how=packed(V3)).sizes == {"data": 8, "tensor": 1}
    tight = preferred(V3, 8, H200, 108e9, how=packed(V3))
    assert tight.sizes["tensor"] > 1
    assert tight.tokens(108e9) >= 32 * 4096
    assert preferred(V3, 8, H200, 72e9, how=packed(V3)) is None


def test_meshes_on_which_heads_or_experts_have_no_equal_parts_are_left_out():
    glm = Config.preset("glm_4_7_flash")  # 20 heads, 64 experts
    assert not even(glm, {"tensor": 8})
    assert [sizes["tensor"] for sizes in meshes(glm, 8)] == [1, 2, 4]
    assert meshes(V3, 3) == []  # 256 experts


def test_fp8_has_a_scale_for_each_block_and_models_that_are_released_unpacked_have_none():
    assert packed(V3) == PackedWeights(FP8, (128, 128))
    assert packed(LITE) is None
