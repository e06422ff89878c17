"""The diagnosis of an environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_experts
from cpu_experts import library
from mla_jax.ui import doctor
from mla_jax.ui.doctor import experts_on_the_cpu, gpu_without_support, measured_rates, shadows

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["jax", "tokenizers", "convert", "json"])
def test_a_file_that_hides_a_module_is_pointed_at(tmp_path, name):
    (tmp_path / f"{name}.py").write_text("")
    assert shadows(tmp_path) == [(name, tmp_path / f"{name}.py")]


def test_a_package_that_hides_a_module_is_pointed_at(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("")
    assert [name for name, _ in shadows(tmp_path)] == ["jax"]


def test_a_folder_of_the_users_own_files_hides_nothing(tmp_path):
    (tmp_path / "notes.py").write_text("")
    assert shadows(tmp_path) == []
    assert shadows(ROOT) == []


def test_the_doctor_works_where_the_modules_it_checks_are_hidden(tmp_path):
    (tmp_path / "jax.py").write_text("raise SystemExit('this is not JAX')")
    (tmp_path / "tokenizers.py").write_text("raise SystemExit('nor is this')")
    command = [sys.executable, "-m", "mla_jax.generate", "--doctor"]
    found = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": f"{ROOT}", "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    assert f"WARNING: {tmp_path / 'jax.py'} hides the module jax" in found.stdout
    assert "WARNING: " + str(tmp_path / "tokenizers.py") in found.stdout
    assert "device cpu" in found.stdout


def test_the_doctor_says_how_experts_on_the_cpu_can_be_had(tmp_path, monkeypatch):
    monkeypatch.setenv("CPU_EXPERTS_LIBRARY", str(tmp_path / "none.so"))
    monkeypatch.setattr(cpu_experts, "load", library.load.__wrapped__)
    assert "not available" in experts_on_the_cpu()
    assert "python -m cpu_experts.build" in experts_on_the_cpu()


@pytest.mark.usefixtures("host_library")
def test_the_doctor_names_the_instructions_that_experts_on_the_cpu_use():
    assert experts_on_the_cpu() == f"experts on the CPU: {cpu_experts.isa()}"


@pytest.mark.usefixtures("host_library")
def test_the_doctor_says_that_models_cannot_have_experts_on_the_cpu_and_how_they_can(tmp_path, monkeypatch):
    monkeypatch.setenv("CPU_EXPERTS_FFI_LIBRARY", str(tmp_path / "none.so"))
    assert experts_on_the_cpu().startswith(f"experts on the CPU: {cpu_experts.isa()}, but not available to models, ")
    assert "none.so): run `python -m cpu_experts.build`" in experts_on_the_cpu()


def test_the_doctor_says_where_measured_rates_are_kept_and_since_when(tmp_path):
    assert measured_rates(None) == measured_rates(tmp_path) == "measured rates: none kept"
    for name, seconds in (("host.json", 86400 * 1.5), ("device.json", 86400 * 2.5)):
        (tmp_path / name).write_text("{}")
        os.utime(tmp_path / name, (seconds, seconds))
    kept = f"{tmp_path / 'host.json'} of 1970-01-02, {tmp_path / 'device.json'} of 1970-01-03"
    assert measured_rates(tmp_path) == f"measured rates: {kept}; delete a file to measure again"


def test_the_doctor_says_what_to_install_for_a_gpu_that_jax_cannot_use(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda name: None)
    assert [*gpu_without_support(tmp_path)] == []
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("550")
    (warning,) = gpu_without_support(tmp_path)
    assert 'pip install ".[cuda12]"' in warning
    monkeypatch.setattr(doctor, "_version", lambda name: "0.12" if "cuda13" in name else None)
    assert [*gpu_without_support(tmp_path)] == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no process to cores")
def test_the_doctor_counts_the_cores_that_a_run_may_use():
    first = "from mla_jax.ui.doctor import doctor; print(next(doctor()))"
    bind = f"import os; os.sched_setaffinity(0, {{{min(os.sched_getaffinity(0))}}}); {first}"
    found = subprocess.run([sys.executable, "-c", bind], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.endswith(", 1 core\n")


def test_the_doctor_sees_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(doctor, "_devices", lambda: iter(()))
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    assert "compiled programs: not kept" in [*doctor.doctor()][-1]
