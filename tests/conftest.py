"""Shapes are checked: annotated functions of the package run under jaxtyping and beartype. No test may reach the network."""

import os
import signal
import socket

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a shell's background job, and so in all that the tests start
    signal.signal(signal.SIGINT, signal.default_int_handler)

from jaxtyping import install_import_hook

install_import_hook("mla_jax", "checker.checked")

import jax  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def compilation_cache(tmp_path_factory):
    """The user's own cache of compiled programs stays untouched."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("compiled")))


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*_):
        raise OSError("tests must not reach the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
