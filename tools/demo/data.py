"""Training batches: a pure function of the seed and the step, so that training resumes exactly."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers

from demo import corpus
from demo.tasks import TASKS, Writer

LONGEST_FUNCTION = 1024  # tokens


class Pool(NamedTuple):
    """Tokenised documents, concatenated."""

    tokens: np.ndarray
    starts: np.ndarray

    @staticmethod
    def of(documents: Iterable[list[int]]) -> "Pool":
        arrays = [np.asarray(d, np.uint16) for d in documents]
        starts = np.cumsum([0, *(len(a) for a in arrays)])[:-1]
        return Pool(np.concatenate(arrays), starts.astype(np.int64))

    def window(self, rng: np.random.Generator, length: int, at_start: bool) -> np.ndarray:
        """`length` tokens from a random position, or from the start of a random document."""
        last = len(self.tokens) - length
        start = (
            int(rng.choice(self.starts[self.starts <= last])) if at_start else int(rng.integers(0, last + 1))
        )
        return self.tokens[start : start + length].astype(np.int32)

    def packed(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Random documents, concatenated to `length` tokens."""
        parts, full = [], 0
        while full < length:
            parts.append(self.document(rng))
            full += len(parts[-1])
        return np.concatenate(parts)[:length]

    def document(self, rng: np.random.Generator) -> np.ndarray:
        i = rng.integers(len(self.starts))
        stop = self.starts[i + 1] if i + 1 < len(self.starts) else None
        return self.tokens[self.starts[i] : stop].astype(np.int32)


def build(folder: Path, vocabulary: int, files: list[corpus.File]) -> None:
    """Writes the inputs of training to `folder`: the tokenizer, the training files as tokens, the held-out files as text."""
    training = [f for f in files if not corpus.is_held_out(f.path)]
    tokenizer = corpus.train_tokenizer((f.text for f in training), vocabulary)
    pools = _pools(tokenizer, training)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    arrays = {
        f"{name}.{part}": array for name, pool in pools.items() for part, array in pool._asdict().items()
    }
    np.savez_compressed(folder / "train.npz", **arrays)
    held = [f for f in files if corpus.is_held_out(f.path)]
    (folder / "held_out.json").write_text(json.dumps([f._asdict() for f in held]))
    for name, pool in pools.items():
        print(f"{name}: {len(pool.starts):,} documents, {len(pool.tokens):,} tokens")
    print(f"held out: {len(held)} files, {sum(len(f.text.encode()) for f in held):,} bytes")


def _pools(tokenizer: tokenizers.Tokenizer, files: list[corpus.File]) -> dict[str, Pool]:
    """The training documents: whole files, functions, and conversations that ask for a function by its head and summary."""
    bos, eos, user, assistant = corpus.control_ids(tokenizer)
    functions = _functions(tokenizer, files)
    described = [(f, ids) for f, ids in functions if f.summary and f.summary.isascii()]
    questions = _encoded(tokenizer, [f"{f.head}\n{f.summary}" for f, _ in described])
    chats = zip(questions, described, strict=True)
    return {
        "code": Pool.of([bos, *ids, eos] for ids in _encoded(tokenizer, [f.text for f in files])),
        "functions": Pool.of([bos, *ids, eos] for _, ids in functions),
        "chat": Pool.of([bos, user, *question, assistant, *ids, eos] for question, (_, ids) in chats),
    }


def _functions(
    tokenizer: tokenizers.Tokenizer, files: list[corpus.File]
) -> list[tuple[corpus.Function, list[int]]]:
    """The files' different functions and their tokens, without the longest.

    Head and body are tokenised apart, as when a user asks for the body: otherwise one token often spans both."""
    found = {f.source: f for file in files for f in corpus.functions(file.text)}.values()
    heads = _encoded(tokenizer, [f.head for f in found])
    bodies = _encoded(tokenizer, [f.source[len(f.head) :] for f in found])
    whole = [(f, head + body) for f, head, body in zip(found, heads, bodies, strict=True)]
    return [(f, ids) for f, ids in whole if len(ids) < LONGEST_FUNCTION]


def _encoded(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]


class Batches:
    """Rows of `length + 2` tokens with the loss weight of each token; the two extra tokens are MTP's targets."""

    def __init__(self, folder: Path, mix: dict[str, float], answer_weight: float, seed: int):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        with np.load(folder / "train.npz") as arrays:
            self.pools = {
                n: Pool(arrays[f"{n}.tokens"], arrays[f"{n}.starts"]) for n in ("code", "functions", "chat")
            }
        self.writer = Writer(self.tokenizer, self.pools["code"].tokens)
        self.mix, self.answer_weight, self.seed = mix, answer_weight, seed

    def batch(self, step: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        made = [self.row(np.random.default_rng((self.seed, step, row)), length + 2) for row in range(rows)]
        return np.stack([tokens for tokens, _ in made]), np.stack([weight for _, weight in made])

    def row(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        shares = np.array(list(self.mix.values()))
        kind = rng.choice(list(self.mix), p=shares / sum(self.mix.values()))
        if kind in TASKS:
            tokens, is_answer = self.writer.sample(rng, kind, length)
            return tokens, np.where(is_answer, self.answer_weight, float(kind != "pairs")).astype(np.float32)
        if kind == "loops":
            return self.loops(rng, length)
        pool = self.pools[kind]
        tokens = (
            pool.window(rng, length, at_start=rng.random() < 0.3)
            if kind == "code"
            else pool.packed(rng, length)
        )
        return tokens, np.ones(length, np.float32)

    def loops(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Functions that repeat a part of themselves, then continue.

        From the third repetition on the part has a negative weight, so that the model unlearns it: greedy decoding of a small
        model ends in such loops, and no text shows how to leave them."""
        tokens, weights, full = [], [], 0
        while full < length:
            text = self.pools["functions"].document(rng)
            last = int(rng.integers(4, len(text)))
            part = text[max(1, last - int(rng.choice([rng.integers(1, 6), rng.integers(4, 40)]))) : last]
            times = int(rng.integers(2, 3 + 60 // len(part)))
            tokens += [text[:last], np.tile(part, times), text[last:]]
            weights += [
                np.ones(last),
                np.zeros(len(part)),
                np.full(len(part) * (times - 1), -1.0),
                np.ones(len(text) - last),
            ]
            full += len(text) + len(part) * times
        return np.concatenate(tokens)[:length], np.concatenate(weights)[:length].astype(np.float32)
