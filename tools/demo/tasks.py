"""Recall tasks: conversations about a long context, which is the only place of the answers.

`passkey`: a number in a comment inside Python source. `variable`: many assignments inside Python source. `pairs`: only a list of
keys and values. `copy`: a line of words inside Python source, to repeat exactly."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tokenizers

from demo.corpus import control_ids

_CONSONANTS, _VOWELS = "bcdfghjklmnprstvwz", "aeiou"
QUESTIONS = 8  # most questions about one context


class Fact(NamedTuple):
    text: str
    question: str
    answer: str


class Task(NamedTuple):
    fact: Callable[[np.random.Generator], Fact]
    spacing: int | None  # mean tokens of source between facts; 0: only facts, None: a single fact


def word(rng: np.random.Generator) -> str:
    """A pronounceable word that is not in the source, such as `zovuka`."""
    return "".join(
        rng.choice(list(_CONSONANTS)) + rng.choice(list(_VOWELS)) for _ in range(rng.integers(2, 5))
    )


def number(rng: np.random.Generator) -> str:
    return str(rng.integers(10_000, 100_000))


def passkey(rng: np.random.Generator) -> Fact:
    key = number(rng)
    return Fact(f"\n# The pass key is {key}. Remember it.\n", "What is the pass key?", key)


def variable(rng: np.random.Generator) -> Fact:
    name, value = f"{word(rng)}_{word(rng)}", number(rng)
    return Fact(f"\n{name} = {value}\n", f"print({name})", value)


def pairs(rng: np.random.Generator) -> Fact:
    key, value = word(rng) + word(rng), number(rng)
    return Fact(f"{key}: {value}\n", f"{key}?", value)


def copy(rng: np.random.Generator) -> Fact:
    words = " ".join(word(rng) for _ in range(rng.integers(4, 12)))
    return Fact(f"\n# Copy: {words}\n", "Copy the words.", words)


TASKS = {
    "passkey": Task(passkey, None),
    "variable": Task(variable, 96),
    "pairs": Task(pairs, 0),
    "copy": Task(copy, None),
}


class Writer:
    """Writes tasks as tokens; `source` is a long run of tokens from which filling is taken."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: np.ndarray):
        self.tokenizer, self.source = tokenizer, source
        self.bos, self.eos, self.user, self.assistant = control_ids(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def filling(self, rng: np.random.Generator, count: int) -> list[int]:
        start = rng.integers(0, len(self.source) - count)
        run = self.source[start : start + count]
        # No control tokens inside a message
        return np.where(run < self.user + 2, self.encode("\n")[0], run).tolist()

    def context(self, rng: np.random.Generator, task: Task, room: int) -> tuple[list[int], list[Fact]]:
        """At most `room` tokens, and their facts in order; the first fact comes first."""
        tokens, facts = [], []
        while True:
            fact = task.fact(rng)
            text = self.encode(fact.text)
            if len(tokens) + len(text) > room:
                return tokens, facts
            tokens, facts = tokens + text, [*facts, fact]
            gap = room - len(tokens) if task.spacing is None else int(rng.integers(0, 2 * task.spacing + 1))
            tokens += self.filling(rng, min(gap, room - len(tokens)))
            if task.spacing is None:
                return tokens, facts

    def sample(self, rng: np.random.Generator, name: str, length: int) -> tuple[np.ndarray, np.ndarray]:
        """A conversation of `length` tokens for training, and a mask of its answers."""
        task = TASKS[name]
        most = 1 if task.spacing is None else QUESTIONS
        room = int(rng.integers(length // 8, length - 32 * most - 32))
        lead = self.filling(rng, int(rng.integers(0, room // 2))) if task.spacing != 0 else []
        context, facts = self.context(rng, task, max(room - len(lead), 96))
        tokens, answers = [self.bos, self.user, *lead, *context], []
        for i in rng.permutation(len(facts))[:most]:
            tokens += self.question(facts[i], first=not answers)
            answer = [*self.encode(facts[i].answer), self.eos]
            answers.append(slice(len(tokens), len(tokens) + len(answer)))
            tokens += answer
        rest = length - len(tokens)
        if rest > 0:
            tokens += [self.bos, *self.filling(rng, rest - 1)]
        is_answer = np.zeros(length, bool)
        for answer in answers:
            is_answer[answer] = True
        return np.asarray(tokens[:length], np.int32), is_answer

    def question(self, fact: Fact, first: bool) -> list[int]:
        """A question up to the answer; the first one continues the user's message with the context."""
        turn = [] if first else [self.user]
        return [*turn, *self.encode("\n" + fact.question), self.assistant]

    def prompt(
        self, rng: np.random.Generator, name: str, distance: int, longest: int
    ) -> tuple[list[int], list[int]]:
        """A prompt that asks for a fact about `distance` tokens back, and the answer; together at most `longest` tokens."""
        _, facts = context = self.context(rng, TASKS[name], distance)
        question = self.encode("\n" + facts[0].question)
        answer = self.encode(facts[0].answer)
        head = [self.bos, self.user]
        spare = longest - len(answer) - 1 - len(head) - len(question) - 1
        return [*head, *context[0][:spare], *question, self.assistant], answer
