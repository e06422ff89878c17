"""A tiny random model."""

from pathlib import Path

import pytest
from loopback import no_network  # noqa: F401
from models import FAMILIES, tensors, write
from pairs import pairs_tokenizer


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """The model's folder."""
    hf = {**FAMILIES["v3"], "num_hidden_layers": 1, "first_k_dense_replace": 0, "max_position_embeddings": 1024}
    path = write(tmp_path_factory.mktemp("model"), hf, tensors(hf))
    pairs_tokenizer().save(str(path / "tokenizer.json"))
    return path
