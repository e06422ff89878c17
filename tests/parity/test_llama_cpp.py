"""GGUF files as llama.cpp converts, quantises and runs them, against our reading of the same files, in float32."""

import json

import jax.numpy as jnp
import models
import numpy as np
import pytest

import mla_jax
from mla_jax.base.batch import Batch
from mla_jax.text.gguf_tokenizer import KNOWN
from mla_jax.weights.hub import DEMO

pytestmark = pytest.mark.parity
TEXT = '''class Stack:
    """Last in, first out: a list that grows and shrinks at one end."""

    def __init__(self, items=()):
        self.items = list(items)

    def push(self, item):
        self.items.append(item)
        return self

    def pop(self, default=None):
        if not self.items:
            return default
        return self.items.pop()

    def __len__(self):
        return len(self.items)


def balanced(text, pairs={"(": ")", "[": "]", "{": "}"}):
    stack = Stack()
    for i, c in enumerate(text):
        if c in pairs:
            stack.push(pairs[c])
        elif c in pairs.values() and stack.pop() != c:
            raise ValueError(f"unexpected {c!r} at {i}")  # 3.14159 * 10 ** 2
    return len(stack) == 0
'''
# Mixtures of types that other kinds hold, too: a program that multiplies packed weights is compiled for those alone.
MIXED = {"Q3_K_M", "Q3_K_L", "Q4_K_M", "Q5_K_M", "Q2_K_S", "IQ2_M", "IQ3_M", "IQ3_XS"}
LENGTH = 200
EXACT = 1e-4  # of the largest logit; around 1e-6 is found
# What llama.cpp can quantise to, and a bound on the mean KL divergence of its next token from ours, in nats: it rounds what is
# multiplied with the weights too, mostly to 8 bits in blocks. Found are a tenth to a half of it.
KL = {
    "F16": 1e-6,
    "BF16": 5e-5,
    **dict.fromkeys(("Q8_0", "MXFP4_MOE"), 6e-4),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_M"), 3e-3),
    **dict.fromkeys(("Q2_K", "Q3_K_S", "Q3_K_M", "Q3_K_L", "Q4_K_S", "Q4_K_M", "Q5_K_S", "Q5_K_M", "Q6_K"), 3e-3),
    **dict.fromkeys(("TQ1_0", "TQ2_0"), 8e-2),  # no model remains of weights that were not trained to be -1, 0, 1
}
# The same for types that want an importance matrix, which is of ones here
KL_WEIGHTED = dict.fromkeys(("Q2_K_S", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS"), 3e-3)
CLASSES = {
    "v2": "DeepseekV2ForCausalLM",
    "v2_lite": "DeepseekV2ForCausalLM",
    "v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "moonlight": "DeepseekV3ForCausalLM",
    "glm_4_7_flash": "Glm4MoeLiteForCausalLM",
    "youtu": "YoutuForCausalLM",
}


@pytest.fixture(scope="module")
def cpp():
    found = pytest.importorskip("parity.llama_cpp", reason="llama-cpp-python is missing (`make parity`)", exc_type=ImportError)
    if not (found.SOURCE / "convert_hf_to_gguf.py").exists():
        pytest.skip(f"llama.cpp's converter is not in {found.SOURCE.name}: `make parity` unpacks it, or set LLAMA_CPP")
    return found


@pytest.fixture(scope="module")
def demo(cpp, tmp_path_factory):
    """The bundled model in float32."""
    return cpp.convert(DEMO, tmp_path_factory.mktemp("demo") / "demo.gguf")


@pytest.fixture(scope="module")
def tokens(demo):
    return mla_jax.LLM(dtype="float32").tokenizer.encode(TEXT)[:LENGTH]


def logits(path, tokens: list[int]) -> np.ndarray:
    return mla_jax.LLM(path, dtype="float32").logits([tokens])[0]


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def divergence(ours: np.ndarray, theirs: np.ndarray) -> float:
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (ours.astype(np.float64), theirs.astype(np.float64)))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


# ---- the bundled model


def test_the_converted_demo_has_the_logits_of_llama_cpp_and_of_its_folder(cpp, demo, tokens):
    ours = logits(demo, tokens)
    assert relative(ours, cpp.logits(demo, tokens)) <= EXACT
    assert relative(ours, logits(DEMO, tokens)) <= EXACT


@pytest.mark.deep
@pytest.mark.parametrize("kind", [*KL, *KL_WEIGHTED])
def test_quantised_weights_are_read_as_llama_cpp_reads_them(cpp, demo, tokens, tmp_path, kind):
    """The gguf package agrees bit for bit (tests/base/test_qtensor.py)."""
    file = cpp.quantize(demo, tmp_path / "quantised.gguf", kind, even=kind in KL_WEIGHTED)
    ours = logits(file, tokens)
    if kind not in MIXED:
        assert relative(mla_jax.LLM(file).logits([tokens])[0], ours) <= EXACT
    assert relative(ours, cpp.logits(cpp.quantize(file, tmp_path / "theirs.gguf", "F32"), tokens)) <= EXACT
    assert divergence(ours, cpp.logits(file, tokens)) <= (KL | KL_WEIGHTED)[kind]


def test_no_type_of_the_quantiser_is_left_out(cpp):
    # NVFP4 is written by converters alone; Q1_0 wants longer rows than the demo has; Q2_0 is below
    assert cpp.TYPES.keys() - (KL | KL_WEIGHTED).keys() == {"F32", "NVFP4", "Q1_0", "Q2_0"}


def test_a_type_that_the_gguf_package_does_not_know_yet_is_read_as_llama_cpp_reads_it(cpp, demo, tokens, tmp_path):
    file = cpp.quantize(demo, tmp_path / "m.gguf", "Q2_0")
    theirs = cpp.logits(cpp.quantize(file, tmp_path / "theirs.gguf", "F32"), tokens)
    assert relative(logits(file, tokens), theirs) <= EXACT


LAYOUTS = {
    "in parts": ("f32", "--split-max-tensors", "50"),
    "8 bits where FP8 was": ("bf16", "--fp8-as-q8"),
    "8 bits": ("q8_0",),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_converter_is_read(cpp, tokens, tmp_path, layout):
    kind, *options = LAYOUTS[layout]
    cpp.convert(DEMO, tmp_path / "demo.gguf", kind=kind, options=tuple(options))
    file = min(tmp_path.glob("*.gguf"))  # the first part
    ours = logits(file, tokens)
    if kind != "f32":
        file = cpp.quantize(file, tmp_path / "theirs.gguf", "F32")
    assert relative(ours, cpp.logits(file, tokens)) <= EXACT


def old_layout(tensors: dict[str, np.ndarray]) -> dict:
    """Joins keys and values as before April 2025, and gives the metadata of that time."""
    for name in [name for name in tensors if "attn_k_b" in name]:
        value = tensors.pop(name.replace("_k_b", "_v_b"))
        both = np.concatenate([tensors.pop(name).swapaxes(1, 2), value], axis=1)
        tensors[name.replace("_k_b", "_kv_b")] = both.reshape(-1, both.shape[-1])
    heads = {"head_count_kv": 8, "key_length": 64, "value_length": 32, "key_length_mla": None, "value_length_mla": None}
    return {f"deepseek2.attention.{name}": value for name, value in heads.items()}


def fused(tensors: dict[str, np.ndarray]) -> dict:
    """Joins the experts' gates and ups, which llama.cpp reads for this architecture and its converter does not write yet."""
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        parts = tensors.pop(name), tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = np.concatenate(parts, axis=1)
    return {}


@pytest.mark.parametrize("change", [old_layout, fused])
def test_layouts_that_the_converter_does_not_write_are_read(cpp, demo, tokens, tmp_path, change):
    tensors = cpp.values(demo)
    file = cpp.rewritten(demo, tmp_path / "demo.gguf", change(tensors), tensors.items())
    assert relative(logits(file, tokens), cpp.logits(file, tokens)) <= EXACT
    assert relative(logits(file, tokens), cpp.logits(demo, tokens)) <= EXACT


def test_the_mtp_layer_is_loaded_and_drafts_as_llama_cpp_does(cpp, demo, tokens, tmp_path):
    file = cpp.convert(DEMO, tmp_path / "mtp.gguf", mtp=True)
    llm = mla_jax.LLM(file, dtype="float32")
    assert len(llm.model.mtp) == 1
    assert relative(llm.logits([tokens])[0], cpp.logits(demo, tokens)) <= EXACT
    assert (cpp.logits(file, tokens) == cpp.logits(demo, tokens)).all()
    row, batch = jnp.asarray([tokens]), Batch.dense(1, len(tokens) - 1)
    hidden, _, _ = llm.model(row[:, :-1], batch)
    drafted, _, _ = llm.model.draft(0, row[:, 1:], hidden, batch)
    expected = cpp.logits(file, tokens[1:], np.asarray(hidden)[0])
    assert relative(np.asarray(llm.model.unembed(drafted))[0], expected) <= EXACT


# ---- other families


def sizes(family: str) -> dict:
    """The family's config in sizes that llama.cpp takes: rows of whole blocks of 32."""
    hf = models.FAMILIES[family] | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 4096, "kv_lora_rank": 64}
    hf |= {"num_attention_heads": 4, "num_key_value_heads": 4}
    hf |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    # llama.cpp tells models without q_lora_rank by their count of layers
    hf |= {"num_hidden_layers": 27} if hf["q_lora_rank"] is None else {"q_lora_rank": 64}
    if "n_routed_experts" in hf:
        hf["moe_intermediate_size"] = 32
    if family == "v2":  # llama.cpp rates V2's groups by their two best experts, transformers and we by the best
        hf |= {"n_group": 1, "topk_group": 1}
    if family == "kimi_k2":  # a word that no class of transformers goes by; the model is the same
        hf["model_type"] = "deepseek_v3"
    return hf


@pytest.mark.parametrize("family", CLASSES)
def test_random_models_of_every_family_have_the_logits_of_llama_cpp(cpp, tmp_path, family):
    hf = sizes(family)
    folder = cpp.folder(tmp_path / "model", hf, CLASSES[family], mtp=family == "glm_4_7_flash")
    row = np.random.default_rng(0).integers(0, hf["vocab_size"], LENGTH).tolist()
    file = cpp.convert(folder, tmp_path / "model.gguf")
    ours = mla_jax.LLM(file, dtype="float32")
    assert ours.notes == ()
    assert len(ours.model.mtp) == (family == "glm_4_7_flash")
    assert relative(ours.logits([row])[0], cpp.logits(file, row)) <= EXACT
    assert relative(ours.logits([row])[0], logits(folder, row)) <= EXACT
    small = cpp.quantize(file, tmp_path / "small.gguf", "Q4_K_M")
    assert relative(logits(small, row), cpp.logits(cpp.quantize(small, tmp_path / "plain.gguf", "F32"), row)) <= EXACT


# ---- text

TEXTS = (
    TEXT,
    "x = 12345.678 * (-0.5)\n\n\n    return  x\t\r\n  ",
    "Ünïcode: naïve ☃ 日本語テキスト 한국어 Привет العربية 🚀🏽 e\u0301",
    "I'll don't WE'RE ''quoted'' ##!! foo_bar.baz<|user|>",
    "<\uff5cUser\uff5c>no control<\uff5cend▁of▁sentence\uff5c>",
)


def test_the_demos_pre_tokenizer_is_the_one_that_the_file_names(demo):
    cuts = json.loads((DEMO / "tokenizer.json").read_text())["pre_tokenizer"]["pretokenizers"]
    assert tuple(cut["pattern"]["Regex"] for cut in cuts[:-1]) == KNOWN["deepseek-v3"].patterns


def test_text_is_cut_into_the_tokens_of_tokenizer_json_and_of_llama_cpp(cpp, demo):
    ours, folder = mla_jax.LLM(demo).tokenizer, mla_jax.LLM().tokenizer
    for bos in (False, True):
        found = [ours.encode(text, bos=bos) for text in TEXTS]
        assert found == [folder.encode(text, bos=bos) for text in TEXTS]
        assert found == cpp.tokenize(demo, list(TEXTS), bos=bos)
