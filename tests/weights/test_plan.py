"""A model's planned memory, against the memory it then takes."""

import dataclasses
from math import prod

import jax
import models
import pytest
from flax import nnx

from mla_jax import LLM, Transformer
from mla_jax.base.errors import DoesNotFit
from mla_jax.base.limits import gib
from mla_jax.base.roofline import DEVICES
from mla_jax.cache.paged import PAGE
from mla_jax.decode.programs import Program
from mla_jax.model.dispatch import Dispatch
from mla_jax.model.parts import page_bytes
from mla_jax.weights import plan as planning
from mla_jax.weights.load import Checkpoint
from mla_jax.weights.plan import memory_plan
from mla_jax.weights.temporaries import logits_bytes, temporaries


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = models.FAMILIES["v3"]
    return models.write(tmp_path_factory.mktemp("plan"), hf, models.tensors(hf, mtp=True))


def pool_bytes(model: Transformer, pages: int) -> int:
    return sum(a.nbytes for a in model.new_pool(pages).values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["naive", "auto"])
def test_weights_and_cache_are_planned_to_the_byte(folder, dtype, form):
    checkpoint = Checkpoint(folder, dispatch=Dispatch(form), dtype=dtype)
    needed = memory_plan(checkpoint, 60, batch=3)
    model = checkpoint.load()
    assert needed.weights == sum(a.nbytes for a in jax.tree.leaves(nnx.state(model)))
    assert needed.cache == pool_bytes(model, 3)
    assert page_bytes(model) == pool_bytes(model, 1)


def test_a_batch_takes_as_many_times_the_cache_and_no_more_temporaries_up_to_64_rows(folder, monkeypatch):
    checkpoint = Checkpoint(folder)
    one, five, many = (memory_plan(checkpoint, 60, batch) for batch in (1, 5, 128))
    assert one.weights == five.weights == many.weights
    assert (five.cache, many.cache) == (5 * one.cache, 128 * one.cache)
    assert one.temporaries == five.temporaries < many.temporaries
    assert (one.rows, five.rows, many.rows) == (64, 64, 128)
    assert "cache of 5 x 60 tokens" in five.lines()[1]
    monkeypatch.setattr(planning, "available", lambda devices: five.needed - 1)
    assert memory_plan(checkpoint, 60).fits
    assert not memory_plan(checkpoint, 60, 5).fits


def test_pages_on_the_host_have_what_the_model_leaves_there(folder, monkeypatch):
    checkpoint, size = Checkpoint(folder), 2**-8  # GiB: 4 MiB
    page, free = page_bytes(checkpoint.model()), []
    monkeypatch.setattr(planning, "free_memory", lambda: free[-1])
    monkeypatch.setattr(planning, "available", lambda devices: 2**34)
    without = memory_plan(checkpoint, 60, cache_tokens=640)
    taken = without.weights + 10 * page + without.temporaries + 2 * 4 * 8 * page  # of pages that are on their way
    for more in (0, -1):
        free.append(taken + 2**22 // page * page + more)
        found = memory_plan(checkpoint, 60, cache_tokens=640, host_cache=size)
        assert (found.hosted, found.host_cache) == (2**22 // page * PAGE, 2**22 // page * page)
        assert found.host_free == found.host_cache + more
        assert f"pages on the host {gib(found.host_cache):>22}" in found.lines()
        if more:
            with pytest.raises(DoesNotFit, match=r"pages of 4\.0 MiB do not fit the host's memory"):
                found.refuse()
        else:
            found.refuse()


def test_a_plan_reads_no_weights(folder, monkeypatch):
    checkpoint = Checkpoint(folder)
    monkeypatch.setattr(type(checkpoint.source), "read", lambda *_: pytest.fail("a weight was read"))
    assert memory_plan(checkpoint).weights == checkpoint.bytes() > 0


def test_the_largest_context_is_the_largest_that_fits(folder, monkeypatch):
    checkpoint = Checkpoint(folder)
    whole = memory_plan(checkpoint)
    assert whole.fits
    assert whole.longest == whole.context == checkpoint.config.max_position_embeddings
    monkeypatch.setattr(planning, "available", lambda devices: whole.needed - 1)
    less = memory_plan(checkpoint, whole.context)
    assert not less.fits
    assert 64 <= less.longest < whole.longest
    assert f"--context {less.longest}" in "\n".join(less.lines())
    with pytest.raises(DoesNotFit, match="a cache of 1 x 512 tokens does not fit"):
        less.refuse()
    assert memory_plan(checkpoint, less.longest).fits
    assert not memory_plan(checkpoint, less.longest + 1).fits
    unasked = memory_plan(checkpoint)  # nobody asks for a context: as much as fits
    assert unasked.fits
    assert unasked.context == less.longest


def test_a_shortened_context_is_a_note(folder, monkeypatch):
    fits = memory_plan(Checkpoint(folder), 128).needed
    monkeypatch.setattr(planning, "available", lambda devices: fits)
    llm = LLM(folder)
    assert llm.context == 128
    assert any("128 of the model's 512 tokens; --context asks for more" in note for note in llm.notes)


@pytest.mark.parametrize(("asked", "batch", "tokens", "fits"), [(None, 1, 1000, True), (512, 1, 512, True), (512, 2, 900, False)])
def test_the_pool_has_as_many_tokens_as_are_asked_for(folder, asked, batch, tokens, fits):
    found = memory_plan(Checkpoint(folder), asked, batch, cache_tokens=tokens)
    assert found.tokens == -(-tokens // 64) * 64
    assert found.fits is fits
    assert fits or f"--cache-tokens {found.tokens} is less than" in found.lines()[-1]


@pytest.mark.parametrize(("pages", "all_of_it"), [(300.5, True), (10**6, False)])
def test_the_pool_of_a_gpu_is_all_that_is_left_or_all_that_the_rows_can_use(folder, monkeypatch, pages, all_of_it):
    checkpoint = Checkpoint(folder, dispatch=Dispatch(device=DEVICES["NVIDIA H200"]))
    page, least = page_bytes(checkpoint.model()), memory_plan(checkpoint, max_rows=64)
    free = int(least.weights + least.temporaries + pages * page)
    monkeypatch.setattr(planning, "available", lambda devices: free)
    found = memory_plan(checkpoint)
    left = found.available - found.weights - found.temporaries
    assert found.fits
    if all_of_it:
        assert left - page < found.tokens // 64 * page <= left
        assert found.tokens < 64 * 512
    else:
        assert (found.rows, found.tokens) == (1024, 1024 * 512)


def test_as_many_requests_run_as_have_room_for_some_tokens_each_or_as_are_asked_for(folder, monkeypatch):
    checkpoint = Checkpoint(folder, dispatch=Dispatch(device=DEVICES["NVIDIA H200"]))
    page, rows = page_bytes(checkpoint.model()), []
    for tokens in (1000, 200 * 1024, 300 * 1024, 10**7):
        room = memory_plan(checkpoint, max_rows=256).temporaries + checkpoint.bytes() + tokens // 64 * page
        monkeypatch.setattr(planning, "available", lambda devices, room=room: room)
        rows.append(memory_plan(checkpoint).rows)
        assert memory_plan(checkpoint, batch=3, max_rows=2).rows == 3
    assert rows[:1] + rows[-1:] == [64, 1024]
    assert rows == sorted(rows)
    assert rows[2] >= 256
    assert memory_plan(Checkpoint(folder)).rows == 64  # on a CPU


@pytest.mark.parametrize(("batch", "asked"), [(3, None), (2, 512)])
def test_a_context_that_nobody_asks_for_is_one_that_fits_as_often_as_the_batch_says(folder, monkeypatch, batch, asked):
    checkpoint = Checkpoint(folder, dispatch=Dispatch(device=DEVICES["NVIDIA H200"]))
    least = memory_plan(checkpoint, max_rows=64)
    free = least.weights + least.temporaries + 10 * page_bytes(checkpoint.model())
    monkeypatch.setattr(planning, "available", lambda devices: free)
    found = memory_plan(checkpoint, batch=batch, cache_tokens=asked, max_rows=64)
    assert found.fits
    assert found.context == {3: 192, 2: 256}[batch]


def test_drafts_take_logits_for_the_rows_that_may_draft_alone(folder):
    model = Checkpoint(folder).model()
    none, few, all_of_them = (temporaries(model, 64, 3, rows) for rows in (0, 32, None))
    words = model.embed.get_value().shape[0]
    assert temporaries(model, 64) == none
    assert few - none > 16 * words * (4 * 32 - 64)
    assert all_of_them - few >= 16 * words * 4 * 32


def test_weights_that_do_not_fit_are_refused_before_any_is_read(folder, monkeypatch):
    needed = memory_plan(Checkpoint(folder))
    monkeypatch.setattr(planning, "available", lambda devices: needed.weights)
    monkeypatch.setattr(Checkpoint, "load", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(DoesNotFit, match="does not fit the device") as error:
        LLM(folder)
    assert "weights" in str(error.value)
    assert "--dtype bfloat16" in str(error.value)
    assert error.value.exit_code == 4


@pytest.mark.deep
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
    assert memory_plan(Checkpoint(folder, dtype="float32")).weights == 4 * (sum(sizes.values()) - copies)


@pytest.mark.deep
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
