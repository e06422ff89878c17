"""Fixtures of the tests of benchmarks."""

import importlib

import pytest


@pytest.fixture
def kernels(monkeypatch):
    """The script's module, without its settings for XLA."""
    for name in ("XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # or it would set them for all that follows
    return importlib.import_module("kernels")
