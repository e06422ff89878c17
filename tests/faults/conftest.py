"""Copies of valid folders to be spoilt, and a record of the reads of them."""

import shutil
from functools import cache

import pytest
from faults.corpus import CORPORA

from mla_jax.weights.orbax_store import Store
from mla_jax.weights.safetensors import TensorFiles


@pytest.fixture(scope="session")
def valid(tmp_path_factory):
    """The folders of a corpus before any mutation, each read once: so they are valid, and what reading compiles is compiled."""

    @cache
    def made(corpus: str):
        root = tmp_path_factory.mktemp(corpus)
        CORPORA[corpus].write_valid(root)
        for folder in sorted(root.iterdir()):
            CORPORA[corpus].read(folder)
        return root

    return made


@pytest.fixture
def folder(valid, tmp_path):
    """A copy of a valid folder."""

    def copy(corpus: str, base: str = "single"):
        return shutil.copytree(valid(corpus) / base, tmp_path / "model")

    return copy


@pytest.fixture
def reads(monkeypatch):
    """The names of the tensors that were read."""
    names = []
    for kind in (TensorFiles, Store):
        read = kind.read
        monkeypatch.setattr(kind, "read", lambda self, *piece, read=read: (names.append(piece[0]), read(self, *piece))[1])
    return names
