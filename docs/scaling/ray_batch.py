"""Answers a batch file by the LLMs of all workers of a Ray cluster.

    python docs/scaling/ray_batch.py --workers 8 --gpus 1 --model /models/v2-lite --batch-file in.jsonl --out out.jsonl

Flags that are not the script's own are those of `python -m mla_jax.generate`. So are the lines of both files, the exit codes, and
that the same command resumes behind the last complete answer."""

import argparse
import functools
import hashlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mla_jax import LLM, BadRequest, MlaJaxError
from mla_jax.base.files import explained
from mla_jax.generate import Command, parse, refuse_contradictions, with_schema
from mla_jax.ui.batch_file import TEXT_THREADS, Answers, Line, ahead, batch_lines, numbered


class Worker:
    """An LLM in a process of its own. It answers pieces of the file, several at a time: its engine makes one batch of them."""

    def __init__(self, command: Command, settings: bytes):
        self.llm, self.sampling, self.settings = LLM(options=command.options), command.sampling, settings
        self.threads = ThreadPoolExecutor(TEXT_THREADS)

    def __call__(self, piece: dict[str, Any]) -> dict[str, Any]:
        found = zip(piece["number"].tolist(), piece["data"], strict=True)
        read = (Line.of(number, data, self.settings) for number, data in found)
        lines = list(ahead(lambda line: line.checked(self.llm.inputs, self.sampling), read, self.threads))
        outputs = self.llm.serve(line.requests for line in lines)
        answers = [line.answer(given) for line, given in zip(lines, outputs, strict=True)]
        return {"answer": answers, "refused": [line.error is not None for line in lines]}


def main(arguments: list[str]) -> int:
    """The exit code: 0 done, 2 if a line was refused."""
    own, rest = flags().parse_known_args(arguments)
    command = with_schema(parse(rest))
    refuse_contradictions(command)
    prompts, out = command.prompt.batch_file, command.output.out
    if prompts is None or prompts == "-" or out is None:
        raise BadRequest("the script needs --batch-file FILE and --out FILE")
    if command.options.processes.several:
        raise BadRequest("a worker is one process", "leave --processes out")
    settings = digest(command)
    with explained(prompts, "read"):
        file = open(prompts, "rb")  # noqa: SIM115 closed below
    with file, Answers(str(out)) as answers:
        answers.skip(batch_lines(file, settings), str(prompts))
        file.seek(0)
        left = itertools.islice(numbered(file), answers.count, None)
        for answer, refused in answered(left, own, command, settings):
            answers.write(answer, refused)
        return 2 if answers.refused else 0


def flags() -> argparse.ArgumentParser:
    """The script's own."""
    plain = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, formatter_class=plain)
    add = functools.partial(parser.add_argument, type=int, metavar="N")
    add("--workers", required=True, help="LLMs in the cluster")
    add("--gpus", default=0, help="GPUs of each; with several give --mesh, too (0: it computes on the CPU)")
    add("--cpus", default=1, help="CPU cores that Ray counts for each (1)")
    add("--lines", default=1000, help="lines that a worker takes at a time (1,000)")
    return parser


def digest(command: Command) -> bytes:
    """Of all that decides the answers besides the lines, as far as it can be known without the model's files."""
    found = [str(command.options.model.model), command.options.altering(), vars(command.sampling)]
    return hashlib.sha256(repr(found).encode()).digest()


def answered(
    lines: Iterable[tuple[int, bytes]], own: argparse.Namespace, command: Command, settings: bytes
) -> Iterator[tuple[bytes, bool]]:
    """The answers to numbered lines in their order, and whether each line was refused."""
    import pyarrow
    import ray
    from ray.data import ActorPoolStrategy, DataContext, from_arrow_refs

    ray.init()
    DataContext.get_current().execution_options.preserve_order = True
    tables = (
        {"number": [n for n, _ in piece], "data": [data for _, data in piece]}
        for piece in pieces(lines, own.lines)
    )
    stored = [ray.put(pyarrow.table(table)) for table in tables]
    if not stored:
        return
    # Two pieces at a time: rows that the end of one leaves empty are taken by the next
    pool = ActorPoolStrategy(
        size=own.workers, max_concurrent_calls_per_actor=2, enable_true_multi_threading=True
    )
    answers = from_arrow_refs(stored).map_batches(
        Worker,
        batch_size=own.lines,
        compute=pool,
        fn_constructor_args=(command, settings),
        num_gpus=own.gpus,
        num_cpus=own.cpus,
    )
    for row in answers.iter_rows():
        yield row["answer"], row["refused"]


def pieces(lines: Iterable[tuple[int, bytes]], size: int) -> Iterator[list[tuple[int, bytes]]]:
    """Lines in lists of this size; the last one may be shorter."""
    given = iter(lines)
    while piece := list(itertools.islice(given, size)):
        yield piece


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except MlaJaxError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
