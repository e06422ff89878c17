"""What a device reaches is measured once; where that fails or cannot be, the table's figures are taken."""

import itertools
import json
import os
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from cpu_experts import library
from mla_jax.base.roofline import DEVICES, Host
from mla_jax.weights import measure

H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
FOUND = {"flops": 800e12, "bandwidth": 4.4e12}


def test_figures_of_a_gpu_are_measured_once_and_again_if_the_file_is_damaged(tmp_path, monkeypatch):
    path, calls = tmp_path / "folder" / "device.json", []
    monkeypatch.setattr(measure, "measure_device", lambda target: calls.append(target) or dict(FOUND))
    expected = DEVICES["NVIDIA H200"]._replace(measured=True, **FOUND)
    assert [measure.device(H200, path) for _ in range(2)] == [expected] * 2
    assert calls == [H200]
    assert [*json.loads(path.read_text())] == [f"NVIDIA H200, JAX {jax.__version__}"]
    for damage in ("", "[1]", '{"a": 1}', path.read_text().replace("4400", "44"), path.read_text().replace("flops", "flips")):
        path.write_text(damage)
        assert measure.device(H200, path) == expected
    path.write_text(path.read_text().replace("800000000000000.0", "NaN"))
    assert measure.device(H200, path) == expected
    path.write_text(path.read_text().replace("800000000000000.0", "8" * 400))
    assert measure.device(H200, path) == expected
    assert len(calls) == 8


@pytest.mark.parametrize("found", [None, {**FOUND, "flops": 1.0}, {**FOUND, "bandwidth": 1e15}, {**FOUND, "flops": float("nan")}])
def test_what_cannot_be_is_not_believed_and_not_kept(tmp_path, monkeypatch, found):
    monkeypatch.setattr(measure, "measure_device", lambda target: found)
    assert measure.device(H200, tmp_path / "device.json") == DEVICES["NVIDIA H200"]
    assert not (tmp_path / "device.json").exists()


def test_a_device_that_fails_takes_the_tables_figures(tmp_path, monkeypatch):
    def fail(target):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(measure, "measure_device", fail)
    assert measure.device(H200, tmp_path / "device.json") == DEVICES["NVIDIA H200"]


def test_a_cpu_is_not_measured(tmp_path):
    assert measure.device(cache=tmp_path / "device.json") == DEVICES["cpu"]
    assert [*tmp_path.iterdir()] == []


def test_a_place_that_cannot_be_written_keeps_nobody_from_measuring(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(measure, "measure_device", lambda target: dict(FOUND))
    assert measure.device(H200, tmp_path / "file" / "device.json").measured


def test_memory_is_read_and_matrices_are_multiplied(monkeypatch):
    """On the CPU, with little of both."""
    for name, value in {"READ": 1 << 20, "LEAST": 1 << 19, "SIDE": 256, "_free": lambda target: 1 << 30}.items():
        monkeypatch.setattr(measure, name, value)
    found = measure.measure_device(jax.devices()[0])
    assert found is not None
    assert found.keys() == set(measure.FIGURES)
    assert all(value > 1e6 for value in found.values())
    monkeypatch.setattr(measure, "_free", lambda target: 1 << 20)
    assert measure.measure_device(jax.devices()[0]) is None


FIGURES = Host._fields[1:]
RATES = Host("a CPU", **dict.fromkeys(FIGURES, 1e9))._replace(exposed=0.5)


@pytest.fixture
def measured(monkeypatch) -> list[tuple]:
    """The calls of what measures rates, which are then RATES."""
    calls = []
    monkeypatch.setattr(measure, "_key", lambda precision: precision)
    monkeypatch.setattr(measure, "measure", lambda *precisions: calls.append(precisions) or RATES)
    return calls


IMPOSSIBLE = ["fast", None, True, [], {}, -1, float("nan"), float("inf"), 1e30, 10**400]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in FIGURES for value in IMPOSSIBLE),
        *((f, 0) for f in ("bandwidth", "flops", "link")),
        ("name", 1),
    ],
)
def test_rates_that_no_cpu_has_are_measured_again(tmp_path, measured, field, value):
    path, calls = tmp_path / "host.json", measured
    path.write_text(json.dumps({"bf16": {**RATES._asdict(), field: value}, "int8": RATES._asdict()}))
    assert [measure.host("bf16", cache=path) for _ in range(2)] == [RATES] * 2
    assert calls == [("bf16", None)]
    assert json.loads(path.read_text()) == dict.fromkeys(("bf16", "int8"), RATES._asdict())


def test_a_call_too_short_to_be_measured_is_believed_and_codes_that_take_longer_than_their_bytes(tmp_path, measured):
    kept = RATES._replace(call=0.0, latency=0.0, exposed=1.5)
    (tmp_path / "host.json").write_text(json.dumps({"bf16": kept._asdict()}))
    assert measure.host("bf16", cache=tmp_path / "host.json") == kept
    assert not measured


class Clocked:
    """A layer whose calls take 0.1 ms, where they have experts 0.4 ms and 1 ms for each more, and where 0.2 ms passed since the
    last call 0.3 ms more; each token but the first takes 0.2 ms, which hide half of the experts' time, or what is `exposed`."""

    experts, nbytes, exposed = 30, 30 * 5_000_000, 0.5

    def __init__(self, *_, **__):
        self.now, self.ended, self.turns = 0.0, 0.0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def clock(self) -> float:
        self.now += 1e-9
        return self.now

    def forward(self, x, ids, weights):
        self.seen = {*ids.ravel().tolist()} - {self.experts}
        self.turns.append(self.seen)
        asleep = self.now - self.ended > 1e-4
        read, computed = 1e-3 * len(self.seen), 0.2e-3 * (len(x) - 1)
        both = read * self.exposed + computed if len(x) > 1 else read
        self.now += 0.1e-3 + (0.4e-3 + max(read, both) + 0.3e-3 * asleep if self.seen else 0)
        self.ended = self.now


@pytest.mark.parametrize("exposed", [0.5, 1.5])  # converting codes takes time as well
def test_a_calls_own_time_is_told_from_that_of_bytes_and_of_threads_that_sleep(monkeypatch, exposed):
    layer, beyond = Clocked(), []
    monkeypatch.setattr(layer, "exposed", exposed, raising=False)
    monkeypatch.setattr(measure, "last_cache", lambda: 100 << 20)
    monkeypatch.setattr(measure, "repeated", lambda *given: beyond.append(given[-1]) or layer)
    monkeypatch.setattr("cpu_experts.isa", lambda: "avx2")
    monkeypatch.setattr(measure.time, "perf_counter", layer.clock)
    monkeypatch.setattr(measure, "_way_seconds", lambda layer: 0.02e-3)
    monkeypatch.setattr(measure, "_link_seconds", lambda layer, count: 1e-4 + count * 5e6 / 5e10)
    found = measure.measure("int8")
    assert found[1:] == pytest.approx((5e9, 6 * 12 * 2048 * 1536 / 0.2e-3, 0.4e-3, 0.72e-3, 5e10, exposed), rel=1e-3)
    assert beyond == [400 << 20]
    worked = [seen for seen in layer.turns if seen]
    assert all(seen.isdisjoint(then) for seen, then in itertools.pairwise(worked))
    assert set().union(*worked) == {*range(layer.experts)}


def test_a_measurement_that_other_work_disturbed_gives_way_to_the_other_one(monkeypatch):
    """Here all of the first, then a part of the second."""
    few, more, some, many = 2.5e-3, 12.5e-3, 10.3e-3, 55.1e-3
    second = 1e-4, few + 1e-4, more + 1e-4, few + 4e-4, some + 1e-4, many + 1e-4, 2e-5, 9e-1, 2.6e-2
    passes = iter([(4e-4, 9e-3, 5e-2, 9e-3, 0.1, 0.2, 9e-5, 8e-3, 3e-1), second])
    monkeypatch.setattr("cpu_experts.Experts", Clocked)
    monkeypatch.setattr("cpu_experts.isa", lambda: "avx2")
    monkeypatch.setattr(measure, "_times", lambda layer, turns: next(passes))
    flops, link = 6 * 12 * 2048 * 1536 / 0.2e-3, 5e6 / 1e-3
    assert measure.measure("int8")[1:] == pytest.approx((5e9, flops, 0.5e-3, 0.82e-3, link, 0.3))


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("name", ["load", "load_ffi"])
def test_rates_of_a_library_are_not_those_of_one_that_was_built_anew(tmp_path, monkeypatch, name):
    built, before = tmp_path / "built.so", measure._key("int8")
    shutil.copy(getattr(library, name)()._name, built)
    monkeypatch.setattr(library, name, lambda: SimpleNamespace(_name=built))
    os.utime(built, (1, 1))
    keys = {before, measure._key("int8")}
    os.utime(built, (2, 2))
    assert len(keys | {measure._key("int8")}) == 3
    assert measure._key("int8") == measure._key("int8")


@pytest.mark.parametrize(
    ("few", "more", "expected"),
    [
        (2.5e-3, 12.5e-3, (0.5e-3, 1e-3)),
        (1.9e-3, 12.5e-3, (0.0, 12.5e-3 / 12)),  # less than two more take
        (2.5e-3, 2.4e-3, (0.0, 2.5e-3 / 12)),
        (0.0, 2.4e-3, (0.0, 2.4e-3 / 12)),
    ],
)
def test_times_that_others_disturbed_are_all_of_what_is_counted(few, more, expected):
    assert measure._line(2, few, 12, more) == pytest.approx(expected)


@pytest.mark.parametrize(("seconds", "calls"), [(1e-3, 8), (0.3, 5), (2.0, 2)])
def test_slow_cores_repeat_no_more_once_that_took_enough(monkeypatch, seconds, calls):
    """The first of all is not timed."""
    layer, seen = Clocked(), []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: seconds * len(seen))
    monkeypatch.setattr(Clocked, "forward", lambda *_: seen.append(_))
    assert measure._seconds(layer, itertools.count(), 3, 2) == pytest.approx(seconds)
    assert len(seen) == calls


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize(("free", "expected"), [(1 << 40, 11), (4 * 7 * 6144, 7), (0, 3)])
def test_a_layer_is_larger_than_caches_where_memory_allows(monkeypatch, free, expected):
    """In int8 three matrices of 2,048 numbers; the experts are copies of one."""
    monkeypatch.setattr(measure, "free_memory", lambda: free + free // 8)  # scales
    with measure.repeated(64, 32, 3, "int8", beyond=12 * 6144) as layer:
        assert layer.experts == expected
        x, weights = np.ones((expected, 64), np.float32), np.ones((expected, 1), np.float32)
        out = layer.forward(x, np.arange(expected, dtype=np.int32)[:, None], weights)
    assert (out == out[0]).all()
    assert out.any()


@pytest.mark.usefixtures("host_library")
def test_what_is_measured_is_what_a_cpu_can_have():
    assert measure._possible(measure.measure("int8")._asdict())


def test_for_a_user_without_a_home_no_rates_are_kept(measured, monkeypatch):
    """One of a number that the system does not know, as containers may have."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    monkeypatch.setattr(measure, "measure_device", lambda target: dict(FOUND))
    monkeypatch.setattr(measure, "write_json", lambda *_: pytest.fail("something was written"))
    assert [measure.host() for _ in range(2)] == [RATES] * 2
    assert len(measured) == 2
    assert measure.device(H200).measured
