"""What a device reaches is measured once; where that fails or cannot be, the table's figures are taken."""

import itertools
import json
import os
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import cpu_experts
from cpu_experts import library
from mla_jax.base.errors import Unsupported
from mla_jax.base.roofline import DEVICES
from mla_jax.offload import calibrate
from mla_jax.offload.cost import HostRates

H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
FOUND = {"flops": 800e12, "bandwidth": 4.4e12}


def test_figures_of_a_gpu_are_measured_once_and_again_if_the_file_is_damaged(tmp_path, monkeypatch):
    path, calls = tmp_path / "folder" / "device.json", []
    monkeypatch.setattr(calibrate, "measure_device", lambda target: calls.append(target) or dict(FOUND))
    expected = DEVICES["NVIDIA H200"]._replace(measured=True, **FOUND)
    assert [calibrate.device(H200, path) for _ in range(2)] == [expected] * 2
    assert calls == [H200]
    assert [*json.loads(path.read_text())] == [f"NVIDIA H200, JAX {jax.__version__}"]
    for damage in ("", "[1]", '{"a": 1}', path.read_text().replace("4400", "44"), path.read_text().replace("flops", "flips")):
        path.write_text(damage)
        assert calibrate.device(H200, path) == expected
    path.write_text(path.read_text().replace("800000000000000.0", "NaN"))
    assert calibrate.device(H200, path) == expected
    path.write_text(path.read_text().replace("800000000000000.0", "8" * 400))
    assert calibrate.device(H200, path) == expected
    assert len(calls) == 8


@pytest.mark.parametrize("found", [None, {**FOUND, "flops": 1.0}, {**FOUND, "bandwidth": 1e15}, {**FOUND, "flops": float("nan")}])
def test_what_cannot_be_is_not_believed_and_not_kept(tmp_path, monkeypatch, found):
    monkeypatch.setattr(calibrate, "measure_device", lambda target: found)
    assert calibrate.device(H200, tmp_path / "device.json") == DEVICES["NVIDIA H200"]
    assert not (tmp_path / "device.json").exists()


def test_a_device_that_fails_takes_the_tables_figures(tmp_path, monkeypatch):
    def fail(target):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(calibrate, "measure_device", fail)
    assert calibrate.device(H200, tmp_path / "device.json") == DEVICES["NVIDIA H200"]


def test_a_cpu_is_not_measured(tmp_path):
    assert calibrate.device(cache=tmp_path / "device.json") == DEVICES["cpu"]
    assert [*tmp_path.iterdir()] == []


def test_a_place_that_cannot_be_written_keeps_nobody_from_measuring(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(calibrate, "measure_device", lambda target: dict(FOUND))
    assert calibrate.device(H200, tmp_path / "file" / "device.json").measured


def test_memory_is_read_and_matrices_are_multiplied(monkeypatch):
    """On the CPU, with little of both."""
    for name, value in {"READ": 1 << 20, "LEAST": 1 << 19, "SIDE": 256, "_free": lambda target: 1 << 30}.items():
        monkeypatch.setattr(calibrate, name, value)
    found = calibrate.measure_device(jax.devices()[0])
    assert found is not None
    assert found.keys() == set(calibrate.FIGURES)
    assert all(value > 1e6 for value in found.values())
    monkeypatch.setattr(calibrate, "_free", lambda target: 1 << 20)
    assert calibrate.measure_device(jax.devices()[0]) is None


RATES = HostRates("a CPU", **dict.fromkeys(HostRates._fields[1:], 1e9))


@pytest.fixture
def measured(monkeypatch) -> list[tuple]:
    """The calls of what measures rates, which are then RATES; the library need not be built."""
    calls = []
    monkeypatch.setattr(calibrate, "refuse_without_library", lambda platform: None)
    monkeypatch.setattr(calibrate, "_key", lambda precision: precision)
    monkeypatch.setattr(calibrate, "measure_host", lambda *precisions: calls.append(precisions) or RATES)
    return calls


def test_rates_are_measured_once_per_number_format(tmp_path, measured):
    path = tmp_path / "folder" / "host.json"
    for formats in (("q4_k",), ("q4_k", "q4_k"), ("q4_k", "q6_k"), ("int8",), ("q4_k",), ("q4_k", "q6_k")):
        assert calibrate.host(*formats, cache=path) == RATES
    assert measured == [("q4_k", None), ("q4_k", "q6_k"), ("int8", None)]
    assert json.loads(path.read_text()).keys() == {"q4_k", "q4_k and q6_k", "int8"}


@pytest.mark.parametrize("damage", ["", "[1]", '{"a": 1}', "other fields"])
def test_rates_are_measured_again_if_the_file_is_damaged_or_has_other_figures(tmp_path, measured, damage):
    path = tmp_path / "host.json"
    path.write_text(damage.replace("other fields", json.dumps({"bf16": {**RATES._asdict(), "latency": 1e-5}})))
    assert [calibrate.host("bf16", cache=path) for _ in range(2)] == [RATES] * 2
    assert len(measured) == 1


@pytest.mark.parametrize("field", HostRates._fields)
def test_rates_that_no_cpu_has_are_measured_again(tmp_path, measured, field):
    path = tmp_path / "host.json"
    impossible = ["fast", None, True, [], {}, -1, float("nan"), float("inf"), 1e30, 10**400]
    impossible += [0] if field != "call" else []
    for value in impossible if field != "name" else [1]:
        path.write_text(json.dumps({"bf16": {**RATES._asdict(), field: value}, "int8": RATES._asdict()}))
        assert calibrate.host("bf16", cache=path) == RATES
        assert measured.pop() == ("bf16", None)
        assert json.loads(path.read_text()) == dict.fromkeys(("bf16", "int8"), RATES._asdict())


def test_a_call_too_short_to_be_measured_is_believed(tmp_path, measured):
    kept = RATES._replace(call=0.0)
    (tmp_path / "host.json").write_text(json.dumps({"bf16": kept._asdict()}))
    assert calibrate.host("bf16", cache=tmp_path / "host.json") == kept
    assert not measured


def test_for_a_user_without_a_home_no_rates_are_kept(measured, monkeypatch):
    """One of a number that the system does not know, as containers may have."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    monkeypatch.setattr(calibrate, "measure_device", lambda target: dict(FOUND))
    monkeypatch.setattr(calibrate, "write_json", lambda *_: pytest.fail("something was written"))
    assert [calibrate.host() for _ in range(2)] == [RATES] * 2
    assert len(measured) == 2
    assert calibrate.device(H200).measured


def test_without_the_library_the_error_says_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CPU_EXPERTS_LIBRARY", str(tmp_path / "none.so"))
    monkeypatch.setattr(cpu_experts, "load", library.load.__wrapped__)
    with pytest.raises(Unsupported, match=r"(?s)cannot be computed on the CPU here.*none\.so.*python -m cpu_experts\.build"):
        calibrate.host()


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("formats", [("int8",), ("q4_k", "q6_k")])
def test_what_is_measured_is_what_a_cpu_can_have(tmp_path, formats, monkeypatch):
    """Of a small layer, in the formats that were asked for."""
    for name, size in {"MODEL": 256, "WIDTH": 256, "MANY": 40, "WORKING_SET": (0, 0)}.items():
        monkeypatch.setattr(calibrate, name, size)
    found = calibrate.host(*formats, cache=tmp_path / "host.json")
    assert found.name.endswith(f" cores with {cpu_experts.isa()}, {' and '.join(formats)}")
    assert 1e5 < found.bandwidth < 1e13
    assert 1e6 < found.flops < 1e16
    assert 0 <= found.call < 1
    assert 1e5 < found.link < 1e14


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("name", ["load", "load_ffi"])
def test_rates_of_a_library_are_not_those_of_one_that_was_built_anew(tmp_path, monkeypatch, name):
    built, before = tmp_path / "built.so", calibrate._key("int8")
    shutil.copy(getattr(library, name)()._name, built)
    monkeypatch.setattr(library, name, lambda: SimpleNamespace(_name=built))
    os.utime(built, (1, 1))
    keys = {before, calibrate._key("int8")}
    os.utime(built, (2, 2))
    assert len(keys | {calibrate._key("int8")}) == 3
    assert calibrate._key("int8") == calibrate._key("int8")


class Chosen:
    """A layer that notes which experts are chosen."""

    experts, model = 30, 64

    def __init__(self):
        self.calls = []

    def forward(self, x, ids, weights):
        assert (len(x), x.shape[1]) == (len(ids), self.model)
        assert (ids == ids[0]).all()
        self.calls.append({*ids[0].tolist()})


def test_experts_are_chosen_in_rotation_so_that_none_is_in_a_cache():
    layer = Chosen()
    calibrate.forward_seconds(layer, 3, itertools.cycle(range(layer.experts)))
    assert len(layer.calls) == 1 + calibrate.REPEATS
    assert all(seen.isdisjoint(then) for seen, then in itertools.pairwise(layer.calls))
    assert set().union(*layer.calls) == {*range(layer.experts)}


@pytest.mark.parametrize(("seconds", "calls"), [(1e-3, 8), (0.3, 5), (2.0, 2)])
def test_slow_cores_repeat_no_more_once_that_took_enough(monkeypatch, seconds, calls):
    """The first call is not timed."""
    seen = []
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: seconds * len(seen))
    assert calibrate.seconds_of(lambda: seen.append(1), enough=1.0) == pytest.approx([seconds] * (calls - 1))
    assert len(seen) == calls


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize(("free", "expected"), [(1 << 40, 11), (4 * 7 * 6144, 7), (0, 3)])
def test_a_layer_is_larger_than_caches_where_memory_allows(monkeypatch, free, expected):
    """In int8 three matrices of 2,048 numbers; the experts are copies of one."""
    monkeypatch.setattr(calibrate, "free_memory", lambda: free + free // 8)  # scales
    with calibrate.repeated(64, 32, 3, "int8", working_set=12 * 6144) as layer:
        assert layer.experts == expected
        x, weights = np.ones((expected, 64), np.float32), np.ones((expected, 1), np.float32)
        out = layer.forward(x, np.arange(expected, dtype=np.int32)[:, None], weights)
    assert (out == out[0]).all()
    assert out.any()
