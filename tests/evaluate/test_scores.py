"""Scores, perplexity and rates, and the commands that print them."""

import json
import math

import jax
import numpy as np
import pytest
from models import FAMILIES, tensors, write
from pairs import pairs_tokenizer

from mla_jax import LLM
from mla_jax.base.errors import BadRequest
from mla_jax.evaluate.__main__ import main
from mla_jax.evaluate.bench import Load, bench, loads
from mla_jax.evaluate.perplexity import perplexity
from mla_jax.evaluate.scores import rolling, score

pytestmark = pytest.mark.once
CONTEXT = 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    hf = {**FAMILIES["v3"], "num_hidden_layers": 1, "first_k_dense_replace": 0, "max_position_embeddings": CONTEXT}
    path = write(tmp_path_factory.mktemp("scored"), hf, tensors(hf))
    pairs_tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<bos>", "add_bos_token": True}))
    return path


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder) as llm:
        yield llm


def of_logits(llm, tokens: list[int]) -> np.ndarray:
    """Log-probabilities of each token's followers."""
    return np.asarray(jax.nn.log_softmax(llm.logits([tokens])[0].astype(np.float32)))


@pytest.mark.deep
def test_scores_are_those_of_whole_sequences(llm):
    pairs = [([3, 7, 9], [4, 5]), ([8], [6]), ([5, 5, 5], []), ([4], list(range(10, 40)))]
    for (context, after), (logprob, greedy) in zip(pairs, score(llm, pairs), strict=True):
        found = of_logits(llm, [*context, *after])[len(context) - 1 : -1]
        assert logprob == pytest.approx(sum(row[token] for row, token in zip(found, after, strict=True)), abs=1e-4)
        assert greedy == all(row.argmax() == token for row, token in zip(found, after, strict=True))


def test_the_likeliest_continuation_is_greedy(llm):
    likeliest = int(of_logits(llm, [3, 7, 9])[-1].argmax())
    other = 11 if likeliest == 10 else 10
    assert [one.greedy for one in score(llm, [([3, 7, 9], [likeliest]), ([3, 7, 9], [other])])] == [True, False]


def test_what_is_longer_than_the_context_loses_its_beginning(llm):
    long, after = [4 + i % 50 for i in range(3 * CONTEXT)], [9, 8]
    assert score(llm, [(long, after)]) == score(llm, [(long[-(CONTEXT - 2) :], after)])
    with pytest.raises(BadRequest, match="without a context"):
        score(llm, [([], after)])


@pytest.mark.parametrize("count", [1, 2, 5, 6, 11, 40])
def test_windows_count_each_token_but_the_first_once(count):
    tokens, counted = list(range(count)), []
    for window in rolling(tokens, length=6, least=2):
        assert len(window.tokens) <= 6
        assert window.tokens == list(range(window.tokens[0], window.tokens[-1] + 1))
        if counted:
            assert len(window.tokens) - window.scored >= 2
        counted += window.tokens[-window.scored :]
    assert counted == tokens[1:]


def test_perplexity_of_one_window_is_that_of_the_logits(llm):
    text = "a1b2" * 20
    tokens = llm.tokenizer.encode(text)
    found = perplexity(llm, text, window=CONTEXT, overlap=8)
    rows = of_logits(llm, tokens)[:-1]
    total = sum(row[token] for row, token in zip(rows, tokens[1:], strict=True))
    assert found.tokens == len(tokens) - 1
    assert found.perplexity == pytest.approx(math.exp(-total / found.tokens), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(-total / math.log(2) / len(text), rel=1e-4)


def test_perplexity_says_why_there_is_none(llm):
    with pytest.raises(BadRequest, match="too short"):
        perplexity(llm, "", window=CONTEXT, overlap=8)
    with pytest.raises(BadRequest, match=r"context holds 128"):
        perplexity(llm, "a1b2" * 20, window=CONTEXT + 1, overlap=8)
    with pytest.raises(BadRequest, match="cannot begin"):
        perplexity(llm, "a1b2" * 20, window=8, overlap=8)


def test_loads_have_the_names_of_llama_bench():
    asked = loads([512], [128], ["512,128"], [1, 8])
    assert [load.name for load in asked] == ["pp512", "pp512 x8", "tg128", "tg128 x8", "pp512+tg128", "pp512+tg128 x8"]
    assert [load.tokens for load in asked] == [512, 4096, 128, 1024, 640, 5120]


@pytest.mark.deep
def test_rates_are_of_the_tokens_that_a_load_has(llm):
    (rate,) = bench(llm, [Load(2, 20, 4)], repeats=2)
    assert rate.mean > 0
    assert rate.deviation >= 0


@pytest.mark.deep
def test_the_commands_print_what_they_find(folder, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("a1b2" * 100)
    assert main(["perplexity", "--model", str(folder), "--file", str(text)]) == 0
    assert capsys.readouterr().out.startswith("perplexity ")
    asked = ["--prompts", "16", "--outputs", "4", "--repeats", "2", "--form", "jsonl"]
    assert main(["bench", "--model", str(folder), *asked]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["test"] for row in rows] == ["pp16", "tg4"]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["perplexity"], 2, "no text is given"),
        (["perplexity", "--file", "/nowhere"], 2, "cannot be read as text"),
        (["perplexitty"], 2, "there is no command perplexitty"),
        (["bench", "--both", "512"], 2, "512,128"),
    ],
)
def test_bad_commands_are_refused(arguments, code, text, capsys):
    assert main(arguments) == code
    assert text in capsys.readouterr().err


def test_help_names_the_commands(capsys):
    assert main([]) == 0
    assert "perplexity|bench" in capsys.readouterr().out
    assert main(["bench", "--help"]) == 0
    assert "--prompts" in capsys.readouterr().out
