"""All the corpora: every bad model folder and file, by the part of the project that must refuse it."""

from faults import (
    config_corpus,
    deepseek_corpus,
    gguf_corpus,
    gguf_model_corpus,
    hf,
    safetensors_corpus,
    store_corpus,
    text_corpus,
)
from faults.change import Corpus

from mla_jax.weights.load import load

CORPORA = {
    "safetensors": Corpus(hf.write_valid, load, safetensors_corpus.FAULTS),
    "config": Corpus(hf.write_valid, load, config_corpus.FAULTS),
    "gguf": Corpus(gguf_corpus.write_valid, gguf_corpus.read, gguf_corpus.FAULTS, 16 << 20),
    "gguf_model": Corpus(gguf_model_corpus.write_valid, load, gguf_model_corpus.FAULTS),
    "deepseek": Corpus(deepseek_corpus.write_valid, load, deepseek_corpus.FAULTS),
    "text": Corpus(text_corpus.write_valid, text_corpus.read, text_corpus.FAULTS),
    "store": Corpus(store_corpus.write_valid, load, store_corpus.FAULTS),
}
