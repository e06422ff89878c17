"""Weights as they are loaded on other machines."""

import pytest

from pallas_kernels import choice


@pytest.fixture
def hopper(monkeypatch):
    """From here on as on a Hopper GPU; a list of the ops that its kernels would have computed."""
    take, taken = choice.take, []

    def fallback(op, *arguments):
        if take(op, *arguments) != "xla":
            taken.append(op)
        return "xla"

    def arrive():
        monkeypatch.setattr(choice, "DEVICES", {"mosaic_gpu": (lambda: True, ""), "mosaic_tpu": (lambda: False, "")})
        monkeypatch.setattr(choice, "too_old", lambda: None)
        monkeypatch.setattr(choice, "take", fallback)
        return taken

    return arrive
