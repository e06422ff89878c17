"""The bundled model: in the release format of DeepSeek, small, and able to do what its card says."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import quality
import safetensors
from safetensors.numpy import load_file
from weights import fp8, parameters

from demo import corpus, tasks
from mla_jax import LLM, Config, SamplingParams
from mla_jax.base.config import Quantization
from mla_jax.weights import load
from mla_jax.weights.hub import DEMO
from mla_jax.weights.save import save


@pytest.fixture(scope="module")
def llm():
    return LLM()


DTYPES = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F32": np.float32}


@pytest.fixture(scope="module")
def tensors():
    stored = safetensors.deserialize((DEMO / "model.safetensors").read_bytes())
    return {name: np.frombuffer(t["data"], DTYPES[t["dtype"]]).reshape(t["shape"]) for name, t in stored}


def test_the_folder_is_at_most_16_mib():
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 16 << 20


def test_linear_layers_are_fp8_with_float32_scales_and_the_rest_is_bfloat16(tensors):
    for name, value in tensors.items():
        if name.endswith(fp8.SCALE):
            rows, columns = tensors[name.removesuffix(fp8.SCALE)].shape
            assert (value.dtype, value.shape) == (np.float32, (-(-rows // 128), -(-columns // 128))), name
        elif fp8.is_quantized(name):
            assert value.dtype == ml_dtypes.float8_e4m3fn, name
        else:
            assert value.dtype == (np.float32 if name.endswith("bias") else ml_dtypes.bfloat16), name


def test_the_mtp_layer_is_the_extra_layer_without_copies_of_embedding_and_head(tensors):
    at = f"model.layers.{Config.from_hf(DEMO).num_hidden_layers}."
    extra = {name.removeprefix(at) for name in tensors if name.startswith(at)}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} <= extra
    assert not {"embed_tokens.weight", "shared_head.head.weight"} & extra


def test_sizes_suit_quantised_formats_and_kernels():
    config = Config.from_hf(DEMO)
    assert config.quantization_config == Quantization()
    assert config.notes == ()
    widths = (config.hidden_size, config.q_lora_rank, config.kv_lora_rank, config.moe_intermediate_size, config.intermediate_size)
    assert all(width % 256 == 0 for width in widths)
    assert config.qk_rope_head_dim in (32, 64)


@pytest.mark.deep
def test_its_weights_are_what_the_blocks_and_scales_say(tmp_path, tensors):
    hf = {k: v for k, v in json.loads((DEMO / "config.json").read_text()).items() if k != "quantization_config"}
    plain = fp8.dequantized(tensors, (128, 128))
    save(load.load(DEMO), tmp_path / "ours", dtype="float32")
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == plain.keys()
    assert Config.from_hf(tmp_path / "ours") == Config.from_hf(hf)
    for name, value in plain.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.deep
def test_fp8_written_again_is_the_same_model(tmp_path):
    model = load.load(DEMO)
    save(model, tmp_path, fp8=True)
    parameters.assert_equal(load.load(tmp_path), model)


HEADS = ["def is_prime(n):", "def add(a, b):", "def __repr__(self):", "def close(self):", "def test_empty(self):"]


@pytest.mark.deep
def test_function_heads_become_functions_that_parse(llm):
    outputs = llm.generate(HEADS, SamplingParams(temperature=0, max_tokens=128))
    assert sum(quality.continues_well(head, o.text) for head, o in zip(HEADS, outputs, strict=True)) >= 4


@pytest.mark.deep
def test_mtp_mostly_says_what_the_model_says_next(llm):
    _, best, drafted, load = quality.read_all(llm, [llm.tokenizer.encode(Path(quality.__file__).read_text())[:512]])
    agrees = drafted[0, :510] == best[0, 1:511]
    assert agrees.mean() > 0.5
    assert (load > 0).all()


@pytest.mark.deep
@pytest.mark.parametrize("task", ["passkey", "variable"])
def test_what_stands_five_hundred_tokens_back_is_recalled(llm, task):
    source = llm.tokenizer.encode("\n".join(f.text for f in corpus.sources() if f.path in ("ast.py", "chunk.py")), bos=False)
    writer = tasks.Writer(llm.tokenizer.model, np.asarray(source))
    drawn = [writer.prompt(np.random.default_rng(seed), task, 500, 8192) for seed in range(4)]
    outputs = llm.generate([prompt for prompt, _ in drawn], SamplingParams(temperature=0, max_tokens=8))
    found = [o.token_ids[: len(answer)] == answer for o, (_, answer) in zip(outputs, drawn, strict=True)]
    assert sum(found) >= 3


def test_chat_answers_from_the_conversation(llm):
    question = "# The pass key is 48213. Remember it.\n\nWhat is the pass key?"
    answer = llm.chat([{"role": "user", "content": question}], SamplingParams(temperature=0))
    assert answer.text == "48213"
    assert answer.finish_reason == "end"
