"""Evaluation of a training run: bits per byte of the held-out files, and the curves from its log."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jaxtyping import Array

from demo import corpus
from demo.training import Model, Values, losses
from mla_jax import Config


class HeldOut:
    """The held-out files in windows of `length` tokens that do not overlap: fast, and a pessimistic estimate."""

    def __init__(self, folder: Path, config: Config, rows: int, length: int):
        files = [corpus.File(**f) for f in json.loads((folder / "held_out.json").read_text())]
        texts = corpus.judged(files)
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.bytes, self.rows = sum(len(t.encode()) for t in texts), rows
        encoded = [
            [config.bos_token_id, *e.ids] for e in tokenizer.encode_batch(texts, add_special_tokens=False)
        ]
        windows = [ids[i : i + length + 1] for ids in encoded for i in range(0, len(ids) - 1, length)]
        shape = (len(windows) + -len(windows) % rows, length + 2)
        self.tokens, self.weight = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for tokens, weight, window in zip(self.tokens, self.weight, windows, strict=False):
            tokens[: len(window)], weight[1 : len(window)] = window, 1
        build = Model(config)

        def losses_of(values: Values, tokens: Array, weight: Array):
            return losses(
                build({path: value.astype(jnp.bfloat16) for path, value in values.items()}), tokens, weight
            )

        self.losses = jax.jit(losses_of)

    def bits_per_byte(self, values: Values, bias: dict[str, Array]) -> float:
        nats = 0.0
        for i in range(0, len(self.tokens), self.rows):
            tokens, weight = self.tokens[i : i + self.rows], self.weight[i : i + self.rows]
            nats += float(self.losses(values | bias, tokens, weight).main) * float(weight[:, 1:-1].sum())
        return nats / np.log(2) / self.bytes


def draw(log: Path, image: Path) -> None:
    """Plots the log of a run."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.2), layout="constrained")
    seen = [r["tokens"] / 1e6 for r in rows]
    for name, label in (("loss", "next token"), ("mtp", "MTP")):
        axes[0].plot(seen, [r[name] for r in rows], label=label, linewidth=1)
    axes[0].set(title="training loss, nats per token", xlabel="million tokens", ylim=(0.5, 6))
    axes[0].legend(frameon=False)
    judged = [(r["tokens"] / 1e6, r["held_out"]) for r in rows if r.get("held_out")]
    axes[1].plot(*zip(*judged, strict=True), marker=".")
    axes[1].set(title="held-out bits per byte", xlabel="million tokens", ylim=(0.5, 1.6))
    for name, label in (
        ("acceptance", "MTP agrees with the main model"),
        ("least_load", "least loaded expert, of the mean"),
    ):
        axes[2].plot(seen, [r[name] for r in rows], label=label, linewidth=1)
    axes[2].set(title="shares", xlabel="million tokens", ylim=(0, 1))
    axes[2].legend(frameon=False)
    figure.savefig(image, dpi=80)
