"""The bundled model as transformers sees it: its tokenizer, its template, and its numbers once FP8 is multiplied out by torch."""

import json

import numpy as np
import pytest

from mla_jax import LLM, SamplingParams
from mla_jax.weights.hub import DEMO

pytestmark = pytest.mark.parity
TEXT = 'def area(r):\n    """The area of a circle."""\n    return 3.14159 * r ** 2  # naïve ☃\n'


@pytest.fixture(scope="module")
def llm():
    return LLM(dtype="float32")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """transformers' model of the blocks times their scales, in float32."""
    oracle = pytest.importorskip("parity.oracle", reason="the extra `parity` is missing", exc_type=ModuleNotFoundError)
    import torch
    from safetensors.torch import load_file, save_file

    folder, stored = tmp_path_factory.mktemp("demo"), load_file(DEMO / "model.safetensors")
    plain = {}
    for name, weight in stored.items():
        if not name.endswith("_scale_inv"):
            plain[name] = weight.to(torch.float32)
            if (scale := stored.get(name + "_scale_inv")) is not None:
                wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                plain[name] *= wide[: weight.shape[0], : weight.shape[1]]
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    hf = {k: v for k, v in json.loads((DEMO / "config.json").read_text()).items() if k != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(hf))
    return oracle, oracle.load(folder)


def test_logits_and_greedy_text_agree(llm, theirs):
    oracle, model = theirs
    tokens = np.array([llm.tokenizer.encode(TEXT)])
    expected = oracle.logits(model, tokens)
    assert np.abs(llm.logits(tokens) - expected).max() <= 1e-4 * expected.std()
    prompt = llm.tokenizer.encode("def close(self):")
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    assert llm.generate(prompt, params)[0].token_ids == oracle.greedy(model, prompt, 24)


def test_the_mtp_layer_agrees(llm, theirs):
    import quality

    oracle, model = theirs
    tokens = llm.tokenizer.encode(TEXT)
    _, _, drafted, _ = quality.read_all(llm, [tokens])
    expected = oracle.mtp_logits(model, np.array([tokens]))[0].argmax(-1)
    assert (drafted[0, : len(expected)] == expected).all()


def test_tokenizer_and_chat_template_agree(llm):
    transformers = pytest.importorskip("transformers", reason="the extra `parity` is missing")
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    assert llm.tokenizer.encode(TEXT, bos=False) == tokenizer.encode(TEXT, add_special_tokens=False)
    messages = [
        {"role": "user", "content": "def f(x):"},
        {"role": "assistant", "content": TEXT},
        {"role": "user", "content": "?"},
    ]
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert llm.encode_chat(messages) == expected
    assert tokenizer.decode(expected).startswith(tokenizer.bos_token + "<｜User｜>")
