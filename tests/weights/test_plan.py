"""What a model needs in memory, against what it then takes."""

import dataclasses
from math import prod

import jax
import models
import pytest
from flax import nnx

from mla_jax import LLM, SamplingParams, Transformer
from mla_jax.base.errors import DoesNotFit
from mla_jax.cache.latent import slots_for
from mla_jax.decode.programs import Program
from mla_jax.model.dispatch import Dispatch
from mla_jax.weights import plan as planning
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.plan import gib, logits_bytes, plan, slot_bytes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = models.FAMILIES["v3"]
    return models.write(tmp_path_factory.mktemp("plan"), hf, models.tensors(hf, mtp=True))


def held(model: Transformer, rows: int) -> int:
    """Bytes of a cache of 64 slots."""
    return sum(a.nbytes for layer in model.new_cache(rows, 64) for name, a in layer.items() if name != "length")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["naive", "auto"])
def test_weights_and_cache_are_planned_to_the_byte(folder, dtype, form):
    checkpoint = Checkpoint(folder, dispatch=Dispatch(form), dtype=dtype)
    needed = plan(checkpoint, 60)
    model = checkpoint.load()
    assert needed.weights == sum(a.nbytes for a in jax.tree.leaves(nnx.state(model)))
    assert needed.cache == held(model, 1)
    assert slot_bytes(model, 5) * 64 == held(model, 5)


@pytest.mark.parametrize("batch", [2, 5])
def test_a_batch_takes_its_rows_caches_and_temporaries(folder, monkeypatch, batch):
    checkpoint = Checkpoint(folder)
    one, several = plan(checkpoint, 60), plan(checkpoint, 60, batch)
    assert several.weights == one.weights
    assert several.cache == held(checkpoint.load(), {2: 2, 5: 8}[batch])  # rows come in powers of two
    assert one.temporaries < several.temporaries <= batch * one.temporaries
    assert f"cache of {batch} x 60 tokens" in several.lines()[1]
    monkeypatch.setattr(planning, "available", lambda: several.needed - 1)
    assert plan(checkpoint, 60).fits
    assert not plan(checkpoint, 60, batch).fits


def test_a_plan_reads_no_weights(folder, monkeypatch):
    checkpoint = Checkpoint(folder)
    monkeypatch.setattr(type(checkpoint.source), "read", lambda *_: pytest.fail("a weight was read"))
    assert plan(checkpoint).weights == checkpoint.bytes() > 0


def test_the_largest_context_is_the_largest_that_fits(folder, monkeypatch):
    checkpoint = Checkpoint(folder)
    whole = plan(checkpoint)
    assert whole.fits
    assert whole.longest == checkpoint.config.max_position_embeddings
    monkeypatch.setattr(planning, "available", lambda: whole.needed - 1)
    less = plan(checkpoint)
    assert not less.fits
    assert 64 <= less.longest < whole.longest
    assert f"--context {less.longest}" in "\n".join(less.lines())
    assert plan(checkpoint, less.longest).fits
    assert not plan(checkpoint, less.longest + 1).fits


def test_the_largest_context_is_found_though_longer_ones_may_need_less(folder, monkeypatch):
    """With shorter chunks, that is, which come after 42, 85, 170 and 341 tokens here."""
    checkpoint = Checkpoint(folder)
    monkeypatch.setattr(planning, "score_bytes", lambda *_: 1 << 20)
    base, most = plan(checkpoint, 1), checkpoint.config.max_position_embeddings
    fixed, slot, model = base.weights, base.cache // 64, checkpoint.model()
    needed = {n: fixed + slots_for(n) * slot + planning.temporaries(model, [], n, 1 << 20) for n in range(1, most + 1)}
    assert any(needed[n + 1] < needed[n] for n in range(1, most))
    for free in (
        needed[1] - 1,
        needed[1],
        needed[32],
        *(needed[n] + more for n in (42, 85, 86, 170, 171, 300, 342) for more in (-1, 0)),
    ):
        monkeypatch.setattr(planning, "available", lambda free=free: free)
        assert plan(checkpoint).longest == max((n for n in needed if needed[n] <= free), default=0)


def test_what_fits_with_a_short_context_is_not_refused(folder, monkeypatch):
    checkpoint = Checkpoint(folder)
    needed = plan(checkpoint, 32).needed
    monkeypatch.setattr(planning, "available", lambda: needed)
    short = plan(checkpoint, 32)
    assert short.fits
    assert short.longest == 32
    short.refuse()


def test_weights_that_do_not_fit_are_refused_before_any_is_read(folder, monkeypatch):
    needed = plan(Checkpoint(folder))
    monkeypatch.setattr(planning, "available", lambda: needed.weights)
    monkeypatch.setattr(Checkpoint, "load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(DoesNotFit, match="does not fit the device") as error:
        LLM(folder)
    assert "weights" in str(error.value)
    assert "--dtype bfloat16" in str(error.value)
    assert error.value.exit_code == 4


def test_a_batch_whose_cache_does_not_fit_is_refused_with_the_room_there_is(folder):
    llm = LLM(folder)
    needed = held(llm.model, 64)
    llm.plan = dataclasses.replace(llm.plan, available=llm.plan.weights + needed - 1)
    with pytest.raises(DoesNotFit, match=f"it takes {gib(needed)} .* room for {gib(needed - 1)}"):
        llm.generate([[1, 2, 3]] * 33, SamplingParams(max_tokens=40))


def test_running_out_of_memory_on_the_device_is_explained_once(folder, monkeypatch):
    llm, call = LLM(folder), Program.__call__

    def fail_with(message: str):
        def failing(program: Program, *args, **kw):
            if program is llm._programs.run:
                raise jax.errors.JaxRuntimeError(message)
            return call(program, *args, **kw)

        monkeypatch.setattr(Program, "__call__", failing)

    fail_with("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12 GiB")
    with pytest.raises(DoesNotFit, match="--memory-fraction"):
        llm.generate([1, 2, 3])
    fail_with("INTERNAL: other")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        llm.generate([1, 2, 3])


def test_expected_bytes_follow_from_the_shapes(folder):
    hf = models.FAMILIES["v3"]
    sizes = {name: prod(shape) for name, shape in models.shapes(hf, mtp=True).items()}
    copies = sum(n for name, n in sizes.items() if "layers.3.embed_tokens" in name or "shared_head.head" in name)
    assert plan(Checkpoint(folder, dtype="float32")).weights == 4 * (sum(sizes.values()) - copies)


def test_logits_are_planned_about_as_xla_does(folder):
    llm = LLM(folder)
    for rows, tokens in [(1, 256), (4, 128), (32, 16)]:
        program = llm._programs.logits.lower(jax.ShapeDtypeStruct((rows, tokens), "int32")).compile().memory_analysis()
        taken = program.temp_size_in_bytes + program.output_size_in_bytes
        assert 0.5 * taken < logits_bytes(llm.model, rows, tokens) < 2.5 * taken, (rows, tokens)


def test_logits_that_do_not_fit_are_refused_before_they_take_memory(folder, monkeypatch):
    llm = LLM(folder)
    needed = logits_bytes(llm.model, 3, 100)
    llm.plan = dataclasses.replace(llm.plan, available=llm.plan.weights + needed - 1)
    monkeypatch.setattr(llm._programs, "logits", lambda *_: pytest.fail("logits were computed"))
    with pytest.raises(DoesNotFit, match=r"the logits of 3 x 100 tokens do not fit\n.* take about .*\n.*fewer or shorter"):
        llm.logits([[1] * 100] * 3)
