"""Streams and chats: the same answers as `generate`, piece by piece."""

import asyncio
import dataclasses
import gc
import json
import os
import re
import signal

import jaxtyping
import pytest
from models import FAMILIES, tensors, write
from pairs import pairs_tokenizer

from mla_jax import LLM, SamplingParams
from mla_jax.base.errors import BadRequest
from mla_jax.base.options import Options
from mla_jax.engine import inputs
from mla_jax.engine.async_llm import AsyncLLM
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.stats import EngineStats
from mla_jax.engine.opening.opened import open_model
from mla_jax.text.stream import TextStream

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    hf = {**FAMILIES["v3"], "num_hidden_layers": 2}
    path = write(tmp_path_factory.mktemp("v3"), hf, tensors(hf))
    pairs_tokenizer().save(str(path / "tokenizer.json"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<bos>", "add_bos_token": True, "chat_template": template})
    )
    return LLM(path)


def settled(llm: LLM) -> EngineStats:
    """The engine's figures, once what was said to its thread so far is done."""
    llm._worker.call(lambda: None)
    return llm.stats()


@pytest.mark.deep
def test_a_stream_adds_up_to_what_generate_gives(llm):
    output, chunks = llm.generate("a5b6", PARAMS)[0], list(llm.stream("a5b6", PARAMS))
    assert "".join(c.text for c in chunks) == output.text
    assert [t for c in chunks for t in c.token_ids] == output.token_ids
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == output.finish_reason
    assert llm.last_stats.generated_tokens == 24


def test_a_stream_ends_at_a_stop_text_and_never_shows_it(llm):
    whole = llm.generate("a5b6", PARAMS)[0].text
    stop = whole[9:14]
    params = SamplingParams(max_tokens=24, ignore_eos=True, stop=stop)
    chunks = list(llm.stream("a5b6", params))
    assert "".join(c.text for c in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish_reason == "stop"
    assert [t for c in chunks for t in c.token_ids] == llm.generate("a5b6", params)[0].token_ids


def test_a_stream_of_no_tokens_ends_at_once(llm):
    (chunk,) = llm.stream("a5", SamplingParams(max_tokens=0))
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", [], "length")


def test_a_stream_dropped_half_way_leaves_the_engine_usable(llm):
    expected = llm.generate("a5b6", PARAMS)[0].token_ids
    stream = llm.stream("a5b6", PARAMS)
    next(stream)
    stream.close()
    assert llm.generate("a5b6", PARAMS)[0].token_ids == expected


def test_control_tokens_in_a_prompt_are_said_once_to_be_plain_text():
    processor = open_model(Options()).inputs  # the demo's
    prompt = f"{max(processor.text.tokenizer.control, key=len)}def"
    with pytest.warns(UserWarning, match="which is read as plain text"):
        processor.requests(["def", prompt], None)
    processor.requests([prompt], None)  # where a second warning would be an error


class Cycle:
    """Refers to itself, so that only Python's collector ends its stream."""

    def __init__(self, stream):
        self.stream, self.me = stream, self


@pytest.mark.deep
@pytest.mark.parametrize("inside", ["_compile_for", "_admit", "_decode", "_mixed_step", "_land", "queue"])
def test_a_stream_that_the_collector_ends_in_the_middle_of_anything_disturbs_nobody(llm, monkeypatch, inside):
    expected = llm.generate("a5b6", PARAMS)[0].token_ids
    gc.disable()
    other, forgotten = llm.stream("a5b6", PARAMS), Cycle(llm.stream("c7", PARAMS))
    ids = next(other).token_ids
    next(forgotten.stream)
    del forgotten
    step = getattr(Engine, inside)
    monkeypatch.setattr(Engine, inside, lambda self, *given, **asked: (gc.collect(), step(self, *given, **asked))[1])
    assert llm.generate("a5b6", PARAMS)[0].token_ids == expected
    assert ids + [token for chunk in other for token in chunk.token_ids] == expected
    assert (settled(llm).running, llm.stats().waiting) == (0, 0)
    gc.enable()


@pytest.mark.deep
def test_a_closed_stream_no_longer_counts_as_running(llm):
    stream = llm.stream("a5b6", SamplingParams(max_tokens=480, ignore_eos=True))  # far from done when it is closed
    next(stream)
    assert llm.stats().running == 1
    stream.close()
    assert (settled(llm).running, llm.stats().tokens_held) == (0, 0)


def test_a_request_whose_text_fails_ends_alone(llm, monkeypatch):
    def fail(*_):
        raise ValueError("no text for these bytes")

    expected = llm.generate("a5b6", PARAMS)[0].token_ids
    one, other = llm.stream("a5b6", PARAMS), llm.stream("c7", PARAMS)
    ids = next(one).token_ids
    with monkeypatch.context() as patched:
        patched.setattr(TextStream, "push", fail)
        with pytest.raises(ValueError, match="no text for these bytes"):
            list(other)
    ids = ids + [token for chunk in one for token in chunk.token_ids]
    assert ids == expected
    assert (settled(llm).running, llm.generate("a5b6", PARAMS)[0].token_ids) == (0, expected)


def test_a_streams_request_is_checked_when_it_is_made(llm):
    with pytest.raises(BadRequest):
        llm.stream([], PARAMS)


def test_log_probabilities_come_with_the_stream(llm):
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=2)
    chunks = list(llm.stream("a5", params))
    assert [p for c in chunks for p in c.logprobs] == llm.generate("a5", params)[0].logprobs


def test_a_chat_is_the_template_and_then_generate(llm):
    messages = [{"role": "user", "content": "a5"}, {"role": "assistant", "content": "b6"}, {"role": "user", "content": "c7"}]
    output = llm.chat(messages, PARAMS)
    assert output.prompt_token_ids == llm.encode_chat(messages) == llm.tokenizer.encode("a5b6c7")
    assert output.token_ids == llm.generate("a5b6c7", PARAMS)[0].token_ids


def test_a_chat_gives_its_template_tools_variables_and_an_answer_to_continue(llm, monkeypatch):
    source = "{{ bos_token }}{{ messages[-1].content }}{{ tools[0].function.name }}{{ b6 }}"
    written = dataclasses.replace(llm.chat_template, source=source)
    monkeypatch.setattr(llm.inputs, "text", llm.inputs.text._replace(chat_template=written))
    messages = [{"role": "assistant", "content": "a5"}]
    given = {"tools": [{"type": "function", "function": {"name": "c7"}}], "chat_template_kwargs": {"b6": "b6"}}
    assert llm.chat(messages, PARAMS, **given).prompt_token_ids == llm.tokenizer.encode("a5c7b6")
    continued = asyncio.run(AsyncLLM(llm).chat(messages, PARAMS, continue_final_message=True, **given))
    assert continued.prompt_token_ids == llm.tokenizer.encode("a5")
    with pytest.raises(BadRequest, match=r"LLM\.chat has no setting tool_choice"):
        llm.chat(messages, PARAMS, tool_choice="auto")


@pytest.mark.parametrize("messages", [None, 5, "hi", [], [5], [{"role": "user"}], {"role": "user", "content": "a5"}])
def test_what_is_no_conversation_is_a_bad_request(llm, monkeypatch, messages):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users run without the checks of the tests
    for task in (llm.chat, llm.encode_chat):
        with pytest.raises(BadRequest, match=r"conversation|message 0"):
            task(messages)


def test_a_folder_without_a_template_cannot_chat(llm, monkeypatch):
    monkeypatch.setattr(llm.inputs, "text", llm.inputs.text._replace(chat_template=None))
    with pytest.raises(BadRequest, match="no chat template"):
        llm.chat([{"role": "user", "content": "a5"}])


def test_more_prompts_than_the_limit_are_refused_before_any_is_converted(llm, monkeypatch):
    monkeypatch.setattr(inputs, "_plain", lambda value: pytest.fail("a prompt was converted"))
    with pytest.raises(BadRequest, match="1,000,000 prompts"):
        llm.generate([[5]] * 1_000_000)


def test_the_figures_of_the_last_stream_are_gone_when_the_next_begins(llm):
    list(llm.stream("a5", PARAMS))
    assert llm.last_stats is not None
    stream = llm.stream("a5b6", PARAMS)
    assert llm.last_stats is None
    next(stream)
    assert llm.last_stats.prompt_tokens == 3


def test_ctrl_c_in_generate_is_heard_and_leaves_the_engine_usable(llm, monkeypatch):
    expected = llm.generate("a5b6", PARAMS)[0].token_ids
    step, calls = Engine.step, []

    def interrupted(engine: Engine):
        calls.append(engine)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    with monkeypatch.context() as patched:
        patched.setattr(Engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("a5b6", SamplingParams(max_tokens=300, ignore_eos=True))
    assert (settled(llm).running, llm.stats().waiting) == (0, 0)
    assert llm.generate("a5b6", PARAMS)[0].token_ids == expected
    assert [t for chunk in llm.stream("a5b6", PARAMS) for t in chunk.token_ids] == expected


def test_the_model_is_shown_by_its_name_size_and_device(llm):
    assert re.fullmatch(r"LLM\('v3\d+': deepseek_v3, 2 layers, [\d.]+ MiB in float32, context 512, on .+\)", repr(llm))
