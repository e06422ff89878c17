"""A context that is compressed once answers as one that is read, and drops tokens, anew for each prompt."""

import asyncio
import dataclasses
import itertools

import numpy as np
import pytest
import retrieved
import safetensors
from models import FAMILIES, tensors, write
from safetensors.numpy import load_file, save_file
from servers import until

from mla_jax import LLM, AsyncLLM, BadFile, BadRequest, Evict, SamplingParams
from mla_jax.cache.evict import KVzip, SnapKV
from mla_jax.cache.paged import PAGE
from mla_jax.engine.policy.contexts import AT_A_TIME
from mla_jax.engine.policy.evicting import Eviction
from mla_jax.model import rope

TEXT = np.random.default_rng(0).integers(2, 96, 700).tolist()
PROMPTS = [np.random.default_rng(1).integers(2, 96, n).tolist() for n in (3, 20, 70)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
HALF = Evict("snapkv", budget="ada_floor", keep=0.5)


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def made(seed: int):
        hf = {**FAMILIES["v3"], "num_hidden_layers": 2, "num_nextn_predict_layers": 0, "max_position_embeddings": 2048}
        return write(tmp_path_factory.mktemp(f"v3_{seed}"), hf, tensors(hf, seed=seed))

    return made


@pytest.fixture(scope="module")
def folder(folder_of):
    return folder_of(0)


def opened(folder, evict: Evict | None = HALF, attention: str = "absorbed", **settings) -> LLM:
    more = {"draft": "off", "dtype": "float32", "context": 1500} | settings
    return LLM(folder, attention=attention, **({} if evict is None else {"evict": evict}), **more)


@pytest.fixture(scope="module")
def llm(folder):
    with opened(folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def context(llm):
    return llm.compress(TEXT)


def answers(llm: LLM, context, prompts=PROMPTS, params=GREEDY) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(prompts, params, context=context)]


@pytest.mark.deep
@pytest.mark.parametrize(
    ("attention", "keep"),
    [("absorbed", 0.5), ("absorbed", 0.95), ("naive", 0.3)],  # at 0.95 more than is copied at a time
)
def test_answers_are_those_of_a_prompt_that_drops_the_same_tokens(folder, attention, keep, monkeypatch):
    with opened(folder, Evict("snapkv", budget="ada_floor", keep=keep), attention) as llm:
        context = llm.compress(TEXT)
        assert (context.counts.max() > AT_A_TIME) == (keep > 0.9)
        assert len({*context.counts.ravel().tolist()}) > 1, "layers, or heads, keep unlike numbers"
        found = answers(llm, context)
        assert found == [answers(llm, context, [prompt])[0] for prompt in PROMPTS]
        until(lambda: llm.stats().pages_free == llm.stats().pages)
    points = (len(TEXT), 10_000)
    monkeypatch.setattr(Eviction, "point", lambda self, request, number: points[min(number, 1)])
    with opened(folder, Evict("snapkv", budget="ada_floor", keep=keep, chunk=len(TEXT)), attention) as other:
        assert found == [other.generate([TEXT + prompt], GREEDY)[0].token_ids for prompt in PROMPTS]


@pytest.mark.deep
def test_prompts_share_a_contexts_pages_and_give_them_back(llm, context):
    """Of 32 requests with pages of their own the pool would hold four."""
    with opened(llm.options.model.model, cache_tokens=24 * PAGE) as crowded:
        assert 5 * context.counts.mean() > 24 * PAGE
        many = list(itertools.islice(itertools.cycle(PROMPTS), 32))
        found = answers(crowded, context, many)
        assert found == list(itertools.islice(itertools.cycle(answers(llm, context)), 32))
        until(lambda: crowded.stats().pages_free == crowded.stats().pages)


def test_a_stream_and_a_task_go_on_behind_it(llm, context):
    whole = llm.generate([PROMPTS[0]], GREEDY, context=context)[0]
    streamed = [token for chunk in llm.stream(PROMPTS[0], GREEDY, context=context) for token in chunk.token_ids]
    awaited = asyncio.run(AsyncLLM(llm).generate([PROMPTS[0]], GREEDY, context=context))[0]
    assert streamed == awaited.token_ids == whole.token_ids


def test_forks_and_other_requests_run_beside_it(llm, context):
    drawn = dataclasses.replace(GREEDY, temperature=1.0, n=3, seed=5)
    plain = [output.token_ids for output in llm.generate([PROMPTS[1]], GREEDY)]
    assert len({tuple(ids) for ids in answers(llm, context, [PROMPTS[0]], drawn)}) == 3
    assert [output.token_ids for output in llm.generate([PROMPTS[1]], GREEDY)] == plain


@pytest.mark.deep
def test_questions_say_what_stays_and_do_not_stay(folder):
    """Other tokens stay than without a question, as many, all of them of the text."""
    asked = TEXT[300:316]
    with opened(folder, Evict(SnapKV(window=16, kernel=1), budget="uniform", keep=0.2, recent=1, sinks=0)) as llm:
        plain, questioned = llm.compress(TEXT), llm.compress(TEXT, asked)
        assert questioned.tokens == plain.tokens == TEXT
        assert questioned.counts.tolist() == plain.counts.tolist() == [[140], [140]]
        assert any((questioned.arrays[name] != plain.arrays[name]).any() for name in plain.arrays)
        assert llm.generate([PROMPTS[0]], GREEDY, context=questioned)[0].prompt_token_ids == TEXT + PROMPTS[0]


@pytest.mark.deep
def test_kvzip_keeps_what_the_text_looks_at_when_it_is_read_again(folder):
    """Against the whole attention of the text twice, in plain numpy."""
    text, kept = TEXT[:150], 30
    with opened(folder, Evict(KVzip(window=200), budget="uniform", keep=kept, recent=1, sinks=0)) as llm:
        context = llm.compress(text, text)
        _, layers = retrieved.forward(llm.model, text + text, lambda *_: np.tri(300, dtype=bool))
        scale, rank = rope.softmax_scale(llm.config), llm.config.kv_lora_rank
    found = np.split(context.arrays["c_kv"], context.counts.ravel().cumsum()[:-1])
    for (q, kv), mine in zip(layers, found, strict=True):
        logits = np.where(np.tri(300, dtype=bool), np.einsum("tnl,sl->nts", q, kv) * scale, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        scores = weights[:, 150:, :150].max(1).mean(0)
        scores[-1] = np.inf  # the newest stays
        stays = np.sort(np.argsort(-scores)[:kept])
        np.testing.assert_allclose(mine, kv[stays, :rank], atol=1e-4)


def test_a_file_holds_it_and_is_opened_again(llm, context, tmp_path):
    context.save(tmp_path / "context.safetensors")
    again = llm.open_context(tmp_path / "context.safetensors")
    assert again.tokens == TEXT
    assert all((again.arrays[name] == context.arrays[name]).all() for name in context.arrays)
    assert answers(llm, again) == answers(llm, context)
    assert repr(again).startswith("CompressedContext(700 tokens, 50.0% kept")


def test_a_file_that_cannot_be_written_leaves_nothing(context, tmp_path):
    with pytest.raises(BadRequest, match="cannot be written"):
        context.save(tmp_path / "missing" / "context.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_and_one_of_something_else_are_refused(llm, context, tmp_path):
    path = tmp_path / "context.safetensors"
    context.save(path)
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
    arrays = load_file(path)
    save_file(arrays | {"counts": arrays["counts"] + 1}, path, metadata=metadata)
    with pytest.raises(BadFile, match="do not belong together"):
        llm.open_context(path)
    save_file(arrays, path)
    with pytest.raises(BadFile, match="is no compressed context"):
        llm.open_context(path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(BadFile):
        llm.open_context(path)


@pytest.mark.parametrize("what", ["model", "evict", "cache"])
def test_a_context_of_another_llm_is_refused(llm, context, what):
    other = dataclasses.replace(context, made_by=context.made_by | {what: "another"})
    with pytest.raises(BadRequest, match=f"of another {what}"):
        llm.generate([PROMPTS[0]], GREEDY, context=other)


def test_arrays_of_another_cache_are_refused_before_anything_runs(llm, context):
    flat = dataclasses.replace(context, counts=context.counts.reshape(1, -1))
    (name, array), *others = context.arrays.items()
    other = dataclasses.replace(context, arrays={name: array.astype(np.float16), **dict(others)})
    for wrong in (flat, other, dataclasses.replace(context, arrays=dict(others))):
        with pytest.raises(BadRequest, match="not those of this model's cache"):
            llm.generate([PROMPTS[0]], GREEDY, context=wrong)
    with pytest.raises(BadRequest, match="compress and open_context give one"):
        llm._compressing.check("a text")
    assert len(llm.generate([PROMPTS[0]], GREEDY, context=context)[0].token_ids) == 12


@pytest.mark.deep
def test_a_context_of_chunks_in_fp8_is_asked_behind_questions(tmp_path):
    hf = {**FAMILIES["v3"], "kv_lora_rank": 128, "num_hidden_layers": 2, "num_nextn_predict_layers": 0}
    folder = write(tmp_path, hf | {"max_position_embeddings": 2048}, tensors(hf))
    with opened(
        folder, Evict("snapkv", budget="ada_floor", keep=200, chunk=128), kv_cache="fp8", dtype="bfloat16", draft="lookup"
    ) as llm:
        context = llm.compress(TEXT, PROMPTS[2])
        assert context.counts.mean() == 200
        assert context.tokens == TEXT
        found = answers(llm, context)
        context.save(tmp_path / "context.safetensors")
        assert answers(llm, llm.open_context(tmp_path / "context.safetensors")) == found


@pytest.mark.deep
def test_weights_that_were_changed_are_another_model(folder_of):
    with opened(folder_of(1)) as llm:
        context = llm.compress(TEXT)
        norm = llm.model.layers[1].attn_norm
        norm.set_value(norm.get_value() * 1.5)
        with pytest.raises(BadRequest, match="of another model"):
            llm.generate([PROMPTS[0]], GREEDY, context=context)


@pytest.mark.parametrize(
    ("params", "message"),
    [({"prompt_logprobs": 1}, "not read again"), ({"repetition_penalty": 1.2}, "counts tokens")],
)
def test_parameters_that_need_all_tokens_are_refused(llm, context, params, message):
    with pytest.raises(BadRequest, match=message):
        llm.generate([PROMPTS[0]], dataclasses.replace(GREEDY, **params), context=context)


def test_without_a_prompt_or_without_evict_it_is_refused(folder, llm, context):
    with pytest.raises(BadRequest, match="at least one token behind it"):
        llm.generate([[]], GREEDY, context=context)
    with opened(folder, None) as plain:
        with pytest.raises(BadRequest, match="without evict"):
            plain.compress(TEXT)
        with pytest.raises(BadRequest, match="without evict"):
            plain.generate([PROMPTS[0]], GREEDY, context=context)
