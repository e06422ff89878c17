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
    """Documents in tokens, end to end."""

    tokens: np.ndarray
    starts: np.ndarray

    @staticmethod
    def of(documents: Iterable[list[int]]) -> "Pool":
        arrays = [np.asarray(d, np.uint16) for d in documents]
        starts = np.cumsum([0, *(len(a) for a in arrays)])[:-1]
        return Pool(np.concatenate(arrays), starts.astype(np.int64))

    def window(self, rng: np.random.Generator, length: int, at_start: bool) -> np.ndarray:
        """`length` tokens from anywhere, or from the start of a document on."""
        last = len(self.tokens) - length
        start = int(rng.choice(self.starts[self.starts <= last])) if at_start else int(rng.integers(0, last + 1))
        return self.tokens[start : start + length].astype(np.int32)

    def packed(self, rng: np.random.Generator, length: int) -> np.ndarray:
        """Documents drawn one by one until `length` is full."""
        parts, full = [], 0
        while full < length:
            parts.append(self.document(rng))
            full += len(parts[-1])
        return np.concatenate(parts)[:length]

    def document(self, rng: np.random.Generator) -> np.ndarray:
        i = rng.integers(len(self.starts))
        return self.tokens[self.starts[i] : self.starts[i + 1] if i + 1 < len(self.starts) else None].astype(np.int32)


def build(folder: Path, vocabulary: int, files: list[corpus.File]) -> None:
    """Writes what training needs into `folder`: the tokenizer, the training files in tokens, the held-out files as text."""
    training = [f for f in files if not corpus.is_held_out(f.path)]
    tokenizer = corpus.train_tokenizer((f.text for f in training), vocabulary)
    bos, eos, user, assistant = corpus.control_ids(tokenizer)

    def encoded(texts: list[str]) -> list[list[int]]:
        return [e.ids for e in tokenizer.encode_batch(texts, add_special_tokens=False)]

    found = {f.source: f for file in training for f in corpus.functions(file.text)}.values()
    # head and body in tokens of their own, as when a body is asked for: text would often join the two in one token
    halves = zip(encoded([f.head for f in found]), encoded([f.source[len(f.head) :] for f in found]), strict=True)
    short = [(f, [*a, *b]) for f, (a, b) in zip(found, halves, strict=True) if len(a) + len(b) < LONGEST_FUNCTION]
    told = [(f, ids) for f, ids in short if f.summary and f.summary.isascii()]
    asked = encoded([f"{f.head}\n{f.summary}" for f, _ in told])
    pools = {
        "code": Pool.of([bos, *ids, eos] for ids in encoded([f.text for f in training])),
        "functions": Pool.of([bos, *ids, eos] for _, ids in short),
        "chat": Pool.of([bos, user, *q, assistant, *ids, eos] for q, (_, ids) in zip(asked, told, strict=True)),
    }
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    arrays = {f"{name}.{part}": array for name, pool in pools.items() for part, array in pool._asdict().items()}
    np.savez_compressed(folder / "train.npz", **arrays)
    held = [f for f in files if corpus.is_held_out(f.path)]
    (folder / "held_out.json").write_text(json.dumps([f._asdict() for f in held]))
    for name, pool in pools.items():
        print(f"{name}: {len(pool.starts):,} documents, {len(pool.tokens):,} tokens")
    print(f"held out: {len(held)} files, {sum(len(f.text.encode()) for f in held):,} bytes")


class Batches:
    """Rows of `length + 2` tokens and the loss weight of each; two more than the model reads, for the targets of MTP."""

    def __init__(self, folder: Path, mix: dict[str, float], answer_weight: float, seed: int):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        with np.load(folder / "train.npz") as arrays:
            self.pools = {n: Pool(arrays[f"{n}.tokens"], arrays[f"{n}.starts"]) for n in ("code", "functions", "chat")}
        self.writer = Writer(self.tokenizer, self.pools["code"].tokens)
        self.mix, self.answer_weight, self.seed = mix, answer_weight, seed

    def batch(self, step: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        made = [self.row(np.random.default_rng((self.seed, step, row)), length + 2) for row in range(rows)]
        return np.stack([tokens for tokens, _ in made]), np.stack([weight for _, weight in made])

    def row(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        kind = rng.choice(list(self.mix), p=np.array(list(self.mix.values())) / sum(self.mix.values()))
        if kind in TASKS:
            tokens, is_answer = self.writer.sample(rng, kind, length)
            return tokens, np.where(is_answer, self.answer_weight, float(kind != "pairs")).astype(np.float32)
        if kind == "loops":
            return self.loops(rng, length)
        pool = self.pools[kind]
        tokens = pool.window(rng, length, at_start=rng.random() < 0.3) if kind == "code" else pool.packed(rng, length)
        return tokens, np.ones(length, np.float32)

    def loops(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Functions that say a part of themselves over and over, then go on. From the third time on the part has a negative
        weight, to be unlearnt: greedy decoding of a small model ends in such loops, and no text shows it the way out."""
        tokens, weights, full = [], [], 0
        while full < length:
            text = self.pools["functions"].document(rng)
            last = int(rng.integers(4, len(text)))
            part = text[max(1, last - int(rng.choice([rng.integers(1, 6), rng.integers(4, 40)]))) : last]
            times = int(rng.integers(2, 3 + 60 // len(part)))
            tokens += [text[:last], np.tile(part, times), text[last:]]
            weights += [np.ones(last), np.zeros(len(part)), np.full(len(part) * (times - 1), -1.0), np.ones(len(text) - last)]
            full += len(text) + len(part) * times
        return np.concatenate(tokens)[:length], np.concatenate(weights)[:length].astype(np.float32)
