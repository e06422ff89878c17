"""Weights that a user sets: programs take them at the next call, or one error says which parameter does not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import released
from flax import nnx
from models import FAMILIES, tensors, write

from mla_jax import LLM, SamplingParams
from mla_jax.base.errors import BadRequest
from mla_jax.base.qtensor import QTensor
from mla_jax.decode.loop import Programs
from mla_jax.weights.load import load

HF = {**FAMILIES["v3"], "num_hidden_layers": 2}
ASKED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = list(range(5, 25))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [write(tmp_path_factory.mktemp("v3") / str(seed), HF, tensors(HF, seed)) for seed in (0, 1)]


def answer(llm: LLM) -> list[int]:
    return llm.generate(PROMPT, ASKED)[0].token_ids


@pytest.mark.deep
@pytest.mark.parametrize("mesh", [None, "data=2,tensor=2"])
@pytest.mark.parametrize("make", [np.asarray, jnp.array], ids=["numpy", "jax"])
def test_weights_of_the_host_or_of_one_device_take_the_places_of_the_earlier_ones(folders, mesh, make):
    llm, other = LLM(folders[0], mesh=mesh), LLM(folders[1])
    before, expected = answer(llm), answer(other)
    nnx.update(llm.model, jax.tree.map(make, nnx.state(other.model)))
    assert before != expected == answer(llm)
    np.testing.assert_allclose(llm.logits([PROMPT]), other.logits([PROMPT]), atol=1e-4)


WRONG = {
    "another dtype": (lambda old: old.astype(jnp.bfloat16), r"bfloat16 \[96, 48\], expected float32 \[96, 48\]"),
    "numpy's float64": (lambda old: np.asarray(old, np.float64), r"float64 \[96, 48\], expected float32"),
    "another shape": (lambda old: old[:90], r"float32 \[90, 48\], expected float32 \[96, 48\]"),
    "a packed tensor": (
        lambda old: QTensor("int8", (old, old[0]), old.shape),
        r"int8 \[96, 48\] in parts of .*, expected float32",
    ),
    "a list": (lambda old: old.tolist(), "a list, expected float32"),
    "nothing": (lambda old: None, "a NoneType, expected float32"),
}


@pytest.mark.deep
@pytest.mark.parametrize("wrong", WRONG)
def test_a_value_of_another_kind_is_one_error_that_names_the_parameter_until_it_is_set_again(folders, wrong):
    llm, (make, words) = LLM(folders[0]), WRONG[wrong]
    before, kept = answer(llm), llm.model.embed.get_raw_value()
    llm.model.embed.set_raw_value(make(kept))
    for call in (answer, lambda llm: list(llm.stream(PROMPT, ASKED)), lambda llm: llm.logits([PROMPT])):
        with pytest.raises(BadRequest, match=f"parameter embed was set to {words}"):
            call(llm)
    llm.model.embed.set_raw_value(kept)
    assert answer(llm) == before


def test_arrays_do_not_take_the_places_of_packed_weights(tmp_path):
    model = load(released(tmp_path, numbers="fp8"))
    programs, packed = Programs(model), model.layers[0].mlp.gate
    packed.set_raw_value(jnp.zeros(packed.get_raw_value().shape))
    with pytest.raises(
        BadRequest, match=r"parameter layers\.0\.mlp\.gate was set to float32 .*, expected fp8.* in parts of float8"
    ):
        programs.weights.refresh()


def test_unchanged_weights_are_compared_and_not_flattened(folders, monkeypatch):
    programs = Programs(load(folders[0]))
    assert {id(program.weights) for program in programs.all.values()} == {id(programs.weights)}
    monkeypatch.setattr(jax.tree, "leaves", lambda *_: pytest.fail("weights were flattened"))
    assert not programs.weights.refresh()
