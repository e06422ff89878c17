"""Fuzzes config.json, of released folders and of DeepSeek's inference code."""

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import models
from fuzz import harness

from mla_jax.base.config import Config
from mla_jax.base.errors import MlaJaxError
from mla_jax.weights.deepseek import open_deepseek

OWN = {"vocab_size": 96, "dim": 48, "inter_dim": 80, "n_layers": 3, "n_heads": 4, "n_routed_experts": 8, "dtype": "fp8"}


def valid() -> Iterable[bytes]:
    yield from (json.dumps(hf).encode() for hf in (*models.FAMILIES.values(), OWN))


def read(folder: Path, data: bytes) -> None:
    """A config that is accepted equals its own written form, read again."""
    (folder / "config.json").write_bytes(data)
    with suppress(MlaJaxError):
        open_deepseek(folder)  # which finds no weights
    found = Config.from_hf(folder)
    assert Config.from_hf(found.to_hf()).to_hf() == found.to_hf()


if __name__ == "__main__":
    words = {key for hf in models.FAMILIES.values() for key in (*hf, *(hf.get("rope_scaling") or {}))}
    harness.fuzz(read, [*valid(), *harness.spoilt("config", "config.json")], sorted(words))
