"""Makes the bundled demo model: the corpus from Python's standard library, training on one GPU, the release folder.

    python tools/train_demo.py corpus --work WORK     # on any machine: tokenizer and tokens
    python tools/train_demo.py train --work WORK      # on a GPU; a stopped run resumes
    python tools/train_demo.py ship --work WORK       # WORK/demo: FP8 safetensors, config, tokenizer, curves

Needs the extra `train`."""

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tyro
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeRemainingColumn

from demo import corpus as library
from demo import data, evaluate
from demo.recipe import CHAT, VOCABULARY, Phase, Recipe
from demo.training import Model, Trained, start, step_of
from mla_jax.weights.save import save

GENERATION = {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
AHEAD = 8  # batches prepared in advance
LOOK = 25  # steps between lines of the log
JUDGE = 500  # steps between evaluations on the held-out files

app = tyro.extras.SubcommandApp()


@app.command
def corpus(work: Path) -> None:
    """Collects the corpus, trains the tokenizer and writes both to WORK/corpus."""
    data.build(work / "corpus", VOCABULARY, library.sources())


@app.command
def train(work: Path, recipe: Recipe = Recipe(), minutes: float = 20.0) -> None:  # noqa: B008
    """Trains in WORK/run for at most `minutes`, and resumes the last run."""
    run, first = Run(work, recipe, minutes), 0
    trained = run.restored()
    for phase, extended in zip(recipe.phases, (False, True), strict=True):
        if int(trained.step) < first + phase.steps and run.has_time:
            trained = run.phase(trained, phase, first, extended)
        first += phase.steps
    run.save(trained)


@app.command
def ship(work: Path) -> None:
    """Writes the trained model to WORK/demo in FP8, as DeepSeek releases its models, and to WORK/bf16 for comparison."""
    recipe = Recipe(**json.loads((work / "run/recipe.json").read_text()))
    with np.load(work / "run/weights.npz") as arrays:
        model = Model(recipe.config(extended=True))(
            {path: jnp.asarray(arrays[path]) for path in arrays.files}
        )
    bos, eos, pad = library.BOS, library.EOS, library.PAD
    settings = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": recipe.extended_length,
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": pad,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT,
        },
        "generation_config.json": GENERATION,
    }
    for folder, fp8 in ((work / "demo", True), (work / "bf16", False)):
        save(model, folder, fp8=fp8)
        shutil.copy(work / "corpus/tokenizer.json", folder)
        for name, content in settings.items():
            (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    evaluate.draw(work / "run/log.jsonl", work / "demo/training.png")


class Run:
    """A training run in WORK/run: its checkpoints, its log, its time limit."""

    def __init__(self, work: Path, recipe: Recipe, minutes: float):
        self.recipe, self.corpus, self.folder = recipe, work / "corpus", (work / "run").absolute()
        self.until, self.console = time.monotonic() + 60 * minutes, Console(stderr=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = self.folder / "recipe.json"
        if kept.exists() and json.loads(kept.read_text()) != asdict(recipe):
            raise SystemExit(
                f"error: {self.folder} was started with another recipe\n  resume that one, or delete the folder"
            )
        kept.write_text(json.dumps(asdict(recipe), indent=1) + "\n")
        self.checkpoints = ocp.CheckpointManager(
            self.folder / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=1)
        )

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.until

    def restored(self) -> Trained:
        """The newest checkpoint, or a fresh start."""
        trained, last = start(self.recipe), self.checkpoints.latest_step()
        if last is not None:
            trained = cast(
                Trained, self.checkpoints.restore(last, args=ocp.args.StandardRestore(cast(Any, trained)))
            )
        count = sum(value.size for value in trained.values.values())
        self.console.print(f"{count:,} parameters; from step {int(trained.step):,}")
        return trained

    def save(self, trained: Trained) -> None:
        """Writes a checkpoint to resume from, and the weights by name."""
        self.checkpoints.save(int(trained.step), args=ocp.args.StandardSave(cast(Any, trained)))
        self.checkpoints.wait_until_finished()
        arrays: dict[str, Any] = {
            path: np.asarray(value) for path, value in (trained.values | trained.bias).items()
        }
        np.savez(self.folder / "weights.npz", **arrays)
        self.console.print(f"at step {int(trained.step):,} of {self.recipe.steps:,}")

    def phase(self, trained: Trained, phase: Phase, first: int, extended: bool) -> Trained:
        """Trains until the phase or the time is over; writes a line of the log every LOOK steps."""
        config, last = self.recipe.config(extended), first + phase.steps
        step = step_of(self.recipe, config)
        held = evaluate.HeldOut(self.corpus, config, phase.rows, phase.length)
        batches = data.Batches(self.corpus, phase.mix, self.recipe.answer_weight, self.recipe.seed)
        with self.progress() as bar:
            task = bar.add_task(f"{phase.length} tokens", total=last, completed=int(trained.step), said="")
            clock = time.monotonic()
            for done, batch in ahead(batches, phase, int(trained.step), last):
                trained, figures = step(trained, *batch)
                if done % LOOK and done < last:
                    continue
                row = {name: float(value) for name, value in figures.items()}
                row["tokens_per_s"] = (done % LOOK or LOOK) * self.recipe.tokens / (time.monotonic() - clock)
                if done % JUDGE == 0 or done == last or not self.has_time:
                    row["held_out"] = held.bits_per_byte(trained.values, trained.bias)
                self.log(done, row)
                bar.update(
                    task, completed=done, said=f"loss {row['loss']:.3f}  {row['tokens_per_s']:,.0f} tok/s"
                )
                if not self.has_time:
                    break
                clock = time.monotonic()
        return trained

    def progress(self) -> Progress:
        columns = (
            *Progress.get_default_columns()[:2],
            TextColumn("{task.fields[said]}"),
            TimeRemainingColumn(),
        )
        return Progress(*columns, console=self.console, disable=not self.console.is_terminal)

    def log(self, step: int, row: dict[str, float]) -> None:
        if not np.isfinite(row["loss"]):
            raise SystemExit(f"error: the loss is {row['loss']} at step {step:,}; lower the learning rate")
        with (self.folder / "log.jsonl").open("a") as file:
            file.write(json.dumps({**row, "step": step, "tokens": step * self.recipe.tokens}) + "\n")
        if "held_out" in row:
            said = f"loss {row['loss']:.3f}, held out {row['held_out']:.3f} bits/byte, {row['tokens_per_s']:,.0f} tokens/s"
            self.console.print(f"step {step:,}: {said}")


def ahead(
    batches: data.Batches, phase: Phase, begun: int, last: int
) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray]]]:
    """Batches that threads prepare in advance, each with the number of steps done after it."""
    with ThreadPoolExecutor(AHEAD) as pool:
        queue = {
            n: pool.submit(batches.batch, n, phase.rows, phase.length)
            for n in range(begun, min(begun + AHEAD, last))
        }
        try:
            for number in range(begun, last):
                yield number + 1, queue.pop(number).result()
                if number + AHEAD < last:
                    queue[number + AHEAD] = pool.submit(
                        batches.batch, number + AHEAD, phase.rows, phase.length
                    )
        finally:
            pool.shutdown(cancel_futures=True)


if __name__ == "__main__":
    app.cli()
