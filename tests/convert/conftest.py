"""Conversions within the tests do not wait for the disk: they are tested against a kill, not a power cut."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "sync", lambda: None)
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture(autouse=True)
def no_shared_cache(monkeypatch):
    """Processes that are killed would leave halves of compiled programs in the cache of all tests."""
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "false")
