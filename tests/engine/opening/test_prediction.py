"""A mesh's predicted rates with a checkpoint: the cost of its own weights, as they are stored."""

import json

import checkpoints
import hollow
import pytest

from mla_jax.base.config import Config
from mla_jax.base.link_rates import PLANNED
from mla_jax.cache.paged import PAGE
from mla_jax.engine.opening.prediction import Prediction, predict
from mla_jax.mesh.cost import HELD
from mla_jax.mesh.planned import planned
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.parts import cost_of, page_bytes, released
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.plan import memory_plan
from mla_jax.weights.temporaries import temporaries


def opened(folder, sizes=None, fraction=None) -> Checkpoint:
    """On H200s that are not here."""
    dispatch = Dispatch(device=PLANNED["h200"].figures)
    return Checkpoint(folder, dispatch=dispatch, devices=planned("h200", sizes or {}, fraction))


def predicted(checkpoint: Checkpoint, batch: int = 1, context: int | None = None) -> Prediction:
    return predict(checkpoint.model(), memory_plan(checkpoint, context, batch), batch, context)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {numbers: tmp_path_factory.mktemp(numbers) for numbers in ("bf16", "fp8")}
    return {numbers: checkpoints.released(folder, numbers=numbers) for numbers, folder in found.items()}


def test_the_prediction_is_the_cost_of_the_checkpoint_s_own_part_of_each_device(folders):
    checkpoint = opened(folders["bf16"], {"data": 2})
    found, cost = predicted(checkpoint, batch=8, context=64), cost_of(checkpoint.model())
    assert (found.rows, found.held) == (8, 64)
    assert found.decode == cost.decode(4, 64)
    assert found.prompts == cost.prompts(64)


@pytest.mark.deep
def test_rows_are_shared_by_data_shards_and_without_a_number_as_many_as_fit(folders):
    checkpoint = opened(folders["bf16"], {"data": 4, "tensor": 2})
    assert predicted(checkpoint, batch=9).rows == 12
    free = predicted(checkpoint)
    assert (free.rows, free.held) == (4 * 32, min(HELD, checkpoint.config.max_position_embeddings))
    model, memory = checkpoint.model(), PLANNED["h200"].memory
    for rows, expected in ((5.5, 4 * 5), (-1, 4)):
        cache = rows * free.held // PAGE * page_bytes(model)
        taken = checkpoint.bytes() + temporaries(model, 64) + cache
        assert predicted(opened(folders["bf16"], {"data": 4, "tensor": 2}, taken / memory)).rows == expected


def test_weights_cost_what_they_take_as_they_are_packed(folders):
    bf16, fp8 = (opened(folders[name], {"data": 2}) for name in ("bf16", "fp8"))
    for checkpoint in (bf16, fp8):
        without_mtp = checkpoint.without_mtp()
        assert cost_of(checkpoint.model()).parts.weight_bytes == without_mtp.bytes()
    assert cost_of(fp8.model()).parts.weight_bytes < 0.7 * cost_of(bf16.model()).parts.weight_bytes


def test_the_words_name_rates_of_all_devices_the_share_of_messages_and_the_exchange(folders):
    found = predicted(opened(folders["bf16"], {"data": 2}), batch=8, context=64)
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
    folder = hollow.folder(tmp_path, Config.preset("v3").to_hf())
    assert round(opened(folder).bytes() / 1e9) == 686
    for kind, rows in (("h200", 8 * 32), ("h100", 8)):
        dispatch = Dispatch(device=PLANNED[kind].figures)
        checkpoint = Checkpoint(folder, dispatch=dispatch, devices=planned(kind, {"data": 8}, 0.9))
        parts = cost_of(checkpoint.model()).parts
        as_released = cost_of(released(checkpoint.config, PLANNED[kind].figures, {"data": 8})).parts
        assert parts.weight_bytes == pytest.approx(as_released.weight_bytes, rel=1e-6)
        assert predicted(checkpoint).rows == rows
