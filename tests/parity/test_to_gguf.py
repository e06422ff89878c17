"""Files of mla-convert --to gguf: llama.cpp opens them, computes what we compute, and its converter writes the same bytes."""

import json

import gguf
import numpy as np
import pytest
from checkpoints import convert
from parity.test_llama_cpp import CLASSES, EXACT, KL, LENGTH, TEXT, TEXTS, divergence, logits, relative, sizes

import mla_jax
from mla_jax.weights.hub import DEMO

pytestmark = pytest.mark.parity
DTYPES = ["f32", "f16", "bf16", "q8_0", "q4_0"]
GREEDY = {"f32": 1.0, "f16": 1.0, "bf16": 0.98, "q8_0": 0.98, "q4_0": 0.95}  # of llama.cpp's best tokens, at least, are ours
# What its converter says besides, or in other words; it leaves MTP out of DeepSeek's, unless asked for
OTHER_KEYS = {"general.name", "general.quantized_by", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.padding_token_id"}


@pytest.fixture(scope="module")
def cpp():
    return pytest.importorskip("parity.llama_cpp", reason="llama-cpp-python is missing (`make parity`)", exc_type=ImportError)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The bundled model, in any type."""
    folder = tmp_path_factory.mktemp("demo")

    def written(dtype: str):
        file = folder / f"{dtype}.gguf"
        assert file.exists() or convert(DEMO, file, "--to", "gguf", "--dtype", dtype) == 0
        return file

    return written


@pytest.fixture(scope="module")
def tokens():
    return mla_jax.LLM(dtype="float32").tokenizer.encode(TEXT)[:LENGTH]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_demo_has_our_logits_and_our_best_tokens_in_llama_cpp(cpp, demo, tokens, dtype):
    ours, theirs = logits(demo(dtype), tokens), cpp.logits(demo(dtype), tokens)
    if dtype == "f32":
        assert relative(ours, theirs) <= EXACT
        assert relative(logits(DEMO, tokens), theirs) <= EXACT
    assert divergence(ours, theirs) <= KL.get(dtype.upper(), 1e-9)
    assert (ours.argmax(-1) == theirs.argmax(-1)).mean() >= GREEDY[dtype]


def test_the_demos_text_becomes_the_same_tokens_in_llama_cpp(cpp, demo):
    folder = mla_jax.LLM().tokenizer
    for bos in (False, True):
        assert cpp.tokenize(demo("q4_0"), list(TEXTS), bos=bos) == [folder.encode(text, bos=bos) for text in TEXTS]


@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
def test_llama_cpps_converter_writes_the_same_keys_and_bytes(cpp, demo, tmp_path, dtype):
    if not (cpp.SOURCE / "convert_hf_to_gguf.py").exists():
        pytest.skip(f"llama.cpp's converter is not in {cpp.SOURCE.name}: `make parity` unpacks it, or set LLAMA_CPP")
    theirs = gguf.GGUFReader(cpp.convert(DEMO, tmp_path / "theirs.gguf", mtp=True, kind=dtype))
    ours = gguf.GGUFReader(demo(dtype))
    one, two = ({name: (f.types, f.contents()) for name, f in reader.fields.items()} for reader in (ours, theirs))
    differing = {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)}
    assert {name for name in differing if not name.startswith("GGUF.")} <= OTHER_KEYS
    blocks = {tensor.name: tensor for tensor in ours.tensors}
    assert blocks.keys() == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        found = blocks[tensor.name]
        assert (found.tensor_type, found.shape.tolist()) == (tensor.tensor_type, tensor.shape.tolist()), tensor.name
        np.testing.assert_array_equal(found.data, tensor.data, err_msg=tensor.name)


@pytest.mark.parametrize("family", CLASSES)
def test_random_models_of_every_family_have_their_logits_in_llama_cpp(cpp, tmp_path, capfd, family):
    hf = sizes(family)
    folder = cpp.folder(tmp_path / "model", hf, CLASSES[family], mtp=hf.get("num_nextn_predict_layers", 0) > 0)
    if family == "kimi_k2":  # the word that its releases go by
        hf["model_type"] = "kimi_k2"
        (folder / "config.json").write_text(json.dumps(hf))
    row = np.random.default_rng(0).integers(0, hf["vocab_size"], LENGTH).tolist()
    assert convert(folder, tmp_path / "plain.gguf", "--to", "gguf") == 0
    assert ("llama.cpp does not read YaRN's betas" in capfd.readouterr().err) == (family == "kimi_k2")
    ours = logits(tmp_path / "plain.gguf", row)
    assert relative(ours, logits(folder, row)) <= EXACT
    assert relative(ours, cpp.logits(tmp_path / "plain.gguf", row)) <= EXACT
    assert convert(folder, tmp_path / "small.gguf", "--to", "gguf", "--dtype", "q8_0") == 0
    unpacked = cpp.quantize(tmp_path / "small.gguf", tmp_path / "unpacked.gguf", "F32")
    assert relative(logits(tmp_path / "small.gguf", row), cpp.logits(unpacked, row)) <= EXACT
