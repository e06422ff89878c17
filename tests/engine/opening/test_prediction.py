"""A mesh's predicted rates with a checkpoint: the cost of its own weights, as they are stored."""

import json

import checkpoints
import hollow
import pytest

from mla_jax.base.config import Config
from mla_jax.base.link_rates import PLANNED
from mla_jax.engine.opening.prediction import cost_of, packed_as, predict
from mla_jax.mesh.cost import HELD, MeshCost, PackedWeights, packed
from mla_jax.mesh.planned import planned
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights.hub import resolve
from mla_jax.weights.load import Checkpoint


def opened(folder, **dispatch) -> Checkpoint:
    return Checkpoint(folder, dispatch=Dispatch(device=PLANNED["h200"].figures, **dispatch))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {numbers: tmp_path_factory.mktemp(numbers) for numbers in ("bf16", "fp8")}
    return {numbers: checkpoints.released(folder, numbers=numbers) for numbers, folder in found.items()}


@pytest.fixture(scope="module")
def checkpoint(folders):
    return opened(folders["bf16"])


def test_the_cost_is_that_of_the_checkpoint_s_config_on_the_mesh(checkpoint):
    devices = planned("h200", {"data": 2})
    found = predict(checkpoint, devices, devices.free_bytes(), batch=8, context=64)
    cost = MeshCost(checkpoint.config, devices.sizes, PLANNED["h200"].figures)
    assert (found.rows, found.held) == (8, 64)
    assert found.decode == cost.decode(4, 64)
    assert found.prompts == cost.prompts(64)


def test_rows_are_shared_by_data_shards_and_without_a_number_as_many_as_fit(checkpoint):
    devices, longest = planned("h200", {"data": 4, "tensor": 2}), checkpoint.config.max_position_embeddings
    assert predict(checkpoint, devices, devices.free_bytes(), batch=9).rows == 12
    free = predict(checkpoint, devices, devices.free_bytes())
    assert (free.rows, free.held) == (4 * 32, min(HELD, longest))
    cost = cost_of(checkpoint, devices)
    tight = cost.weight_bytes + cost.working_bytes() + 5.5 * free.held * cost.token_bytes
    assert predict(checkpoint, devices, int(tight)).rows == 4 * 5
    assert predict(checkpoint, devices, 0).rows == 4


def test_weights_cost_what_they_take_as_they_are_packed(folders, checkpoint):
    fp8 = opened(folders["fp8"])
    assert packed_as(checkpoint) is None
    rows, columns = checkpoints.BLOCK
    found = packed_as(fp8)
    assert isinstance(found, PackedWeights)
    assert found.block == checkpoints.BLOCK
    assert 1 + 4 / (rows * columns) <= found.bytes < 1.2  # blocks at the borders are smaller
    devices = planned("h200", {"data": 2})
    assert cost_of(fp8, devices).weight_bytes < cost_of(checkpoint, devices).weight_bytes


def test_weights_of_one_device_are_those_of_the_plan_without_the_layer_for_multi_token_prediction(checkpoint):
    shapes = {path: value for path, value in checkpoint.parameters().items() if not path.startswith("mtp.")}
    found = sum(value.size * value.dtype.itemsize for value in shapes.values())
    assert cost_of(checkpoint, planned("h200", {})).weight_bytes == pytest.approx(found, rel=1e-2)


@pytest.mark.parametrize(("dispatch", "size"), [({}, "latent"), ({"kv_cache": "fp8"}, "fp8"), ({"attention": "naive"}, "heads")])
def test_a_token_takes_what_the_cache_keeps_of_it(dispatch, size):
    found = opened(resolve(None), **dispatch)  # the demo model, with latents of 256
    config, heads = found.config, found.config.num_attention_heads
    latent, rope = config.kv_lora_rank, config.qk_rope_head_dim
    expected = {
        "latent": 2 * (latent + rope),
        "fp8": latent + 4 * -(-latent // 128) + 2 * rope,
        "heads": 2 * heads * (config.qk_nope_head_dim + rope + config.v_head_dim),
    }
    assert cost_of(found, planned("h200", {"data": 2})).token_bytes == config.num_hidden_layers * expected[size]


def test_the_words_name_rates_of_all_devices_the_share_of_messages_and_the_exchange(checkpoint):
    devices = planned("h200", {"data": 2})
    found = predict(checkpoint, devices, devices.free_bytes(), batch=8, context=64)
    first, second = found.lines()
    assert first.startswith("predicted: ")
    assert "tokens/s of all devices at batch 8 x 64 held, prompts " in first
    assert first.endswith(f"communication {100 * found.decode.share:.0f} % of the step")
    exchanges = found.decode.exchange, found.prompts.exchange
    assert second == "exchange of tokens with experts: {} in a step, {} in prompts".format(*exchanges)
    assert json.loads(json.dumps(found.fields()))["tokens_per_second"] == found.decode.tokens


@pytest.mark.deep
def test_v3_whose_headers_alone_are_here_fits_eight_h200s_but_no_eight_h100s(tmp_path):
    """671 billion weights and the layer for multi-token prediction: 686 GB."""
    checkpoint = opened(hollow.folder(tmp_path, Config.preset("v3").to_hf()))
    assert round(checkpoint.bytes() / 1e9) == 686
    for kind, fits in (("h200", True), ("h100", False)):
        devices = planned(kind, {"data": 8}, 0.9)
        cost = cost_of(checkpoint, devices)
        released = MeshCost(checkpoint.config, {"data": 8}, devices.figures, packed(checkpoint.config))
        assert cost.weight_bytes == pytest.approx(released.weight_bytes, rel=1e-6)
        assert (cost.tokens(devices.free_bytes()) >= 32 * HELD) == fits
        assert predict(checkpoint, devices, devices.free_bytes()).rows == (8 * 32 if fits else 8)
