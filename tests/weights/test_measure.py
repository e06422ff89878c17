"""What a device reaches is measured once; where that fails or cannot be, the table's figures are taken."""

import json
from types import SimpleNamespace

import jax
import pytest

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
RATES = Host("a CPU", **dict.fromkeys(FIGURES, 1e9))


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


def test_a_call_too_short_to_be_measured_is_believed(tmp_path, measured):
    (tmp_path / "host.json").write_text(json.dumps({"bf16": RATES._replace(call=0.0)._asdict()}))
    assert measure.host("bf16", cache=tmp_path / "host.json").call == 0
    assert not measured


def test_for_a_user_without_a_home_no_rates_are_kept(measured, monkeypatch):
    """One of a number that the system does not know, as containers may have."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    monkeypatch.setattr(measure, "measure_device", lambda target: dict(FOUND))
    monkeypatch.setattr(measure, "write_json", lambda *_: pytest.fail("something was written"))
    assert [measure.host() for _ in range(2)] == [RATES] * 2
    assert len(measured) == 2
    assert measure.device(H200).measured
