"""Drafts as users meet them: options, texts, log-probabilities, every way of computing, and how many guesses stand on a model
that was trained."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import FAMILIES, tensors, write
from pairs import pairs_tokenizer
from serving import drafting_engine

from mla_jax import LLM, SamplingParams
from mla_jax.base.batch import Batch
from mla_jax.base.errors import BadRequest, Unsupported
from mla_jax.base.options import Options
from mla_jax.decode.loop import Programs
from mla_jax.decode.speculative import Lookup, Mtp, Nobody, _one_back
from mla_jax.engine.core.engine import Engine
from mla_jax.engine.core.job import Job
from mla_jax.engine.core.size import Size
from mla_jax.engine.opening.opened import open_model
from mla_jax.generate import parse
from mla_jax.mesh.host_cost import HostRates
from mla_jax.offload import calibrate
from mla_jax.weights.load import Checkpoint

PROMPTS = [[5, 6, 7], [20, 21, 20, 21, 20], [33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43]]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
WARM = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.5, seed=3)


def folder_of(path: Path, layers: int = 2, mtp: bool = True, **changes) -> Path:
    hf = {**FAMILIES["v3"], "num_hidden_layers": layers, "first_k_dense_replace": layers - 1, **changes}
    write(path, hf, tensors(hf, mtp=mtp))
    pairs_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"bos_token": "<bos>", "add_bos_token": true}')
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("v3"))


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    """The same model without a layer for multi-token prediction."""
    return folder_of(tmp_path_factory.mktemp("without"), mtp=False)


@pytest.fixture(scope="module")
def plain(folder) -> LLM:
    return LLM(folder, draft="off", context=192)


@pytest.fixture(scope="module")
def drafting(folder) -> dict[str, LLM]:
    return {
        "mtp": LLM(folder, draft="mtp", draft_tokens=3, context=192),
        "lookup": LLM(folder, draft="lookup", draft_tokens=5, context=192),
    }


# texts and log-probabilities


def assert_same_log_probabilities(mine: list, theirs: list) -> None:
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        assert one is None or one == pytest.approx(other, abs=1e-4)


@pytest.mark.deep
@pytest.mark.parametrize("draft", ["mtp", "lookup"])
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "warm"])
def test_texts_and_log_probabilities_are_those_without_drafts(plain, drafting, draft, params):
    asked = dataclasses.replace(params, logprobs=3, prompt_logprobs=2)
    expected, found = plain.generate(PROMPTS, asked), drafting[draft].generate(PROMPTS, asked)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
        assert_same_log_probabilities(one.logprobs, other.logprobs)
        assert_same_log_probabilities(one.prompt_logprobs, other.prompt_logprobs)


@pytest.mark.deep
@pytest.mark.parametrize("draft", ["mtp", "lookup"])
def test_a_stop_text_ends_the_output_where_it_ends_without_drafts(plain, drafting, draft):
    for params in (GREEDY, WARM):
        whole = plain.generate(PROMPTS[1], params)[0].text
        for start, end in [(0, 1), (6, 8), (9, 14), (40, 43), (len(whole) - 1, None)]:
            stop = whole[start:end]
            asked = dataclasses.replace(params, stop=stop)
            expected, found = (llm.generate(PROMPTS[1], asked)[0] for llm in (plain, drafting[draft]))
            assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
            assert found.text == whole[: whole.index(stop)]
            assert found.finish_reason == "stop"


@pytest.mark.deep
@pytest.mark.parametrize("draft", ["mtp", "lookup"])
def test_the_pieces_of_a_stream_join_to_the_text_without_drafts(plain, drafting, draft):
    for params in (GREEDY, WARM, dataclasses.replace(GREEDY, stop=plain.generate(PROMPTS[1], GREEDY)[0].text[21:24])):
        chunks, expected = list(drafting[draft].stream(PROMPTS[1], params)), plain.generate(PROMPTS[1], params)[0]
        assert "".join(chunk.text for chunk in chunks) == expected.text
        assert [token for chunk in chunks for token in chunk.token_ids][: len(expected.token_ids)] == expected.token_ids
        assert chunks[-1].finish_reason == expected.finish_reason


@pytest.mark.deep
def test_forks_are_those_without_drafts(plain, drafting):
    asked = dataclasses.replace(WARM, n=3, temperature=1.0, top_p=0.95)
    expected = [output.token_ids for output in plain.generate(PROMPTS, asked)]
    for llm in drafting.values():
        assert [output.token_ids for output in llm.generate(PROMPTS, asked)] == expected


# every way of computing


def assert_drafts_change_nothing(folder: Path, **options) -> None:
    plain, drafting = (LLM(folder, context=128, draft="mtp", draft_tokens=n, **options) for n in (0, 3))
    expected, found = ([output.token_ids for output in llm.generate(PROMPTS, GREEDY)] for llm in (plain, drafting))
    assert drafting.stats().drafted.sum() > 0
    assert found == expected


@pytest.mark.deep
@pytest.mark.once
@pytest.mark.parametrize("attention", ["naive", "compressed", "absorbed", "move_elided", "fused"])
def test_with_every_form_of_attention_greedy_tokens_stay_the_same(tmp_path, attention):
    assert_drafts_change_nothing(folder_of(tmp_path, 1), attention=attention)


@pytest.mark.deep
@pytest.mark.once
def test_with_latents_in_fp8_greedy_tokens_stay_the_same(tmp_path):
    assert_drafts_change_nothing(folder_of(tmp_path, 1, kv_lora_rank=128), kv_cache="fp8")


RATES = HostRates("a CPU", 1e11, 1e12, 2e-5, 5e10)


@pytest.mark.deep
@pytest.mark.once
@pytest.mark.usefixtures("host_library")
@pytest.mark.parametrize("options", [{"experts": "host"}, {"host_layers": 1}, {"experts": "host", "defer": 1}], ids=str)
def test_with_experts_on_the_host_greedy_tokens_stay_the_same(tmp_path, monkeypatch, options):
    """Of the model's layers and of the one that guesses, or of that one alone."""
    monkeypatch.setattr(calibrate, "host", lambda *formats: RATES)
    assert_drafts_change_nothing(folder_of(tmp_path), **options)


# options


def test_the_layer_for_multi_token_prediction_is_asked_for_before_weights_are_read(without, monkeypatch):
    monkeypatch.setattr(Checkpoint, "load", lambda *args: pytest.fail("weights were read"))
    with pytest.raises(Unsupported, match='draft "mtp" is not available for this model'):
        LLM(without, draft="mtp")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, Nobody()),  # on a CPU
        ({"draft": "mtp"}, Mtp(3)),
        ({"draft": "auto", "draft_tokens": 7}, Mtp(7)),
        ({"draft": "mtp", "draft_tokens": 1}, Mtp(1)),
        ({"draft": "lookup"}, Lookup(3)),
        ({"draft": "off"}, Nobody()),
        ({"draft": "mtp", "draft_tokens": 0}, Nobody()),
    ],
    ids=str,
)
def test_options_say_who_guesses(folder, fields, expected):
    assert open_model(Options.of(model=folder, **fields)).drafter == expected


@pytest.mark.deep
def test_by_default_a_model_without_the_layer_drafts_nothing(without):
    llm = LLM(without, context=128)
    llm.generate(PROMPTS, GREEDY)
    assert llm.stats().drafted.sum() == 0
    assert llm.stats().tokens_a_pass == 1
    assert "drafts" not in llm.explain()
    assert open_model(Options.of(model=without, draft="lookup")).drafter == Lookup(3)


@pytest.mark.parametrize("draft", ["off", "lookup"])
def test_where_the_model_s_layer_is_not_to_guess_neither_its_weights_nor_its_cache_are_there(draft, folder, without):
    found, alone, whole = (
        open_model(Options.of(model=path, draft=asked)) for path, asked in ((folder, draft), (without, draft), (folder, "mtp"))
    )
    assert not found.checkpoint.model().mtp
    assert (found.plan.weights, found.plan.cache) == (alone.plan.weights, alone.plan.cache)
    assert found.plan.weights < whole.plan.weights
    assert found.plan.cache < whole.plan.cache


@pytest.mark.deep
def test_explain_says_who_guesses_how_many_and_statistics_say_what_stood(folder, drafting):
    assert "drafts: 3 guesses a pass by the model's layer for multi-token prediction" in drafting["mtp"].explain()
    assert "drafts: 5 guesses a pass by looking up what followed before" in drafting["lookup"].explain()
    said = "\n".join(open_model(Options.of(model=folder, draft="mtp")).explain())
    assert "drafts: by the model's layer for multi-token prediction, as many as pay, up to 3; 1 row, 1,024 tokens held" in said
    llm = drafting["lookup"]
    llm.generate([[5, 6, 7, 8] * 6], GREEDY)
    stats, numbers = llm.stats(), llm.stats().as_numbers()
    assert stats.generated == stats.passes + stats.stood.sum()
    assert stats.tokens_a_pass == pytest.approx(stats.generated / stats.passes)
    assert 0 < len(numbers["drafted"]) <= 5
    assert len(numbers["stood"]) == len(numbers["drafted"])
    assert all(0 <= stood <= drafted for stood, drafted in zip(numbers["stood"], numbers["drafted"], strict=True))


def test_flags_and_the_configuration_file_reach_the_options(tmp_path):
    drafts = parse(["x", "--draft", "lookup", "--draft-tokens", "5"]).options.drafts
    assert (drafts.draft, drafts.draft_tokens) == ("lookup", 5)
    (tmp_path / "a.toml").write_text('[drafts]\ndraft = "mtp"\ndraft_tokens = 2\n')
    drafts = parse(["x", "--config", str(tmp_path / "a.toml")]).options.drafts
    assert (drafts.draft, drafts.draft_tokens) == ("mtp", 2)
    (tmp_path / "a.toml").write_text("[drafts]\ndraft_token = 2\n")
    with pytest.raises(BadRequest, match="draft_tokens"):
        parse(["x", "--config", str(tmp_path / "a.toml")])


# the bundled model


HELD_OUT = [
    "def mean(numbers):\n",
    "class Queue:\n    def __init__(self",
    "import os\n\nfor name in os.listdir(",
    "# Reads a file line by line and counts words.\ndef count",
    "The children went down to the river, and",
    "    try:\n        value = int(text)\n    except",
    "def test_the_result_is_sorted():\n",
    "if __name__ == ",
]
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)


@pytest.fixture(scope="module")
def demo() -> LLM:
    return LLM(draft="mtp", context=256)


@dataclasses.dataclass(frozen=True)
class Unnormed(Mtp):
    """Gives the layer its own output before the last norm; scales do not matter, for its input is normed anew."""

    def propose(self, given):
        model, going, asked, token, counts = given
        needed = counts + (counts == 0)

        def guess(i, carry):
            pool, hidden, newest, guesses = carry
            one = Batch.behind(going.held + i, going.position + i, (i < needed).astype(jnp.int32), 1, asked.page_table)
            found, pool, _ = model.draft(0, newest[:, None], hidden[:, None], _one_back(one), pool)
            newest = jnp.argmax(model.unembed(found[:, 0]), -1)
            return pool, found[:, 0] / model.mtp[0].norm[...], newest, guesses.at[:, i].set(newest)

        start = going.pool, going.last, token, jnp.zeros((token.size, self.most), jnp.int32)
        pool, _, _, guesses = jax.lax.fori_loop(0, needed.max(), guess, start)
        return pool, guesses, counts


def engine_of(llm: LLM, drafter: Mtp) -> tuple[Engine, list[Job]]:
    """An engine that has answered HELD_OUT, with as many guesses a pass as this drafter makes at most."""
    programs = Programs(llm.model, drafter=drafter)
    engine = drafting_engine(programs, Size(rows=8, pages=32, context=256, chunk=128), drafter.most)
    jobs = [engine.submit(request) for request in llm.inputs.requests(HELD_OUT, LONG)]
    while engine.busy:
        engine.step()
    return engine, jobs


def agreement(llm: LLM, prompt: list[int], ids: list[int]) -> tuple[int, int]:
    """How often the layer, reading true tokens and states, says what the model says next, of how many generated tokens."""
    tokens, model = jnp.asarray([prompt + ids], jnp.int32), llm.model
    hidden, _, _ = model(tokens, Batch.dense(*tokens.shape))
    drafted, _, _ = model.draft(0, tokens[:, 1:], hidden[:, :-1], Batch.dense(1, tokens.size - 1))
    best, guessed = np.argmax(model.unembed(hidden)[0], -1), np.argmax(model.unembed(drafted)[0], -1)
    places = slice(len(prompt) - 1, len(prompt + ids) - 1)  # of states whose next token was generated
    return int((guessed[places] == best[1:][places]).sum()), len(ids)


@pytest.mark.deep
@pytest.mark.once
def test_as_many_guesses_stand_as_agree_when_true_text_is_read(demo):
    engine, jobs = engine_of(demo, Mtp(1))
    agreed, count = np.sum([agreement(demo, job.request.prompt, job.ids) for job in jobs], axis=0)
    stood = engine.stats.stood[0] / engine.stats.drafted[0]
    print(
        f"of {engine.stats.drafted[0]} guesses {stood:.4f} stand; of {count} places of the same text {agreed / count:.4f} agree"
    )
    assert engine.stats.drafted[0] > 300
    assert stood == pytest.approx(agreed / count, abs=0.02)


@pytest.mark.deep
@pytest.mark.once
def test_fewer_second_guesses_stand_if_the_layer_is_given_its_output_from_before_the_last_norm(demo):
    shares, texts = [], []
    for drafter in (Mtp(2), Unnormed(2)):
        engine, jobs = engine_of(demo, drafter)
        shares.append(engine.stats.stood[:2] / engine.stats.drafted[:2])
        texts.append([job.ids for job in jobs])
    print(f"behind the norm {shares[0]}, before it {shares[1]}")
    assert texts[0] == texts[1]
    assert shares[0][0] == pytest.approx(shares[1][0], abs=0.03)
    assert shares[0][1] > shares[1][1]
