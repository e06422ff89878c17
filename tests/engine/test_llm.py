"""LLM as a user calls it: tokens, texts, ends, defaults, errors."""

import contextlib
import dataclasses
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from models import FAMILIES, tensors, write
from pairs import WORDS, pairs_tokenizer

import mla_jax
from mla_jax import LLM, SamplingParams
from mla_jax.base.batch import Batch as LayerBatch
from mla_jax.base.errors import BadConfig, BadRequest, MlaJaxError
from mla_jax.engine import text as reading
from mla_jax.engine.opening import environment
from mla_jax.mesh.host_cost import HostRates
from mla_jax.offload import calibrate
from mla_jax.offload.routing import Routing

PROMPTS = [[5, 6, 7], [20], [33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43], [50, 51, 52, 53, 54, 55]]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def family_folder(path, family: str, **changes):
    hf = {**FAMILIES[family], "num_hidden_layers": 2, **changes}
    return write(path, hf, tensors(hf))


ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = family_folder(tmp_path_factory.mktemp("v3"), "v3")
    pairs_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "add_bos_token": true}')
    return path


@pytest.fixture(scope="module")
def llm(folder) -> LLM:
    return LLM(folder)


@pytest.fixture(scope="module")
def greedy(llm) -> list[list[int]]:
    """The model's continuations of PROMPTS if nothing stops it."""
    return [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture
def no_checks_of_type(monkeypatch):
    """Users run without the checks of the tests."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


def forced(llm: LLM, prompts: list[list[int]], outputs: list[list[int]]) -> list[np.ndarray]:
    """The logits each output token was chosen from, by one pass over the whole sequences."""
    tokens = np.zeros((len(prompts), 40), np.int32)
    for row, prompt, ids in zip(tokens, prompts, outputs, strict=True):
        row[: len(prompt + ids)] = prompt + ids
    return [x[len(p) - 1 :][: len(ids)] for x, p, ids in zip(llm.logits(tokens), prompts, outputs, strict=True)]


def text_of(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids if i > 1)


# what is generated


@pytest.mark.deep
@pytest.mark.parametrize(
    "family", ["v3", *(pytest.param(name, marks=pytest.mark.deep) for name in ("glm_4_7_flash", "v2", "youtu"))]
)
def test_a_row_is_the_same_alone_and_in_a_ragged_batch_and_greedy_rows_follow_the_logits(llm, tmp_path, family):
    llm = llm if family == "v3" else LLM(family_folder(tmp_path, family, **ONE_LAYER))
    warm = [
        SamplingParams(temperature=t, top_p=p, seed=s, max_tokens=24, ignore_eos=True)
        for t, p, s in [(1.0, 1.0, 7), (0.8, 0.9, 2**63)]
    ]
    params = [GREEDY, warm[0], dataclasses.replace(GREEDY, max_tokens=17), warm[1]]
    together = llm.generate(PROMPTS, params)
    for prompt, one, output in zip(PROMPTS, params, together, strict=True):
        assert llm.generate(prompt, one)[0].token_ids == output.token_ids
        assert len(output.token_ids) == one.max_tokens
    for logits, i in zip(forced(llm, PROMPTS, [o.token_ids for o in together]), range(4), strict=True):
        if params[i].temperature is None:
            assert logits.argmax(-1).tolist() == together[i].token_ids


@pytest.mark.deep
def test_a_prompt_read_in_chunks_gives_what_it_gives_read_whole(llm, monkeypatch):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 96, n).tolist() for n in (100, 33, 16, 1)]
    params = SamplingParams(max_tokens=8, logprobs=3, ignore_eos=True)
    whole = llm.generate(prompts, params)
    monkeypatch.setattr(llm.engine, "limits", dataclasses.replace(llm.engine.limits, lines=(16,)))
    llm.engine.reset()  # or their pages would be found
    chunked = llm.generate(prompts, params)
    assert [o.token_ids for o in chunked] == [o.token_ids for o in whole]
    for one, other in zip(chunked, whole, strict=True):
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert mine == pytest.approx(theirs, abs=1e-4)


def test_logprobs_are_the_log_softmax_of_the_logits(llm):
    params = [
        dataclasses.replace(GREEDY, logprobs=n, temperature=t, seed=1, repetition_penalty=1.2)
        for n, t in [(5, 0), (0, 1), (None, 0), (20, 1)]
    ]
    outputs = llm.generate(PROMPTS, params)
    assert outputs[2].logprobs is None
    for one, output, logits in zip(params, outputs, forced(llm, PROMPTS, [o.token_ids for o in outputs]), strict=True):
        if one.logprobs is None:
            continue
        expected = np.asarray(jax.nn.log_softmax(logits))
        assert len(output.logprobs) == len(output.token_ids)
        for token, found, row in zip(output.token_ids, output.logprobs, expected, strict=True):
            assert next(iter(found)) == token, "the chosen token comes first"
            assert set(found) == {token, *np.argsort(-row)[: one.logprobs].tolist()}
            np.testing.assert_allclose(list(found.values()), row[list(found)], atol=1e-4)


def test_a_seed_reproduces_and_a_drawn_one_is_told(llm):
    warm = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    first, second = llm.generate([PROMPTS[0]] * 2, warm)
    assert first.token_ids != second.token_ids
    for output in (first, second):
        again = llm.generate(PROMPTS[0], dataclasses.replace(warm, seed=output.stats.seed))[0]
        assert again.token_ids == output.token_ids


def test_parameters_go_with_their_prompts(llm, greedy):
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in (3, 0, 24, 1)]
    outputs = llm.generate(PROMPTS, params)
    assert [o.token_ids for o in outputs] == [ids[: p.max_tokens] for ids, p in zip(greedy, params, strict=True)]
    assert [o.prompt_token_ids for o in outputs] == PROMPTS
    assert {o.finish_reason for o in outputs} == {"length"}
    assert [(o.stats.prompt_tokens, o.stats.generated_tokens) for o in outputs] == [(3, 3), (1, 0), (11, 24), (6, 1)]


def test_penalties_reach_the_choice(llm):
    output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=60, presence_penalty=100, ignore_eos=True))[0]
    assert len(set(output.token_ids)) == 60
    output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=60, repetition_penalty=1000, ignore_eos=True))[0]
    assert not set(output.token_ids[:20]) & set(PROMPTS[0])


@pytest.mark.deep
def test_more_prompts_than_fit_one_batch_come_back_in_order(llm):
    prompts = [[i] for i in range(2, 72)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, ignore_eos=True))
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [o.token_ids[0] for o in outputs] == llm.logits(prompts)[:, 0].argmax(-1).tolist()


@pytest.mark.parametrize(
    "given",
    [np.array(PROMPTS[0]), jnp.asarray(PROMPTS[0]), [np.int64(t) for t in PROMPTS[0]], tuple(PROMPTS[0]), [np.array(PROMPTS[0])]],
)
def test_a_prompt_may_be_an_array_or_any_list_of_whole_numbers(llm, greedy, given, no_checks_of_type):
    output = llm.generate(given, GREEDY)
    assert [o.token_ids for o in output] == [greedy[0]]
    assert [type(t) for t in output[0].prompt_token_ids] == [int] * 3


def test_rows_of_an_array_are_prompts(llm, greedy):
    outputs = llm.generate(np.array([PROMPTS[0], PROMPTS[0]]), GREEDY)
    assert [o.token_ids for o in outputs] == [greedy[0]] * 2


def test_text_is_encoded_with_bos_and_decoded_without_control_tokens(llm):
    output = llm.generate("a0b1c2", dataclasses.replace(GREEDY, max_tokens=5))[0]
    assert output.prompt_token_ids == [0, WORDS.index("a0"), WORDS.index("b1"), WORDS.index("c2")]
    assert output.text == text_of(output.token_ids)
    assert llm.generate([output.prompt_token_ids], dataclasses.replace(GREEDY, max_tokens=5))[0].token_ids == output.token_ids


def test_no_prompts_give_no_outputs(llm):
    assert llm.generate([]) == []


@pytest.mark.deep
def test_bfloat16_tokens_are_the_likeliest_or_nearly_so(tmp_path):
    llm = LLM(family_folder(tmp_path, "v3", **ONE_LAYER), dtype="bfloat16")
    output = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=6))[0]
    logits = llm.logits([PROMPTS[0] + output.token_ids])[0, 2:-1]
    assert logits.dtype == np.float32
    assert (logits.max(-1) - logits[np.arange(6), output.token_ids] < 0.1).all()


# how it ends


@pytest.fixture
def ending(llm, greedy, monkeypatch):
    """A token the model writes behind the first prompt, made its end token, and the place of it."""
    end = next(t for t in greedy[0][3:] if greedy[0].index(t) >= 3)
    monkeypatch.setattr(llm.inputs, "text", llm.inputs.text._replace(end_ids=(1, end)))
    return end, greedy[0].index(end)


def test_an_end_token_ends_the_output_and_is_in_its_ids_but_not_in_its_text(llm, greedy, ending):
    output = llm.generate(PROMPTS[0], SamplingParams(max_tokens=24))[0]
    assert output.token_ids == greedy[0][: ending[1] + 1]
    assert output.finish_reason == "end"
    assert output.text == text_of(output.token_ids[:-1])


def test_ignore_eos_goes_on_past_the_models_ends_but_not_past_the_users(llm, greedy, ending):
    output = llm.generate(PROMPTS[0], GREEDY)[0]
    assert (output.token_ids, output.finish_reason) == (greedy[0], "length")
    output = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, stop_token_ids=(ending[0], 2**31 - 1)))[0]
    assert (output.token_ids, output.finish_reason) == (greedy[0][: ending[1] + 1], "stop")
    assert output.text == text_of(output.token_ids[:-1])


def stopped_at(ids: list[int], stops: tuple[str, ...]) -> tuple[list[int], str]:
    """The shortest ids whose text holds a stop, and the text before the first one in it."""
    n = next(n for n in range(1, len(ids) + 1) if any(s in text_of(ids[:n]) for s in stops))
    text = text_of(ids[:n])
    return ids[:n], text[: min(text.find(s) for s in stops if s in text)]


@pytest.mark.deep
@pytest.mark.parametrize("check", [1, 5, 16])
@pytest.mark.parametrize(
    "cuts",
    [[(6, 8)], [(7, 9)], [(9, 14)], [(0, 1)], [(10, 14), (11, 13)], [(8, 12), (9, 10), (30, 33)], [(30, 35)], [(-1, None)]],
    ids=[
        "a token",
        "across a border",
        "across two",
        "at once",
        "one within another",
        "three, overlapping",
        "late",
        "the last letter",
    ],
)
def test_a_stop_text_ends_the_output_before_it(llm, greedy, monkeypatch, cuts, check):
    monkeypatch.setattr(llm.engine, "limits", dataclasses.replace(llm.engine.limits, steps=check))
    text = text_of(greedy[0])
    stops = tuple(text[start:end] for start, end in cuts)
    stopped, free = llm.generate(PROMPTS[:2], [dataclasses.replace(GREEDY, stop=stops), GREEDY])
    assert (stopped.token_ids, stopped.text) == stopped_at(greedy[0], stops)
    assert stopped.finish_reason == "stop"
    assert free.token_ids == greedy[1]


def test_a_stop_text_is_seen_in_the_first_and_only_token(llm, greedy):
    output = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=1, stop=WORDS[greedy[0][0]], logprobs=0))[0]
    assert (output.token_ids, output.text, output.finish_reason) == (greedy[0][:1], "", "stop")
    assert len(output.logprobs) == 1


def test_a_stop_text_within_the_end_token_does_not_count(llm, greedy, ending):
    params = SamplingParams(max_tokens=24, stop=WORDS[ending[0]])
    output = llm.generate(PROMPTS[0], params)[0]
    assert (output.token_ids, output.finish_reason) == (greedy[0][: ending[1] + 1], "end")
    assert output.text == text_of(output.token_ids[:-1])


def test_a_stop_text_that_never_comes_changes_nothing(llm, greedy):
    output = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, stop=("zz", text_of(greedy[0]) + "a")))[0]
    assert (output.token_ids, output.text, output.finish_reason) == (greedy[0], text_of(greedy[0]), "length")


def test_no_tokens_asked_for_give_an_empty_output_even_in_a_full_context(llm, monkeypatch):
    monkeypatch.setattr(llm.inputs, "context", 16)
    outputs = llm.generate([PROMPTS[0], [3] * 16], SamplingParams(max_tokens=0, stop="a", logprobs=2))
    assert [(o.token_ids, o.text, o.finish_reason, o.logprobs) for o in outputs] == [([], "", "length", [])] * 2


def test_max_tokens_defaults_to_what_the_context_still_holds(llm, monkeypatch):
    monkeypatch.setattr(llm.inputs, "context", 16)
    assert len(llm.generate([3] * 11, SamplingParams(ignore_eos=True))[0].token_ids) == 5


@pytest.fixture
def poisoned(llm, greedy) -> Iterator[int]:
    """A token that the first prompt leads to; its embedding is NaN."""
    elsewhere = {token for ids in [*PROMPTS, *greedy[1:]] for token in ids}
    token = next(t for t in greedy[0][2:] if t not in elsewhere)
    with replaced(llm.model.embed, lambda embed: embed.at[token].set(jnp.nan)):
        yield token


@contextlib.contextmanager
def replaced(parameter: nnx.Param, change: Callable):
    before = parameter[...]
    parameter.set_value(change(before))
    yield
    parameter.set_value(before)


def test_nan_ends_the_row_it_is_in_with_an_error_and_leaves_the_others(llm, poisoned, greedy):
    outputs = llm.generate([*PROMPTS, [9, poisoned, 9]], dataclasses.replace(GREEDY, logprobs=1))
    assert [o.finish_reason for o in outputs] == ["error", "length", "length", "length", "error"]
    assert outputs[0].token_ids == greedy[0][: greedy[0].index(poisoned) + 1], "what was finite is kept"
    assert [o.token_ids for o in outputs[1:4]] == greedy[1:]
    assert outputs[4].token_ids == []
    assert all(np.isfinite(p) for o in outputs for found in o.logprobs for p in found.values())


def test_a_stop_before_the_nan_is_a_stop(llm, poisoned, greedy):
    output = llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, stop=WORDS[greedy[0][0]]))[0]
    assert (output.token_ids, output.finish_reason) == (greedy[0][:1], "stop")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_ends_every_row(llm, value):
    with replaced(llm.model.norm, lambda norm: jnp.full_like(norm, value)):
        outputs = llm.generate(PROMPTS, dataclasses.replace(GREEDY, temperature=1.0))
    assert [(o.finish_reason, o.token_ids) for o in outputs] == [("error", [])] * 4


# defaults


@pytest.mark.parametrize(
    ("given", "defaults", "ends"),
    [
        ({}, (0.0, 0, 1.0), (1,)),
        ({"temperature": 0.6, "top_p": 0.95, "eos_token_id": [1, 7, 9]}, (0.6, 0, 0.95), (1, 7, 9)),
        ({"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 7}, (0.6, 20, 1.0), (7,)),
        ({"do_sample": True, "top_p": 0.95}, (1.0, 0, 0.95), (1,)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.95}, (0.0, 0, 1.0), (1,)),
        ({"temperature": None, "eos_token_id": None}, (0.0, 0, 1.0), (1,)),
    ],
)
def test_defaults_come_from_generation_config(tmp_path, given, defaults, ends):
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    found, found_ends = reading._generation_defaults(tmp_path, (1,))
    assert (found["temperature"], found["top_k"], found["top_p"]) == defaults
    assert found_ends == ends


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": -1},
        {"top_p": 2},
        {"temperature": "hot"},
        {"eos_token_id": "x"},
        {"eos_token_id": [2**40]},
        {"eos_token_id": [True]},
    ],
)
def test_defaults_that_make_no_sense_are_refused(tmp_path, given, no_checks_of_type):
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    with pytest.raises(BadConfig):
        reading._generation_defaults(tmp_path, (1,))


@pytest.mark.deep
def test_the_folders_defaults_are_used_where_the_user_says_nothing(folder, greedy, tmp_path):
    shutil.copytree(folder, tmp_path / "model")
    end = greedy[0][5]
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "eos_token_id": [1, end]}))
    llm = LLM(tmp_path / "model")
    at = greedy[0].index(end)
    assert llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=24))[0].token_ids == greedy[0][: at + 1]
    unsaid, said = (
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=24, seed=5, ignore_eos=True, temperature=t))[0] for t in (None, 0.9)
    )
    assert unsaid.token_ids == said.token_ids != greedy[0]


# errors

TOO_LONG = "the prompt is too long: 600 tokens"


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([[]], None, "the prompt is empty"),
        ([[3] * 600], None, TOO_LONG),
        ([[3] * 600], SamplingParams(max_tokens=0), TOO_LONG),
        ([[3] * 512], None, "one of them for the output"),
        ([[3] * 500], SamplingParams(max_tokens=13), "500 prompt tokens leave room for 12 of 512"),
        ([[3, 96]], None, "token id 96 is not in the vocabulary"),
        ([[3], [-1]], None, "token id -1 is not in the vocabulary"),
        ([[2**70]], None, "is not in the vocabulary"),
        ([[3]], [GREEDY, GREEDY], "2 sets of sampling parameters for 1 prompts"),
        ([[3], [4]], [GREEDY], "1 sets of sampling parameters for 2 prompts"),
        ([[3]], {"temperature": 1}, "no SamplingParams"),
        ([[3]], [0.5], "no SamplingParams"),
        (7, None, "neither text nor token ids"),
        (None, None, "neither text nor token ids"),
        (b"abc", None, "neither text nor token ids"),
        ({"prompt": "x"}, None, "neither text nor token ids"),
        ([[3, 4.5]], None, "neither text nor a list of token ids"),
        ([3, "a"], None, "neither text nor a list of token ids"),
        ([True], None, "neither text nor a list of token ids"),
        ([None], None, "neither text nor a list of token ids"),
        ([b"abc"], None, "neither text nor a list of token ids"),
        (np.array([[0.5]]), None, "neither text nor a list of token ids"),
        ("half \ud83d", None, "not valid Unicode"),
        ({"prompt_token_ids": [3]}, None, "give the value of 'prompt_token_ids' alone"),
        ([{"prompt": "a"}], None, "give the value of 'prompt' alone"),
        ([{"role": "user", "content": "a"}], None, "chat(messages) answers a conversation"),
    ],
)
def test_what_cannot_be_served_is_refused_in_words(llm, prompts, params, words, no_checks_of_type):
    with pytest.raises(BadRequest) as refused:
        llm.generate(prompts, params)
    assert words in str(refused.value)


@pytest.mark.parametrize("method", ["generate", "stream", "chat"])
def test_a_sampling_setting_given_alone_is_shown_its_place(llm, method, no_checks_of_type):
    with pytest.raises(BadRequest, match=re.escape("did you mean SamplingParams(max_tokens=...)?")):
        getattr(llm, method)([3], max_tokens=5)


@pytest.mark.parametrize(
    "tokens", [[[]], [], [3, 4], [[3], [3, 4]], [[0.5]], [[96]], [[-1]], [["a"]], [[True]], [[3] * 513], None]
)
def test_logits_of_what_is_no_block_of_token_ids_are_refused(llm, tokens, no_checks_of_type):
    with pytest.raises(BadRequest):
        llm.logits(tokens)


def test_a_folder_without_a_tokenizer_takes_and_gives_token_ids(tmp_path):
    llm = LLM(family_folder(tmp_path, "youtu"), context=64)
    assert llm.generate(PROMPTS[0], dataclasses.replace(GREEDY, max_tokens=2))[0].text is None
    with pytest.raises(BadRequest, match="no tokenizer"):
        llm.generate("text")
    with pytest.raises(BadRequest, match="stop texts need a tokenizer"):
        llm.generate(PROMPTS[0], SamplingParams(stop="x"))
    with pytest.raises(BadRequest, match="leave room for 61 of 64"):
        llm.generate(PROMPTS[0], SamplingParams(max_tokens=62))


@pytest.mark.parametrize(
    "options", [{"attention": "flash"}, {"dtype": "float16"}, {"context": 0}, {"context": 513}, {"context": "8"}]
)
def test_options_that_are_not_known_are_refused_by_name(folder, options, no_checks_of_type):
    with pytest.raises(BadRequest, match=next(iter(options))):
        LLM(folder, **options)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(MlaJaxError, match="nowhere"):
        LLM(tmp_path / "nowhere")


def test_explain_says_what_runs_in_each_phase(llm):
    llm.generate(PROMPTS[0], SamplingParams(max_tokens=1))
    said = llm.explain()
    assert re.search(r"programs: \d+ are compiled; the largest takes [\d.]+ MiB besides weights and cache, and", said)
    assert re.search(r"deepseek_v3: 2 layers, 4 heads, [\d.]+ MiB in float32, computed in float32 on ", said)
    assert "decode (1 new over 512): move_elided, chosen" in said
    assert "experts: loop" in said


# experts on the CPU

RATES = HostRates("a CPU", 1e11, 1e12, 2e-5, 5e10)


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_experts_on_the_host_answer_as_those_on_the_device_do(llm, folder, monkeypatch):
    monkeypatch.setattr(calibrate, "host", lambda *formats: RATES)
    on_host = LLM(folder, experts="host")
    outputs = on_host.generate(PROMPTS, GREEDY)
    ids = [output.token_ids for output in outputs]
    exact = llm.logits([PROMPTS[2] + ids[2]])[0, len(PROMPTS[2]) - 1 : -1]
    chosen = np.take_along_axis(exact, np.asarray(ids[2])[:, None], axis=-1)[:, 0]
    assert (exact.max(-1) - chosen < 0.05 * exact.std()).all()  # the likeliest on the device, or next to it
    assert "".join(chunk.text for chunk in on_host.stream(PROMPTS[0], GREEDY)) == outputs[0].text
    said = on_host.explain()
    assert "experts: those of all layers on the CPU: as asked" in said
    assert "a CPU: 100.0 GB/s of experts" in said
    assert "bfloat16 on the host" in said


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_devices_of_a_mesh_share_the_experts_on_the_host(folder, monkeypatch):
    monkeypatch.setattr(calibrate, "host", lambda *formats: RATES)
    answers = [LLM(folder, experts="host", mesh=mesh).generate(PROMPTS, GREEDY) for mesh in (None, "data=2")]
    assert len({tuple(tuple(output.token_ids) for output in outputs) for outputs in answers}) == 1


@pytest.mark.usefixtures("host_library")
def test_a_slow_processor_is_a_note_where_experts_are_on_the_host(llm, folder, monkeypatch):
    monkeypatch.setattr(calibrate, "host", lambda *formats: RATES)
    monkeypatch.setattr("cpu_experts.isa", lambda: "avx2")
    slow = "experts on this CPU are computed by avx2: slower than by AVX-512 or AMX"
    assert slow in (on_host := LLM(folder, experts="host")).notes
    assert f"note: {slow}" in on_host.explain()
    assert slow not in llm.notes


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_experts_that_are_chosen_most_are_counted_and_then_lie_on_the_device_too(llm, folder, monkeypatch, tmp_path):
    monkeypatch.setattr(calibrate, "host", lambda *formats: RATES)
    path, config = tmp_path / "routing.json", llm.config
    counting = LLM(folder, routing_stats=path)
    outputs = counting.generate(PROMPTS[:2], GREEDY)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in llm.generate(PROMPTS[:2], GREEDY)]
    expected = np.zeros((1, 8), np.int64)
    for ids in (output.prompt_token_ids + output.token_ids[:-1] for output in outputs):  # the last token is read by nobody
        tokens = jnp.asarray([ids])
        load = llm.model(tokens, LayerBatch.dense(*tokens.shape), collect=True)[2]["load"]
        expected += np.asarray(load)
    np.testing.assert_array_equal(Routing.open(path, config).counts, expected)
    assert next(counting.stream(PROMPTS[0], GREEDY)).token_ids  # and one that nobody reads to its end
    counting.close()
    before = Routing.open(path, config)
    assert before.tokens > expected.sum() // 3
    split = LLM(folder, experts="host", routing_stats=path, device_experts=3)
    ids = split.model.layers[1].mlp.experts.replicated.place[...]
    assert sorted(np.flatnonzero(ids[:-1] < 3)) == sorted(np.argsort(-before.counts[0], kind="stable")[:3])
    assert re.search(r"3 of 8 experts of these layers are replicated on the device: \d+% of the tokens' choices", split.explain())
    found, exact = (x.logits([PROMPTS[2]])[0] for x in (split, llm))
    assert np.abs(found - exact).max() < 0.05 * exact.std()
    tokens = split.generate([PROMPTS[2]], GREEDY)[0].token_ids
    exact = llm.logits([PROMPTS[2] + tokens])[0, len(PROMPTS[2]) - 1 : -1]
    chosen = np.take_along_axis(exact, np.asarray(tokens)[:, None], axis=-1)[:, 0]
    assert (exact.max(-1) - chosen < 0.05 * exact.std()).all()


@pytest.mark.deep
def test_statistics_that_cannot_be_written_stop_the_start_and_no_answer(folder, tmp_path):
    with pytest.raises(BadRequest, match="cannot be written"):
        LLM(folder, routing_stats=tmp_path / "none" / "routing.json")
    (tmp_path / "there").mkdir()
    counting = LLM(folder, routing_stats=tmp_path / "there" / "routing.json")
    shutil.rmtree(tmp_path / "there")
    with pytest.warns(RuntimeWarning, match=r"routing\.json cannot be written"):
        assert counting.generate(PROMPTS[0], SamplingParams(max_tokens=2))[0].token_ids


@pytest.mark.deep
@pytest.mark.usefixtures("host_library")
def test_prompts_bring_experts_of_the_host_to_the_device_if_asked(llm, folder, monkeypatch):
    monkeypatch.setattr(calibrate, "host", lambda *formats: RATES)
    brought = LLM(folder, experts="host", stream_tokens=16)
    assert "on the CPU, with 16 tokens or more copied to the device, by loop: as asked" in brought.explain()
    ids = list(range(20))
    found, exact, computed = (x.logits([ids])[0] for x in (brought, llm, LLM(folder, experts="host", stream_tokens=0)))
    error, on_host = (np.abs(other - exact).max() for other in (found, computed))
    assert error < on_host < 0.05 * exact.std()  # weights are rounded for both, rows for the host alone
    assert brought.generate([ids], GREEDY)[0].token_ids


def test_what_is_no_way_of_computing_experts_is_refused(folder):
    with pytest.raises(BadRequest, match="experts is 'gpu', expected one of auto, host, dense, loop, gather, ragged"):
        LLM(folder, experts="gpu")


def test_for_a_user_without_a_home_no_compiled_programs_are_kept(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        environment.cache_compiled_programs("cpu", several=False)
        assert jax.config.values["jax_compilation_cache_dir"] is None
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_several_processes_on_gpus_use_no_cache_of_compiled_programs(monkeypatch):
    changed = {}
    monkeypatch.setattr(jax.config, "update", changed.__setitem__)
    environment.cache_compiled_programs("gpu", several=True)
    assert changed == {"jax_enable_compilation_cache": False}


def test_a_warm_request_enters_few_files(llm, no_checks_of_type):
    """Whoever follows a request through the package reads these, and no others."""
    entered, package, params = set(), str(Path(mla_jax.__file__).parent), SamplingParams(max_tokens=8)

    def enter(frame, event, _):
        if frame.f_code.co_filename.startswith(package):
            entered.add(Path(frame.f_code.co_filename).relative_to(package).as_posix())

    for profile in (None, None, enter):
        sys.setprofile(profile)
        try:
            llm.generate("a0b1c2", params)
        finally:
            sys.setprofile(None)
    assert 0 < len(entered) <= 30, sorted(entered)
