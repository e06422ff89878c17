"""Fuzzes what is read of a GGUF file before its weights: header, config and tokenizer. Needs atheris, which no test needs.

    PYTHONPATH=.:tests python tests/fuzz/gguf_header.py -max_total_time=180

The options are libFuzzer's. It starts from the files of the corpus; only our own errors may come out, within a second."""

import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import atheris
from faults import gguf_corpus as corpus

with atheris.instrument_imports(include=["mla_jax.weights.gguf", "mla_jax.weights.gguf_config", "mla_jax.text.gguf_tokenizer"]):
    from mla_jax.text import gguf_tokenizer
    from mla_jax.weights import gguf, gguf_config

import gguf as peer
from weights import as_gguf as written

from mla_jax.base.errors import MlaJaxError

MAX_SEED = 1 << 16


def write_seeds(folder: Path) -> None:
    """Every file of the corpus that is small, a whole model's metadata, and a tokenizer's."""
    with tempfile.TemporaryDirectory() as temporary:
        for i, fault in enumerate(fault for fault in corpus.FAULTS if fault.base == "single"):
            place = Path(temporary) / str(i)
            corpus.write_valid(place)
            fault.mutate(place / "single")
            for file in (place / "single").iterdir():
                if file.is_file() and file.stat().st_size <= MAX_SEED:
                    (folder / f"{fault.name}-{file.name}").write_bytes(file.read_bytes())
    (folder / "valid").write_bytes(corpus.valid().file())
    for family in ("v3", "v2_lite"):
        metadata = {key: (value, kind(value)) for key, value in written.converted(written.full(family)).items()}
        tokens = {"tokens": ["a", "b", "ab", "<s>"], "merges": ["a b"], "token_type": [1, 1, 1, 3]}
        metadata |= {f"tokenizer.ggml.{key}": (value, peer.GGUFValueType.ARRAY) for key, value in tokens.items()}
        metadata |= {
            f"tokenizer.ggml.{k}": (v, peer.GGUFValueType.STRING) for k, v in {"model": "gpt2", "pre": "deepseek-v3"}.items()
        }
        del metadata["general.architecture"]  # which the writer adds
        written.write(folder / family, metadata)


def kind(value: object) -> peer.GGUFValueType:
    kinds = {bool: peer.GGUFValueType.BOOL, float: peer.GGUFValueType.FLOAT32, str: peer.GGUFValueType.STRING}
    return kinds.get(type(value), peer.GGUFValueType.UINT32)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        seeds, file = Path(temporary) / "seeds", Path(temporary) / "fuzzed.gguf"
        seeds.mkdir()
        write_seeds(seeds)

        def once(data: bytes):
            file.write_bytes(data)
            start = time.process_time()
            with suppress(MlaJaxError):
                read(file, len(data))
            assert time.process_time() - start < 1

        atheris.Setup([*sys.argv, str(seeds)], once)
        atheris.Fuzz()


def read(file: Path, size: int) -> None:
    """What is read must lie in the file, and be disjoint."""
    metadata, tensors = gguf.read_header(file)
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        assert end <= tensor.offset
        end = tensor.offset + tensor.nbytes
    assert end <= size
    with suppress(MlaJaxError):
        gguf_config.config(metadata, {tensor.name for tensor in tensors})
    gguf_tokenizer.build(metadata, file.name, 1 << 20)


if __name__ == "__main__":
    main()
