"""Where experts are, from figures alone: options, sizes of layers, a device, and what the host reaches."""

import dataclasses
import functools
import itertools
import re

import models
import numpy as np
import pytest

from mla_jax.base.config import Config
from mla_jax.base.errors import BadFile, BadRequest, DoesNotFit, Unsupported
from mla_jax.base.options import ExpertOptions
from mla_jax.base.roofline import DEVICES, Device, experts_touched
from mla_jax.mesh.cost import MeshCost
from mla_jax.mesh.host_cost import HostRates, Routed, stream_tokens
from mla_jax.model.parts import cost_of, released
from mla_jax.offload.pack import packed_bytes
from mla_jax.offload.place import (
    SPARE,
    ExpertLayer,
    Figures,
    Placement,
    Split,
    best_split,
    most_chosen,
    place,
)
from mla_jax.offload.replicated import replica_bytes
from mla_jax.offload.routing import Routing
from mla_jax.offload.streaming import Packing, scratch_bytes

HF = {**models.FAMILIES["v3"], "num_hidden_layers": 5, "first_k_dense_replace": 1}
CONFIG = Config.from_hf(HF)  # experts in layers 1 to 4, and in MTP's, the fifth
X = CONFIG.n_routed_experts
PACKING = Packing.for_config(CONFIG, "bf16")
EACH = X * 3 * CONFIG.hidden_size * CONFIG.moe_intermediate_size * 2  # bytes of a layer's experts
LAYERS = tuple(ExpertLayer(number, EACH, PACKING) for number in range(1, 6))
RATES = HostRates("a CPU", 1e11, 1e12, 2e-5, 5e10)
HUGE = 1 << 40


@functools.cache
def cost(config: Config, device: Device) -> MeshCost:
    return cost_of(released(config, device))


def figures(missing: float = 0, config: Config = CONFIG, device: Device = DEVICES["NVIDIA H200"], **changes) -> Figures:
    """As a GPU has them that lacks the memory of `missing` layers' experts."""
    needed = 6 * EACH
    known = {
        "cost": cost(config, device),
        "dtype": np.dtype("float16"),
        "layers": LAYERS,
        "needed": needed,
        "available": int(needed - missing * EACH),
        "host_free": HUGE,
        "context": 64,
        "held": 64,
        "batch": 1,
        "chunk": 16,
        "streamed_chunk": 256,
        "quantized": False,
    }
    return Figures(**{**known, **changes})


def placed(found: Figures, rates: HostRates = RATES, stream_tokens: int | None = 0, **options) -> Placement:
    return place(ExpertOptions(stream_tokens=stream_tokens, **options), found, lambda *precisions: rates)


@pytest.fixture
def statistics(tmp_path) -> Routing:
    """In every layer two experts get nearly all: 0 and 1 of the first, 1 and 2 of the second, and so on."""
    routing = Routing.open(tmp_path / "routing.json", CONFIG)
    routing.counts += 1
    for i, row in enumerate(routing.counts):
        row[[i, i + 1]] = 1000 + 10 * i
    routing.save()
    return routing


# how many layers


@pytest.mark.parametrize(
    ("missing", "expected"),
    [(-1, ()), (0, ()), (1 / EACH, (5,)), (1, (5,)), (1 + 1 / EACH, (4, 5)), (4.5, (1, 2, 3, 4, 5)), (5.5, (1, 2, 3, 4, 5))],
)
def test_experts_leave_a_gpu_from_the_last_layer_on_until_the_rest_fits(missing, expected):
    assert placed(figures(missing)).host == expected


def test_a_cpu_device_keeps_its_experts_unless_asked():
    cpu = figures(2, device=DEVICES["cpu"])
    assert placed(cpu) == Placement(why="there is no other memory")
    assert placed(cpu, experts="host").host == (1, 2, 3, 4, 5)


def test_a_number_of_layers_overrides_the_decision_and_a_backend_keeps_all_on_the_device():
    for missing in (0, 2):
        assert placed(figures(missing), host_layers=1).host == (5,)
        assert placed(figures(missing), experts="host").host == (1, 2, 3, 4, 5)
        assert placed(figures(missing), experts="loop") == Placement(why="as asked")


def test_streamed_experts_have_room_on_a_gpu():
    """As many layers leave as take its memory, and none where all fits."""
    scratch, lacking = scratch_bytes(CONFIG, 2, 64), dataclasses.replace(figures(), available=figures().needed - 1)
    assert placed(lacking, stream_tokens=0).host == (5,)
    assert len(placed(lacking, stream_tokens=1).host) == -(-(scratch + 1) // EACH) > 1
    assert placed(figures(), stream_tokens=1).host == ()


def test_a_placement_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        placed(figures(1)).stream = 5


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"host_layers": 6}, "host_layers is 6, expected 0 to 5\n  the model has 5 layers with experts"),
        ({"host_precision": "int3"}, "host_precision int3 is not known\n  known: bf16, int8"),
        ({"defer": 3}, "defer is 3, expected 0 to 2"),
        ({"device_experts": 41}, "device_experts is 41, expected 0 to 40\n  the model has 40 experts in 5 layers"),
    ],
)
def test_what_cannot_be_is_refused_before_the_host_is_measured(options, said):
    with pytest.raises(BadRequest, match=re.escape(said)):
        place(ExpertOptions(**options), figures(2), lambda *_: pytest.fail("the host was measured"))


def test_sums_that_are_normed_are_not_deferred():
    config = Config.from_hf(models.FAMILIES["axk1"])
    assert placed(figures(2, config=config), defer=0).defer == 0
    with pytest.raises(BadRequest, match=r"defer is 1, expected 0 to 0\n  this model changes the sum"):
        placed(figures(2, config=config), defer=1)


def test_a_model_without_experts_has_none_to_move():
    with pytest.raises(BadRequest, match="no routed experts"):
        placed(figures(config=Config.from_hf(models.FAMILIES["youtu"]), layers=()), experts="host")


def test_damaged_statistics_are_refused(tmp_path):
    (tmp_path / "routing.json").write_text("{}")
    with pytest.raises(BadFile, match="holds no routing statistics"):
        placed(figures(2), routing_stats=str(tmp_path / "routing.json"))


def test_a_host_that_is_too_small_is_refused_unless_files_are_mapped(tmp_path):
    """All packed layers and one that is not yet have room, or a byte less."""
    needed = 2 * X * packed_bytes(PACKING) + EACH
    assert placed(figures(2, host_free=needed)).host == (4, 5)
    small = figures(2, host_free=needed - 1)
    with pytest.raises(DoesNotFit, match=r"do not fit the host's memory\n  2 layers take .* MiB while they are packed; "):
        placed(small)
    assert placed(small, host_folder=str(tmp_path)).host == (4, 5)


def test_where_the_library_is_missing_experts_stay_on_the_device_unless_asked_for():
    def missing(*precisions):
        raise Unsupported("it is not built", "build it")

    found = place(ExpertOptions(), figures(2), missing)
    assert found == Placement(why=found.why)
    assert found.why.endswith("; they stay on the device: it is not built; build it")
    with pytest.raises(Unsupported, match="it is not built"):
        place(ExpertOptions(experts="host"), figures(2), missing)


def test_rates_are_those_of_the_first_layer_on_the_host():
    mixed = [*LAYERS[:3], ExpertLayer(4, EACH, PACKING._replace(precision="fp8_block", down_precision="int8")), LAYERS[4]]
    asked = []
    place(ExpertOptions(host_layers=2), figures(layers=tuple(mixed)), lambda *formats: asked.append(formats) or RATES)
    assert asked == [("fp8_block", "int8")]


# replicas


def test_memory_that_is_left_holds_the_most_chosen_experts_of_all_layers_on_the_host(statistics):
    device = figures(3.5)
    found = placed(device, routing_stats=str(statistics.path), host_layers=5)
    assert found.host == (1, 2, 3, 4, 5)
    count = sum(map(len, found.replicated.values()))
    assert count == int((1.5 * EACH - SPARE * device.available) / replica_bytes(PACKING, device.dtype)) == 10
    assert found.replicated.keys() == {1, 2, 3, 4}
    assert all({layer - 1, layer} <= set(ids) for layer, ids in found.replicated.items())
    hits = sum(statistics.chosen([layer])[0, list(ids)].sum() for layer, ids in found.replicated.items())
    assert found.replicas == (count, 32, pytest.approx(hits / (4 * CONFIG.num_experts_per_tok)), statistics.tokens)


def test_as_many_layers_are_on_the_host_as_are_predicted_to_be_fastest(statistics):
    """Of three and a half that lack, four must go; all five leave room for what nearly all tokens choose."""
    device, stats = figures(3.5), str(statistics.path)
    assert placed(device).host == (2, 3, 4, 5)
    for speed, expected in ((1e8, (1, 2, 3, 4, 5)), (1e15, (2, 3, 4, 5))):
        assert placed(device, RATES._replace(bandwidth=speed, flops=speed, call=1e-9), routing_stats=stats).host == expected


def test_a_host_that_is_too_small_gets_no_more_layers_than_must_be(statistics):
    slow, packed = RATES._replace(bandwidth=1e8, flops=1e8), X * packed_bytes(PACKING)
    for free, expected in ((4 * packed + EACH, (2, 3, 4, 5)), (5 * packed + EACH, (1, 2, 3, 4, 5))):
        assert placed(figures(3.5, host_free=free), slow, routing_stats=str(statistics.path)).host == expected


@pytest.mark.parametrize("count", [0, 1, 5, 32])
def test_a_number_of_replicas_overrides_what_fits_and_without_statistics_all_layers_get_as_many(count):
    found = placed(figures(device=DEVICES["cpu"]), experts="host", device_experts=count)
    sizes = [len(found.replicated.get(layer, ())) for layer in (1, 2, 3, 4)]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert found.replicas == ((count, 32, pytest.approx(count / 32), 0) if count else None)


def test_no_replicas_may_be_wanted_and_a_file_that_has_counted_nothing_changes_nothing(statistics, tmp_path):
    found = placed(figures(3.5), routing_stats=str(statistics.path), device_experts=0, host_layers=5)
    assert found.replicated == {}
    assert found.replicas == (0, 32, 0, statistics.tokens)
    Routing.open(tmp_path / "empty.json", CONFIG).save()
    for name in ("none.json", "empty.json"):
        found = placed(figures(3.5), routing_stats=str(tmp_path / name))
        assert (found.host, found.replicated, found.replicas) == ((2, 3, 4, 5), {}, None)


@pytest.mark.parametrize("seed", range(5))
def test_the_most_chosen_experts_are_the_best_set_that_fits_by_trying_all(seed):
    chosen = np.random.default_rng(seed).random((2, 4))
    for count in range(9):
        found = most_chosen(chosen, [10, 10], 10 * count + 9)
        assert found.sum() == count
        best = max(chosen.ravel()[list(s)].sum() for s in itertools.combinations(range(8), count))
        assert chosen[found].sum() == pytest.approx(best)
        np.testing.assert_array_equal(found, most_chosen(chosen, [10, 10], 1e9, count))


def test_choices_are_weighed_by_bytes_and_without_statistics_layers_get_as_many():
    found = most_chosen(np.array([[0.5, 0.4], [0.6, 0.1]]), [1, 2], 2)
    np.testing.assert_array_equal(found, [[True, True], [False, False]])
    np.testing.assert_array_equal(most_chosen(np.full((3, 4), 0.25), [1, 1, 1], 6).sum(1), [2, 2, 2])
    assert not most_chosen(np.full((3, 4), 0.25), [1, 1, 1], -1).any()


def test_of_splits_the_fastest_is_taken_and_more_layers_only_if_they_gain():
    splits = [Split(LAYERS[:count]) for count in range(1, 5)]
    times = {1: 10.0, 2: 9.95, 3: 8.0, 4: 7.99}
    assert best_split(splits, lambda split: times[len(split.layers)]) is splits[2]
    assert best_split(splits[:2], lambda split: times[len(split.layers)]) is splits[0]


# what is predicted


@pytest.mark.parametrize("asked", [None, 0, 1, 300])
def test_the_tokens_from_which_experts_are_streamed_are_predicted_or_as_asked(asked):
    device = figures()
    found = placed(device, experts="host", stream_tokens=asked)
    predicted = stream_tokens(CONFIG, device.device, RATES, packed_bytes(PACKING))
    assert found.stream == (predicted if asked is None else asked)
    assert found.forecast.prompt.tokens == (256 if found.stream else 16)


def test_on_a_cpu_nothing_is_streamed_unless_asked_and_no_steps_are_predicted():
    for asked in (None, 2):
        found = placed(figures(device=DEVICES["cpu"]), experts="host", stream_tokens=asked)
        assert found.stream == (asked or 0)
        assert (found.forecast.steps, found.forecast.prompt, found.forecast.rates) == ((), None, RATES)


def test_steps_are_predicted_for_the_batch_and_the_tokens_that_were_asked_for():
    for held, batch in ((64, 1), (400, 64)):
        found = placed(figures(held=held, batch=batch), experts="host", defer=2)
        assert found.defer == 2
        assert found.forecast.held == held
        assert [step.rows for step in found.forecast.steps] == sorted({1, 8, batch})


def test_steps_are_predicted_with_the_experts_that_the_host_still_computes(statistics):
    slow = RATES._replace(bandwidth=1e8, flops=1e15, call=0.0)

    def cpu(**options) -> list[float]:
        found = placed(figures(3.5), slow, host_layers=5, **options)
        return [step.cpu for step in found.forecast.steps]

    each = 4 * packed_bytes(PACKING) / 1e8  # one expert in each of the layers that decoding runs
    assert cpu() == pytest.approx([each * 3, each * experts_touched(CONFIG, 8)])
    found = placed(figures(3.5), slow, host_layers=5, routing_stats=str(statistics.path))
    chosen, here = statistics.chosen([1, 2, 3, 4]), np.zeros((4, X), bool)
    for layer, ids in found.replicated.items():
        here[layer - 1, list(ids)] = True
    brute = [sum(1 - (1 - p) ** rows for p in chosen[~here]) / 4 for rows in (1, 8)]
    assert [step.cpu for step in found.forecast.steps] == pytest.approx([each * n for n in brute])


def test_with_all_experts_on_a_gpu_steps_are_predicted_where_the_time_between_layers_was_measured():
    found = placed(figures(batch=4)).forecast
    expected = [(rows, figures().cost.decode(rows, 64).seconds, 0.0) for rows in (1, 4, 8)]
    assert [*found.steps] == expected
    assert (found.prompt, found.rates) == (None, None)
    assert placed(figures(), experts="dense").forecast is None
    assert placed(figures(quantized=True)).forecast is None
    assert placed(figures(dtype=np.dtype("float32"))).forecast is None


def test_a_placement_in_words(statistics):
    found = placed(figures(3.5), routing_stats=str(statistics.path), host_layers=5, stream_tokens=300)
    numbers = re.compile(r"\d[\d,.]*")
    assert [numbers.sub("N", line) for line in found.lines()] == [
        "N of N experts of these layers are replicated on the device: N% of the tokens' choices, by N counted tokens",
        "a CPU: N GB/s of experts, N TFLOP/s, N us per call, N GB/s to the device",
        "predicted for N sequence of N tokens: N tok/s, a step takes N ms, of which the CPU takes N ms",
        "predicted for N sequences of N tokens: N tok/s, a step takes N ms, of which the CPU takes N ms",
        "predicted for a prompt in chunks of N tokens: N tok/s; experts are streamed to the device from N tokens on",
    ]
    rates = found.lines()[1]
    assert numbers.findall(rates) == ["100.0", "1.00", "20", "50.0"]


def test_what_tokens_touch_is_what_they_touch_when_they_draw():
    """Independent draws of each expert, of which the expectation knows."""
    rng, tokens = np.random.default_rng(0), 5
    chosen, replicated = rng.random((3, 8)), rng.random((3, 8)) < 0.4
    drawn = (rng.random((20_000, tokens, 3, 8)) < chosen).any(1)
    routed = Routed(chosen, replicated)
    expected = [(drawn & where).sum((1, 2)).mean() / 3 for where in (~replicated, replicated)]
    np.testing.assert_allclose(routed.touched(tokens), expected, rtol=0.01)
    assert routed.touched(1) == pytest.approx([chosen[~replicated].sum() / 3, chosen[replicated].sum() / 3])
    assert routed.host_share == pytest.approx(chosen[~replicated].sum() / chosen.sum())
