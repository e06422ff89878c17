"""Recall tasks: the answer stands in the prompt, as far back as asked, and training rows mark it."""

import numpy as np
import pytest

from demo import corpus, data
from demo.tasks import TASKS, Writer, word

SOURCE = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(2000))


@pytest.fixture(scope="module")
def writer():
    rng = np.random.default_rng(0)
    tokenizer = corpus.train_tokenizer([SOURCE, " ".join(word(rng) for _ in range(3000))], 700)
    return Writer(tokenizer, np.asarray(tokenizer.encode(SOURCE).ids))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("distance", [256, 1024, 2048])
def test_the_answer_stands_once_in_the_prompt_and_about_so_far_back(writer, task, distance):
    prompt, answer = writer.prompt(np.random.default_rng(3), task, distance, 2048)
    assert len(prompt) + len(answer) <= 2048
    assert prompt[0] == writer.bos
    assert prompt[-1] == writer.assistant
    text, asked = writer.tokenizer.decode(prompt), writer.tokenizer.decode(answer)
    assert text.count(asked) == 1
    back = len(writer.encode(text[text.index(asked) :]))
    assert 0.8 * distance - 64 < back < distance + 96


@pytest.mark.parametrize("task", TASKS)
def test_training_rows_have_their_length_and_mark_answers_that_stand_before(writer, task):
    for seed in range(8):
        tokens, is_answer = writer.sample(np.random.default_rng(seed), task, 1000)
        assert tokens.shape == is_answer.shape == (1000,)
        edges = np.flatnonzero(np.diff(is_answer.astype(int)))
        assert len(edges) % 2 == 0
        assert len(edges) >= 2
        for start, stop in edges.reshape(-1, 2) + 1:
            assert tokens[start - 1] == writer.assistant
            assert tokens[stop - 1] == writer.eos
            answer = writer.tokenizer.decode(tokens[start : stop - 1].tolist())
            assert answer in writer.tokenizer.decode(tokens[:start].tolist())


def test_filling_holds_no_control_tokens(writer):
    control = Writer(writer.tokenizer, np.arange(5).repeat(100))
    assert min(control.filling(np.random.default_rng(0), 300)) >= len(corpus.SPECIALS)


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    folder, library = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("library")
    for i in range(40):
        (library / f"module_{i}.py").write_text(f'def first_{i}(x):\n    """Does {i}."""\n    y = x * {i}\n    return y\n' * 20)
    data.build(folder, 500, corpus.sources(library))
    return folder


def test_batches_depend_on_seed_and_step_alone(batches):
    mix = {"code": 0.4, "functions": 0.1, "loops": 0.1, "chat": 0.1, **dict.fromkeys(TASKS, 0.1)}
    one, two = (data.Batches(batches, mix, 4.0, seed=5) for _ in range(2))
    np.testing.assert_array_equal(one.batch(7, 6, 600)[0], two.batch(7, 6, 600)[0])
    assert not np.array_equal(one.batch(7, 6, 600)[0], one.batch(8, 6, 600)[0])
    assert one.batch(7, 6, 600)[1].shape == (6, 602)


def test_loops_are_unlearnt_from_their_third_turn_on(batches):
    tokens, weight = data.Batches(batches, {"loops": 1.0}, 4.0, seed=5).row(np.random.default_rng(1), 2000)
    for stop in np.flatnonzero((weight[:-1] >= 0) & (weight[1:] < 0)) + 1:  # where a third turn starts
        copied = int(np.argmax(weight[stop - 1 :: -1] != 0))  # the second turn's tokens, of weight 0
        turn = min(copied, 2000 - stop)
        assert (tokens[stop : stop + turn] == tokens[stop - copied : stop - copied + turn]).all()
        assert (tokens[stop - copied : stop] == tokens[stop - 2 * copied : stop - copied]).all()
