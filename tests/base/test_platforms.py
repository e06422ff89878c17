"""The platforms that JAX cannot use."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from mla_jax.base.errors import Unsupported
from mla_jax.base.platforms import default_device

ROOT = Path(__file__).parents[2]


def test_the_default_device_is_the_first():
    assert default_device() == jax.devices()[0]


@pytest.mark.parametrize(
    ("platform", "error", "words"),
    [
        ("cuda", AssertionError(), 'pip install ".[cuda12]"'),
        ("gpu", AssertionError(), 'pip install ".[cuda12]"'),
        ("cuda,cpu", RuntimeError("no CUDA\nmore"), "JAX says: no CUDA"),
        ("tpu", RuntimeError("no libtpu"), 'pip install ".[tpu]"'),
        ("vulkan", RuntimeError("unknown"), "known platforms: cpu, cuda, tpu"),
        (None, RuntimeError("broken driver"), "JAX cannot start on this machine\n  JAX says: broken driver"),
    ],
)
def test_what_jax_cannot_use_is_one_error_that_says_what_to_install(monkeypatch, platform, error, words):
    def fail():
        raise error

    monkeypatch.setattr(jax, "local_devices", fail)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platform)
    try:
        with pytest.raises(Unsupported) as refused:
            default_device()
    finally:
        jax.config.update("jax_platforms", before)
    assert words in str(refused.value)
    assert refused.value.exit_code == 3


def test_where_support_is_installed_the_missing_device_is_named_instead(monkeypatch):
    def fail():
        raise AssertionError

    monkeypatch.setattr(jax, "local_devices", fail)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", "cuda")
    try:
        with pytest.raises(Unsupported, match="no such device was found"):
            default_device()
    finally:
        jax.config.update("jax_platforms", before)


def test_the_command_line_ends_with_that_error_and_no_traceback():
    environment = {**os.environ, "JAX_PLATFORMS": "vulkan"}
    command = [sys.executable, "-m", "mla_jax.generate", "x"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=300)
    assert result.returncode == 3
    assert result.stderr.startswith("error: JAX cannot use the platform of JAX_PLATFORMS=vulkan")
    assert "Traceback" not in result.stderr
