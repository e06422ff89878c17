"""Quality of the demo model: bits per byte, MTP acceptance, recall by distance, functions that parse, experts' loads.

    python benchmarks/quality.py --held-out WORK/corpus/held_out.json --reference WORK/bf16 --out quality.json

`--reference` is the same model before FP8. Without `--held-out` the files are selected by the same rule from this Python's
library."""

import ast
import codeop
import itertools
import json
import lzma
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import report
from flax import nnx

sys.path.insert(0, str(Path(__file__).parent.parent / "tools"))
from demo import corpus, tasks
from mla_jax import LLM, SamplingParams
from mla_jax.base.batch import Batch, bucket
from mla_jax.cache import paged

# In tokens: every token except a file's first ones has at least STRIDE tokens of context
WINDOW, STRIDE = 8192, 4096
CHUNK = 256  # tokens per call
DISTANCES = (256, 512, 1024, 2048, 4096, 8192)


def windows(ids: list[int]):
    """`(tokens, number of new ones at the end)` over a file that starts with BOS."""
    yield ids[:WINDOW], min(len(ids), WINDOW) - 1
    for stop in range(WINDOW, len(ids), STRIDE):
        new = min(STRIDE, len(ids) - stop)
        yield ids[stop + new - WINDOW : stop + new], new


@partial(jax.jit, static_argnames="graph", donate_argnames="pool")
def read(graph, state, pool, table, tokens, following, held, mask):
    """Reads a chunk of rows after the `held` tokens that are cached of each.

    Returns, per position, the bits of the following token, the best next token, and MTP's best token after the following one;
    and the number of tokens of each expert."""
    model, batch = nnx.merge(graph, state), Batch.after(held, mask, table)
    hidden, pool, aux = model(tokens, batch, pool, collect=True)
    drafted, pool, ahead = model.draft(0, following, hidden, batch, pool, collect=True)
    logits = model.unembed(hidden)
    bits = -jnp.take_along_axis(jax.nn.log_softmax(logits), following[..., None], -1)[..., 0] / jnp.log(2)
    found = bits, jnp.argmax(logits, -1), jnp.argmax(model.unembed(drafted), -1)
    return pool, found, jnp.stack([*aux["load"], *ahead["load"]])


def read_all(llm: LLM, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """`read` for full rows, chunk by chunk: three arrays `[B T]` and the loads."""
    graph, state = nnx.split(llm.model)
    longest = max(map(len, rows))
    slots = bucket(longest, CHUNK)
    tokens, following, mask = padded(rows, slots)
    table = paged.in_order(len(rows), slots)
    pool, found, load = llm.model.new_pool(table.size), [], 0
    for start in range(0, longest, CHUNK):
        here, held = slice(start, start + CHUNK), mask[:, :start].sum(1, dtype=np.int32)
        pool, chunk, counts = read(
            graph, state, pool, table, tokens[:, here], following[:, here], held, mask[:, here]
        )
        found.append([np.asarray(part) for part in chunk])
        load = load + np.asarray(counts)
    bits, best, drafted = (np.concatenate(parts, 1) for parts in zip(*found, strict=True))
    return bits, best, drafted, load


def padded(rows: list[list[int]], slots: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tokens `[B slots]`, the following ones, and the mask of those that exist; padding is 0."""
    tokens = np.full((len(rows), slots + 1), -1, np.int32)
    for row, given in zip(tokens, rows, strict=True):
        row[: len(given)] = given
    mask, tokens = tokens[:, :-1] >= 0, np.maximum(tokens, 0)
    return tokens[:, :-1], tokens[:, 1:], mask


def held_out_bits(llm: LLM, texts: list[str]) -> dict:
    """Total bits over total bytes, the share of positions where MTP's token for t + 2 is the main model's at t + 1, and loads."""
    total = agreed = judged = 0.0
    load = 0
    for tokens, new in (window for text in texts for window in windows(llm.tokenizer.encode(text))):
        bits, best, drafted, counts = read_all(llm, [tokens])
        scored = slice(len(tokens) - 1 - new, len(tokens) - 1)
        total, judged, load = total + bits[0, scored].sum(), judged + new, load + counts
        agreed += (drafted[0, :-1][scored] == best[0, 1:][scored]).sum()
    share = load / load.sum(-1, keepdims=True)
    return {
        "bits_per_byte": float(total) / sum(len(t.encode()) for t in texts),
        "mtp_acceptance": float(agreed) / judged,
        # Share of a layer's tokens; the last row is MTP's
        "expert_load": [[round(float(s), 4) for s in row] for row in share],
    }


def xz_bits(texts: list[str]) -> float:
    """Bits per byte of `xz -9e`, each file alone."""
    packed = sum(len(lzma.compress(t.encode(), preset=9 | lzma.PRESET_EXTREME)) for t in texts)
    return 8 * packed / sum(len(t.encode()) for t in texts)


def recall(llm: LLM, source: list[int], samples: int) -> list[dict]:
    """The share of answers that greedy decoding gives exactly, for each task and distance.

    Prompt and answer are read at once: decoding gives an answer if each of its tokens is the best one after those before."""
    writer, rows = tasks.Writer(llm.tokenizer.model, np.asarray(source)), []
    for name, distance in itertools.product(tasks.TASKS, DISTANCES):
        drawn = [
            writer.prompt(np.random.default_rng((7, distance, i)), name, distance, llm.context)
            for i in range(samples)
        ]
        together, right = max(1, WINDOW // distance), 0
        for part in (drawn[i : i + together] for i in range(0, samples, together)):
            best = read_all(llm, [prompt + answer for prompt, answer in part])[1]
            right += sum(
                best[i, len(p) - 1 : len(p) + len(a) - 1].tolist() == a for i, (p, a) in enumerate(part)
            )
        rows.append({"task": name, "distance": distance, "accuracy": right / samples, "samples": samples})
        print(f"{name} at {distance}: {right} of {samples}", file=sys.stderr)
    return rows


def continues_well(head: str, continuation: str) -> bool:
    """Whether head and continuation parse up to the last complete statement, with at least one statement in the body.

    An incomplete last line is dropped; a rest that does not parse must be unfinished, not wrong."""
    lines = (head + continuation).splitlines(keepends=True)
    if not lines[-1].endswith("\n") and not parses("".join(lines)):
        lines.pop()
    first = head.count("\n") + 1
    return is_unfinished("".join(lines)) and any(
        parses("".join(lines[:n])) for n in range(first + 1, len(lines) + 1)
    )


def parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def is_unfinished(source: str) -> bool:
    """Whether `source` parses, or would with more text."""
    try:
        compile(
            source,
            "",
            "exec",
            ast.PyCF_ONLY_AST | codeop.PyCF_ALLOW_INCOMPLETE_INPUT | codeop.PyCF_DONT_IMPLY_DEDENT,
        )
    except SyntaxError as e:
        return e.msg == "incomplete input"
    return True


def functions(llm: LLM, files: list[corpus.File], count: int) -> dict:
    heads = corpus.held_out_heads(files, count)
    outputs = llm.generate(heads, SamplingParams(temperature=0, max_tokens=192))
    good = [continues_well(head, o.text) for head, o in zip(heads, outputs, strict=True)]
    bad = [head + o.text for head, o, well in zip(heads, outputs, good, strict=True) if not well]
    return {"heads": count, "parse": sum(good) / count, "do_not_parse": bad}


def draw(rows: list[dict], load: list[list[float]], image: Path) -> None:
    """Plots recall by distance, and each layer's expert loads."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained", width_ratios=(3, 2))
    for (name, part), marker in zip(itertools.groupby(rows, lambda row: row["task"]), "os^D", strict=True):
        points = [(row["distance"], row["accuracy"]) for row in part]
        left.plot(*zip(*points, strict=True), marker=marker, label=name, linewidth=1)
    left.set_xscale("log", base=2)
    left.set_xticks(DISTANCES, [f"{d:,}" for d in DISTANCES])
    left.set(title="answers recalled whole", xlabel="tokens back", ylim=(0, 1.05))
    left.axvline(2048, color="#888888", linewidth=1, linestyle=":")
    left.text(2048, 0.03, " trained up to here, then extended", color="#666666", fontsize=8)
    left.legend(frameon=False)
    picture = right.imshow(np.array(load) * len(load[0]), vmin=0, vmax=2, cmap="RdBu_r", aspect="auto")
    right.set(title="share of each expert, of the mean", xlabel="expert")
    right.set_xticks(range(len(load[0])))
    right.set_yticks(range(len(load)), [*(f"layer {i + 1}" for i in range(len(load) - 1)), "MTP"])
    figure.colorbar(picture)
    figure.savefig(image, dpi=110)


def main():
    parser = report.arguments(__doc__.split("\n")[0])
    parser.add_argument("--model", help="model folder (default: the bundled demo model)")
    parser.add_argument("--reference", help="the same model before FP8")
    parser.add_argument(
        "--held-out", type=Path, help="held_out.json of the corpus; else this Python's library"
    )
    parser.add_argument("--samples", type=int, default=50, help="prompts for each recall task and distance")
    parser.add_argument("--plot", type=Path, help="plot recall and loads to this file")
    args = parser.parse_args()
    if args.held_out:
        files = [corpus.File(**f) for f in json.loads(args.held_out.read_text())]
    else:
        files = [f for f in corpus.sources() if corpus.is_held_out(f.path)]
    texts = corpus.judged(files)
    llm = LLM(args.model)
    figures = {"files": len(texts), "bytes": sum(len(t.encode()) for t in texts), "xz": xz_bits(texts)}
    figures |= held_out_bits(llm, texts)
    if args.reference:
        figures["before_fp8"] = held_out_bits(LLM(args.reference), texts)["bits_per_byte"]
    figures["functions"] = functions(llm, files, 50)
    print(json.dumps(figures, indent=1), file=sys.stderr)
    rows = recall(llm, [i for t in texts for i in llm.tokenizer.encode(t)], args.samples)
    report.show(rows, args.out, **figures)
    if args.plot:
        draw(rows, figures["expert_load"], args.plot)


if __name__ == "__main__":
    main()
