"""Fuzzes the parts of a GGUF file before its weights: header, config and tokenizer."""

import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import gguf as peer
from fuzz import harness
from weights import as_gguf

from mla_jax.base.errors import MlaJaxError
from mla_jax.text import gguf_tokenizer
from mla_jax.weights import gguf_config, gguf_header


def models() -> Iterable[bytes]:
    """The metadata of complete models, tokenizer included."""
    kind = peer.GGUFValueType
    tokens = {"tokens": ["a", "b", "ab", "<s>"], "merges": ["a b"], "token_type": [1, 1, 1, 3]}
    tokenizer = {f"tokenizer.ggml.{key}": (value, kind.ARRAY) for key, value in tokens.items()}
    tokenizer |= {f"tokenizer.ggml.{key}": (value, kind.STRING) for key, value in {"model": "gpt2", "pre": "deepseek-v3"}.items()}
    with tempfile.TemporaryDirectory() as temporary:
        for family in ("v3", "v2_lite"):
            file = as_gguf.write(Path(temporary) / family, as_gguf.keyed(as_gguf.full(family)) | tokenizer)
            yield file.read_bytes()


def read(folder: Path, data: bytes) -> None:
    """Tensors must be inside the file and disjoint."""
    file = folder / "model.gguf"
    file.write_bytes(data)
    metadata, tensors = gguf_header.read_gguf_header(file)
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        assert end <= tensor.offset
        end = tensor.offset + tensor.nbytes
    assert end <= len(data)
    with suppress(MlaJaxError):
        gguf_config.config(metadata, {tensor.name for tensor in tensors})
    gguf_tokenizer.from_metadata(metadata, file.name, 1 << 20)


if __name__ == "__main__":
    harness.fuzz(read, [*harness.spoilt("gguf", "model.gguf"), *models()])
