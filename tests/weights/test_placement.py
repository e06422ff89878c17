"""With statistics of what tokens choose, the hottest experts of layers on the host lie on the device, too, as memory allows."""

import re
from pathlib import Path

import jax
import models
import numpy as np
import pytest
from weights.test_host import STORED, OnGPU

from mla_jax.base import roofline
from mla_jax.base.errors import BadFile, BadRequest
from mla_jax.base.options import ExpertOptions
from mla_jax.model import stream
from mla_jax.model.ops import plain
from mla_jax.weights import host, measure, placement
from mla_jax.weights import plan as planning
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.placement import Placement, place
from mla_jax.weights.routing import Routing

HF = {**models.FAMILIES["v3"], "num_hidden_layers": 5, "first_k_dense_replace": 1}  # experts in 1 to 4, and MTP's
X = HF["n_routed_experts"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return models.write(tmp_path_factory.mktemp("model"), HF, models.tensors(HF, mtp=True))


@pytest.fixture
def statistics(folder, tmp_path) -> Routing:
    """In every layer two experts get nearly all: 0 and 1 of the first, 1 and 2 of the second, and so on."""
    routing = Routing.open(tmp_path / "routing.json", Checkpoint(folder).config)
    routing.counts += 1
    for i, row in enumerate(routing.counts):
        row[[i, i + 1]] = 1000 + 10 * i
    routing.save()
    return routing


def on_gpu(monkeypatch, folder: Path, layers: float) -> Checkpoint:
    """As a GPU sees it that lacks the memory of so many layers' experts."""
    monkeypatch.setattr(placement, "SPARE", 0)
    checkpoint = Checkpoint(folder)
    OnGPU(monkeypatch, checkpoint, planning.plan(checkpoint, 64).needed - layers * checkpoint.expert_bytes(1))
    return checkpoint


def placed(checkpoint: Checkpoint, **options) -> Placement:
    return place(checkpoint, ExpertOptions(stream_tokens=0, **options), 64)


def test_memory_that_is_left_holds_the_hottest_experts_of_all_layers_on_the_host(monkeypatch, folder, statistics):
    checkpoint = on_gpu(monkeypatch, folder, 3.5)
    found = placed(checkpoint, routing_stats=str(statistics.path), host_layers=5)
    assert found.host == (1, 2, 3, 4, 5)
    assert sum(map(len, checkpoint.hot.values())) == 12  # the memory of one and a half layers
    assert all({layer - 1, layer} <= set(ids) for layer, ids in checkpoint.hot.items())
    assert checkpoint.hot.keys() == {1, 2, 3, 4}
    hits = sum(statistics.chosen([layer])[0, list(ids)].sum() for layer, ids in checkpoint.hot.items())
    said = f"12 of 32 experts of these layers lie on the device, too, which get {100 * hits / 12:.0f} % of the tokens"
    assert found.lines[0] == f"{said}, by {statistics.tokens:,} tokens that were counted"
    assert planning.plan(checkpoint, 64).fits
    assert planning.plan(checkpoint, 64).weights == checkpoint.bytes()
    assert checkpoint.formats()["hot experts"] == 12 * checkpoint.hot_bytes(1) == 12 * checkpoint.expert_bytes(1) // X * 2
    assert checkpoint.abstract.hot == 12


def test_as_many_layers_lie_on_the_host_as_are_predicted_to_be_fastest(monkeypatch, folder, statistics):
    """Of three and a half that lack, four must go; all five leave room for what nearly all tokens choose."""
    checkpoint = on_gpu(monkeypatch, folder, 3.5)
    assert placed(checkpoint).host == (2, 3, 4, 5)
    for slow, expected in ((1e8, (1, 2, 3, 4, 5)), (1e15, (2, 3, 4, 5))):
        rates = roofline.Host("a CPU", slow, slow, 1e-9, 1e-9, 5e10)
        monkeypatch.setattr(measure, "host", lambda *precisions, rates=rates: rates)
        checkpoint.place(())
        assert placed(checkpoint, routing_stats=str(statistics.path)).host == expected
        assert planning.plan(checkpoint, 64).fits


def test_a_batch_is_planned_for(monkeypatch, folder):
    """Its caches push experts off the device; how many to defer follows from its steps; they are predicted."""
    checkpoint = on_gpu(monkeypatch, folder, -0.5)
    monkeypatch.setattr(measure, "host", lambda *precisions: roofline.Host("a CPU", 1e11, 1e12, 1e-5, 2e-5, 5e10))
    asked = []
    monkeypatch.setattr(roofline, "best_defer", lambda config, on, rows, *rest: asked.append(rows) or 0)
    wanted = ExpertOptions(stream_tokens=0, defer=-1)
    assert place(checkpoint, wanted, 64).host == ()
    found = place(checkpoint, wanted, 64, 64)
    assert found.host
    assert asked == [64]
    assert any(line.startswith("predicted for 64 rows") for line in found.lines)


def test_a_host_that_is_too_small_gets_no_more_layers_than_must_be(monkeypatch, folder, statistics):
    checkpoint = on_gpu(monkeypatch, folder, 3.5)
    monkeypatch.setattr(measure, "host", lambda *precisions: roofline.Host("a CPU", 1e8, 1e8, 1e-9, 1e-9, 5e10))
    packed, largest = X * host.packed_bytes(checkpoint.config, "bf16"), checkpoint.expert_bytes(1)
    monkeypatch.setattr(placement, "free_memory", lambda: 4 * packed + largest)
    assert placed(checkpoint, routing_stats=str(statistics.path)).host == (2, 3, 4, 5)


@pytest.mark.parametrize("count", [0, 1, 5, 32])
def test_a_number_of_experts_overrides_what_fits_and_takes_as_many_of_each_layer_without_statistics(monkeypatch, folder, count):
    monkeypatch.setattr(measure, "host", lambda *precisions: roofline.Host("a CPU", 1e11, 1e12, 1e-5, 2e-5, 5e10))
    monkeypatch.setattr(host, "refuse_without_library", lambda: None)
    checkpoint = Checkpoint(folder)
    found = place(checkpoint, ExpertOptions(experts="host", device_experts=count))
    sizes = [len(checkpoint.hot.get(layer, ())) for layer in (1, 2, 3, 4)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert ("as if all were equally likely" in found.lines[0]) == (count > 0)


def test_zero_keeps_all_on_the_host_and_a_file_that_has_counted_nothing_changes_nothing(
    monkeypatch, folder, statistics, tmp_path
):
    checkpoint = on_gpu(monkeypatch, folder, 3.5)
    found = placed(checkpoint, routing_stats=str(statistics.path), device_experts=0, host_layers=5)
    assert checkpoint.hot == {}
    assert "0 of 32" in found.lines[0]
    for path in (tmp_path / "none.json", tmp_path / "empty.json"):
        checkpoint.place(())
        found = placed(checkpoint, routing_stats=str(path))
        assert (found.host, checkpoint.hot) == ((2, 3, 4, 5), {})
        Routing.open(tmp_path / "empty.json", checkpoint.config).save()


def test_what_cannot_be_is_refused(monkeypatch, folder, statistics):
    with pytest.raises(BadRequest, match="device_experts is 41\n  the model has 40 experts in 5 layers"):
        place(Checkpoint(folder), ExpertOptions(device_experts=41))
    statistics.path.write_text("{}")
    with pytest.raises(BadFile, match="holds no routing statistics"):
        place(Checkpoint(folder), ExpertOptions(routing_stats=str(statistics.path)))


def test_predictions_count_what_the_host_still_gets(monkeypatch, folder, statistics):
    checkpoint = on_gpu(monkeypatch, folder, 3.5)
    monkeypatch.setattr(measure, "host", lambda *precisions: roofline.Host("a CPU", 1e8, 1e15, 0, 0, 5e10))

    def busy(**options) -> list[float]:
        checkpoint.place(())
        lines = "\n".join(placed(checkpoint, host_layers=5, **options).lines)
        return [float(ms.replace(",", "")) for ms in re.findall(r"CPU is busy ([\d,.]+) ms", lines)]

    each = 4 * host.packed_bytes(checkpoint.config, "bf16") / 1e8 * 1e3
    assert busy() == pytest.approx([each * 3, each * roofline.experts_touched(checkpoint.config, 8)], abs=0.06)
    found = busy(routing_stats=str(statistics.path))
    chosen = statistics.chosen([1, 2, 3, 4])
    held = np.zeros((4, X), bool)
    for layer, ids in checkpoint.hot.items():
        held[layer - 1, list(ids)] = True
    brute = [sum(1 - (1 - p) ** rows for p in chosen[~held]) / 4 for rows in (1, 8)]
    assert found == pytest.approx([each * n for n in brute], abs=0.06)


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("kept", STORED, ids=lambda function: function.__name__)
def test_hot_experts_of_every_kind_of_checkpoint_are_what_the_host_has(kept, tmp_path):
    """As numbers but for FP8, also from mapped files."""
    path, folder, ids = kept(tmp_path), tmp_path / "packed", (2, 7)
    for _ in range(2):
        checkpoint = Checkpoint(path)
        checkpoint.place([1], hot={1: ids})
        experts, like = (m.layers[1].mlp.experts for m in (checkpoint.read(folder=folder), checkpoint.abstract))
        found, planned = ([w.get_value() for w in (e.hot.gate, e.hot.up, e.hot.down)] for e in (experts, like))
        whole = stream.stacks(experts.layer, 0, X, checkpoint.dtype)
        for copied, shape, all_of_them in zip(found, planned, whole, strict=True):
            assert jax.eval_shape(lambda w=copied: w) == shape
            numbers = [np.asarray(plain(w, checkpoint.dtype)) for w in (copied, all_of_them)]
            np.testing.assert_array_equal(numbers[0].view(np.uint8), numbers[1][list(ids)].view(np.uint8))
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(found)) == 2 * checkpoint.hot_bytes(1)
