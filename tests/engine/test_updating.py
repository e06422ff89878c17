"""Weights that change while an LLM serves, and folders that it writes: tokens are those of an LLM that was opened with them."""

import json
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import convert, released, with_text
from flax import nnx
from models import FAMILIES, tensors, write
from weights import fp8, parameters

from mla_jax import LLM, SamplingParams
from mla_jax.base.errors import BadFile, BadRequest, Unsupported
from mla_jax.engine.updating import exchange
from mla_jax.weights.masters import as_held, parameters_by_path

HF = {**FAMILIES["v3"], "num_hidden_layers": 2}
ASKED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
PROMPT = [*range(5, 75), *range(5, 75)]  # more than a page


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return [write(tmp_path_factory.mktemp("v3") / str(seed), HF, tensors(HF, seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def llm(folders) -> LLM:
    return LLM(folders[0])


@pytest.fixture(scope="module")
def other(folders) -> LLM:
    return LLM(folders[1])


@pytest.fixture(scope="module")
def weights(other) -> nnx.State:
    return nnx.state(other.trainable(), nnx.Param)


def answer(llm: LLM, params: SamplingParams = ASKED) -> list[int]:
    return llm.generate(PROMPT, params)[0].token_ids


def compiled(llm: LLM) -> int:
    """Programs that this answer needs, and those that are compiled ahead of others; nothing is being compiled any more."""
    for _ in range(4):
        answer(llm)
        with llm.with_weights(nnx.state(llm.trainable(), nnx.Param)):  # forgets the prompt
            answer(llm)
        while llm.engine.device.compiles:
            time.sleep(0.01)
    return llm.stats().compiled


def test_other_weights_are_served_within_and_the_earlier_ones_after_without_a_program_more(llm, other, weights):
    before, expected = answer(llm), answer(other)
    assert before != expected
    llm.logits([PROMPT])
    held = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(llm.model))]
    programs = compiled(llm)
    with llm.with_weights(weights) as same:
        assert same is llm
        assert answer(llm) == expected
        np.testing.assert_allclose(llm.logits([PROMPT]), other.logits([PROMPT]), atol=1e-5)
    assert answer(llm) == before
    assert compiled(llm) == programs
    after = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(llm.model))]
    assert all(a is b for a, b in zip(held, after, strict=True))


def test_the_earlier_weights_come_back_after_an_error(llm, weights):
    before = answer(llm)
    with pytest.raises(ZeroDivisionError), llm.with_weights(weights):
        raise ZeroDivisionError
    assert answer(llm) == before


@pytest.mark.deep
@pytest.mark.parametrize("mesh", ["data=2,tensor=2", "context=2", "data=4"])
def test_on_a_mesh_arrays_of_one_device_take_the_places_of_the_earlier_ones(folders, other, weights, mesh):
    llm = LLM(folders[0], mesh=mesh)
    programs, shardings = compiled(llm), jax.tree.map(lambda w: w.sharding, nnx.state(llm.model))
    llm.update(weights)
    assert answer(llm) == answer(other)
    assert compiled(llm) == programs
    assert jax.tree.map(lambda w: w.sharding, nnx.state(llm.model)) == shardings


def test_requests_that_have_begun_end_with_their_weights_and_those_that_wait_begin_with_the_new_ones(llm, other, weights):
    old, new = answer(llm, LONG), answer(other, LONG)
    values, news = as_held(llm.model, weights), threading.Event()
    readers = llm.submit(llm.requests([PROMPT] * 2, LONG), lambda _: news.set())
    news.wait()
    changing = threading.Thread(target=exchange, args=[llm, values])
    before = {path: v.get_raw_value() for path, v in parameters_by_path(llm.model).items()}
    changing.start()
    while changing.is_alive() and not llm.engine.draining:
        time.sleep(0.001)
    readers += llm.submit(llm.requests([PROMPT] * 2, LONG), lambda _: None)
    changing.join()
    try:
        assert [reader.job.ids for reader in readers[:2]] == [old, old]
        assert answer(llm, LONG) == new
        assert [reader.job.ids for reader in readers[2:]] == [new, new]
    finally:
        exchange(llm, before)
    assert answer(llm, LONG) == old


@pytest.mark.deep
def test_a_request_that_was_preempted_goes_on_with_its_weights(llm, other, weights):
    old, values, news = answer(llm, LONG), as_held(llm.model, weights), threading.Event()
    (reader,) = llm.submit(llm.requests([PROMPT], LONG), lambda _: news.set())
    news.wait()
    llm._worker.call(lambda: (llm.engine._land_all(), llm.engine._preempt(reader.job)))
    exchange(llm, exchange(llm, values))
    assert reader.job.ids == old


def test_weights_that_do_not_fit_change_nothing(llm, weights):
    before = answer(llm)
    flat = list(nnx.to_flat_state(weights))
    with pytest.raises(BadRequest, match="missing"):
        llm.update(nnx.from_flat_state(flat[1:]))
    assert answer(llm) == before


def test_a_closed_llm_takes_no_weights(folders, weights):
    llm = LLM(folders[0])
    llm.close()
    with pytest.raises(BadRequest, match="this LLM is closed"):
        llm.update(weights)


def test_the_prefix_index_forgets_what_other_weights_have_read(llm, weights):
    first = answer(llm)
    before = llm.stats().hits
    assert answer(llm) == first
    assert llm.stats().hits > before
    with llm.with_weights(weights):
        before = llm.stats().hits
        answer(llm)
        assert llm.stats().hits == before


def saved(llm: LLM, folder, **options) -> LLM:
    llm.save(folder, **options)
    return LLM(folder)


def test_a_saved_folder_has_the_weights_that_are_served_bit_for_bit_and_the_tokenizer(tmp_path, weights):
    llm = LLM(with_text(write(tmp_path / "in", HF, tensors(HF, 0))))
    llm.update(weights)
    again = saved(llm, tmp_path / "out")
    parameters.assert_equal(again.model, llm.model)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    assert again.tokenizer.encode("a5b6") == llm.tokenizer.encode("a5b6")
    with pytest.raises(BadFile, match="not empty"):
        llm.save(tmp_path / "out")
    with pytest.raises(BadRequest, match="dtype is 'int8'"):
        llm.save(tmp_path / "int8", dtype="int8")


@pytest.mark.parametrize("numbers", ["fp8", pytest.param("fp8_e8m0", marks=pytest.mark.deep)])
def test_weights_in_fp8_are_saved_in_fp8_before_and_after_an_update(tmp_path, numbers):
    llm = LLM(released(tmp_path / "in", numbers=numbers))
    parameters.assert_equal(saved(llm, tmp_path / "out").model, llm.model)
    llm.update(jax.tree.map(lambda w: 1.5 * w, nnx.state(llm.trainable(), nnx.Param)))
    parameters.assert_equal(saved(llm, tmp_path / "trained").model, llm.model)
    for folder in ("out", "trained"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["quantization_config"]["weight_block_size"] == [16, 24]
    exact = saved(llm, tmp_path / "float32", dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "float32" / "config.json").read_text())
    np.testing.assert_allclose(exact.logits([PROMPT]), llm.logits([PROMPT]), atol=1e-3)


@pytest.mark.deep
def test_scales_that_a_folder_has_no_room_for_are_refused(tmp_path):
    """Of FP8 with a scale for each matrix."""
    sizes, weights = HF | {"intermediate_size": 160}, {}
    for name, w in tensors(sizes, 0).items():
        weights[name] = w
        if fp8.is_quantized(name):
            codes, scale = fp8.quantize(w, w.shape)
            weights |= {name: codes, name + fp8.SCALE: scale.reshape(())}
    hf = sizes | {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    llm = LLM(write(tmp_path / "in", hf, weights))
    parameters.assert_equal(saved(llm, tmp_path / "out").model, llm.model)
    weights = jax.tree.map(lambda w: w + jnp.arange(w.size).reshape(w.shape) / w.size, nnx.state(llm.trainable(), nnx.Param))
    llm.update(weights)
    with pytest.raises(Unsupported, match=r"cannot hold the scales of layers\.0\.mlp\.(gate|down)"):
        llm.save(tmp_path / "trained")
    saved(llm, tmp_path / "bf16", dtype="bfloat16")


@pytest.mark.parametrize("dtype", ["int8", pytest.param("q4_k", marks=pytest.mark.deep)])
def test_formats_of_no_released_folder_are_saved_as_numbers_alone(tmp_path, folders, dtype):
    assert convert(folders[0], tmp_path / "in", "--dtype", dtype) == 0
    llm = LLM(tmp_path / "in")
    with pytest.raises(Unsupported, match=r'cannot hold (.|\n)*give dtype="bfloat16"'):
        llm.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    again = saved(llm, tmp_path / "float32", dtype="float32")
    np.testing.assert_allclose(again.logits([PROMPT]), llm.logits([PROMPT]), atol=1e-4)


@pytest.mark.deep
def test_int4_is_saved_as_compressed_tensors(tmp_path):
    hf = HF | {"moe_intermediate_size": 32, "hidden_size": 64, "intermediate_size": 96, "q_lora_rank": 32}
    folder = write(tmp_path / "plain", hf, tensors(hf, 0))
    assert convert(folder, tmp_path / "in", "--dtype", "int4_g32") == 0
    llm = LLM(tmp_path / "in")
    llm.update(jax.tree.map(lambda w: w * 0.5, nnx.state(llm.trainable(), nnx.Param)))
    parameters.assert_equal(saved(llm, tmp_path / "out").model, llm.model)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
