"""The command itself: help, misspelt flags, exit codes, the console script."""

import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
from checkpoints import convert, released

from convert.__main__ import main

ROOT = Path(__file__).parents[2]


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=600, cwd=ROOT)


def test_help_is_short_and_has_examples():
    ran = run("-m", "convert", "--help")
    assert ran.returncode == 0
    assert len(ran.stdout.splitlines()) < 60
    assert "mla-convert ./DeepSeek-V3 ./v3 --mesh data=8" in ran.stdout
    for flag in ("--to", "--dtype", "--mesh", "--dry-run", "--verify", "--allow-nonfinite", "--debug"):
        assert flag in ran.stdout


def test_help_is_quick_for_it_imports_no_jax():
    code = """
import sys, time
from convert.__main__ import main
try:
    main(["--help"])
except SystemExit:
    pass
print({"jax", "numpy", "orbax"} & {*sys.modules}, time.process_time() < 2, file=sys.stderr)
"""
    assert run("-c", code).stderr == "set() True\n"


def test_the_help_of_an_export_is_quick_and_has_its_flags():
    code = """
import sys
from convert.__main__ import main
try:
    main(["export", "--help"])
finally:
    print({"jax", "numpy", "orbax"} & {*sys.modules}, file=sys.stderr)
"""
    ran = run("-c", code)
    assert ran.stderr == "set()\n"
    for flag in ("--rows", "--platforms", "--mesh", "--dtype", "--device", "--kernels", "--programs-only"):
        assert flag in ran.stdout


def test_a_misspelt_flag_gets_a_suggestion(capfd):
    with pytest.raises(SystemExit) as caught:
        main(["a", "b", "--dtpye", "bf16"])
    assert caught.value.code == 2
    said = capfd.readouterr().err
    assert "--dtpye" in said
    assert "--dtype" in said


def test_a_misspelt_path_gets_a_suggestion(tmp_path, capfd):
    released(tmp_path / "model")
    assert convert(tmp_path / "modle", tmp_path / "out") == 3
    assert f"there is no file or folder {tmp_path / 'modle'}" in (said := capfd.readouterr().err)
    assert "model" in said.split("modle", 1)[1]


def test_an_error_is_one_line_and_details_and_a_traceback_only_if_asked_for(tmp_path, capfd):
    source = released(tmp_path / "hf")
    (source / "config.json").write_text("{")
    assert convert(source, tmp_path / "out") == 3
    assert capfd.readouterr().err.startswith(f"error: {source}/config.json is not valid JSON\n  ")
    with pytest.raises(Exception, match="is not valid JSON"):
        convert(source, tmp_path / "out", "--debug")


def test_the_console_script_is_there_and_gives_the_exit_code(tmp_path, monkeypatch):
    module, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["mla-convert"].partition(":")
    for arguments, code in ((["no/such/model", str(tmp_path / "out")], 3), ([str(released(tmp_path / "hf")), "--verify"], 3)):
        monkeypatch.setattr(sys, "argv", ["mla-convert", *arguments])
        with pytest.raises(SystemExit) as caught:
            getattr(import_module(module), name)()
        assert caught.value.code == code


def test_a_stray_convert_in_the_working_folder_does_not_matter_to_the_script(tmp_path):
    script = Path(sys.executable).with_name("mla-convert")
    if not script.exists():
        pytest.skip("the package is not installed here")
    (tmp_path / "convert.py").write_text("raise SystemExit('imported')")
    ran = subprocess.run([script, "--help"], capture_output=True, text=True, timeout=600, cwd=tmp_path, env={**os.environ})
    assert ran.returncode == 0, ran.stderr


def test_accelerators_are_left_to_others(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert convert(released(tmp_path / "hf"), tmp_path / "out", "--dry-run") == 0
    assert os.environ["JAX_PLATFORMS"] == "cpu"
