"""A device's rates are measured once; where measuring fails, the table's figures are taken."""

import json
from types import SimpleNamespace

import jax
import pytest

from mla_jax.base import device_rates
from mla_jax.base.roofline import DEVICES

H200 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")
FOUND = {"flops": 800e12, "bandwidth": 4.4e12}


def test_figures_of_a_gpu_are_measured_once_and_again_if_the_file_is_damaged(tmp_path, monkeypatch):
    path, calls = tmp_path / "folder" / "device.json", []
    monkeypatch.setattr(device_rates, "measure_device", lambda target: calls.append(target) or dict(FOUND))
    expected = DEVICES["NVIDIA H200"]._replace(measured=True, **FOUND)
    assert [device_rates.measured_device(H200, path) for _ in range(2)] == [expected] * 2
    assert calls == [H200]
    assert [*json.loads(path.read_text())] == [f"NVIDIA H200, JAX {jax.__version__}"]
    for damage in ("", "[1]", '{"a": 1}', path.read_text().replace("4400", "44"), path.read_text().replace("flops", "flips")):
        path.write_text(damage)
        assert device_rates.measured_device(H200, path) == expected
    path.write_text(path.read_text().replace("800000000000000.0", "NaN"))
    assert device_rates.measured_device(H200, path) == expected
    path.write_text(path.read_text().replace("800000000000000.0", "8" * 400))
    assert device_rates.measured_device(H200, path) == expected
    assert len(calls) == 8


@pytest.mark.parametrize("found", [None, {**FOUND, "flops": 1.0}, {**FOUND, "bandwidth": 1e15}, {**FOUND, "flops": float("nan")}])
def test_what_cannot_be_is_not_believed_and_not_kept(tmp_path, monkeypatch, found):
    monkeypatch.setattr(device_rates, "measure_device", lambda target: found)
    assert device_rates.measured_device(H200, tmp_path / "device.json") == DEVICES["NVIDIA H200"]
    assert not (tmp_path / "device.json").exists()


@pytest.mark.parametrize("found", [{"flops": 1e12, "bandwidth": 1e11}, {"flops": 9e15, "bandwidth": 9e13}])
def test_an_unknown_gpu_takes_the_figures_that_were_measured_on_it(tmp_path, monkeypatch, found):
    """However far they are from those of the cards in the table."""
    unknown, calls = SimpleNamespace(platform="gpu", device_kind="NVIDIA X1"), []
    monkeypatch.setattr(device_rates, "measure_device", lambda target: calls.append(target) or dict(found))
    for _ in range(2):
        device = device_rates.measured_device(unknown, tmp_path / "device.json")
        assert (device.name, device.measured, device.flops, device.bandwidth) == ("NVIDIA X1", True, *found.values())
    assert len(calls) == 1


@pytest.mark.parametrize("found", [None, {**FOUND, "flops": 0.0}, {**FOUND, "bandwidth": float("nan")}])
def test_an_unknown_gpu_that_cannot_be_measured_is_guessed(tmp_path, monkeypatch, found):
    monkeypatch.setattr(device_rates, "measure_device", lambda target: found)
    device = device_rates.measured_device(SimpleNamespace(platform="gpu", device_kind="NVIDIA X1"), tmp_path / "device.json")
    assert (device.measured, device.known) == (False, False)


def test_a_device_that_fails_takes_the_tables_figures(tmp_path, monkeypatch):
    def fail(target):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(device_rates, "measure_device", fail)
    assert device_rates.measured_device(H200, tmp_path / "device.json") == DEVICES["NVIDIA H200"]


def test_a_cpu_is_not_measured(tmp_path):
    assert device_rates.measured_device(cache=tmp_path / "device.json") == DEVICES["cpu"]
    assert [*tmp_path.iterdir()] == []


def test_a_place_that_cannot_be_written_keeps_nobody_from_measuring(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(device_rates, "measure_device", lambda target: dict(FOUND))
    assert device_rates.measured_device(H200, tmp_path / "file" / "device.json").measured


def test_memory_is_read_and_matrices_are_multiplied(monkeypatch):
    """On the CPU, with little of both."""
    for name, value in {"READ": 1 << 20, "MIN_READ": 1 << 19, "SIDE": 256, "_free": lambda target: 1 << 30}.items():
        monkeypatch.setattr(device_rates, name, value)
    found = device_rates.measure_device(jax.devices()[0])
    assert found is not None
    assert found.keys() == set(device_rates.FIGURES)
    assert all(value > 1e6 for value in found.values())
    monkeypatch.setattr(device_rates, "_free", lambda target: 1 << 20)
    assert device_rates.measure_device(jax.devices()[0]) is None


def test_for_a_user_without_a_home_no_figures_are_kept(monkeypatch):
    """One of a number that the system does not know, as containers may have."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    monkeypatch.setattr(device_rates, "measure_device", lambda target: dict(FOUND))
    monkeypatch.setattr(device_rates, "write_json", lambda *_: pytest.fail("something was written"))
    assert device_rates.measured_device(H200).measured


@pytest.mark.parametrize(("seconds", "calls"), [(1e-3, 8), (0.3, 5), (2.0, 2)])
def test_slow_calls_repeat_no_more_once_they_took_enough(monkeypatch, seconds, calls):
    """The first call is not timed."""
    seen = []
    monkeypatch.setattr(device_rates.time, "perf_counter", lambda: seconds * len(seen))
    assert device_rates.seconds_of(lambda: seen.append(1), enough=1.0) == pytest.approx([seconds] * (calls - 1))
    assert len(seen) == calls
