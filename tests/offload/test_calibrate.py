"""A CPU's rates with experts are measured once per number format, and kept."""

import itertools
import json
import os
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import cpu_experts
from cpu_experts import library
from mla_jax.base import device_rates
from mla_jax.base.errors import Unsupported
from mla_jax.mesh.host_cost import HostRates
from mla_jax.offload import calibrate

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


@pytest.mark.parametrize("field", HostRates._fields[1:])
def test_rates_that_no_cpu_has_are_measured_again(tmp_path, measured, field):
    path = tmp_path / "host.json"
    impossible = ["fast", None, True, [], {}, -1, float("nan"), float("inf"), 1e30, 10**400]
    for value in (*impossible, 0.0):
        path.write_text(json.dumps({"bf16": {**RATES._asdict(), field: value}, "int8": RATES._asdict()}))
        assert calibrate.host("bf16", cache=path) == RATES
        assert measured.pop() == ("bf16", None)
        assert json.loads(path.read_text()) == dict.fromkeys(("bf16", "int8"), RATES._asdict())


def test_without_the_library_the_error_says_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CPU_EXPERTS_LIBRARY", str(tmp_path / "none.so"))
    monkeypatch.setattr(cpu_experts, "load", library.load.__wrapped__)
    with pytest.raises(Unsupported, match=r"(?s)cannot be computed on the CPU here.*none\.so.*python -m cpu_experts\.build"):
        calibrate.host()


@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("formats", [("int8",), ("q4_k", "q6_k")])
def test_what_is_measured_is_what_a_cpu_can_have(tmp_path, formats, monkeypatch):
    """Of a small layer, in the formats that were asked for."""
    for name, size in {"MODEL": 256, "WIDTH": 256, "MANY_TOKENS": 40, "WORKING_SET": (0, 0)}.items():
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
    assert len(layer.calls) == 1 + device_rates.REPEATS
    assert all(seen.isdisjoint(then) for seen, then in itertools.pairwise(layer.calls))
    assert set().union(*layer.calls) == {*range(layer.experts)}


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
